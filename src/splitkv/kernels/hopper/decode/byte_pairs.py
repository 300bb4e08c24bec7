"""Tiles of 8-bit keys and values as tiles of pairs: two elements of a row in 16 bits.

TMA, swizzle and ldmatrix work on 16 bits, so a tile of pairs moves as one of bf16 of half the
width. In registers a pair becomes two fp16 numbers, exactly. Products with them are two of half the
width. For the output they are with the even and the odd columns of values. Scores are the sum of
both, so that it matters only that q has its columns in the same order: of each four columns of keys
the first two go to one product, the others to the other, which takes fewer instructions.

q joins as fp16 too. A power of two a row, taken out of it, keeps what bf16 can hold; q below 2^-14
of the row's largest element may lose its last bits.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from splitkv.kernels.hopper.decode.eight_rows import above, both_halves
from splitkv.kernels.hopper.primitives.conversion import E4M3_TO_FP16, E5M2_TO_FP16
from splitkv.kernels.hopper.primitives.tma_ring import reinterpret
from splitkv.rounding import MIN_SCALE

# p and what it is multiplied with are fp16: the maximum that a row's weights are relative to has
# weight 2^SHIFT, and p is up to 8 times as large, so that what is 2^-24 of the largest is still a
# normal number. See key_scales.py for what scales of values do to that.
SHIFT = gl.constexpr(12.0)

# Which columns of four the two results of dequantizing pairs have.
EVEN_AND_ODD, IN_TWOS = gl.constexpr("even and odd"), gl.constexpr("in twos")
E4M3_EVEN_AND_ODD = gl.constexpr("""{
    .reg .b32 u;
    .reg .b16 even, odd;
    prmt.b32 u, $2, $2, 0x3120;
    mov.b32 {even, odd}, u;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }""")
E5M2_EVEN_AND_ODD = gl.constexpr("""{
    .reg .b32 u;
    mov.b32 u, $2;
    prmt.b32 $0, u, 0, 0x2404;
    prmt.b32 $1, u, 0, 0x3414;
    }""")
LEAST_UNIT = gl.constexpr(MIN_SCALE)
LOW_BYTES = gl.constexpr("""{
    .reg .b32 low, high;
    prmt.b32 low, $1, $2, 0x0040;
    prmt.b32 high, $3, $4, 0x0040;
    prmt.b32 $0, low, high, 0x5410;
    }""")


def pairs_of(x: Any) -> Any:
    """Views two 8-bit elements of K or V as one of 16 bits; other types stay."""
    if x.element_size() > 1:
        return x
    import torch

    return x.view(torch.int16)


@gluon.constexpr_function
def int8_to_fp16(order):
    """Instructions that dequantize four int8 to two pairs of fp16, in this order of columns."""
    selectors = {"even and odd": ("0x4240", "0x4341"), "in twos": ("0x4140", "0x4342")}
    first, second = selectors[order]
    return f"""{{
    .reg .b32 u, shift;
    mov.b32 shift, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 $0, u, 0x64646464, {first};
    prmt.b32 $1, u, 0x64646464, {second};
    sub.f16x2 $0, $0, shift;
    sub.f16x2 $1, $1, shift;
    }}"""


@gluon.jit
def two_words(CODE: gl.constexpr, pairs):
    """Runs instructions that make two words of fp16 of each word of pairs."""
    return gl.inline_asm_elementwise(
        CODE,
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def from_int8(pairs, ORDER: gl.constexpr):
    """Dequantizes pairs of int8 to two tensors of fp16: of each four columns, EVEN_AND_ODD ones, or
    the first and the last IN_TWOS. The byte plus 128 is the low byte of 1024 + it in fp16."""
    CODE: gl.constexpr = int8_to_fp16(ORDER)
    return two_words(CODE, pairs)


@gluon.jit
def from_e4m3(pairs, ORDER: gl.constexpr):
    """Dequantizes pairs of e4m3 to two tensors of fp16, in the ORDER of `from_int8`."""
    CODE: gl.constexpr = E4M3_EVEN_AND_ODD if ORDER == EVEN_AND_ODD else E4M3_TO_FP16
    return two_words(CODE, pairs)


@gluon.jit
def from_e5m2(pairs, ORDER: gl.constexpr):
    """Dequantizes pairs of e5m2 to two tensors of fp16, in the ORDER of `from_int8`."""
    CODE: gl.constexpr = E5M2_EVEN_AND_ODD if ORDER == EVEN_AND_ODD else E5M2_TO_FP16
    return gl.inline_asm_elementwise(
        CODE,
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def pairs_apart(q):
    """Splits rows of q in [rows, columns / 2]: the first and the last two of four columns."""
    pairs = q.reshape([q.shape[0], q.shape[1] // 4, 2, 2]).permute((0, 1, 3, 2))
    return pairs.reshape([q.shape[0], q.shape[1] // 2, 2]).split()


@gluon.jit
def operand_of_bytes(q, A: gl.constexpr, USED_ROWS: gl.constexpr):
    """Rounds rows of q to int8 as an mma operand: (operand, unit), q = operand * unit. Where fewer
    rows are used than the tile has, only these are rounded and the others are 0."""
    if q.shape[0] > USED_ROWS:
        q, zeros = both_halves(q)
        q, unit = rounded_rows(q)
        q = above(q, zeros)
    else:
        q, unit = rounded_rows(q)
    return gl.convert_layout(q, A, assert_trivial=True), unit


@gluon.jit
def of_all_rows(unit, TILE_M: gl.constexpr, M: gl.constexpr):
    """Converts a number of each row, or of each of the first eight of 16, to [TILE_M] in layout
    M."""
    if unit.shape[0] < TILE_M:
        unit = gl.join(unit, unit).permute((1, 0)).reshape([TILE_M])
    return gl.convert_layout(unit, M)


@gluon.constexpr_function
def fours_of_rows(rows, dim, warps):
    """The layout of rows of q [rows, dim] in which each warp has all and a thread four neighbours
    of a row: the pairs that it multiplies with pairs of keys."""
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    registers = [[0, 1], [0, 2], [8, 0]] + [[0, 1 << i] for i in range(4, dim.bit_length() - 1)]
    registers += [[1 << i, 0] for i in range(4, rows.bit_length() - 1)]
    of_warps = (warps.bit_length() - 1) * [[0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [rows, dim])


@gluon.jit
def first_of_pairs(offs_d):
    """The columns of q that the first product takes with pairs `offs_d` of keys; the second product
    takes those two further."""
    return 2 * offs_d - offs_d % 2


@gluon.jit
def no_unit(TILE_M: gl.constexpr, A: gl.constexpr):
    """Units [TILE_M] of 1, for q that is not scaled."""
    return gl.full([TILE_M], 1.0, gl.float32, gl.SliceLayout(1, A))


@gluon.jit
def scaled_pairs(even, odd):
    """Scales columns of q of both products to fp16 by a power of two a row: (q, q_odd, unit)."""
    even, odd = even.to(gl.float32), odd.to(gl.float32)
    top = gl.maximum(gl.max(gl.abs(even), 1), gl.max(gl.abs(odd), 1))
    unit, inverse = power_of_row(top)
    inverse = inverse[:, None]
    return (even * inverse).to(gl.float16), (odd * inverse).to(gl.float16), unit


@gluon.jit
def larger(x, y):
    """The larger of both, NaN where one of them is."""
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def rounded_rows(q):
    """Rounds rows to int8: (q / unit, unit), in the layout of `fours_of_rows`, or half of it. A row
    that has NaN or infinity has the unit NaN."""
    x = q.to(gl.float32)
    top = gl.reduce(gl.abs(x), 1, larger)
    unit = gl.maximum(top * (1.0 / 127.0), LEAST_UNIT, propagate_nan=tl.PropagateNan.ALL)
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [unit], dtype=gl.float32, is_pure=True, pack=1
    )
    x = x * inverse[:, None] + 12582912.0  # 1.5 * 2 ** 23: the nearest integer is in low bits
    q = gl.inline_asm_elementwise(LOW_BYTES, "=r,r,r,r,r", [x], dtype=gl.int8, is_pure=True, pack=4)
    unit = gl.where(unit < float("inf"), unit, float("nan"))
    return q, unit


@gluon.constexpr_function
def bytes_layout(layout):
    """The layout of a tile of pairs, for the same tile of single bytes."""
    bases = [[0, 1]] + [[row, 2 * column] for row, column in layout.offset_bases]
    return gl.SharedLinearLayout(bases, [], layout.alignment)


@gluon.jit
def scores_of_tile(q, k, S: gl.constexpr, dequantize: gl.constexpr):
    """Computes q @ k^T [TILE_M, TILE_N] of a QueryTile and k [TILE_N, DIM] in shared memory, as it
    is or as pairs."""
    TILE_M: gl.constexpr = q.even.shape[0]
    TILE_N: gl.constexpr = k.shape[0]
    if q.even.dtype == gl.int8:
        BYTES: gl.constexpr = bytes_layout(k.layout)
        k = reinterpret(k, gl.int8, [TILE_N, 2 * k.shape[1]], BYTES).permute((1, 0))
        zeros = gl.zeros([TILE_M, TILE_N], gl.int32, S)
        s = mma_v2(q.even, k.load(gl.DotOperandLayout(1, S, 4)), zeros).to(gl.float32)
    else:
        zeros = gl.zeros([TILE_M, TILE_N], gl.float32, S)
        k = k.permute((1, 0)).load(gl.DotOperandLayout(1, S, 2))
        s = product(q.even, q.odd, k, zeros, dequantize)
    return s


@gluon.jit
def power_of_row(top):
    """(2^e, 2^-e): the power of two below the largest element of a row, exponents 1 to 253."""
    bits = top.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    return bits.to(gl.float32, bitcast=True), inverse


@gluon.jit
def product(q, q_odd, k, zeros, dequantize: gl.constexpr):
    """Computes q @ k, k as it is or as pairs."""
    if dequantize is None:
        s = mma_v2(q, k, zeros)
    else:
        even, odd = dequantize(k, IN_TWOS)
        s = mma_v2(q, even, zeros) + mma_v2(q_odd, odd, zeros)  # neither waits for the other
    return s


@gluon.jit
def add_pair_values(acc, acc_odd, p, v, dequantize: gl.constexpr):
    """Accumulates p @ v in (acc, acc_odd), v as it is (acc alone) or as pairs."""
    if dequantize is None:
        acc = mma_v2(p, v, acc)
    else:
        even, odd = dequantize(v, EVEN_AND_ODD)
        acc = mma_v2(p, even, acc)
        acc_odd = mma_v2(p, odd, acc_odd)
    return acc, acc_odd


@gluon.jit
def both_columns(even, odd):
    """Interleaves the even and the odd columns: [rows, 2 * columns]."""
    return gl.join(even, odd).reshape([even.shape[0], 2 * even.shape[1]])
