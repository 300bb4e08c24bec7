"""Scales of each key in `hopper_decode_split`: how they arrive, and what products take of them.

A scale of K multiplies a score, one of V a weight before it is rounded to the type of products. So
that such weights stay in the range of fp16 whatever the scales are, they are relative to a maximum
of their own: that of scores to which the logarithm of the value's scale has been added. Sums are of
weights without scales.

Scales are copied beside the tile that its keys are in: in bulk where they lie in one piece, see
decode_bulk.py, else a key a thread, on the tile's barrier. Where all tiles of a part are asked for
at once, their scales are loaded before, as they would wait behind them. Where tiles follow, those
would wait for scales in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.decode_bulk import ask_in_bulk, read_in_bulk, room_in_bulk
from splitkv.kernels.hopper.pairs import larger
from splitkv.kernels.hopper.ring import ask, async_gather, fill_from, gather_tile, tile_at

LEAST = gl.constexpr(2.0**-60)  # of a scale of values, so that sums of weights over it are finite
LOG = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")
LOG_AND_INVERSE = gl.constexpr("lg2.approx.ftz.f32 $0, $2; rcp.approx.ftz.f32 $1, $2;")


class KeyScales(NamedTuple):
    """Scales of each key: pointers (None: there are none), and the elements between sequences or
    pages, and between keys.

    place    [SLOTS, 2 * TILE_N] for those of K and of V of tiles in flight; the address of those
             copied in bulk
    loaded   None: they are copied; else threads load and store them
    """

    scales: Any
    place: Any
    stride_b: Any
    stride_n: Any
    loaded: Any


@gluon.jit
def place_of_scales(
    scales,
    SLOTS: gl.constexpr,
    TILE_N: gl.constexpr,
    BULK: gl.constexpr,
    EXCHANGED: gl.constexpr,  # bytes that a cluster exchanges
):
    """`KeyScales.place`, or None; barriers of what is copied in bulk are set up."""
    place = None
    if BULK:
        place = room_in_bulk(EXCHANGED, SLOTS, TILE_N, BULK)
    elif scales is not None:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        place = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * TILE_N], plain)
    return place


@gluon.jit
def scales_of_tile(
    of_keys,
    slot,
    phase,
    h,
    S: gl.constexpr,  # the layout of scores
    SLOTS: gl.constexpr,
    TILE_N: gl.constexpr,
    BULK: gl.constexpr,  # of `hopper_decode_split`
):
    """(of keys, of values) in a slot, as rows; the latter `LEAST` at least."""
    KEYS: gl.constexpr = gl.SliceLayout(0, S)
    if BULK:
        k_scale, v_scale = read_in_bulk(of_keys, slot, phase, h, KEYS, SLOTS, TILE_N, BULK)
    else:
        of_tile = of_keys.place.index(slot)
        k_scale = of_tile.slice(0, TILE_N).load(KEYS)
        v_scale = of_tile.slice(TILE_N, TILE_N).load(KEYS)
    return k_scale[None, :], larger(v_scale, LEAST)[None, :]


@gluon.jit
def weighted(s, v_scale):
    """Scores in base 2 of which p times the scale of the value is the power; None: all are 1."""
    if v_scale is not None:
        s += gl.inline_asm_elementwise(
            LOG, "=r,r", [v_scale], dtype=gl.float32, is_pure=True, pack=1
        )
    return s


@gluon.jit
def log_and_inverse(scale):
    """The logarithm to base 2 of a scale of values, and one over it."""
    return gl.inline_asm_elementwise(
        LOG_AND_INVERSE,
        "=&r,=r,r",
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
    """`copy_scales` of keys in pages whose numbers are loaded now."""
    pages = pages_of_scales(pool, b, tile, keys, PAGE_SIZE, TILE_N)
    copy_scales(of_keys, arrived, b, h, slot, tile, pages, keys, PAGE_SIZE, TILE_N)


@gluon.jit
def copy_scales(
    of_keys,
    arrived,
    b,
    h,
    slot,
    tile,
    pages,  # of `pages_of_scales`
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
):
    """Have the scales of a tile's keys copied to its slot; every thread arrives once."""
    k_ptrs, v_ptrs, ok = pointers_to_scales(of_keys, b, h, tile, pages, keys, PAGE_SIZE, TILE_N)
    of_tile = of_keys.place.index(slot)
    async_gather(of_tile.slice(0, TILE_N), k_ptrs, mask=ok)
    async_gather(of_tile.slice(TILE_N, TILE_N), v_ptrs, mask=ok)
    async_copy.mbarrier_arrive(arrived.index(slot), increment_count=False)


@gluon.jit
def keys_of_threads(tile, TILE_N: gl.constexpr):
    """The keys of a tile, a key a thread."""
    a_key_a_thread: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return tile * TILE_N + gl.arange(0, TILE_N, layout=a_key_a_thread)


@gluon.jit
def pages_of_scales(pool, b, tile, keys, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """The pages of these keys, or None."""
    pages = None
    if pool.table_ptr is not None:
        offs_n = keys_of_threads(tile, TILE_N)
        row = pool.table_ptr + b.to(gl.int64) * pool.stride_table
        pages = gl.load(row + offs_n // PAGE_SIZE, mask=offs_n < keys, other=0)
    return pages


@gluon.jit
def pointers_to_scales(
    of_keys, b, h, tile, pages, keys, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr
):
    """To those of keys and of values of a tile, a key a thread, and whether it is one."""
    offs_n = keys_of_threads(tile, TILE_N)
    outer = offs_n * 0 + b
    inner = offs_n
    if pages is not None:
        outer = pages
        inner = offs_n % PAGE_SIZE
    at = outer.to(gl.int64) * of_keys.stride_b + inner.to(gl.int64) * of_keys.stride_n + h
    return of_keys.scales.k_ptr + at, of_keys.scales.v_ptr + at, offs_n < keys


@gluon.jit
def load_scales(of_keys, pool, b, h, tile, keys, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """(scale of a key, of its value) of a tile, a key a thread."""
    pages = pages_of_scales(pool, b, tile, keys, PAGE_SIZE, TILE_N)
    k_ptrs, v_ptrs, ok = pointers_to_scales(of_keys, b, h, tile, pages, keys, PAGE_SIZE, TILE_N)
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
def fill_beside_scales(
    ring,  # Pool, boxes of keys, of values, barriers
    of_keys,
    pages,  # of `first_pages`, or None
    b,
    h,
    tiles,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """`fill_from`, and `load_first_scales` where threads load them, or None: before the tiles, or
    behind rows that are gathered, whose page numbers are there sooner than those of scales."""
    loaded = None
    if of_keys.loaded is None:
        fill_from(*ring, pages, b, h, tiles, keys, PAGE_SIZE, TILE_N, SLOTS)
    elif ring[0].k_steps is None:
        loaded = load_first_scales(of_keys, ring[0], b, h, tiles, keys, PAGE_SIZE, TILE_N, SLOTS)
        fill_from(*ring, pages, b, h, tiles, keys, PAGE_SIZE, TILE_N, SLOTS)
    else:
        fill_from(*ring, pages, b, h, tiles, keys, PAGE_SIZE, TILE_N, SLOTS)
        loaded = load_first_scales(of_keys, ring[0], b, h, tiles, keys, PAGE_SIZE, TILE_N, SLOTS)
    return loaded


@gluon.jit
def store_scales(of_keys, arrived, slot, loaded, TILE_N: gl.constexpr):
    """Store the scales of a tile to its slot; one thread arrives for all."""
    of_tile = of_keys.place.index(slot)
    of_tile.slice(0, TILE_N).store(loaded[0])
    of_tile.slice(TILE_N, TILE_N).store(loaded[1])
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
    of_scales,  # of `pages_of_scales`, or None: they are loaded now
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    BULK: gl.constexpr,
):
    """`ask`, and for the scales of the tile's keys where they have any."""
    pool, _, _, arrived = ring
    if BULK:
        SLOTS: gl.constexpr = arrived.shape[0]
        ask_in_bulk(of_keys, pool, b, slot, tile, keys, PAGE_SIZE, TILE_N, SLOTS, BULK)
    if pool.k_steps is None:
        ask(*ring, slot, b, h, tile, keys, PAGE_SIZE, TILE_N)
    else:
        gather_tile(*ring, slot, h, tile, pages, PAGE_SIZE)
    if of_keys.scales is not None and not BULK:
        if of_keys.loaded is not None:
            loaded = load_scales(of_keys, pool, b, h, tile, keys, PAGE_SIZE, TILE_N)
            store_scales(of_keys, arrived, slot, loaded, TILE_N)
        elif of_scales is None:
            ask_scales(of_keys, arrived, pool, b, h, slot, tile, keys, PAGE_SIZE, TILE_N)
        else:
            copied = of_keys, arrived, b, h, slot, tile, of_scales
            copy_scales(*copied, keys, PAGE_SIZE, TILE_N)
