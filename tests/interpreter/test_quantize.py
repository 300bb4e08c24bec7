"""`kernels/quantize.py` in Triton's interpreter: the bits of `rounding.quantize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cases
import pytest
import torch
import triton
import triton.language as tl

from splitkv.cache.quantize import _quantized
from splitkv.kernels.quantize import launch
from splitkv.kernels.tile.encode import float8_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
AXES: cases.Axes = {
    "shape": ((2, 5, 3, 24), (140, 2, 64), (1, 1, 1, 8), (3, 70, 2, 16)),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "stored": (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    "granularity": ("tensor", "head", "token"),
    "mean": (False, True),
    "values": ("spread", "zeros", "not_finite"),
    "strided": (False, True),
}


@pytest.mark.parametrize("values", cases.pairs(AXES), ids=lambda v: v["granularity"])
def test_kernel_is_the_definition(values: Mapping[str, Any]) -> None:
    shape, granularity = values["shape"], values["granularity"]
    g = torch.Generator().manual_seed(len(str(values)))
    x = torch.randn(shape, generator=g) * torch.randn(shape, generator=g).mul(3).exp()
    x = x.clamp(-6e4, 6e4).to(values["dtype"])
    if values["values"] == "zeros":
        x[..., 0, :] = 0
    elif values["values"] == "not_finite":
        x.view(-1)[3], x.view(-1)[-1] = float("nan"), float("-inf")
    if values["strided"]:  # heads before tokens, and gaps
        x = torch.nn.functional.pad(x.transpose(-2, -3), (0, 8)).transpose(-2, -3)[..., :-8]
    mean = torch.randn(shape[-2:], generator=g) if values["mean"] else None
    wanted, wanted_scale = _quantized(x, mean, values["stored"], granularity)
    stored, scale = torch.empty_like(wanted), torch.full_like(wanted_scale, torch.nan)
    launch(x, mean, granularity, stored, scale)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(stored.view(torch.uint8), wanted.view(torch.uint8))


@triton.jit
def bits_of(x_ptr, out_ptr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out_ptr + offs, float8_bits(tl.load(x_ptr + offs), MANTISSA, BIAS).to(tl.uint8))


@pytest.mark.parametrize(
    ("dtype", "mantissa", "bias", "count"),
    [(torch.float8_e4m3fn, 3, 7, 127), (torch.float8_e5m2, 2, 15, 124)],
    ids=["e4m3", "e5m2"],
)
def test_every_number_and_what_lies_between(
    dtype: torch.dtype, mantissa: int, bias: int, count: int
) -> None:
    codes = torch.arange(count, dtype=torch.uint8).view(dtype).float()
    half = (codes[1:] + codes[:-1]) / 2  # exactly: a tie
    up, down = (half.nextafter(codes[end]) for end in (slice(1, None), slice(-1)))
    x = torch.cat([codes, half, up, down, torch.zeros(4)])
    x = torch.cat([x, -x])
    padded = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    found = torch.empty(1024, dtype=torch.uint8)
    bits_of[(1,)](padded, found, mantissa, bias, 1024)
    assert torch.equal(found[: len(x)], x.to(dtype).view(torch.uint8))
