"""How the keys and values of a cache are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitkv.cache.quantize import GRANULARITIES, mean_key
from splitkv.core.errors import (
    dtype_name,
    expect,
    expect_bool,
    expect_device,
    expect_dtype,
    expect_given_with,
    expect_in_range,
    expect_int,
    expect_none_with,
    expect_one_of,
    expect_shape,
    expect_size,
)
from splitkv.rounding import STORED, dequantize, scale_of
from splitkv.runtime.dispatch import torch_device

WORKING = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES = {**WORKING, **STORED}
MAX_SLOTS = (1 << 31) - 1  # of a layer: their numbers have 32 bits
WITHOUT_MEAN = ("softcap", "sink_logits")


def expect_sizes(**sizes: Any) -> None:
    """Raises for what is no integer from 1 to MAX_SIZE."""
    for name, size in sizes.items():
        expect_size(name, size)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype:
    """Returns a dtype given as one, or by the name bf16, fp16, fp32, int8 or fp8 (e4m3)."""
    if isinstance(dtype, str):
        expect_one_of("dtype", dtype, DTYPES)
        return DTYPES[dtype]
    expect(dtype in DTYPES.values(), "dtype", f"one of {[*DTYPES.values()]}", dtype)
    return dtype


class Storage(NamedTuple):
    """How keys and values are stored: the arguments of a cache that say so, as given."""

    dtype: torch.dtype | str
    granularity: str | None
    smooth_k: bool
    device: torch.device | str


class Layers:
    """k [num_layers, slabs, keys, num_kv_heads, head_dim], and v with head_dim_v.

    k_scale, v_scale   fp32, of int8 and fp8: [num_layers, slabs, keys, num_kv_heads], with a
                       granularity "head" [num_layers, num_kv_heads], "tensor" [num_layers, 1]; else
                       None
    k_mean             [num_layers, num_kv_heads, head_dim] fp32 with `smooth_k`, else None

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
        storage: Storage,
    ) -> None:
        dim_v = head_dim if head_dim_v is None else head_dim_v
        expect_sizes(
            num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, head_dim_v=dim_v
        )
        expect_in_range("number of slots", slabs * keys, 1, MAX_SLOTS)
        device = torch_device(storage.device)
        shape = num_layers, slabs, keys, num_kv_heads
        self.dtype = dtype_of(storage.dtype)
        granularity, smooth_k = storage.granularity, storage.smooth_k
        expect_bool("smooth_k", smooth_k)
        self.k = torch.zeros(*shape, head_dim, dtype=self.dtype, device=device)
        self.v = torch.zeros(*shape, dim_v, dtype=self.dtype, device=device)
        self.granularity, self.k_scale, self.v_scale, self.k_mean = granularity, None, None, None
        self._settled: set[int] = set()  # layers whose scales and mean are known
        if self.dtype not in STORED.values():
            name = f"a {dtype_name(self.k)} cache"
            expect_none_with("granularity", granularity, name)
            expect(not smooth_k, "smooth_k", f"False with {name}", smooth_k)
            return
        self.granularity = "token" if granularity is None else granularity
        expect_one_of("granularity", self.granularity, GRANULARITIES)
        sizes = {"token": shape, "head": (num_layers, num_kv_heads), "tensor": (num_layers, 1)}
        size = sizes[self.granularity]
        self.k_scale, self.v_scale = (torch.zeros(size, device=device) for _ in range(2))
        if smooth_k:
            self.k_mean = torch.zeros(num_layers, num_kv_heads, head_dim, device=device)

    # Scales

    @property
    def settles(self) -> bool:
        """Whether something about a layer has to be known before its first token is stored."""
        return self.k_mean is not None or self.granularity in ("tensor", "head")

    @torch.no_grad()
    def calibrate(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See `PagedKVCache.calibrate`."""
        self.expect_settles("calibrate")
        packed = getattr(k, "ndim", 4) == 3
        lead = dict.fromkeys(("total",) if packed else ("batch", "tokens"))
        layer = self.check(layer, k, v, **lead)
        known = layer in self._settled
        if self.k_mean is not None:
            if not known:
                self.k_mean[layer] = mean_key(k)
            k = k.float() - self.k_mean[layer]
        for x, scales in ((k, self.k_scale), (v, self.v_scale)):
            if self.granularity == "token":
                continue
            assert scales is not None
            dims = {"tensor": (0, 1, 2), "head": (0, 2)}[str(self.granularity)]
            found = scale_of(x.flatten(0, -3), dims, self.dtype).view(-1)
            scales[layer] = torch.maximum(scales[layer], found) if known else found
        self._settled.add(layer)

    @torch.no_grad()  # those of a model are parameters
    def set_scales(
        self, layer: int, k_scale: Tensor | None, v_scale: Tensor | None, k_mean: Tensor | None
    ) -> None:
        """See `PagedKVCache.set_scales`."""
        self.expect_settles("set_scales")
        layer = self.expect_layer(layer)
        given = {"k_scale": k_scale, "v_scale": v_scale, "k_mean": k_mean}
        for name, x in given.items():
            held = getattr(self, name)
            if held is None or (name != "k_mean" and self.granularity == "token"):
                beside = "scales of each token" if name != "k_mean" else "smooth_k=False"
                expect_none_with(name, x, beside)
                continue
            expect_given_with(name, x, f"granularity {self.granularity}, smooth_k")
            assert x is not None
            sizes = {"num_kv_heads": held.shape[1], "head_dim": self.k.shape[4]}
            if name != "k_mean":
                sizes = {"one" if self.granularity == "tensor" else "num_kv_heads": held.shape[1]}
            expect_shape(name, x, **sizes)
            expect_dtype(name, x, "float32")
            expect_device(name, x, held.device)
            held[layer] = x
        self._settled.add(layer)

    def expect_settles(self, name: str) -> None:
        """Raises where nothing has to be known."""
        expect(self.settles, name, "granularity 'tensor' or 'head', or smooth_k", self.granularity)

    def stored_by(self, layer: int) -> dict[str, Tensor | None]:
        """Returns arguments of `Append` for a layer, calibrated before if its scales are fixed."""
        if self.settles:
            number = self.expect_layer(layer)
            what = "calibrate or set_scales before tokens are stored"
            expect(number in self._settled, "layer", what, layer)
        mean = None if self.k_mean is None else self.k_mean[layer]
        return {**self.scales(layer), "k_mean": mean}

    def scales(self, layer: int) -> dict[str, Tensor]:
        """Returns arguments of `decode` and `attention_varlen`."""
        if self.k_scale is None or self.v_scale is None:
            return {}
        return {"k_scale": self.k_scale[layer], "v_scale": self.v_scale[layer]}

    def expect_options(self, options: dict[str, Any]) -> None:
        """Raises for options that the cache itself says, or that a mean's scores would change."""
        if self.k_scale is not None:
            for name in ("k_scale", "v_scale"):
                expect_none_with(name, options.get(name), "a cache that holds its scales")
        for name in WITHOUT_MEAN if self.k_mean is not None else ():
            given = options.get(name)
            absent = given is None or (name == "softcap" and given == 0)
            expect(absent, name, "none with smooth_k, which takes a number off all scores", given)

    def finish(self, layer: int, q: Tensor, result: Any, options: dict[str, Any]) -> Any:
        """Adds the mean key's score to the LSE of `decode` or `attention_varlen` again."""
        if self.k_mean is None or not isinstance(result, tuple):
            return result
        out, lse = result
        scale = options.get("softmax_scale") or q.shape[-1] ** -0.5
        mean = self.k_mean[layer].repeat_interleave(q.shape[-2] // self.k.shape[3], 0)
        q = dequantize(q, options.get("q_scale"), torch.float32)
        return out, lse + scale * (q * mean).sum(-1).transpose(-1, -2)

    def copy_slabs(self, source: Tensor, target: Tensor) -> None:
        """Copies slabs, with their scales, to others, in all layers."""
        held: list[Tensor | None] = [self.k, self.v]
        if self.granularity == "token":
            held += [self.k_scale, self.v_scale]
        for x in held:
            assert x is not None
            bits = x.view(torch.uint8) if x.element_size() == 1 else x
            bits[:, target] = bits[:, source]

    # Tokens

    def check(self, layer: int, k: Tensor, v: Tensor, **lead: int | None) -> int:
        """Checks new keys and values of a layer; returns its number from 0.

        lead   their first dimensions
        """
        number = self.expect_layer(layer)
        quantised = self.dtype in STORED.values()
        for name, x, held in (("k", k, self.k), ("v", v, self.v)):
            sizes = expect_shape(
                name, x, **lead, num_kv_heads=held.shape[3], head_dim=held.shape[4]
            )
            lead = dict(zip(lead, sizes, strict=False))
            types = [str(t).removeprefix("torch.") for t in WORKING.values()]
            if not quantised:
                types = [str(self.dtype).removeprefix("torch.")]
            expect_dtype(name, x, *(types if name == "k" else [dtype_name(k)]))
            expect_device(name, x, held.device)
        return number

    def expect_layer(self, layer: int) -> int:
        """Returns the number from 0 of a layer, which may be counted from the last."""
        expect_int("layer", layer)
        layers = self.k.shape[0]
        expect(-layers <= layer < layers, "layer", f"less than {layers}", layer)
        return int(layer % layers)


def unit_stride(x: Tensor) -> Tensor:
    """Returns x, copied if neighbours along its last dimension are not neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()
