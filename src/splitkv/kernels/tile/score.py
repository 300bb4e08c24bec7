"""Score modifiers: what happens between the scaled product and the mask."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Hyperbolic tangent to fp32 rounding: a series near zero, where 1 - 2/(1+e^2x) cancels.

    Which of both is told by x**2, that the series has: with |x| ptxas orders the numbers of a tile
    so that registers are spilled in the steps of packed sequences on sm_90.
    """
    x2 = x * x
    series = x * (
        1.0 + x2 * (-0.33333334 + x2 * (0.13333334 + x2 * (-0.05396825 + x2 * 0.02186949)))
    )
    # e^2x overflows to inf above 44: 2 / inf = 0 and the result is exactly 1
    far = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(x2 < 0.0625, series, far)


@triton.jit
def score_log2(qk, scale, softcap, slope, pos, offs_n):
    """Scores in base 2, `[rows, TILE_N]`: scale, then soft cap, then ALiBi, times log2(e).

    scale is softmax_scale * log2(e) where there is no soft cap, softmax_scale / softcap where
    there is
    """
    if softcap is None:
        s = qk * scale
    else:
        s = tanh(qk * scale) * (softcap * 1.4426950408889634)
    if slope is not None:
        s -= slope * 1.4426950408889634 * tl.abs(pos - offs_n).to(tl.float32)
    return s
