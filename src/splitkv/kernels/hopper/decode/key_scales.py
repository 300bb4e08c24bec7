"""Scales of each key in decode on Hopper: how they arrive, and what products take of them.

A scale of K multiplies a score, one of V a weight before it is rounded to the type of products. So
that such weights stay in the range of fp16 whatever the scales are, they are relative to a maximum
of their own: that of scores to which the logarithm of the value's scale has been added. Sums are of
weights without scales.

How they arrive is `DecodeConfig.key_scales`:

    bulk       those of all KV heads together, as they lie: see bulk_scales.py
    per_tile   copied beside the tile that its keys are in, a key a thread, on the tile's barrier
    preloaded  loaded into registers before the tiles are issued, as they would wait behind them;
               where more tiles follow, those would wait for scales in registers
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.decode.bulk_scales import (
    allocate_bulk_scales,
    issue_bulk_scales,
    issue_first_bulk_scales,
    read_bulk_scales,
)
from splitkv.kernels.hopper.decode.byte_pairs import larger
from splitkv.kernels.hopper.decode.ring import (
    copy_first_tiles,
    copy_first_tiles_that,
    gather_first_tiles,
    gather_tile,
    has_key_from,
    is_before,
    issue_tile,
)
from splitkv.kernels.hopper.primitives.tma_ring import async_gather, tile_at_place

LEAST = gl.constexpr(2.0**-60)  # of a scale of values, so that sums of weights over it are finite
LOG = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")
LOG_AND_INVERSE = gl.constexpr("lg2.approx.ftz.f32 $0, $2; rcp.approx.ftz.f32 $1, $2;")


@gluon.constexpr_function
def arrivals_per_tile(config, warps):
    """Counts the threads that arrive at the barrier of a stage: one that issues its TMA copies, or
    all that gather its rows; and those that bring its scales: all threads, one warp, or one thread
    on behalf of all that stored them."""
    every = 32 * warps
    copying = 32 if config.load == "producer_warp" else every
    scales = {"none": 0, "bulk": 0, "preloaded": 1, "per_tile": copying}[config.key_scales]
    return (every if config.load == "gather" else 1) + scales


@gluon.jit
def allocate_scale_stages(CONFIG: gl.constexpr):
    """Makes `KeyScales.stages`; None where keys have no scales."""
    stages = None
    if CONFIG.key_scales == "bulk":
        stages = allocate_bulk_scales(CONFIG.exchanged_bytes, CONFIG)
    elif CONFIG.key_scales != "none":
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        STAGES: gl.constexpr = CONFIG.num_stages
        TILE_N: gl.constexpr = CONFIG.tile_n
        stages = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * TILE_N], plain)
    return stages


# --- pointers ----------------------------------------------------------------------------------


@gluon.jit
def key_of_thread(tile, TILE_N: gl.constexpr):
    """The keys of a tile [TILE_N], a key a thread."""
    a_key_a_thread: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return tile * TILE_N + gl.arange(0, TILE_N, layout=a_key_a_thread)


@gluon.jit
def load_scale_page_ids(kv, split, tile, CONFIG: gl.constexpr):
    """Loads the page of each key of a tile [TILE_N], a key a thread; None: no pages."""
    pages = None
    if kv.table_ptr is not None:
        offs_n = key_of_thread(tile, CONFIG.tile_n)
        row = kv.table_ptr + split.sequence.to(gl.int64) * kv.stride_table
        pages = gl.load(row + offs_n // CONFIG.page_size, mask=offs_n < split.num_keys, other=0)
    return pages


@gluon.jit
def scale_pointers(scales, split, tile, pages, CONFIG: gl.constexpr):
    """(of K, of V, whether it is a key) [TILE_N] of the keys of a tile, a key a thread."""
    offs_n = key_of_thread(tile, CONFIG.tile_n)
    outer = offs_n * 0 + split.sequence
    inner = offs_n
    if pages is not None:
        outer = pages
        inner = offs_n % CONFIG.page_size
    of_key = outer.to(gl.int64) * scales.stride_b + inner.to(gl.int64) * scales.stride_n
    at = of_key + split.kv_head
    k_ptrs, v_ptrs = scales.pointers.k_ptr + at, scales.pointers.v_ptr + at
    return k_ptrs, v_ptrs, offs_n < split.num_keys


# --- per tile: copied --------------------------------------------------------------------------


@gluon.jit
def copy_scales(scales, ring, split, stage, tile, pages, CONFIG: gl.constexpr):
    """Copies the scales of a tile's keys into a stage; every thread arrives at its barrier."""
    k_ptrs, v_ptrs, ok = scale_pointers(scales, split, tile, pages, CONFIG)
    into = scales.stages.index(stage)
    async_gather(into.slice(0, CONFIG.tile_n), k_ptrs, mask=ok)
    async_gather(into.slice(CONFIG.tile_n, CONFIG.tile_n), v_ptrs, mask=ok)
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)


@gluon.jit
def copy_first_scales(scales, ring, kv, split, CONFIG: gl.constexpr):
    """Copies the scales of the tiles that the ring holds first."""
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        i = split.tiles.first + n * split.tiles.by
        if i < split.tiles.last:
            tile = tile_at_place(split.tiles, i)
            pages = load_scale_page_ids(kv, split, tile, CONFIG)
            copy_scales(scales, ring, split, n, tile, pages, CONFIG)


# --- preloaded: through registers --------------------------------------------------------------


@gluon.jit
def load_scales(scales, kv, split, tile, CONFIG: gl.constexpr):
    """Loads (scale of K, scale of V) [TILE_N] of the keys of a tile, a key a thread."""
    pages = load_scale_page_ids(kv, split, tile, CONFIG)
    k_ptrs, v_ptrs, ok = scale_pointers(scales, split, tile, pages, CONFIG)
    return gl.load(k_ptrs, mask=ok, other=1.0), gl.load(v_ptrs, mask=ok, other=1.0)


@gluon.jit
def load_first_scales(scales, kv, split, CONFIG: gl.constexpr):
    """Loads the scales of the tiles that the ring holds first: a tuple, a stage each."""
    loaded = ()
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        tile = tile_at_place(split.tiles, split.tiles.first + n * split.tiles.by)
        of_tile = load_scales(scales, kv, split, tile, CONFIG)
        loaded += (of_tile,)  # type: ignore[assignment]
    return loaded


@gluon.jit
def store_scales(scales, ring, stage, loaded, TILE_N: gl.constexpr):
    """Stores loaded scales of a tile into a stage; one thread arrives for all."""
    into = scales.stages.index(stage)
    into.slice(0, TILE_N).store(loaded[0])
    into.slice(TILE_N, TILE_N).store(loaded[1])
    mbarrier.arrive(ring.full.index(stage))


@gluon.jit
def store_first_scales(scales, ring, loaded, CONFIG: gl.constexpr):
    """Stores the scales that `load_first_scales` loaded into their stages."""
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        store_scales(scales, ring, n, loaded[n], CONFIG.tile_n)


# --- tiles with their scales -------------------------------------------------------------------


@gluon.jit
def copy_first_tiles_and_scales(ring, kv, scales, split, pages, first_new, CONFIG: gl.constexpr):
    """Copies the first tiles of a split, as many as the ring has stages, with the scales of their
    keys.

    pages       of `load_first_page_ids`; None: not loaded yet
    first_new   the key from which on keys may not be there before the kernel before has ended

    Scales that are preloaded are returned, for `store_first_scales`: they are loaded before the
    tiles, or behind rows that are gathered, whose page ids are there sooner than those of scales.
    """
    loaded = None
    if CONFIG.key_scales == "bulk":
        issue_first_bulk_scales(scales, kv, split, CONFIG)
    if CONFIG.key_scales == "preloaded" and CONFIG.load != "gather":
        loaded = load_first_scales(scales, kv, split, CONFIG)
    if CONFIG.predecessor == "running":
        copy_first_tiles_that(is_before, first_new, ring, kv, split, CONFIG)
        tl.extra.cuda.gdc_wait()  # for what the kernel before writes: q, the new tokens' keys
        copy_first_tiles_that(has_key_from, first_new, ring, kv, split, CONFIG)
    elif pages is None:
        copy_first_tiles(ring, kv, split, CONFIG)
    else:
        gather_first_tiles(ring, kv, split, pages, CONFIG)
    if CONFIG.key_scales == "preloaded" and CONFIG.load == "gather":
        loaded = load_first_scales(scales, kv, split, CONFIG)
    if CONFIG.key_scales == "per_tile":
        copy_first_scales(scales, ring, kv, split, CONFIG)
    return loaded


@gluon.jit
def copy_tile_and_scales(
    ring,
    kv,
    scales,
    split,
    stage,
    tile,
    pages,  # of `load_page_ids`
    scale_pages,  # of `load_scale_page_ids`, or None: they are loaded now
    CONFIG: gl.constexpr,
):
    """Copies a tile into a stage that has been read, with the scales of its keys."""
    if CONFIG.key_scales == "bulk":
        issue_bulk_scales(scales, kv, split, stage, tile, CONFIG)
    if kv.k_steps is None:
        issue_tile(ring, kv, split, stage, tile, CONFIG)
    else:
        gather_tile(ring, kv, split, stage, tile, pages, CONFIG)
    if CONFIG.key_scales == "preloaded":
        loaded = load_scales(scales, kv, split, tile, CONFIG)
        store_scales(scales, ring, stage, loaded, CONFIG.tile_n)
    elif CONFIG.key_scales == "per_tile":
        if scale_pages is None:
            scale_pages = load_scale_page_ids(kv, split, tile, CONFIG)
        copy_scales(scales, ring, split, stage, tile, scale_pages, CONFIG)


# --- in products -------------------------------------------------------------------------------


@gluon.jit
def read_scales(scales, split, stage, phase, LAYOUT: gl.constexpr, CONFIG: gl.constexpr):
    """Reads (of K, of V) [1, TILE_N] of a stage, as columns of LAYOUT; of V `LEAST` at least."""
    KEYS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    TILE_N: gl.constexpr = CONFIG.tile_n
    if CONFIG.key_scales == "bulk":
        k_scale, v_scale = read_bulk_scales(scales, split, stage, phase, KEYS, CONFIG)
    else:
        of_tile = scales.stages.index(stage)
        k_scale = of_tile.slice(0, TILE_N).load(KEYS)
        v_scale = of_tile.slice(TILE_N, TILE_N).load(KEYS)
    return k_scale[None, :], larger(v_scale, LEAST)[None, :]


@gluon.jit
def weighted(s, v_scale):
    """Adds log2 of the scale of V to scores in base 2, which multiplies the weights by it; None: no
    scale."""
    if v_scale is not None:
        s += gl.inline_asm_elementwise(
            LOG, "=r,r", [v_scale], dtype=gl.float32, is_pure=True, pack=1
        )
    return s


@gluon.jit
def log_and_inverse(scale):
    """Computes the logarithm to base 2 of a scale of V, and one over it."""
    return gl.inline_asm_elementwise(
        LOG_AND_INVERSE,
        "=&r,=r,r",
        [scale],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
