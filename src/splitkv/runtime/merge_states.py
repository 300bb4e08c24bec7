"""merge_states: attention over disjoint sets of keys put together, as one launch on a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from splitkv.core.errors import (
    dtype_name,
    expect_device,
    expect_dtype,
    expect_last_dim_contiguous,
    expect_shape,
)
from splitkv.core.problem import expect_no_grad_with_out, expect_out
from splitkv.reference import expect_states
from splitkv.reference import merge_states as merge_in_torch
from splitkv.runtime.call_cache import device_to_enter, launch_on
from splitkv.runtime.dispatch import is_plain, needs_grad

MERGED = ("bfloat16", "float16", "float32")
"""The types of `out` that the kernel takes; its LSEs are fp32."""


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *more: Tensor,
    sink_logits: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    out_a, out_b  [batch, seqlen_q, num_heads, head_dim_v], or packed [total_q, num_heads,
                  head_dim_v], of any floating types; what a row holds whose lse is -inf is not used
    lse_a, lse_b  [batch, num_heads, seqlen_q], or [num_heads, total_q]: the natural LSE, as
                  `return_lse` gives it, without sink logits
    more          out_c, lse_c, and so on: any number of states
    sink_logits   [num_heads], which join the denominator of the result, once
    out, lse      where to write the results: of the shapes of out_a and lse_a, any strides, each
                  element in memory of its own, which may be that of one of the states; out of any
                  floating type with a contiguous last dimension, lse fp32. Only where no gradient
                  is recorded

    Returns (out, lse): out in the type of out_a and rounded once, lse without the sinks. Rows of
    which no state saw a key give 0 and -inf. Differentiable in torch operations. Without a gradient
    a GPU merges states of bf16, fp16 and fp32 in one launch, which a CUDA graph can capture; states
    whose strides differ from the first one's are copied before it.

    Raises ValueError where shapes, types or devices are not these.

    Equivalent PyTorch, for states stacked on a dimension in front::

        lse = lses.logsumexp(0)
        out = (outs * (lses - lse).exp().transpose(-1, -2)[..., None]).sum(0)
    """
    states = expect_states(out_a, lse_a, out_b, lse_b, *more)
    given = (out_a, lse_a, out_b, lse_b, *more)
    grad = needs_grad(*given, sink_logits, out, lse)
    if sink_logits is not None:
        expect_shape("sink_logits", sink_logits, num_heads=out_a.shape[-2])
        expect_device("sink_logits", sink_logits, out_a.device)
        expect_last_dim_contiguous("sink_logits", sink_logits)
    if out is not None:
        expect_out(out, tuple(out_a.shape), dtype_name(out), out_a.device)
        expect_dtype("out", out, *MERGED, "float64")
        expect_no_grad_with_out(grad)
    if lse is not None:
        names = ("batch", "num_heads", "seqlen_q")[-lse_a.dim() :]
        expect_shape("lse", lse, **dict(zip(names, lse_a.shape, strict=True)))
        expect_dtype("lse", lse, "float32", "float64")
        expect_device("lse", lse, out_a.device)
        expect_no_grad_with_out(grad)
    kinds = {dtype_name(x) for x, _ in states} | {dtype_name(out if out is not None else out_a)}
    of_lse = {x.dtype for _, x in states} | {torch.float32 if lse is None else lse.dtype}
    merged = kinds <= set(MERGED) and of_lse == {torch.float32}
    if grad or not out_a.is_cuda or not merged or not is_plain(*given, sink_logits, out, lse):
        made, of_made = merge_in_torch(*given, sink_logits=sink_logits)
        out = made if out is None else out.copy_(made)
        return out, of_made if lse is None else lse.copy_(of_made)
    return merge_on_gpu(states, sink_logits, out, lse)


def merge_on_gpu(
    states: list[tuple[Tensor, Tensor]],
    sink_logits: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The launch of the kernel, for checked states."""
    outs, lses = zip(*states, strict=True)
    if len({x.stride() for x in outs}) > 1 or outs[0].stride(-1) != 1:
        outs = tuple(x.contiguous() for x in outs)
    if len({x.stride() for x in lses}) > 1:
        lses = tuple(x.contiguous() for x in lses)
    if out is None:
        out = outs[0].new_empty(outs[0].shape)
    if lse is None:
        lse = lses[0].new_empty(lses[0].shape)
    same = list(zip(outs, lses, strict=True))
    launch_on(device_to_enter(out), _kernel().launch, same, out, lse, sink_logits)
    return out, lse


@cache
def _kernel() -> Any:
    """The module of the kernel, imported when it is first launched."""
    from splitkv.kernels import merge_states as kernel

    return kernel
