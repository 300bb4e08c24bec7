"""New tokens in `hopper_decode_split`: written before TMA reads the tiles that they are in."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.effect import act
from splitkv.kernels.hopper.pairs import (
    first_of_pairs,
    fours_of_rows,
    no_unit,
    operand_of_bytes,
    scaled_pairs,
)
from splitkv.kernels.hopper.ring import fill, thread_barrier
from splitkv.kernels.tile.new import has_new, rotated, write_new


@gluon.constexpr_function
def a_row_a_warp(dim, warps):
    return gl.BlockedLayout([1, dim // 32], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def fill_and_write(
    ring,  # the arguments of `fill` before b
    of_new,  # new, turn, growth, Grown
    b,
    h,
    tiles,  # Tiles
    shown,  # as `seen` in write_new
    steps,  # NewSteps
    capacity,
    slabs,
    rotary_rows,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    PAIR: gl.constexpr,
    TILE_T: gl.constexpr,
):
    """`fill`; between the tiles without new tokens and those with some these are written."""
    new, turn, growth, length = of_new
    pool = ring[0]
    first_new = length.before - length.padding
    fill(*ring, b, h, tiles, length.keys, first_new, False, PAGE_SIZE, TILE_N, SLOTS)
    if has_new(length, tiles, shown, TILE_N):
        ROW: gl.constexpr = a_row_a_warp(max(HEAD_DIM, HEAD_DIM_V), gl.num_warps())
        table = None
        if pool.table_ptr is not None:
            table = pool.table_ptr + b.to(gl.int64) * pool.stride_table
        place = b, h, tiles, shown, steps, capacity, slabs, rotary_rows
        offs_t = gl.arange(0, TILE_T, layout=gl.SliceLayout(1, ROW))
        offs_k = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROW))
        offs_v = gl.arange(0, HEAD_DIM_V, layout=gl.SliceLayout(0, ROW))
        write_new(
            *(new, turn, growth, length),
            table,
            *place,
            *(offs_t, offs_k, offs_v),
            *(HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, TILE_N, ROTARY_DIM, PAIR),
        )
        # what threads have written, before TMA reads it
        act("fence.proxy.async.global;", "r", (b,))
        thread_barrier()
    fill(*ring, b, h, tiles, length.keys, first_new, True, PAGE_SIZE, TILE_N, SLOTS)


class Turning(NamedTuple):
    """How rows of q are rotated: Turn, the first token's row of cos and sin, from token to token so
    many more, rows of cos and sin, their strides."""

    turn: Any
    start: Any
    step: Any
    rows: Any
    stride_cos: Any
    stride_sin: Any


@gluon.jit
def columns_of_rows(
    q_ptr,  # of the sequence
    h,
    tile_m,
    seqlen_q,
    stride_t,
    stride_h,
    turning,  # Turning, or None
    offs_d,  # columns
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE_M: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    PAIR: gl.constexpr,
):
    """Columns of the rows of q of a KV head, rotated if there is a rotation [TILE_M, columns]."""
    L: gl.constexpr = offs_d.type.layout.parent
    rows = tile_m * TILE_M + gl.arange(0, TILE_M, layout=gl.SliceLayout(1, L))
    ok = rows < seqlen_q * GROUP
    ptrs = q_ptr + (rows // GROUP * stride_t + (h * GROUP + rows % GROUP) * stride_h)
    if ROTARY_DIM:
        t = turning.start + turning.step * (rows // GROUP)
        angles = turning.turn, turning.rows, turning.stride_cos, turning.stride_sin
        q = rotated(ptrs, ok, t, offs_d, *angles, DIM, ROTARY_DIM, PAIR)
    else:
        q = gl.load(ptrs[:, None] + offs_d[None, :], mask=ok[:, None], other=0.0)
    return q


@gluon.jit
def turned_rows(
    q_ptr,
    h,
    tile_m,
    seqlen_q,
    stride_t,
    stride_h,
    turning,
    A: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE_M: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    PAIR: gl.constexpr,
    WIDEN: gl.constexpr,
    ROUNDED: gl.constexpr,
):
    """As `load_rows`, of rows that are rotated: by all warps once, and not by each of them."""
    HEAD_DIM: gl.constexpr = DIM if WIDEN is None else 2 * DIM
    WHOLE: gl.constexpr = WIDEN is None or ROUNDED  # columns in their order
    ROW: gl.constexpr = a_row_a_warp(HEAD_DIM if WHOLE else DIM, gl.num_warps())
    offs_d = gl.arange(0, HEAD_DIM if WHOLE else DIM, layout=gl.SliceLayout(0, ROW))
    of_rows = q_ptr, h, tile_m, seqlen_q, stride_t, stride_h
    if WHOLE:
        even = columns_of_rows(*of_rows, turning, offs_d, GROUP, HEAD_DIM, TILE_M, ROTARY_DIM, PAIR)
        if ROUNDED:
            FOURS: gl.constexpr = fours_of_rows(TILE_M, HEAD_DIM, gl.num_warps())
            even, unit = operand_of_bytes(gl.convert_layout(even, FOURS), A, False)
        else:
            even, unit = gl.convert_layout(even, A), no_unit(TILE_M, A)
        odd = even
    else:
        even = columns_of_rows(
            *of_rows, turning, first_of_pairs(offs_d), GROUP, HEAD_DIM, TILE_M, ROTARY_DIM, PAIR
        )
        odd = columns_of_rows(
            *of_rows, turning, first_of_pairs(offs_d) + 2, GROUP, HEAD_DIM, TILE_M, ROTARY_DIM, PAIR
        )
        even, odd, unit = scaled_pairs(gl.convert_layout(even, A), gl.convert_layout(odd, A))
    return even, odd, unit
