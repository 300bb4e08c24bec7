"""Gradients of attention for Hopper: tiles by TMA, five products by two warpgroups.

Computes what kernels/backward computes, without dropout, soft cap and ALiBi. After `backward_rows`,
which finds total and delta, a program has 128 keys, 64 where head_dim is more than that, and visits
the rows that see them, the heads of the group one after another:

    p[n, r]  = exp(scale k[n] . q[r] - total[r])    ds[n, r] = p[n, r] (v[n] . dout[r] - delta[r])
    dv[n]   += p[n, r] dout[r]    dk[n] += scale ds[n, r] q[r]    dq[r] += scale ds[n, r] k[n]

Scores are transposed, so that p and ds come out of the products in the registers from which dv and
dk take them. dq is summed up over programs: TMA adds their tiles to fp32 sums in memory, in the
order of a warpgroup's registers, and `hopper_backward_finish` brings these into the order and type
of dq. Such sums differ from run to run in their last bits. With `deterministic` programs of 128
keys add to a tile of rows in turns, in the order of their keys, where every row sees every key: all
come to it at about the same time. Elsewhere they would wait for each other, and
`hopper_backward_queries` makes dq, and S and dP once more: seven products.

Tiles of sink tokens come before all others, and the rows that see a tile are split among programs
where it would be the last to end or there are few tiles: see planner/policies/row_splits.py. What
there is to choose is in kernels/limits/hopper_backward.py. To be read in this order: this file,
records.py, load.py, mma_half_keys.py (head_dim up to 128) or mma_one_gradient.py, with
masked_weights.py and shared_memory.py, dq_sums.py, sinks.py, epilogue.py, finish.py; and queries.py
for dq by itself, with split_sums.py. On the host: launches.py, launcher.py, relaunch.py.

Shapes      as kernels/prefill.py; rows of statistics: see Stats, every head a group of its own
Grid        row splits x KV heads x sequences x tiles that come first; then
            tiles of keys x lanes, the first and so heaviest first, a lane being a KV head, dense of
            one sequence: as many lanes together as have a tile for every SM
Traffic     reads k, v, and for each tile of keys q, dout and 8 bytes of statistics of the rows that
            see it; writes dk, dv; dq: `backward_rows` sets the fp32 sums to 0, each tile of keys
            adds to them, `hopper_backward_finish` reads them and writes dq; flops 5 products of
            2 * pairs * head_dim where the forward has 2
Numerics    scores, p, ds and sums in fp32; p and ds are rounded to the type of q before a product,
            p with 64 keys also before it becomes ds, with sink logits to fp16.
            Rows and keys behind the end of a packed sequence are cleared before they are multiplied
            with zeros, as those of the next sequence may be NaN or infinite. Delta has the rounding
            of out in it; dsink has not: threads sum up ds, each row's times its weight, in fp32
Limits      sm_90; bf16 or fp16; head_dim and head_dim_v multiples of 8 in tiles of 64 or 128, both
            256, or 192 and 128; no soft cap, ALiBi or dropout; addresses and strides that are
            multiples of 16 bytes; otherwise those of kernels/prefill.py. Turns need programs to be
            started in the order of their numbers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.backward.key_tile import locate_tokens
from splitkv.kernels.hopper.backward.records import (
    BackwardInputs,
    KeyGradientStore,
    KeyWork,
    MaskedScores,
    RowTiles,
)
from splitkv.kernels.hopper.backward.sinks import store_no_sinks, threads_with_ds
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.visit import row_tiles_seen, split_tile, tile_and_lane, whole_tile

SIZES = (  # arguments whose values are no reason to compile again
    *("scale", "scale_log2", "left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch"),
    *("num_kv_heads", "total_q", "total_k", "tiles", "lanes", "width", "sum_tiles"),
    *("split_tiles", "row_splits", "sink_columns", "sink_first"),
)


class FirstRows(NamedTuple):
    """Where the rows that a program visits begin: row in the statistics, rows from one head to the
    next there, row tile in the sums of dq, index of their sequence in the descriptors."""

    stat_row: Any
    stat_head: Any
    sum_tile: Any
    sequence: Any


@gluon.jit(do_not_specialize=SIZES)
def hopper_backward(
    q_desc,  # [batch, seqlen_q, num_heads, DIM], or [1, total_q, num_heads, DIM], in tiles of rows
    grad_desc,  # as q_desc
    k_desc,  # the same of keys and KV heads
    v_desc,
    total_ptr,  # Stats.total of heads without groups
    delta_ptr,
    weight_ptr,  # of ds in -dsink, or None: no sink logits
    sink_sums_ptr,  # [num_heads, columns] fp32: see sinks.py
    dk_ptr,  # as k
    dv_ptr,
    dk_strides,  # Strides
    dv_strides,
    split_ptr,  # [batch, num_kv_heads, split_tiles, row_splits, TILE_N, head_dim + head_dim_v]
    # fp32, or None: rows are not split
    sums_desc,  # [heads, tiles of rows, TILE_M * head_dim] fp32, see `store_dq`, or None
    turn_ptr,  # [heads, tiles of rows] int32: see `add_dq_halves`
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    scale,
    scale_log2,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    total_q,
    total_k,
    tiles,  # tiles of keys of a lane
    lanes,
    width,  # lanes that go together
    sum_tiles,  # of a head, and dense of a sequence
    sink_columns,  # of sink_sums_ptr, and the first of these kernels
    sink_first,
    split_tiles,  # tiles that come first
    row_splits,  # of the rows that see each of them
    CONFIG: gl.constexpr,  # HopperBackwardConfig
):
    TILE_M: gl.constexpr = q_desc.block_type.shape[1]
    TILE_N: gl.constexpr = k_desc.block_type.shape[1]
    bounds = Bounds(left, right, sink_tokens)
    tl.extra.cuda.gdc_launch_dependents()  # they wait for this grid before they read

    # whose keys, and which
    pid = gl.program_id(0)
    before = batch * num_kv_heads * split_tiles * row_splits
    in_split = pid < before
    if in_split:
        own = split_tile(
            pid, row_splits, cu_k_ptr, cu_q_ptr, seqlen_k, seqlen_q, batch, num_kv_heads
        )
        program = (own.tile * batch + own.sequence) * row_splits + pid % row_splits
    else:
        tile, lane = tile_and_lane(pid - before, tiles, lanes, width)
        program = split_tiles * batch * row_splits + tile
        if cu_q_ptr is None:
            program += lane // num_kv_heads * tiles
        found = locate_tokens(
            tile,
            lane,
            cu_k_ptr,
            cu_q_ptr,
            seqlen_k,
            seqlen_q,
            batch,
            total_k,
            num_kv_heads,
            TILE_N,
        )
        own = whole_tile(found, split_tiles, batch)
    num_keys = own.num_keys
    num_rows = own.num_rows
    if weight_ptr is not None:
        sink_sums_ptr += (own.kv_head * CONFIG.group).to(gl.int64) * sink_columns
        sink_sums_ptr += sink_first + program * threads_with_ds(CONFIG.head_dim)
    if own.tile * TILE_N >= num_keys:
        tl.extra.cuda.gdc_wait()  # this grid must not end before backward_rows does
        if weight_ptr is not None:
            store_no_sinks(sink_sums_ptr, sink_columns, CONFIG)
        return

    # the tiles of rows that see them
    n = own.tile * TILE_N
    shift = num_keys - num_rows
    last = gl.minimum(n + TILE_N, num_keys) - 1
    seen = row_tiles_seen(bounds, n, last, shift, num_rows, 1, TILE_M)
    first = seen.skip
    end = first + seen.count
    whole = n + TILE_N <= num_keys  # else keys that are not there have to be masked
    middle = gl.where(whole, first + seen.middle_first, end)
    middle_end = gl.where(whole, first + seen.middle_last, end)
    if split_ptr is not None:
        per = gl.where(in_split, (seen.count + row_splits - 1) // row_splits, seen.count)
        first = gl.minimum(first + gl.where(in_split, pid % row_splits * per, 0), end)
        end = gl.minimum(first + per, end)
    rows = RowTiles(end - first, middle - first, middle_end - first)
    if weight_ptr is not None:
        if rows.count == 0:
            store_no_sinks(sink_sums_ptr, sink_columns, CONFIG)

    # from here on keys count from the first of the tile and rows from the first that it visits
    t = first * TILE_M
    num_keys -= n
    first_key = own.first_key + n
    shift += t - n
    near_keys = sink_tokens
    if sink_tokens is not None:
        near_keys = sink_tokens - n
    scores = MaskedScores(Bounds(left, right, near_keys), scale_log2)
    if cu_q_ptr is None:
        sequence_head = own.sequence * num_kv_heads + own.kv_head
        start = FirstRows(
            stat_row=sequence_head * CONFIG.group * seqlen_q + t,
            stat_head=seqlen_q,
            sum_tile=sequence_head * CONFIG.group * sum_tiles + first,
            sequence=own.sequence,
        )
    else:
        start = FirstRows(
            stat_row=own.kv_head * CONFIG.group * total_q + own.first_row + t,
            stat_head=total_q,
            # every sequence before has as many tiles as it needs or one more
            sum_tile=own.kv_head * CONFIG.group * sum_tiles
            + own.first_row // TILE_M
            + own.sequence
            + first,
            sequence=own.sequence * 0,
        )
    work = KeyWork(
        steps=rows.count * CONFIG.group,
        sequence=start.sequence,
        kv_head=own.kv_head,
        key_tile=own.tile,
        first_key=first_key,
        num_keys=num_keys,
        first_row=own.first_row + t,
        num_rows=num_rows - t,
        shift=shift,
        stat_head=start.stat_head,
        sum_tile=start.sum_tile,
        sum_head=sum_tiles,
        rows=rows,
    )

    # where gradients go
    sequence = work.sequence.to(gl.int64)
    dk_at = sequence * dk_strides.b + first_key.to(gl.int64) * dk_strides.t
    dv_at = sequence * dv_strides.b + first_key.to(gl.int64) * dv_strides.t
    dk_ptr += dk_at + own.kv_head.to(gl.int64) * dk_strides.h
    dv_ptr += dv_at + own.kv_head.to(gl.int64) * dv_strides.h
    if split_ptr is not None:
        tile_of_head = (own.sequence * num_kv_heads + own.kv_head) * split_tiles + own.tile
        number = tile_of_head * row_splits + pid % row_splits
        split_ptr += number.to(gl.int64) * (TILE_N * (CONFIG.head_dim + CONFIG.head_dim_v))
    out = KeyGradientStore(
        dk_ptr=dk_ptr,
        dv_ptr=dv_ptr,
        dk_stride=dk_strides.t,
        dv_stride=dv_strides.t,
        scale=scale,
        split_ptr=split_ptr,
        in_split=in_split,
        sink_ptr=sink_sums_ptr,
        sink_head=sink_columns,
    )
    if weight_ptr is not None:
        weight_ptr += start.stat_row
    inputs = BackwardInputs(
        q=q_desc,
        grad=grad_desc,
        k=k_desc,
        v=v_desc,
        total_ptr=total_ptr + start.stat_row,
        delta_ptr=delta_ptr + start.stat_row,
        weight_ptr=weight_ptr,
    )
    CONFIG.specialize(inputs, sums_desc, turn_ptr, work, scores, out, CONFIG)
