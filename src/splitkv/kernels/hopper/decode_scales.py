"""Scales of each key in `hopper_decode_split`: how they arrive, and what products take of them.

They are copied beside the tile that its keys are in, on the tile's barrier. A scale of K multiplies
a score. The logarithm of a scale of values joins the score that p is the power of, so that p stays
in the range of fp16 whatever the scales are, and sums are of p over the scale.

Where all tiles of a part are asked for at once, their scales are loaded before, behind which they
would wait, and made ready by all threads, a key each. Where tiles follow, those would wait for
scales in registers, and every warp works out those that it wants, from what has been copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.ring import ask, async_gather, gather_tile, tile_at

# Of a scale of values: it is 2^-60 at least, and NaN stays NaN.
LOG_AND_INVERSE = gl.constexpr("""{
    .reg .f32 scale;
    max.NaN.f32 scale, $2, 0f21800000;
    lg2.approx.ftz.f32 $0, scale;
    rcp.approx.ftz.f32 $1, scale;
    }""")


class KeyScales(NamedTuple):
    """Scales of each key: pointers and room for those of tiles in flight (None: there are none),
    the elements between sequences or pages, and between keys.

    ring   [SLOTS, 2 * TILE_N], of K and of V; [SLOTS, 4 * TILE_N], made ready: the scale of the
           key, the logarithm of that of its value, one over that; the rest is there as Triton
           wants powers of two
    """

    scales: Any
    ring: Any
    stride_b: Any
    stride_n: Any


@gluon.jit
def allocate_scales(SLOTS: gl.constexpr, TILE_N: gl.constexpr, READY: gl.constexpr):
    """`KeyScales.ring`."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [SLOTS, (4 if READY else 2) * TILE_N], plain)


@gluon.jit
def scales_of_tile(of_keys, slot, TILE_N: gl.constexpr, S: gl.constexpr):
    """Of the keys in a slot, as rows in the layout of scores: the scale of the key; the logarithm
    to base 2 of that of its value, and one over that scale."""
    KEYS: gl.constexpr = gl.SliceLayout(0, S)
    of_tile = of_keys.ring.index(slot)
    k_scale = of_tile.slice(0, TILE_N).load(KEYS)[None, :]
    of_values = of_tile.slice(TILE_N, TILE_N).load(KEYS)[None, :]
    if of_keys.ring.shape[1] == 2 * TILE_N:
        log, inverse = log_and_inverse(of_values)
    else:
        log = of_values
        inverse = of_tile.slice(2 * TILE_N, TILE_N).load(KEYS)[None, :]
    return k_scale, log, inverse


@gluon.jit
def log_and_inverse(scale):
    return gl.inline_asm_elementwise(
        LOG_AND_INVERSE,
        "=r,=r,r",
        [scale],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def fill_scales(
    of_keys,  # KeyScales
    arrived,
    pool,
    b,
    h,
    tiles,  # Tiles
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Have the scales of the tiles copied that `fill` asks for."""
    for n in gl.static_range(SLOTS):
        i = tiles.first + n * tiles.by
        if i < tiles.last:
            tile = tile_at(tiles, i)
            ask_scales(of_keys, arrived, pool, b, h, n, tile, keys, PAGE_SIZE, TILE_N)


@gluon.jit
def ask_scales(
    of_keys,
    arrived,
    pool,  # Pool
    b,
    h,
    slot,
    tile,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
):
    """Have the scales of a tile's keys copied to its slot; every thread arrives once."""
    k_ptrs, v_ptrs, ok = pointers_to_scales(of_keys, pool, b, h, tile, keys, PAGE_SIZE, TILE_N)
    of_tile = of_keys.ring.index(slot)
    async_gather(of_tile.slice(0, TILE_N), k_ptrs, mask=ok)
    async_gather(of_tile.slice(TILE_N, TILE_N), v_ptrs, mask=ok)
    async_copy.mbarrier_arrive(arrived.index(slot), increment_count=False)


@gluon.jit
def pointers_to_scales(
    of_keys, pool, b, h, tile, keys, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr
):
    """To those of keys and of values of a tile, a key a thread, and whether it is one."""
    a_key_a_thread: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offs_n = tile * TILE_N + gl.arange(0, TILE_N, layout=a_key_a_thread)
    ok = offs_n < keys
    outer = offs_n * 0 + b
    inner = offs_n
    if pool.table_ptr is not None:
        row = pool.table_ptr + b.to(gl.int64) * pool.stride_table
        outer = gl.load(row + offs_n // PAGE_SIZE, mask=ok, other=0)
        inner = offs_n % PAGE_SIZE
    at = outer.to(gl.int64) * of_keys.stride_b + inner.to(gl.int64) * of_keys.stride_n + h
    return of_keys.scales.k_ptr + at, of_keys.scales.v_ptr + at, ok


@gluon.jit
def load_scales(of_keys, pool, b, h, tile, keys, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """(scale of a key, of its value) of a tile, a key a thread."""
    k_ptrs, v_ptrs, ok = pointers_to_scales(of_keys, pool, b, h, tile, keys, PAGE_SIZE, TILE_N)
    return gl.load(k_ptrs, mask=ok, other=1.0), gl.load(v_ptrs, mask=ok, other=1.0)


@gluon.jit
def load_first_scales(
    of_keys,
    pool,
    b,
    h,
    tiles,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """`load_scales` of the tiles that `fill` asks for."""
    loaded = ()
    for n in gl.static_range(SLOTS):
        tile = tile_at(tiles, tiles.first + n * tiles.by)
        of_tile = load_scales(of_keys, pool, b, h, tile, keys, PAGE_SIZE, TILE_N)
        loaded += (of_tile,)  # type: ignore[assignment]
    return loaded


@gluon.jit
def store_scales(of_keys, arrived, slot, loaded, TILE_N: gl.constexpr):
    """Make the scales of a tile ready in its slot; one thread arrives for all."""
    log, inverse = log_and_inverse(loaded[1])
    of_tile = of_keys.ring.index(slot)
    of_tile.slice(0, TILE_N).store(loaded[0])
    of_tile.slice(TILE_N, TILE_N).store(log)
    of_tile.slice(2 * TILE_N, TILE_N).store(inverse)
    mbarrier.arrive(arrived.index(slot))


@gluon.jit
def store_first_scales(of_keys, arrived, loaded, TILE_N: gl.constexpr, SLOTS: gl.constexpr):
    for n in gl.static_range(SLOTS):
        store_scales(of_keys, arrived, n, loaded[n], TILE_N)


@gluon.jit
def ask_with_scales(
    ring,  # Pool, boxes of keys, of values, barriers
    of_keys,
    slot,
    b,
    h,
    tile,
    pages,  # of `pages_of`
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
):
    """`ask`, and for the scales of the tile's keys where they have any."""
    if ring[0].k_steps is None:
        ask(*ring, slot, b, h, tile, keys, PAGE_SIZE, TILE_N)
    else:
        gather_tile(*ring, slot, h, tile, pages, PAGE_SIZE)
    if of_keys.scales is not None:
        if of_keys.ring.shape[1] == 2 * TILE_N:
            ask_scales(of_keys, ring[3], ring[0], b, h, slot, tile, keys, PAGE_SIZE, TILE_N)
        else:
            loaded = load_scales(of_keys, ring[0], b, h, tile, keys, PAGE_SIZE, TILE_N)
            store_scales(of_keys, ring[3], slot, loaded, TILE_N)
