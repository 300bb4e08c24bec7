"""Votes: whether any thread of a warp, or of all that multiply, has a number above a limit.

The answer is a predicate that PTX knows and LLVM does not: so each warp has it for itself, without
shared memory, and branches by it. A kernel declares one for each role that votes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.inline_asm import run_ptx_alone
from splitkv.kernels.hopper.primitives.named_barriers import VOTE


@gluon.jit
def declare_any(W: gl.constexpr):
    """The register of `any_above` of warpgroup W."""
    run_ptx_alone(declared_any(W))


@gluon.constexpr_function
def declared_any(W):
    return f".reg .pred any_{W};"


@gluon.constexpr_function
def asking_any(W, elements, limit, threads):
    """Instructions that compare so many numbers of each thread of a warp, or of a program of so
    many threads, three at a time, and constraints."""
    vote = f"vote.sync.any.pred any_{W}, some, 0xffffffff;"
    if threads > 32:
        vote = f"barrier.cta.red.or.pred any_{W}, {VOTE.value}, {threads}, some;"
    outputs = elements // 4 if elements > 4 else elements
    left = [f"${outputs + i}" for i in range(elements)]
    code, n = "{ .reg .pred some;", 0
    while len(left) > 1:
        after = []
        for i in range(0, len(left), 3):
            some = left[i : i + 3]
            if len(some) > 1:
                code += f".reg .b32 m{n}; max.s32 m{n}, {some[0]}, {some[1]};"
                if len(some) > 2:
                    code += f"max.s32 m{n}, m{n}, {some[2]};"
                after.append(f"m{n}")
                n += 1
            else:
                after.append(some[0])
        left = after
    code += f"setp.gt.s32 some, {left[0]}, {limit}; {vote}"
    code += "".join(f"mov.b32 ${i}, 0;" for i in range(outputs)) + "}"
    return code, ",".join(["=r"] * outputs + ["r"] * elements)


@gluon.constexpr_function
def answering_any(W):
    return f"selp.b32 $0, 1, 0, any_{W};"


@gluon.constexpr_function
def numbers_of_thread(x):
    """How many numbers of x [rows, ..] a thread has."""
    count = 2 if len(x.shape) == 1 else 1
    for size in x.shape[1:]:
        count *= size
    return count if len(x.shape) == 1 else count // 2


@gluon.jit
def any_above(x, LIMIT: gl.constexpr, W: gl.constexpr):
    """Whether a warp has a number above that with the bits LIMIT, or NaN, among its rows of x
    [rows, columns].

    Numbers are compared as integers, which is right where one is positive. The answer is in a
    register that PTX knows and LLVM does not: so a warp has it for itself, without shared memory.
    """
    return any_among(x, numbers_of_thread(x), LIMIT, W, 32)


@gluon.jit
def any_among(
    x, ELEMENTS: gl.constexpr, LIMIT: gl.constexpr, W: gl.constexpr, THREADS: gl.constexpr
):
    """`any_above` of so many numbers of each of so many threads: a warp, or all of a program."""
    ASK: gl.constexpr = asking_any(W, ELEMENTS, LIMIT, THREADS)
    gl.inline_asm_elementwise(
        ASK[0],
        ASK[1],
        [x],
        dtype=gl.int8 if ELEMENTS > 4 else gl.int32,
        is_pure=False,
        pack=ELEMENTS,
    )
    ANSWER: gl.constexpr = answering_any(W)
    some = gl.inline_asm_elementwise(
        ANSWER, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )
    return some != 0
