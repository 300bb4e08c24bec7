"""The tile that a program owns, and the tiles of the other side that it visits.

A lane is what the tiles of one KV head have in common: dense, one sequence and KV head; with packed
sequences a KV head. Rows are packed, row = token * GROUP + head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import band_end, band_start, chunk_start, visited_tiles
from splitkv.kernels.tile.strides import Strides as Strides


class Keys(NamedTuple):
    """The keys and values of one sequence and head: first addresses, strides, number."""

    k_ptr: Any
    v_ptr: Any
    stride_k: Any
    stride_v: Any
    count: Any


class OwnTile(NamedTuple):
    """The tile of a program, of queries or of keys.

    sequence, head              index of the sequence, number of the KV head
    tile                        number of the tile in the sequence
    first, length               the sequence's first token and number of those that are tiled
    other_first, other_length   the same of the others: keys of tiles of queries, queries of keys
    """

    sequence: Any
    head: Any
    tile: Any
    first: Any
    length: Any
    other_first: Any
    other_length: Any


class KeyTile(NamedTuple):
    """The tile of keys of a program of the backward.

    sequence               index in the batch
    first_key, num_keys    the sequence's first key and number of keys
    first_row, num_rows    its first query and number of queries
    kv_head, tile          number of the KV head, and of the tile in the sequence
    """

    sequence: Any
    first_key: Any
    first_row: Any
    kv_head: Any
    num_keys: Any
    num_rows: Any
    tile: Any


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


class TokenLengths(NamedTuple):
    """Where sequences begin and how long they are.

    cu_q_ptr, cu_k_ptr   [batch + 1] int32 of packed queries and keys, or None: dense
    seqlen_q, seqlen_k   tokens and keys of each sequence where dense
    total_q              tokens of all sequences where packed
    """

    cu_q_ptr: Any
    cu_k_ptr: Any
    seqlen_q: Any
    seqlen_k: Any
    batch: Any
    total_q: Any


class TiledTokens(NamedTuple):
    """Which tokens are tiled, and the others that belong to them: keys of queries, or the reverse.

    cu_ptr                 [batch + 1] int32 of those that are tiled, or None: dense
    other_cu_ptr           of the others, or None: all start at 0 and have `other_length`
    length, other_length   of a sequence where dense
    total                  tokens that are tiled, of all sequences
    """

    cu_ptr: Any
    other_cu_ptr: Any
    length: Any
    other_length: Any
    batch: Any
    total: Any


class RowTiling(NamedTuple):
    """Row tiles of a lane, lanes, lanes that go together, and most splits of a row tile's keys, or
    None: one."""

    tiles: Any
    lanes: Any
    width: Any
    num_splits: Any


class RowTileWork(NamedTuple):
    """One split of the keys of one row tile: of a sequence and KV head; first token in memory, and
    tokens, of its queries and keys."""

    split: Any
    b: Any
    h: Any
    tile: Any
    first_q: Any
    len_q: Any
    first_k: Any
    len_k: Any


class PackedRows(NamedTuple):
    """The rows of a row tile, each [TILE]: number in the sequence, token, head, if it is one."""

    row: Any
    token: Any
    head: Any
    ok: Any


@triton.jit
def tile_and_lane(pid, tiles, lanes, width):
    """Finds (tile, lane) of program `pid`: tiles in order, lanes inside, `width` lanes before the
    next ones."""
    first = pid // (tiles * width) * width
    here = tl.minimum(width, lanes - first)
    inside = pid - first * tiles
    return inside // here, first + inside % here


@triton.jit
def own_tile(
    tile,
    lane,
    tokens,  # TiledTokens
    num_kv_heads,
    ROWS: tl.constexpr,  # a token
    TILE: tl.constexpr,
):
    """Finds the OwnTile of a tile and a lane.

    Varlen: sequence b starts at tile cu[b] * ROWS // TILE + b, which leaves each as many tiles as
    it needs or one more. Number `batch` is what lies after the last sequence; it has no others.
    """
    cu_ptr, other_cu_ptr = tokens.cu_ptr, tokens.other_cu_ptr
    length, other_length = tokens.length, tokens.other_length
    batch, total = tokens.batch, tokens.total
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
    return OwnTile(b, h, tile, first, length, other_first, other_length)


@triton.jit
def tokens_of(cu_ptr, b, length):
    """(first, number) of the tokens of sequence b, of which each has `length` where dense."""
    first = b * 0
    if cu_ptr is not None:
        first = tl.load(cu_ptr + b)
        length = tl.load(cu_ptr + b + 1) - first
    return first, length


@triton.jit
def split_tile(pid, splits, cu_k_ptr, cu_q_ptr, seqlen_k, seqlen_q, batch, num_kv_heads):
    """Finds the KeyTile of program `pid` of those that have a split of its rows each: the splits of
    a tile follow each other, then come its heads and sequences, then the next tile."""
    heads = batch * num_kv_heads
    tile = pid // splits // heads
    b = pid // splits % heads // num_kv_heads
    h = pid // splits % num_kv_heads
    first_key, num_keys = tokens_of(cu_k_ptr, b, seqlen_k)
    first_row, num_rows = tokens_of(cu_q_ptr, b, seqlen_q)
    return KeyTile(b, first_key, first_row, h, num_keys, num_rows, tile)


@triton.jit
def whole_tile(own, num_split_tiles, batch):
    """Makes the KeyTile of an OwnTile. It has no keys where its rows are split among other
    programs, those of the first tiles, but for what lies after the last sequence."""
    split_elsewhere = (own.tile < num_split_tiles) & (own.sequence < batch)
    num_keys = tl.where(split_elsewhere, 0, own.length)
    return KeyTile(
        own.sequence,
        own.first,
        own.other_first,
        own.head,
        num_keys,
        own.other_length,
        own.tile,
    )


@triton.jit
def own_split(
    pid,
    tiling,  # RowTiling
    lengths,  # TokenLengths
    max_tokens,  # tokens of the longest sequences whose keys are split
    num_kv_heads,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """The RowTileWork of program `pid`.

    The first split of every row tile, the last and so heaviest ones first; then the other splits of
    the row tiles that a sequence of max_tokens tokens has.
    """
    tiles, lanes, width = tiling.tiles, tiling.lanes, tiling.width
    cu_q_ptr, cu_k_ptr = lengths.cu_q_ptr, lengths.cu_k_ptr
    seqlen_q, seqlen_k, batch = lengths.seqlen_q, lengths.seqlen_k, lengths.batch
    split = pid * 0
    if tiling.num_splits is None or pid < tiles * lanes:
        tile, lane = tile_and_lane(pid, tiles, lanes, width)
        tokens = TiledTokens(cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, batch, lengths.total_q)
        own = own_tile(tiles - 1 - tile, lane, tokens, num_kv_heads, GROUP, TILE_M)
        b = own[0]
        h = own[1]
        tile_m = own[2]
        first_q = own[3]
        len_q = own[4]
        first_k = own[5]
        len_k = own[6]
    else:
        number = pid - tiles * lanes
        row_tiles = (max_tokens * GROUP + TILE_M - 1) // TILE_M
        tile_m = number % row_tiles
        h = number // row_tiles % num_kv_heads
        b = number // (row_tiles * num_kv_heads) % batch
        split = number // (row_tiles * num_kv_heads * batch) + 1
        first_q, len_q = tokens_of(cu_q_ptr, b, seqlen_q)
        first_k, len_k = tokens_of(cu_k_ptr, b, seqlen_k)
    return RowTileWork(split, b, h, tile_m, first_q, len_q, first_k, len_k)


@triton.jit
def tiles_seen(bounds, pos_first, pos_last, keys, TILE_N: tl.constexpr, reach=None):
    """The Visit of rows at key positions `pos_first..pos_last`; reach: Reach of all of them."""
    count, near, skip = visited_tiles(bounds, pos_first, pos_last, keys, TILE_N, reach)
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
    """Cuts a Visit into so many parts as even as can be, and takes one."""
    return cut(visit, part, (visit.count + parts - 1) // parts)


@triton.jit
def cut(visit, part, per):
    """Takes part `part` of a Visit, of so many tiles each."""
    first = tl.minimum(part * per, visit.count)
    count = tl.minimum(visit.count - first, per)
    near = tl.maximum(visit.near - first, 0)
    middle = tl.minimum(tl.maximum(visit.middle_first - first, 0), count)
    middle_end = tl.minimum(tl.maximum(visit.middle_last - first, middle), count)
    return Visit(count, near, visit.start + first, visit.skip + first, middle, middle_end)


@triton.jit
def visits(visit, REGION: tl.constexpr):
    """The range of i for `tile_at` in a region. REGION: "edges", the tiles outside the middle, in
    which the mask is evaluated; "middle", the others."""
    first = visit.middle_first
    last = visit.middle_last
    if REGION == "edges":
        last = visit.count - (last - first)
        first = first * 0
    return first, last


@triton.jit
def tile_at(visit, i, REGION: tl.constexpr):
    """The tile of visit i of a region."""
    if REGION == "edges":
        j = tl.where(i < visit.middle_first, i, i + visit.middle_last - visit.middle_first)
        tile = j + tl.where(j < visit.near, visit.start, visit.skip)
    else:
        tile = i + visit.skip
    return tile


@triton.jit
def rows_of(tile, h, length, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The PackedRows of row tile `tile` of KV head h and a sequence's `length` tokens."""
    offs_m = tile * TILE + tl.arange(0, TILE)
    return PackedRows(offs_m, offs_m // GROUP, h * GROUP + offs_m % GROUP, offs_m < length * GROUP)


@triton.jit
def place(ptr, strides, b, token, head):
    """The first address of each row, in 64 bits."""
    row = b.to(tl.int64) * strides.b + token.to(tl.int64) * strides.t
    return ptr + row + head.to(tl.int64) * strides.h


@triton.jit
def load_tile(rows, ok, DIM: tl.constexpr, DIM_P2: tl.constexpr):
    """Loads [rows, DIM_P2] from the first address of each row; ok [rows] says which exist, None:
    all."""
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
    """Rounds x [rows, DIM_P2] and stores it to the first address of each row."""
    offs_d = tl.arange(0, x.shape[1])
    ptrs = rows[:, None] + offs_d[None, :]
    ok = ok[:, None] & (offs_d < DIM)[None, :]
    tl.store(ptrs, x.to(rows.dtype.element_ty), mask=ok)
