"""From values to what is stored of them in 8 bits, to the bit as `reference.quantize` has it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """|x| in fp32, NaN as infinity: what the scale is made from."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_of(largest, MOST: tl.constexpr):
    """The scale by which `largest` becomes MOST, the largest stored value."""
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32)), 2.0**-100)


@triton.jit
def encode(x, scale, STORED: tl.constexpr):
    """x / scale as int8, or as the bits of e4m3 in uint8: nearest, ties to even, past the largest
    the largest. NaN is 0 in int8, which has none.

    The bits of e4m3 are made here and not by an instruction, as sm_80 and sm_86 have none.
    """
    MOST: tl.constexpr = 127.0 if tl.int8 == STORED else 448.0
    y = x.to(tl.float32) * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    number = y == y
    y = tl.minimum(tl.maximum(y, -MOST), MOST)
    if tl.int8 == STORED:
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: no room for a fraction
        code = tl.where(number, y, 0.0).to(tl.int8)
    else:
        code = tl.where(number, e4m3_bits(y), 0x7F).to(tl.uint8)
    return code


@triton.jit
def e4m3_bits(y):
    """The bits, in int32, of the e4m3 numbers nearest to y, which are at most 448."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # three bits of mantissa, rounded to even by what is cut off; exponents count from -7, not -127
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # below 2^-6 steps of 2^-9: those of fp32 from 2^14 on
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
