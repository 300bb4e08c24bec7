"""The main loop of decode on Hopper over tiles of 16 and 32 packed rows, multiplied by mma.

Every warp holds all rows. The scores of a tile are shared out over the warps by keys, and so are
the sums of p @ v by columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from splitkv.kernels.hopper.decode.byte_pairs import add_pair_values, both_columns, scores_of_tile
from splitkv.kernels.hopper.decode.eight_rows import first_of, first_rows, layout_of_half, with_rows
from splitkv.kernels.hopper.decode.key_scales import (
    copy_tile_and_scales,
    load_scale_page_ids,
    read_scales,
    weighted,
)
from splitkv.kernels.hopper.decode.layouts import scores_layout, weights_layout
from splitkv.kernels.hopper.decode.lazy_maxima import (
    LOWEST,
    WEIGHT_BITS_IN_8_BITS,
    raise_maxima,
    tolerance_bits,
    true_maxima,
)
from splitkv.kernels.hopper.decode.records import Softmax
from splitkv.kernels.hopper.decode.ring import load_page_ids
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.hopper.primitives.tma_ring import (
    next_stage,
    prefetch_page_id,
    stage_after,
    thread_barrier,
    tile_at_place,
)
from splitkv.kernels.hopper.primitives.votes import any_among, declare_any
from splitkv.kernels.hopper.primitives.zero_rows import clear_behind
from splitkv.kernels.tile.band import all_visible, visible
from splitkv.kernels.tile.score import score_log2


@gluon.jit
def any_exceeds(x, LIMIT: gl.constexpr):
    """Whether any warp has a number in x above that with the bits LIMIT, or NaN; all warps meet."""
    ELEMENTS: gl.constexpr = x.shape[0] * x.shape[1] // (32 * gl.num_warps())
    return any_among(x, ELEMENTS, LIMIT, 0, 32 * gl.num_warps())


@gluon.jit
def load_coming_page_ids(ring, kv, split, ahead, CONFIG: gl.constexpr):
    """Loads the page ids of the tile at place `ahead`, which arrive while another is worked on;
    None where rows are not gathered, or nothing comes."""
    pages = None
    if ring.empty is None and CONFIG.ring == "wraps":
        coming = gl.minimum(ahead, split.tiles.last - 1)
        pages = load_page_ids(kv, split, tile_at_place(split.tiles, coming), CONFIG)
    return pages


@gluon.jit
def load_coming_scale_page_ids(ring, kv, split, ahead, CONFIG: gl.constexpr):
    """Loads the same for the scales of its keys, where they are copied by the tile; else None."""
    pages = None
    if ring.empty is None and CONFIG.ring == "wraps" and CONFIG.key_scales == "per_tile":
        coming = gl.minimum(ahead, split.tiles.last - 1)
        pages = load_scale_page_ids(kv, split, tile_at_place(split.tiles, coming), CONFIG)
    return pages


@gluon.jit
def refill_stage(ring, kv, scales, split, stage, ahead, pages, scale_pages, CONFIG: gl.constexpr):
    """Copies the tile at place `ahead` into a stage that all warps have read, and prefetches the
    page id of the one after it; pages, scale_pages: as loaded by the two functions above."""
    tiles = split.tiles
    tile = tile_at_place(tiles, ahead)
    copy_tile_and_scales(ring, kv, scales, split, stage, tile, pages, scale_pages, CONFIG)
    after = tile_at_place(tiles, gl.minimum(ahead + tiles.by, tiles.last - 1))
    prefetch_page_id(kv, split.sequence, after, CONFIG.page_size, CONFIG.tile_n)


@gluon.jit
def mma_loop(q, ring, kv, split, scoring, scales, CONFIG: gl.constexpr):
    """Runs attention of a tile of rows over the tiles of a split: a Softmax.

    q        QueryTile; scoring: RowScoring; scales: KeyScales

    Waits for each stage, multiplies, updates the softmax, and has the next tile copied into the
    stage, or tells the producer warp that it may be. Weights are worked out relative to maxima that
    are let be as long as no weight exceeds the tolerance of lazy_maxima.py; else for all warps, as
    each has all rows and some of the keys. A thread has the same rows of acc, m and l, and of acc
    what it has summed up.
    """
    TILE_M: gl.constexpr = CONFIG.tile_m
    TILE_N: gl.constexpr = CONFIG.tile_n
    STAGES: gl.constexpr = CONFIG.num_stages
    ROWS: gl.constexpr = CONFIG.used_rows
    DIM_V: gl.constexpr = CONFIG.dim_v
    S: gl.constexpr = scores_layout(CONFIG, gl.num_warps())
    # of weights [used_rows, TILE_N]: what each thread has of the rows of scores
    R: gl.constexpr = layout_of_half(TILE_N, gl.num_warps()) if ROWS < TILE_M else S
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    M: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = ring.v_tiles.dtype if CONFIG.dequantize is None else gl.float16
    LIMIT: gl.constexpr = tolerance_bits(CONFIG.dequantize)
    WEIGHTS: gl.constexpr = weights_layout(TILE_N)
    tiles, keys = split.tiles, split.num_keys
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, R))[None, :]
    p_tile = gl.allocate_shared_memory(dtype, [TILE_M, TILE_N], WEIGHTS)
    declare_any(0)
    bounds, pos, scale = scoring.bounds, scoring.pos, scoring.scale
    softcap, slope = scoring.softcap, scoring.slope
    if ROWS < TILE_M:
        pos = first_of(pos, gl.SliceLayout(1, R))[:, None]
        if CONFIG.dequantize is not None:
            scale = first_of(scale, gl.SliceLayout(1, R))[:, None]
        if slope is not None:
            slope = first_of(slope, gl.SliceLayout(1, R))[:, None]
        p_tile.slice(ROWS, ROWS).store(gl.zeros([ROWS, TILE_N], dtype, R))
    p_rows = p_tile.slice(0, ROWS)
    m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, R))
    sums = gl.zeros([ROWS, TILE_N], gl.float32, R)  # of l, added up across threads at the end
    acc = gl.zeros([TILE_M, DIM_V], gl.float32, S)
    acc_odd = acc
    stage, phase = stage_after(ring.before, tiles.first * 0, STAGES)
    for i in range(tiles.first, tiles.last, tiles.by):
        ahead = i + STAGES * tiles.by  # the place of the tile that comes into this stage next
        pages = load_coming_page_ids(ring, kv, split, ahead, CONFIG)
        scale_pages = load_coming_scale_page_ids(ring, kv, split, ahead, CONFIG)
        mbarrier.wait(ring.full.index(stage), phase)
        first_n = tile_at_place(tiles, i) * TILE_N
        if first_n + TILE_N > keys:
            clear_behind(ring.v_tiles.index(stage), keys - first_n, TILE_N, 0, 1)
            if ring.before is not None:  # TMA writes there again
                fence_async_shared()
        qk = scores_of_tile(q, ring.k_tiles.index(stage), S, CONFIG.dequantize)
        if ROWS < TILE_M:
            qk = first_rows(qk, R)
        offs_n = first_n + inside
        v_scale = None
        if CONFIG.key_scales != "none":
            k_scale, v_scale = read_scales(scales, split, stage, phase, R, CONFIG)
            qk *= k_scale
        y = score_log2(qk, scale, softcap, slope, pos, offs_n) - m[:, None]
        if not all_visible(bounds, scoring.first, scoring.last, keys, first_n, TILE_N):
            run_ptx("bar.warp.sync 0xffffffff;", "r", (first_n,))  # else ptxas asks in every tile
            y = gl.where(visible(bounds, pos, offs_n, keys), y, float("-inf"))
            if v_scale is not None:
                v_scale = gl.where(offs_n < keys, v_scale, 1.0)  # there may be NaN
        if v_scale is not None:
            p = gl.exp2(y)
            w = p * v_scale
            above = any_exceeds(w, WEIGHT_BITS_IN_8_BITS) if STAGES > 1 else True
        else:
            above = any_exceeds(y, LIMIT) if STAGES > 1 else True
        if above:  # one stage is for splits of one tile, which has the first maxima
            s = score_log2(qk, scale, softcap, slope, pos, offs_n)
            s = gl.where(y == float("-inf"), y, s)
            raised = raise_maxima(m, weighted(s, v_scale), CONFIG)
            shrink = gl.exp2(m - raised)
            sums *= shrink[:, None]
            if ROWS < TILE_M:
                shrink = with_rows(shrink, shrink, M)
            acc *= shrink[:, None]
            if CONFIG.dequantize is not None:
                acc_odd *= shrink[:, None]
            m = raised
            y = s - m[:, None]
            if v_scale is not None:
                p = gl.exp2(y)
                w = p * v_scale
        if v_scale is None:
            p = gl.exp2(y)
            w = p
        sums += p
        p_rows.store(w.to(dtype))
        p = p_tile.load(A)
        v = ring.v_tiles.index(stage).load(B)
        acc, acc_odd = add_pair_values(acc, acc_odd, p, v, CONFIG.dequantize)
        if ring.empty is not None:
            mbarrier.arrive(ring.empty.index(stage))  # all warps meet: they have read stage and p
        else:
            thread_barrier()  # all warps have read the stage and p
            if CONFIG.ring == "wraps":
                if ahead < tiles.last:
                    refill_stage(ring, kv, scales, split, stage, ahead, pages, scale_pages, CONFIG)
        stage, phase = next_stage(stage, phase, STAGES)
    m, l = true_maxima(m), gl.sum(sums, 1)
    if ROWS < TILE_M:
        m, l = with_rows(m, m, M), with_rows(l, l, M)
    if CONFIG.dequantize is not None:
        acc = both_columns(acc, acc_odd)
    return Softmax(acc, m, l)
