"""Bands of visible keys on the device: how many tiles to visit, which, and the predicate inside.

A query row at key position `pos` sees keys `lo <= n < hi`, and the first `sink_tokens` keys below
`hi`. Where positions go in chunks, both bounds stay inside that of `pos`. An absent bound is None
and costs nothing. Scalars and vectors of lengths both work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Bounds(NamedTuple):
    """The bounds of a mask: None, or an integer known at run time."""

    left: Any
    right: Any
    sink_tokens: Any
    chunk: Any = None


@triton.jit
def token_range(tile, seqlen_q, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """First and last query token of row tile `tile`; packed row = token * GROUP + head."""
    last = (tile * TILE_M + TILE_M - 1) // GROUP
    return tile * TILE_M // GROUP, tl.minimum(last, seqlen_q - 1)


@triton.jit
def chunk_start(bounds, pos):
    """The first position of the chunk of `pos`; before the first key, of one that ends there."""
    start = tl.maximum(pos, 0) // bounds.chunk * bounds.chunk
    return tl.where(pos < 0, -bounds.chunk, start)


@triton.jit
def band_start(bounds, pos):
    """The first key, sink tokens aside, of a row at key position `pos`; below 0 the first of all.
    For bounds that have one on the left."""
    if bounds.left is None:
        lo = chunk_start(bounds, pos)
    elif bounds.chunk is None:
        lo = pos - bounds.left
    else:
        lo = tl.maximum(pos - bounds.left, chunk_start(bounds, pos))
    return lo


@triton.jit
def band_end(bounds, pos, keys):
    """One past the last visible key of a row at key position `pos`."""
    if bounds.right is None:
        hi = keys + pos * 0
    else:
        hi = tl.maximum(tl.minimum(keys, pos + bounds.right + 1), 0)
    if bounds.chunk is not None:
        hi = tl.minimum(hi, chunk_start(bounds, pos) + bounds.chunk)
    return hi


@triton.jit
def load_sink_tokens(sink_tokens_ptr, b):
    """The sink tokens of sequence b, whose number may be below 0 for none.

    sink_tokens_ptr   [batch] int32
    """
    return tl.maximum(tl.load(sink_tokens_ptr + b), 0)


class Reach(NamedTuple):
    """Keys `first <= n < end` that a row sees whatever its band: numbers, or vectors of rows."""

    first: Any
    end: Any


@triton.jit
def reach_of(ranges_ptr, num_ranges, pos, there, keys):
    """The Reach of rows at key positions `pos` [rows]: from the first to the last key of the ranges
    that they stand in, as each of them has their own; none of rows that are not `there`.

    ranges_ptr   [num_ranges, 2] int32 of (first, end)
    """
    first = pos * 0 + keys
    end = pos * 0
    for i in range(num_ranges):
        start = tl.maximum(tl.load(ranges_ptr + 2 * i), 0)
        past = tl.load(ranges_ptr + 2 * i + 1)
        inside = there & (pos >= start) & (pos < past)
        first = tl.where(inside, tl.minimum(first, start), first)
        end = tl.where(inside, tl.maximum(end, past), end)
    return Reach(first, tl.minimum(end, keys))


@triton.jit
def visited_tiles(bounds, pos_first, pos_last, keys, TILE_N: tl.constexpr, reach=None):
    """Tiles that rows at positions `pos_first..pos_last` visit; reach: Reach of all of them.

    Returns (count, near, skip): tile i of the count lies at `i` below `near` (the sink tokens) and
    at `i + skip` from there on. The gap between the two bands is never visited.
    """
    hi = band_end(bounds, pos_last, keys)
    if reach is not None:
        hi = tl.maximum(hi, reach.end)
    last = (hi + TILE_N - 1) // TILE_N
    if bounds.left is None and bounds.chunk is None:
        count = last
        near = last
        skip = last * 0
    else:
        lo = tl.minimum(tl.maximum(band_start(bounds, pos_first), 0), hi)
        if reach is not None:
            lo = tl.minimum(lo, reach.first)
        first = tl.minimum(lo // TILE_N, last)
        near = first * 0
        if bounds.sink_tokens is not None:
            near = tl.minimum((tl.minimum(bounds.sink_tokens, hi) + TILE_N - 1) // TILE_N, first)
        count = near + last - first
        skip = first - near
    return count, near, skip


@triton.jit
def visible(bounds, pos, offs_n, keys):
    """The predicate [rows, TILE_N] for rows at key positions `pos` [rows, 1], keys [1, TILE_N]."""
    seen = offs_n < band_end(bounds, pos, keys)
    if bounds.left is not None or bounds.chunk is not None:
        near = offs_n >= band_start(bounds, pos)
        if bounds.sink_tokens is not None:
            near = near | (offs_n < bounds.sink_tokens)
        seen = seen & near
    return seen


@triton.jit
def in_reach(reach, offs_n):
    """The predicate [rows, TILE_N] of a Reach of rows [rows, 1], keys [1, TILE_N]."""
    return (offs_n >= reach.first) & (offs_n < reach.end)


@triton.jit
def all_visible(bounds, pos_first, pos_last, keys, first_n, TILE_N: tl.constexpr):
    """Whether rows at positions `pos_first..pos_last` see all keys of the tile from `first_n` on;
    where sink tokens end in it, no."""
    whole = first_n + TILE_N <= band_end(bounds, pos_first, keys)
    if bounds.left is not None or bounds.chunk is not None:
        whole = whole & (first_n >= band_start(bounds, pos_last))
    return whole
