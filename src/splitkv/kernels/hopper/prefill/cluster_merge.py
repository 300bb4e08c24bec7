"""Merging the two splits of a row tile inside one launch, by programs that are a cluster.

The scheme of primitives/cluster.py, for sums in the layout of wgmma: each program sends the other
one half of its columns, and merges the half that it is sent. What a thread has of a half is what
the same thread of the other program merges it with. So sums go from thread to thread, 16 bytes at a
time, in an order in which those of a warp lie beside each other.

What is sent tells a barrier in the shared memory that it goes to, and a program waits for that: a
barrier of the cluster would have all stores of a program be everywhere first.

What runs once costs more to fetch than to run, so there is little of it.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.prefill.epilogue import cleared
from splitkv.kernels.hopper.prefill.load import ROWS_OF_WARP
from splitkv.kernels.hopper.prefill.records import Half, HalfRows, PairSums
from splitkv.kernels.hopper.primitives.cluster import (
    arrive_running,
    exchange_at,
    wait_at,
    wait_cluster,
)
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx_alone
from splitkv.kernels.hopper.primitives.row_sums import along_rows
from splitkv.kernels.limits import hopper_prefill_quantised as limits
from splitkv.kernels.tile.softmax import factor_beside_sink, finite_or_zero

PAIR = gl.constexpr(limits.PAIR)
THREADS = gl.constexpr(limits.PAIR_THREADS)  # that multiply
bytes_of_half = gluon.constexpr_function(limits.bytes_of_half)
pair_exchange_bytes = gluon.constexpr_function(limits.pair_exchange_bytes)


@gluon.constexpr_function
def barrier_in(register, scratch):
    """PTX that computes the address of the exchange barrier into a register."""
    code = f"mov.u32 {register}, %dynamic_smem_size; mov.u32 {scratch}, global_smem;"
    return code + f"add.u32 {register}, {register}, {scratch}; sub.u32 {register}, {register}, 16;"


@gluon.constexpr_function
def opening(rows, head_dim_v):
    """PTX by which one thread initialises the barrier of the exchange with the bytes that it will
    be sent."""
    sent = -(-rows // ROWS_OF_WARP.value) * 32 * (head_dim_v + 16)
    return f"""{{ .reg .u32 t, at; .reg .pred first; {barrier_in("at", "t")}
    mov.u32 t, %tid.x; setp.eq.u32 first, t, 0;
    @first mbarrier.init.shared::cta.b64 [at], 1;
    @first fence.mbarrier_init.release.cluster;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [at], {sent}; }}"""


@gluon.jit
def open_exchange(CONFIG: gl.constexpr):
    """Initialises the exchange with the other program of a cluster, if there is one, and tells it
    so."""
    if CONFIG.cluster_size > 0:
        CODE: gl.constexpr = opening(CONFIG.cluster_rows, CONFIG.head_dim_v)
        run_ptx_alone(CODE)
        arrive_running(CONFIG.cluster_size)


@gluon.constexpr_function
def storing(elements, rows):
    """Instructions that store so many sums of a thread, then m and l of its two rows, but for warps
    that have no row, to the exchange of a program of the cluster, whose barrier is told; and
    constraints.

    A thread has two columns of a row, two of the row 8 below, then those of 8 columns further on.
    """
    x = elements // 4
    m, l, to = x + elements, x + 2 * elements, x + 3 * elements
    fours = [range(x + i, x + i + 4) for i in range(0, elements, 4)] + [(m, l, m + 2, l + 2)]
    step, warps = 16 * THREADS.value, -(-rows // ROWS_OF_WARP.value)
    code = f"mov.u32 t, %tid.x; setp.ge.u32 none, t, {32 * warps}; @none bra NOTHING;"
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
    code = barrier_in("b", "t") + code + f"sub.u32 a, b, {step * len(fours)};"
    code += "mad.lo.u32 a, t, 16, a;"
    code += "".join(f"mapa.shared::cluster.u32 {at}, {at}, ${to};" for at in "ab")
    code = f"{{ .reg .u32 t, b; .reg .u32 a; .reg .pred none; {code}"
    for n, four in enumerate(fours):
        code += f"{store} [a + {n * step}], {{{', '.join(f'${i}' for i in four)}}}, [b];"
    code += "NOTHING:" + "".join(f"mov.b32 ${i}, 0;" for i in range(elements // 4)) + "}"
    return code, ",".join(["=r"] * (elements // 4) + ["r"] * 4 * elements)


@gluon.jit
def store_half(acc, l, m, to, KEPT: gl.constexpr):
    """Stores sums [ROWS, half of DIM_V], and m and l [ROWS], to a program of the cluster: see
    `storing`."""
    ELEMENTS: gl.constexpr = acc.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = storing(ELEMENTS, KEPT)
    m = along_rows(m, acc).broadcast_to(acc.shape)
    l = along_rows(l, acc).broadcast_to(acc.shape)
    gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [acc, m, l, gl.full(acc.shape, 0, to.dtype, acc.type.layout) + to],
        dtype=gl.int8,
        is_pure=False,
        pack=ELEMENTS,
    )


@gluon.constexpr_function
def loading(elements):
    """Instructions that load so many sums of a thread from shared memory; and constraints."""
    code = f"{{ .reg .u32 t; .reg .u32 a; mov.u32 t, %tid.x; mad.lo.u32 a, t, 16, ${elements};"
    for i in range(0, elements, 4):
        four = ", ".join(f"${n}" for n in range(i, i + 4))
        code += f"ld.shared.v4.b32 {{{four}}}, [a + {4 * i * THREADS.value}];"
    return code + "}", ",".join(["=r"] * elements + ["r"] * elements)


@gluon.jit
def load_half(at, like):
    """Loads the sums that were sent, at an address of shared memory, as `like` [ROWS, half of
    DIM_V]."""
    ELEMENTS: gl.constexpr = like.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = loading(ELEMENTS)
    return gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [gl.full(like.shape, 0, at.dtype, like.type.layout) + at],
        dtype=gl.float32,
        is_pure=False,
        pack=ELEMENTS,
    )


@gluon.jit
def received_of_rows(at, like):
    """Loads the numbers that a thread was sent for its two rows, 8 bytes apart, as `like`
    [ROWS]."""
    zero = gl.full(like.shape, 0, gl.int32, like.type.layout)
    return gl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %tid.x; shl.b32 t, t, 4; add.u32 t, t, $2;"
        "ld.shared.f32 $0, [t]; ld.shared.f32 $1, [t + 8]; }",
        "=f,=f,r,r",
        [zero + at],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def quickly(CODE: gl.constexpr, x):
    """Runs an approximate instruction (CODE), exact but for the last bits."""
    return gl.inline_asm_elementwise(CODE, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def merge_pair(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    item,  # Item
    program,  # PrefillProgram
    CONFIG: gl.constexpr,
):
    """Merges the two splits of the only row tile of a lane and stores the results."""
    ROWS: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    M: gl.constexpr = gl.SliceLayout(1, L)
    halves = cleared(acc, l).reshape([ROWS, 2, HALF]).permute((0, 2, 1)).split()
    first = gl.convert_layout(halves[0], L, assert_trivial=True)
    second = gl.convert_layout(halves[1], L, assert_trivial=True)
    l = gl.convert_layout(l, M, assert_trivial=True)
    m = gl.convert_layout(m, M, assert_trivial=True)
    wait_cluster()  # both run
    if item.split % PAIR == 0:  # with a number that is known nothing is chosen from registers
        merge_half(Half(first, l, m), second, item, program, CONFIG, 0)
    else:
        merge_half(Half(second, l, m), first, item, program, CONFIG, 1)


@gluon.jit
def half_received(half):
    """The Half of both programs of a cluster, not yet divided; with the weights by which the sums
    of each are to be multiplied and the address of those received."""
    BYTES: gl.constexpr = bytes_of_half(2 * half.acc.shape[1])
    OF_ROWS: gl.constexpr = BYTES - 16 * THREADS
    base = exchange_at(pair_exchange_bytes(2 * half.acc.shape[1]))
    wait_at(base + BYTES, 0)
    m_other = received_of_rows(base + OF_ROWS, half.m)
    l_other = received_of_rows(base + (OF_ROWS + 4), half.m)
    highest = gl.maximum(half.m, m_other)
    top = finite_or_zero(highest)
    weight, weight_other = gl.exp2(half.m - top), gl.exp2(m_other - top)
    l = half.l * weight + l_other * weight_other
    return PairSums(l, highest, weight, weight_other, base)


@gluon.jit
def half_rows(like, m, item, results, CONFIG: gl.constexpr, SPLIT: gl.constexpr):
    """The HalfRows of a half of the columns, `like` [ROWS, half of DIM_V]."""
    ROWS: gl.constexpr = like.shape[0]
    HALF: gl.constexpr = like.shape[1]
    PACK: gl.constexpr = CONFIG.packed_heads
    rows = gl.arange(0, ROWS, layout=m.type.layout)
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, like.type.layout))[None, :]
    ok = rows < CONFIG.cluster_rows
    t = rows // PACK
    head = item.head + rows % PACK
    steps = results.merging.out_strides
    out_rows = item.b.to(gl.int64) * steps.b + t.to(gl.int64) * steps.t + head * steps.h
    # TMA takes no other strides
    out_rows = tl.multiple_of(out_rows, 8)
    out_ptrs = results.out_ptr + SPLIT * HALF + (along_rows(out_rows, like) + columns)
    lse_rows = item.b.to(gl.int64) * results.stride_lse_b
    lse_rows += head.to(gl.int64) * results.stride_lse_h + t
    return HalfRows(ok, head, out_ptrs, lse_rows)


@gluon.jit
def sink_of_rows(sink_ptr, rows):
    """The sink logits of HalfRows in base 2 [ROWS], or None."""
    sink_log2 = None
    if sink_ptr is not None:
        sink_log2 = gl.load(sink_ptr + rows.head, mask=rows.ok, other=0.0).to(gl.float32)
        sink_log2 *= 1.4426950408889634
    return sink_log2


@gluon.jit
def store_half_results(out, l, m, rows, results, SPLIT: gl.constexpr):
    """Stores half of the columns of out [ROWS, half of DIM_V] and, once, lse."""
    gl.store(rows.out_ptrs, out.to(results.out_ptr.dtype.element_ty), mask=along_rows(rows.ok, out))
    if SPLIT == 0:
        gl.store(results.lse_ptr + rows.lse_rows, lse_of(l, m), mask=rows.ok)


@gluon.jit
def merge_half(
    half,  # Half that this program merges
    rest,  # [ROWS, half of DIM_V]: the other half
    item,  # Item
    program,  # PrefillProgram
    CONFIG: gl.constexpr,
    SPLIT: gl.constexpr,  # of the pair: whose half it is
):
    """Sends one half of the columns to the other program of the cluster; merges and stores the
    other half."""
    results = program.results
    acc = half.acc
    store_half(rest, half.l, half.m, gl.to_tensor(1 - SPLIT), CONFIG.cluster_rows)
    rows = half_rows(acc, half.m, item, results, CONFIG, SPLIT)
    sink_log2 = sink_of_rows(results.sink_ptr, rows)
    pair = half_received(half)
    factor = factor_of(pair.l, pair.m, sink_log2)
    out = acc * along_rows(pair.weight * factor, acc)
    out += load_half(pair.received, acc) * along_rows(pair.weight_other * factor, acc)
    store_half_results(out, pair.l, pair.m, rows, results, SPLIT)


@gluon.jit
def factor_of(l, m, sink_log2):
    """The factor of the sums of rows at the end [ROWS]."""
    if sink_log2 is None:
        factor = quickly("rcp.approx.ftz.f32 $0, $1;", gl.where(l == 0.0, 1.0, l))
    else:
        factor = factor_beside_sink(m, l, sink_log2)
    return factor


@gluon.jit
def lse_of(l, m):
    """The natural LSE [ROWS] of m in base 2."""
    return (m + quickly("lg2.approx.ftz.f32 $0, $1;", l)) * 0.6931471805599453
