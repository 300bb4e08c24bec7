"""Barriers of the hardware, by number: a block has 16, of which Triton takes the first ones.

A warp arrives by itself, where at a barrier in shared memory its warps would have to meet first, at
every arrival and at every wait.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.limits import hopper_prefill_quantised

FIRST = gl.constexpr(4)  # Triton has one for the first warps, one to begin, one for each role
PHASES = gl.constexpr(3)  # of steps: those who make tiles ready are less than three steps ahead
READY = gl.constexpr(hopper_prefill_quantised.READY)  # slots for what has been made ready


class Numbers(NamedTuple):
    """Which barriers say what in `hopper_prefill_quantised`, and to how many threads.

    warpgroups  that multiply, each of which is told apart from the others that a step may begin
    k_free      the first of those that say that a slot of keys is free again, k_threads take part
    v_free      of values, v_threads
    turns       the first of those by which two warpgroups take turns at issuing products, or None:
                either may at any time
    """

    warpgroups: Any
    k_free: Any
    k_threads: Any
    v_free: Any
    v_threads: Any
    turns: Any


WAIT = gl.constexpr("bar.sync $1, $2;")
MEET = gl.constexpr("barrier.sync $1, $2;")
ARRIVE = gl.constexpr("bar.arrive $1, $2;")
# The first warps of a program are those that multiply.
WAIT_FOR_STEP = gl.constexpr(f"""{{
    .reg .b32 id;
    mov.u32 id, %tid.x;
    shr.u32 id, id, 7;
    mad.lo.u32 id, $1, $2, id;
    add.u32 id, id, {FIRST.value};
    bar.sync id, 256;
    }}""")
BEGIN_STEP = gl.constexpr(f"""{{
    .reg .b32 id;
    .reg .pred two;
    mad.lo.u32 id, $1, $2, {FIRST.value};
    bar.arrive id, 256;
    setp.gt.u32 two, $2, 1;
    add.u32 id, id, 1;
    @two bar.arrive id, 256;
    }}""")
GIVE_FIRST_TURN = gl.constexpr("""{
    .reg .b32 id;
    .reg .pred other;
    mov.u32 id, %tid.x;
    setp.ge.u32 other, id, 128;
    @other bar.arrive $1, $2;
    }""")
WAIT_FOR_TURN = gl.constexpr("""{
    .reg .b32 id;
    mov.u32 id, %tid.x;
    shr.u32 id, id, 7;
    add.u32 id, id, $1;
    bar.sync id, $2;
    }""")
PASS_TURN = gl.constexpr("""{
    .reg .b32 id;
    mov.u32 id, %tid.x;
    shr.u32 id, id, 7;
    xor.b32 id, id, 1;
    add.u32 id, id, $1;
    bar.arrive id, $2;
    }""")


@gluon.jit
def at_number(CODE: gl.constexpr, number, other):
    """Runs PTX instructions with two run-time integers, $1 and $2: the number of a barrier and its
    threads."""
    zero = gl.program_id(0) * 0
    run_ptx(CODE, "r,r", (zero + number, zero + other))


@gluon.jit
def arrive(number, threads):
    """Arrives at a barrier without waiting for the other threads."""
    at_number(ARRIVE, number, threads)


@gluon.jit
def wait(number, threads):
    """Arrives at a barrier and waits for the other threads."""
    at_number(WAIT, number, threads)


@gluon.jit
def meet(number, threads):
    """Arrives at a barrier and waits for warps that reach it from other roles, which run other
    code: `bar.sync` is defined only if all who wait at a barrier do so by one instruction, so all
    roles call this function."""
    at_number(MEET, number, threads)


@gluon.jit
def wait_for_step(n, numbers):
    """Waits until the keys of step n and the values of the step before are ready to be
    multiplied."""
    at_number(WAIT_FOR_STEP, n % PHASES, numbers.warpgroups)


@gluon.jit
def begin_step(n, numbers):
    """Tells the mma warpgroups that a step is ready; called by each of the 128 threads that convert
    tiles."""
    at_number(BEGIN_STEP, n % PHASES, numbers.warpgroups)


@gluon.jit
def give_first_turn(numbers):
    """Lets the first warpgroup issue products; called by the second, once, before the loop."""
    if numbers.turns is not None:
        at_number(GIVE_FIRST_TURN, numbers.turns, 256)


@gluon.jit
def wait_for_turn(numbers):
    """Waits until it is this warpgroup's turn to issue products."""
    if numbers.turns is not None:
        at_number(WAIT_FOR_TURN, numbers.turns, 256)


@gluon.jit
def pass_turn_on(numbers):
    """Gives the turn to issue products to the other warpgroup."""
    if numbers.turns is not None:
        at_number(PASS_TURN, numbers.turns, 256)
