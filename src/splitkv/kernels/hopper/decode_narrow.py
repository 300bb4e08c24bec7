"""Tiles of 16 and 32 packed rows of `hopper_decode_split`, multiplied by mma.

Every warp holds all rows. The scores of a tile are shared out over the warps by keys, and so are
the sums of p @ v by columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.clear import clear_behind
from splitkv.kernels.hopper.decode_rows import LOWEST, most_above, raised_maxima, true_or_none
from splitkv.kernels.hopper.decode_scales import (
    ask_with_scales,
    pages_of_scales,
    scales_of_tile,
    weighted,
)
from splitkv.kernels.hopper.effect import act
from splitkv.kernels.hopper.halves import (
    first_of,
    first_rows,
    layout_of_half,
    with_rows,
)
from splitkv.kernels.hopper.pairs import (
    add_values,
    both_columns,
    scores_of_tile,
)
from splitkv.kernels.hopper.prefill_sums import any_among, declare_any
from splitkv.kernels.hopper.ring import foresee, next_slot, pages_of, thread_barrier, tile_at
from splitkv.kernels.tile.band import all_visible, visible
from splitkv.kernels.tile.score import score_log2


@gluon.constexpr_function
def shared_weights(columns):
    """Of p [rows, columns] of 16 bits on its way between warps, to be read by ldmatrix."""
    rows = max(1, 64 // columns)
    return gl.SwizzledSharedLayout(8, rows, 8 // rows, [1, 0])


@gluon.jit
def any_of_block(x, LIMIT: gl.constexpr):
    """Whether any warp has a number above that with the bits LIMIT, or NaN, in x: see `any_above`.
    All warps meet here."""
    ELEMENTS: gl.constexpr = x.shape[0] * x.shape[1] // (32 * gl.num_warps())
    return any_among(x, ELEMENTS, LIMIT, 0, 32 * gl.num_warps())


class RowScoring(NamedTuple):
    """What scores of rows are worked out by: their positions [TILE_M, 1], those of the first row
    and of the last, and as in tile/score.py; softcap and slope may be None."""

    pos: Any
    first: Any
    last: Any
    scale: Any
    softcap: Any
    slope: Any


@gluon.jit
def attend_narrow(
    q,  # [TILE_M, DIM], as q_odd: see `load_rows`
    q_odd,
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
    free,  # a barrier for each slot: a warp of its own asks for tiles; None: these warps do
    S: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM_V: gl.constexpr,
    WIDEN: gl.constexpr,
    HALF: gl.constexpr,  # no more than 8 of 16 rows are somebody's
    MORE: gl.constexpr,  # tiles may follow those that `fill` asks for
    BULK: gl.constexpr,  # of `hopper_decode_split`
):
    """(acc [TILE_M, columns of v], m [TILE_M] in base 2, l [TILE_M]) of the rows over `tiles`; a
    thread has the same rows of all, and of acc what it has summed up."""
    TILE_M: gl.constexpr = q.shape[0]
    SLOTS: gl.constexpr = k_ring.shape[0]
    TILE_N: gl.constexpr = k_ring.shape[1]
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, S, 2)
    R: gl.constexpr = layout_of_half(TILE_N, gl.num_warps()) if HALF else S  # of weights
    ROWS: gl.constexpr = 8 if HALF else TILE_M
    M: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = v_ring.dtype if WIDEN is None else gl.float16
    pos, _, _, scale, softcap, slope = scoring
    arrived = ring[3]
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, R))[None, :]
    SHARED: gl.constexpr = shared_weights(TILE_N)
    p_tile = gl.allocate_shared_memory(dtype, [TILE_M, TILE_N], SHARED)
    LIMIT: gl.constexpr = most_above(WIDEN)
    declare_any(0)
    if HALF:
        pos = first_of(pos, gl.SliceLayout(1, R))[:, None]
        if WIDEN is not None:
            scale = first_of(scale, gl.SliceLayout(1, R))[:, None]
        if slope is not None:
            slope = first_of(slope, gl.SliceLayout(1, R))[:, None]
        p_tile.slice(8, 8).store(gl.zeros([8, TILE_N], dtype, R))
    p_rows = p_tile.slice(0, ROWS)
    m = gl.full([ROWS], LOWEST, gl.float32, gl.SliceLayout(1, R))
    sums = gl.zeros([ROWS, TILE_N], gl.float32, R)  # of l, added up across threads at the end
    acc = gl.zeros([TILE_M, DIM_V], gl.float32, S)
    acc_odd = acc
    slot, phase = tiles.first * 0, tiles.first * 0
    for i in range(tiles.first, tiles.last, tiles.by):
        ahead = i + SLOTS * tiles.by
        # page numbers come while this tile is worked on
        coming = gl.minimum(ahead, tiles.last - 1)
        pages = None
        of_scales = None
        if free is None and MORE:
            pages = pages_of(ring[0], ring[1], b, tile_at(tiles, coming), keys, PAGE_SIZE, TILE_N)
            if of_keys.scales is not None and of_keys.loaded is None and not BULK:
                tile = tile_at(tiles, coming)
                of_scales = pages_of_scales(ring[0], b, tile, keys, PAGE_SIZE, TILE_N)
        mbarrier.wait(arrived.index(slot), phase)
        first_n = tile_at(tiles, i) * TILE_N
        if first_n + TILE_N > keys:
            clear_behind(v_ring.index(slot), keys - first_n, TILE_N, 0, 1)
        qk = scores_of_tile(q, q_odd, k_ring.index(slot), S, WIDEN)
        if HALF:
            qk = first_rows(qk, R)
        offs_n = first_n + inside
        v_scale = None
        if of_keys.scales is not None:
            k_scale, v_scale = scales_of_tile(of_keys, slot, phase, h, R, SLOTS, TILE_N, BULK)
            qk *= k_scale
        y = score_log2(qk, scale, softcap, slope, pos, offs_n) - m[:, None]
        if not all_visible(bounds, scoring.first, scoring.last, keys, first_n, TILE_N):
            act("bar.warp.sync 0xffffffff;", "r", (first_n,))  # else ptxas asks in every tile
            y = gl.where(visible(bounds, pos, offs_n, keys), y, float("-inf"))
            if v_scale is not None:
                v_scale = gl.where(offs_n < keys, v_scale, 1.0)  # there may be NaN
        if v_scale is not None:
            p = gl.exp2(y)
            w = p * v_scale
            above = any_of_block(w, LIMIT[2]) if SLOTS > 1 else True
        else:
            above = any_of_block(y, LIMIT[1]) if SLOTS > 1 else True
        if above:  # one slot is for parts of one tile, which has the first maxima
            s = score_log2(qk, scale, softcap, slope, pos, offs_n)
            s = gl.where(y == float("-inf"), y, s)
            raised = raised_maxima(m, weighted(s, v_scale), WIDEN)
            shrink = gl.exp2(m - raised)
            sums *= shrink[:, None]
            if HALF:
                shrink = with_rows(shrink, shrink, M)
            acc *= shrink[:, None]
            if WIDEN is not None:
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
        acc, acc_odd = add_values(acc, acc_odd, p, v_ring.index(slot).load(B), WIDEN)
        if free is not None:
            mbarrier.arrive(free.index(slot))  # all warps meet: they have read the slot and p
        else:
            thread_barrier()  # all warps have read the slot and p
            if MORE:
                if ahead < tiles.last:
                    tile = tile_at(tiles, ahead)
                    ask_with_scales(
                        ring,
                        of_keys,
                        slot,
                        b,
                        h,
                        tile,
                        pages,
                        of_scales,
                        keys,
                        PAGE_SIZE,
                        TILE_N,
                        BULK,
                    )
                    after = gl.minimum(ahead + tiles.by, tiles.last - 1)
                    foresee(ring[0], b, tile_at(tiles, after), PAGE_SIZE, TILE_N)
        slot, phase = next_slot(slot, phase, SLOTS)
    m, l = true_or_none(m), gl.sum(sums, 1)
    if HALF:
        m, l = with_rows(m, m, M), with_rows(l, l, M)
    if WIDEN is not None:
        acc = both_columns(acc, acc_odd)
    return acc, m, l
