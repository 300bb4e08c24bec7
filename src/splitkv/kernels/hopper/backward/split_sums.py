"""Sums of what programs of `hopper_backward` leave in memory, by programs of the kernel that makes
dq: dsink, and dk and dv of tiles of keys whose rows are split. See kernels/backward/finish.py.

Four warps add up; sums are in fp32 and in one order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.tile.visit import place, tokens_of


class LeftSums(NamedTuple):
    """Pointers to what programs left in memory, and where its sums go.

    sinks        SinkSums, or None; numbers: of each head
    splits       SplitSums, or None; of: their SplitTiles
    """

    sinks: Any
    numbers: Any
    splits: Any
    of: Any


class SplitColumns(NamedTuple):
    """Columns of the sums of a tile of keys, and of the rows that they add up to: pointers to those
    of the first key, and elements between keys."""

    ptr: Any
    stride: Any
    to_ptr: Any
    to_stride: Any


@gluon.jit
def sum_sinks(sinks, head, numbers):
    """Stores dsink of a head."""
    NUMBERS: gl.constexpr = 2048  # that are read at once
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    offs = gl.arange(0, NUMBERS, layout=layout)
    sums_ptr = sinks.sums + head.to(gl.int64) * numbers
    total = gl.zeros([NUMBERS], gl.float32, layout)
    for start in range(0, numbers, NUMBERS):
        total += gl.load(sums_ptr + start + offs, mask=start + offs < numbers, other=0.0)
    gl.store(sinks.grad + head, gl.sum(total, 0).to(sinks.grad.dtype.element_ty))


@gluon.jit
def sum_columns(columns, count, splits, step, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Stores COLUMNS of KEYS keys, of which `count` are there; step: elements between splits."""
    TOGETHER: gl.constexpr = 8  # splits that are read at once
    DIM: gl.constexpr = triton.next_power_of_2(COLUMNS)
    LANES: gl.constexpr = min(DIM // 4, 32)  # of a warp, along a key
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))[None, :]
    ok = (keys < count)[:, None]
    if COLUMNS < DIM:
        ok &= offs_d < COLUMNS
    keys = keys.to(gl.int64)[:, None]
    ptrs = columns.ptr + keys * columns.stride + offs_d
    total = gl.zeros([KEYS, DIM], gl.float32, layout)
    for start in range(0, splits, TOGETHER):
        for n in gl.static_range(TOGETHER):
            total += gl.load(ptrs + n * step, mask=ok & (start + n < splits), other=0.0)
        ptrs += TOGETHER * step
    to = columns.to_ptr + keys * columns.to_stride + offs_d
    gl.store(to, total.to(columns.to_ptr.dtype.element_ty), mask=ok)


@gluon.jit
def sum_splits(
    splits,  # SplitSums
    of,  # SplitTiles
    number,
    TILE_N: gl.constexpr,
    KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Stores dk and dv of KEYS keys of a tile of TILE_N whose rows are split."""
    WIDTH: gl.constexpr = HEAD_DIM + HEAD_DIM_V
    tile = number // (TILE_N // KEYS)  # of all sequences and KV heads
    first = number % (TILE_N // KEYS) * KEYS
    b = tile // of.tiles // of.num_kv_heads
    head = tile // of.tiles % of.num_kv_heads
    first_k, len_k = tokens_of(of.cu_k_ptr, b, of.seqlen_k)
    key = tile % of.tiles * TILE_N + first  # in its sequence
    sums_ptr = splits.sums + (tile.to(gl.int64) * of.splits * TILE_N + first) * WIDTH
    dk_ptr = place(splits.dk, of.dk_strides, b, first_k + key, head)
    dv_ptr = place(splits.dv, of.dv_strides, b, first_k + key, head)
    of_k = SplitColumns(sums_ptr, WIDTH, dk_ptr, of.dk_strides.t)
    of_v = SplitColumns(sums_ptr + HEAD_DIM, WIDTH, dv_ptr, of.dv_strides.t)
    sum_columns(of_k, len_k - key, of.splits, TILE_N * WIDTH, KEYS, HEAD_DIM)
    sum_columns(of_v, len_k - key, of.splits, TILE_N * WIDTH, KEYS, HEAD_DIM_V)


@gluon.jit
def add_up_left(
    left,  # LeftSums
    number,
    sink_programs,
    TILE_N: gl.constexpr,
    KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Does the work of a program that adds up: of a head, where there are sink logits, or keys."""
    if number < sink_programs:
        if left.sinks is not None:
            sum_sinks(left.sinks, number, left.numbers)
    elif left.splits is not None:
        number -= sink_programs
        sum_splits(left.splits, left.of, number, TILE_N, KEYS, HEAD_DIM, HEAD_DIM_V)
