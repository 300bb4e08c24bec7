"""Merging splits of the keys inside the launch that made them, by the programs that finish last.

A program says that it runs and, when its partials are stored, that it has arrived. Those that
arrive when all programs run wait for the rest, and each then merges a share of the rows; those that
arrive earlier leave. So whoever waits, waits for programs that run already and do not wait for a
place on the GPU, whatever else is there: the last to arrive waits for nobody, and merges all by
itself if it has to.

The parts of a row are merged in order, so bits do not depend on who was first. Nothing has to be
cleared between launches: see `Meeting`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.core import tiles
from splitkv.kernels.tile.encode import encode_out
from splitkv.kernels.tile.softmax import factor_beside_sink, finite_or_zero

STEPS = (4, 16, 64)  # parts a step: what is compiled
ELEMENTS = 64  # of partials that a thread has in flight


class Merged(NamedTuple):
    """The softmax state of rows, merged from their partials.

    cu_q_ptr     [batch + 1], or None: dense
    batch        sequences; most_q: tokens of a sequence that have partials; parts: of a row
    num_heads    of q
    out_strides  Strides of the output; lse_strides: of lse
    """

    cu_q_ptr: Any
    batch: Any
    most_q: Any
    parts: Any
    num_heads: Any
    out_strides: Any
    lse_strides: Any


def parts_a_step(parts: int, head_dim_v: int) -> int:
    """Computes how many splits a program merges at a time, of rows of so many."""
    most = STEPS[-1] * 128 // max(128, triton.next_power_of_2(head_dim_v))
    return min(next((step for step in STEPS if step >= parts), most), most)


def rows_a_step(step: int, head_dim_v: int, num_warps: int) -> int:
    """Computes how many rows a program merges at a time, with so many splits a step."""
    columns = triton.next_power_of_2(head_dim_v)
    return max(1, 32 * num_warps * ELEMENTS // (step * columns))


class Meeting(NamedTuple):
    """The counters at which the programs of a launch arrive, so that the last ones merge.

    count_ptr   two counters and which of them this launch uses, 64 bits each, all 0 at first. In a
                counter, by 21 bits: arrivals, programs that run, arrivals before all ran. A launch
                clears the one that the next will use
    programs    of the grid, each of which arrives once
    """

    count_ptr: Any
    programs: Any


MOST_ARRIVALS = tl.constexpr(tiles.MOST_ARRIVALS)


@triton.jit
def counter_in_use(meeting):
    """Reads which of the two counters this launch uses; before the program arrives."""
    return tl.load(meeting.count_ptr + 2, volatile=True)


@triton.jit
def say_running(meeting, which):
    """Counts this program as running; once in each, before it arrives."""
    counter_ptr = meeting.count_ptr + which
    seen = tl.atomic_add(counter_ptr, 1 << 21, sem="relaxed", scope="gpu")
    if (seen >> 21) == meeting.programs - 1:
        tl.atomic_add(counter_ptr, (seen & MOST_ARRIVALS) << 42, sem="relaxed", scope="gpu")


@triton.jit
def arrive_in_turn(meeting, which):
    """Arrives at the counter, after a barrier of all threads that stored partials: (rank among the
    programs that merge, number of these). A program that arrives before all are running leaves: for
    it the number is 0."""
    counter_ptr = meeting.count_ptr + which
    everybody = meeting.programs
    place = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    seen = place + 1
    place = place & MOST_ARRIVALS
    merging = place * 0
    if ((seen >> 21) & MOST_ARRIVALS) == meeting.programs:
        while (seen & MOST_ARRIVALS) < everybody:
            seen = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
        early = seen >> 42
        place -= early
        merging = everybody - early
        if place == 0:  # all have asked which counter is theirs
            tl.store(meeting.count_ptr + (1 - which), which * 0)
            tl.store(meeting.count_ptr + 2, 1 - which)
    return place.to(tl.int32), merging.to(tl.int32)


@triton.jit
def merge_rows(
    partial,  # Partial of kernels/combine.py
    final,  # Final there
    sink_ptr,  # [num_heads], or None
    of,  # Merged
    n,  # [R] rows, counted through tokens with partials and their heads
    offs_p,  # [P] parts of a step
    offs_v,  # [V]
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
):
    """Merges the partials of rows whose keys were split, and stores their results.

    Slots are those of kernels/prefill.py: [batch, most_q, num_kv_heads, parts, group].
    """
    P: tl.constexpr = offs_p.shape[0]
    token = n // of.num_heads
    head = n % of.num_heads
    b = token // of.most_q
    t = token % of.most_q
    ok = b < of.batch
    first = b * 0
    length = of.most_q
    if of.cu_q_ptr is not None:
        first = tl.load(of.cu_q_ptr + b, mask=ok, other=0)
        length = tl.load(of.cu_q_ptr + b + 1, mask=ok, other=0) - first
        ok = ok & (length <= of.most_q) & (t < length)
    kv_head = token.to(tl.int64) * (of.num_heads // GROUP) + head // GROUP
    row = kv_head * of.parts * GROUP + head % GROUP
    ok = ok & (tl.load(partial.l_ptr + row, mask=ok, other=-1.0) != -1.0)  # else FINISHED
    columns = offs_v[None, :][None, :, :]
    v_ok = columns < HEAD_DIM_V

    at = row[:, None] + (offs_p * GROUP)[None, :]  # [R, P]
    zero = (row * 0)[:, None].to(tl.float32)
    m = zero + float("-inf")  # [R, 1]
    l = zero
    acc = zero[:, :, None] + (columns * 0).to(tl.float32)  # [R, 1, V]
    for past in range(0, of.parts, P):
        p_ok = ok[:, None] & (offs_p < of.parts - past)[None, :]
        m_p = tl.load(partial.m_ptr + at, mask=p_ok, other=float("-inf"))
        l_p = tl.load(partial.l_ptr + at, mask=p_ok, other=0.0)
        acc_at = (at * HEAD_DIM_V)[:, :, None] + columns
        acc_p = tl.load(partial.acc_ptr + acc_at, mask=p_ok[:, :, None] & v_ok, other=0.0)
        acc_p = tl.where((m_p == float("-inf"))[:, :, None], 0.0, acc_p)  # absent: anything
        m_new = tl.maximum(m, tl.max(m_p, 1)[:, None])
        top = finite_or_zero(m_new)
        weight = tl.exp2(m_p - top)
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(weight * l_p, 1)[:, None]
        acc = acc * shrink[:, :, None] + tl.sum(acc_p * weight[:, :, None], 1)[:, None, :]
        m = m_new
        at += P * GROUP
    lse = (m + tl.log2(l)) * 0.6931471805599453
    if sink_ptr is None:
        out = acc / tl.where(l == 0.0, 1.0, l)[:, :, None]
    else:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32)[:, None]
        out = acc * factor_beside_sink(m, l, sink * 1.4426950408889634)[:, :, None]

    slab = b.to(tl.int64)
    t = (first + t).to(tl.int64)
    out_at = slab * of.out_strides.b + t * of.out_strides.t
    out_at += head.to(tl.int64) * of.out_strides.h
    out_ptrs = final.out_ptr + out_at[:, None][:, :, None] + columns
    out_ok = ok[:, None][:, :, None] & v_ok
    tl.store(out_ptrs, encode_out(out, final), mask=out_ok)
    lse_at = slab * of.lse_strides.b + head.to(tl.int64) * of.lse_strides.h + t
    tl.store(final.lse_ptr + lse_at[:, None], lse, mask=ok[:, None])


@triton.jit
def meet_and_merge(
    meeting,  # Meeting
    which,
    partial,  # the arguments of `merge_rows`
    final,
    sink_ptr,
    of,  # Merged
    CONFIG: tl.constexpr,  # SequenceConfig of tile/attend.py
):
    """Arrives, and merges a share of the rows whose splits are all there: in Triton."""
    ROWS: tl.constexpr = CONFIG.merge_rows
    offs_r, offs_p = tl.arange(0, ROWS), tl.arange(0, CONFIG.merge_splits)
    offs_v = tl.arange(0, CONFIG.dim_v)
    tl.debug_barrier()
    place, merging = arrive_in_turn(meeting, which)
    if merging > 0:
        for n in range(place * ROWS, of.batch * of.most_q * of.num_heads, merging * ROWS):
            at = n + offs_r
            merge_rows(
                partial,
                final,
                sink_ptr,
                of,
                at,
                offs_p,
                offs_v,
                CONFIG.group,
                CONFIG.head_dim_v,
            )
