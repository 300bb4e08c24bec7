"""Sequences of which only the first tokens are used, as more sequences without unused tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from splitkv.core.errors import expect_device, expect_dtype, expect_given_with, expect_shape


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens that are there of each sequence [batch] int32, None: all; and the page table."""

    q: Tensor | None = None
    k: Tensor | None = None
    page_table: Tensor | None = None


def used_segments(
    used: Used,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Arguments of `attention_varlen` but q, k and v.

    A sequence with unused tokens becomes two or three: what is used of the queries and keys, then
    unused queries without keys, then unused keys without queries. Nothing is read by the host, no
    token moves, and the gradients of unused tokens are 0.
    """
    expect_dtype("cu_seqlens_q", cu_seqlens_q, "int32")
    batch = len(cu_seqlens_q) - 1
    for name, seqused in (("seqused_q", used.q), ("seqused_k", used.k)):
        if seqused is not None:
            expect_shape(name, seqused, batch=batch)
            expect_dtype(name, seqused, "int32")
            expect_device(name, seqused, cu_seqlens_q.device)
    if cu_seqlens_k is None:
        expect_given_with("seqused_k", used.k, "no cu_seqlens_k")
        expect_given_with("page_table", used.page_table, "no cu_seqlens_k")
    else:
        expect_shape("cu_seqlens_k", cu_seqlens_k, **{"batch + 1": batch + 1})
        expect_dtype("cu_seqlens_k", cu_seqlens_k, "int32")
        expect_device("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.device)
    call = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        **options,
    }
    slopes, copies = options["alibi_slopes"], 1
    if used.page_table is not None:
        length: Any = used.k if cu_seqlens_k is None or used.k is not None else cu_seqlens_k.diff()
        call |= {"cu_seqlens_k": None, "page_table": used.page_table, "cache_seqlens": length}
        if used.q is not None:
            expect_shape("page_table", used.page_table, batch=batch, max_pages=None)
            copies = 2
            call["cu_seqlens_q"] = _bounds(cu_seqlens_q, used.q, copies)
            call["page_table"] = used.page_table.repeat_interleave(copies, 0)
            call["cache_seqlens"] = torch.stack([length, torch.zeros_like(length)], 1).flatten()
            for name in ("k_scale", "v_scale"):
                if name in call and call[name].dim() == 2:
                    call[name] = call[name].repeat_interleave(copies, 0)
    elif used.q is not None or used.k is not None:
        assert cu_seqlens_k is not None
        copies = 3
        call["cu_seqlens_q"] = _bounds(cu_seqlens_q, used.q, copies)
        call["cu_seqlens_k"] = _key_bounds(cu_seqlens_k, used.k)
    if copies > 1 and getattr(slopes, "ndim", 0) == 2:
        expect_shape("alibi_slopes", slopes, batch=batch, num_heads=None)
        call["alibi_slopes"] = slopes.repeat_interleave(copies, 0)
    return call


def _bounds(cu_seqlens: Tensor, used: Tensor | None, copies: int) -> Tensor:
    """Used, then unused queries of each sequence, then none."""
    first, last = cu_seqlens[:-1], cu_seqlens[1:]
    middle = last if used is None else first + used
    return _cumulative(cu_seqlens, [middle, last, last][:copies])


def _key_bounds(cu_seqlens: Tensor, used: Tensor | None) -> Tensor:
    """Used keys of each sequence, then none, then unused ones."""
    first, last = cu_seqlens[:-1], cu_seqlens[1:]
    middle = last if used is None else first + used
    return _cumulative(cu_seqlens, [middle, middle, last])


def _cumulative(cu_seqlens: Tensor, ends: list[Tensor]) -> Tensor:
    return torch.cat([cu_seqlens[:1], torch.stack(ends, 1).flatten()])
