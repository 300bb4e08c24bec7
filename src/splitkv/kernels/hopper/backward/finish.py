"""dq, rounded from the fp32 sums that `hopper_backward` leaves, and what `backward_finish` makes of
other sums.

Computes dq[r] = scale * sums[r], rounded to the type of dq. A tile of sums is in the order of the
registers that were added to it, two halves of a tile of rows [TILE_M, SUM_DIM], each the
accumulator of a warpgroup [64, columns]: see `store_dq`.

Shapes      sums [heads, tiles of rows, TILE_M * SUM_DIM] fp32; dq as q
Grid        that of `backward_finish`; then tiles of rows x lanes, a lane being a head, dense of one
            sequence
Traffic     reads the sums once, writes dq
Numerics    one rounding
Limits      those of `hopper_backward`
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitkv.kernels.backward.finish import SplitTiles, add_up_sinks, add_up_splits
from splitkv.kernels.backward.records import SIZES
from splitkv.kernels.tile.visit import TiledTokens, own_tile, place, store_tile


@triton.jit
def round_dq(
    sums_ptr,
    dq_ptr,
    dq_strides,  # Strides
    own,  # OwnTile, of queries alone
    pid,  # which of all tiles that is
    scale,
    TILE_M: tl.constexpr,
    SUM_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Stores dq of a tile of rows."""
    PADDED: tl.constexpr = triton.next_power_of_2(SUM_DIM)
    SIZE: tl.constexpr = TILE_M * SUM_DIM
    COLUMNS: tl.constexpr = TILE_M * PADDED // 128
    at = pid.to(tl.int64) * SIZE
    t = own.tile * TILE_M + tl.arange(0, TILE_M)
    if own.tile * TILE_M < own.length:
        offs = tl.arange(0, TILE_M * PADDED)
        dq = tl.load(sums_ptr + at + offs, mask=offs < SIZE)
        # [half, step of 8 columns, warp, row, pair of columns, row half, column]
        dq = tl.reshape(dq, [2, COLUMNS // 8, 4, 8, 4, 2, 2])
        if TILE_M == 64:  # halves of columns
            dq = tl.permute(dq, (2, 5, 3, 0, 1, 4, 6))
        else:  # halves of rows
            dq = tl.permute(dq, (0, 2, 5, 3, 1, 4, 6))
        dq = tl.reshape(dq, [TILE_M, PADDED]) * scale
        rows = place(dq_ptr, dq_strides, own.sequence, own.first + t, own.head)
        store_tile(rows, dq, t < own.length, DIM)


@triton.jit(do_not_specialize=(*SIZES, "scale"))
def hopper_backward_finish(
    sinks,  # SinkSums, or None
    split_sums,  # SplitSums, or None
    sums_ptr,
    dq_ptr,
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    dk_strides,  # Strides
    dv_strides,
    dq_strides,
    sink_programs,  # heads, or 0
    split_programs,
    sink_sequences,
    sink_lanes,
    sink_numbers,
    scale,
    seqlen_q,
    seqlen_k,
    batch,
    num_heads,
    num_kv_heads,
    total_q,
    tiles,  # of rows of a lane
    split_tiles,
    row_splits,
    SINK_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    SUM_DIM: tl.constexpr,  # columns of sums of dq: HEAD_DIM, and those that tiles have beside
    TILE_N: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SINKS_TOGETHER: tl.constexpr,
):
    tl.extra.cuda.gdc_wait()  # before any return: this grid must not end before those before it
    pid = tl.program_id(0)
    first = pid - sink_programs
    if first < 0:
        if sinks is not None:
            add_up_sinks(
                sinks, pid, sink_sequences, sink_lanes, sink_numbers, SINK_GROUP, SINKS_TOGETHER
            )
    elif first < split_programs:
        if split_sums is not None:
            of = SplitTiles(
                cu_k_ptr, seqlen_k, num_kv_heads, dk_strides, dv_strides, split_tiles, row_splits
            )
            add_up_splits(split_sums, of, first, HEAD_DIM, HEAD_DIM_V, TILE_N, ROWS, TOGETHER)
    else:
        first -= split_programs
        tokens = TiledTokens(cu_q_ptr, cu_q_ptr, seqlen_q, seqlen_q, batch, total_q)
        own = own_tile(first % tiles, first // tiles, tokens, num_heads, 1, TILE_M)
        round_dq(sums_ptr, dq_ptr, dq_strides, own, first, scale, TILE_M, SUM_DIM, HEAD_DIM)
