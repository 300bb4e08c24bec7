"""Merging the splits of a sequence inside one launch: its programs are a cluster.

Each sends every other one a slice of its sums, they meet once, and each merges the slice of all
splits that it was sent, in order, so that bits do not vary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.eight_rows import first_of, first_rows, layout_of_half
from splitkv.kernels.hopper.primitives.cluster import (
    arrive_written,
    exchange_at,
    received,
    send,
    send_one,
    wait_cluster,
)
from splitkv.kernels.limits.hopper_decode_split import exchange_bytes
from splitkv.kernels.tile.encode import encode_out
from splitkv.kernels.tile.softmax import finish, finite_or_zero

exchange_bytes_of = gluon.constexpr_function(exchange_bytes)


class ClusterPlace(NamedTuple):
    """The share that a program of a cluster merges: packed rows from `first_row` on of a sequence
    and KV head. Its split is its rank."""

    split: Any
    sequence: Any
    kv_head: Any
    first_row: Any


@gluon.jit
def merge_cluster(softmax, output, place, row_ok, CONFIG: gl.constexpr):
    """Merges the splits that the programs of a cluster have, and stores the result.

    softmax   Softmax; output: Output; place: ClusterPlace; row_ok [TILE_M]
    """
    GROUP: gl.constexpr = CONFIG.group
    ROWS: gl.constexpr = CONFIG.cluster_rows
    SPLITS: gl.constexpr = CONFIG.cluster_size
    m, l = softmax.m, softmax.l
    DIM_V: gl.constexpr = softmax.acc.shape[1]
    acc = gl.convert_layout(softmax.acc, m.type.layout.parent)
    if ROWS <= 8:
        acc = first_rows(acc, layout_of_half(DIM_V, gl.num_warps()))
        OF_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        m, l = first_of(m, OF_ROWS), first_of(l, OF_ROWS)
        row_ok = first_of(row_ok.to(gl.int32), OF_ROWS) > 0
    S: gl.constexpr = acc.type.layout
    TILE_M: gl.constexpr = acc.shape[0]
    SLICE: gl.constexpr = DIM_V // SPLITS
    # A program's exchange has, of its slice of columns, acc [SPLITS, ROWS, SLICE] of every split;
    # then, of all columns, m [SPLITS, ROWS] and l [SPLITS, ROWS].
    ROW_BYTES: gl.constexpr = 4 * SLICE
    SPLIT_BYTES: gl.constexpr = ROWS * ROW_BYTES
    STATISTICS: gl.constexpr = ROWS * 4 * DIM_V
    base = exchange_at(exchange_bytes_of(ROWS, DIM_V, SPLITS))

    offs_m = gl.arange(0, TILE_M, layout=gl.SliceLayout(1, S))[:, None]
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, S))[None, :]
    ok = row_ok[:, None]
    at = base + place.split * SPLIT_BYTES + offs_m * ROW_BYTES + offs_v % SLICE * 4
    wait_cluster()  # all of them run
    send(at, offs_v // SLICE + offs_m * 0, acc, ok & (offs_v >= 0))
    WIDTH: gl.constexpr = 8 * gl.num_warps()
    to = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, S))[None, :]  # whom m and l go to: all
    every = ok & (to < SPLITS)
    at = base + STATISTICS + (place.split * ROWS + offs_m) * 4 + to * 0
    zero = gl.zeros([TILE_M, WIDTH], gl.float32, S)
    send_one(at, to + offs_m * 0, m[:, None] + zero, every)
    send_one(at + SPLITS * ROWS * 4, to + offs_m * 0, l[:, None] + zero, every)
    arrive_written()

    COLUMNS: gl.constexpr = min(SLICE, 32)
    L: gl.constexpr = gl.BlockedLayout(
        [1, max(SLICE // 32, 1)], [32 // COLUMNS, COLUMNS], [gl.num_warps(), 1], [1, 0]
    )
    M: gl.constexpr = gl.SliceLayout(1, L)
    offs = gl.arange(0, TILE_M, layout=M)
    columns = gl.arange(0, SLICE, layout=gl.SliceLayout(0, L))[None, :]
    rows = place.first_row + offs
    ok = rows < output.seqlen_q * GROUP
    t = rows // GROUP
    head = place.kv_head * GROUP + rows % GROUP
    sink_log2 = None
    if output.sink_ptr is not None:
        sink_log2 = gl.load(output.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
        sink_log2 *= 1.4426950408889634
    of_sequence = place.sequence.to(gl.int64) * output.strides.b
    out_rows = of_sequence + t.to(gl.int64) * output.strides.t + head * output.strides.h
    out_ptrs = output.final.out_ptr + out_rows[:, None] + place.split * SLICE + columns
    there = gl.minimum(offs, ROWS - 1)
    mine = base + there[:, None] * ROW_BYTES + columns * 4
    of_rows = base + STATISTICS + there * 4
    wait_cluster()
    m = gl.full([TILE_M], float("-inf"), gl.float32, M)
    for n in gl.static_range(SPLITS):
        m = gl.maximum(m, received(of_rows + n * ROWS * 4))
    top = finite_or_zero(m)
    l = gl.zeros([TILE_M], gl.float32, M)
    acc = gl.zeros([TILE_M, SLICE], gl.float32, L)
    for n in gl.static_range(SPLITS):
        weight = gl.exp2(received(of_rows + n * ROWS * 4) - top)
        l += weight * received(of_rows + (SPLITS + n) * ROWS * 4)
        acc += weight[:, None] * received(mine + n * SPLIT_BYTES)
    out, lse = finish(acc, m, l, sink_log2)
    final = output.final
    gl.store(out_ptrs, encode_out(out, final), mask=ok[:, None])
    if final.lse_ptr is not None:
        first_head = place.sequence * output.num_kv_heads * GROUP
        lse_rows = (first_head + head).to(gl.int64) * output.seqlen_q + t
        gl.store(final.lse_ptr + lse_rows, lse, mask=ok & (place.split == 0))
