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
from splitkv.kernels.tile.encode import Place, StoredTensor, write_tokens
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
    """Pointers to cos and sin, and to the row of them for each sequence's first new token [batch],
    None: the number of keys before it. All None: no rotation."""

    cos_ptr: Any
    sin_ptr: Any
    start_ptr: Any


class Growth(NamedTuple):
    """Pointers to cu_seqlens of the new tokens [batch + 1], None: dense; and to the padding before
    the keys [batch], None: none."""

    cu_ptr: Any
    leftpad_ptr: Any


class Grown(NamedTuple):
    """The lengths of a sequence: keys before, padding included; new tokens; padding; keys after,
    without it."""

    before: Any
    new: Any
    padding: Any
    keys: Any


class NewStrides(NamedTuple):
    """The Strides of the new k and v (a sequence, a token, a head), of their caches (a sequence or
    a page, a key, a head) and of the scales by which they are stored (a sequence, None, a head)."""

    k: Any
    k_cache: Any
    v: Any
    v_cache: Any
    scale: Any


class NewTokens(NamedTuple):
    """The new tokens of a call that appends, and how they are stored.

    new, turn, growth   New, Turn, Growth
    length              Grown, of the program's sequence
    shown               Tiles beside which the program writes tokens as well
    strides, angles     NewStrides, AngleTable
    capacity, slabs     keys that a sequence has room for; sequences or pages of the cache
    """

    new: Any
    turn: Any
    growth: Any
    length: Any
    shown: Any
    strides: Any
    angles: Any
    capacity: Any
    slabs: Any


class NewHead(NamedTuple):
    """The sequence and KV head whose new tokens a program writes, and its row of the page
    table, or None."""

    sequence: Any
    kv_head: Any
    table_ptr: Any


class TokenOffsets(NamedTuple):
    """Index vectors: tokens that are written at once [TILE_T], columns of keys [DIM] and of values
    [DIM_V]."""

    tokens: Any
    k: Any
    v: Any


class AngleTable(NamedTuple):
    """How many rows cos and sin have, and the elements between them."""

    rows: Any
    stride_cos: Any
    stride_sin: Any


class Tiles(NamedTuple):
    """The key tiles of a split: first, first + by, ... before last, those from `near` on `skip`
    further along."""

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
    angles,  # AngleTable
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Loads x [TILE_T, N], 0 where not ok, and rotates it if there is a rotation."""
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
        known = pair_ok & ((t >= 0) & (t < angles.rows))[:, None]
        cos = tl.load(
            turn.cos_ptr + t_long * angles.stride_cos + angle[None, :], mask=known, other=1.0
        ).to(tl.float32)
        sin = tl.load(
            turn.sin_ptr + t_long * angles.stride_sin + angle[None, :], mask=known, other=0.0
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
    """Whether tiles [.] are among the Tiles."""
    i = tl.where(tile < tiles.near, tile, tile - tiles.skip)
    there = (tile < tiles.near) | (i >= tiles.near)
    return there & (i >= tiles.first) & (i < tiles.last) & ((i - tiles.first) % tiles.by == 0)


@triton.jit
def reaches(tiles, first, last):
    """Whether one of the Tiles may lie in `first..last`; may be true where none does, never false
    where one does."""
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
def has_new(tokens, tiles, TILE_N: tl.constexpr):
    """Whether a program has new tokens to write: NewTokens that lie in its Tiles, or beside those
    that are shown."""
    length, shown = tokens.length, tokens.shown
    first = tl.maximum(length.before - length.padding, 0) // TILE_N
    last = (length.keys - 1) // TILE_N
    beside = (last >= shown.near) & (first < shown.near + shown.skip)
    return (reaches(tiles, first, last) | beside) & (length.before - length.padding < length.keys)


@triton.jit
def write_new(
    tokens,  # NewTokens
    head,  # NewHead
    tiles,  # Tiles of the program
    offs,  # TokenOffsets
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Writes the new tokens of one head that lie in the program's tiles into the cache."""
    new, growth, length, strides = tokens.new, tokens.growth, tokens.length, tokens.strides
    b, h = head.sequence, head.kv_head
    start = start_of(tokens.turn, length.before, b, True)
    k_rows = new.k_ptr + h.to(tl.int64) * strides.k.h
    v_rows = new.v_ptr + h.to(tl.int64) * strides.v.h
    if growth.cu_ptr is None:
        k_rows += b.to(tl.int64) * strides.k.b
        v_rows += b.to(tl.int64) * strides.v.b
    else:
        first = tl.load(growth.cu_ptr + b).to(tl.int64)
        k_rows += first * strides.k.t
        v_rows += first * strides.v.t
    k_cache = StoredTensor(new.k_cache_ptr, new.k_scale_ptr, None, strides.k_cache, strides.scale)
    v_cache = StoredTensor(new.v_cache_ptr, new.v_scale_ptr, None, strides.v_cache, strides.scale)
    count = tl.minimum(length.new, tokens.capacity - length.before)
    for done in range(0, count, offs.tokens.shape[0]):
        i = done + offs.tokens
        place = length.before - length.padding + i
        tile = place // TILE_N
        mine = holds(tiles, tile) | (holds(tokens.shown, tile) == 0)
        ok = mine & (i < count) & (place >= 0)
        outer, inner = locate(head.table_ptr, b, place, ok, PAGE_SIZE)
        ok = ok & (outer >= 0) & (outer < tokens.slabs)
        i_long = i.to(tl.int64)
        k = rotated(
            k_rows + i_long * strides.k.t,
            ok,
            start + i,
            offs.k,
            tokens.turn,
            tokens.angles,
            HEAD_DIM,
            ROTARY_DIM,
            PAIR,
        )  # [TILE_T, DIM]
        v_ok = ok[:, None] & (offs.v < HEAD_DIM_V)[None, :]
        v = tl.load(
            (v_rows + i_long * strides.v.t)[:, None] + offs.v[None, :], mask=v_ok, other=0.0
        )
        at = Place(b + i * 0, outer, inner, h.to(tl.int64))
        write_tokens(k, ok, offs.k, k_cache, at, HEAD_DIM)
        write_tokens(v, ok, offs.v, v_cache, at, HEAD_DIM_V)
