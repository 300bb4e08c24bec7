"""Products with keys and values that are stored in 8 bits.

What may be multiplied in 8 bits is a compile-time word, UNITS: "widened", "half" or "full", as in
`Problem.products`, or "as_is" where nothing is quantised. Widening is exact: all types have at
most 8 significant bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS
from splitkv.core.plan import Config
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.limits.scale_layout import scale_strides
from splitkv.kernels.tile.codec import widen
from splitkv.kernels.tile.encode import encode, largest_of, magnitude, scale_of
from splitkv.kernels.tile.locate import key_rows
from splitkv.kernels.tile.product import add_product, row_product
from splitkv.kernels.tile.visit import Strides, place
from splitkv.kernels.tile.weight import above_zero


class Stored(NamedTuple):
    """Pointers to scales [(batch or pages,) tokens, heads] or fewer, and their Strides.

    q_ptr       None: q is in a working type
    of_tokens   anything where each key has a scale, None where keys share one
    """

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    q_strides: Any
    k_strides: Any
    v_strides: Any
    of_tokens: Any


NOTHING = Stored(None, None, None, Strides(0, 0, 0), Strides(0, 0, 0), Strides(0, 0, 0), None)


class RowTileScales(NamedTuple):
    """The scales of a row tile: of each row of q [rows], or None; the first addresses of those of
    each key of a sequence and head, or None: all share one; the steps between keys and pages."""

    q: Any
    k_ptr: Any
    v_ptr: Any
    k_strides: Any
    v_strides: Any


@triton.jit
def round_queries(q, CODE: tl.constexpr):
    """(q as CODE, its scale [rows]) of q in a working type."""
    scale = scale_of(tl.max(magnitude(q), 1), largest_of(CODE))
    if tl.int8 == CODE:
        rounded = encode(q, scale[:, None], tl.int8)
    else:
        rounded = encode(q, scale[:, None], tl.uint8).to(tl.float8e4nv, bitcast=True)
    return rounded, scale


@triton.jit
def scale_of_rows(stored, b, token, head, ok, UNITS: tl.constexpr):
    """The scales [rows] of a q that comes quantised, else None."""
    scale = None
    if UNITS != "as_is":
        if stored.q_ptr is not None:
            rows = place(stored.q_ptr, stored.q_strides, b, token, head)
            scale = tl.load(rows, mask=ok, other=0.0)
    return scale


@triton.jit
def shared_scales(stored, b, h, len_k, UNITS: tl.constexpr):
    """(k's, v's) scale that all keys of a sequence and head share; 1 where they do not, and of no
    keys, which what lies after the last sequence has: there is no scale to be read."""
    k_scale = 1.0
    v_scale = 1.0
    if UNITS != "as_is":
        if stored.of_tokens is None:
            at_k = place(stored.k_ptr, stored.k_strides, b, b * 0, h)
            at_v = place(stored.v_ptr, stored.v_strides, b, b * 0, h)
            k_scale = tl.load(at_k, mask=len_k > 0, other=1.0)
            v_scale = tl.load(at_v, mask=len_k > 0, other=1.0)
    return k_scale, v_scale


@triton.jit
def scale_of_scores(scale, k_scale, stored, UNITS: tl.constexpr):
    """The factor of all scores: `scale`, times the scale of K that keys share."""
    factor = scale * k_scale
    if UNITS != "as_is":
        if stored.of_tokens is None:
            factor = above_zero(factor)
    return factor


@triton.jit
def key_scales(ptr, strides, of_tokens, slab, first, h):
    """The first address of the scales of each key of a sequence and head; None: it has none."""
    at = None
    if of_tokens is not None:
        at = place(ptr, strides, slab, first, h)
    return at


@triton.jit
def scales_at(
    page,
    ptr,
    strides,  # Strides
    start,
    ok,  # [TILE_N], or None: all exist
    OFFSET: tl.constexpr,
    TILE_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """The scales [TILE_N] of the tile of keys at `start`; 0 where there is none."""
    rows = key_rows(page, ptr, strides.t, strides.b, start, OFFSET, TILE_N, PAGE_SIZE)
    if ok is None:
        scale = tl.load(rows)
    else:
        scale = tl.load(rows, mask=ok, other=0.0)
    return scale


@triton.jit
def query_product(q, k):
    """q @ k.T in fp32, of stored numbers: on 8-bit units where both are stored alike."""
    if q.dtype == tl.int8:
        qk = tl.dot(q, tl.trans(k)).to(tl.float32)
    elif q.dtype == k.dtype:
        qk = row_product(q, k)
    else:
        qk = row_product(q, widen(k, q.dtype))
    return qk


@triton.jit
def add_values(acc, shrink, p, top, v, scale, WORKING: tl.constexpr, UNITS: tl.constexpr):
    """acc * shrink + (p * scale) @ v, of stored numbers v [TILE_N, DIM_V].

    top    [rows] at least the largest p of each row, which is rounded relative to it in 8 bits
    scale  [TILE_N], or None: all keys share one, which is left to the end

    In 8 bits the products of every tile are added up outside the units, whose sums of e4m3 have
    fewer bits than fp32.
    """
    if UNITS == "as_is":
        acc = add_product(acc * shrink[:, None], p.to(v.dtype), v)
    elif UNITS == "full":
        if v.dtype == tl.int8:
            most = 1.0
            if scale is not None:
                most = tl.maximum(tl.max(scale, 0), 2.0**-100)
                p *= (scale / most)[None, :]
            step = tl.maximum(top, 2.0**-100) * (1.0 / 127.0)
            weight = (p * (1.0 / step)[:, None] + 0.5).to(tl.int8)
            acc = acc * shrink[:, None] + tl.dot(weight, v).to(tl.float32) * (step * most)[:, None]
        else:
            if scale is not None:
                p *= scale[None, :]
                top = tl.max(p, 1)
            step = tl.maximum(top, 2.0**-100) * (1.0 / 448.0)
            weight = (p * (1.0 / step)[:, None]).to(v.dtype)
            acc = acc * shrink[:, None] + tl.dot(weight, v) * step[:, None]
    else:
        wide = widen(v, WORKING)
        if scale is not None:
            if tl.float16 == WORKING:  # whose exponents p * scale could leave
                wide = (wide.to(tl.float32) * scale[:, None]).to(WORKING)
            else:
                p *= scale[None, :]
        acc = add_product(acc * shrink[:, None], p.to(WORKING), wide)
    return acc


def units_of(problem: Problem, device: Device, config: Config) -> str:
    """The products that are multiplied in 8 bits, of those that may be.

    Tensor cores multiply int8 and e4m3 in steps of 32 elements; fp32 is computed exactly.
    """
    if problem.codec == AS_IS:
        return "as_is"
    if problem.codec.name not in ("int8", "fp8"):  # others have no units here
        return "widened"
    if problem.codec.name == "fp8" and not multiplies_e4m3(device, config):
        return "widened"
    if problem.element_bytes > 2 or triton.next_power_of_2(problem.head_dim) < 32:
        return "widened"
    return "half" if problem.products == "full" and config.tile_n < 32 else problem.products


def multiplies_e4m3(device: Device, config: Config) -> bool:
    """From sm_89 on. sm_90 and sm_100 do in the products of whole warpgroups alone: their `mma` of
    fewer rows than 64 widens e4m3 to fp16.
    """
    if device.capability[0] in (9, 10):
        return config.tile_m >= 64 and config.num_warps % 4 == 0
    return device.capability >= (8, 9)


def stored_of(operands: Operands) -> Stored:
    """The scales of quantised operands."""
    x = operands
    if x.k_scale is None:
        return NOTHING
    scaled = (x.q_scale, x.q), (x.k_scale, x.k), (x.v_scale, x.v)
    strides = (Strides(*scale_strides(*pair)) for pair in scaled)
    # of a single key, too: where it is not visible, its scale is not read
    of_tokens = 1 if x.k_scale.dim() == x.k.dim() - 1 else None
    return Stored(x.q_scale, x.k_scale, x.v_scale, *strides, of_tokens)


def bits_of(x: Any) -> Any:
    """The bytes of e4m3, for GPUs that do not know the type; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
