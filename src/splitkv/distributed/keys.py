"""Every rank gets the keys and values that its own queries see, and gives their gradients back.

All keys are gathered where every rank sees all; else each is sent to the ranks that see it: a
causal mask spares what comes after a rank's tokens, a window what lies before it, and the longest
sequence what no sequence reaches. Heads go in two halves where they can: while the first half is
attended to, the keys of the second are on their way.

Masks align at the last query and key of each sequence. So the keys of a rank end where its queries
do; where they go on, because the mask is not causal, rows without meaning follow the queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from splitkv.api import attention, attention_varlen
from splitkv.distributed.collectives import (
    AllGather,
    AllToAll,
    Copies,
    Move,
    Pending,
    Rows,
    Together,
    offsets,
    start,
)
from splitkv.distributed.layout import in_order
from splitkv.distributed.spread import Call, Spread, of_heads, tokens_first, tokens_last

Result = tuple[Tensor, Tensor]


class Reach(NamedTuple):
    """The positions that the queries of one piece see.

    first, last   their keys: from first to before last
    extra         rows after the queries, so that they end with the keys
    sinks         sink tokens that may lie before `first`
    """

    first: int
    last: int
    extra: int
    sinks: int


def reach(piece: range, spread: Spread) -> Reach:
    """The Reach of the queries at some positions."""
    mask, longest, total = spread.mask, spread.max_seqlen, spread.total
    # Positions of chunks, and distances, do not survive a gap between sink tokens and the window.
    gapless = mask.chunk or (spread.alibi and mask.sink_tokens)
    left = None if gapless else mask.left
    back = max(longest - 1, 0) if left is None else min(left, max(longest - 1, 0))
    first = max(0, piece.start - back)
    sinks = mask.sink_tokens if left is not None and first > 0 else 0
    if mask.right is not None and not mask.chunk:
        last = min(total, piece.stop + mask.right)
        return Reach(first, last, last - piece.stop, sinks)
    ahead = longest if mask.right is None else mask.right
    last = min(total, piece.stop + ahead)
    positions_matter = not mask.is_full or spread.alibi
    return Reach(first, last, last - piece.stop if positions_matter else 0, sinks)


class Chunk(NamedTuple):
    """Keys at some positions, and where they begin in what a rank receives."""

    keys: range
    offset: int


@dataclass(frozen=True)
class Delivery:
    """Which of its tokens a rank sends to whom, and what it receives.

    wanted     intervals of positions that this rank gets, in their order
    rows       of each rank, slices of this rank's tokens that it gets
    receives   how many tokens this rank gets of each
    chunks     what this rank receives
    everything whether every rank gets all tokens
    """

    wanted: tuple[range, ...]
    rows: tuple[tuple[slice, ...], ...]
    receives: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    everything: bool

    @property
    def sends(self) -> tuple[int, ...]:
        """How many tokens each rank gets of this one."""
        return tuple(sum(part.stop - part.start for part in parts) for parts in self.rows)


@lru_cache(maxsize=256)
def delivery(spread: Spread) -> Delivery:
    """The Delivery of a call."""
    ranks = range(spread.size)
    wanted = [wanted_by(spread, rank) for rank in ranks]
    own = wanted[spread.rank]
    rows = tuple(_local(spread.pieces[spread.rank], wanted[rank]) for rank in ranks)
    receives: list[int] = []
    chunks: list[Chunk] = []
    for rank in ranks:
        begin = sum(receives)
        got = list(_shared(spread.pieces[rank], own))
        starts = offsets([len(part) for part in got])
        chunks += [Chunk(part, begin + at) for part, at in zip(got, starts, strict=True)]
        receives.append(sum(map(len, got)))
    everything = all(list(intervals) == [range(spread.total)] for intervals in wanted)
    return Delivery(own, rows, tuple(receives), tuple(chunks), everything)


def wanted_by(spread: Spread, rank: int) -> tuple[range, ...]:
    """Intervals of the positions of the keys that a rank gets, sink tokens of packed sequences
    aside."""
    wanted = []
    for piece in spread.pieces[rank]:
        seen = reach(piece, spread)
        wanted.append(range(seen.first, seen.last))
        if not spread.packed:
            wanted.append(range(min(seen.sinks, seen.first)))
    return _union(wanted)


def _union(intervals: Iterable[range]) -> tuple[range, ...]:
    found: list[range] = []
    for interval in sorted(intervals, key=lambda x: x.start):
        if not interval:
            continue
        if found and interval.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, interval.stop))
        else:
            found.append(interval)
    return tuple(found)


def _shared(pieces: tuple[range, ...], wanted: tuple[range, ...]) -> Iterator[range]:
    """Positions that are in a rank's pieces and wanted, in the order of its tokens."""
    for piece in pieces:
        for interval in wanted:
            both = range(max(piece.start, interval.start), min(piece.stop, interval.stop))
            if both:
                yield both


def _local(pieces: tuple[range, ...], wanted: tuple[range, ...]) -> tuple[slice, ...]:
    """The positions as slices of the rank's tokens."""
    found = []
    for piece, begin in zip(pieces, offsets([len(piece) for piece in pieces]), strict=True):
        for both in _shared((piece,), wanted):
            at = begin + both.start - piece.start
            found.append(slice(at, at + len(both)))
    return tuple(found)


def attend_keys(call: Call, spread: Spread) -> Result:
    """(out, lse) of this rank's tokens, by an exchange of keys and values."""
    plan = delivery(spread)
    heads = call.k.shape[-2]
    stages = 2 if heads % 2 == 0 else 1
    own = torch.cat([tokens_first(call.k), tokens_first(call.v)], -1)
    own = own.unflatten(-2, (stages, -1))  # [tokens, (batch,) stages, heads, dims]
    on_way = [_start(own.select(-3, i).contiguous(), call, spread, plan) for i in range(stages)]
    queries = call.q.unflatten(-2, (stages, -1))
    results = []
    for i, (keys, sinks) in enumerate(on_way):
        whole = _in_order(keys.wait(), spread, plan)
        far = None
        if sinks is not None:
            far = sinks.wait().sum(0)  # each is of one rank, the others have 0
            whole = Together.apply(whole, far)
        options = of_heads(call.options, (stages,), i) | {"return_lse": True}
        stage = call._replace(q=queries.select(-3, i), options=options)
        results.append(_attend(stage, spread, whole, far))
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, -2), torch.cat(lses, -2)


def _start(
    own: Tensor, call: Call, spread: Spread, plan: Delivery
) -> tuple[Pending, Pending | None]:
    """The keys and values of some heads on their way, and sink tokens that lie far before."""
    if plan.everything:
        keys = start(own, AllGather(call.group))
    else:
        parts = [part for parts in plan.rows for part in parts]
        move: Move = AllToAll(call.group, plan.sends, plan.receives)
        keys = start(Copies.apply(own, *parts), move)
    if not _any_far_sinks(spread):
        return keys, None
    return keys, start(_far_sinks(own, call, spread), AllToAll(call.group))


def _any_far_sinks(spread: Spread) -> bool:
    every = (reach(piece, spread).sinks for pieces in spread.pieces for piece in pieces)
    return spread.packed and any(every)


def _far_sinks(own: Tensor, call: Call, spread: Spread) -> Tensor:
    """[ranks, pieces * sink_tokens, heads, dims]: of the sequence that each piece begins in the
    sink tokens that lie before its keys, right before them; 0 what this rank does not hold."""
    slots = [[_slots(own, call, spread, piece) for piece in pieces] for pieces in spread.pieces]
    index, held = (
        torch.stack([torch.cat([of_piece[i] for of_piece in of_rank]) for of_rank in slots])
        for i in range(2)
    )
    rows: Tensor = Rows.apply(own, index, held)
    return rows


def _slots(own: Tensor, call: Call, spread: Spread, piece: range) -> tuple[Tensor, Tensor]:
    """(which of this rank's tokens it is, whether it is one) of each sink token of one piece."""
    assert call.cu_seqlens is not None
    count, first = spread.mask.sink_tokens, reach(piece, spread).first
    begin = sequence_at(call.cu_seqlens, piece.start)[0]
    before = (first - begin).clamp(0, count)  # sink tokens that are no keys of the window
    slot = torch.arange(count, device=own.device)
    key = begin + slot - (count - before)
    index, held = torch.zeros_like(slot), torch.zeros_like(slot, dtype=torch.bool)
    at = 0
    for part in spread.pieces[spread.rank]:
        here = (key >= part.start) & (key < part.stop) & (slot >= count - before)
        index = torch.where(here, at + key - part.start, index)
        held = held | here
        at += len(part)
    return index, held


def sequence_at(cu_seqlens: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """(first token, end) of the packed sequence that has a token; without one `position` twice."""
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    inside = (starts <= position) & (position < ends)
    start = torch.where(inside, position - starts, 0).sum()
    end = torch.where(inside, ends - position, 0).sum()
    return position - start, position + end


def _in_order(received: Tensor, spread: Spread, plan: Delivery) -> Tensor:
    """The keys that this rank asked for, in the order of positions."""
    if plan.everything:
        return in_order(received, spread.size, spread.layout)
    ordered = sorted(plan.chunks, key=lambda chunk: chunk.keys.start)
    if ordered == list(plan.chunks):
        return received
    parts = [received[chunk.offset : chunk.offset + len(chunk.keys)] for chunk in ordered]
    return torch.cat(parts)


def _attend(call: Call, spread: Spread, keys: Tensor, far: Tensor | None) -> Result:
    """Attention of this rank's queries, one piece after the other."""
    plan, outs, lses, at = delivery(spread), [], [], 0
    begins = offsets([len(interval) for interval in plan.wanted])
    for i, piece in enumerate(spread.pieces[spread.rank]):
        seen = reach(piece, spread)
        parts = []
        if seen.sinks and spread.packed:
            assert far is not None
            parts.append(far.unflatten(0, (-1, spread.mask.sink_tokens))[i])
        elif seen.sinks:
            parts.append(keys[: min(seen.sinks, seen.first)])  # the first of what is wanted
        for interval, begin in zip(plan.wanted, begins, strict=True):
            if interval.start <= seen.first and seen.last <= interval.stop:
                shift = begin - interval.start
                parts.append(keys[seen.first + shift : seen.last + shift])
                break
        own = parts[0] if len(parts) == 1 else torch.cat(parts or [keys[:0]])
        q = call.q.narrow(-3, at, len(piece))
        out, lse = _attend_piece(call._replace(q=q), spread, piece, tokens_last(own))
        outs.append(out.narrow(-3, 0, len(piece)))
        lses.append(lse[..., : len(piece)])
        at += len(piece)
    if len(outs) == 1:
        return outs[0].contiguous(), lses[0].contiguous()
    return torch.cat(outs, -3), torch.cat(lses, -1)


def _attend_piece(call: Call, spread: Spread, piece: range, keys: Tensor) -> Result:
    """Attention of queries at consecutive positions to keys [(batch,) keys, heads, dims]."""
    seen, dim = reach(piece, spread), call.q.shape[-1]
    q = F.pad(call.q, (0, 0, 0, 0, 0, seen.extra)) if seen.extra else call.q
    k, v = keys[..., :dim], keys[..., dim:]
    if call.cu_seqlens is None:
        result: Result = attention(q, k, v, **call.options)
        return result
    rows, cu_seqlens = len(piece) + seen.extra, call.cu_seqlens
    before = spread.mask.sink_tokens if seen.sinks else 0  # slots of sink tokens
    of_q = (cu_seqlens - piece.start).clamp(0, rows)
    of_k = (cu_seqlens - (seen.first - before)).clamp(0, before + seen.last - seen.first)
    longest_q, longest_k = min(rows, spread.max_seqlen), min(k.shape[0], spread.max_seqlen)
    result = attention_varlen(q, k, v, of_q, of_k, longest_q, longest_k, **call.options)
    return result
