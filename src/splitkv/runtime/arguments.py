"""The options of the public functions, for who checks types: with `return_lse` they return a pair.

Only imported while types are checked; the functions say what they mean.
"""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from splitkv.core.plan import Plan
from splitkv.runtime.schedule import Schedule


class Options(TypedDict, total=False):
    """Arguments of all of them: mask, scores, quantised tensors, the plan."""

    window_size: tuple[int, int]
    sink_tokens: int | Tensor
    max_sink_tokens: int | None
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
    """Arguments of `attention`."""

    dropout_p: float
    deterministic: bool
    out: Tensor | None
    out_scale: Tensor | None


class VarlenOptions(AttentionOptions, total=False):
    """Arguments of `attention_varlen`."""

    page_table: Tensor | None
    cache_seqlens: Tensor | None
    bidirectional_ranges: Tensor | None


class DecodeOptions(Options, total=False):
    """Arguments of `decode`."""

    cache_seqlens: Tensor | None
    page_table: Tensor | None
    max_seqlen_k: int | None
    num_splits: int
    out: Tensor | None
    out_scale: Tensor | None
    early_kv: bool
    schedule: Schedule | None
