"""Tokens written into a cache: as they are, or in 8 bits, bit by bit as `rounding.quantize`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class StoredTensor(NamedTuple):
    """The keys of a cache, or its values, and how tokens are stored there.

    scale_ptr      their scales, or None: stored as they are
    mean_ptr       a mean that is subtracted first, or None
    strides        Strides of a slab (sequence or page), a key, a head
    scale_strides  those of the scales; t None: keys of a head share one, and b is of sequences
    """

    ptr: Any
    scale_ptr: Any
    mean_ptr: Any
    strides: Any
    scale_strides: Any


class Place(NamedTuple):
    """Where tokens go: the sequence, the slab or page and the key in it of each; and the head."""

    b: Any
    outer: Any
    inner: Any
    head: Any


@triton.constexpr_function
def largest_of(stored):
    """The largest value of a stored type; uint8 has the bits of e4m3."""
    return {tl.int8: 127.0, tl.float8e5: 57344.0}.get(stored, 448.0)


@triton.jit
def magnitude(x):
    """|x| in fp32, NaN as infinity: what the scale is made from."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_of(largest, MOST: tl.constexpr):
    """The scale by which `largest` becomes MOST, the largest stored value."""
    return tl.maximum(tl.div_rn(largest, MOST), 2.0**-100)


@triton.jit
def encode(x, scale, STORED: tl.constexpr):
    """x / scale as int8, as e5m2, or as the bits of e4m3 in uint8: nearest, ties to even, past the
    largest the largest. NaN is 0 in int8, which has none.

    Bits of floats are made here and not by an instruction, as sm_80 and sm_86 have none.
    """
    MOST: tl.constexpr = largest_of(STORED)
    y = x.to(tl.float32) * tl.div_rn(1.0, scale)
    number = y == y
    y = tl.minimum(tl.maximum(y, -MOST), MOST)
    if tl.int8 == STORED:
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2^23: no room for a fraction
        code = tl.where(number, y, 0.0).to(tl.int8)
    elif tl.float8e5 == STORED:
        bits = tl.where(number, float8_bits(y, MANTISSA=2, BIAS=15), 0x7F)
        code = bits.to(tl.uint8).to(tl.float8e5, bitcast=True)
    else:
        code = tl.where(number, float8_bits(y, MANTISSA=3, BIAS=7), 0x7F).to(tl.uint8)
    return code


@triton.jit
def encode_out(out, final):
    """Results as they are stored: of the working type, or by the scale of a Final in 8 bits."""
    stored: tl.constexpr = final.out_ptr.dtype.element_ty
    if final.scale_ptr is None:
        made = out.to(stored)
    else:
        made = encode(out, tl.load(final.scale_ptr), stored)
    return made


@triton.jit
def float8_bits(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The bits, in int32, of the nearest floats with so many bits of mantissa and exponents that
    count from -BIAS; y is at most the largest of them."""
    CUT: tl.constexpr = 23 - MANTISSA  # bits of an fp32 mantissa
    LEAST: tl.constexpr = 128 - BIAS  # exponent, as fp32 has it, of the least normal number
    STEPS: tl.constexpr = LEAST - MANTISSA + 23  # from where on fp32 has the steps below that
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # the mantissa is rounded to even by what is cut off; exponents of fp32 count from -127
    normal = (size + ((1 << (CUT - 1)) - 1) + ((size >> CUT) & 1)) >> CUT
    normal -= (127 - BIAS) << MANTISSA
    small = (tl.abs(y) + 2.0 ** (STEPS - 127)).to(tl.int32, bitcast=True) - (STEPS << 23)
    return tl.where(size < (LEAST << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def write_tokens(
    x,  # [TILE_T, DIM_P2]
    ok,  # [TILE_T]
    offs_d,  # [DIM_P2]
    cache,  # StoredTensor
    place,  # Place
    DIM: tl.constexpr,
):
    """Writes x into a cache, and into a quantised one with its scales."""
    strides, scale_strides = cache.strides, cache.scale_strides
    rows = cache.ptr + place.outer * strides.b + place.inner * strides.t + place.head * strides.h
    x_ok = ok[:, None] & (offs_d < DIM)[None, :]
    y = x
    if cache.scale_ptr is not None:
        CODE: tl.constexpr = cache.ptr.dtype.element_ty
        y = x.to(tl.float32)
        if cache.mean_ptr is not None:
            mean_at = cache.mean_ptr + place.head * DIM + offs_d
            y -= tl.load(mean_at, mask=offs_d < DIM, other=0.0)[None, :]
            y = tl.where(x_ok, y, 0.0)
        scale_rows = cache.scale_ptr + place.head * scale_strides.h
        if scale_strides.t is None:
            where = place.b.to(tl.int64) * scale_strides.b
            scale = tl.load(scale_rows + where, mask=ok, other=1.0)
        else:
            scale = scale_of(tl.max(magnitude(y), 1), largest_of(CODE))
            where = place.outer * scale_strides.b + place.inner * scale_strides.t
            tl.store(scale_rows + where, scale, mask=ok)
        y = encode(y, scale[:, None], CODE)
    tl.store(rows[:, None] + offs_d[None, :], y, mask=x_ok)
