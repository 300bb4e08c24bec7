"""The statistics of each row that all gradients need: its softmax total, and delta.

Computes, for each row, from out, lse and the gradients dout and dlse of both,

    total = log(exp(lse) + exp(sink))
    delta = dout . out - dlse exp(total - lse)

and for the gradient of sink logits p_sink = exp(sink - total), which is what p leaves of 1:

    dsink = -sum_r p_sink e,    e = sum_n p dp = dout . out

For kernels that sum up ds by columns of keys, also what the rows of a tile add to dsink. The
rounding of out is in dout . out, and in ds too, so that it is not in

    e = sum_n ds + (1 - p_sink) dout . out - dlse

The LSE leaves the sink out: dlse has no part in e. It is in the sum of ds and is taken off again,
which leaves the rounding of p, times dlse. Where the sink dominates that is more than all of e. So
a row goes by the sum, with p_sink as the weight of its ds, where that is the smaller error of the
two, and by dout . out, with a weight of 0, where it is not.

Memory for sums that the kernels after it add to is set to 0 beside, as a launch for it alone costs
more than its bytes.

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

from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import ceil_div
from splitkv.kernels.backward.records import SIZES, Stats
from splitkv.kernels.host.launch import launch_by_name
from splitkv.kernels.host.sequence_sizes import lse_strides, strides_of
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.visit import Strides, load_tile, place, rows_of

TILE = 64  # rows a program
P_ERROR = 2.0**-20  # of p by the rounding of fp32 totals: that of their exponents
CLEARED = 8192  # fp32 numbers that are set to 0 at once


@triton.jit(do_not_specialize=SIZES)
def backward_rows(
    out_ptr,
    grad_ptr,  # as out
    lse_ptr,
    grad_lse_ptr,  # as lse, with its strides; or None
    sink_ptr,  # [num_heads], or None
    stats,  # Stats
    seqlen_q,  # of a sequence; packed ones are as good as one
    num_kv_heads,
    out_strides,  # Strides
    grad_strides,
    stride_lse_b,  # its tokens are contiguous
    stride_lse_h,
    sink_columns,  # of stats.sink_sums
    tiles,  # row tiles of a lane
    clear_ptr,  # fp32 to set to 0, or None
    clear_blocks,  # of CLEARED numbers
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    CLEARED: tl.constexpr,
    ERRORS: tl.constexpr,  # that of p to that of out, both relative
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
    rows = rows_of(tl.program_id(0) % tiles, h, seqlen_q, GROUP, TILE_M)
    offs_m = rows.row
    t = rows.token
    head = rows.head
    ok = rows.ok
    out = load_tile(place(out_ptr, out_strides, b, t, head), ok, HEAD_DIM_V, DIM_V)
    grad = load_tile(place(grad_ptr, grad_strides, b, t, head), ok, HEAD_DIM_V, DIM_V)
    products = out.to(tl.float32) * grad.to(tl.float32)  # [TILE_M, DIM_V]
    product = tl.sum(products, 1)  # [TILE_M]
    lse_strides = Strides(stride_lse_b, 1, stride_lse_h)
    lse = tl.load(place(lse_ptr, lse_strides, b, t, head), mask=ok, other=0.0)
    lse *= 1.4426950408889634
    empty = lse == float("-inf")

    total = lse
    delta = product
    of_ds = product * 0.0  # what ds add up to: p_sink dout . out + dlse
    if grad_lse_ptr is not None:
        grad_lse = tl.load(place(grad_lse_ptr, lse_strides, b, t, head), mask=ok, other=0.0)
        of_ds = tl.where(empty, 0.0, grad_lse.to(tl.float32))
    stat = lane.to(tl.int64) * seqlen_q * GROUP + offs_m
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
        top = finite_or_zero(tl.maximum(lse, sink))
        total = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
        p_sink = tl.where(empty, 0.0, tl.exp2(sink - total))
        if stats.sink is not None:
            tl.store(stats.sink + stat, p_sink, mask=ok)
        if stats.sink_sums is not None:
            by_sum = tl.sum(products * products, 1) >= of_ds * of_ds * (ERRORS * ERRORS)
            rest = tl.where(by_sum, tl.exp2(lse - total) * product - of_ds, product)
            of_sink = tl.where(empty, 0.0, -p_sink * rest)
            tl.store(stats.weight + stat, tl.where(by_sum, p_sink, 0.0), mask=ok)
            column = b * tiles + tl.program_id(0) % tiles
            tl.store(stats.sink_sums + h.to(tl.int64) * sink_columns + column, tl.sum(of_sink, 0))
    if grad_lse_ptr is not None:
        delta -= of_ds * tl.exp2(tl.minimum(total - lse, 126.0))
    if sink_ptr is not None:
        of_ds += p_sink * product
    if stats.slope is not None:
        tl.store(stats.slope + stat, of_ds, mask=ok)
    tl.store(stats.total + stat, tl.where(empty, float("inf"), total), mask=ok)
    tl.store(stats.delta + stat, tl.where(empty, 0.0, delta), mask=ok)


POINTERS = {
    "out_ptr": "out",
    "grad_ptr": "grad",
    "lse_ptr": "lse",
    "grad_lse_ptr": "grad_lse",
    "sink_ptr": "sink",
    "stats": Stats("total", "delta", "sink_rows", "slope_rows", "weight", "sink_sums"),
    "clear_ptr": "clear",
}
"""The arguments of `backward_rows` that change from call to call: see `AddressKernel`."""


class RowSizes(NamedTuple):
    """The sizes of a launch of `backward_rows` that follow from the lengths of its call.

    shape       of rows of statistics, see Stats
    columns     of Stats.sink_sums
    grid        programs
    arguments   of the kernel, by name
    """

    shape: tuple[int, int, int, int]
    columns: int
    grid: tuple[int]
    arguments: dict[str, Any]


def row_sizes(
    num_kv_heads: int,
    group: int,
    q: Tensor,
    out: Tensor,
    grad: Tensor,
    sink_columns: int = 0,
    cleared: int = 0,
) -> RowSizes:
    """The RowSizes of queries, their output and its gradient.

    sink_columns   of Stats.sink_sums, beside those of row tiles
    cleared        numbers to set to 0, a multiple of CLEARED
    """
    batch, tokens = (1, q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[1])
    tiles, lse = ceil_div(tokens * group, TILE), lse_strides(q)
    columns = batch * tiles + sink_columns
    arguments = {
        "seqlen_q": tokens,
        "out_strides": strides_of(out),
        "grad_strides": strides_of(grad),
        "stride_lse_b": lse.b,
        "stride_lse_h": lse.h,
        "sink_columns": columns,
        "tiles": tiles,
        "clear_blocks": cleared // CLEARED,
    }
    shape = batch, num_kv_heads, tokens, group
    return RowSizes(shape, columns, (tiles * num_kv_heads * batch,), arguments)


def row_arguments(
    num_kv_heads: int, group: int, head_dim_v: int, dtype: torch.dtype, p_error: float = P_ERROR
) -> dict[str, Any]:
    """The arguments of `backward_rows` that no length changes, by name.

    dtype     of out
    p_error   how far off the p are of which ds are made, relatively
    """
    return {
        "num_kv_heads": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM_V": head_dim_v,
        "TILE_M": TILE,
        "CLEARED": CLEARED,
        "ERRORS": 2 * p_error / torch.finfo(dtype).eps,
    }


def statistics(
    problem: Problem,
    x: Operands,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    of_slopes: bool,
    sink_columns: int | None = None,
) -> Stats:
    """Launches `backward_rows`; the Stats of a call.

    of_slopes      whether the gradient of ALiBi slopes is wanted
    sink_columns   sums of the gradient of sink logits take the place of room for its rows, so many
                   beside those of row tiles; every head is a group
    """
    p, sinks = problem, x.sink_logits is not None
    summed = sinks and sink_columns is not None
    assert not summed or p.group == 1, f"group: expected 1, got {p.group}"
    sizes = row_sizes(p.num_kv_heads, p.group, x.q, out, grad, sink_columns or 0)

    def memory(wanted: bool, shape: tuple[int, ...] = sizes.shape) -> Tensor | None:
        return x.q.new_empty(shape, dtype=torch.float32) if wanted else None

    stats = Stats(
        total=memory(True),
        delta=memory(True),
        sink=memory(sinks and not summed),
        slope=memory(of_slopes),
        weight=memory(summed),
        sink_sums=memory(summed, (p.num_heads, sizes.columns)),
    )
    arguments = {
        "out_ptr": out,
        "grad_ptr": grad,
        "lse_ptr": lse,
        "grad_lse_ptr": grad_lse,
        "sink_ptr": x.sink_logits,
        "stats": stats,
        "clear_ptr": None,
        **row_arguments(p.num_kv_heads, p.group, p.head_dim_v, out.dtype),
        **sizes.arguments,
    }
    launch_by_name(backward_rows, sizes.grid, arguments)
    return stats
