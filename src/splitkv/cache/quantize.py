"""quantize_kv: keys and values in 8 bits, and the scales that `decode` and `attention` take.

stored = splitkv.quantize_kv(k, v, dtype="int8", granularity="token")
out = splitkv.decode(q, stored.k, stored.v, k_scale=stored.k_scale, v_scale=stored.v_scale)
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from splitkv.core.errors import (
    dtype_name,
    expect,
    expect_bool,
    expect_device,
    expect_dtype,
    expect_one_of,
    expect_shape,
)
from splitkv.core.kv import Granularity
from splitkv.core.scales import DTYPE_BYTES
from splitkv.kernels import quantize as kernel
from splitkv.rounding import STORED, quantize, scale_of

GRANULARITIES = [x for x in get_args(Granularity) if x != "none"]


class QuantizedKV(NamedTuple):
    """Keys and values in 8 bits: `k * k_scale` and `v * v_scale`.

    k_mean   [num_kv_heads, head_dim] fp32: what was subtracted from every key; None: nothing
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    k_mean: Tensor | None = None


@torch.no_grad()
def quantize_kv(
    k: Tensor,
    v: Tensor,
    dtype: str = "int8",
    granularity: str = "token",
    *,
    smooth_k: bool = False,
    k_mean: Tensor | None = None,
) -> QuantizedKV:
    """Quantizes keys and values to int8, e4m3 or e5m2 with fp32 scales, nearest, ties to even.

    k, v         [batch, seqlen_k, num_kv_heads, head_dim (v: head_dim_v)], the pages of a cache
                 [num_pages, page_size, ..], or packed [total_k, ..]: bf16, fp16, fp32 or fp64
    dtype        "int8", "fp8" (e4m3) or "fp8_e5m2"
    granularity  of the scales: "tensor": [1]; "head": [num_kv_heads]; "token": one a token and
                 head, of k's shape without its last dimension
    smooth_k     subtract from every key the mean of all, of each head and element, and return it
    k_mean       [num_kv_heads, head_dim] fp32: subtract this one, of keys that came before

    The largest value that shares a scale is stored as 127, 448 or 57344: the error is at most half
    a step of the scale in int8, a sixteenth of the value in e4m3, an eighth in e5m2. A scale is at
    least 2^-100, also of zeros. Where it covers anything not finite it is inf, and everything that
    it covers reads as NaN. All tokens count, also those that no sequence uses. Not differentiable.

    With a mean, scores of a query are all less by softmax_scale * q . k_mean[head]: the softmax and
    the output are as before, but every lse is less by that; a logit of `sink_logits` and a soft cap
    see the smaller scores, which is not the same attention. New keys need the same mean subtracted.

    Returns (k, v, k_scale, v_scale, k_mean), contiguous; k_mean is None without one.
    """
    lead: dict[str, int | None] = {"batch or pages": None, "tokens": None}
    if getattr(k, "ndim", 4) == 3:
        lead = {"total_k": None}
    *tokens, heads, dim = expect_shape("k", k, **lead, num_kv_heads=None, head_dim=None)
    lead = dict(zip(lead, tokens, strict=True))
    expect_shape("v", v, **lead, num_kv_heads=heads, head_dim_v=None)
    expect_dtype("k", k, *DTYPE_BYTES)
    expect_dtype("v", v, dtype_name(k))
    expect_device("v", v, k.device)
    expect_one_of("dtype", dtype, STORED)
    expect_one_of("granularity", granularity, GRANULARITIES)
    expect_bool("smooth_k", smooth_k)
    if k_mean is not None:
        expect(not smooth_k, "smooth_k", "False with a k_mean", smooth_k)
        expect_shape("k_mean", k_mean, num_kv_heads=heads, head_dim=dim)
        expect_dtype("k_mean", k_mean, "float32")
        expect_device("k_mean", k_mean, k.device)
    if smooth_k:
        k_mean = mean_key(k)
    stored_k, k_scale = _quantized(k, k_mean, STORED[dtype], granularity)
    stored_v, v_scale = _quantized(v, None, STORED[dtype], granularity)
    return QuantizedKV(stored_k, stored_v, k_scale, v_scale, k_mean)


def mean_key(k: Tensor) -> Tensor:
    """Computes the mean key of [.., heads, dim] over all tokens, [heads, dim] fp32; 0 of none."""
    tokens = k.flatten(0, -3)
    if not tokens.shape[0]:
        return torch.zeros(k.shape[-2:], device=k.device)
    return tokens.mean(0, dtype=torch.float32)


def _quantized(
    x: Tensor, mean: Tensor | None, stored: torch.dtype, granularity: Any
) -> tuple[Tensor, Tensor]:
    """Returns x in `stored`, and its scale."""
    shape = {"tensor": (1,), "head": x.shape[-2:-1], "token": x.shape[:-1]}[granularity]
    if x.is_cuda and x.numel():
        x = x if x.stride(-1) == 1 else x.contiguous()
        mean = None if mean is None else mean.contiguous()
        out = x.new_empty(x.shape, dtype=stored)
        scale = x.new_empty(shape, dtype=torch.float32)
        with torch.cuda.device(x.device):
            kernel.launch(x, mean, granularity, out, scale)
        return out, scale
    wide = x.float() if mean is None else x.float() - mean
    last = x.dim() - 1
    dims = {"tensor": tuple(range(last + 1)), "head": (*range(last - 1), last), "token": (last,)}
    scale = scale_of(wide, dims[granularity], stored)
    return quantize(wide, scale, stored).contiguous(), scale.reshape(shape)
