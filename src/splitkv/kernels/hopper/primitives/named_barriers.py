"""Barriers of the hardware, by number: a program has 16, and all that these kernels use are here.

A warp arrives at one by itself, where at an mbarrier the warps of a role would have to meet first,
at every arrival and at every wait.

    0            Triton's, for the warps of the first role
    1            Triton's, where roles begin and end
    2, 3, ..     Triton's, for each further role in which warps meet
    4 to 15      `hopper_prefill_quantised`: NamedBarriers
    8, 9, 10     `hopper_prefill`, `hopper_prefill_half`: turns of three warpgroups
    9            decode: votes of all warps that multiply
    14           warpgroups that clear a tile together, but for `hopper_prefill_quantised`
    15           no warp comes to it: see scheduling_fences.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.hopper.primitives.tma_ring import thread_barrier
from splitkv.kernels.limits import hopper_prefill_quantised

FIRST = gl.constexpr(4)  # of NamedBarriers: there, 2 and 3 are those of the convert and load roles
FIRST_TURN = gl.constexpr(8)
VOTE = gl.constexpr(9)
ALL_CLEARED = gl.constexpr(14)
NEVER = gl.constexpr(15)
PHASES = gl.constexpr(3)  # of steps: the convert role is less than three steps ahead
READY = gl.constexpr(hopper_prefill_quantised.READY)  # stages of converted tiles


class NamedBarriers(NamedTuple):
    """The barriers of `hopper_prefill_quantised` beside mbarriers: numbers, and threads that meet.

    From FIRST on: PHASES for each of `warpgroups` that multiply, which say that a step may begin.

    v_empty     the first of READY that say that a stage of converted values has been read, at which
                v_threads meet
    k_empty     the same of keys, k_threads: of converted ones, or of stages of the ring where keys
                are multiplied as they are stored
    turns       the first of two by which two warpgroups take turns at issuing products, or None:
                either may at any time
    """

    warpgroups: Any
    k_empty: Any
    k_threads: Any
    v_empty: Any
    v_threads: Any
    turns: Any


WAIT = gl.constexpr("bar.sync $1, $2;")
MEET = gl.constexpr("barrier.sync $1, $2;")
ARRIVE = gl.constexpr("bar.arrive $1, $2;")
# $1 and $2 as in the functions below. The first warps of a program are those that multiply, so the
# number of a thread's warpgroup is tid / 128.
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
WAIT_OWN_TURN = gl.constexpr("""{
    .reg .b32 id;
    mov.u32 id, %tid.x;
    shr.u32 id, id, 7;
    add.u32 id, id, $1;
    bar.sync id, $2;
    }""")
PASS_TURN_ON = gl.constexpr("""{
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
def all_cleared(WARPGROUPS: gl.constexpr):
    """Waits until all warpgroups that clear a tile have done so, and makes it visible to their
    products."""
    fence_async_shared()
    if WARPGROUPS == 1:
        thread_barrier()
    else:
        meet(ALL_CLEARED, 128 * WARPGROUPS)


# --- turns at issuing products: each warpgroup is a role ---------------------------------------


@gluon.jit
def wait_turn(W: gl.constexpr):
    """Waits until warpgroup W may issue products; called by W."""
    wait(FIRST_TURN + W, 256)


@gluon.jit
def pass_turn(W: gl.constexpr):
    """Lets warpgroup W issue products; called by the one before. The last one calls it once before
    all steps, so that W = 0 begins."""
    arrive(FIRST_TURN + W, 256)


# --- turns at issuing products: two warpgroups are one role ------------------------------------


@gluon.jit
def give_first_turn(named):
    """Lets the first warpgroup issue products; called by both, once, before all steps."""
    if named.turns is not None:
        at_number(GIVE_FIRST_TURN, named.turns, 256)


@gluon.jit
def wait_own_turn(named):
    """Waits until the warpgroup of this thread may issue products."""
    if named.turns is not None:
        at_number(WAIT_OWN_TURN, named.turns, 256)


@gluon.jit
def pass_turn_on(named):
    """Lets the other warpgroup issue products."""
    if named.turns is not None:
        at_number(PASS_TURN_ON, named.turns, 256)


# --- steps, of the convert role and those that multiply ----------------------------------------


@gluon.jit
def begin_step(n, named):
    """Tells the mma warpgroups that step n is ready; called by the 128 threads of the convert
    role."""
    at_number(BEGIN_STEP, n % PHASES, named.warpgroups)


@gluon.jit
def wait_for_step(n, named):
    """Waits until the keys of step n and the values of the step before are ready to be
    multiplied."""
    at_number(WAIT_FOR_STEP, n % PHASES, named.warpgroups)
