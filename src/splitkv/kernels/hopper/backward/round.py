"""dq, rounded from the fp32 sums that `hopper_backward` leaves.

Computes dq[r] = scale * sums[r], rounded to the type of dq. A tile of sums is in the order of the
registers that were added to it, two halves of a tile of rows [TILE_M, DIM], each the accumulator of
a warpgroup [64, columns]: see `store_dq`.

Shapes      sums [heads, tiles of rows, TILE_M * DIM] fp32; dq as q
Grid        tiles of rows x lanes, a lane being a head, dense of one sequence
Traffic     reads the sums once, writes dq
Numerics    one rounding
Limits      those of `hopper_backward`
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitkv.kernels.tile.visit import TiledTokens, own_tile, place, store_tile


@triton.jit(do_not_specialize=("scale", "seqlen_q", "batch", "num_heads", "total_q", "tiles"))
def hopper_backward_round(
    sums_ptr,
    dq_ptr,
    dq_strides,  # Strides
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    scale,
    seqlen_q,
    batch,
    num_heads,
    total_q,
    tiles,  # of a lane
    TILE_M: tl.constexpr,
    DIM: tl.constexpr,
):
    PADDED: tl.constexpr = triton.next_power_of_2(DIM)
    SIZE: tl.constexpr = TILE_M * DIM
    COLUMNS: tl.constexpr = TILE_M * PADDED // 128
    tl.extra.cuda.gdc_wait()  # before any return: this grid must not end before those before it
    pid = tl.program_id(0)
    at = pid.to(tl.int64) * SIZE
    tokens = TiledTokens(cu_q_ptr, cu_q_ptr, seqlen_q, seqlen_q, batch, total_q)
    own = own_tile(pid % tiles, pid // tiles, tokens, num_heads, 1, TILE_M)
    t = own.tile * TILE_M + tl.arange(0, TILE_M)
    if own.tile * TILE_M >= own.length:
        return
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
