"""Merging the parts of a sequence inside one launch: its programs are a cluster.

Programs of a cluster run at the same time and write to each other's shared memory. Each sends every
other one a slice of its sums, they meet once, and each merges the slice of all parts that it was
sent, in order, so that bits do not vary.

Gluon has no address of shared memory, so what they exchange lies behind all that Triton gave out:
the launch asks for `exchange_bytes` more than the kernel was compiled with.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.effect import act, act_alone
from splitkv.kernels.hopper.halves import first_of, first_rows, layout_of_half
from splitkv.kernels.tile.softmax import finish, finite_or_zero

# Parts of a sequence that may be a cluster. Every GPU of sm_90 runs clusters of 8; of 16, which not
# all do, no plan was faster.
CLUSTERS = (2, 4, 8)


@gluon.constexpr_function
def exchange_bytes(rows, head_dim_v, parts):
    """acc [parts, rows, head_dim_v / parts], m and l [parts, rows] in fp32."""
    return 4 * rows * (head_dim_v + 2 * parts)


@gluon.jit
def arrive_running(CLUSTER: gl.constexpr):
    """Tell the cluster, if there is one, that this program runs; to be met by `wait_cluster`."""
    if CLUSTER:
        act_alone("barrier.cluster.arrive.relaxed.aligned;")


@gluon.jit
def arrive_written():
    """Tell the cluster that what this program sent is there."""
    act_alone("barrier.cluster.arrive.release.aligned;")


@gluon.jit
def wait_cluster():
    act_alone("barrier.cluster.wait.acquire.aligned;")


@gluon.jit
def exchange_at(BYTES: gl.constexpr):
    """Where in this program's shared memory the exchange is."""
    end = gl.inline_asm_elementwise(
        "{ .reg .u32 a; mov.u32 a, %dynamic_smem_size; mov.u32 $0, global_smem; "
        "add.u32 $0, $0, a; }",
        "=r,r",
        [gl.program_id(0) * 0],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return end - BYTES


@gluon.jit
def wait_at(barrier, phase):
    """Wait for a barrier by its address in this program's shared memory."""
    CODE: gl.constexpr = """{
        .reg .pred done;
        AGAIN:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
        @!done bra.uni AGAIN;
        }"""
    act(CODE, "r,r", (barrier, phase))


@gluon.jit
def send(at, to, x, ok):
    """Store pairs of numbers at the same address of other programs of the cluster."""
    gl.inline_asm_elementwise(
        """{
        .reg .u32 a;
        .reg .pred p;
        setp.ne.u32 p, $8, 0;
        mapa.shared::cluster.u32 a, $2, $4;
        @p st.shared::cluster.v2.f32 [a], {$6, $7};
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        }""",
        "=r,=r,r,r,r,r,r,r,r,r",
        [at, to, x, ok.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def send_one(at, to, x, ok):
    """The same of single numbers."""
    CODE: gl.constexpr = """{
        .reg .u32 a;
        .reg .pred p;
        setp.ne.u32 p, $4, 0;
        mapa.shared::cluster.u32 a, $1, $2;
        @p st.shared::cluster.f32 [a], $3;
        }"""
    act(CODE, "r,r,r,r", (at, to, x, ok.to(gl.int32)))


@gluon.jit
def received(at):
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [at],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def merge_cluster(
    final,  # Final
    row,  # Row
    acc,  # [TILE_M, DIM_V]
    m,  # [TILE_M], in base 2
    l,
    row_ok,
    part,  # the place of this program in its cluster
    b,
    h,
    first_row,
    seqlen_q,
    num_kv_heads,
    stride_ob,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,  # of TILE_M
    PARTS: gl.constexpr,
):
    """Merge the parts that the programs of a cluster have, and store the result."""
    DIM_V: gl.constexpr = acc.shape[1]
    acc = gl.convert_layout(acc, m.type.layout.parent)
    if ROWS <= 8:
        acc = first_rows(acc, layout_of_half(DIM_V, gl.num_warps()))
        OF_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        m, l = first_of(m, OF_ROWS), first_of(l, OF_ROWS)
        row_ok = first_of(row_ok.to(gl.int32), OF_ROWS) > 0
    S: gl.constexpr = acc.type.layout
    TILE_M: gl.constexpr = acc.shape[0]
    SLICE: gl.constexpr = DIM_V // PARTS
    ROW_BYTES: gl.constexpr = 4 * SLICE
    PART_BYTES: gl.constexpr = ROWS * ROW_BYTES
    STATISTICS: gl.constexpr = ROWS * 4 * DIM_V  # m, then l
    base = exchange_at(exchange_bytes(ROWS, DIM_V, PARTS))

    offs_m = gl.arange(0, TILE_M, layout=gl.SliceLayout(1, S))[:, None]
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, S))[None, :]
    ok = row_ok[:, None]
    at = base + part * PART_BYTES + offs_m * ROW_BYTES + offs_v % SLICE * 4
    wait_cluster()  # all of them run
    send(at, offs_v // SLICE + offs_m * 0, acc, ok & (offs_v >= 0))
    WIDTH: gl.constexpr = 8 * gl.num_warps()
    to = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, S))[None, :]
    every = ok & (to < PARTS)
    at = base + STATISTICS + (part * ROWS + offs_m) * 4 + to * 0
    zero = gl.zeros([TILE_M, WIDTH], gl.float32, S)
    send_one(at, to + offs_m * 0, m[:, None] + zero, every)
    send_one(at + PARTS * ROWS * 4, to + offs_m * 0, l[:, None] + zero, every)
    arrive_written()

    COLUMNS: gl.constexpr = min(SLICE, 32)
    L: gl.constexpr = gl.BlockedLayout(
        [1, max(SLICE // 32, 1)], [32 // COLUMNS, COLUMNS], [gl.num_warps(), 1], [1, 0]
    )
    M: gl.constexpr = gl.SliceLayout(1, L)
    offs = gl.arange(0, TILE_M, layout=M)
    columns = gl.arange(0, SLICE, layout=gl.SliceLayout(0, L))[None, :]
    rows = first_row + offs
    ok = rows < seqlen_q * GROUP
    t = rows // GROUP
    head = h * GROUP + rows % GROUP
    sink_log2 = None
    if row.sink_ptr is not None:
        sink_log2 = gl.load(row.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
        sink_log2 *= 1.4426950408889634
    out_rows = b.to(gl.int64) * stride_ob + t.to(gl.int64) * stride_ot + head * stride_oh
    out_ptrs = final.out_ptr + out_rows[:, None] + part * SLICE + columns
    there = gl.minimum(offs, ROWS - 1)
    mine = base + there[:, None] * ROW_BYTES + columns * 4
    of_rows = base + STATISTICS + there * 4
    wait_cluster()
    m = gl.full([TILE_M], float("-inf"), gl.float32, M)
    for p in gl.static_range(PARTS):
        m = gl.maximum(m, received(of_rows + p * ROWS * 4))
    top = finite_or_zero(m)
    l = gl.zeros([TILE_M], gl.float32, M)
    acc = gl.zeros([TILE_M, SLICE], gl.float32, L)
    for p in gl.static_range(PARTS):
        weight = gl.exp2(received(of_rows + p * ROWS * 4) - top)
        l += weight * received(of_rows + (PARTS + p) * ROWS * 4)
        acc += weight[:, None] * received(mine + p * PART_BYTES)
    out, lse = finish(acc, m, l, sink_log2)
    gl.store(out_ptrs, out.to(final.out_ptr.dtype.element_ty), mask=ok[:, None])
    if final.lse_ptr is not None:
        lse_rows = (b * num_kv_heads * GROUP + head).to(gl.int64) * seqlen_q + t
        gl.store(final.lse_ptr + lse_rows, lse, mask=ok & (part == 0))
