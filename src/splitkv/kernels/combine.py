"""Merge the partials of `decode_split` or `prefill`, one program a row and slice of head_dim_v.

Computes, over the parts p of a row,

    m = max_p m[p]     l = sum_p exp(m[p] - m) l[p]     acc = sum_p exp(m[p] - m) acc[p]
    out = acc / (l + exp(sink - m))                     lse = m + log l

Shapes      partials: acc [slots, rows, head_dim_v], m and l [slots, rows], fp32; out, lse: as in
            Final
            decode_split: a slot is a part of a row tile; prefill: of a token
Grid        (num_kv_heads * seqlen_q * group, batch, head_dim_v / TILE_V); of tokens
            (batch * tokens * num_kv_heads * group, 1, head_dim_v / TILE_V)
Traffic     reads every partial once, writes out once; counted where they are written
Numerics    fp32 throughout, base-2 exponentials; parts are merged in order, so bits do not vary
Limits      those of the kernel before; what has one part is finished there and skipped here
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.encode import encode_out
from splitkv.kernels.tile.new import keys_of
from splitkv.kernels.tile.share import Share, batch_share
from splitkv.kernels.tile.softmax import finish, finite_or_zero

FINISHED = tl.constexpr(
    -1.0
)  # as l of a slot: the row needs no merge; a sum of exponentials is >= 0


class Partial(NamedTuple):
    """Pointers to acc [slots, rows, head_dim_v], m [slots, rows] in base 2 and l [slots, rows],
    fp32.

    A slot without keys has m = -inf and l = 0; one whose row needs no merge has l = FINISHED.
    """

    acc_ptr: Any
    m_ptr: Any
    l_ptr: Any


class Final(NamedTuple):
    """Pointers to out (as q, with head_dim_v) and lse [batch, num_heads, seqlen_q], or None; and to
    the scale of an out in 8 bits, or None: it is of the working type."""

    out_ptr: Any
    lse_ptr: Any
    scale_ptr: Any = None


def final_of(out: Any, lse: Any, out_scale: Any) -> Final:
    """The Final of tensors; an out in 8 bits goes by its bytes, as not every GPU knows e4m3."""
    return Final(out if out_scale is None else out.view(torch.uint8), lse, out_scale)


@triton.jit
def write_absent(m_ptr, l_ptr, slot_rows, ok, l):
    """Marks a slot whose partial adds nothing: no keys were seen (l = 0), or there is nothing to
    merge (FINISHED)."""
    nothing = (slot_rows * 0).to(tl.float32)
    tl.store(m_ptr + slot_rows, nothing + float("-inf"), mask=ok)
    tl.store(l_ptr + slot_rows, nothing + l, mask=ok)


class ResultRows(NamedTuple):
    """Where the results of rows go, each [TILE_M]: the first element of out, that of lse."""

    out: Any
    lse: Any


@triton.jit
def mask_of_columns(acc, ok, offs_v, HEAD_DIM_V: tl.constexpr):
    """Which elements of acc [TILE_M, DIM_V] are stored."""
    out_ok = ok[:, None]
    if acc.shape[1] != HEAD_DIM_V:
        out_ok = out_ok & (offs_v < HEAD_DIM_V)[None, :]
    return out_ok


@triton.jit
def write_final(
    final,  # Final
    places,  # ResultRows
    sink_ptr,  # [num_heads], or None
    acc,  # [TILE_M, DIM_V]
    m,  # [TILE_M]
    l,
    head,
    ok,
    offs_v,  # [DIM_V]
    out_ok,  # of `mask_of_columns`
):
    """Finishes and stores rows whose keys this program has all seen."""
    sink_log2 = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32)
        sink_log2 = sink * 1.4426950408889634
    out, lse = finish(acc, m, l, sink_log2)
    out_ptrs = final.out_ptr + places.out[:, None] + offs_v[None, :]
    tl.store(out_ptrs, encode_out(out, final), mask=out_ok)
    if final.lse_ptr is not None:
        tl.store(final.lse_ptr + places.lse, lse, mask=ok)


@triton.jit
def write_partial(partial, slot_rows, acc, m, l, ok, offs_v, out_ok, HEAD_DIM_V: tl.constexpr):
    """Stores the Partial of rows of which this program has seen some keys."""
    acc_ptrs = partial.acc_ptr + slot_rows[:, None] * HEAD_DIM_V + offs_v[None, :]
    tl.store(acc_ptrs, acc, mask=out_ok)
    tl.store(partial.m_ptr + slot_rows, m, mask=ok)
    tl.store(partial.l_ptr + slot_rows, l, mask=ok)


class PartRows(NamedTuple):
    """Where the rows of a part are [TILE_M]: the head of each, whether it exists, and where it
    begins in out, in lse and in the partials."""

    head: Any
    ok: Any
    out_rows: Any
    lse_rows: Any
    slot_rows: Any


@triton.jit
def write_part(
    final,  # Final
    partial,  # Partial, or None
    sink_ptr,  # [num_heads], or None
    acc,  # [TILE_M, DIM_V]
    m,  # [TILE_M]
    l,
    rows,  # PartRows
    offs_v,  # [DIM_V]
    num_parts,
    HEAD_DIM_V: tl.constexpr,
):
    """Stores the result of rows whose keys this program has all seen, else the partial."""
    head, ok, slot_rows = rows.head, rows.ok, rows.slot_rows
    out_ok = mask_of_columns(acc, ok, offs_v, HEAD_DIM_V)
    if num_parts == 1:
        places = ResultRows(rows.out_rows, rows.lse_rows)
        write_final(final, places, sink_ptr, acc, m, l, head, ok, offs_v, out_ok)
        if partial is not None:
            write_absent(partial.m_ptr, partial.l_ptr, slot_rows, ok, FINISHED)
    elif partial is not None:
        write_partial(partial, slot_rows, acc, m, l, ok, offs_v, out_ok, HEAD_DIM_V)


def merge_tiles(parts: int, head_dim_v: int) -> tuple[int, int, int]:
    """Computes (splits a step, columns a program, warps) of `combine` for rows of so many splits.

    Up to 32 parts one warp, because reducing over the parts is then free of shared memory, and
    about 512 elements, so that the loads of all parts of a row are in flight at once on as many SMs
    as there are slices. With more, four warps: one would run through too many instructions.
    """
    step = min(triton.next_power_of_2(parts), 128)
    columns = min(128, max(16, 512 // step))
    warps = 1
    if step > 32:
        columns, warps = 32, 4
    return step, min(columns, triton.next_power_of_2(head_dim_v)), warps


# Where a batch is shared out: parts in the only step of a row of no more, parts a step of others,
# columns a program, warps. Most sequences have few parts, but a long one is not to be waited for.
SHARED_TILES = 4, 64, 32, 1
UNUSED = 0  # in the place of TILE_N where no batch is shared out: other tiles are no other variant


@triton.jit
def add_partials(m, l, acc, m_p, l_p, acc_p):
    """Merges m [1], l [1] and acc [1, TILE_V] with the partials m_p, l_p [TILE_P] and acc_p
    [TILE_P, TILE_V]."""
    acc_p = tl.where(m_p[:, None] == float("-inf"), 0.0, acc_p)  # absent slots hold anything
    m_new = tl.maximum(m, tl.max(m_p, 0))
    top = finite_or_zero(m_new)
    weight = tl.exp2(m_p - top)
    shrink = tl.exp2(m - top)
    l = l * shrink + tl.sum(weight * l_p, 0)
    acc = acc * shrink[:, None] + tl.sum(acc_p * weight[:, None], 0)[None, :]
    return m_new, l, acc


@triton.jit
def merged(
    acc_ptr,  # of the first part of a row
    m_ptr,
    l_ptr,
    offs_v,  # [TILE_V]
    v_ok,
    num_parts,
    ROWS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_P: tl.constexpr,
    LAST_STEP: tl.constexpr,
):
    """m [1], l [1] and acc [1, TILE_V] of all parts of a row, TILE_P a step. LAST_STEP: "full", or
    "short": it may have fewer."""
    offs_p = tl.arange(0, TILE_P)
    part_offs = offs_p * ROWS  # [TILE_P]
    acc_offs = (part_offs * HEAD_DIM_V)[:, None] + offs_v[None, :]  # [TILE_P, TILE_V]
    m = tl.full([1], float("-inf"), tl.float32)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, offs_v.shape[0]], tl.float32)
    for first in range(0, num_parts, TILE_P):
        p_ok = offs_p == offs_p
        if LAST_STEP == "short":
            p_ok = offs_p < num_parts - first
        m_p = tl.load(m_ptr + part_offs, mask=p_ok, other=float("-inf"))
        l_p = tl.load(l_ptr + part_offs, mask=p_ok, other=0.0)
        acc_p = tl.load(acc_ptr + acc_offs, mask=p_ok[:, None] & v_ok[None, :], other=0.0)
        m, l, acc = add_partials(m, l, acc, m_p, l_p, acc_p)
        m_ptr += TILE_P * ROWS
        l_ptr += TILE_P * ROWS
        acc_ptr += TILE_P * ROWS * HEAD_DIM_V
    return m, l, acc


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_kv_heads",
        "left",
        "right",
        "sink_tokens",
        "chunk",
        "parts",
        "programs",
        "seqlen_new",
        "capacity",
        "tokens",
        "total_q",
    ]
)
def combine(
    partial,  # Partial
    final,  # Final
    lens_ptr,  # [batch] int32, read by the batch rule; by token: cu_seqlens_q, or None: dense
    sink_ptr,  # [num_heads], or None
    growth,  # Growth: the lengths are those before decode_split appended; or None
    batch,
    num_kv_heads,
    left,
    right,
    sink_tokens,
    chunk,
    parts,  # slots a sequence; None: the batch rule
    programs,
    seqlen_new,  # of the new tokens, or None
    capacity,
    tokens,  # of a sequence, each with slots of its own and SEQLEN_Q 1; None: as decode_split
    total_q,  # where packed
    stride_ob,
    stride_ot,
    stride_oh,
    SEQLEN_Q: tl.constexpr,  # with this, addresses of parts differ by constants
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BATCH_P2: tl.constexpr,
    TILE_M: tl.constexpr,  # of decode_split
    TILE_N: tl.constexpr,  # of decode_split, or UNUSED
    TILE_P: tl.constexpr,  # parts a step
    FEW: tl.constexpr,  # a row of no more parts takes one step of so many; 0: it does not
    TILE_V: tl.constexpr,
    LAST_STEP: tl.constexpr,  # full: the parts of every sequence fill whole steps; short: not so
    PREDECESSOR: tl.constexpr,  # running: the kernel before may still run; done
):
    rows: tl.constexpr = SEQLEN_Q * GROUP
    ROWS: tl.constexpr = min(TILE_M, rows)  # of a slot
    row = tl.program_id(0)
    b = tl.program_id(1)
    if tokens is not None:
        b = row // (num_kv_heads * rows)
        row = row % (num_kv_heads * rows)
    h = row // rows
    r = row % rows
    t = r // GROUP
    head = h * GROUP + r % GROUP
    offs_v = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
    sink_log2 = None
    if sink_ptr is not None:
        sink_log2 = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634

    # where the partials are: worked out while decode_split still runs
    row_tiles: tl.constexpr = (rows + TILE_M - 1) // TILE_M
    head_tile = h * row_tiles + r // TILE_M
    if programs is None:
        slot = (b * num_kv_heads * row_tiles + head_tile) * parts
        num_parts = parts
    else:
        t_first, t_last = token_range(r // TILE_M, SEQLEN_Q, GROUP, TILE_M)
        bounds = Bounds(left, right, sink_tokens, chunk)
        share = Share(None, None, programs)
        offs_b = tl.arange(0, BATCH_P2)
        keys_b = keys_of(lens_ptr, growth, offs_b, offs_b < batch, seqlen_new, capacity)
        parts_b = batch_share(
            share, bounds, keys_b, batch, SEQLEN_Q, t_first, t_last, offs_b, TILE_N
        )
        slot = head_tile * programs + tl.sum(tl.where(offs_b < b, parts_b, 0), 0)
        num_parts = tl.sum(tl.where(offs_b == b, parts_b, 0), 0)
    if (
        PREDECESSOR == "running"
    ):  # before any return: this grid must not end before decode_split does
        tl.extra.cuda.gdc_wait()
    first_row = slot.to(tl.int64) * ROWS + r % TILE_M
    m_ptr = partial.m_ptr + first_row
    l_ptr = partial.l_ptr + first_row
    acc_ptr = partial.acc_ptr + first_row * HEAD_DIM_V
    length = SEQLEN_Q
    if tokens is not None:
        t = b % tokens
        b = b // tokens
        length = tokens
        if lens_ptr is not None:
            first = tl.load(lens_ptr + b)
            own = tl.load(lens_ptr + b + 1) - first
            if (own > tokens) | (t >= own):  # none, or finished where they were computed
                return
            t += first
            b = b * 0
            length = total_q
    if num_parts == 1:
        return
    merge = tl.load(l_ptr + tl.zeros([1], tl.int32)) != FINISHED  # NaN has to be written
    v_ok = offs_v == offs_v
    if HEAD_DIM_V % TILE_V:
        v_ok = offs_v < HEAD_DIM_V
    of_row = acc_ptr, m_ptr, l_ptr, offs_v, v_ok, num_parts
    if FEW > 0:
        if num_parts <= FEW:
            m, l, acc = merged(*of_row, ROWS, HEAD_DIM_V, FEW, "short")
        else:
            m, l, acc = merged(*of_row, ROWS, HEAD_DIM_V, TILE_P, LAST_STEP)
    else:
        m, l, acc = merged(*of_row, ROWS, HEAD_DIM_V, TILE_P, LAST_STEP)
    out, lse = finish(acc, m, l, sink_log2)

    out_token = b.to(tl.int64) * stride_ob + t.to(tl.int64) * stride_ot
    out_row = out_token + head.to(tl.int64) * stride_oh
    out_ptrs = final.out_ptr + out_row + offs_v[None, :]
    tl.store(out_ptrs, encode_out(out, final), mask=v_ok[None, :] & merge[:, None])
    if final.lse_ptr is not None:
        lse_row = (b * num_kv_heads * GROUP + head).to(tl.int64) * length + t
        first_slice = tl.program_id(2) + tl.arange(0, 1)
        tl.store(
            final.lse_ptr + lse_row + tl.zeros([1], tl.int32), lse, mask=(first_slice == 0) & merge
        )
