"""Keys and values go round, and every rank merges what it makes of each rank's.

In round t a rank attends to the keys of the rank t before it, while those of round t + 1 are on
their way into a second buffer. They come from their owner, and only the pieces of which some query
sees a key. Backwards the keys go round once more, and the gradients of a round go home while the
next is computed; a piece of queries and one of keys need nothing of the other pieces but the merged
(out, lse).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from splitkv.api import attention, attention_varlen, merge_states
from splitkv.distributed.collectives import Trade
from splitkv.distributed.keys import sequence_at
from splitkv.distributed.ring_distances import Apart, apart
from splitkv.distributed.spread import Call, Spread
from splitkv.reference import apply_sink_logits
from splitkv.runtime.backward import AttentionGradients, attention_backward

Result = tuple[Tensor, Tensor]


def attend_ring(call: Call, spread: Spread) -> Result:
    """(out, lse) of this rank's tokens, by rounds of keys and values."""
    ring = Ring(call.group, spread, call.cu_seqlens, call.options)
    out, lse = _Rounds.apply(call.q, call.k, call.v, ring)
    sinks = call.options["sink_logits"]
    if sinks is not None:  # once, after every merge
        out = apply_sink_logits(out, lse, sinks)
    return out.to(call.q.dtype), lse


class Pair(NamedTuple):
    """A piece of this rank's queries and a piece of some rank's keys, by their numbers there."""

    queries: int
    keys: int


def pairs_of(spread: Spread, reader: int, owner: int) -> list[Pair]:
    """The pairs of the reader's queries and the owner's keys of which some query may see some
    key."""
    causal = spread.mask.right == 0
    return [
        Pair(i, j)
        for i, queries in enumerate(spread.pieces[reader])
        for j, keys in enumerate(spread.pieces[owner])
        if not causal or keys.start <= queries.start
    ]


def moved_pieces(spread: Spread, reader: int, owner: int) -> list[int]:
    """The pieces of keys that the reader gets of the owner."""
    return sorted({pair.keys for pair in pairs_of(spread, reader, owner)})


@dataclass(frozen=True, eq=False)
class Ring:
    """The rounds of a call on one rank."""

    group: dist.ProcessGroup
    spread: Spread
    cu_seqlens: Tensor | None
    options: dict[str, Any]

    def owner(self, turn: int) -> int:
        """Whose keys a round is about."""
        return (self.spread.rank - turn) % self.spread.size

    def reader(self, turn: int) -> int:
        """Who attends to this rank's keys in a round."""
        return (self.spread.rank + turn) % self.spread.size

    def pairs(self, reader: int, owner: int) -> list[Pair]:
        """The pairs of which some query may see some key."""
        return pairs_of(self.spread, reader, owner)

    def moved(self, reader: int, owner: int) -> list[int]:
        """The pieces of keys that the reader gets of the owner."""
        return moved_pieces(self.spread, reader, owner)

    def cut(self, x: Tensor, dim: int = -3) -> list[Tensor]:
        """A rank's pieces of a tensor whose tokens are in a dimension."""
        return list(x.chunk(len(self.spread.pieces[0]), dim))

    def fetch(self, own: list[Tensor], turn: int) -> tuple[dict[int, Tensor], Trade]:
        """The keys of a round, by the number of the piece, on their way."""
        owner, reader = self.owner(turn), self.reader(turn)
        got = {j: torch.empty_like(own[j]) for j in self.moved(self.spread.rank, owner)}
        sends = [(own[j], reader) for j in self.moved(reader, self.spread.rank)]
        return got, Trade(self.group, sends, [(x, owner) for x in got.values()])

    def apart(self, turn: int, pair: Pair) -> Apart | None:
        """How a pair is given to a kernel where distances matter and its pieces differ."""
        queries = self.spread.pieces[self.spread.rank][pair.queries]
        keys = self.spread.pieces[self.owner(turn)][pair.keys]
        if not self.spread.alibi or queries == keys:
            return None
        return apart(queries, keys, self.cu_seqlens)

    def call_of(self, turn: int, pair: Pair) -> dict[str, Any]:
        """The arguments of attention of a pair, but for q, k and v."""
        queries = self.spread.pieces[self.spread.rank][pair.queries]
        keys = self.spread.pieces[self.owner(turn)][pair.keys]
        causal = self.spread.mask.right == 0 and queries == keys
        scores = {n: self.options[n] for n in ("softmax_scale", "softcap", "deterministic")}
        between = self.apart(turn, pair)
        if between is not None:
            return scores | between.arguments(self.options["alibi_slopes"])
        scores |= {"causal": causal, "alibi_slopes": self.options["alibi_slopes"]}
        if self.cu_seqlens is None:
            return scores
        of_q, of_k = _bounds(self.cu_seqlens, queries, keys)
        lengths = {"max_seqlen_q": len(queries), "max_seqlen_k": len(keys)}
        return scores | {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k} | lengths


def _bounds(cu_seqlens: Tensor, queries: range, keys: range) -> tuple[Tensor, Tensor]:
    """cu_seqlens of packed sequences within a piece of queries and one of keys of as many tokens.

    Between different pieces there is at most one sequence: its rows and keys, then the rest, rows
    without keys and keys without rows.
    """
    n = len(queries)
    if queries == keys:
        inside = (cu_seqlens - queries.start).clamp(0, n)
        return inside, inside
    later = max(queries.start, keys.start)
    begin, end = sequence_at(cu_seqlens, later)
    zero, most = torch.zeros_like(begin), torch.full_like(begin, n)
    if queries.start > keys.start:
        rows = torch.stack([zero, zero, (end - queries.start).clamp(0, n), most])
        seen = torch.stack([zero, (begin - keys.start).clamp(0, n), most, most])
    else:
        rows = torch.stack([zero, (begin - queries.start).clamp(0, n), most, most])
        seen = torch.stack([zero, zero, (end - keys.start).clamp(0, n), most])
    return rows.int(), seen.int()


class _Rounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Result:
        out, lse = _forward(q, k, v, ring)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, out, lse = ctx.saved_tensors
        grads = _backward(tuple(qkv), (out, lse), (grad_out.to(out.dtype), grad_lse), ctx.ring)
        return (*grads, None)


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Result:
    """The merged result without sinks, out in fp32 or wider."""
    dim, size = q.shape[-1], ring.spread.size
    own = [x.contiguous() for x in ring.cut(torch.cat([k, v], -1))]
    queries = ring.cut(q)
    found: list[Result | None] = [None] * len(queries)
    keys = dict(enumerate(own))
    for turn in range(size):
        coming = ring.fetch(own, turn + 1) if turn + 1 < size else None
        for pair in ring.pairs(ring.spread.rank, ring.owner(turn)):
            kv = keys[pair.keys]
            part = _attend(queries[pair.queries], kv[..., :dim], kv[..., dim:], ring, (turn, pair))
            before = found[pair.queries]
            found[pair.queries] = part if before is None else merge_states(*before, *part)
        if coming is not None:
            keys, trade = coming
            trade.wait()
    outs, lses = zip(*(x for x in found if x is not None), strict=True)
    return torch.cat(outs, -3), torch.cat(lses, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, ring: Ring, which: tuple[int, Pair]) -> Result:
    """(out, lse) of a pair, to be merged: out is fp32 or wider."""
    arguments, between = ring.call_of(*which), ring.apart(*which)
    run: Any = attention if ring.cu_seqlens is None else attention_varlen
    if between is None:
        out, lse = run(q, k, v, return_lse=True, **arguments)
    else:
        k, v = between.keys(k), between.keys(v)
        out, lse = run(between.queries(q), k, v, return_lse=True, **arguments)
        out, lse = between.back(out), between.back(lse, -1)
        lse = lse - between.moved(arguments["alibi_slopes"]).to(lse.dtype)
    return out.to(torch.promote_types(out.dtype, torch.float32)), lse


def _backward(
    qkv: tuple[Tensor, Tensor, Tensor], result: Result, grads: Result, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    dim, size = q.shape[-1], ring.spread.size
    own = [x.contiguous() for x in ring.cut(torch.cat([k, v], -1))]
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = [torch.zeros_like(x, dtype=wide) for x in ring.cut(q)]
    dkv = [torch.zeros_like(x, dtype=wide) for x in own]
    rows = _Rows(
        q=ring.cut(q),
        out=ring.cut(result[0]),
        grad_out=ring.cut(grads[0]),
        lse=ring.cut(result[1], -1),
        grad_lse=ring.cut(grads[1], -1),
    )
    keys, homeward = dict(enumerate(own)), None
    for turn in range(size):
        coming = ring.fetch(own, turn + 1) if turn + 1 < size else None
        parts: dict[int, Tensor] = {}
        for pair in ring.pairs(ring.spread.rank, ring.owner(turn)):
            kv = keys[pair.keys]
            of = _gradients(rows, kv[..., :dim], kv[..., dim:], ring, (turn, pair))
            dq[pair.queries] += of.q
            part = torch.cat([of.k, of.v], -1).to(wide)
            parts[pair.keys] = parts[pair.keys] + part if pair.keys in parts else part
        if homeward is not None:
            _arrive(dkv, homeward)
        homeward = _send_home(parts, own, ring, turn)
        if coming is not None:
            keys, trade = coming
            trade.wait()
    if homeward is not None:
        _arrive(dkv, homeward)
    of_kv = torch.cat(dkv, -3).to(k.dtype)
    return torch.cat(dq, -3).to(q.dtype), of_kv[..., :dim], of_kv[..., dim:]


class _Rows(NamedTuple):
    """The pieces of what belongs to this rank's queries."""

    q: list[Tensor]
    out: list[Tensor]
    grad_out: list[Tensor]
    lse: list[Tensor]
    grad_lse: list[Tensor]


def _gradients(
    rows: _Rows, k: Tensor, v: Tensor, ring: Ring, which: tuple[int, Pair]
) -> AttentionGradients:
    """The gradients of a pair, from the merged result."""
    at, arguments, between = which[1].queries, ring.call_of(*which), ring.apart(*which)
    grad_out, q, out = rows.grad_out[at].contiguous(), rows.q[at], rows.out[at]
    lse, grad_lse = rows.lse[at], rows.grad_lse[at]
    if between is None:
        return attention_backward(grad_out, q, k, v, out, lse, grad_lse=grad_lse, **arguments)
    grad_out, q, out = map(between.queries, (grad_out, q, out))
    k, v = between.keys(k), between.keys(v)
    lse = between.queries(lse + between.moved(arguments["alibi_slopes"]).to(lse.dtype), -1)
    grad_lse = between.queries(grad_lse, -1)
    found = attention_backward(grad_out, q, k, v, out, lse, grad_lse=grad_lse, **arguments)
    of_k, of_v = between.keys(found.k), between.keys(found.v)
    return found._replace(q=between.back(found.q), k=of_k, v=of_v)


Homeward = tuple[dict[int, Tensor], Trade | None]


def _send_home(parts: dict[int, Tensor], own: list[Tensor], ring: Ring, turn: int) -> Homeward:
    """Gradients of a round's keys, in the type of the keys, on their way to who holds these; and
    those of this rank's, by the number of the piece, that come of their reader."""
    if turn == 0:
        return parts, None
    sends = [(x.to(own[0].dtype).contiguous(), ring.owner(turn)) for _, x in sorted(parts.items())]
    reader = ring.reader(turn)
    got = {j: torch.empty_like(own[j]) for j in ring.moved(reader, ring.spread.rank)}
    return got, Trade(ring.group, sends, [(x, reader) for x in got.values()])


def _arrive(dkv: list[Tensor], homeward: Homeward) -> None:
    """Add what has come home."""
    got, trade = homeward
    if trade is not None:
        trade.wait()
    for j, x in got.items():
        dkv[j] += x
