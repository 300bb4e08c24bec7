"""New tokens that go into a cache: their lengths, their rotation, and who writes which.

`append` writes them in a launch of its own. A decode kernel that appends writes them as it goes:
the programs that visit a tile write the new tokens in it before they read it, all of them the same
bits, and a token that no row sees is written by the first program of its sequence and head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import visited_tiles
from splitkv.kernels.tile.encode import Place, write_tokens
from splitkv.kernels.tile.locate import locate


class New(NamedTuple):
    """Pointers to the new k and v, to the caches that they go into (e4m3 as its bytes), and to the
    scales by which they are stored, or None: as they are."""

    k_ptr: Any
    v_ptr: Any
    k_cache_ptr: Any
    v_cache_ptr: Any
    k_scale_ptr: Any
    v_scale_ptr: Any


class Turn(NamedTuple):
    """Pointers to cos and sin and to the first token's row of them [batch], None: the keys before;
    all None: no rotation."""

    cos_ptr: Any
    sin_ptr: Any
    start_ptr: Any


class Growth(NamedTuple):
    """Pointers to cu_seqlens of the new tokens [batch + 1], None: dense; and to the padding before
    the keys [batch], None: none."""

    cu_ptr: Any
    leftpad_ptr: Any


class Grown(NamedTuple):
    """Of a sequence: keys before, padding included; new tokens; padding; keys after, without it."""

    before: Any
    new: Any
    padding: Any
    keys: Any


class NewSteps(NamedTuple):
    """Elements between sequences, tokens and heads of new k, between slabs, keys and heads of its
    cache, the same of v, between sequences and heads of the scales, between rows of cos and sin."""

    k: Any
    k_cache: Any
    v: Any
    v_cache: Any
    scale: Any
    cos: Any
    sin: Any


class Tiles(NamedTuple):
    """Of a part: first, first + by, ... before last, those from `near` on `skip` further along."""

    first: Any
    last: Any
    by: Any
    near: Any
    skip: Any


@triton.jit
def grown(lens_ptr, growth, b, ok, seqlen_new, capacity):
    """The Grown of sequences b."""
    before = tl.load(lens_ptr + b, mask=ok, other=0)
    new = before * 0 + seqlen_new
    if growth.cu_ptr is not None:
        first = tl.load(growth.cu_ptr + b, mask=ok, other=0)
        new = tl.load(growth.cu_ptr + b + 1, mask=ok, other=0) - first
    padding = before * 0
    if growth.leftpad_ptr is not None:
        padding = tl.load(growth.leftpad_ptr + b, mask=ok, other=0)
    return Grown(before, new, padding, tl.minimum(before + new, capacity) - padding)


@triton.jit
def keys_of(lens_ptr, growth, b, ok, seqlen_new, capacity):
    """Keys of sequences b, with what is appended; 0 where not ok."""
    if seqlen_new is None:
        keys = tl.load(lens_ptr + b, mask=ok, other=0)
    else:
        keys = grown(lens_ptr, growth, b, ok, seqlen_new, capacity).keys
        keys = tl.where(ok, keys, 0)
    return keys


@triton.jit
def rotated(
    rows,  # pointers to the first elements [TILE_T]
    ok,  # [TILE_T]
    t,  # rows of cos and sin [TILE_T]
    offs_d,  # columns [N]
    turn,  # Turn
    rotary_rows,
    stride_cos,
    stride_sin,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
):
    """x [TILE_T, N], and rotated if there is a rotation; 0 where there is none."""
    x_ok = ok[:, None] & (offs_d < DIM)[None, :]
    x = tl.load(rows[:, None] + offs_d[None, :], mask=x_ok, other=0.0)
    if turn.cos_ptr is not None:
        first = offs_d // PAIR % 2 == 0
        partner = tl.where(first, offs_d + PAIR, offs_d - PAIR)
        turns = offs_d < ROTARY_DIM
        pair_ok = ok[:, None] & turns[None, :]
        other = tl.load(rows[:, None] + partner[None, :], mask=pair_ok, other=0.0).to(tl.float32)
        angle = offs_d // (2 * PAIR) * PAIR + offs_d % PAIR
        t_long = t.to(tl.int64)[:, None]
        known = pair_ok & ((t >= 0) & (t < rotary_rows))[:, None]
        cos = tl.load(
            turn.cos_ptr + t_long * stride_cos + angle[None, :], mask=known, other=1.0
        ).to(tl.float32)
        sin = tl.load(
            turn.sin_ptr + t_long * stride_sin + angle[None, :], mask=known, other=0.0
        ).to(tl.float32)
        sin = tl.where(first[None, :], -sin, sin)
        # said, not left to the compiler: the same bits in every kernel
        both = tl.fma(x.to(tl.float32), cos, other * sin)
        x = tl.where(known, both.to(x.dtype), x)
    return x


@triton.jit
def start_of(turn, before, b, ok):
    """The first token's row of cos and sin, of sequences b with `before` keys."""
    t = before
    if turn.start_ptr is not None:
        t = tl.load(turn.start_ptr + b, mask=ok, other=0)
    return t


@triton.jit
def holds(tiles, tile):
    """Whether a tile [.] is one of the Tiles."""
    i = tl.where(tile < tiles.near, tile, tile - tiles.skip)
    there = (tile < tiles.near) | (i >= tiles.near)
    return there & (i >= tiles.first) & (i < tiles.last) & ((i - tiles.first) % tiles.by == 0)


@triton.jit
def reaches(tiles, first, last):
    """Whether one of the Tiles may lie in `first..last`: never no where one does."""
    near, skip = tiles.near, tiles.skip
    first = tl.where(first < near, first, tl.maximum(first - skip, near))
    last = tl.where(last < near, last, tl.maximum(last - skip, near))
    rounds = (tl.maximum(first - tiles.first, 0) + tiles.by - 1) // tiles.by
    return tiles.first + rounds * tiles.by < tl.minimum(last + 1, tiles.last)


@triton.jit
def seen_tiles(bounds, keys, seqlen_q, is_first, TILE_N: tl.constexpr):
    """Tiles that some row sees, for the first program of a sequence and head, which writes the
    tokens beside them; for the others all tiles, as for masks by which every key is seen."""
    count, near, skip = 2147483647, 2147483647, 0
    if bounds.left is not None or bounds.chunk is not None:
        count, near, skip = visited_tiles(bounds, keys - seqlen_q, keys - 1, keys, TILE_N)
        count = tl.where(is_first, count, 2147483647)
        near = tl.where(is_first, near, 2147483647)
    return Tiles(0, count, 1, near, skip)


@triton.jit
def has_new(length, tiles, seen, TILE_N: tl.constexpr):
    """Whether a program has new tokens to write.

    length  Grown
    tiles   its own Tiles
    seen    Tiles beside which it writes as well
    """
    first = tl.maximum(length.before - length.padding, 0) // TILE_N
    last = (length.keys - 1) // TILE_N
    beside = (last >= seen.near) & (first < seen.near + seen.skip)
    return (reaches(tiles, first, last) | beside) & (length.before - length.padding < length.keys)


@triton.jit
def write_new(
    new,  # New
    turn,  # Turn
    growth,  # Growth
    length,  # Grown
    table_ptr,  # the sequence's row of the page table, or None
    b,
    h,
    tiles,  # Tiles: the program's own
    seen,  # Tiles: tokens beside them are written, too
    steps,  # NewSteps
    capacity,
    slabs,
    rotary_rows,
    offs_t,  # [TILE_T] tokens at once
    offs_k,  # [DIM]
    offs_v,  # [DIM_V]
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Write the new tokens of one head that lie in the program's tiles into the cache."""
    start = start_of(turn, length.before, b, True)
    k_rows = new.k_ptr + h.to(tl.int64) * steps.k[2]
    v_rows = new.v_ptr + h.to(tl.int64) * steps.v[2]
    if growth.cu_ptr is None:
        k_rows += b.to(tl.int64) * steps.k[0]
        v_rows += b.to(tl.int64) * steps.v[0]
    else:
        first = tl.load(growth.cu_ptr + b).to(tl.int64)
        k_rows += first * steps.k[1]
        v_rows += first * steps.v[1]
    count = tl.minimum(length.new, capacity - length.before)
    for done in range(0, count, offs_t.shape[0]):
        i = done + offs_t
        place = length.before - length.padding + i
        tile = place // TILE_N
        mine = holds(tiles, tile) | (holds(seen, tile) == 0)
        ok = mine & (i < count) & (place >= 0)
        outer, inner = locate(table_ptr, b, place, ok, PAGE_SIZE)
        ok = ok & (outer >= 0) & (outer < slabs)
        i_long = i.to(tl.int64)
        angles = rotary_rows, steps.cos, steps.sin
        k = rotated(
            k_rows + i_long * steps.k[1],
            ok,
            start + i,
            offs_k,
            turn,
            *angles,
            HEAD_DIM,
            ROTARY_DIM,
            PAIR,
        )  # [TILE_T, DIM]
        v_ok = ok[:, None] & (offs_v < HEAD_DIM_V)[None, :]
        v = tl.load((v_rows + i_long * steps.v[1])[:, None] + offs_v[None, :], mask=v_ok, other=0.0)
        at = Place(b + i * 0, outer, inner, h.to(tl.int64))
        k_at = k, ok, offs_k, new.k_cache_ptr, new.k_scale_ptr
        v_at = v, ok, offs_v, new.v_cache_ptr, new.v_scale_ptr
        by, of_head = steps.scale
        write_tokens(*k_at, None, at, *steps.k_cache, by, None, of_head, HEAD_DIM)
        write_tokens(*v_at, None, at, *steps.v_cache, by, None, of_head, HEAD_DIM_V)


@triton.jit
def write_and_wait(
    new,  # as write_new
    turn,
    growth,
    length,
    table_ptr,
    b,
    h,
    tiles,
    seen,
    steps,
    capacity,
    slabs,
    rotary_rows,
    offs_k,
    offs_v,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    TILE_T: tl.constexpr,
):
    """`write_new` where there is anything to write, and before one warp reads all have written."""
    if has_new(length, tiles, seen, TILE_N):
        write_new(
            *(new, turn, growth, length),
            table_ptr,
            *(b, h, tiles, seen, steps, capacity, slabs, rotary_rows),
            *(tl.arange(0, TILE_T), offs_k, offs_v),
            *(HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, TILE_N, ROTARY_DIM, PAIR),
        )
        tl.debug_barrier()
