"""Every rank gets the keys that a window reaches back to before its own, and nothing else is moved.

Of consecutive tokens under a causal window a rank's queries see its own keys, and the first of them
also keys of the rank before: its last ones, the tail. All queries attend to the rank's own keys as
they lie, while the tail is on its way; then the first queries to the tail, and their two results
are merged in place. Backwards the tail's gradients go home while those of the own keys are made.

    keys       ... | tail | own ...
    query i        |  from key i on of a whole window's tail | own keys up to i
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from splitkv.api import attention, attention_varlen, merge_states
from splitkv.distributed.collectives import AllToAll
from splitkv.distributed.keys import reach, sequence_at
from splitkv.distributed.spread import Call, Spread, tokens_first, tokens_last
from splitkv.runtime.backward import AttentionGradients, attention_backward

Result = tuple[Tensor, Tensor]
NOTHING_SEEN = 1e30  # an LSE beside which no score counts
_SCORES = "softmax_scale", "softcap", "deterministic"


def reaches_one_rank(spread: Spread) -> bool:
    """Whether every rank needs a tail of the rank before it and nothing else."""
    mask = spread.mask
    plain = mask.right == 0 and not (mask.chunk or mask.sink_tokens or spread.alibi)
    if not plain or mask.left is None or spread.layout != "contiguous" or spread.size == 1:
        return False
    return tail_of(spread, spread.size - 1) <= spread.tokens


def tail_of(spread: Spread, rank: int) -> int:
    """How many keys before its own a rank's queries see."""
    (piece,) = spread.pieces[rank]
    return piece.start - reach(piece, spread).first


def attend_window(call: Call, spread: Spread) -> Result:
    """(out, lse) of this rank's tokens."""
    options = {name: call.options[name] for name in _SCORES}
    window = Window(spread, call.cu_seqlens, options, _shift(call, spread))
    sinks = call.options["sink_logits"]
    result: Result = _Windowed.apply(call.q, call.k, call.v, sinks, window)
    return result


def _shift(call: Call, spread: Spread) -> AllToAll:
    """The exchange: each rank's last tokens to the next one."""
    rank, ranks = spread.rank, range(spread.size)
    sends = [tail_of(spread, r) if r == rank + 1 else 0 for r in ranks]
    receives = [tail_of(spread, rank) if r == rank - 1 else 0 for r in ranks]
    return AllToAll(call.group, sends, receives)


class Around(NamedTuple):
    """A packed sequence's share of the first queries, and of the tail's last keys; 0-d tensors."""

    rows: Tensor
    keys: Tensor


@dataclass(frozen=True, eq=False)
class Window:
    """A rank's part of a call: masks, bounds and exchange, without its tensors.

    options  what the scores are, but for masks and sink logits
    shift    the exchange of tails
    """

    spread: Spread
    cu_seqlens: Tensor | None
    options: dict[str, Any]
    shift: AllToAll

    @property
    def tail(self) -> int:
        """Keys that this rank gets."""
        return tail_of(self.spread, self.spread.rank)

    @property
    def given(self) -> int:
        """Keys that this rank sends, its last ones."""
        rank = self.spread.rank
        return tail_of(self.spread, rank + 1) if rank + 1 < self.spread.size else 0

    @property
    def left(self) -> int:
        assert self.spread.mask.left is not None
        return self.spread.mask.left

    @property
    def rows(self) -> int:
        """The first queries, which may see a key of the tail."""
        return min(self.spread.tokens, self.left)

    def of_own(self) -> dict[str, Any]:
        """Arguments for this rank's own keys."""
        found = self.options | {"causal": True, "window_size": (self.left, 0)}
        if self.cu_seqlens is None:
            return found
        (piece,) = self.spread.pieces[self.spread.rank]
        inside = (self.cu_seqlens - piece.start).clamp(0, len(piece))
        return found | _packed(inside, inside, *[min(len(piece), self.spread.max_seqlen)] * 2)

    def of_tail(self) -> dict[str, Any]:
        """Arguments of the first queries for the tail. Masks align at the last row and key, so that
        the last row sees what is `rows` less than a window before it."""
        found = self.options | {"causal": False, "window_size": (self.left - self.rows, -1)}
        if self.cu_seqlens is None:
            return found
        before = self.around().keys
        zero, keys = torch.zeros_like(before), torch.full_like(before, self.tail)
        of_q = torch.stack([zero, zero, torch.full_like(before, self.rows)]).int()
        of_k = torch.stack([zero, keys - before, keys]).int()
        return found | _packed(of_q, of_k, self.rows, self.tail)

    def around(self) -> Around:
        """Counts the tokens of the packed sequence that goes on from the rank before."""
        assert self.cu_seqlens is not None
        (piece,) = self.spread.pieces[self.spread.rank]
        begin, end = sequence_at(self.cu_seqlens, piece.start)
        rows = (end - piece.start).clamp(0, self.rows)
        return Around(rows, (piece.start - begin).clamp(0, self.tail))

    def elsewhere(self, like: Tensor) -> Tensor | None:
        """[rows] bool: the first queries that are of later sequences; None: not packed."""
        if self.cu_seqlens is None:
            return None
        return torch.arange(self.rows, device=like.device) >= self.around().rows


def _packed(of_q: Tensor, of_k: Tensor, longest_q: int, longest_k: int) -> dict[str, Any]:
    lengths = {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
    return {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, **lengths}


class _Saved(NamedTuple):
    """The tensors that the backward needs; k and v are this rank's, `tail` has both."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    tail: Tensor
    out: Tensor
    lse: Tensor


class _Windowed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: Window
    ) -> Result:
        last = slice(k.shape[-3] - window.given, None)
        own = torch.cat([tokens_first(k)[last], tokens_first(v)[last]], -1)
        buffer, work = window.shift.forward(own)
        run: Any = attention if window.cu_seqlens is None else attention_varlen
        options = window.of_own()
        out, lse = run(q, k, v, sink_logits=sinks, return_lse=True, **options)
        work.wait()
        tail = tokens_last(buffer).contiguous()
        if window.tail:
            _merge_tail(out, lse, q, tail, sinks, window)
        ctx.set_materialize_grads(False)
        ctx.window = window
        ctx.save_for_backward(q, k, v, sinks, tail, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        of, window = _Saved(*ctx.saved_tensors), ctx.window
        grads = torch.zeros_like(of.out) if grad_out is None else grad_out, grad_lse
        of_tail = None
        home = tokens_first(torch.zeros_like(of.tail))
        if window.tail:
            of_tail = _of_tail(of, grads, window)
            home = tokens_first(torch.cat([of_tail.k, of_tail.v], -1))
        buffer, work = window.shift.backward(home.contiguous())
        options = window.of_own() | {"sink_logits": of.sinks, "grad_lse": grad_lse}
        found = attention_backward(grads[0], of.q, of.k, of.v, of.out, of.lse, **options)
        if of_tail is not None:
            _add(found.q.narrow(-3, 0, window.rows), of_tail.q)
        work.wait()
        dim, begin = of.q.shape[-1], of.k.shape[-3] - window.given
        come = tokens_last(buffer)
        for grad, x in ((found.k, come[..., :dim]), (found.v, come[..., dim:])):
            _add(grad.narrow(-3, begin, window.given), x)
        return (*found[:4], None)


def _merge_tail(
    out: Tensor, lse: Tensor, q: Tensor, tail: Tensor, sinks: Tensor | None, window: Window
) -> None:
    """Put what the first queries see in the tail into their rows of out and lse."""
    dim, rows = q.shape[-1], window.rows
    first = q.narrow(-3, 0, rows)
    run: Any = attention if window.cu_seqlens is None else attention_varlen
    part, part_lse = run(
        first, tail[..., :dim], tail[..., dim:], return_lse=True, **window.of_tail()
    )
    elsewhere = window.elsewhere(q)
    if elsewhere is not None:
        part_lse = part_lse.masked_fill(elsewhere, float("-inf"))
    of_rows, lse_of_rows = out.narrow(-3, 0, rows), lse[..., :rows]
    state = lse_of_rows
    if sinks is not None:  # out has them in its denominator already
        state = torch.logaddexp(lse_of_rows, sinks.to(lse.dtype)[:, None])
    merged, total = merge_states(of_rows, state, part, part_lse)
    of_rows.copy_(merged)
    lse_of_rows.copy_(total if sinks is None else torch.logaddexp(lse_of_rows, part_lse))


def _of_tail(of: _Saved, grads: tuple[Tensor, Tensor | None], window: Window) -> AttentionGradients:
    """The gradients of the tail and of the first queries, of the scores between them."""
    dim, rows = of.q.shape[-1], window.rows
    q, out, grad_out = (x.narrow(-3, 0, rows).contiguous() for x in (of.q, of.out, grads[0]))
    lse, grad_lse = of.lse[..., :rows].contiguous(), grads[1]
    if grad_lse is not None:
        grad_lse = grad_lse[..., :rows].contiguous()
    elsewhere = window.elsewhere(q)
    if elsewhere is not None:
        lse = lse.masked_fill(elsewhere, NOTHING_SEEN)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(elsewhere, 0.0)
    options = window.of_tail() | {"sink_logits": of.sinks, "grad_lse": grad_lse}
    k, v = of.tail[..., :dim], of.tail[..., dim:]
    return attention_backward(grad_out, q, k, v, out, lse, **options)


def _add(x: Tensor, y: Tensor) -> None:
    """Add y to x, summed in fp32 or wider and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x.copy_(x.to(wide) + y.to(wide))
