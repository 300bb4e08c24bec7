"""Decode with at most eight packed rows: an mma tile has 16 rows, and softmax is computed for the
first eight alone.

A thread has, of each element of the first eight rows of a product, the one eight rows further, too.
Where that is nobody's, weights, sums and what q is rounded by are worked out for the first alone.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def layout_of_half(columns, warps):
    """The layout [8, columns] in which a thread has its part of the first eight of the 16 rows of
    an mma result."""
    registers = [[0, 1]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    log_warps = warps.bit_length() - 1
    of_warps = [[0, 8 << i] for i in range(log_warps)]
    registers += [[0, 1 << i] for i in range(3 + log_warps, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [8, columns])


@gluon.jit
def first_rows(x, LAYOUT: gl.constexpr):
    """Takes the first eight of 16 rows [16, columns]; a thread has both halves, so nothing
    moves."""
    first, others = both_halves(x)
    return gl.convert_layout(first, LAYOUT, assert_trivial=True)


@gluon.jit
def first_of(x, LAYOUT: gl.constexpr):
    """Takes the first eight numbers of [16] or [16, 1], as [8]."""
    x = x.reshape([2, 8])
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, x.type.layout))[:, None]
    x = gl.sum(gl.where(half == 0, x, 0), 0)
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def with_rows(x, rest, LAYOUT: gl.constexpr):
    """Joins the first eight rows and the rest to [16]."""
    x = gl.join(x, rest).permute((1, 0)).reshape([16])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def both_halves(x):
    """Splits [16, columns] into its first eight rows and the others."""
    return x.reshape([2, 8, x.shape[1]]).permute((1, 2, 0)).split()


@gluon.jit
def above(x, zeros):
    """Joins eight rows [8, columns] and zeros of 16 bits below to [16, columns]. The zeros are
    loaded: constants, ptxas would move into registers before every product."""
    if x.dtype == gl.int8:
        zeros = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [zeros], dtype=gl.int8, is_pure=True, pack=4
        )
    else:
        zeros = zeros.to(x.dtype, bitcast=True)
    return gl.join(x, zeros).permute((2, 0, 1)).reshape([16, x.shape[1]])
