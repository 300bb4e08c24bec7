"""Sums, maxima and factors of rows of tiles in the layouts of wgmma.

There a thread has, of a row, two neighbours of every eight columns, and as many of the row 8 below;
the four threads that share a row are neighbours in a warp. Sums of weights stay apart by thread,
[rows, 4], until the last tile: so no step shuffles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.named_barriers import NEVER


@gluon.jit
def along_rows(x, like):
    """x [rows] beside `like` [rows, columns]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


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


@gluon.constexpr_function
def rescaling(elements):
    """The instructions of `rescaled` for so many sums of a thread, and their constraints."""
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
def rescaled(acc, by):
    """Rescales acc [ROWS, DIM_V] by `by` [ROWS]; a warp in which that is 1 for all rows branches
    over it. A thread has two columns of a row, two of the row 8 below, and so on."""
    ELEMENTS: gl.constexpr = acc.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = rescaling(ELEMENTS)
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
    """The instructions of `added_before_wait` for so many sums of a thread, and constraints."""
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
def added_before_wait(acc, product):
    """acc + product, before the next wait for a product: see `hold_sums`. What no sum can be is
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
