"""The maxima that the weights of rows of decode on Hopper are relative to.

Lazy rescaling: the maximum of a row is raised only when a score exceeds it by more than 3 in base
2, so that what has been summed up is rarely rescaled (FlashAttention-4's trick). Beside values of
8 bits, whose products are fp16, weights are relative to 12 below the maximum: see `SHIFT`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.byte_pairs import SHIFT

# How far a score may exceed the maximum of its row, in base 2, before that is raised; beside values
# of 8 bits; and the bits of each in fp32, and of the weight of such a score there.
TOLERANCE, TOLERANCE_BITS = 3.0, 0x40400000
TOLERANCE_IN_8_BITS, TOLERANCE_BITS_IN_8_BITS = 15.0, 0x41700000
WEIGHT_BITS_IN_8_BITS = gl.constexpr(0x47000000)
LOWEST = gl.constexpr(-(2.0**100))  # the maximum of a row that has seen no key


@gluon.constexpr_function
def tolerance(dequantize):
    """How far a score may exceed the running maximum of its row before that is raised."""
    return TOLERANCE if dequantize is None else TOLERANCE_IN_8_BITS


@gluon.constexpr_function
def tolerance_bits(dequantize):
    """The bits of `tolerance` in fp32."""
    return TOLERANCE_BITS if dequantize is None else TOLERANCE_BITS_IN_8_BITS


@gluon.jit
def raise_maxima(m, s, CONFIG: gl.constexpr):
    """Raises the running maxima m [TILE_M] of those rows that have a score in s [TILE_M, TILE_N]
    above m by more than the tolerance; rows do not affect each other. In base 2."""
    LIMIT: gl.constexpr = tolerance(CONFIG.dequantize)
    top = gl.max(s, 1)
    raised = top if CONFIG.dequantize is None else top - SHIFT
    return gl.where(top - m > LIMIT, raised, m)


@gluon.jit
def true_maxima(m):
    """Replaces the maxima of rows that have seen no key by -inf."""
    return gl.where(m == LOWEST, float("-inf"), m)
