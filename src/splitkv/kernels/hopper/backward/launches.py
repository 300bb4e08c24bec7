"""The launches of a backward on Hopper: grids and arguments by name, as lengths and strides of a
call make them, and the memory that it takes beside its results."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import ceil_div, next_power_of_2
from splitkv.core.variants import HopperBackward
from splitkv.kernels.backward.finish import SinkSums, SplitSums
from splitkv.kernels.backward.launcher import finish_arguments, programs_of_splits
from splitkv.kernels.backward.records import Gradients, Saved
from splitkv.kernels.backward.rows import (
    CLEARED,
    P_ERROR,
    POINTERS,
    RowSizes,
    backward_rows,
    row_arguments,
    row_sizes,
)
from splitkv.kernels.hopper.backward.finish import hopper_backward_finish
from splitkv.kernels.hopper.backward.kernel import hopper_backward
from splitkv.kernels.hopper.backward.mma_half_keys import specialize_half_keys
from splitkv.kernels.hopper.backward.mma_one_gradient import specialize_one_gradient
from splitkv.kernels.hopper.backward.queries import hopper_backward_queries
from splitkv.kernels.hopper.backward.records import HopperBackwardConfig
from splitkv.kernels.hopper.backward.shared_memory import SUM_COLUMNS
from splitkv.kernels.hopper.backward.sinks import threads_with_ds
from splitkv.kernels.host.address_kernel import KernelLaunch
from splitkv.kernels.host.sequence_sizes import (
    LOG2_E,
    SequenceLengths,
    bounds_of,
    lengths_of,
    strides_of_layout,
)
from splitkv.kernels.limits.hopper_backward import sum_dim
from splitkv.kernels.tile.visit import Strides

BOXES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
SUMS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
# The error of p, relatively, by which the sums of ds are weighed: in the exponent of fp32 totals,
# or of p that consumers hand each other in fp16.
ERRORS_OF_P = {"half_keys": P_ERROR, "one_gradient": 2.0**-12}
LEAST_FULL = 0.9  # tiles that lanes have together, for each SM
SPECIALIZE = {"half_keys": specialize_half_keys, "one_gradient": specialize_one_gradient}
SUM_KEYS = 16  # whose dk and dv a program of `hopper_backward_queries` adds up
ALIGNED = 32  # fp32 numbers of a piece of the workspace
FAR = 1 << 31
"""Strides from which on 32 bits do not hold them."""


class Bound(Protocol):
    """The plan that launches are made for: its problem, device and variant, and of these the
    compile-time values of `hopper_backward`."""

    problem: Problem
    device: Device
    variant: HopperBackward
    config: HopperBackwardConfig


def config_of(problem: Problem, variant: HopperBackward) -> HopperBackwardConfig:
    """The compile-time values of `hopper_backward`."""
    return HopperBackwardConfig(
        group=problem.group,
        num_stages=variant.num_stages,
        grad_stages=variant.grad_stages,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        sequences="packed" if problem.kind == "varlen" else "dense",
        specialize=SPECIALIZE[variant.consumers],
    )


class GradientCall(NamedTuple):
    """A call of the backward.

    grad       the gradient of the output; grad_lse: of the LSE, contiguous, or None
    operands   of the forward, for its scale and lengths
    """

    saved: Saved
    grad: Tensor
    grad_lse: Tensor | None
    operands: Operands

    @property
    def kind(self) -> Hashable:
        """All that launches with addresses are made for."""
        q, k, v, x = self.saved.q, self.saved.k, self.saved.v, self.operands
        strides = q.stride(), k.stride(), v.stride(), self.grad.stride()
        lengths = x.seqlen_q, x.seqlen_k
        others = self.grad_lse is None, x.softmax_scale, lengths
        return (q.shape, k.shape), strides, others

    @property
    def alignment(self) -> Hashable:
        """The part of strides in what kernels are compiled for: None where all are multiples of 16
        that 32 bits hold."""
        bits = most = 0
        for x in (self.saved.q, self.saved.k, self.saved.v, self.grad):
            for step in x.stride()[:-1]:
                bits |= step
                most = max(most, step)
        return None if not bits & 15 and most < FAR else self.kind

    @property
    def aligned(self) -> bool:
        """Whether all addresses are multiples of 16, as kernels are compiled for."""
        every = *self.saved, self.grad, self.grad_lse
        return not any(x is not None and x.data_ptr() & 15 for x in every)

    @property
    def given(self) -> dict[str, Tensor | None]:
        """Its tensors by the names that launches know them by."""
        x = self.saved
        return {
            "q": x.q,
            "k": x.k,
            "v": x.v,
            "grad": self.grad,
            "out": x.out,
            "lse": x.lse,
            "grad_lse": self.grad_lse,
            "sink": x.sink_logits,
            "cu_q": x.cu_seqlens_q,
            "cu_k": x.cu_seqlens_k,
        }


def call_of(
    operands: Operands, out: Tensor, lse: Tensor, grad: Tensor, grad_lse: Tensor | None
) -> GradientCall:
    """The GradientCall of a forward's operands and results."""
    x = operands
    lengths = x.cu_seqlens_q, x.cu_seqlens_k
    saved = Saved(x.q, x.k, x.v, out, lse, x.sink_logits, None, *lengths)
    return GradientCall(saved, grad, grad_lse, x)


class LaneTiling(NamedTuple):
    """Tiles of a lane, lanes, and how many lanes go together."""

    tiles: int
    lanes: int
    width: int


def lane_tiling(problem: Problem, device: Device, total: int, heads: int, tile: int) -> LaneTiling:
    """The LaneTiling of `total` tokens in tiles of `tile`; a lane is a head, dense of one sequence.

    Together go the least number of lanes, of those that divide all, that has a tile for nearly
    every SM. Where the tiles of a lane are not equally heavy, fewer would leave SMs idle at the
    end.
    """
    if problem.kind == "varlen":
        return LaneTiling(total // tile + problem.batch + 1, heads, heads)
    tiles, lanes = ceil_div(total // problem.batch, tile), problem.batch * heads
    return LaneTiling(tiles, lanes, lanes_together(tiles, lanes, LEAST_FULL * device.num_sms))


@lru_cache
def lanes_together(tiles: int, lanes: int, enough: float) -> int:
    """The least divisor of `lanes` that has enough tiles; all where none has."""
    divisors = (n for n in range(1, lanes + 1) if lanes % n == 0)
    return next((n for n in divisors if n * tiles >= enough), lanes)


class Layout(NamedTuple):
    """A tensor as TMA is to see it: shape and strides in elements, the box that it copies at once,
    and how that lies in shared memory."""

    shape: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    layout: gl.NVMMASharedLayout

    def descriptor(self, x: Any) -> TensorDescriptor:
        """Describes a tensor to TMA."""
        return TensorDescriptor(
            x, list(self.shape), list(self.strides), list(self.box), self.layout
        )


def layout_of_tokens(x: Any, tokens: int) -> Layout:
    """The Layout of x [(batch,) tokens, heads, dim], so many tokens of a head at a time."""
    shape, strides = x.shape, x.stride()
    n, h, d = shape[-3:]
    b, step_b = (shape[0], strides[0]) if len(shape) == 4 else (1, d)
    # along a single element there are no steps, and torch may say anything
    steps = step_b if b > 1 else d, strides[-3] if n > 1 else d, strides[-2] if h > 1 else d, 1
    return Layout((b, n, h, d), steps, (1, tokens, 1, next_power_of_2(d)), BOXES)


def layout_of_sums(numel: int, tile: int, pieces: int) -> Layout:
    """The Layout of so many sums of dq, one of so many pieces of a tile of them at a time."""
    columns = SUM_COLUMNS.value
    box = tile // (pieces * columns), columns
    return Layout((numel // columns, columns), (columns, 1), box, SUMS)


class CallMemory(NamedTuple):
    """Memory of a call through Triton: its tensors by the names that launches know them by, and the
    gradients among them."""

    tensors: dict[str, Tensor | None]
    gradients: Gradients


def allocate_backward(call: GradientCall, workspace: Workspace) -> CallMemory:
    """The memory of a call, its workspace in one piece."""
    x = call.saved
    memory = x.q.new_empty(workspace.numel, dtype=torch.float32)
    dq, dk, dv = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
    dsink = None
    if x.sink_logits is not None:
        dsink = x.q.new_empty(x.sink_logits.shape, dtype=x.sink_logits.dtype)
    made = {"dq": dq, "dk": dk, "dv": dv, "dsink": dsink}
    tensors = call.given | made | workspace.views(memory)
    return CallMemory(tensors, Gradients(dq, dk, dv, dsink, None))


class Workspace:
    """Memory of a call beside its results: pieces of one allocation in fp32, by name; turns, which
    are counted, in int32.

    places   the offset of each piece, and its numbers
    numel    of all
    """

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        self.numel = 0

    def add(self, name: str, numel: int) -> None:
        """Makes room for a piece."""
        self.places[name] = self.numel, numel
        self.numel += ceil_div(numel, ALIGNED) * ALIGNED

    def add_inside(self, name: str, outer: str, offset: int, numel: int) -> None:
        """Gives a part of a piece a name of its own."""
        self.places[name] = self.places[outer][0] + offset, numel

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The pieces of memory."""
        made = {name: memory[at : at + numel] for name, (at, numel) in self.places.items()}
        if "turns" in made:
            made["turns"] = made["turns"].view(torch.int32)
        return made


class GradientStrides(NamedTuple):
    """The Strides of dq, dk and dv; `of_tensors`: as torch has them."""

    q: Strides
    k: Strides
    v: Strides
    of_tensors: list[tuple[int, ...]]


def strides_of_gradients(x: Saved) -> GradientStrides:
    """The GradientStrides of a call."""
    leaves = x.q, x.k, x.v
    strides = [gradient_strides(t) for t in leaves]
    q, k, v = (strides_of_layout(t.shape, n) for t, n in zip(leaves, strides, strict=True))
    return GradientStrides(q, k, v, strides)


class Sizes(NamedTuple):
    """The sizes of launches that follow from the lengths of a call.

    lengths           of the longest sequences; total_q, total_k: tokens of all of them
    gradients         Strides of the results
    keys, rows        tiles of keys of `hopper_backward`, and of rows in the sums of dq
    programs          of `hopper_backward`
    sink_columns      of Stats.sink_sums that it leaves
    statistics        of `backward_rows`
    workspace         the memory beside results
    """

    lengths: SequenceLengths
    total_q: int
    total_k: int
    gradients: GradientStrides
    keys: LaneTiling
    rows: LaneTiling
    programs: int
    sink_columns: int
    statistics: RowSizes
    workspace: Workspace


def gradient_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of torch.empty_like."""
    return x.stride() if x.is_contiguous() else torch.empty_like(x, device="meta").stride()


def sizes_of(bound: Bound, call: GradientCall) -> Sizes:
    """The Sizes of a call."""
    p, c, device, x = bound.problem, bound.variant, bound.device, call.saved
    total_q, total_k = tokens_of_batch(x.q), tokens_of_batch(x.k)
    keys = lane_tiling(p, device, total_k, p.num_kv_heads, c.tile_n)
    rows = lane_tiling(p, device, total_q, p.num_heads, c.tile_m)
    split = p.batch * p.num_kv_heads * c.row_splits.tiles * c.row_splits.splits
    programs = split + keys.tiles * keys.lanes
    # fp32 sums of dq, and the number of tiles of keys that have been added to each tile
    sums = turns = 0
    if c.dq != "recomputed":
        sums = rows.tiles * rows.lanes * c.tile_m * sum_dim(p)
        turns = rows.tiles * rows.lanes if c.dq == "added_in_turns" else 0
    cleared = ceil_div(sums + turns, CLEARED) * CLEARED
    sinks = x.sink_logits is not None
    sink_columns = programs // p.num_kv_heads * threads_with_ds(p.head_dim) if sinks else 0
    statistics = row_sizes(p.num_heads, 1, x.q, x.out, call.grad, sink_columns, cleared)

    workspace = Workspace()
    if cleared:
        workspace.add("clear", cleared)
        workspace.add_inside("sums", "clear", 0, sums)
    if turns:
        workspace.add_inside("turns", "clear", sums, turns)
    for name in ("total", "delta", *(("weight",) if sinks else ())):
        workspace.add(name, math.prod(statistics.shape))
    if sinks:
        workspace.add("sink_sums", p.num_heads * statistics.columns)
    if c.row_splits.splits > 1:
        workspace.add("split", split * c.tile_n * (p.head_dim + p.head_dim_v))
    return Sizes(
        lengths=lengths_of(p, call.operands),
        total_q=total_q,
        total_k=total_k,
        gradients=strides_of_gradients(x),
        keys=keys,
        rows=rows,
        programs=programs,
        sink_columns=sink_columns,
        statistics=statistics,
        workspace=workspace,
    )


def tokens_of_batch(x: Any) -> int:
    """Tokens of all sequences of x [(batch,) tokens, heads, dim]."""
    return int(x.shape[:-2].numel())


def launches_of(bound: Bound, call: GradientCall, sizes: Sizes) -> list[KernelLaunch]:
    """The launches of a call, in their order."""
    last = finish_launch if bound.variant.queries is None else queries_launch
    return [make(bound, call, sizes) for make in (rows_launch, keys_launch, last)]


def rows_launch(bound: Bound, call: GradientCall, sizes: Sizes) -> KernelLaunch:
    """The launch that finds the statistics of rows, and sets sums to 0."""
    p, statistics = bound.problem, sizes.statistics
    error = ERRORS_OF_P[bound.variant.consumers]
    # every head is a group of its own
    of_all = row_arguments(p.num_heads, 1, p.head_dim_v, call.saved.q.dtype, error)
    return KernelLaunch(
        backward_rows, statistics.grid, of_all | statistics.arguments, POINTERS, {}, {}
    )


OPERANDS_AND_STATS = {
    "q_desc": "q",
    "grad_desc": "grad",
    "k_desc": "k",
    "v_desc": "v",
    "total_ptr": "total",
    "delta_ptr": "delta",
    "cu_q_ptr": "cu_q",
    "cu_k_ptr": "cu_k",
}
"""The pointers and descriptors of the two kernels that compute p and ds."""


def gradient_layouts(call: GradientCall, tile_m: int, tile_n: int) -> dict[str, Layout]:
    """The layouts of their descriptors."""
    x = call.saved
    return {
        "q_desc": layout_of_tokens(x.q, tile_m),
        "grad_desc": layout_of_tokens(call.grad, tile_m),
        "k_desc": layout_of_tokens(x.k, tile_n),
        "v_desc": layout_of_tokens(x.v, tile_n),
    }


def shared_arguments(
    bound: Bound, call: GradientCall, sizes: Sizes, tiling: LaneTiling
) -> dict[str, Any]:
    """The arguments of both but for pointers."""
    scale = call.operands.softmax_scale
    left, right, sink_tokens = bounds_of(bound.problem)
    return {
        "scale": scale,
        "scale_log2": scale * LOG2_E,
        "left": left,
        "right": right,
        "sink_tokens": sink_tokens,
        "seqlen_q": sizes.lengths.seqlen_q,
        "seqlen_k": sizes.lengths.seqlen_k,
        "batch": bound.problem.batch,
        "total_q": sizes.total_q,
        "tiles": tiling.tiles,
        "lanes": tiling.lanes,
        "width": tiling.width,
    }


def keys_launch(bound: Bound, call: GradientCall, sizes: Sizes) -> KernelLaunch:
    """The launch that makes dk and dv and, where there are sums for it, dq in fp32."""
    p, c, splits = bound.problem, bound.variant, bound.variant.row_splits
    columns = sizes.statistics.columns
    arguments = {
        **shared_arguments(bound, call, sizes, sizes.keys),
        "dk_strides": sizes.gradients.k,
        "dv_strides": sizes.gradients.v,
        "num_kv_heads": p.num_kv_heads,
        "total_k": sizes.total_k,
        "sum_tiles": sizes.rows.tiles,
        "sink_columns": columns,
        "sink_first": columns - sizes.sink_columns,
        "split_tiles": splits.tiles,
        "row_splits": splits.splits,
        "CONFIG": bound.config,
    }
    pointers = {
        **OPERANDS_AND_STATS,
        "weight_ptr": "weight",
        "sink_sums_ptr": "sink_sums",
        "dk_ptr": "dk",
        "dv_ptr": "dv",
        "split_ptr": "split",
        "sums_desc": "sums",
        "turn_ptr": "turns",
    }
    layouts = gradient_layouts(call, c.tile_m, c.tile_n)
    if c.dq != "recomputed":
        tile = c.tile_m * sum_dim(p)
        layouts["sums_desc"] = layout_of_sums(sizes.workspace.places["sums"][1], tile, c.dq_pieces)
    # the warps are those of the first consumer
    options = {"num_warps": 4, "launch_pdl": True}
    return KernelLaunch(hopper_backward, (sizes.programs,), arguments, pointers, layouts, options)


def queries_launch(bound: Bound, call: GradientCall, sizes: Sizes) -> KernelLaunch:
    """The launch that makes dq in one order, and adds up what programs left."""
    p, c, splits = bound.problem, bound.variant.queries, bound.variant.row_splits
    assert c is not None, "queries: expected tiles"
    rows = lane_tiling(p, bound.device, sizes.total_q, p.num_heads, c.tile_m)
    sinks = sink_programs(bound, call)
    arguments = {
        **shared_arguments(bound, call, sizes, rows),
        "dq_strides": sizes.gradients.q,
        "dk_strides": sizes.gradients.k,
        "dv_strides": sizes.gradients.v,
        "num_heads": p.num_heads,
        "sink_programs": sinks,
        "sink_numbers": sizes.statistics.columns,
        "num_kv_heads": p.num_kv_heads,
        "split_tiles": splits.tiles,
        "row_splits": splits.splits,
        "GROUP": p.group,
        "STAGES": c.num_stages,
        "KEY_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "SPLIT_TILE": bound.variant.tile_n,
        "SUM_KEYS": SUM_KEYS,
    }
    pointers = {**OPERANDS_AND_STATS, **LEFT_SUMS, "dq_ptr": "dq"}
    layouts = gradient_layouts(call, c.tile_m, c.tile_n)
    sums = programs_of_splits(p, splits, bound.variant.tile_n, SUM_KEYS)
    grid = (rows.tiles * rows.lanes + sinks + sums,)
    return KernelLaunch(
        hopper_backward_queries, grid, arguments, pointers, layouts, {"num_warps": 4}
    )


LEFT_SUMS = {
    "sinks": SinkSums("sink_sums", "dsink"),
    "split_sums": SplitSums("split", "dk", "dv"),
}
"""The pointers to what programs left."""


def sink_programs(bound: Bound, call: GradientCall) -> int:
    """Programs that add up dsink."""
    return 0 if call.saved.sink_logits is None else bound.problem.num_heads


def finish_launch(bound: Bound, call: GradientCall, sizes: Sizes) -> KernelLaunch:
    """The launch that adds up what programs left, and rounds dq, which is a sum, too."""
    p, c = bound.problem, bound.variant
    sinks, splits = sink_programs(bound, call), programs_of_splits(p, c.row_splits, c.tile_n)
    arguments = {
        **finish_arguments(p, c.row_splits, c.tile_n),
        "dk_strides": sizes.gradients.k,
        "dv_strides": sizes.gradients.v,
        "sink_programs": sinks,
        "sink_sequences": 1,
        "sink_lanes": p.num_heads,
        "sink_numbers": sizes.statistics.columns,
        "seqlen_k": sizes.lengths.seqlen_k,
        "SINK_GROUP": 1,
        "dq_strides": sizes.gradients.q,
        "split_programs": splits,
        "scale": call.operands.softmax_scale,
        "seqlen_q": sizes.lengths.seqlen_q,
        "batch": p.batch,
        "num_heads": p.num_heads,
        "total_q": sizes.total_q,
        "tiles": sizes.rows.tiles,
        "TILE_M": c.tile_m,
        "SUM_DIM": sum_dim(p),
    }
    pointers: dict[str, Any] = {
        **LEFT_SUMS,
        "cu_k_ptr": "cu_k",
        "sums_ptr": "sums",
        "dq_ptr": "dq",
        "cu_q_ptr": "cu_q",
    }
    options = {"num_warps": 8, "launch_pdl": True}
    grid = (sinks + splits + sizes.rows.tiles * sizes.rows.lanes,)
    return KernelLaunch(hopper_backward_finish, grid, arguments, pointers, {}, options)
