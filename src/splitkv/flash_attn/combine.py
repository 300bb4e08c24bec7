"""Merging the partial results of attention over parts of the keys."""

from __future__ import annotations

import torch
from torch import Tensor

from splitkv.core.errors import (
    dtype_name,
    expect,
    expect_at_least,
    expect_device,
    expect_dtype,
    expect_last_dim_contiguous,
    expect_shape,
    expect_tensor,
)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from attention over each of several parts of them.

    out_partial  [num_splits, batch, seqlen, num_heads, head_dim], or packed
                 [num_splits, total, num_heads, head_dim]; fp32, bf16 or fp16
    lse_partial  as out_partial without its last dimension, fp32; -inf where a part saw no key,
                 there out_partial may hold anything
    out          where to write the result
    out_dtype    default: that of `out`, else of out_partial

    Returns out and softmax_lse [batch, seqlen, num_heads] or [total, num_heads] fp32, laid out in
    memory as [batch, num_heads, seqlen]. A row of which no part saw a key gives 0 and -inf. The
    sums are in fp32 and in the order of the parts. Differentiable.
    """
    expect_tensor("out_partial", out_partial)
    dims = out_partial.dim()
    expect(dims in (4, 5), "out_partial", "[num_splits, batch, seqlen, num_heads, head_dim]", dims)
    floats = ("float32", "bfloat16", "float16")
    expect_dtype("out_partial", out_partial, *floats)
    num_splits, *rest = out_partial.shape
    expect_at_least("out_partial.shape[0] (num_splits)", num_splits, 1)
    names = ("batch", "seqlen", "num_heads") if dims == 5 else ("total", "num_heads")
    sizes = dict(zip(names, rest, strict=False))
    expect_shape("lse_partial", lse_partial, num_splits=num_splits, **sizes)
    expect_dtype("lse_partial", lse_partial, "float32")
    expect_device("lse_partial", lse_partial, out_partial.device)
    allowed = out_dtype is None or out_dtype in (torch.float32, torch.bfloat16, torch.float16)
    expect(allowed, "out_dtype", "torch.float32, torch.bfloat16 or torch.float16", out_dtype)
    if out is not None:
        expect_shape("out", out, **sizes, head_dim=rest[-1])
        expect_dtype("out", out, *(floats if out_dtype is None else [_name(out_dtype)]))
        expect_device("out", out, out_partial.device)
        expect_last_dim_contiguous("out", out)
        out_dtype = out.dtype
    m = lse_partial.amax(0)
    m = torch.where(m == float("-inf"), 0.0, m)
    weight = torch.exp(lse_partial - m)
    total = weight.sum(0)
    seen = total > 0
    total = torch.where(seen, total, 1.0)
    lse = torch.where(seen, m + total.log(), float("-inf"))
    share = (weight / total)[..., None]
    parts = torch.where(share > 0, out_partial.float(), 0.0)
    merged = (parts * share).sum(0).to(out_dtype or out_partial.dtype)
    lse = lse.transpose(-1, -2).contiguous().transpose(-1, -2)
    return (merged, lse) if out is None else (out.copy_(merged), lse)


def _name(dtype: torch.dtype) -> str:
    return dtype_name(torch.empty(0, dtype=dtype, device="meta"))
