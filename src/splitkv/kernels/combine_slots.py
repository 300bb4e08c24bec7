"""Merge the partials of `decode_persistent`, one program a row and slice of head_dim_v.

Computes what kernels/combine.py computes, over the splits of a head tile that several programs
have. Such a head tile is known by the program that has its second split, of which its Start says
how many there are; all else is finished by the programs themselves.

Shapes      partials: acc [slots, rows, head_dim_v], m and l [slots, rows], fp32; two slots a
            program: see tile/walk.py; out, lse: as in Final
Grid        (groups * rows a slot, programs, head_dim_v / TILE_V); most end at once
Traffic     reads every partial once, writes out once; counted where they are written
Numerics    fp32 throughout, base-2 exponentials; splits are merged in order, so bits do not vary
Limits      those of decode_persistent
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.combine import add_partials
from splitkv.kernels.tile.softmax import finish
from splitkv.kernels.tile.walk import load_start, slots_to_merge

TILE_P, TILE_V, WARPS = 32, 32, 1  # splits a step, columns and warps of a program
FEW = tl.constexpr(4)  # splits that take one step of so many


class MergedRow(NamedTuple):
    """The partials of a row.

    program, programs, group   as in `slots_to_merge`
    row       its number in a slot; rows: those of a slot
    splits    how many there are
    """

    program: Any
    programs: Any
    group: Any
    row: Any
    rows: Any
    splits: Any


@triton.jit
def merge_row(partial, of_row, offs_v, HEAD_DIM_V: tl.constexpr, TILE_P: tl.constexpr):
    """m [1], l [1] and acc [1, TILE_V] of all splits of a MergedRow, TILE_P a step."""
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, offs_v.shape[0]], tl.float32)
    for first in range(0, of_row.splits, TILE_P):
        offs_p = first + tl.arange(0, TILE_P)
        ok = offs_p < of_row.splits
        slots = slots_to_merge(offs_p, of_row.program, of_row.programs, of_row.group)
        rows = slots.to(tl.int64) * of_row.rows + of_row.row
        m_p = tl.load(partial.m_ptr + rows, mask=ok, other=float("-inf"))
        l_p = tl.load(partial.l_ptr + rows, mask=ok, other=0.0)
        acc_ptrs = partial.acc_ptr + rows[:, None] * HEAD_DIM_V + offs_v[None, :]
        acc_ok = ok[:, None] & (offs_v < HEAD_DIM_V)[None, :]
        acc_p = tl.load(acc_ptrs, mask=acc_ok, other=0.0)
        m, l, acc = add_partials(m, l, acc, m_p, l_p, acc_p)
    return m, l, acc


@triton.jit(do_not_specialize=["num_kv_heads", "head_tiles", "programs"])
def combine_slots(
    partial,  # Partial
    final,  # Final
    starts_ptr,  # [programs, 8] int32 of the schedule
    sink_ptr,  # [num_heads], or None
    num_kv_heads,
    head_tiles,  # that a share goes through
    programs,
    stride_ob,
    stride_ot,
    stride_oh,
    SEQLEN_Q: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,  # of decode_persistent
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
    AFTER: tl.constexpr,  # early: launched before decode_persistent has ended; or in_order
):
    rows: tl.constexpr = SEQLEN_Q * GROUP
    ROWS: tl.constexpr = min(TILE_M, rows)  # of a slot
    row_tiles: tl.constexpr = (rows + TILE_M - 1) // TILE_M
    group = tl.program_id(0) // ROWS
    row_of_slot = tl.program_id(0) % ROWS
    program = tl.program_id(1)
    start = load_start(starts_ptr, program)  # the schedule was there before decode_persistent
    if AFTER == "early":  # before any return: this grid must not end before decode_persistent does
        tl.extra.cuda.gdc_wait()
    head_tile = group * head_tiles + start.head_tile
    r = head_tile % row_tiles * TILE_M + row_of_slot
    if (start.merged == 0) | (r >= rows):
        return
    t = r // GROUP
    head = head_tile // row_tiles * GROUP + r % GROUP
    offs_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    sink_log2 = None
    if sink_ptr is not None:
        sink_log2 = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
    of_row = MergedRow(program, programs, group, row_of_slot, ROWS, start.merged)
    if start.merged <= FEW:
        m, l, acc = merge_row(partial, of_row, offs_v, HEAD_DIM_V, FEW)
    else:
        m, l, acc = merge_row(partial, of_row, offs_v, HEAD_DIM_V, TILE_P)
    out, lse = finish(acc, m, l, sink_log2)

    b = start.sequence.to(tl.int64)
    out_row = b * stride_ob + t.to(tl.int64) * stride_ot + head * stride_oh
    out_ptrs = final.out_ptr + out_row + offs_v[None, :]
    out_ok = (offs_v < HEAD_DIM_V)[None, :]
    tl.store(out_ptrs, out.to(final.out_ptr.dtype.element_ty), mask=out_ok)
    if final.lse_ptr is not None:
        lse_row = (b * num_kv_heads * GROUP + head) * SEQLEN_Q + t
        first_slice = tl.program_id(2) + tl.arange(0, 1) == 0
        tl.store(final.lse_ptr + lse_row + tl.zeros([1], tl.int32), lse, mask=first_slice)
