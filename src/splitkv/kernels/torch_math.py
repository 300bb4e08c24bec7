"""Attention written out in PyTorch: scores, softmax and product as separate operations.

Computes    the definition in reference.py, on any device that PyTorch has, for every feature
Shapes      q [batch, seqlen_q, heads, head_dim], k, v [batch, seqlen_k, kv_heads, head_dim]; caches
            are first gathered and dequantised, packed sequences padded to their planned maximum,
            or to as many tokens as there are
Grid        none: three PyTorch operators, the heads of a group as rows against the same keys
Traffic     keys+values  batch * kv_heads * seqlen_k * (head_dim + head_dim_v) * kv_bytes
            copies       the same elements, written and read, where they change place or type
            scores       4 * batch * heads * seqlen_q * seqlen_k: s and p, each written and read
            flops        2 * batch * heads * seqlen_q * seqlen_k * (head_dim + head_dim_v)
            every key is read, whatever the mask
Numerics    16-bit and quantised inputs are computed in fp32, fp32 and fp64 as they are; one
            rounding at the end, to e4m3 where out has a scale; nothing is multiplied in 8 bits
Limits      none
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS, Contiguous
from splitkv.core.plan import Config, Plan, Traffic
from splitkv.core.problem import Operands, Problem

if TYPE_CHECKING:
    from torch import Tensor


def unsupported(problem: Problem, device: Device) -> list[str]:
    return []


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    yield Config()


def traffic(problem: Problem, config: Config) -> Traffic:
    compute_bytes = max(4, problem.element_bytes)
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    return dense_traffic(
        problem,
        copies=kv_elements(problem) if compute_bytes != problem.element_bytes else moved(problem),
        copy_bytes=compute_bytes,
        workspace_bytes=4 * scores * compute_bytes,
    )


def kv_elements(problem: Problem) -> int:
    """Elements of K and V, every sequence at its upper bound."""
    per_key = problem.num_kv_heads * (problem.head_dim + problem.head_dim_v)
    return problem.batch * problem.seqlen_k * per_key


def moved(problem: Problem) -> int:
    """Elements of K and V that have to be gathered or dequantised before they can be multiplied."""
    in_place = problem.place == Contiguous() and problem.codec == AS_IS
    return 0 if in_place else kv_elements(problem)


def dense_traffic(
    problem: Problem, *, copies: int, copy_bytes: int, workspace_bytes: int
) -> Traffic:
    """Traffic of attention that visits every key: `copies` elements of K and V are written and
    read once more at `copy_bytes` each, next to the rest of the workspace."""
    rows = problem.batch * problem.seqlen_q * problem.num_heads
    lse_bytes = 4 * rows if problem.return_lse else 0
    return Traffic(
        kv_bytes=kv_elements(problem) * problem.kv_element_bytes,
        q_bytes=rows * problem.head_dim * problem.element_bytes,
        out_bytes=rows * problem.head_dim_v * problem.out_element_bytes + lse_bytes,
        partial_bytes=2 * copies * copy_bytes + workspace_bytes,
        flops=2 * rows * problem.seqlen_k * (problem.head_dim + problem.head_dim_v),
    )


def bind(plan: Plan, operands: Operands) -> Callable[[Operands], tuple[Tensor, Tensor | None]]:
    return partial(launch, plan.problem)


def launch(
    problem: Problem, operands: Operands, generator: Any = None
) -> tuple[Tensor, Tensor | None]:
    """Dropout draws from a torch.Generator; None: from torch's own."""
    import torch

    from splitkv import reference

    x = operands
    working = getattr(torch, problem.dtype)
    dtype = torch.promote_types(working, torch.float32)
    options: dict[str, Any] = {
        "softmax_scale": x.softmax_scale,
        "softcap": x.softcap,
        "sink_logits": x.sink_logits,
        "alibi_slopes": x.alibi_slopes,
        "return_lse": problem.return_lse,
        "dropout_p": x.dropout_p,
        "generator": generator,
    }
    if problem.kind == "dense":
        scales = {"q_scale": x.q_scale, "k_scale": x.k_scale, "v_scale": x.v_scale}
        of_mask = {"mask": problem.mask, "sink_tokens": x.sequence_sink_tokens}
        out, lse = reference.attention(x.q, x.k, x.v, **scales, **of_mask, **options, upcast=dtype)
    else:
        padded = padded_inputs(operands, problem, dtype)
        own = x.sequence_sink_tokens, x.bidirectional_ranges
        out, lse = reference.attend_padded(
            padded.q,
            padded.k,
            padded.v,
            seqlens_q=padded.seqlens_q,
            seqlens_k=padded.seqlens_k,
            masking=reference.Masking(problem.mask, *own),
            **options,
        )
    if not problem.out_scale:
        out = out.to(working)
    return finish_out(operands, problem, out, lse)


class PaddedInputs(NamedTuple):
    """q, k, v [B, S, heads, D], and the lengths [B] of queries and keys, or None: all of S."""

    q: Tensor
    k: Tensor
    v: Tensor
    seqlens_q: Tensor | None
    seqlens_k: Tensor | None


def padded_inputs(operands: Operands, problem: Problem, dtype: Any) -> PaddedInputs:
    """The PaddedInputs of a call in `dtype`, from a cache or packed sequences."""
    from splitkv import reference
    from splitkv.rounding import dequantize

    x, seqlens_q, seqlens_k = operands, None, operands.cache_seqlens
    q = dequantize(x.q, x.q_scale, dtype)
    if problem.kind == "varlen":
        q = reference.pad_sequences(q, x.cu_seqlens_q, min(problem.seqlen_q, x.q.shape[0]))
        seqlens_q = x.cu_seqlens_q.diff()
    if problem.kind == "dense":
        k, v = (dequantize(*t, dtype) for t in ((x.k, x.k_scale), (x.v, x.v_scale)))
    elif problem.kind == "varlen" and x.page_table is None:
        seqlens_k = x.cu_seqlens_k.diff()
        longest = min(problem.seqlen_k, x.k.shape[0])
        k, v = (
            reference.pad_sequences(dequantize(*t, dtype), x.cu_seqlens_k, longest)
            for t in ((x.k, x.k_scale), (x.v, x.v_scale))
        )
    else:
        k = reference.load_cache(x.k, x.k_scale, x.page_table, problem.seqlen_k, dtype)
        v = reference.load_cache(x.v, x.v_scale, x.page_table, problem.seqlen_k, dtype)
    return PaddedInputs(q, k, v, seqlens_q, seqlens_k)


def finish_out(
    operands: Operands, problem: Problem, out: Tensor, lse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Packs what was padded, both contiguous and LSE in fp32, and fills the caller's `out` where
    there is one."""
    from splitkv import reference

    x = operands
    if problem.kind == "varlen":
        out = reference.pack_sequences(out, x.cu_seqlens_q, x.q.shape[0])
        if lse is not None:
            lse = reference.pack_sequences(
                lse.transpose(1, 2), x.cu_seqlens_q, x.q.shape[0], float("-inf")
            ).transpose(0, 1)
    if x.out_scale is not None:
        out = reference.scaled(out, x.out_scale)
    if x.out is not None:
        out = x.out.copy_(out)
    else:
        out = out.contiguous()
    return out, lse if lse is None else lse.float().contiguous()
