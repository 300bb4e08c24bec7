"""The soft cap of a tile's scores, in the instructions that a step can afford.

`tanh` of tile/score.py is right to fp32 rounding of its result. Here that is wanted of the soft cap
only, as weights are rounded to 16 bits or fewer: so tanh(x) is worked out as 2 / (1 + e^-2x) - 1,
whose error near zero is that of numbers near one. What is multiplied and subtracted is left to the
exponential of the weights, where it costs nothing, and the largest score is that of the largest
1 / (1 + e^-2x).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.reciprocal import fast_reciprocal

LOG2_E = gl.constexpr(1.4426950408889634)
HALF = gl.constexpr(0.5)


@gluon.jit
def soft_capped(qk, scale, softcap):
    """(s, unit) of products: (s - HALF) * unit are softcap * tanh(qk * scale) in base 2, unit one
    number."""
    s = fast_reciprocal(1.0 + gl.exp2(qk * (scale * (-2.0 * LOG2_E))))
    return s, softcap * (2.0 * LOG2_E)
