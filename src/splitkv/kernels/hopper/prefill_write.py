"""Storing what a warpgroup of the kernels for whole sequences has worked out: a result or, of keys
in parts, a partial."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from splitkv.kernels.combine import FINISHED, Final, write_absent
from splitkv.kernels.hopper.known import again
from splitkv.kernels.hopper.prefill_sums import along_rows
from splitkv.kernels.hopper.ring import thread_barrier
from splitkv.kernels.tile.merge import (
    Meeting,
    Merged,
    counter_in_use,
    meet,
    merge_rows,
    say_running,
)
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.visit import Strides

# Renamed between Triton 3.6 and 3.9.
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Merging(NamedTuple):
    """How parts are merged in the launch that makes them: the counters of tile/merge.py, None:
    `combine` merges; Strides of out."""

    count_ptr: Any
    out_strides: Any


class Output(NamedTuple):
    """Where results go: out with TMA or, by token and head, as `stride_t` says; lse by sequence and
    head; sink_ptr [num_heads], or None; the Partial of kernels/combine.py, or None; Merging."""

    out_ptr: Any
    lse_ptr: Any
    sink_ptr: Any
    partial: Any
    merging: Any
    stride_t: Any
    stride_lse_b: Any
    stride_lse_h: Any


@gluon.jit
def finish(
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Store lse and give what sums are multiplied by [ROWS]."""
    ROWS: gl.constexpr = m.shape[0]
    rows = (
        again(own.tile, work.scarce) * TILE_M + W * ROWS + gl.arange(0, ROWS, layout=m.type.layout)
    )
    ok = rows < own.len_q * PACK
    t = own.first_q + rows // PACK
    head = own.head + rows % PACK
    lse = (m + gl.log2(l)) * 0.6931471805599453
    at = own.b.to(gl.int64) * again(output.stride_lse_b, work.scarce)
    at += head.to(gl.int64) * again(output.stride_lse_h, work.scarce) + t
    gl.store(output.lse_ptr + at, lse, mask=ok)
    factor = 1.0 / l
    if output.sink_ptr is not None:
        sink = gl.load(output.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
        sink *= 1.4426950408889634
        top = finite_or_zero(gl.maximum(m, sink))
        shrink = gl.exp2(m - top)
        factor = shrink / (l * shrink + gl.exp2(sink - top))
    return factor


@gluon.constexpr_function
def clearing(elements):
    """Instructions that put 0 where the other operand is 0, and have nothing to do in warps where
    it never is; and their constraints."""
    numbers, by = range(elements), elements * 2
    # in any layout the bits of a register's number say of which of two rows it is
    code = f"{{ .reg .pred some; setp.eq.f32 some, ${by}, 0f00000000;\n"
    for bit in range(elements.bit_length() - 1):
        code += f"setp.eq.or.f32 some, ${by + (1 << bit)}, 0f00000000, some;\n"
    code += "vote.sync.any.pred some, some, 0xffffffff; @!some bra.uni AS_IT_IS;\n"
    for i in numbers:
        code += f"setp.eq.f32 some, ${by + i}, 0f00000000; selp.b32 ${i}, 0, ${i}, some;\n"
    code += "AS_IT_IS: }"
    return code, ",".join(["=r"] * elements + [str(i) for i in numbers] + ["r"] * elements)


@gluon.jit
def cleared(out, l):
    """out, and 0 in a row that saw no key: its products are 0 times anything."""
    ELEMENTS: gl.constexpr = out.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = clearing(ELEMENTS)
    return gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [out, along_rows(l, out).broadcast_to(out.shape)],
        dtype=gl.float32,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.jit
def write(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    factor,  # [ROWS]
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Store out."""
    ROWS: gl.constexpr = acc.shape[0]
    out = cleared(acc * along_rows(factor, acc), l)
    if tiles.out is None:
        tile = tiles.q.index(W)
        box = boxes.q.index(W)
    else:
        tile = tiles.out.index(W)
        box = boxes.out.index(W)
    tma.store_wait(0)
    tile.store(out.to(tile.dtype))
    TOKENS: gl.constexpr = ROWS // PACK
    t_first = (again(own.tile, work.scarce) * TILE_M + W * ROWS) // PACK
    if work.cu_q_ptr is None:
        fence_async_shared()
        async_store(maps.out, [own.b, t_first, own.head, 0], box)
    elif t_first + TOKENS <= own.len_q:
        fence_async_shared()
        async_store(maps.out, [own.b, own.first_q + t_first, own.head, 0], box)
    else:
        write_some(tile, own, t_first, output, PACK)


@gluon.jit
def write_some(tile, own, t_first, output, PACK: gl.constexpr):
    """Store the rows of a tile that are of the sequence."""
    ROWS: gl.constexpr = tile.shape[0]
    DIM: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    offs = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    t = t_first + rows // PACK
    at = (own.first_q + t).to(gl.int64) * output.stride_t + (own.head + rows % PACK) * DIM
    ptrs = output.out_ptr + at[:, None] + offs[None, :]
    gl.store(ptrs, tile.load(layout), mask=(t < own.len_q)[:, None])


@gluon.jit
def slots_of(
    like,  # [ROWS]
    own,  # Own
    work,  # Work
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """(rows of the partials [ROWS], which of them exist): as in kernels/prefill.py."""
    ROWS: gl.constexpr = like.shape[0]
    rows = again(own.tile, work.scarce) * TILE_M + W * ROWS
    rows += gl.arange(0, ROWS, layout=like.type.layout)
    most_q = again(work.cutting.most_q, work.scarce)
    ok = (rows < own.len_q * PACK) & (own.len_q <= most_q)
    ok &= own.sequence < work.batch
    token = own.sequence.to(gl.int64) * most_q + rows // PACK
    head = own.head + rows % PACK
    kv_heads = again(work.lane_heads, work.scarce) * PACK // GROUP
    parts = again(work.cutting.parts, work.scarce)
    slot = (token * kv_heads + head // GROUP) * parts + own.part
    return slot * GROUP + head % GROUP, ok


@gluon.jit
def mark(
    like,  # [ROWS]
    l,
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Mark the slots of an item as `write_absent` does."""
    at, ok = slots_of(like, own, work, W, GROUP, PACK, TILE_M)
    write_absent(output.partial.m_ptr, output.partial.l_ptr, at, ok, l)


@gluon.jit
def write_part(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Store the partial of one of several parts."""
    DIM_V: gl.constexpr = acc.shape[1]
    partial = output.partial
    at, ok = slots_of(m, own, work, W, GROUP, PACK, TILE_M)
    gl.store(partial.m_ptr + at, m, mask=ok)
    gl.store(partial.l_ptr + at, l, mask=ok)
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, acc.type.layout))
    acc_ptrs = partial.acc_ptr + along_rows(at * DIM_V, acc) + offs_v[None, :]
    gl.store(acc_ptrs, acc, mask=along_rows(ok, acc))


@gluon.jit
def write_part_or_all(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    alone,  # whether the row tile has no other part
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Store the partial of a part, or the result where there is no other."""
    where = own, work, output, W, GROUP, PACK, TILE_M
    if alone:
        write(acc, l, finish(l, m, *where), maps, boxes, tiles, *where)
        mark(m, FINISHED, *where)
    else:
        write_part(acc, l, m, *where)


@gluon.jit
def mark_absent(
    ROWS: gl.constexpr,
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Mark a part that the row tile does not have."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    nothing = gl.zeros([ROWS], gl.float32, layout)
    mark(nothing, 0.0, own, work, output, W, GROUP, PACK, TILE_M)


@gluon.constexpr_function
def layout_of_merge(rows, columns, warps):
    """Of partials [rows, parts, columns]: a warp has all parts of what it merges, so that none are
    added up through shared memory."""
    of_rows = min(rows, warps)
    of_columns = warps // of_rows
    across = min(32, columns // of_columns // 4)
    return gl.BlockedLayout(
        [1, 1, 4], [1, 32 // across, across], [of_rows, 1, of_columns], [2, 1, 0]
    )


@gluon.jit
def begin(output):
    """Say that this program runs, where those that come last merge."""
    if output.merging.count_ptr is not None:
        meeting = Meeting(output.merging.count_ptr, gl.num_programs(0))
        say_running(meeting, counter_in_use(meeting))


@gluon.jit
def merge(
    work,  # Work
    output,  # Output
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    DIM_V: gl.constexpr,
    TILE_P: gl.constexpr,
    TILE_R: gl.constexpr,
):
    """Arrive, and merge a share of the rows of which all have made parts: once all roles of this
    program are done, so that none keeps registers for it."""
    L: gl.constexpr = layout_of_merge(TILE_R, DIM_V, gl.num_warps())
    RP: gl.constexpr = gl.SliceLayout(2, L)
    offs_r = gl.arange(0, TILE_R, layout=gl.SliceLayout(1, RP))
    offs_p = gl.arange(0, TILE_P, layout=gl.SliceLayout(0, RP))
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, gl.SliceLayout(0, L)))
    num_heads = work.lane_heads * PACK
    lse_strides = Strides(output.stride_lse_b, 1, output.stride_lse_h)
    sizes = work.batch, work.cutting.most_q, work.cutting.parts, num_heads
    of = Merged(work.cu_q_ptr, *sizes, output.merging.out_strides, lse_strides)
    final = Final(output.out_ptr, output.lse_ptr)
    meeting = Meeting(output.merging.count_ptr, gl.num_programs(0))
    which = counter_in_use(meeting)
    thread_barrier()
    place, merging = meet(meeting, which)
    if merging > 0:
        rows = work.batch * work.cutting.most_q * num_heads
        for n in range(place * TILE_R, rows, merging * TILE_R):
            rest = n + offs_r, offs_p, offs_v
            merge_rows(output.partial, final, output.sink_ptr, of, *rest, GROUP, DIM_V)
