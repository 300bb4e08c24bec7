"""How a stored key or value becomes a number: widened exactly, and its scale.

int8, e4m3 and e5m2 have at most 8 significant bits, so the working types hold every stored value as
it is. A scale that keys of a head share multiplies scores, or the output, once. A scale of a key
and head multiplies its score, and its probability instead of its value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


class Scales(NamedTuple):
    """Pointers to the fp32 scales of K and of V, which have one layout."""

    k_ptr: Any
    v_ptr: Any


@triton.jit
def e4m3(bits):
    """The fp16 values of e4m3 bits in uint8, for GPUs that have no instruction for it.

    The exponent of e4m3 is 8 less biased than that of fp16, so the same bits there mean 2^-8 of it,
    subnormals too. The one pattern without a number is NaN: alone of all it goes over the largest
    fp16 times 34976, and infinity times 0 is NaN. Nothing is compared or chosen, so two elements
    are worked on together.
    """
    x = bits.to(tl.int8, bitcast=True).to(tl.int16)  # the sign in bits 7 to 15
    same = ((x << 7) & ~0x4000).to(tl.float16, bitcast=True)
    return same * 256.0 + same * 34976.0 * 0.0


@triton.jit
def widen(x, dtype: tl.constexpr):
    """x as it is where it is of the working type, else its stored numbers in `dtype`.

    GPUs before sm_90 convert e4m3 to bf16 by way of fp16. Triton would do so itself, but decides it
    once in a process: after a kernel for sm_90, those for sm_89 get an instruction that they lack.
    So do those for sm_80 with e5m2, which is the first byte of fp16.
    """
    if x.dtype == tl.uint8:
        x = e4m3(x)
    elif x.dtype == tl.int8:
        x = x.to(tl.float32)
    elif x.dtype == tl.float8e4nv and not cuda_capability_geq(9):
        x = x.to(tl.float16)
    elif x.dtype == tl.float8e5:
        if cuda_capability_geq(8, 9):
            x = x.to(tl.float16)
        else:
            x = (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(dtype)


@triton.constexpr_function
def working_type(stored):
    """The working type by that of q in memory: its own, of a quantised q bf16."""
    return stored if stored in (tl.float16, tl.bfloat16, tl.float32) else tl.bfloat16


@triton.jit
def scale_of_head(scales, b, h, stride_b, stride_h):
    """(k, v) scales of a sequence and KV head, which all its keys share; 1 without any."""
    k_scale = 1.0
    v_scale = 1.0
    if scales is not None:
        at = b * stride_b + h * stride_h
        k_scale = tl.load(scales.k_ptr + at)
        v_scale = tl.load(scales.v_ptr + at)
    return k_scale, v_scale


@triton.jit
def row_scale(row, b, t, head, ok, stride_b, stride_t, stride_h):
    """Scales of rows of q as a column; 1 without any."""
    scale = 1.0
    if row.scale_ptr is not None:
        at = b * stride_b + t * stride_t + head * stride_h
        scale = tl.load(row.scale_ptr + at, mask=ok, other=0.0)[:, None]
    return scale
