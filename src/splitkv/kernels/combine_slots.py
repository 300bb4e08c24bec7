"""Merge the partials of `decode_persistent`, one program some rows and a slice of head_dim_v.

Computes what kernels/combine.py computes, over the splits of a head tile that several programs
have. Such a head tile is known by the program that has its second split, of which its Start says
how many there are; all else is finished by the programs themselves.

Shapes      partials: acc [slots, rows, head_dim_v], m and l [slots, rows], fp32; two slots a
            program: see tile/walk.py; out, lse: as in Final
Grid        (groups * rows a slot / TILE_R, programs, head_dim_v / TILE_V); most have nothing to
            merge and end at once, before decode_persistent has
Traffic     reads every partial once, writes out once; counted where they are written
Numerics    fp32 throughout, base-2 exponentials; splits are merged in order, so bits do not vary
Limits      those of decode_persistent
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.decode_sizes import SIZES
from splitkv.kernels.tile.encode import encode_out
from splitkv.kernels.tile.softmax import finish, finite_or_zero
from splitkv.kernels.tile.step_share import SEQUENCES, share_of
from splitkv.kernels.tile.walk import DecodeStep, head_tile_of_share, slots_to_merge

TILE_R, TILE_P, TILE_V, WARPS = 2, 32, 32, 1  # rows, splits a step, columns, warps of a program
FEW = tl.constexpr(4)  # splits that take one step of so many


class MergedRows(NamedTuple):
    """The partials of some rows of a head tile.

    program, programs, group   as in `slots_to_merge`
    rows      [TILE_R] their numbers in a slot; ok: which of them exist
    slot_rows rows of a slot
    splits    how many there are
    """

    program: Any
    programs: Any
    group: Any
    rows: Any
    ok: Any
    slot_rows: Any
    splits: Any


class PartialAddresses(NamedTuple):
    """Where a step of partials is: m, l [TILE_P, TILE_R], acc [TILE_P, TILE_R, TILE_V], and which
    of them exist."""

    m: Any
    l: Any
    acc: Any
    ok: Any
    acc_ok: Any


class MergedParts(NamedTuple):
    """The sums of splits together: m and l [TILE_R], acc [TILE_R, TILE_V]."""

    m: Any
    l: Any
    acc: Any


@triton.jit
def locate_step(partial, of_rows, offs_p, offs_v, HEAD_DIM_V: tl.constexpr):
    """The PartialAddresses of splits `offs_p` of MergedRows."""
    slots = slots_to_merge(offs_p, of_rows.program, of_rows.programs, of_rows.group)
    rows = slots.to(tl.int64)[:, None] * of_rows.slot_rows + of_rows.rows[None, :]
    ok = (offs_p < of_rows.splits)[:, None] & of_rows.ok[None, :]  # [TILE_P, TILE_R]
    acc_ptrs = partial.acc_ptr + rows[:, :, None] * HEAD_DIM_V + offs_v[None, None, :]
    acc_ok = ok[:, :, None] & (offs_v < HEAD_DIM_V)[None, None, :]
    return PartialAddresses(partial.m_ptr + rows, partial.l_ptr + rows, acc_ptrs, ok, acc_ok)


@triton.jit
def merge_step(merged, at):
    """MergedParts with the partials at PartialAddresses."""
    m_p = tl.load(at.m, mask=at.ok, other=float("-inf"))
    l_p = tl.load(at.l, mask=at.ok, other=0.0)
    acc_p = tl.load(at.acc, mask=at.acc_ok, other=0.0)
    acc_p = tl.where(m_p[:, :, None] == float("-inf"), 0.0, acc_p)  # absent: anything
    m = tl.maximum(merged.m, tl.max(m_p, 0))
    top = finite_or_zero(m)
    weight = tl.exp2(m_p - top[None, :])
    shrink = tl.exp2(merged.m - top)
    l = merged.l * shrink + tl.sum(weight * l_p, 0)
    acc = merged.acc * shrink[:, None] + tl.sum(acc_p * weight[:, :, None], 0)
    return MergedParts(m, l, acc)


@triton.jit
def merge_slots(
    partial, of_rows, offs_v, AFTER: tl.constexpr, HEAD_DIM_V: tl.constexpr, TILE_P: tl.constexpr
):
    """Merges all splits of MergedRows, TILE_P a step, when decode has ended: MergedParts. A step of
    few has all of them; what it needs no partials for is done before."""
    TILE_R: tl.constexpr = of_rows.rows.shape[0]
    none = tl.full([TILE_R], float("-inf"), tl.float32)
    merged = MergedParts(
        none, tl.zeros([TILE_R], tl.float32), tl.zeros([TILE_R, offs_v.shape[0]], tl.float32)
    )
    offs_p = tl.arange(0, TILE_P)
    if TILE_P == FEW:
        at = locate_step(partial, of_rows, offs_p, offs_v, HEAD_DIM_V)
        if AFTER == "early":
            tl.extra.cuda.gdc_wait()
        merged = merge_step(merged, at)
    else:
        if AFTER == "early":
            tl.extra.cuda.gdc_wait()
        for first in range(0, of_rows.splits, TILE_P):
            at = locate_step(partial, of_rows, first + offs_p, offs_v, HEAD_DIM_V)
            merged = merge_step(merged, at)
    return merged


@triton.jit(do_not_specialize=SIZES)
def combine_slots(
    partial,  # Partial
    final,  # Final
    starts_ptr,  # [programs, 8] int32 of the schedule; None: it finds the shares
    lens_ptr,  # [batch] int32
    sink_ptr,  # [num_heads], or None
    growth,  # Growth: the lengths are those before new tokens; None: there are none
    seqlen_q,
    batch,
    num_kv_heads,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    head_tiles,  # that a share goes through, or None: one
    programs,
    seqlen_new,  # of the new tokens, or None
    capacity,
    stride_ob,
    stride_ot,
    stride_oh,
    SEQLEN_Q: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,  # of decode_persistent
    TILE_N: tl.constexpr,
    RULE: tl.constexpr,  # ShareRule
    SPLIT_TILES: tl.constexpr,  # of a DecodeStep
    TILE_R: tl.constexpr,  # rows of a program
    TILE_P: tl.constexpr,
    TILE_V: tl.constexpr,
    AFTER: tl.constexpr,  # early: launched before decode_persistent has ended; or in_order
):
    rows: tl.constexpr = SEQLEN_Q * GROUP
    ROWS: tl.constexpr = min(TILE_M, rows)  # of a slot
    BLOCKS: tl.constexpr = (ROWS + TILE_R - 1) // TILE_R
    row_tiles: tl.constexpr = (rows + TILE_M - 1) // TILE_M
    group = tl.program_id(0) // BLOCKS
    rows_of_slot = tl.program_id(0) % BLOCKS * TILE_R + tl.arange(0, TILE_R)
    program = tl.program_id(1)
    bounds = Bounds(left, right, sink_tokens, chunk)
    added = growth, seqlen_new, capacity
    sizes = seqlen_q, batch, head_tiles, programs
    step = DecodeStep(lens_ptr, bounds, *sizes, SPLIT_TILES, *added)
    # all that it reads was there before decode_persistent
    start = share_of(starts_ptr, step, program, tl.arange(0, SEQUENCES), RULE.find, TILE_N)
    if start.merged == 0:
        if AFTER == "early":  # one waits anyway: this grid ends after decode_persistent
            if tl.program_id(0) + program + tl.program_id(2) == 0:
                tl.extra.cuda.gdc_wait()
        return
    head_tile = head_tile_of_share(step, group, start.head_tile)
    r = head_tile % row_tiles * TILE_M + rows_of_slot
    ok = (rows_of_slot < ROWS) & (r < rows)  # [TILE_R]
    t = r // GROUP
    head = head_tile // row_tiles * GROUP + r % GROUP
    offs_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    sink_log2 = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32)
        sink_log2 = sink * 1.4426950408889634
    of_rows = MergedRows(program, programs, group, rows_of_slot, ok, ROWS, start.merged)
    if start.merged <= FEW:
        merged = merge_slots(partial, of_rows, offs_v, AFTER, HEAD_DIM_V, FEW)
    else:
        merged = merge_slots(partial, of_rows, offs_v, AFTER, HEAD_DIM_V, TILE_P)
    out, lse = finish(merged.acc, merged.m, merged.l, sink_log2)

    b = start.sequence.to(tl.int64)
    out_rows = b * stride_ob + t.to(tl.int64) * stride_ot + head.to(tl.int64) * stride_oh
    out_ptrs = final.out_ptr + out_rows[:, None] + offs_v[None, :]
    out_ok = ok[:, None] & (offs_v < HEAD_DIM_V)[None, :]
    tl.store(out_ptrs, encode_out(out, final), mask=out_ok)
    if final.lse_ptr is not None:
        lse_rows = (b * num_kv_heads * GROUP + head) * SEQLEN_Q + t
        tl.store(final.lse_ptr + lse_rows, lse, mask=ok & (tl.program_id(2) == 0))
