"""Which tile is this program's, and which tiles of the other side does it visit?

A lane is what the tiles of one KV head have in common: dense, one sequence and KV head; with packed
sequences a KV head. Rows are packed, row = token * GROUP + head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import band_end, band_start, chunk_start, visited_tiles


class Strides(NamedTuple):
    """Elements between sequences (0 where packed), tokens and heads."""

    b: Any
    t: Any
    h: Any


class Keys(NamedTuple):
    """The keys and values of one sequence and head: first addresses, strides, number."""

    k_ptr: Any
    v_ptr: Any
    stride_k: Any
    stride_v: Any
    count: Any


class Visit(NamedTuple):
    """The tiles that a program visits: `count`, which lie at `start + i` below `near` and at
    `skip + i` from there on. In those from `middle_first` to before `middle_last` every row sees
    every key."""

    count: Any
    near: Any
    start: Any
    skip: Any
    middle_first: Any
    middle_last: Any


@triton.jit
def tile_and_lane(pid, tiles, lanes, width):
    """Of program `pid`: tiles in order, lanes inside, `width` lanes before the next ones."""
    first = pid // (tiles * width) * width
    here = tl.minimum(width, lanes - first)
    inside = pid - first * tiles
    return inside // here, first + inside % here


@triton.jit
def own_tile(
    tile,
    lane,
    cu_ptr,  # [batch + 1] of the tokens that are tiled, or None: dense
    other_cu_ptr,  # of the others, or None: all start at 0 and have `other_length`
    length,  # tokens of a sequence where dense
    other_length,
    batch,
    total,  # tokens that are tiled, of all sequences
    num_kv_heads,
    ROWS: tl.constexpr,  # a token
    TILE: tl.constexpr,
):
    """(b, h, tile, first, length, other first, other length): sequence, KV head and tokens.

    Varlen: sequence b starts at tile cu[b] * ROWS // TILE + b, which leaves each as many tiles as
    it needs or one more. Number `batch` is what lies after the last sequence; it has no others.
    """
    if cu_ptr is None:
        b = lane // num_kv_heads
        h = lane % num_kv_heads
        first = b * 0
        other_first = b * 0
    else:
        h = lane
        b = h * 0
        other_first = b * 0
        for past in range(1, batch + 1, 128):
            offs = past + tl.arange(0, 128)
            starts = tl.load(cu_ptr + offs, mask=offs <= batch, other=0)
            before = (starts * ROWS // TILE + offs <= tile) & (offs <= batch)
            b += tl.sum(before.to(tl.int32), 0)
        known = b < batch
        first = tl.load(cu_ptr + b)
        length = tl.where(known, tl.load(cu_ptr + b + 1, mask=known, other=0), total) - first
        if other_cu_ptr is not None:
            other_first = tl.load(other_cu_ptr + b)
            other_length = tl.load(other_cu_ptr + b + 1, mask=known, other=0) - other_first
        other_length = tl.where(known, other_length, 0)
        tile -= first * ROWS // TILE + b
    return b, h, tile, first, length, other_first, other_length


@triton.jit
def tokens_of(cu_ptr, b, length):
    """(first, number) of the tokens of sequence b, of which each has `length` where dense."""
    first = b * 0
    if cu_ptr is not None:
        first = tl.load(cu_ptr + b)
        length = tl.load(cu_ptr + b + 1) - first
    return first, length


@triton.jit
def cut_tile(pid, parts, cu_ptr, other_cu_ptr, length, other_length, batch, num_kv_heads):
    """What `own_tile` gives, of program `pid` of those that have a part of a tile of keys each: the
    parts of a tile follow each other, then come its heads and sequences, then the next tile."""
    heads = batch * num_kv_heads
    tile = pid // parts // heads
    b = pid // parts % heads // num_kv_heads
    h = pid // parts % num_kv_heads
    first, length = tokens_of(cu_ptr, b, length)
    other_first, other_length = tokens_of(other_cu_ptr, b, other_length)
    return b, h, tile, first, length, other_first, other_length


@triton.jit
def own_part(
    pid,
    tiles,  # row tiles of a lane
    lanes,
    width,  # as in tile_and_lane
    parts,  # most parts of a row tile's keys, or None: one
    most_q,  # tokens of the longest sequences whose keys are cut into parts
    cu_q_ptr,  # [batch + 1], or None: dense
    cu_k_ptr,
    seqlen_q,
    seqlen_k,
    batch,
    total_q,
    num_kv_heads,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """(part, b, h, row tile, first query, queries, first key, keys).

    The first part of every row tile, the last and so heaviest ones first; then the other parts of
    the row tiles that a sequence of `most_q` tokens has.
    """
    part = pid * 0
    both = cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, batch
    if parts is None or pid < tiles * lanes:
        tile, lane = tile_and_lane(pid, tiles, lanes, width)
        own = own_tile(tiles - 1 - tile, lane, *both, total_q, num_kv_heads, GROUP, TILE_M)
        b, h, tile_m, first_q, len_q, first_k, len_k = own
    else:
        number = pid - tiles * lanes
        row_tiles = (most_q * GROUP + TILE_M - 1) // TILE_M
        tile_m = number % row_tiles
        h = number // row_tiles % num_kv_heads
        b = number // (row_tiles * num_kv_heads) % batch
        part = number // (row_tiles * num_kv_heads * batch) + 1
        first_q, len_q = tokens_of(cu_q_ptr, b, seqlen_q)
        first_k, len_k = tokens_of(cu_k_ptr, b, seqlen_k)
    return part, b, h, tile_m, first_q, len_q, first_k, len_k


@triton.jit
def tiles_seen(bounds, pos_first, pos_last, keys, TILE_N: tl.constexpr):
    """The Visit of rows at key positions `pos_first..pos_last`."""
    count, near, skip = visited_tiles(bounds, pos_first, pos_last, keys, TILE_N)
    first = count * 0
    if bounds.left is not None or bounds.chunk is not None:
        whole = (tl.maximum(band_start(bounds, pos_last), 0) + TILE_N - 1) // TILE_N
        first = tl.minimum(tl.maximum(whole - skip, near), count)
    last = tl.maximum(band_end(bounds, pos_first, keys) // TILE_N - skip, first)
    return Visit(count, near, 0 * count, skip, first, tl.minimum(last, count))


@triton.jit
def row_tiles_seen(bounds, first, last, shift, length, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """The Visit of keys `first..last`: tiles of packed rows, of the `length` tokens of a sequence
    whose first stands at key position `shift`."""
    start = length * 0
    whole = length * 0
    if bounds.right is not None:
        start = tl.minimum(tl.maximum(first - bounds.right - shift, 0), length)
        whole = tl.minimum(tl.maximum(last - bounds.right - shift, 0), length)
    end = length
    whole_end = length
    if bounds.left is not None:
        end = tl.minimum(last + bounds.left - shift + 1, length)
        whole_end = tl.minimum(first + bounds.left - shift + 1, length)
    if bounds.chunk is not None:
        chunk_first = chunk_start(bounds, first) - shift
        chunk_last = chunk_start(bounds, last) - shift
        start = tl.minimum(tl.maximum(start, chunk_first), length)
        whole = tl.minimum(tl.maximum(whole, chunk_last), length)
        end = tl.minimum(end, chunk_last + bounds.chunk)
        whole_end = tl.minimum(whole_end, chunk_first + bounds.chunk)
    if bounds.sink_tokens is not None:
        end = tl.where(first < bounds.sink_tokens, length, end)
    end = tl.maximum(end, start)
    skip = start * GROUP // TILE_M
    count = (end * GROUP + TILE_M - 1) // TILE_M - skip
    middle = (whole * GROUP + TILE_M - 1) // TILE_M - skip
    middle = tl.minimum(tl.maximum(middle, 0), count)
    middle_end = tl.maximum(whole_end, 0) * GROUP // TILE_M - skip
    middle_end = tl.minimum(tl.maximum(middle_end, middle), count)
    return Visit(count, 0 * count, 0 * count, skip, middle, middle_end)


@triton.jit
def part_of(visit, part, parts):
    """The Visit of one of so many parts."""
    return cut(visit, part, (visit.count + parts - 1) // parts)


@triton.jit
def cut(visit, part, per):
    """The Visit of part `part` of so many tiles each."""
    first = tl.minimum(part * per, visit.count)
    count = tl.minimum(visit.count - first, per)
    near = tl.maximum(visit.near - first, 0)
    middle = tl.minimum(tl.maximum(visit.middle_first - first, 0), count)
    middle_end = tl.minimum(tl.maximum(visit.middle_last - first, middle), count)
    return Visit(count, near, visit.start + first, visit.skip + first, middle, middle_end)


@triton.jit
def visits(visit, MASKED: tl.constexpr):
    """The range of `tile_at`: outside the middle where a mask has to be asked, else the middle."""
    first = visit.middle_first
    last = visit.middle_last
    if MASKED:
        last = visit.count - (last - first)
        first = first * 0
    return first, last


@triton.jit
def tile_at(visit, i, MASKED: tl.constexpr):
    """The tile of visit i."""
    if MASKED:
        j = tl.where(i < visit.middle_first, i, i + visit.middle_last - visit.middle_first)
        tile = j + tl.where(j < visit.near, visit.start, visit.skip)
    else:
        tile = i + visit.skip
    return tile


@triton.jit
def rows_of(tile, h, length, GROUP: tl.constexpr, TILE: tl.constexpr):
    """(row, token, head, ok) [TILE] of row tile `tile` of KV head h and a sequence's tokens."""
    offs_m = tile * TILE + tl.arange(0, TILE)
    return offs_m, offs_m // GROUP, h * GROUP + offs_m % GROUP, offs_m < length * GROUP


@triton.jit
def place(ptr, strides, b, token, head):
    """The first address of each row, in 64 bits."""
    row = b.to(tl.int64) * strides.b + token.to(tl.int64) * strides.t
    return ptr + row + head.to(tl.int64) * strides.h


@triton.jit
def load_tile(rows, ok, DIM: tl.constexpr, DIM_P2: tl.constexpr):
    """[rows, DIM_P2] from the first addresses of its rows; ok [rows], or None: all exist."""
    offs_d = tl.arange(0, DIM_P2)
    ptrs = rows[:, None] + offs_d[None, :]
    if ok is not None:
        x = tl.load(ptrs, mask=ok[:, None] & (offs_d < DIM)[None, :], other=0.0)
    elif DIM == DIM_P2:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=(offs_d < DIM)[None, :], other=0.0)
    return x


@triton.jit
def store_tile(rows, x, ok, DIM: tl.constexpr):
    """x [rows, DIM_P2], rounded, to the first addresses of its rows."""
    offs_d = tl.arange(0, x.shape[1])
    ptrs = rows[:, None] + offs_d[None, :]
    ok = ok[:, None] & (offs_d < DIM)[None, :]
    tl.store(ptrs, x.to(rows.dtype.element_ty), mask=ok)
