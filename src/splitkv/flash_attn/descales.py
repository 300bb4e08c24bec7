"""Scales of 8-bit inputs as FlashAttention-3 gives them, in terms of `splitkv.attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from splitkv.core.errors import (
    dtype_name,
    expect_device,
    expect_dtype,
    expect_none_with,
    expect_shape,
)
from splitkv.reference import sequence_of_token

QUANTISED = (torch.float8_e4m3fn, torch.int8)


def scales_of(
    descales: Mapping[str, Tensor | None],
    q: Tensor,
    k: Tensor,
    batch: int,
    cu_seqlens_k: Tensor | None = None,
) -> dict[str, Any]:
    """Makes the arguments that say how 8-bit tensors are scaled; none for other types.

    descales      q_descale, k_descale and v_descale by their names: fp32 [batch, num_kv_heads], or
                  one; None: 1
    cu_seqlens_k  of packed keys, where a scale of each sequence becomes one of each key

    The scale of a KV head's queries joins that of its keys, as both multiply the same scores. With
    queries in e4m3 the weights may be rounded to e4m3 too, as FlashAttention-3 does.
    """
    if k.dtype not in QUANTISED:
        for name, descale in descales.items():
            expect_none_with(name, descale, f"{dtype_name(k)} keys")
        return {}
    if q.dtype not in QUANTISED:
        expect_none_with("q_descale", descales["q_descale"], f"a {dtype_name(q)} q")
    of_q, of_k, of_v = (_narrowed(name, descales[name], q, k, batch) for name in descales)
    scales: dict[str, Any] = {}
    if q.dtype in QUANTISED and of_q.numel() == 1:
        scales["q_scale"] = of_q
    elif q.dtype in QUANTISED:
        scales["q_scale"], of_k = torch.ones_like(of_q.flatten()[:1]), of_k * of_q
    if q.dtype == torch.float8_e4m3fn:
        scales["products"] = "full"
    of_k, of_v = torch.broadcast_tensors(of_k, of_v)
    if of_k.stride() != of_v.stride():  # kernels have one set of strides for both
        of_k, of_v = of_k.contiguous(), of_v.contiguous()
    for name, scale in (("k_scale", of_k), ("v_scale", of_v)):
        if scale.dim() == 2 and cu_seqlens_k is not None:
            sequence = sequence_of_token(cu_seqlens_k, k.shape[0])[0]
            scale = scale[sequence.clamp(max=batch - 1)]
        scales[name] = scale
    return scales


def joined(scales: dict[str, Any]) -> dict[str, Any]:
    """Makes the scales of queries that have left 8 bits: theirs joins that of the keys."""
    rest = {name: scale for name, scale in scales.items() if name != "q_scale"}
    return rest | {"k_scale": scales["k_scale"] * scales["q_scale"]}


def _narrowed(name: str, descale: Tensor | None, q: Tensor, k: Tensor, batch: int) -> Tensor:
    """Narrows a scale to [1], [num_kv_heads] or [batch, num_kv_heads].

    What is expanded is one for all that share it, which strides tell without a look at the device.
    """
    if descale is None:
        return torch.ones(1, dtype=torch.float32, device=q.device)
    expect_dtype(name, descale, "float32")
    expect_device(name, descale, q.device)
    if descale.numel() == 1:
        return descale.view(1)
    expect_shape(name, descale, batch=batch, num_kv_heads=k.shape[-2])
    of_sequences, of_heads = descale.stride()
    if batch == 1 or (of_sequences == 0 and batch > 1):
        descale = descale[0]
        return descale[:1] if of_heads == 0 else descale
    return descale
