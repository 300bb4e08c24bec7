"""Tiles of 64 packed rows of `hopper_decode_split`, multiplied by wgmma.

Rows are in shared memory, 16 a warp, and so are the keys and values that they are multiplied
with: tiles of 16 bits as they arrive; int8 keys too, where q may be rounded to 8 bits. Other tiles
of 8 bits are widened to fp16, into a place of their own, and then their slot of the ring is free:
the next tile is asked for before the scores of this one are there.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.clear import clear_behind
from splitkv.kernels.hopper.decode_new import columns_of_rows
from splitkv.kernels.hopper.decode_rows import LOWEST, raised_maxima, true_or_none
from splitkv.kernels.hopper.decode_scales import ask_with_scales, log_and_inverse, scales_of_tile
from splitkv.kernels.hopper.eight_bits import widening
from splitkv.kernels.hopper.pairs import (
    LEAST_UNIT,
    power_of_row,
)
from splitkv.kernels.hopper.prefill_sums import (
    along_rows,
    shrunk,
    sums_of_threads,
)
from splitkv.kernels.hopper.ring import ask, foresee, next_slot, thread_barrier, tile_at
from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.score import score_log2
from splitkv.kv import AS_IS
from splitkv.plans import WIDE
from splitkv.problem import Problem

MAX_NARROW_ROWS = 32  # packed rows that are multiplied by mma


def most_rows(problem: Problem) -> int:
    """Packed rows. 256 in 8 bits is for narrow tiles, as a thread has too few registers."""
    in_halves = max(problem.head_dim, problem.head_dim_v) > 128
    narrow = in_halves and problem.codec != AS_IS
    return MAX_NARROW_ROWS if narrow else WIDE


def rows_of_tile(problem: Problem) -> tuple[int, ...]:
    """TILE_M, least first. By mma every warp holds all rows of q, of which 32 of 256 would need
    more registers than exist; wide tiles have 16 a warp."""
    rows, in_halves = problem.rows, max(problem.head_dim, problem.head_dim_v) > 128
    narrow = 16 if rows <= 16 or in_halves else 32
    if rows <= 16 or most_rows(problem) < WIDE:
        return (narrow,)
    return (narrow, WIDE) if rows <= MAX_NARROW_ROWS else (WIDE,)


def type_of_keys(problem: Problem) -> Any:
    """In which wide tiles multiply keys: int8 where q may be rounded to it, else of 16 bits."""
    if problem.codec == AS_IS:
        return {"bfloat16": gl.bfloat16, "float16": gl.float16}[problem.dtype]
    return gl.int8 if rounds_rows(problem) else gl.float16


def rounds_rows(problem: Problem) -> bool:
    """Whether q is rounded to int8, so that keys are multiplied as they are."""
    return problem.codec.name == "int8" and problem.products != "widened"


@gluon.constexpr_function
def sums_layout(columns, warps, bits=16):
    """Of products [64, columns] of operands of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def layout_of_scores(of_k, tile_n, warps):
    """[TILE_M, TILE_N]: of mma, the keys shared out over the warps, or of wgmma, the rows."""
    if of_k is None:
        return gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8])
    return sums_layout(tile_n, warps, of_k.primitive_bitwidth)


@gluon.jit
def allocate_operand(dtype: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Shared memory for an operand of wgmma."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(min(128, DIM * BITS // 8), BITS, rank=2)
    return gl.allocate_shared_memory(dtype, [ROWS, DIM], layout)


@gluon.jit
def wide_rows(
    q_ptr,  # of the sequence
    h,
    tile_m,
    seqlen_q,
    stride_t,
    stride_h,
    turning,  # Turning, or None
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE_M: gl.constexpr,
    M: gl.constexpr,
    OF_K: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    PAIR: gl.constexpr,
):
    """(q [TILE_M, DIM] in shared memory, in the type of the keys; unit [TILE_M], by which it is
    to be multiplied) of the rows of a KV head."""
    tile = allocate_operand(OF_K, TILE_M, DIM)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    of_q = seqlen_q, stride_t, stride_h
    unit = gl.full([TILE_M], 1.0, gl.float32, M)
    if q_ptr.dtype.element_ty == OF_K:
        STRIP: gl.constexpr = 16 if ROTARY_DIM else TILE_M  # a rotation takes registers
        for n in gl.static_range(TILE_M // STRIP):
            strip = tile_m * (TILE_M // STRIP) + n
            q = columns_of_rows(
                q_ptr, h, strip, *of_q, turning, offs_d, GROUP, DIM, STRIP, ROTARY_DIM, PAIR
            )
            tile.slice(n * STRIP, STRIP).store(q)
    else:
        q = columns_of_rows(
            q_ptr, h, tile_m, *of_q, turning, offs_d, GROUP, DIM, TILE_M, ROTARY_DIM, PAIR
        )
        x = q.to(gl.float32)
        top = gl.max(gl.where(x == x, gl.abs(x), float("inf")), 1)
        if gl.int8 == OF_K:
            scale = gl.maximum(top / 127.0, LEAST_UNIT)
            x = (x * (1.0 / scale)[:, None] + 12582912.0) - 12582912.0  # the nearest integers
            x = gl.where(x == x, x, 0.0)
        else:
            scale, inverse = power_of_row(top)
            x *= inverse[:, None]
        q = x.to(OF_K)
        unit = gl.convert_layout(scale, M)
        tile.store(q)
    fence_async_shared()
    return tile, unit


@gluon.jit
def clear_last(v, count):
    """Zero the values of a tile behind the last key."""
    if count < v.shape[0]:
        clear_behind(v, count, 16, 0, 1)
        fence_async_shared()


@gluon.jit
def widen_tile(stored, wide):
    """Write the same numbers [keys, dim] in fp16; a fence is left to the caller."""
    DIM: gl.constexpr = stored.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    code: gl.constexpr = widening(stored.dtype)
    x = gl.inline_asm_elementwise(
        code, "=&r,=&r,r", [stored.load(layout)], dtype=wide.dtype, is_pure=True, pack=4
    )
    wide.store(x)


@gluon.jit
def attend_wide(
    q,  # [TILE_M, DIM] in shared memory
    ring,  # Pool, boxes of keys, of values, barriers
    k_ring,  # [SLOTS, TILE_N, DIM]
    v_ring,
    tiles,  # Tiles
    b,
    h,
    keys,
    bounds,
    scoring,  # RowScoring
    of_keys,  # KeyScales
    S: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    WIDEN: gl.constexpr,
):
    """(acc [TILE_M, DIM_V], m [TILE_M] in base 2, l [TILE_M]) of the rows over `tiles`."""
    pos, _, _, scale, softcap, slope = scoring
    TILE_M: gl.constexpr = q.shape[0]
    SLOTS: gl.constexpr = k_ring.shape[0]
    TILE_N: gl.constexpr = k_ring.shape[1]
    DIM_V: gl.constexpr = v_ring.shape[2]
    M: gl.constexpr = gl.SliceLayout(1, S)
    O: gl.constexpr = sums_layout(DIM_V, gl.num_warps())
    P: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    SUM: gl.constexpr = gl.int32 if q.dtype == gl.int8 else gl.float32
    dtype: gl.constexpr = v_ring.dtype if WIDEN is None else gl.float16
    k_wide = k_ring
    v_wide = v_ring
    if k_ring.dtype != q.dtype:
        k_wide = allocate_operand(q.dtype, TILE_N, q.shape[1])
    if WIDEN is not None:
        v_wide = allocate_operand(dtype, TILE_N, DIM_V)
    arrived = ring[3]
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, S))[None, :]
    m = gl.full([TILE_M], LOWEST, gl.float32, M)
    acc = gl.zeros([TILE_M, DIM_V], gl.float32, O)
    l = sums_of_threads(gl.zeros([TILE_M, TILE_N], gl.float32, S))
    slot, phase = tiles.first * 0, tiles.first * 0
    for i in range(tiles.first, tiles.last, tiles.by):
        mbarrier.wait(arrived.index(slot), phase)
        first_n = tile_at(tiles, i) * TILE_N
        ahead = i + SLOTS * tiles.by
        k = k_ring.index(slot)
        v = v_ring.index(slot)
        if k_ring.dtype != q.dtype:
            widen_tile(k, k_wide)
            fence_async_shared()
            thread_barrier()
            k = k_wide
        elif WIDEN is None:
            clear_last(v, keys - first_n)
        start = gl.zeros([TILE_M, TILE_N], SUM, S)
        qk = warpgroup_mma(q, k.permute((1, 0)), start, use_acc=False, is_async=True)
        if WIDEN is not None:
            widen_tile(v, v_wide)
            v = v_wide
        qk = warpgroup_mma_wait(0, deps=[qk])
        s = qk.to(gl.float32)
        log = None  # of the scales of values
        if of_keys.scales is not None:
            k_scale, v_scale = scales_of_tile(of_keys, slot, phase, h, S, SLOTS, TILE_N, 0)
            log, inverse = log_and_inverse(v_scale)
        if WIDEN is not None:
            clear_last(v, keys - first_n)
            fence_async_shared()  # while a product is under way, ptxas 12.8 breaks on it
            thread_barrier()  # all warps have read the slot, and widened its values
            if ahead < tiles.last:
                tile = tile_at(tiles, ahead)
                ask_with_scales(
                    ring,
                    of_keys,
                    slot,
                    b,
                    h,
                    tile,
                    None,
                    None,
                    keys,
                    PAGE_SIZE,
                    TILE_N,
                    0,
                )
        if of_keys.scales is not None:
            s *= k_scale
        offs_n = first_n + inside
        s = score_log2(s, scale, softcap, slope, pos, offs_n)
        if log is not None:
            s += log
        s = gl.where(visible(bounds, pos, offs_n, keys), s, float("-inf"))
        raised = raised_maxima(m, s, WIDEN)
        shrink = gl.exp2(m - raised)
        m = raised
        p = gl.exp2(s - m[:, None])
        l *= along_rows(shrink, l)
        l += sums_of_threads(p if log is None else p * inverse)
        p = gl.convert_layout(p.to(dtype), P)
        acc = warpgroup_mma(p, v, shrunk(acc, shrink))
        if WIDEN is None:
            if ahead < tiles.last:
                thread_barrier()  # all warps have read the slot
                ask(*ring, slot, b, h, tile_at(tiles, ahead), keys, PAGE_SIZE, TILE_N)
        if ahead < tiles.last:
            after = gl.minimum(ahead + tiles.by, tiles.last - 1)
            foresee(ring[0], b, tile_at(tiles, after), PAGE_SIZE, TILE_N)
        slot, phase = next_slot(slot, phase, SLOTS)
    acc = gl.convert_layout(acc, S, assert_trivial=True)
    return acc, true_or_none(m), gl.convert_layout(gl.sum(l, 1), M)
