"""Sums of rows of what warpgroups multiply, in the layouts of wgmma."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.inline_asm import run_ptx_alone
from splitkv.kernels.hopper.primitives.named_barriers import NEVER, VOTE

SLACK = gl.constexpr(15.5)  # in base 2, by which weights of 16 bits may be larger than 1
TOO_LARGE = gl.constexpr(0x47000000)  # the bits of 2 ** 15: fp16 still has weights of 2 ** SLACK


class Quarters(NamedTuple):
    """Four parts of a tile, of different columns."""

    a: Any
    b: Any
    c: Any
    d: Any


@gluon.jit
def sums_of_threads(x):
    """[rows, 4]: of each row of x [rows, TILE_N], the sum of what each of four threads has."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    pairs = x.reshape([x.shape[0], EIGHTS, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def sums_of_fours(x):
    """[rows, TILE_N // 16, 4]: of each row of x [rows, TILE_N], sums of four that a thread has."""
    fours = x.reshape([x.shape[0], x.shape[1] // 16, 2, 4, 2])
    return gl.sum(gl.sum(fours, 4), 2)


@gluon.jit
def dot_of_threads(x, by):
    """Computes `sums_of_threads` of x times by [1, TILE_N]."""
    of = quarters(x)
    to = quarters(by.broadcast_to(x.shape))
    last = gl.fma(of.c, to.c, of.d * to.d)
    sums = gl.sum(gl.sum(gl.fma(of.a, to.a, gl.fma(of.b, to.b, last)), 3), 1)
    return gl.convert_layout(sums, sums_of_threads(x).type.layout, assert_trivial=True)


@gluon.jit
def quarters(x):
    """x [rows, TILE_N] as four of [rows, TILE_N // 32, 4, 2], of different columns."""
    some = x.reshape([x.shape[0], x.shape[1] // 32, 2, 2, 4, 2]).permute((0, 1, 4, 5, 2, 3))
    one, other = some.split()
    a, b = one.split()
    c, d = other.split()
    return Quarters(a, b, c, d)


@gluon.jit
def max_of_rows(x):
    """[rows]: the largest of each row of x [rows, TILE_N]. Of the 16 or 32 that a thread has of a
    row, eights are compared by themselves, so that none waits for all before it."""
    ROWS: gl.constexpr = x.shape[0]
    COUNT: gl.constexpr = x.shape[1] // 32
    fours = x.reshape([ROWS, COUNT, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    of_eight = gl.max(fours.reshape([ROWS, COUNT, 4, 8]), 3)
    most = gl.max(gl.max(of_eight, 1), 1)
    return gl.convert_layout(most, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def raised_maxima(m, highest):
    """The maximum of each row after one more tile: mostly the one before, so that sums stay as they
    are. The true maximum is at most `SLACK` above it.

    A row that grows has by itself a weight for which maxima are looked for (`TOO_LARGE`), and one
    that does not keeps its bits: what other rows of a warp see makes no difference to it.
    """
    return gl.where(highest > m + SLACK, highest, m)


@gluon.constexpr_function
def shrinking(elements):
    """Instructions that multiply so many sums of a thread, and their constraints: see `shrunk`."""
    sums, by = range(elements), elements * 2
    code = f"""{{
    .reg .pred some;
    setp.ne.f32 some, ${by}, 0f3F800000;
    setp.ne.or.f32 some, ${by + 2}, 0f3F800000, some;
    vote.sync.any.pred some, some, 0xffffffff;
    @!some bra.uni AS_IT_IS;
    """
    code += "".join(f"mul.rn.f32 ${i}, ${i}, ${by + i};" for i in sums)
    code += "AS_IT_IS: }"
    constraints = ["=r"] * elements + [str(i) for i in sums] + ["r"] * elements
    return code, ",".join(constraints)


@gluon.jit
def shrunk(acc, by):
    """acc times `by` [ROWS], passed over by warps in which that is 1 for all rows.

    A thread has two columns of a row, two of the row 8 below, and so on.
    """
    ELEMENTS: gl.constexpr = acc.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = shrinking(ELEMENTS)
    factors = along_rows(by, acc).broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [acc, factors],
        dtype=gl.float32,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.constexpr_function
def adding(elements):
    """Instructions that add so many sums of a thread, and their constraints: see `added_now`."""
    sums = range(elements)
    code = "{ .reg .pred never;"
    code += "".join(f"add.rn.f32 ${i}, ${i}, ${2 * elements + i};" for i in sums)
    code += "setp.eq.b32 never, $0, 0x7FFFDEAD; @!never bra.uni ADDED;"
    code += f" bar.sync {NEVER.value}, 128;"
    code += "".join(f"neg.f32 ${i}, ${i};" for i in sums)
    code += "ADDED: }"
    constraints = ["=r"] * elements + [str(i) for i in sums] + ["r"] * elements
    return code, ",".join(constraints)


@gluon.jit
def added_now(acc, product):
    """acc + product, before the next wait for a product: see `before_wait`. What no sum can be is
    asked in a branch, over which ptxas moves no addition."""
    ELEMENTS: gl.constexpr = acc.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = adding(ELEMENTS)
    return gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [acc, product],
        dtype=gl.float32,
        is_pure=False,
        pack=ELEMENTS,
    )


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


@gluon.jit
def along_rows(x, like):
    """x [rows] beside `like` [rows, columns]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]
