"""How the keys and values of a cache are stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitkv.errors import (
    UnsupportedProblem,
    expect,
    expect_device,
    expect_dtype,
    expect_int,
    expect_one_of,
    expect_positive,
    expect_shape,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTISED = ("int8", "fp8")


def expect_sizes(**sizes: Any) -> None:
    """Positive integers."""
    for name, size in sizes.items():
        expect_int(name, size)
        expect_positive(name, size)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """A dtype, or one of the names bf16, fp16 and fp32; int8 and fp8 raise UnsupportedProblem."""
    if dtype in QUANTISED or dtype in (torch.int8, torch.float8_e4m3fn):
        reason = (
            f"dtype: expected bf16, fp16 or fp32, as no kernel quantises on append, got {dtype}"
        )
        raise UnsupportedProblem("a KV cache", "any device", [("append", [reason])])
    if isinstance(dtype, str):
        expect_one_of("dtype", dtype, DTYPES)
        return DTYPES[dtype]
    expect(dtype in DTYPES.values(), "dtype", f"one of {[*DTYPES.values()]}", dtype)
    return dtype


class Layers:
    """k [num_layers, slabs, keys, num_kv_heads, head_dim], and v with head_dim_v.

    Zeros at first: a slot that nobody has written is finite.
    """

    def __init__(
        self,
        num_layers: int,
        slabs: int,
        keys: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None,
        dtype: torch.dtype | str,
        device: torch.device | str,
    ) -> None:
        dim_v = head_dim if head_dim_v is None else head_dim_v
        expect_sizes(
            num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=dim_v
        )
        shape = num_layers, slabs, keys, num_kv_heads
        self.dtype = dtype_of(dtype)
        self.k = torch.zeros(*shape, head_dim, dtype=self.dtype, device=device)
        self.v = torch.zeros(*shape, dim_v, dtype=self.dtype, device=device)

    def check(self, layer: int, k: Tensor, v: Tensor, **lead: int) -> None:
        """New keys and values of a layer, `lead` their first dimensions."""
        expect_int("layer", layer)
        layers = self.k.shape[0]
        expect(-layers <= layer < layers, "layer", f"less than {layers}", layer)
        for name, x, held in (("k", k, self.k), ("v", v, self.v)):
            expect_shape(name, x, **lead, num_kv_heads=held.shape[3], head_dim=held.shape[4])
            expect_dtype(name, x, str(self.dtype).removeprefix("torch."))
            expect_device(name, x, held.device)


def unit_stride(x: Tensor) -> Tensor:
    """x, copied if neighbours along its last dimension are not neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()
