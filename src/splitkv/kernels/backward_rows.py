"""What the gradients of a row have in common: its softmax total, and delta.

Computes, for each row, from out, lse and the gradients dout and dlse of both,

    total = log(exp(lse) + exp(sink))
    delta = dout . out - dlse exp(total - lse)

and, for kernels that sum up ds by columns of keys, what the rows of a tile add to dsink. With
p_sink = exp(sink - total), which is what p leaves of 1,

    dsink = -sum_r p_sink sum_n p dp,    sum_n p dp = sum_n ds + delta (1 - p_sink)

where the rounding of out that is in delta is in ds, too, and so not in dsink. Memory for sums that
the kernels after it add to is set to 0 beside, as a launch for it alone costs more than its bytes.

Shapes      out, lse: as in `prefill`; statistics: see Stats
Grid        row tiles x KV heads x sequences, packed sequences being one
Traffic     reads out, dout and lse once, writes 8 bytes a row and what is set to 0
Numerics    fp32 throughout, total in base 2; the rounding of out is in delta
Limits      those of `prefill`
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.kernels.prefill import SIZES
from splitkv.kernels.sequence_sizes import lse_strides, strides_of
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.visit import Strides, load_tile, place, rows_of
from splitkv.problem import Operands, Problem

TILE = 64  # rows a program
CLEARED = 8192  # fp32 numbers that are set to 0 at once


class Stats(NamedTuple):
    """Pointers to rows [sequences, num_kv_heads, tokens, group] fp32: the total of the softmax in
    base 2, inf where a row sees no key; delta; a row's part of dsink and of dslope, or None; and
    [num_heads, columns] fp32, or None, the parts of dsink: where every head is a group, those of
    row tiles of all sequences, then as many as the kernels after have.

    Packed sequences are one.
    """

    total: Any
    delta: Any
    sink: Any
    slope: Any
    sink_sums: Any = None


@triton.jit(do_not_specialize=(*SIZES, "clear_blocks", "sink_columns"))
def backward_rows(
    out_ptr,
    grad_ptr,  # as out
    lse_ptr,
    grad_lse_ptr,  # as lse, or None
    sink_ptr,  # [num_heads], or None
    stats,  # Stats
    seqlen_q,  # of a sequence; packed ones are as good as one
    num_kv_heads,
    out_strides,  # Strides
    grad_strides,
    lse_strides,
    grad_lse_strides,
    sink_columns,  # of stats.sink_sums
    tiles,  # row tiles of a lane
    clear_ptr,  # fp32 to set to 0, or None
    clear_blocks,  # of CLEARED numbers
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    CLEARED: tl.constexpr,
):
    if clear_ptr is not None:
        tl.extra.cuda.gdc_launch_dependents()  # that kernel waits for this grid before it reads
        inside = tl.arange(0, CLEARED)
        for block in range(tl.program_id(0), clear_blocks, tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * CLEARED
            tl.store(clear_ptr + at + inside, tl.zeros([CLEARED], tl.float32))
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    lane = tl.program_id(0) // tiles
    b = lane // num_kv_heads
    h = lane % num_kv_heads
    offs_m, t, head, ok = rows_of(tl.program_id(0) % tiles, h, seqlen_q, GROUP, TILE_M)
    out = load_tile(place(out_ptr, out_strides, b, t, head), ok, HEAD_DIM_V, DIM_V)
    grad = load_tile(place(grad_ptr, grad_strides, b, t, head), ok, HEAD_DIM_V, DIM_V)
    product = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)  # [TILE_M]
    lse = tl.load(place(lse_ptr, lse_strides, b, t, head), mask=ok, other=0.0)
    lse *= 1.4426950408889634
    empty = lse == float("-inf")

    total = lse
    stat = lane.to(tl.int64) * seqlen_q * GROUP + offs_m
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
        top = finite_or_zero(tl.maximum(lse, sink))
        total = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
    if stats.slope is not None:
        tl.store(stats.slope + stat, product, mask=ok)
    delta = product
    if grad_lse_ptr is not None:
        grad_lse = tl.load(place(grad_lse_ptr, grad_lse_strides, b, t, head), mask=ok, other=0.0)
        delta -= grad_lse.to(tl.float32) * tl.exp2(tl.minimum(total - lse, 126.0))
    if stats.sink_sums is not None:
        p_sink = tl.where(empty, 0.0, tl.exp2(sink - total))
        column = b * tiles + tl.program_id(0) % tiles
        part = tl.sum(p_sink * (1 - p_sink) * delta, 0)
        tl.store(stats.sink_sums + h.to(tl.int64) * sink_columns + column, -part)
    tl.store(stats.total + stat, tl.where(empty, float("inf"), total), mask=ok)
    tl.store(stats.delta + stat, tl.where(empty, 0.0, delta), mask=ok)


def strides_of_stats(problem: Problem, stats: Stats) -> Strides:
    """Of sequences and KV heads; a token has as many elements as its group has heads."""
    b, h, _, _ = stats.total.stride()
    return Strides(b if problem.kind == "dense" else 0, 0, h)


def statistics(
    problem: Problem,
    x: Operands,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    of_slopes: bool,
    sink_columns: int | None = None,
    clear: Tensor | None = None,
) -> Stats:
    """Of a call; `of_slopes` where the gradient of ALiBi slopes is wanted. `sink_columns`: sums of
    the gradient of sink logits in place of room for its rows, so many of other kernels beside;
    every head is a group. `clear`: fp32, a multiple of CLEARED, to set to 0."""
    p = problem
    batch, length = (1, x.q.shape[0]) if p.kind == "varlen" else (p.batch, p.seqlen_q)
    shape = batch, p.num_kv_heads, length, p.group
    tiles = triton.cdiv(length * p.group, TILE)
    sinks = x.sink_logits is not None
    wanted = (True, True, sinks and sink_columns is None, of_slopes)
    total, delta, sink, slope = (
        x.q.new_empty(shape, dtype=torch.float32) if want else None for want in wanted
    )
    sums, columns = None, 0
    if sinks and sink_columns is not None:
        assert p.group == 1, f"group: expected 1, got {p.group}"
        columns = batch * tiles + sink_columns
        sums = x.q.new_empty((p.num_heads, columns), dtype=torch.float32)
    stats = Stats(total, delta, sink, slope, sums)
    lse_grad_strides = None
    if grad_lse is not None:
        n = grad_lse.stride()
        lse_grad_strides = Strides(n[0], n[2], n[1]) if len(n) == 3 else Strides(0, n[1], n[0])
    backward_rows[(tiles * p.num_kv_heads * batch,)](
        *(out, grad, lse, grad_lse, x.sink_logits, stats, length, p.num_kv_heads),
        *(strides_of(out), strides_of(grad), lse_strides(x.q), lse_grad_strides),
        *(columns, tiles),
        *(clear, 0 if clear is None else clear.numel() // CLEARED),
        *(p.group, p.head_dim_v, TILE, CLEARED),
        enable_fp_fusion=True,
    )
    return stats
