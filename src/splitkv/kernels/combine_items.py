"""Merge the partials of row tiles whose keys a schedule of items splits.

Computes what kernels/combine.py computes, over the splits of sequences of few queries, of which an
entry of kernels/schedule_items.py says how many there are; all else is finished by the programs
themselves.

Shapes      partials: acc [lanes, slots, rows, head_dim_v], m and l [lanes, slots, rows], fp32; out,
            lse of packed sequences: as in Final
Grid        (entries, lanes, head_dim_v / TILE_V); most end at once
Traffic     reads every partial once, writes out once; counted where they are written
Numerics    fp32 throughout, base-2 exponentials; splits are merged in order, so bits do not vary
Limits      those of the kernel before
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import triton
import triton.language as tl

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.kernels.combine import Final, Partial
from splitkv.kernels.combine_slots import FEW, MergedRows, merge_slots
from splitkv.kernels.host.arguments import Tail, in_order
from splitkv.kernels.host.launch import LatestKernel, LaunchOn, bind_to_grids, launch_latest
from splitkv.kernels.host.sequence_repeat import ItemLaunches
from splitkv.kernels.host.sequence_sizes import SequenceSizes
from splitkv.kernels.schedule_items import ITEM_FIELDS, ItemSchedule, load_item
from splitkv.kernels.tile.encode import encode_out
from splitkv.kernels.tile.softmax import finish

TILE_R, TILE_P, TILE_V, WARPS = 4, 16, 32, 1  # rows, splits a step, columns, warps of a program
PER_CALL = "partial", "final", "items_ptr", "sink_ptr"
"""The arguments of the kernel that change from call to call."""
OF_LENGTHS = "total_q", "stride_ot", "stride_oh"


@triton.jit(do_not_specialize=["total_q", "slots", "slot_rows"])
def combine_items(
    partial,  # Partial
    final,  # Final
    items_ptr,  # [entries, 8] int32 of the schedule
    sink_ptr,  # [num_heads], or None
    total_q,
    slots,  # partials of a lane
    slot_rows,  # rows of a partial
    stride_ot,
    stride_oh,
    PACK: tl.constexpr,  # rows a token
    HEAD_DIM_V: tl.constexpr,
    TILE_R: tl.constexpr,  # rows a step
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
    AFTER: tl.constexpr,  # early: launched before attention has ended; or in_order
):
    lane = tl.program_id(1)
    if AFTER == "early":  # before any return: this grid must not end before attention does
        tl.extra.cuda.gdc_wait()
    item = load_item(items_ptr, tl.program_id(0))
    if (item.splits == 1) | (item.split > 0):
        return
    offs_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    v_ok = offs_v < HEAD_DIM_V
    rows = item.len_q * PACK
    for first in range(0, rows, TILE_R):
        r = first + tl.arange(0, TILE_R)
        ok = r < rows
        head = lane * PACK + r % PACK
        t = item.first_q + r // PACK
        sink_log2 = None
        if sink_ptr is not None:
            sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32)
            sink_log2 = sink * 1.4426950408889634
        # the slots of a row tile follow each other: all as if those of programs side by side
        behind_first = lane * slots + item.slot + 1
        of_rows = MergedRows(behind_first, 0, 0, r, ok, slot_rows, item.splits)
        if item.splits <= FEW:
            merged = merge_slots(partial, of_rows, offs_v, "in_order", HEAD_DIM_V, FEW)
        else:
            merged = merge_slots(partial, of_rows, offs_v, "in_order", HEAD_DIM_V, TILE_P)
        out, lse = finish(merged.acc, merged.m, merged.l, sink_log2)
        out_rows = t.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
        out_ptrs = final.out_ptr + out_rows[:, None] + offs_v[None, :]
        tl.store(out_ptrs, encode_out(out, final), mask=ok[:, None] & v_ok[None, :])
        lse_rows = head.to(tl.int64) * total_q + t
        tl.store(final.lse_ptr + lse_rows, lse, mask=ok & (tl.program_id(2) == 0))


class ItemMerge:
    """`combine_items` bound to a schedule of a plan: what `CombineLaunch` is to `combine`.

    early   it may be launched before attention has ended
    """

    def __init__(self, plan: Plan, schedule: ItemSchedule, early: bool) -> None:
        rule, head_dim_v = schedule.rule, plan.problem.head_dim_v
        columns = min(TILE_V, triton.next_power_of_2(head_dim_v))
        self.schedule, self.columns = schedule, triton.cdiv(head_dim_v, columns)
        self.options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": True}
        if early:
            self.options["launch_pdl"] = True
        self.fixed = dict.fromkeys(OF_LENGTHS, 0) | {
            "slots": rule.slots,
            "slot_rows": rule.slot_rows,
            "PACK": rule.pack,
            "HEAD_DIM_V": head_dim_v,
            "TILE_R": min(TILE_R, rule.pack),
            "TILE_P": TILE_P,
            "TILE_V": columns,
            "AFTER": "early" if early else "in_order",
        }
        self.tail = Tail(combine_items, PER_CALL, self.fixed, OF_LENGTHS[1:], OF_LENGTHS)
        self.launches: LatestKernel[LaunchOn] = LatestKernel(bind_to_grids)

    def arguments(self, sizes: SequenceSizes) -> tuple[int, ...]:
        """Arguments that follow from the lengths of a call, in the order of OF_LENGTHS."""
        return sizes.lengths.total_q, *sizes.results.out_strides[1:]

    def grid(self, sizes: SequenceSizes) -> tuple[int, int, int]:
        return self.schedule.entries(sizes.lengths), self.schedule.rule.lanes, self.columns

    def launch(
        self, partial: Partial, final: Final, items: Any, operands: Operands, sizes: SequenceSizes
    ) -> Any:
        """Launches it through Triton; the compiled kernel."""
        arguments = {
            "partial": partial,
            "final": final,
            "items_ptr": items,
            "sink_ptr": operands.sink_logits,
            **self.fixed,
            **dict(zip(OF_LENGTHS, self.arguments(sizes), strict=True)),
        }
        ordered = in_order(combine_items, arguments)
        return combine_items[self.grid(sizes)](*ordered, **self.options)

    def relaunch_all(self, compiled: tuple[Any, Any], sizes: SequenceSizes) -> ItemLaunches:
        """Functions that launch it, and the schedule before, again.

        compiled   both kernels, the schedule's first
        """
        scheduled, merged = compiled
        schedule = self.schedule.relaunch(scheduled, sizes)
        tail = self.tail.changed(self.arguments(sizes))
        grid = self.grid(sizes)
        numel = grid[0] * ITEM_FIELDS.value  # a program each
        merge = launch_latest(self.launches, merged, grid, tail)
        return ItemLaunches(schedule, merge, numel)

    def variant(self) -> Hashable:
        """A key of both kernels that Triton compiles, where strides of the output are alike."""
        return self.tail.variant(), *self.options.items(), self.schedule.variant()
