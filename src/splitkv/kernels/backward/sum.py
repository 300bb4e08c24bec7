"""dk and dv of tiles of keys whose rows are split among programs: the sums of the splits.

Computes    dk and dv as the sums over the splits of each tile of keys
Shapes      splits [batch, num_kv_heads, tiles, splits, TILE_N, HEAD_DIM + HEAD_DIM_V] fp32
Grid        tiles of all sequences and KV heads x groups of ROWS keys
Traffic     reads the splits once, writes dk and dv
Numerics    sums in fp32 in one order, one rounding
Limits      as in kernels/backward
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitkv.kernels.backward.records import SIZES
from splitkv.kernels.tile.visit import load_tile, place, store_tile, tokens_of


@triton.jit(do_not_specialize=SIZES)
def backward_sum(
    ptrs,  # GradientTensors
    strides,  # GradientTensors
    split_ptr,  # as backward_keys leaves it
    cu_k_ptr,
    seqlen_k,
    num_kv_heads,
    split_tiles,
    row_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,  # of backward_keys
    ROWS: tl.constexpr,  # keys a program
    TOGETHER: tl.constexpr,  # splits that are read at once
    PREDECESSOR: tl.constexpr,  # backward_keys or its like: done, or running until it is waited for
):
    if PREDECESSOR == "running":
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    tile = tl.program_id(0)  # of all sequences and KV heads
    b = tile // split_tiles // num_kv_heads
    h = tile // split_tiles % num_kv_heads
    first_k, len_k = tokens_of(cu_k_ptr, b, seqlen_k)
    inside = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs_n = tile % split_tiles * TILE_N + inside
    ok = offs_n < len_k
    offs = tl.arange(0, TOGETHER * ROWS)
    row = tl.program_id(1) * ROWS + offs % ROWS
    row_ok = tile % split_tiles * TILE_N + row < len_k
    dk = tl.zeros([ROWS, DIM], tl.float32)
    dv = tl.zeros([ROWS, DIM_V], tl.float32)
    for first in range(0, row_splits, TOGETHER):
        split = first + offs // ROWS
        split_rows = split_ptr + ((tile * row_splits + split).to(tl.int64) * TILE_N + row) * (
            HEAD_DIM + HEAD_DIM_V
        )
        split_ok = row_ok & (split < row_splits)
        some = load_tile(split_rows, split_ok, HEAD_DIM, DIM)
        dk += tl.sum(tl.reshape(some, [TOGETHER, ROWS, DIM]), 0)
        some = load_tile(split_rows + HEAD_DIM, split_ok, HEAD_DIM_V, DIM_V)
        dv += tl.sum(tl.reshape(some, [TOGETHER, ROWS, DIM_V]), 0)
    store_tile(place(ptrs.dk, strides.dk, b, first_k + offs_n, h), dk, ok, HEAD_DIM)
    store_tile(place(ptrs.dv, strides.dv, b, first_k + offs_n, h), dv, ok, HEAD_DIM_V)
