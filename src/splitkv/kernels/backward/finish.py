"""The end of a backward: dsink, and dk and dv of tiles of keys whose rows are split among programs,
as sums of what those left in memory.

Computes    dsink of each head; dk and dv as the sums over the splits of each tile of keys
Shapes      see SinkSums and SplitSums
Grid        heads, where there are sink logits; then tiles of all sequences and KV heads x groups of
            ROWS keys, where rows are split
Traffic     reads sums and splits once, writes dsink, dk and dv
Numerics    sums in fp32 in one order, one rounding
Limits      as in kernels/backward
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.backward.records import SIZES
from splitkv.kernels.tile.visit import load_tile, place, store_tile, tokens_of


class SinkSums(NamedTuple):
    """Pointers to what adds up to dsink.

    sums    [sequences, lanes, numbers, GROUP] fp32, a lane being a KV head with its group of heads,
            or a head
    grad    [num_heads]
    """

    sums: Any
    grad: Any


class SplitSums(NamedTuple):
    """Pointers to what adds up to dk and dv.

    sums      [batch, num_kv_heads, tiles, splits, TILE_N, HEAD_DIM + HEAD_DIM_V] fp32
    dk, dv    as k and v
    """

    sums: Any
    dk: Any
    dv: Any


class SplitTiles(NamedTuple):
    """The tiles of keys whose rows are split.

    cu_k_ptr                 [batch + 1] int32, or None: dense
    seqlen_k                 keys of a sequence where dense
    dk_strides, dv_strides   Strides
    tiles, splits            of each sequence and KV head, and of the rows of each
    """

    cu_k_ptr: Any
    seqlen_k: Any
    num_kv_heads: Any
    dk_strides: Any
    dv_strides: Any
    tiles: Any
    splits: Any


@triton.jit
def add_up_sinks(
    sinks,  # SinkSums
    head,
    sequences,
    lanes,
    numbers,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,  # numbers that are read at once
):
    """Stores dsink of a head."""
    offs = tl.arange(0, TOGETHER)
    total = tl.zeros([TOGETHER], tl.float32)
    for b in range(0, sequences):
        first = (b * lanes + head // GROUP).to(tl.int64) * numbers
        for start in range(0, numbers, TOGETHER):
            at = start + offs
            places = sinks.sums + (first + at) * GROUP + head % GROUP
            total += tl.load(places, mask=at < numbers, other=0.0)
    tl.store(sinks.grad + head, tl.sum(total, 0))


@triton.jit
def add_up_splits(
    split_sums,  # SplitSums
    of,  # SplitTiles
    pid,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,  # of backward_keys
    ROWS: tl.constexpr,  # keys a program
    TOGETHER: tl.constexpr,  # splits that are read at once
):
    """Stores dk and dv of ROWS keys."""
    DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    tile = pid // (TILE_N // ROWS)  # of all sequences and KV heads
    first = pid % (TILE_N // ROWS) * ROWS
    b = tile // of.tiles // of.num_kv_heads
    h = tile // of.tiles % of.num_kv_heads
    first_k, len_k = tokens_of(of.cu_k_ptr, b, of.seqlen_k)
    offs_n = tile % of.tiles * TILE_N + first + tl.arange(0, ROWS)
    ok = offs_n < len_k
    offs = tl.arange(0, TOGETHER * ROWS)
    row = first + offs % ROWS
    row_ok = tile % of.tiles * TILE_N + row < len_k
    dk = tl.zeros([ROWS, DIM], tl.float32)
    dv = tl.zeros([ROWS, DIM_V], tl.float32)
    for start in range(0, of.splits, TOGETHER):
        split = start + offs // ROWS
        split_rows = split_sums.sums + ((tile * of.splits + split).to(tl.int64) * TILE_N + row) * (
            HEAD_DIM + HEAD_DIM_V
        )
        split_ok = row_ok & (split < of.splits)
        some = load_tile(split_rows, split_ok, HEAD_DIM, DIM)
        dk += tl.sum(tl.reshape(some, [TOGETHER, ROWS, DIM]), 0)
        some = load_tile(split_rows + HEAD_DIM, split_ok, HEAD_DIM_V, DIM_V)
        dv += tl.sum(tl.reshape(some, [TOGETHER, ROWS, DIM_V]), 0)
    store_tile(place(split_sums.dk, of.dk_strides, b, first_k + offs_n, h), dk, ok, HEAD_DIM)
    store_tile(place(split_sums.dv, of.dv_strides, b, first_k + offs_n, h), dv, ok, HEAD_DIM_V)


@triton.jit(do_not_specialize=SIZES)
def backward_finish(
    sinks,  # SinkSums, or None
    split_sums,  # SplitSums, or None
    cu_k_ptr,  # [batch + 1] int32, or None: dense
    dk_strides,  # Strides
    dv_strides,
    sink_programs,  # heads, or 0
    sink_sequences,
    sink_lanes,
    sink_numbers,
    seqlen_k,
    num_kv_heads,
    split_tiles,
    row_splits,
    SINK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SINKS_TOGETHER: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < sink_programs:
        if sinks is not None:
            add_up_sinks(
                sinks, pid, sink_sequences, sink_lanes, sink_numbers, SINK_GROUP, SINKS_TOGETHER
            )
    elif split_sums is not None:
        of = SplitTiles(
            cu_k_ptr, seqlen_k, num_kv_heads, dk_strides, dv_strides, split_tiles, row_splits
        )
        add_up_splits(
            split_sums, of, pid - sink_programs, HEAD_DIM, HEAD_DIM_V, TILE_N, ROWS, TOGETHER
        )
