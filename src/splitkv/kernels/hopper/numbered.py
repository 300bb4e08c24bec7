"""Barriers of the hardware, by number: a block has 16, of which Triton takes the first ones.

A warp arrives by itself, where at a barrier in shared memory its warps would have to meet first, at
every arrival and at every wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST = gl.constexpr(4)  # Triton has one for the first warps, one to begin, one for each role
PHASES = gl.constexpr(3)  # of steps: those who make tiles ready are less than three steps ahead
READY = gl.constexpr(2)  # slots for what has been made ready


class Numbers(NamedTuple):
    """Which barriers say what in `hopper_prefill_quantised`, and to how many threads.

    warpgroups  that multiply, each of which is told apart from the others that a step may begin
    k_free      the first of those that say that a slot of keys is free again, k_threads take part
    v_free      of values, v_threads
    """

    warpgroups: Any
    k_free: Any
    k_threads: Any
    v_free: Any
    v_threads: Any


WAIT = gl.constexpr("bar.sync $1, $2; mov.b32 $0, 0;")
ARRIVE = gl.constexpr("bar.arrive $1, $2; mov.b32 $0, 0;")
# The first warps of a program are those that multiply.
WAIT_FOR_STEP = gl.constexpr("""{
    .reg .b32 id;
    mov.u32 id, %tid.x;
    shr.u32 id, id, 7;
    mad.lo.u32 id, $1, $2, id;
    add.u32 id, id, 4;
    bar.sync id, 256;
    mov.b32 $0, 0;
    }""")
BEGIN_STEP = gl.constexpr("""{
    .reg .b32 id;
    .reg .pred two;
    mad.lo.u32 id, $1, $2, 4;
    bar.arrive id, 256;
    setp.gt.u32 two, $2, 1;
    add.u32 id, id, 1;
    @two bar.arrive id, 256;
    mov.b32 $0, 0;
    }""")


@gluon.jit
def at_number(CODE: gl.constexpr, number, other):
    """Instructions with operands $1 and $2."""
    number = gl.to_tensor(number)
    gl.inline_asm_elementwise(
        CODE,
        "=r,r,r",
        [number, number * 0 + other],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def arrive(number, threads):
    """Arrive, without waiting for the others."""
    at_number(ARRIVE, number, threads)


@gluon.jit
def wait(number, threads):
    """Arrive, and wait for the others."""
    at_number(WAIT, number, threads)


@gluon.jit
def wait_for_step(n, numbers):
    """Wait until the keys of step n and the values of the step before are ready."""
    at_number(WAIT_FOR_STEP, n % PHASES, numbers.warpgroups)


@gluon.jit
def begin_step(n, numbers):
    """Say so, as each of 128 threads that make tiles ready."""
    at_number(BEGIN_STEP, n % PHASES, numbers.warpgroups)
