"""Keys or values to 8 bits and scales.

Computes, for x less a mean of each head and element where one is given,

    scale  = max |x| / largest stored value, at least 2^-100, over all of x, a head, or a row
    stored = round(x / scale)                to int8, e4m3 or e5m2; the nearest, ties to even

A row is a token and head. A scale over anything not finite is inf, and finite values beside it are
stored as 0, so that all read as NaN.

Shapes      x [(slabs,) tokens, heads, dim]; mean [heads, dim] fp32; stored as x, contiguous; scale
            [1], [heads] or x's shape but the last, fp32
Grid        (row tiles,); a row tile is tokens of one head
Traffic     a scale a row: x read once. Else twice: first for the largest, of which each program
            adds its own by one atomic maximum
Numerics    fp32; the bits of `rounding.quantize`
Limits      bf16, fp16, fp32 or fp64
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from splitkv.kernels.host.append_arguments import codes
from splitkv.kernels.host.arguments import prepared
from splitkv.kernels.tile.encode import encode, magnitude, scale_of
from splitkv.kernels.tile.visit import load_tile, store_tile
from splitkv.rounding import LARGEST

TILE_ELEMENTS = 4096  # of a program: 16 bytes a thread and load, and eight of them
MAX_PROGRAMS = 4096  # that look for the largest: each adds an atomic operation
SIZES = ["tokens", "slab", "heads", "tiles"]


@triton.jit
def rows_at(x_ptr, n, head, slab, stride_s, stride_t, stride_h):
    """The first address of each of tokens n, counted through slabs of so many."""
    inside = (n % slab).to(tl.int64) * stride_t
    return x_ptr + (n // slab).to(tl.int64) * stride_s + inside + head.to(tl.int64) * stride_h


@triton.jit
def load_rows(rows, ok, mean_ptr, head, DIM: tl.constexpr):
    """x [rows, DIM_P2] in fp32, less the mean; 0 where there is nothing."""
    DIM_P2: tl.constexpr = triton.next_power_of_2(DIM)
    x = load_tile(rows, ok, DIM, DIM_P2).to(tl.float32)
    if mean_ptr is not None:
        offs_d = tl.arange(0, DIM_P2)
        mean = tl.load(mean_ptr + head * DIM + offs_d, mask=offs_d < DIM, other=0.0)
        x = tl.where(ok[:, None], x - mean[None, :], 0.0)
    return x


@triton.jit(do_not_specialize=SIZES)
def find_largest(
    x_ptr,
    mean_ptr,  # or None
    largest_ptr,  # [heads] or [1] fp32, zeros
    tokens,  # of all slabs
    slab,  # tokens of one
    heads,
    tiles,  # row tiles of a head
    stride_s,
    stride_t,
    stride_h,
    stride_scale,  # 0: one for all heads
    DIM: tl.constexpr,
    TILE_T: tl.constexpr,
):
    head = tl.program_id(0) % heads
    first = tl.program_id(0) // heads
    largest = tl.zeros([TILE_T], tl.float32)
    for tile in range(first, tiles, tl.num_programs(0) // heads):
        n = tile * TILE_T + tl.arange(0, TILE_T)
        rows = rows_at(x_ptr, n, head, slab, stride_s, stride_t, stride_h)
        x = load_rows(rows, n < tokens, mean_ptr, head, DIM)
        largest = tl.maximum(largest, tl.max(magnitude(x), 1))
    tl.atomic_max(largest_ptr + head * stride_scale, tl.max(largest, 0))


@triton.jit(do_not_specialize=SIZES)
def quantize_rows(
    x_ptr,
    mean_ptr,  # or None
    largest_ptr,  # as find_largest leaves it, or None: a scale a row
    out_ptr,  # int8, e5m2, or uint8: the bits of e4m3
    scale_ptr,
    tokens,
    slab,
    heads,
    tiles,
    stride_s,
    stride_t,
    stride_h,
    stride_scale,
    DIM: tl.constexpr,
    MOST: tl.constexpr,
    TILE_T: tl.constexpr,
):
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads
    n = tile * TILE_T + tl.arange(0, TILE_T)
    ok = n < tokens
    rows = rows_at(x_ptr, n, head, slab, stride_s, stride_t, stride_h)
    x = load_rows(rows, ok, mean_ptr, head, DIM)
    row = n.to(tl.int64) * heads + head
    if largest_ptr is None:
        scale = scale_of(tl.max(magnitude(x), 1), MOST)  # [TILE_T]
        tl.store(scale_ptr + row, scale, mask=ok)
    else:
        largest = tl.load(largest_ptr + head * stride_scale + tl.zeros([TILE_T], tl.int32))
        scale = scale_of(largest, MOST)
        if tile == 0:  # of one scale every head writes the same
            tl.store(scale_ptr + head * stride_scale + tl.zeros([TILE_T], tl.int32), scale)
    code = encode(x, scale[:, None], out_ptr.dtype.element_ty)
    store_tile(out_ptr + row * DIM, code, ok, DIM)


def launch(x: Tensor, mean: Tensor | None, granularity: str, stored: Tensor, scale: Tensor) -> None:
    """Write `stored`, contiguous, and `scale`; not for an empty x."""
    import torch

    *lead, heads, dim = x.shape
    strides = x.stride()[:-1] if x.dim() == 4 else (0, *x.stride()[:-1])
    tokens, slab = x.shape[:-2].numel(), lead[-1]
    tile_t = max(1, min(64, TILE_ELEMENTS // triton.next_power_of_2(dim)))
    tiles = triton.cdiv(tokens, tile_t)
    sizes = tokens, slab, heads, tiles, *strides, int(granularity == "head")
    out = codes(stored, stored)
    largest = None
    if granularity != "token":
        largest = torch.zeros_like(scale)
        programs = max(1, min(tiles, MAX_PROGRAMS // heads)) * heads
        prepared(find_largest)[(programs,)](
            *(x, mean, largest, *sizes, dim, tile_t), enable_fp_fusion=True
        )
    most = LARGEST[stored.dtype]
    prepared(quantize_rows)[(tiles * heads,)](
        *(x, mean, largest, out, scale, *sizes, dim, most, tile_t), enable_fp_fusion=True
    )
