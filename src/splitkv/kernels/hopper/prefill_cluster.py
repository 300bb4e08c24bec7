"""Merging the parts of a row tile inside one launch, whose programs are a cluster.

As cluster.py has it, for sums in the layout of wgmma.

What runs once costs more to fetch than to run, so there is little of it: rows are stored with a few
addresses and fixed distances from those.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.cluster import (
    arrive_written,
    exchange_at,
    received,
    wait_cluster,
)
from splitkv.kernels.hopper.effect import act
from splitkv.kernels.hopper.prefill_sums import along_rows
from splitkv.kernels.hopper.prefill_write import cleared
from splitkv.kernels.tile.softmax import factor_beside_sink, finite_or_zero

# Bytes between rows, besides what they have: eight threads that store 32 bytes of a row each meet
# in no bank.
GAP = gl.constexpr(32)


def exchange_bytes(rows: int, head_dim_v: int, parts: int) -> int:
    """acc [parts, rows, head_dim_v / parts], with gaps, m and l [parts, rows] in fp32."""
    return rows * (4 * head_dim_v + parts * GAP.value + 8 * parts)


@gluon.constexpr_function
def sending(elements, first, columns):
    """Instructions that store so many columns of a thread's sums, from one on, and constraints.

    A thread has two columns of a row, two of the row 8 below, then those of 8 columns further on.
    Where a row goes is an address, 0 of one that does not exist.
    """
    outputs = elements // 4
    code = "{ .reg .pred ok0, ok1;"
    for row in range(2):
        code += f"setp.ne.u64 ok{row}, ${outputs + elements + 2 * row}, 0;"
    for i in range(0, elements, 2):
        column, row = i // 4 * 8, i % 4 // 2
        if first <= column < first + columns:
            to = f"[${outputs + elements + 2 * row} + {4 * (column - first)}]"
            code += f"@ok{row} st.v2.f32 {to}, {{${outputs + i}, ${outputs + i + 1}}};"
    code += "".join(f"mov.b32 ${i}, 0;" for i in range(outputs)) + "}"
    return code, ",".join(["=r"] * outputs + ["r"] * elements + ["l"] * elements)


@gluon.jit
def send_rows(acc, to, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Store COLUMNS columns of acc, the first ones at `to` [ROWS, 1]: see `sending`."""
    ELEMENTS: gl.constexpr = acc.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = sending(ELEMENTS, FIRST, COLUMNS)
    gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [acc, to.broadcast_to(acc.shape)],
        dtype=gl.int8,
        is_pure=False,
        pack=ELEMENTS,
    )


@gluon.jit
def of_program(at, number):
    """An address of shared memory as that of the same place in a program of the cluster."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 a; mapa.shared::cluster.u32 a, $1, $2; cvt.u64.u32 $0, a;"
        "cvta.shared::cluster.u64 $0, $0; }",
        "=l,r,r",
        [at, number],
        dtype=gl.int64,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def send_one(at, x, ok):
    """Store single numbers."""
    CODE: gl.constexpr = "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.f32 [$1], $2; }"
    act(CODE, "l,r,r", (at, x, ok.to(gl.int32)))


@gluon.jit
def received_fours(at):
    """What was sent to four neighbours, of which the first says where they are."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,r,r,r,r",
        [at],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def quickly(CODE: gl.constexpr, x):
    """An instruction that is right but for the last bits."""
    return gl.inline_asm_elementwise(CODE, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def merge_parts(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    own,  # Own
    work,  # Work
    output,  # Output
    PACK: gl.constexpr,
    PARTS: gl.constexpr,
    KEPT: gl.constexpr,  # rows that a sequence may have, of ROWS
):
    """Merge the parts of the only row tile of a lane, and store the result."""
    ROWS: gl.constexpr = acc.shape[0]
    DIM_V: gl.constexpr = acc.shape[1]
    SLICE: gl.constexpr = DIM_V // PARTS
    ROW: gl.constexpr = 4 * SLICE + GAP
    STATISTICS: gl.constexpr = PARTS * KEPT * ROW  # m, then l
    base = exchange_at(STATISTICS + 8 * PARTS * KEPT)
    kept = own.len_q * PACK

    acc = cleared(acc, l)
    rows = gl.arange(0, ROWS, layout=m.type.layout)
    ok = rows < kept
    at = own.part * KEPT + rows
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, acc.type.layout))
    pair = (offs_v % 8 // 2 * 8)[None, :]  # of a thread, in bytes
    wait_cluster()  # all of them run
    for p in gl.static_range(PARTS):
        there = of_program(base, own.part * 0 + p)
        send_one(there + STATISTICS + at * 4, m, ok)
        send_one(there + (STATISTICS + 4 * PARTS * KEPT) + at * 4, l, ok)
        to = along_rows(gl.where(ok, there + at * ROW, 0), acc)
        to = gl.where(to == 0, to, to + pair)
        send_rows(acc, to, p * SLICE, SLICE)
    arrive_written()

    COLUMNS: gl.constexpr = min(SLICE // 4, 32)
    L: gl.constexpr = gl.BlockedLayout(
        [1, 4], [32 // COLUMNS, COLUMNS], [gl.num_warps(), 1], [1, 0]
    )
    M: gl.constexpr = gl.SliceLayout(1, L)
    rows = gl.arange(0, ROWS, layout=M)
    columns = gl.arange(0, SLICE, layout=gl.SliceLayout(0, L))[None, :]
    ok = rows < kept
    t = rows // PACK
    head = own.head + rows % PACK
    steps = output.merging.out_strides
    out_rows = own.b.to(gl.int64) * steps.b + t.to(gl.int64) * steps.t + head * steps.h
    # TMA takes no other strides
    out_rows = tl.multiple_of(out_rows + own.part * SLICE, 8)
    out_ptrs = output.out_ptr + (out_rows[:, None] + columns)
    lse_rows = own.b.to(gl.int64) * output.stride_lse_b
    lse_rows += head.to(gl.int64) * output.stride_lse_h + t
    sink_log2 = None
    if output.sink_ptr is not None:
        sink_log2 = gl.load(output.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
        sink_log2 *= 1.4426950408889634
    there = gl.minimum(rows, KEPT - 1)
    mine = base + there[:, None] * ROW + columns * 4
    of_rows = base + STATISTICS + there * 4
    wait_cluster()
    m = gl.full([ROWS], float("-inf"), gl.float32, M)
    for p in gl.static_range(PARTS):
        m = gl.maximum(m, received(of_rows + p * KEPT * 4))
    top = finite_or_zero(m)
    l = gl.zeros([ROWS], gl.float32, M)
    acc = gl.zeros([ROWS, SLICE], gl.float32, L)
    for p in gl.static_range(PARTS):
        weight = gl.exp2(received(of_rows + p * KEPT * 4) - top)
        l += weight * received(of_rows + (PARTS + p) * KEPT * 4)
        acc += weight[:, None] * received_fours(mine + p * KEPT * ROW)
    if sink_log2 is None:
        factor = quickly("rcp.approx.ftz.f32 $0, $1;", gl.where(l == 0.0, 1.0, l))
    else:
        factor = factor_beside_sink(m, l, sink_log2)
    out = acc * factor[:, None]
    gl.store(out_ptrs, out.to(output.out_ptr.dtype.element_ty), mask=ok[:, None])
    if own.part == 0:
        lse = (m + quickly("lg2.approx.ftz.f32 $0, $1;", l)) * 0.6931471805599453
        gl.store(output.lse_ptr + lse_rows, lse, mask=ok)
