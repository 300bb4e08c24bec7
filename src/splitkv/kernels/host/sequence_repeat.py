"""Calls of attention of whole sequences whose kernels are compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from splitkv.kernels.host.allocations import Allocations
from splitkv.kernels.host.launch import ENTER_HOOKS, EXIT_HOOKS, KNOBS, Launch, observed
from splitkv.kernels.host.lengths import Layout

LaunchMemory = tuple[Any, Any, int | None, tuple[int | None, ...]]
"""(final, partial, counter, lengths): the addresses of (out, lse, None), of partials or None, of
counters where the launch merges them, and of (cu_seqlens_q, cu_seqlens_k, cache_seqlens,
page_table, a schedule of items)."""


class ItemLaunches(NamedTuple):
    """Launches of a call by a schedule of items, which lies behind its partials.

    schedule   schedule(stream, at_items, at_cu_seqlens_q, at_cache_seqlens)
    merge      merge(stream, partial, (at_out, at_lse, None), at_items, at_sink)
    numel      32-bit integers of the schedule
    """

    schedule: Launch
    merge: Launch
    numel: int


class Sequences:
    """Attention of whole sequences: allocate, launch, merge.

    launch   launch(stream, operands, memory, (at_sink, at_slopes), scales, scale, softcap), see
             `OperandAddresses` and `LaunchMemory`; scales are the addresses of those of (q, k, v)
    merge    merge(stream, partial, (at_out, at_lse, None), at_cu_seqlens_q, at_sink)
    items    ItemLaunches in the place of `merge`, or None
    memory   that calls of every length share
    results  layouts of out and lse, this None where nobody reads it: then it goes where all such go
    layout   of the partials, see `workspace.layout`

    There may be one of each length, so each has little of its own.
    """

    __slots__ = "items", "items_at", "launch", "layout", "lse", "memory", "merge", "out"

    def __init__(
        self,
        launch: Launch,
        merge: Launch | None,
        items: ItemLaunches | None,
        memory: Allocations,
        results: tuple[Layout, Layout | None],
        layout: tuple[int, int, int],
    ) -> None:
        self.launch, self.merge, self.memory = launch, merge, memory
        (self.out, self.lse), self.layout = results, layout
        self.items, self.items_at = items, 0
        if items is not None:  # its schedule has room behind the partials
            m_at, l_at, numel = layout
            first = -(-numel // 4) * 4  # 16 bytes
            self.items_at, self.layout = 4 * first, (m_at, l_at, first + items.numel)

    def with_launch(self, launch: Launch) -> Sequences:
        """Another, of which only the first launch differs; this one has no schedule."""
        results = self.out, self.lse
        return Sequences(launch, self.merge, None, self.memory, results, self.layout)

    def call(
        self,
        q,
        k,
        v,
        out,
        cu_q,
        cu_k,
        lens,
        table,
        sink,
        slopes,
        q_scale,
        k_scale,
        v_scale,
        scale,
        softcap,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        given = at_q | at_k | at_v
        at_cu_q = at_cu_k = at_lens = at_table = at_sink = at_slopes = None
        scales: tuple[int | None, int | None, int | None] = NO_SCALES
        if cu_q is not None:
            at_cu_q = cu_q.data_ptr()
            given |= at_cu_q
        if cu_k is not None:
            at_cu_k = cu_k.data_ptr()
            given |= at_cu_k
        if lens is not None:
            at_lens = lens.data_ptr()
            given |= at_lens
        if table is not None:
            at_table = table.data_ptr()
            given |= at_table
        if sink is not None:
            at_sink = sink.data_ptr()
            given |= at_sink
        if slopes is not None:
            at_slopes = slopes.data_ptr()
            given |= at_slopes
        if k_scale is not None:
            at_q_scale = None
            if q_scale is not None:
                at_q_scale = q_scale.data_ptr()
                given |= at_q_scale
            at_k_scale, at_v_scale = k_scale.data_ptr(), v_scale.data_ptr()
            given |= at_k_scale | at_v_scale
            scales = at_q_scale, at_k_scale, at_v_scale
        if out is not None:
            given |= out.data_ptr()
        if given & 15 or ENTER_HOOKS or EXIT_HOOKS or (KNOBS and observed()):
            return None
        memory, merge = self.memory, self.merge
        if out is None:
            out = memory.empty(*self.out, memory.dtype)
        lse, at_lse = None, memory.unread
        if self.lse is not None:
            lse = memory.empty(*self.lse, torch.float32)
            at_lse = lse.data_ptr()
        at_out = out.data_ptr()
        stream = memory.current_stream(memory.device)
        operands, final = (at_q, at_k, at_v, at_out), (at_out, at_lse, None)
        lengths = at_cu_q, at_cu_k, at_lens, at_table, None
        rest = (at_sink, at_slopes), scales, scale, softcap
        if not self.layout[2]:
            self.launch(stream, operands, (final, None, None, lengths), *rest)
            return out, lse
        captured = stream and memory.capturing()
        buffer, partial = memory.take_buffer(stream, captured, self.layout)
        items = self.items
        if items is not None:
            at_items = buffer[0] + self.items_at
            items.schedule(stream, at_items, at_cu_q, at_lens)
            lengths = *lengths[:4], at_items
            self.launch(stream, operands, (final, partial, None, lengths), *rest)
            items.merge(stream, partial, final, at_items, at_sink)
        elif merge is None:
            count = memory.counter(memory.device, stream, captured).data_ptr()
            self.launch(stream, operands, (final, partial, count, lengths), *rest)
        else:
            self.launch(stream, operands, (final, partial, None, lengths), *rest)
            merge(stream, partial, final, at_cu_q, at_sink)
        if not captured:
            memory.buffers[stream] = buffer
        return out, lse


NO_SCALES = None, None, None
