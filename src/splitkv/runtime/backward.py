"""The backward of attention over some of the keys, from an output and LSE over all of them.

Ring attention and the like run the forward on one block of keys after the other and merge the
partial results. The gradients of a block then need the merged (out, lse), and nothing else of the
other blocks: `attention_backward` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from splitkv.core.errors import expect, expect_device, expect_one_of, expect_shape
from splitkv.core.options import defaults_of, required_of
from splitkv.core.problem import Operands, describe_attention
from splitkv.kernels.gradients import backward_of, has_backward
from splitkv.runtime.call_cache import CallCache, Launcher, device_to_enter, launch_on, with_types
from splitkv.runtime.dispatch import bind

if TYPE_CHECKING:
    from splitkv.kernels.host.sequences import SequenceLauncher

FIXED = {"return_lse": True, "dropout_p": 0.0}
"""The options that the forward of a partial result is called with."""
_FORWARD_ONLY = (
    *("q_scale", "k_scale", "v_scale", "products", "page_table", "cache_seqlens", "out"),
    *("out_scale", "max_sink_tokens", "bidirectional_ranges"),
)


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

    grad_out  as out; both are taken in the dtype of q
    q, k, v   as those of `attention`, or packed as those of `attention_varlen`, then with its
              cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k among the options
    out       [batch, seqlen_q, num_heads, head_dim_v] or [total_q, num_heads, head_dim_v]: the
              output over all keys, sink logits in its denominator
    lse       [batch, num_heads, seqlen_q] or [num_heads, total_q] fp32: the natural LSE over all
              keys without the sinks
    grad_lse  as lse, the gradient of what is made from it; None: 0
    options   those of `attention` that say what the scores and the mask of these keys are: causal,
              window_size, sink_tokens, attention_chunk, sink_logits, softmax_scale, softcap,
              alibi_slopes, deterministic. No quantised keys, no pages, no bidirectional ranges, no
              dropout

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
    sinks, given["sink_logits"] = given["sink_logits"], None
    bound = _bind(q, k, v, given)
    rows = tuple(q.shape[:-1])
    names = ("total_q", "num_heads") if len(rows) == 2 else ("batch", "seqlen_q", "num_heads")
    sizes = dict(zip(names, rows, strict=True))
    head_dim_v = v.shape[-1]
    *outer, tokens, heads = names
    of_lse = {name: sizes[name] for name in (*outer, heads, tokens)}
    for name, x in (("grad_out", grad_out), ("out", out)):
        expect_shape(name, x, **sizes, head_dim_v=head_dim_v)
        expect_device(name, x, q.device)
    for name, x in (("lse", lse), ("grad_lse", grad_lse)):
        if x is not None:
            expect_shape(name, x, **of_lse)
            expect_device(name, x, q.device)
    if sinks is not None:
        expect_shape("sink_logits", sinks, num_heads=sizes["num_heads"])
        expect_device("sink_logits", sinks, q.device)
    operands = Operands(q, k, v)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes"):
        setattr(operands, name, given.get(name))
    operands.softmax_scale = bound.operands.softmax_scale
    operands.softcap = float(given["softcap"])
    # kernels are compiled for rows of that type, and of elements that lie side by side
    grad_out, out = (x.to(q.dtype) for x in (grad_out, out))
    run: Any = _on_gpu if has_backward(bound.launcher) else _in_torch
    with torch.no_grad():
        of_sinks = None
        if sinks is not None:
            rest = _with_sinks(sinks, _Rows(out, lse, grad_out, grad_lse))
            lse, grad_lse, of_sinks = rest
        gradients: AttentionGradients = launch_on(
            bound.device, run, bound.launcher, operands, _Rows(out, lse, grad_out, grad_lse)
        )
    return gradients._replace(sink_logits=of_sinks)


class _Rows(NamedTuple):
    """The tensors of the queries among the arguments of `attention_backward`."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


def _with_sinks(sinks: Tensor, rows: _Rows) -> tuple[Tensor, Tensor | None, Tensor]:
    """The LSE that has the sinks in it, the gradient of it that does to the scores what that of the
    LSE without them does, and the gradient of the sinks.

    So a kernel that knows of no sinks makes the gradients of a block; those that know of them find
    the sinks' from sums over all keys.
    """
    wide = torch.promote_types(rows.lse.dtype, torch.float32)
    lse, sink = rows.lse.to(wide), sinks.to(wide)[:, None]
    total = torch.logaddexp(lse, sink)
    grad_lse = rows.grad_lse
    if grad_lse is not None:
        scale = torch.where(lse == float("-inf"), 0.0, torch.exp(total - lse))
        grad_lse = (grad_lse.to(wide) * scale).to(rows.lse.dtype).contiguous()
    of_rows = -torch.exp(sink - total) * _delta(rows, wide)  # [.., num_heads, rows]
    of_sinks = of_rows.sum(-1).reshape(-1, of_rows.shape[-2]).sum(0)
    return total.to(rows.lse.dtype).contiguous(), grad_lse, of_sinks.to(sinks.dtype)


def _delta(rows: _Rows, wide: torch.dtype) -> Tensor:
    """The product of the output and its gradient, as the LSE."""
    return (rows.grad_out.to(wide) * rows.out.to(wide)).sum(-1).transpose(-1, -2)


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Every argument of `attention_varlen`, or of `attention` where there are no cu_seqlens, in one
    order, whatever that of the caller is."""
    function: Any = "attention_varlen" if "cu_seqlens_q" in options else "attention"
    positional, defaults = required_of(function), defaults_of(function)
    known = [name for name in defaults if name not in (*_FORWARD_ONLY, *FIXED)]
    known += positional
    for name in options:
        expect_one_of("argument of attention_backward", name, known)
    for name in positional:
        expect(name in options, name, "a value with cu_seqlens_q", None)
    return {**dict.fromkeys(positional), **defaults, **options, **FIXED}


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


def _on_gpu(launcher: SequenceLauncher, x: Operands, rows: _Rows) -> AttentionGradients:
    run = backward_of(launcher, x)
    wanted = x.alibi_slopes is not None
    out, lse = rows.out.contiguous(), rows.lse.float().contiguous()
    grad_lse = None if rows.grad_lse is None else rows.grad_lse.float()  # as kernels read both
    found = run(x, None, out, lse, rows.grad_out, grad_lse, wanted)
    return AttentionGradients(found.dq, found.dk, found.dv, None, found.dslopes)


def _in_torch(launcher: Launcher, x: Operands, rows: _Rows) -> AttentionGradients:
    """By a second forward over k alone, whose result has a known part in that over all keys."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    slopes = None if x.alibi_slopes is None else x.alibi_slopes.detach().requires_grad_()
    block = Operands(q, k, v, cu_seqlens_q=x.cu_seqlens_q, cu_seqlens_k=x.cu_seqlens_k)
    block.alibi_slopes, block.softmax_scale, block.softcap = slopes, x.softmax_scale, x.softcap
    with torch.enable_grad():
        part, part_lse = launcher(block)
    assert part_lse is not None
    wide = torch.promote_types(part_lse.dtype, torch.float32)
    of_part = rows._replace(out=part.detach())
    none = part_lse.detach() == float("-inf")
    share = torch.where(none, 0.0, torch.exp(part_lse.detach() - rows.lse.to(wide)))
    d_lse = _delta(of_part, wide) - _delta(rows, wide)
    if rows.grad_lse is not None:
        d_lse = d_lse + rows.grad_lse.to(wide)
    d_part = (rows.grad_out.to(wide) * share.transpose(-1, -2)[..., None]).to(part.dtype)
    cotangents = d_part, (share * d_lse).to(part_lse.dtype)
    wanted = [q, k, v] if slopes is None else [q, k, v, slopes]
    found: list[Tensor] = list(torch.autograd.grad((part, part_lse), wanted, cotangents))
    dq, dk, dv = found[:3]
    return AttentionGradients(dq, dk, dv, None, None if slopes is None else found[3])
