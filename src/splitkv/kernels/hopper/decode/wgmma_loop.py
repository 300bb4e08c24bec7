"""The main loop of decode on Hopper over tiles of 64 packed rows, multiplied by wgmma.

Rows are in shared memory, 16 a warp, and so are the keys and values that they are multiplied
with: tiles of 16 bits as they arrive; int8 keys too, where q may be rounded to 8 bits. Other tiles
of 8 bits are dequantized to fp16, into a place of their own, and then their stage of the ring is
free: the next tile is issued before the scores of this one are there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.decode.key_scales import (
    copy_tile_and_scales,
    log_and_inverse,
    read_scales,
)
from splitkv.kernels.hopper.decode.layouts import (
    allocate_operand,
    scores_layout,
    vectors_of_rows,
    wgmma_layout,
)
from splitkv.kernels.hopper.decode.lazy_maxima import LOWEST, raise_maxima, true_maxima
from splitkv.kernels.hopper.decode.records import Softmax
from splitkv.kernels.hopper.decode.ring import issue_tile
from splitkv.kernels.hopper.primitives.conversion import widening
from splitkv.kernels.hopper.primitives.row_sums import along_rows, rescaled, sums_of_threads
from splitkv.kernels.hopper.primitives.tma_ring import (
    next_stage,
    prefetch_page_id,
    thread_barrier,
    tile_at_place,
)
from splitkv.kernels.hopper.primitives.zero_rows import clear_behind
from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.score import score_log2


@gluon.jit
def clear_last(v, count):
    """Zeroes the values of a tile behind the last key."""
    if count < v.shape[0]:
        clear_behind(v, count, 16, 0, 1)
        fence_async_shared()


@gluon.jit
def dequantize_tile(stored, ready):
    """Writes a stored tile [keys, dim] of 8 bits in fp16; a fence is left to the caller."""
    layout: gl.constexpr = vectors_of_rows(stored.shape[1], gl.num_warps())
    code: gl.constexpr = widening(stored.dtype)
    x = gl.inline_asm_elementwise(
        code, "=&r,=&r,r", [stored.load(layout)], dtype=ready.dtype, is_pure=True, pack=4
    )
    ready.store(x)


@gluon.jit
def wgmma_loop(q, ring, kv, split, scoring, scales, CONFIG: gl.constexpr):
    """Runs attention of a tile of rows over the tiles of a split: a Softmax.

    q        QueryTile in shared memory; scoring: RowScoring; scales: KeyScales
    """
    TILE_M: gl.constexpr = CONFIG.tile_m
    TILE_N: gl.constexpr = CONFIG.tile_n
    STAGES: gl.constexpr = CONFIG.num_stages
    DIM_V: gl.constexpr = CONFIG.dim_v
    K_TYPE: gl.constexpr = CONFIG.k_type
    q_tile = q.even
    S: gl.constexpr = scores_layout(CONFIG, gl.num_warps())
    M: gl.constexpr = gl.SliceLayout(1, S)
    O: gl.constexpr = wgmma_layout(DIM_V, gl.num_warps())
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    SUM: gl.constexpr = gl.int32 if gl.int8 == K_TYPE else gl.float32
    dtype: gl.constexpr = ring.v_tiles.dtype if CONFIG.dequantize is None else gl.float16
    k_ready = ring.k_tiles
    v_ready = ring.v_tiles
    if ring.k_tiles.dtype != K_TYPE:
        k_ready = allocate_operand(K_TYPE, TILE_N, CONFIG.dim_k)
    if CONFIG.dequantize is not None:
        v_ready = allocate_operand(dtype, TILE_N, DIM_V)
    tiles, keys = split.tiles, split.num_keys
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, S))[None, :]
    m = gl.full([TILE_M], LOWEST, gl.float32, M)
    acc = gl.zeros([TILE_M, DIM_V], gl.float32, O)
    l = sums_of_threads(gl.zeros([TILE_M, TILE_N], gl.float32, S))
    stage, phase = tiles.first * 0, tiles.first * 0
    for i in range(tiles.first, tiles.last, tiles.by):
        mbarrier.wait(ring.full.index(stage), phase)
        first_n = tile_at_place(tiles, i) * TILE_N
        ahead = i + STAGES * tiles.by
        k = ring.k_tiles.index(stage)
        v = ring.v_tiles.index(stage)
        if ring.k_tiles.dtype != K_TYPE:
            dequantize_tile(k, k_ready)
            fence_async_shared()
            thread_barrier()
            k = k_ready
        elif CONFIG.dequantize is None:
            clear_last(v, keys - first_n)
        start = gl.zeros([TILE_M, TILE_N], SUM, S)
        qk = warpgroup_mma(q_tile, k.permute((1, 0)), start, use_acc=False, is_async=True)
        if CONFIG.dequantize is not None:
            dequantize_tile(v, v_ready)
            v = v_ready
        qk = warpgroup_mma_wait(0, deps=[qk])
        s = qk.to(gl.float32)
        log = None  # of the scales of values
        if CONFIG.key_scales != "none":
            k_scale, v_scale = read_scales(scales, split, stage, phase, S, CONFIG)
            log, inverse = log_and_inverse(v_scale)
        if CONFIG.dequantize is not None:
            clear_last(v, keys - first_n)
            fence_async_shared()  # while a product is under way, ptxas 12.8 breaks on it
            thread_barrier()  # all warps have read the stage, and dequantized its values
            if ahead < tiles.last:
                tile = tile_at_place(tiles, ahead)
                copy_tile_and_scales(ring, kv, scales, split, stage, tile, None, None, CONFIG)
        if CONFIG.key_scales != "none":
            s *= k_scale
        offs_n = first_n + inside
        s = score_log2(s, scoring.scale, scoring.softcap, scoring.slope, scoring.pos, offs_n)
        if log is not None:
            s += log
        s = gl.where(visible(scoring.bounds, scoring.pos, offs_n, keys), s, float("-inf"))
        raised = raise_maxima(m, s, CONFIG)
        shrink = gl.exp2(m - raised)
        m = raised
        p = gl.exp2(s - m[:, None])
        l *= along_rows(shrink, l)
        l += sums_of_threads(p if log is None else p * inverse)
        p = gl.convert_layout(p.to(dtype), P)
        acc = warpgroup_mma(p, v, rescaled(acc, shrink))
        if CONFIG.dequantize is None:
            if ahead < tiles.last:
                thread_barrier()  # all warps have read the stage
                issue_tile(ring, kv, split, stage, tile_at_place(tiles, ahead), CONFIG)
        if ahead < tiles.last:
            after = tile_at_place(tiles, gl.minimum(ahead + tiles.by, tiles.last - 1))
            prefetch_page_id(kv, split.sequence, after, CONFIG.page_size, TILE_N)
        stage, phase = next_stage(stage, phase, STAGES)
    acc = gl.convert_layout(acc, S, assert_trivial=True)
    return Softmax(acc, true_maxima(m), gl.convert_layout(gl.sum(l, 1), M))
