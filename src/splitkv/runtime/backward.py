"""The backward of attention over some of the keys, from an output and LSE over all of them.

Ring attention and the like run the forward on one block of keys after the other and merge the
partial results. The gradients of a block then need the merged (out, lse), and nothing else of the
other blocks: `attention_backward` makes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitkv.core.errors import expect, expect_device, expect_one_of, expect_shape
from splitkv.core.options import defaults_of, required_of
from splitkv.core.problem import Operands, describe_attention
from splitkv.kernels.gradients import backward_for
from splitkv.kernels.host.sequences import SequenceLauncher
from splitkv.runtime.call_cache import CallCache, Launcher, device_to_enter, launch_on, with_types
from splitkv.runtime.dispatch import bind

FIXED = {"return_lse": True, "dropout_p": 0.0}
"""What the forward of a partial result is called with."""
_FORWARD_ONLY = ("q_scale", "k_scale", "v_scale", "products", "page_table", "cache_seqlens")


class AttentionGradients(NamedTuple):
    """Gradients in the dtypes and shapes of what they are of; None where that was not given."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink_logits: Tensor | None
    alibi_slopes: Tensor | None


class _Bound(NamedTuple):
    """The forward of a kind of call, its GPU's index, and what a call takes besides tensors."""

    launcher: Launcher
    device: int | None
    operands: Operands


_calls: CallCache[_Bound] = CallCache()


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> AttentionGradients:
    """Gradients of attention to keys k and values v, which may be some of those that made out.

    grad_out  as out
    q, k, v   as those of `attention`, or packed as those of `attention_varlen`, then with its
              cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k among the options
    out       [batch, seqlen_q, num_heads, head_dim_v] or [total_q, num_heads, head_dim_v]: the
              output over all keys, sink logits in its denominator
    lse       [batch, num_heads, seqlen_q] or [num_heads, total_q] fp32: the natural LSE over all
              keys without the sinks
    grad_lse  as lse, the gradient of what is made from it; None: 0
    options   those of `attention` that say what the scores and the mask of these keys are: causal,
              window_size, sink_tokens, attention_chunk, sink_logits, softmax_scale, softcap,
              alibi_slopes, deterministic. No quantised keys, no pages, no dropout

    Returns the gradients of q (the part that these keys make: those of disjoint keys add up), k, v,
    and where they are given the sink logits [num_heads] (that of all keys, whichever k are given:
    take it once) and the ALiBi slopes (the part of these keys). fp32 sums, rounded once to the
    dtype of what they are of. On a GPU the kernels of the backward read out and lse; on a CPU the
    forward over k is computed once more.

    Raises ValueError for malformed arguments, UnsupportedProblem where no kernel can.

    Equivalent PyTorch, for one sequence and one head, s as in `attention`::

        p = (s - logaddexp(lse, sink_logit)[:, None]).exp()
        delta = (grad_out * out).sum(-1)
        ds = p * (grad_out @ v.T - delta[:, None]) + (s - lse[:, None]).exp() * grad_lse[:, None]
        grad_q, grad_k, grad_v = softmax_scale * ds @ k, softmax_scale * ds.T @ q, p.T @ grad_out
    """
    given = _options(options)
    bound = _bind(q, k, v, given)
    rows = tuple(q.shape[:-1])
    names = ("total_q", "num_heads") if len(rows) == 2 else ("batch", "seqlen_q", "num_heads")
    sizes = dict(zip(names, rows, strict=True))
    head_dim_v = v.shape[-1]
    *outer, tokens, heads = names
    of_lse = {name: sizes[name] for name in (*outer, heads, tokens)}
    for name, x in (("grad_out", grad_out), ("out", out)):
        expect_shape(name, x, **sizes, head_dim_v=head_dim_v)
    for name, x in (("lse", lse), ("grad_lse", grad_lse)):
        if x is not None:
            expect_shape(name, x, **of_lse)
            expect_device(name, x, q.device)
    operands = Operands(q, k, v)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "sink_logits", "alibi_slopes"):
        setattr(operands, name, given.get(name))
    operands.softmax_scale = bound.operands.softmax_scale
    operands.softcap = float(given["softcap"])
    run: Any = _on_gpu if isinstance(bound.launcher, SequenceLauncher) else _in_torch
    with torch.no_grad():
        gradients: AttentionGradients = launch_on(
            bound.device, run, bound.launcher, operands, out, lse, grad_out, grad_lse
        )
    return gradients


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Every argument of `attention_varlen`, or of `attention` where there are no cu_seqlens."""
    positional = required_of("attention_varlen")
    function: Any = "attention_varlen" if "cu_seqlens_q" in options else "attention"
    defaults = defaults_of(function)
    known = [name for name in defaults if name not in (*_FORWARD_ONLY, *FIXED)]
    known += positional if function == "attention_varlen" else ()
    for name in options:
        expect_one_of("argument of attention_backward", name, known)
    if function == "attention_varlen":
        for name in positional:
            expect(name in options, name, "a value with cu_seqlens_q", None)
    return {**defaults, **options, **FIXED}


def _bind(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> _Bound:
    """The forward of such a call, found again for one of the same layouts and options."""
    tensors = [q, k, v, *(x for x in given.values() if isinstance(x, Tensor))]
    names = tuple(name for name, x in given.items() if isinstance(x, Tensor))
    scalars = tuple(x for x in given.values() if not isinstance(x, Tensor))
    kind = names, with_types(scalars)

    def new() -> _Bound:
        problem, operands = describe_attention(q, k, v, needs_grad=True, **given)
        return _Bound(bind(problem, operands, None), device_to_enter(q), _without_tensors(operands))

    bound = _calls.match(kind, tensors)
    return _calls.get_or_bind(kind, tensors, new) if bound is None else bound


def _without_tensors(operands: Operands) -> Operands:
    kept: Any = Operands(None, None, None)
    kept.softmax_scale = operands.softmax_scale
    return kept


def _on_gpu(
    launcher: SequenceLauncher,
    x: Operands,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> AttentionGradients:
    run = backward_for(launcher.problem, launcher.device, x)
    wanted = x.alibi_slopes is not None
    return AttentionGradients(*run(x, None, out, lse, grad_out, grad_lse, wanted))


def _in_torch(
    launcher: Launcher,
    x: Operands,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> AttentionGradients:
    """By a second forward over k alone, whose result has a known part in that over all keys."""
    sinks = x.sink_logits
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    slopes = None if x.alibi_slopes is None else x.alibi_slopes.detach().requires_grad_()
    q, k, v = leaves
    block = Operands(q, k, v, cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_k=x.cu_seqlens_k)
    block.alibi_slopes, block.softmax_scale, block.softcap = slopes, x.softmax_scale, x.softcap
    with torch.enable_grad():
        part, part_lse = launcher(block)
    assert part_lse is not None
    wide = torch.promote_types(part_lse.dtype, torch.float32)
    lse = lse.to(wide)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(wide)[:, None])
    grad = grad_out.to(wide)
    delta = (grad * out.to(wide)).sum(-1).transpose(-1, -2)  # as lse
    share = _share(part_lse.detach(), total)  # of these keys in the output
    of_part = (grad * part.detach().to(wide)).sum(-1).transpose(-1, -2)
    d_lse = share * (of_part - delta)
    if grad_lse is not None:
        d_lse = d_lse + _share(part_lse.detach(), lse) * grad_lse.to(wide)
    d_part = (grad * share.transpose(-1, -2)[..., None]).to(part.dtype)
    wanted = leaves if slopes is None else [*leaves, slopes]
    found: list[Tensor] = list(
        torch.autograd.grad((part, part_lse), wanted, (d_part, d_lse.to(part_lse.dtype)))
    )
    of_sinks = None
    if sinks is not None:
        rows = -torch.exp(sinks.to(wide)[:, None] - total) * delta  # [.., num_heads, rows]
        of_sinks = rows.sum(-1).reshape(-1, rows.shape[-2]).sum(0).to(sinks.dtype)
    dq, dk, dv = found[:3]
    return AttentionGradients(dq, dk, dv, of_sinks, None if slopes is None else found[3])


def _share(part: Tensor, total: Tensor) -> Tensor:
    """exp(part - total), 0 where the part is of no key."""
    return torch.where(part == float("-inf"), 0.0, torch.exp(part - total))
