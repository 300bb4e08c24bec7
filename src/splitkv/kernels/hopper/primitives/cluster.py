"""Clusters: programs that run together and write to each other's shared memory.

Gluon has no address of shared memory, so what they exchange lies behind all that Triton gave out:
the launch asks for as many bytes more than the kernel was compiled with.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.inline_asm import run_ptx, run_ptx_alone


@gluon.jit
def arrive_running(CLUSTER: gl.constexpr):
    """Tells the cluster that this program runs, for `wait_cluster`; CLUSTER: its size, or 0."""
    if CLUSTER > 0:
        run_ptx_alone("barrier.cluster.arrive.relaxed.aligned;")


@gluon.jit
def arrive_written():
    """Tells the cluster that what this program sent is there."""
    run_ptx_alone("barrier.cluster.arrive.release.aligned;")


@gluon.jit
def wait_cluster():
    """Waits until all programs of the cluster have arrived, and sees what they sent."""
    run_ptx_alone("barrier.cluster.wait.acquire.aligned;")


@gluon.jit
def exchange_at(BYTES: gl.constexpr):
    """The address of the exchange in this program's shared memory, BYTES before its end."""
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
    """Waits for a barrier by its address in this program's shared memory."""
    CODE: gl.constexpr = """{
        .reg .pred done;
        AGAIN:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
        @!done bra.uni AGAIN;
        }"""
    run_ptx(CODE, "r,r", (barrier, phase))


@gluon.jit
def send(at, to, x, ok):
    """Stores pairs of numbers at the same address of other programs of the cluster."""
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
    """Stores single numbers at the same address of other programs of the cluster."""
    CODE: gl.constexpr = """{
        .reg .u32 a;
        .reg .pred p;
        setp.ne.u32 p, $4, 0;
        mapa.shared::cluster.u32 a, $1, $2;
        @p st.shared::cluster.f32 [a], $3;
        }"""
    run_ptx(CODE, "r,r,r,r", (at, to, x, ok.to(gl.int32)))


@gluon.jit
def received(at):
    """Loads numbers that other programs have sent."""
    return gl.inline_asm_elementwise(
        "ld.shared.f32 $0, [$1];",
        "=f,r",
        [at],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )
