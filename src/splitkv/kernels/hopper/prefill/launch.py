"""The host side that kernels for whole sequences on Hopper share: descriptors, and the launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.core.kv import Paged
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import box_rows
from splitkv.kernels import prefill
from splitkv.kernels.combine_items import ItemMerge
from splitkv.kernels.hopper.prefill.records import Lengths, ScalePointers
from splitkv.kernels.host.allocations import NO_PARTIALS
from splitkv.kernels.host.arguments import Tail, in_order
from splitkv.kernels.host.launch import Grid, LatestKernel, Launch, in_clusters
from splitkv.kernels.host.launcher import aligned
from splitkv.kernels.host.lengths import relaunched
from splitkv.kernels.host.map_launch import LaunchAt, OperandBox, OperandMaps, bind_to_descriptors
from splitkv.kernels.host.sequence_repeat import Sequences
from splitkv.kernels.host.sequence_sizes import (
    CallLayout,
    SequenceLayouts,
    SequenceSizes,
    bounds_of,
    layouts_of_call,
    made_layouts,
    operand_layouts,
    result_layouts,
    scale_and_softcap,
)
from splitkv.kernels.host.sequences import (
    CombineLaunch,
    SequenceLauncher,
    SequenceSplits,
    combine_launch,
    result_shapes,
)
from splitkv.kernels.host.tensor_maps import tile_of
from splitkv.kernels.host.workspace import MOST_UNREAD
from splitkv.kernels.limits.hopper_prefill_tiles import tile_dims
from splitkv.kernels.schedule_items import ItemSchedule

PANEL_BYTES = 128  # of the columns in TMA's widest swizzle
DESCRIPTORS = ("q_desc", "q_rest_desc", "k_desc", "k_rest_desc", "v_desc", "out_desc")
PER_CALL = (
    *DESCRIPTORS,
    *("final", "partial", "count_ptr", "lengths", "sink_ptr", "scale_ptrs", "scale", "softcap"),
)
"""The arguments of these kernels that change from call to call, in the order of `Sequences`."""


ItemTiling = tuple[int, int, int, Any]
"""The row tiles of a launch: of a lane, lanes, lanes that go together, and, of all lanes, row tiles
and the further splits of their keys; None: a program has one. A plain tuple, as one is made for
every length."""


class BoundKernel(NamedTuple):
    """A kernel for whole sequences bound to one plan and one memory layout.

    kernel         gives the jit function
    tiling         tiling(seqlen_q, total_q, batch): the grid of a call, and its ItemTiling
    fixed          the arguments that never change, by name
    num_warps      of the first role; the others are the kernel's own
    boxes          of operands and out, by the names of descriptors
    splits         SequenceSplits
    cluster_size   programs that are a cluster, 0: none are; exchange_bytes: of shared memory of
                   each, for what they exchange
    schedule       ItemSchedule that the items follow, or None
    """

    kernel: Callable[[], Any]
    tiling: Callable[[int, int, int], tuple[Grid, ItemTiling]]
    fixed: dict[str, Any]
    num_warps: int
    boxes: dict[str, Box | None]
    splits: SequenceSplits
    cluster_size: int = 0
    exchange_bytes: int = 0
    schedule: ItemSchedule | None = None

    def binder_of(self, compiled: Any) -> LaunchAt | None:
        """Gives what binds launches of the compiled kernel to layouts; None: no way is known."""
        return bind_to_descriptors(compiled, self.operand_boxes(compiled))

    def operand_boxes(self, compiled: Any) -> list[OperandBox | None]:
        """The boxes of the compiled kernel's descriptors, in their order."""
        boxes: list[OperandBox | None] = []
        count = 0
        for name, box in self.boxes.items():
            boxes.append(box and (OPERAND_OF[name], tile_of(compiled, count), box))
            count += box is not None
        return boxes


class Box(NamedTuple):
    """The box that TMA copies at once: tokens and heads of all columns, or of `dim` of them.

    panel_bytes   of the columns in one swizzle
    length        tokens that a sequence has of those that there is room for; None: all
    """

    tokens: int
    heads: int
    dim: int
    panel_bytes: int = PANEL_BYTES
    length: int | None = None

    def layout(
        self, shape: Sequence[int], strides: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Computes shape and strides of a tensor [(batch,) tokens, heads, dim] as TMA sees them."""
        if len(shape) == 3:
            (n, h, d), (step_n, step_h, _) = shape, strides
            b, step_b = 1, d
        else:
            (b, n, h, d), (step_b, step_n, step_h, _) = shape, strides
            if self.length is None and n > 1 and h > 1:  # the most frequent
                return shape, (step_b if b > 1 else d, step_n, step_h, 1)
            n = max(1, n if self.length is None else self.length)
        # along a single element there are no steps, and torch may say anything
        steps = step_b if b > 1 else d, step_n if n > 1 else d, step_h if h > 1 else d, 1
        return (b, n, h, d), steps


OPERAND_OF = dict(zip(DESCRIPTORS, (0, 0, 1, 1, 2, 3), strict=True))
"""The numbers of what a descriptor is of: q, k, v and out."""


def box_descriptor(x: Any, box: Box) -> TensorDescriptor:
    """x [(batch,) tokens, heads, dim] as TMA is to see it, in boxes [1, tokens, heads, dim]."""
    (shape, strides), size = box.layout(x.shape, x.stride()), x.element_size()
    swizzle = min(box.panel_bytes, box.dim * size)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=4)
    block = [1, box.tokens, box.heads, box.dim]
    return TensorDescriptor(x, list(shape), list(strides), block, layout)


def boxes_of_plan(
    plan: Plan, operands: Operands, q_box: Box, out_box: Box, *, ordered_values: bool = False
) -> dict[str, Box | None]:
    """The boxes of a plan, by the names of descriptors.

    ordered_values   V is in order, where K is in pages
    """
    problem, tile_n, x = plan.problem, plan.config.tile_n, operands
    head_dim, main = tile_dims(problem)
    rest = head_dim - main
    tokens = box_rows(problem, tile_n)
    paged = isinstance(problem.place, Paged)
    # a cache may have room for more
    length = problem.seqlen_k if problem.kind == "decode" and not paged else None
    widest = PANEL_BYTES // x.k.element_size() if paged else max(main, rest)
    keys = Box(tokens, 1, min(main, widest), length=length)
    return {
        "q_desc": q_box,
        "q_rest_desc": q_box._replace(dim=rest) if rest else None,
        "k_desc": keys,
        "k_rest_desc": Box(tokens, 1, min(rest, widest), length=length) if rest else None,
        "v_desc": Box(tile_n, 1, main) if ordered_values else keys,
        "out_desc": out_box,
    }


def hopper_size_arguments(
    plan: Plan, operands: Operands, splits: SequenceSplits, packed_heads: int
) -> dict[str, Any]:
    """The sizes and strides that all these kernels take and no length changes, by name."""
    problem, table = plan.problem, operands.page_table
    left, right, sink_tokens = bounds_of(problem)
    return {
        "left": left,
        "right": right,
        "sink_tokens": sink_tokens,
        "lane_heads": problem.num_heads // packed_heads,
        "stride_table": table.stride(0) if table is not None else 0,
        "num_splits": splits.num_splits,
        "split_tiles": splits.split_tiles,
    }


SIZES = (
    *("seqlen_q", "seqlen_k", "total_q", "batch", "stride_lse_b", "stride_lse_h"),
    *("tiles", "lanes", "width", "items", "max_tokens", "stride_ob", "stride_ot", "stride_oh"),
)
"""The arguments that lengths change, in the order of `hopper_sizes`."""


def hopper_sizes(
    problem: Problem, layouts: SequenceLayouts, tiled: tuple[Grid, ItemTiling], max_tokens: int
) -> SequenceSizes:
    """The SequenceSizes of a call; the arguments are those that `hopper_size_arguments` leaves
    out, in the order of SIZES."""
    lengths, results = layouts.lengths, result_layouts(problem, layouts.q[0], layouts.out)
    grid, tiling = tiled
    arguments = *lengths, *results.lse_strides, *tiling, max_tokens, *results.out_strides
    return SequenceSizes(grid, arguments, lengths, max_tokens, results)


def page_size(problem: Problem) -> int:
    """Keys a page; 1 where they are not in pages."""
    return problem.place.page_size if isinstance(problem.place, Paged) else 1


def launches_early(splits: SequenceSplits, operands: Operands) -> bool:
    """Whether `combine` is launched before the kernel that makes partials has ended."""
    return bool(splits.rows and operands.q.is_cuda and not splits.in_kernel)


class HopperLauncher(SequenceLauncher):
    """A kernel for whole sequences on Hopper and `combine` bound to one plan and one memory
    layout."""

    def __init__(
        self,
        plan: Plan,
        operands: Operands,
        bound: BoundKernel,
        refit: Callable[[Plan, Operands], Plan],
    ) -> None:
        self.plan, self.problem, self.device = plan, plan.problem, plan.device
        self.bound, self.refit, self.splits = bound, refit, bound.splits
        problem = plan.problem
        self.packed = problem.kind == "varlen"
        self.row = problem.num_heads, problem.head_dim_v  # of the output
        self.one_launch: LaunchAt | None = None  # what binds launches of a kernel that is all
        self.first_sizes = self.sizes(layouts_of_call(plan.problem, operands))
        bound.splits.expect_arrivals(self.first_sizes.grid[0])
        self.fixed = bound.fixed | dict(zip(SIZES, self.first_sizes.arguments, strict=True))
        self.results = result_shapes(plan.problem, operands.q)
        self.any_address: prefill.PrefillLauncher | None = None
        self.launches: LatestKernel[LaunchAt] = LatestKernel(bound.binder_of)
        early = launches_early(bound.splits, operands)
        self.combine: CombineLaunch | ItemMerge | None
        if bound.schedule is None:
            self.combine = combine_launch(plan, bound.splits, early)
        else:
            self.combine = ItemMerge(plan, bound.schedule, early)

    def __call__(self, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        return prefill.attention(self, operands)

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), through Triton or with what it compiled before."""
        x = operands
        scale, softcap = scale_and_softcap(x)
        if self.again is not None:
            done = relaunched(self.again, x, scale, softcap)
            if done is not None:
                return done
        given = (t for t in (x.q, x.k, x.v, x.out) if t is not None)
        if any(tensor.data_ptr() & 15 for tensor in given):
            return self.without_tma(operands).forward(operands, seed)
        final, merge = self.results.allocate(x), None
        partial, count = self.splits.partials(x.q)
        items = scheduled = None
        of_keys = x.cu_seqlens_k, x.cache_seqlens, x.page_table
        if self.bound.schedule is not None:
            items, scheduled = self.bound.schedule.make(x, self.first_sizes)
        arguments = {
            **self.descriptors(x, final.out_ptr),
            "final": final,
            "partial": partial,
            "count_ptr": count,
            "lengths": Lengths(x.cu_seqlens_q, *of_keys, items),
            "sink_ptr": x.sink_logits,
            "scale_ptrs": ScalePointers(x.q_scale, x.k_scale, x.v_scale),
            "scale": scale,
            "softcap": softcap,
            **self.fixed,
        }
        made = self.start(arguments)
        if isinstance(self.combine, ItemMerge):
            assert partial is not None
            merged = self.combine.launch(partial, final, items, x, self.first_sizes)
            merge = scheduled, merged
        elif self.combine is not None and partial is not None:
            merge = self.combine.launch(partial, final, x, self.first_sizes)
        if made is not None and self.again is None and aligned(x):
            self.keep(made, merge, x)
        return final.out_ptr, final.lse_ptr

    def descriptors(self, x: Operands, out: Tensor) -> dict[str, TensorDescriptor | None]:
        """TMA descriptors of operands and out, by name."""
        tensors = {"q": x.q, "k": x.k, "v": x.v, "out": out}
        return {
            name: None if box is None else box_descriptor(tensors[name.partition("_")[0]], box)
            for name, box in self.bound.boxes.items()
        }

    def start(self, arguments: dict[str, Any]) -> Any:
        """Launches the kernel through Triton; the compiled kernel."""
        bound, kernel, grid = self.bound, self.bound.kernel(), self.first_sizes.grid
        options = {"num_warps": bound.num_warps, "enable_fp_fusion": True}
        if bound.schedule is not None and bound.schedule.early:
            options["launch_pdl"] = True
        given = in_order(kernel, arguments)
        if not bound.cluster_size:
            return kernel[grid](*given, **options)
        made = kernel.warmup(*given, grid=grid, **options)
        if made is None:  # whoever looks at what is compiled has declined it
            return None
        clustered = in_clusters(made, bound.cluster_size, bound.exchange_bytes)
        clustered[grid](*given)
        return clustered

    def sizes(self, layouts: SequenceLayouts) -> SequenceSizes:
        lengths, schedule = layouts.lengths, self.bound.schedule
        tiled = self.bound.tiling(lengths.seqlen_q, lengths.total_q, lengths.batch)
        max_tokens = lengths.seqlen_q
        if schedule is not None:
            max_tokens = schedule.rule.short
        elif self.packed:
            max_tokens = self.problem.cut_tokens_of(max_tokens)
        return hopper_sizes(self.problem, layouts, tiled, max_tokens)

    @cached_property
    def tail(self) -> Tail:
        return Tail(self.bound.kernel(), PER_CALL, self.fixed, (), SIZES)

    def variant(self) -> Hashable:
        bound, merge = self.bound, None if self.combine is None else self.combine.variant()
        parts = bool(self.splits.rows), self.splits.in_kernel, bound.cluster_size
        return self.tail.variant(), (bound.num_warps, parts), merge

    def keep(self, compiled: Any, merged: Any, operands: Operands) -> None:
        super().keep(compiled, merged, operands)
        alone = self.combine is None and not self.splits.rows
        if self.compiled is not None and alone:
            self.one_launch = self.launches.binder(compiled)

    def at_lengths(self, here: CallLayout, v_shape: Sequence[int]) -> Sequences | None:
        """Makes what SequenceLauncher does; where there is one launch alone, of what that needs."""
        launch_at = self.one_launch
        if launch_at is None:
            return super().at_lengths(here, v_shape)
        (queries, keys, batch), q_shape = here[0], here[1][0]
        heads, dim = self.row
        out, lse = made_layouts(q_shape, heads, dim)
        if self.packed:
            total = tokens = q_shape[0]
            max_tokens, apart, rows = self.problem.cut_tokens_of(queries), 0, 0
        else:
            total, tokens, max_tokens = batch * queries, queries, queries
            apart, rows = 0 if batch == 1 else out[1][0], heads * queries
        grid, tiling = self.bound.tiling(queries, total, batch)
        of_lengths = queries, keys, total, batch, rows, tokens
        of_out = max_tokens, apart, heads * dim, dim if heads > 1 else 0
        changed = self.tail.changed(of_lengths + tiling + of_out)  # sooner than one put together
        maps: OperandMaps = {}, (*operand_layouts(here, v_shape), out)
        memory = self.memory
        seen = None if memory.unread and total * heads <= MOST_UNREAD else lse
        launch = launch_at((grid, changed, maps))
        return Sequences(launch, None, None, memory, (out, seen), NO_PARTIALS)

    def relaunch(
        self, compiled: Any, sizes: SequenceSizes, layouts: SequenceLayouts
    ) -> Launch | None:
        launch_at = self.launches.binder(compiled)
        if launch_at is None:
            return None
        of_tensors = layouts.q, layouts.k, layouts.v, sizes.results.out
        return launch_at((sizes.grid, self.tail.changed(sizes.arguments), ({}, of_tensors)))

    def without_tma(self, operands: Operands) -> prefill.PrefillLauncher:
        """The kernel for any GPU, by the plan for addresses that this one does not fit."""
        if self.any_address is None:
            other = self.refit(self.plan, operands)
            self.any_address = prefill.in_place_of(self.plan, other, operands)
        return self.any_address
