"""The host side that kernels for whole sequences share: results, splits of keys, their merge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from splitkv.core import errors
from splitkv.core.device import Device
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.combine import UNUSED, Final, Partial, combine, merge_tiles
from splitkv.kernels.combine_items import ItemMerge
from splitkv.kernels.host import workspace
from splitkv.kernels.host.allocations import NO_PARTIALS, Allocations
from splitkv.kernels.host.arguments import Tail, in_order
from splitkv.kernels.host.launch import (
    LatestKernel,
    Launch,
    LaunchOn,
    bind_to_grids,
    launch_latest,
    observed,
)
from splitkv.kernels.host.lengths import Layout
from splitkv.kernels.host.partition import padded
from splitkv.kernels.host.sequence_repeat import Sequences
from splitkv.kernels.host.sequence_sizes import (
    CallLayout,
    SequenceLayouts,
    SequenceSizes,
    layouts_at,
    layouts_of_call,
    lse_shape,
)
from splitkv.kernels.host.workspace import MOST_UNREAD
from splitkv.kernels.schedule_items import ItemRule
from splitkv.kernels.tile.merge import MOST_ARRIVALS, parts_a_step, rows_a_step


class ResultShapes(NamedTuple):
    """Shapes of out and lse, and the type of out."""

    out: tuple[int, ...]
    lse: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, operands: Operands) -> Final:
        """Memory for results: `operands.out` where given."""
        q, out = operands.q, operands.out
        out = q.new_empty(self.out, dtype=self.dtype) if out is None else out
        return Final(out, q.new_empty(self.lse, dtype=torch.float32), operands.out_scale)


def result_shapes(problem: Problem, q: Tensor) -> ResultShapes:
    """The ResultShapes of queries q [.., heads, head_dim]."""
    out = (*q.shape[:-1], problem.head_dim_v)
    return ResultShapes(out, lse_shape(q), getattr(torch, problem.out_dtype))


@dataclass(frozen=True)
class SequenceSplits:
    """How the keys of a row tile are split, and where splits are merged.

    num_splits    most splits; None: one
    split_tiles   tiles of keys a split, by the fixed rule; else None
    max_tokens    tokens of the longest sequences whose keys are split
    rows          rows of all partials; 0: there are none
    head_dim_v    columns of a row
    merge         combine: by a second launch; last: by the programs that come last; items: by a
                  launch that follows a schedule of items, num_splits being the partials that a
                  lane has room for; none: there are no partials
    """

    num_splits: int | None
    split_tiles: int | None
    max_tokens: int
    rows: int
    head_dim_v: int
    merge: str

    def rows_of(self, num_heads: int, sizes: SequenceSizes) -> int:
        """Rows of all partials of a call of these sizes."""
        if not self.rows or self.merge == "items":
            return self.rows
        return sizes.lengths.batch * sizes.max_tokens * num_heads * (self.num_splits or 1)

    @property
    def in_kernel(self) -> bool:
        """Whether the launch that makes partials merges them."""
        return self.merge == "last"

    def merge_step(self, num_warps: int) -> tuple[int, int]:
        """Splits, and rows, that so many warps merge together; 0 where they do not."""
        if self.merge != "last":
            return 0, 0
        columns = padded(self.head_dim_v)
        step = parts_a_step(self.num_splits or 1, columns)
        return step, rows_a_step(step, columns, num_warps)

    def partials(self, like: Tensor) -> tuple[Partial | None, Tensor | None]:
        """The partials of a call, and the counters of a launch that merges them."""
        if not self.rows:
            return None, None
        partial = workspace.partials(like, self.rows * self.head_dim_v, self.rows)
        return partial, workspace.counter_for(like) if self.in_kernel else None

    def expect_arrivals(self, programs: int) -> None:
        """ValueError where more programs would merge than can be counted."""
        few = programs <= MOST_ARRIVALS.value or not self.in_kernel
        errors.expect(few, "plan.config.merge", f"'combine' of {programs} programs", "last")


def sequence_splits(plan: Plan) -> SequenceSplits:
    """The SequenceSplits of a plan."""
    problem, config = plan.problem, plan.config
    num_splits = config.num_splits if config.num_splits > 1 else None
    fixed = num_splits is not None and config.schedule == "fixed"
    merge = config.merge if num_splits is not None and config.merge != "cluster" else "none"
    rows = problem.batch * problem.cut_tokens * problem.num_heads * config.num_splits
    return SequenceSplits(
        num_splits=num_splits,
        split_tiles=config.split_size // config.tile_n if fixed else None,
        max_tokens=problem.cut_tokens,
        rows=0 if merge == "none" else rows,
        head_dim_v=problem.head_dim_v,
        merge=merge,
    )


def scheduled_splits(problem: Problem, rule: ItemRule) -> SequenceSplits:
    """The SequenceSplits of a schedule of items."""
    return SequenceSplits(
        num_splits=rule.slots,
        split_tiles=None,
        max_tokens=rule.short,
        rows=rule.lanes * rule.slots * rule.slot_rows,
        head_dim_v=problem.head_dim_v,
        merge="items",
    )


PER_CALL_OF_COMBINE = "partial", "final", "lens_ptr", "sink_ptr"
STRIDES_OF_OUT = "stride_ob", "stride_ot", "stride_oh"
OF_LENGTHS = "batch", "tokens", "total_q", *STRIDES_OF_OUT
AT_NO_LENGTH = dict.fromkeys(OF_LENGTHS, 0)


@dataclass(frozen=True)
class CombineLaunch:
    """`combine` bound to the partials of whole sequences.

    heads    of q, each with rows of its own
    columns  of programs along head_dim_v
    fixed    the arguments that never change, by name
    """

    heads: int
    columns: int
    fixed: tuple[tuple[str, Any], ...]
    options: Mapping[str, Any]
    launches: LatestKernel[LaunchOn] = field(default_factory=partial(LatestKernel, bind_to_grids))

    def arguments(self, sizes: SequenceSizes) -> tuple[int, ...]:
        """Arguments that follow from the lengths of a call, in the order of OF_LENGTHS."""
        lengths, tokens = sizes.lengths, sizes.max_tokens
        sizes_of_lengths = lengths.batch * tokens, tokens, lengths.total_q
        return *sizes_of_lengths, *sizes.results.out_strides

    def grid(self, sizes: SequenceSizes) -> tuple[int, int, int]:
        return sizes.lengths.batch * sizes.max_tokens * self.heads, 1, self.columns

    def launch(
        self, partial: Partial, final: Final, operands: Operands, sizes: SequenceSizes
    ) -> Any:
        """Launches it through Triton; the compiled kernel."""
        arguments = {
            "partial": partial,
            "final": final,
            "lens_ptr": operands.cu_seqlens_q,
            "sink_ptr": operands.sink_logits,
            **dict(self.fixed),
            **dict(zip(OF_LENGTHS, self.arguments(sizes), strict=True)),
        }
        return combine[self.grid(sizes)](*in_order(combine, arguments), **self.options)

    def relaunch(self, compiled: Any, sizes: SequenceSizes) -> Launch:
        """A function that launches it again: see `Sequences`."""
        lengths, tokens, out = sizes.lengths, sizes.max_tokens, sizes.results.out_strides
        rows = lengths.batch * tokens
        tail = self.tail.changed((rows, tokens, lengths.total_q, *out))
        return launch_latest(self.launches, compiled, (rows * self.heads, 1, self.columns), tail)

    @cached_property
    def tail(self) -> Tail:
        """Its last arguments, which do not change from call to call, at no length."""
        return tail_of_combine(*self.fixed)

    def variant(self) -> Hashable:
        """A key of the kernel that Triton compiles, where strides of the output are alike."""
        return self.tail.variant(), tuple(sorted(self.options.items()))


@cache
def tail_of_combine(*fixed: tuple[str, Any]) -> Tail:
    """The Tail of a CombineLaunch."""
    return Tail(
        combine, PER_CALL_OF_COMBINE, AT_NO_LENGTH | dict(fixed), STRIDES_OF_OUT, OF_LENGTHS
    )


def combine_launch(plan: Plan, splits: SequenceSplits, early: bool) -> CombineLaunch | None:
    """The CombineLaunch of a plan; None: nothing is left to it.

    early   it may be launched before the kernel that makes partials has ended
    """
    problem = plan.problem
    if splits.merge != "combine" or not splits.rows:
        return None
    num_splits = splits.num_splits or 1
    tile_p, tile_v, num_warps = merge_tiles(num_splits, problem.head_dim_v)
    columns = triton.cdiv(problem.head_dim_v, tile_v)
    absent = (
        "growth",
        "left",
        "right",
        "sink_tokens",
        "chunk",
        "programs",
        "seqlen_new",
        "capacity",
    )
    fixed = {
        **dict.fromkeys(absent),
        "num_kv_heads": problem.num_kv_heads,
        "parts": num_splits,
        "SEQLEN_Q": 1,
        "GROUP": problem.group,
        "HEAD_DIM_V": problem.head_dim_v,
        "BATCH_P2": 1,
        "TILE_M": problem.group,
        "TILE_N": UNUSED,
        "TILE_P": tile_p,
        "FEW": 0,
        "TILE_V": tile_v,
        "LAST_STEP": "short" if num_splits % tile_p else "full",
        "PREDECESSOR": "running" if early else "done",
    }
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    if early:
        options["launch_pdl"] = True
    return CombineLaunch(problem.num_heads, columns, tuple(fixed.items()), options)


class SequenceLauncher(ABC):
    """A kernel for whole sequences bound to one plan and one memory layout: forward, without a
    graph for gradients.

    The first call goes through Triton, and what it compiled is kept: `again` launches that with
    addresses, unless one is not a multiple of 16, which is another specialisation.
    """

    plan: Plan
    problem: Problem
    device: Device
    splits: SequenceSplits
    results: ResultShapes
    combine: CombineLaunch | ItemMerge | None
    compiled: tuple[Any, Any] | None = None  # the kernel and `combine`
    memory: Allocations  # of what was compiled
    again: Sequences | None = None

    @cached_property
    def backward_launchers(self) -> dict[Any, Any]:
        """The launcher that makes the gradients of its calls: see kernels/gradients.py."""
        return {}

    @cached_property
    def backward_again(self) -> dict[Any, Any]:
        """The launches of the last backward, by what bound its launcher: see
        kernels/gradients.py."""
        return {}

    @abstractmethod
    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), whatever the problem says of a gradient or the LSE; seed: of dropout."""

    @abstractmethod
    def sizes(self, layouts: SequenceLayouts) -> SequenceSizes:
        """The SequenceSizes of a call."""

    @abstractmethod
    def relaunch(
        self, compiled: Any, sizes: SequenceSizes, layouts: SequenceLayouts
    ) -> Launch | None:
        """A function that launches a compiled kernel again, as `Sequences` has it, for calls of
        these sizes; None: Triton has to, every time."""

    @property
    @abstractmethod
    def tail(self) -> Tail:
        """The last arguments of the first kernel, at the lengths that it was bound for; put in
        order when they are asked for."""

    def put_in_order(self) -> None:
        """Puts the arguments of the first kernel in order, as `variant` else does."""
        assert self.tail is not None

    @abstractmethod
    def variant(self) -> Hashable:
        """A key of the two kernels that Triton compiles, among launchers bound to operands with
        types, strides and addresses alike."""

    def keep(self, compiled: Any, merged: Any, operands: Operands) -> None:
        """Keeps what was compiled, for this launcher or another with the same `variant`, for later
        calls."""
        if observed():
            return
        self.compiled, results = (compiled, merged), self.results
        shapes = results.out, results.lse
        self.memory = Allocations(None, operands.q.device, results.dtype, *shapes, 0, 0)
        self.again = self.at_layouts(layouts_of_call(self.problem, operands))
        if self.again is None:
            self.compiled = None
        elif not (self.problem.return_lse or self.problem.needs_grad):
            self.memory.unread = workspace.unread(operands.q)  # for calls of `at_layouts`

    def at_lengths(self, here: CallLayout, v_shape: Sequence[int]) -> Sequences | None:
        """Does what `at_layouts` does, for a call whose output is made; v_shape: of its values."""
        return self.at_layouts(layouts_at(here, v_shape, None))

    def at_layouts(self, layouts: SequenceLayouts) -> Sequences | None:
        """A launch of the compiled kernels for calls of other lengths, for whose strides Triton
        would compile the same; None where none is known. It gives no LSE that the problem does not
        ask for."""
        if self.compiled is None:
            return None
        (compiled, merged), sizes = self.compiled, self.sizes(layouts)
        launch = self.relaunch(compiled, sizes, layouts)
        if launch is None:
            return None
        merge, items, partials, splits = None, None, NO_PARTIALS, self.splits
        if splits.rows:
            rows = splits.rows_of(self.problem.num_heads, sizes)
            if splits.merge == "last":
                splits.expect_arrivals(sizes.grid[0])
            partials = workspace.layout(rows * self.problem.head_dim_v, rows)
        if isinstance(self.combine, ItemMerge):
            items = self.combine.relaunch_all(merged, sizes)
        elif isinstance(self.combine, CombineLaunch) and merged is not None:
            merge = self.combine.relaunch(merged, sizes)
        results, memory = sizes.results, self.memory
        lse: Layout | None = results.lse
        if memory.unread and sizes.lengths.total_q * self.problem.num_heads <= MOST_UNREAD:
            lse = None
        return Sequences(launch, merge, items, memory, (results.out, lse), partials)
