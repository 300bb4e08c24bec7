"""The options of the public functions, for who checks types: with `return_lse` they return a pair.

Only imported while types are checked; what they mean is said in `api.py`.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from splitkv.plans import Plan


class Options(TypedDict, total=False):
    """Of all of them: mask, scores, quantised tensors, the plan."""

    window_size: tuple[int, int]
    sink_tokens: int
    attention_chunk: int
    sink_logits: Tensor | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    products: str | None
    causal: bool
    plan: Plan | None


class AttentionOptions(Options, total=False):
    """Of `attention`."""

    dropout_p: float
    deterministic: bool


class VarlenOptions(AttentionOptions, total=False):
    """Of `attention_varlen`."""

    page_table: Tensor | None
    cache_seqlens: Tensor | None


class DecodeOptions(Options, total=False):
    """Of `decode`."""

    cache_seqlens: Tensor | None
    page_table: Tensor | None
    max_seqlen_k: int | None
    num_splits: int
    out: Tensor | None
    early_kv: bool
