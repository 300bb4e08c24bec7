"""Every malformed argument of every public function is named, with what it should have been."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import Device
from splitkv.core.problem import Problem

BATCH, SEQLEN_Q, HEADS, KV_HEADS, DIM, DIM_V = 2, 3, 8, 2, 16, 24
CAPACITY, NUM_PAGES, PAGE_SIZE, MAX_PAGES = 32, 7, 4, 3
NAN = math.nan
TOO_LARGE = f"expected at most {(1 << 30) - 1}"


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="meta")


def gaps(*shape: int) -> Tensor:
    """A tensor of this shape whose last dimension has stride 2."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


CONTIGUOUS = {
    "q": rand(BATCH, SEQLEN_Q, HEADS, DIM),
    "k_cache": rand(BATCH, CAPACITY, KV_HEADS, DIM),
    "v_cache": rand(BATCH, CAPACITY, KV_HEADS, DIM_V),
}
PAGED = CONTIGUOUS | {
    "k_cache": rand(NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM),
    "v_cache": rand(NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM_V),
    "page_table": ints(BATCH, MAX_PAGES),
}
INT8 = CONTIGUOUS | {
    "k_cache": ints(BATCH, CAPACITY, KV_HEADS, DIM, dtype=torch.int8),
    "v_cache": ints(BATCH, CAPACITY, KV_HEADS, DIM_V, dtype=torch.int8),
    "k_scale": torch.ones(KV_HEADS),
    "v_scale": torch.ones(KV_HEADS),
}
FP8 = INT8 | {n: INT8[n].to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")}
PAGED_INT8 = PAGED | {
    "k_cache": PAGED["k_cache"].to(torch.int8),
    "v_cache": PAGED["v_cache"].to(torch.int8),
    "k_scale": torch.ones(()),
    "v_scale": torch.ones(1),
}
INT8_QUERY = INT8 | {"q": ints(BATCH, SEQLEN_Q, HEADS, DIM, dtype=torch.int8)}
DENSE = {
    "q": rand(BATCH, SEQLEN_Q, HEADS, DIM),
    "k": rand(BATCH, 5, KV_HEADS, DIM),
    "v": rand(BATCH, 5, KV_HEADS, DIM_V),
}
VARLEN = {
    "q": rand(6, HEADS, DIM),
    "k": rand(10, KV_HEADS, DIM),
    "v": rand(10, KV_HEADS, DIM_V),
    "cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 4, 10], dtype=torch.int32),
    "max_seqlen_q": 3,
    "max_seqlen_k": 6,
}
PAGED_VARLEN = VARLEN | {
    "k": PAGED["k_cache"],
    "v": PAGED["v_cache"],
    "cu_seqlens_k": None,
    "page_table": PAGED["page_table"],
    "cache_seqlens": torch.tensor([4, 6], dtype=torch.int32),
}
ONE = torch.ones(())
DENSE_INT8 = DENSE | {
    **{name: ints(*DENSE[name].shape, dtype=torch.int8) for name in ("k", "v")},
    "k_scale": torch.ones(BATCH, KV_HEADS),
    "v_scale": torch.ones(KV_HEADS),
}
DENSE_INT8_QUERY = DENSE_INT8 | {"q": ints(BATCH, SEQLEN_Q, HEADS, DIM, dtype=torch.int8)}
VARLEN_INT8 = VARLEN | {
    **{name: ints(*VARLEN[name].shape, dtype=torch.int8) for name in ("k", "v")},
    "k_scale": torch.ones(10, KV_HEADS),
    "v_scale": torch.ones(10, KV_HEADS),
}
VARLEN_FP8_QUERY = VARLEN_INT8 | {
    name: VARLEN[name].to(torch.float8_e4m3fn) for name in ("q", "k", "v")
}
PAGED_VARLEN_INT8 = PAGED_VARLEN | {
    **{name: PAGED_VARLEN[name].to(torch.int8) for name in ("k", "v")},
    "k_scale": torch.ones(NUM_PAGES, PAGE_SIZE, KV_HEADS),
    "v_scale": torch.ones(NUM_PAGES, PAGE_SIZE, KV_HEADS),
}
WARMUP = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "max_seqlen_k": 64}

FLOATS = "bfloat16, float16, float32 or float64"
WORKING = "'bfloat16', 'float16', 'float32' or 'float64'"
STRIDE = "expected stride 1 in the last dimension, got"

# A base of good arguments, what is wrong in them, the message.
Row = tuple[dict[str, Any], dict[str, Any], str]

TENSORS: list[Row] = [
    (CONTIGUOUS, {"q": None}, "q: expected a tensor, got None"),
    (CONTIGUOUS, {"q": [1.0]}, "q: expected a tensor, got [1.0]; pass torch.as_tensor(q)"),
    (CONTIGUOUS, {"k_cache": "keys"}, "k_cache: expected a tensor, got 'keys'"),
    (CONTIGUOUS, {"v_cache": 3}, "v_cache: expected a tensor, got 3"),
    (
        CONTIGUOUS,
        {"k_cache": rand(BATCH, CAPACITY, KV_HEADS, DIM).numpy()},
        f"k_cache: expected a tensor, got a numpy.ndarray of shape [2, {CAPACITY}, 2, {DIM}]; "
        "pass torch.as_tensor(k_cache)",
    ),
    (
        CONTIGUOUS,
        {"q": rand(BATCH, HEADS, DIM)},
        "q: expected [batch, seqlen_q, num_heads, head_dim], got [2, 8, 16]",
    ),
    (
        CONTIGUOUS,
        {"k_cache": rand(BATCH + 1, CAPACITY, KV_HEADS, DIM)},
        "k_cache: expected [batch=2, seqlen_k, num_kv_heads, head_dim=16], got [3, 32, 2, 16]",
    ),
    (
        CONTIGUOUS,
        {"k_cache": rand(BATCH, CAPACITY, KV_HEADS, DIM_V)},
        "k_cache: expected [batch=2, seqlen_k, num_kv_heads, head_dim=16], got [2, 32, 2, 24]",
    ),
    (
        CONTIGUOUS,
        {"k_cache": rand(BATCH, CAPACITY, DIM)},
        "k_cache: expected [batch=2, seqlen_k, num_kv_heads, head_dim=16], got [2, 32, 16]",
    ),
    (
        CONTIGUOUS,
        {"v_cache": rand(BATCH, CAPACITY, 1, DIM_V)},
        "v_cache: expected [batch=2, seqlen_k=32, num_kv_heads=2, head_dim_v], got [2, 32, 1, 24]",
    ),
    (
        CONTIGUOUS,
        {"v_cache": rand(BATCH, CAPACITY - 1, KV_HEADS, DIM_V)},
        "v_cache: expected [batch=2, seqlen_k=32, num_kv_heads=2, head_dim_v], got [2, 31, 2, 24]",
    ),
    (
        PAGED,
        {"k_cache": rand(NUM_PAGES, PAGE_SIZE, DIM)},
        "k_cache: expected [num_pages, page_size, num_kv_heads, head_dim=16], got [7, 4, 16]",
    ),
    (
        PAGED,
        {"v_cache": rand(NUM_PAGES, 8, KV_HEADS, DIM_V)},
        "v_cache: expected [num_pages=7, page_size=4, num_kv_heads=2, head_dim_v], "
        "got [7, 8, 2, 24]",
    ),
    (
        PAGED,
        {n: rand(NUM_PAGES, 0, KV_HEADS, DIM) for n in ("k_cache", "v_cache")},
        "k_cache.shape[1] (page_size): expected more than 0, got 0",
    ),
    (
        CONTIGUOUS,
        {"q": rand(BATCH, SEQLEN_Q, 7, DIM)},
        "num_heads: expected a multiple of num_kv_heads=2, got 7",
    ),
    (
        CONTIGUOUS,
        {"q": rand(BATCH, SEQLEN_Q, 1, DIM)},
        "num_heads: expected a multiple of num_kv_heads=2, got 1",
    ),
    (
        CONTIGUOUS,
        {"q": rand(BATCH, SEQLEN_Q, 0, DIM)},
        "num_heads: expected more than 0, got 0",
    ),
    (
        CONTIGUOUS,
        {n: rand(BATCH, CAPACITY, 0, DIM) for n in ("k_cache", "v_cache")},
        "num_kv_heads: expected more than 0, got 0",
    ),
    (
        CONTIGUOUS,
        {
            "q": rand(BATCH, SEQLEN_Q, HEADS, 0),
            "k_cache": rand(BATCH, CAPACITY, KV_HEADS, 0),
        },
        "head_dim: expected more than 0, got 0",
    ),
    (
        CONTIGUOUS,
        {"v_cache": rand(BATCH, CAPACITY, KV_HEADS, 0)},
        "head_dim_v: expected more than 0, got 0",
    ),
    (
        CONTIGUOUS,
        {"q": ints(BATCH, SEQLEN_Q, HEADS, DIM)},
        f"q: expected dtype {FLOATS}, got int32",
    ),
    (
        CONTIGUOUS,
        {"q": rand(BATCH, SEQLEN_Q, HEADS, DIM, dtype=torch.bfloat16)},
        "k_cache: expected dtype bfloat16, got float32",
    ),
    (
        CONTIGUOUS,
        {"v_cache": rand(BATCH, CAPACITY, KV_HEADS, DIM_V, dtype=torch.float16)},
        "v_cache: expected dtype float32, got float16",
    ),
    (
        CONTIGUOUS,
        {"k_cache": ints(BATCH, CAPACITY, KV_HEADS, DIM, dtype=torch.uint8)},
        "v_cache: expected dtype uint8, got float32",
    ),
    (
        CONTIGUOUS,
        {"k_cache": meta(BATCH, CAPACITY, KV_HEADS, DIM)},
        "k_cache: expected device cpu, got meta",
    ),
    (
        CONTIGUOUS,
        {"v_cache": meta(BATCH, CAPACITY, KV_HEADS, DIM_V)},
        "v_cache: expected device cpu, got meta",
    ),
    (
        CONTIGUOUS,
        {"q": gaps(BATCH, SEQLEN_Q, HEADS, DIM)},
        f"q: {STRIDE} [768, 256, 32, 2]; pass q.contiguous()",
    ),
    (
        CONTIGUOUS,
        {"k_cache": gaps(BATCH, CAPACITY, KV_HEADS, DIM)},
        f"k_cache: {STRIDE} [2048, 64, 32, 2]; pass k_cache.contiguous()",
    ),
    (
        CONTIGUOUS,
        {"v_cache": rand(BATCH, CAPACITY, DIM_V, KV_HEADS).transpose(2, 3)},
        f"v_cache: {STRIDE} [1536, 48, 1, 2]; pass v_cache.contiguous()",
    ),
]

LENGTHS: list[Row] = [
    (
        PAGED,
        {"page_table": ints(BATCH, MAX_PAGES, dtype=torch.int64)},
        "page_table: expected dtype int32, got int64; pass page_table.int()",
    ),
    (
        PAGED,
        {"page_table": rand(BATCH, MAX_PAGES)},
        "page_table: expected dtype int32, got float32",
    ),
    (
        PAGED,
        {"page_table": ints(MAX_PAGES)},
        "page_table: expected [batch=2, max_pages], got [3]",
    ),
    (
        PAGED,
        {"page_table": ints(BATCH + 1, MAX_PAGES)},
        "page_table: expected [batch=2, max_pages], got [3, 3]",
    ),
    (
        PAGED,
        {"page_table": ints(BATCH, MAX_PAGES, device="meta")},
        "page_table: expected device cpu, got meta",
    ),
    (
        PAGED,
        {"page_table": ints(MAX_PAGES, BATCH).T},
        f"page_table: {STRIDE} [1, 2]; pass page_table.contiguous()",
    ),
    (
        PAGED,
        {"page_table": [[0, 1, 2], [3, 4, 5]]},
        "page_table: expected a tensor [batch=2, max_pages], got [[0, 1, 2], [3, 4, 5]]; "
        "pass torch.as_tensor(page_table)",
    ),
    (
        CONTIGUOUS,
        {"cache_seqlens": ints(BATCH, dtype=torch.int64)},
        "cache_seqlens: expected dtype int32, got int64; pass cache_seqlens.int()",
    ),
    (
        CONTIGUOUS,
        {"cache_seqlens": ints(BATCH + 1)},
        "cache_seqlens: expected [batch=2], got [3]",
    ),
    (
        CONTIGUOUS,
        {"cache_seqlens": ints(BATCH, 1)},
        "cache_seqlens: expected [batch=2], got [2, 1]",
    ),
    (CONTIGUOUS, {"cache_seqlens": 7}, "cache_seqlens: expected a tensor [batch=2], got 7"),
    (
        CONTIGUOUS,
        {"cache_seqlens": [7, 8]},
        "cache_seqlens: expected a tensor [batch=2], got [7, 8]; "
        "pass torch.as_tensor(cache_seqlens)",
    ),
    (
        CONTIGUOUS,
        {"cache_seqlens": ints(BATCH, device="meta")},
        "cache_seqlens: expected device cpu, got meta",
    ),
    (
        CONTIGUOUS,
        {"cache_seqlens": ints(2 * BATCH)[::2]},
        f"cache_seqlens: {STRIDE} [2]; pass cache_seqlens.contiguous()",
    ),
    (
        CONTIGUOUS,
        {"max_seqlen_k": CAPACITY + 1},
        "max_seqlen_k: expected 0 to 32, got 33",
    ),
    (
        PAGED,
        {"max_seqlen_k": MAX_PAGES * PAGE_SIZE + 1},
        "max_seqlen_k: expected 0 to 12, got 13",
    ),
    (CONTIGUOUS, {"max_seqlen_k": -1}, "max_seqlen_k: expected 0 to 32, got -1"),
    (CONTIGUOUS, {"max_seqlen_k": 8.0}, "max_seqlen_k: expected an integer, got 8.0"),
    (
        CONTIGUOUS,
        {"max_seqlen_k": torch.tensor(8)},
        "max_seqlen_k: expected an integer, got a tensor of shape []",
    ),
]

# Checked alike by every function.
MASKS_AND_SCORES: list[tuple[dict[str, Any], str]] = [
    ({"causal": None}, "causal: expected True or False, got None"),
    ({"causal": "yes"}, "causal: expected True or False, got 'yes'"),
    ({"window_size": (1, 2, 3)}, "window_size: expected (left, right), got (1, 2, 3)"),
    ({"window_size": [4]}, "window_size: expected (left, right), got [4]"),
    ({"window_size": 4}, "window_size: expected (left, right), got 4"),
    ({"window_size": None}, "window_size: expected (left, right), got None"),
    ({"window_size": (-2, 0)}, "window_size left: expected at least -1, got -2"),
    ({"window_size": (0, -5)}, "window_size right: expected at least -1, got -5"),
    ({"window_size": (1.5, 0)}, "window_size left: expected an integer, got 1.5"),
    ({"window_size": (None, 0)}, "window_size left: expected an integer, got None"),
    ({"sink_tokens": -1}, "sink_tokens: expected at least 0, got -1"),
    ({"sink_tokens": 1.5}, "sink_tokens: expected an integer, got 1.5"),
    ({"sink_tokens": None}, "sink_tokens: expected an integer, got None"),
    ({"sink_tokens": ints(3)}, "sink_tokens: expected [batch=2], got [3]"),
    ({"sink_tokens": ints()}, "sink_tokens: expected [batch=2], got []"),
    ({"sink_tokens": ints(2, 1)}, "sink_tokens: expected [batch=2], got [2, 1]"),
    (
        {"sink_tokens": ints(2, dtype=torch.int64)},
        "sink_tokens: expected dtype int32, got int64; pass sink_tokens.int()",
    ),
    ({"sink_tokens": ints(2, device="meta")}, "sink_tokens: expected device cpu, got meta"),
    (
        {"sink_tokens": ints(4)[::2]},
        "sink_tokens: expected stride 1 in the last dimension, got [2]; "
        "pass sink_tokens.contiguous()",
    ),
    ({"sink_tokens": [1, 2]}, "sink_tokens: expected an integer, got [1, 2]"),
    (
        {"max_sink_tokens": 4},
        "max_sink_tokens: expected None beside sink_tokens of one number, got 4; "
        "it bounds sink_tokens that are a tensor",
    ),
    (
        {"sink_tokens": ints(2), "max_sink_tokens": -1},
        "max_sink_tokens: expected at least 0, got -1",
    ),
    (
        {"sink_tokens": ints(2), "max_sink_tokens": 1.5},
        "max_sink_tokens: expected an integer, got 1.5",
    ),
    ({"attention_chunk": -1}, "attention_chunk: expected at least 0, got -1"),
    ({"attention_chunk": 2.5}, "attention_chunk: expected an integer, got 2.5"),
    ({"softmax_scale": -0.5}, "softmax_scale: expected more than 0, got -0.5"),
    ({"softmax_scale": 0.0}, "softmax_scale: expected more than 0, got 0.0"),
    ({"softmax_scale": NAN}, "softmax_scale: expected a finite number, got nan"),
    ({"softmax_scale": math.inf}, "softmax_scale: expected a finite number, got inf"),
    ({"softmax_scale": "1"}, "softmax_scale: expected a finite number, got '1'"),
    (
        {"softmax_scale": torch.tensor(0.5)},
        "softmax_scale: expected a finite number, got a tensor of shape []",
    ),
    ({"softcap": -1.0}, "softcap: expected at least 0, got -1.0"),
    ({"softcap": NAN}, "softcap: expected a finite number, got nan"),
    ({"softcap": None}, "softcap: expected a finite number, got None"),
    ({"sink_logits": rand(HEADS + 1)}, "sink_logits: expected [num_heads=8], got [9]"),
    ({"sink_logits": rand(1, HEADS)}, "sink_logits: expected [num_heads=8], got [1, 8]"),
    ({"sink_logits": 0.5}, "sink_logits: expected a tensor [num_heads=8], got 0.5"),
    ({"sink_logits": ints(HEADS)}, f"sink_logits: expected dtype {FLOATS}, got int32"),
    ({"sink_logits": meta(HEADS)}, "sink_logits: expected device cpu, got meta"),
    (
        {"sink_logits": gaps(HEADS)},
        f"sink_logits: {STRIDE} [2]; pass sink_logits.contiguous()",
    ),
    ({"alibi_slopes": rand(KV_HEADS)}, "alibi_slopes: expected [num_heads=8], got [2]"),
    (
        {"alibi_slopes": rand(3, HEADS)},
        "alibi_slopes: expected [batch=2, num_heads=8], got [3, 8]",
    ),
    (
        {"alibi_slopes": rand(HEADS, dtype=torch.bfloat16)},
        "alibi_slopes: expected dtype float32 or float64, got bfloat16",
    ),
    ({"alibi_slopes": meta(HEADS)}, "alibi_slopes: expected device cpu, got meta"),
    (
        {"alibi_slopes": [0.5] * 2},
        "alibi_slopes: expected a tensor [num_heads=8], got [0.5, 0.5]; "
        "pass torch.as_tensor(alibi_slopes)",
    ),
    (
        {"alibi_slopes": gaps(HEADS)},
        f"alibi_slopes: {STRIDE} [2]; pass alibi_slopes.contiguous()",
    ),
    ({"return_lse": None}, "return_lse: expected True or False, got None"),
]

SCALES: list[Row] = [
    (INT8, {"k_scale": None}, "k_scale: expected a value with a int8 cache, got None"),
    (INT8, {"v_scale": None}, "v_scale: expected a value with a int8 cache, got None"),
    (FP8, {"k_scale": None}, "k_scale: expected a value with a float8_e4m3fn cache, got None"),
    (
        CONTIGUOUS,
        {"k_scale": torch.ones(())},
        "k_scale: expected None with a float32 cache, got a tensor of shape []",
    ),
    (
        CONTIGUOUS,
        {"v_scale": torch.ones(KV_HEADS)},
        "v_scale: expected None with a float32 cache, got a tensor of shape [2]",
    ),
    (
        CONTIGUOUS,
        {"q_scale": torch.ones(())},
        "q_scale: expected None with a float32 cache, got a tensor of shape []",
    ),
    (
        INT8,
        {"q_scale": torch.ones(())},
        "q_scale: expected None with a float32 q, got a tensor of shape []",
    ),
    (INT8_QUERY, {}, "q_scale: expected a value with a int8 q, got None"),
    (
        INT8_QUERY,
        {"q_scale": torch.ones(3)},
        "q_scale: expected one element, [num_heads=8], [batch=2, num_heads=8] or "
        "[batch=2, seqlen_q=3, num_heads=8], got [3]",
    ),
    (
        FP8,
        {"q": INT8_QUERY["q"], "q_scale": torch.ones(())},
        "q: expected dtype float8_e4m3fn, got int8",
    ),
    (
        CONTIGUOUS,
        {"q": INT8_QUERY["q"]},
        f"q: expected dtype {FLOATS}, got int8",
    ),
    (
        INT8,
        {"k_scale": torch.ones(3)},
        "k_scale: expected one element, [num_kv_heads=2], [batch=2, num_kv_heads=2] or "
        "[batch=2, seqlen_k=32, num_kv_heads=2], got [3]",
    ),
    (
        INT8,
        {"k_scale": torch.ones(KV_HEADS, CAPACITY)},
        "k_scale: expected one element, [num_kv_heads=2], [batch=2, num_kv_heads=2] or "
        "[batch=2, seqlen_k=32, num_kv_heads=2], got [2, 32]",
    ),
    (
        INT8,
        {"v_scale": torch.ones(BATCH, CAPACITY, KV_HEADS, 1)},
        "v_scale: expected one element, [num_kv_heads=2], [batch=2, num_kv_heads=2] or "
        "[batch=2, seqlen_k=32, num_kv_heads=2], got [2, 32, 2, 1]",
    ),
    (
        PAGED_INT8,
        {"k_scale": torch.ones(NUM_PAGES, KV_HEADS)},
        "k_scale: expected one element, [num_kv_heads=2], [batch=2, num_kv_heads=2] or "
        "[num_pages=7, page_size=4, num_kv_heads=2], got [7, 2]",
    ),
    (
        INT8,
        {"v_scale": torch.ones(())},
        "v_scale: expected the granularity of k_scale (head), got 'tensor'",
    ),
    (
        PAGED_INT8,
        {"v_scale": torch.ones(NUM_PAGES, PAGE_SIZE, KV_HEADS)},
        "v_scale: expected the granularity of k_scale (tensor), got 'token'",
    ),
    (INT8, {"k_scale": 0.5}, "k_scale: expected a tensor, got 0.5"),
    (
        INT8,
        {"k_scale": torch.ones(KV_HEADS, dtype=torch.float64)},
        "k_scale: expected dtype float32, got float64",
    ),
    (INT8, {"v_scale": meta(KV_HEADS)}, "v_scale: expected device cpu, got meta"),
    (
        INT8,
        {"v_cache": CONTIGUOUS["v_cache"]},
        "v_cache: expected dtype int8, got float32",
    ),
]

OUT: list[Row] = [
    (
        CONTIGUOUS,
        {"out": rand(BATCH, SEQLEN_Q, HEADS, DIM)},
        "out: expected [batch=2, seqlen_q=3, num_heads=8, head_dim_v=24], got [2, 3, 8, 16]",
    ),
    (
        CONTIGUOUS,
        {"out": rand(BATCH, HEADS, DIM_V)},
        "out: expected [batch=2, seqlen_q=3, num_heads=8, head_dim_v=24], got [2, 8, 24]",
    ),
    (
        CONTIGUOUS,
        {"out": rand(BATCH, SEQLEN_Q, HEADS, DIM_V, dtype=torch.bfloat16)},
        "out: expected dtype float32, got bfloat16",
    ),
    (
        INT8_QUERY,
        {"q_scale": torch.ones(()), "out": rand(BATCH, SEQLEN_Q, HEADS, DIM_V)},
        "out: expected dtype bfloat16, got float32",
    ),
    (
        CONTIGUOUS,
        {"out": meta(BATCH, SEQLEN_Q, HEADS, DIM_V)},
        "out: expected device cpu, got meta",
    ),
    (
        CONTIGUOUS,
        {"out": gaps(BATCH, SEQLEN_Q, HEADS, DIM_V)},
        f"out: {STRIDE} [1152, 384, 48, 2]; pass out.contiguous()",
    ),
    (
        CONTIGUOUS,
        {"out_scale": torch.ones(1), "out": rand(BATCH, SEQLEN_Q, HEADS, DIM_V)},
        "out: expected dtype float8_e4m3fn, got float32",
    ),
    (
        CONTIGUOUS,
        {"out_scale": torch.ones(2)},
        "out_scale: expected one element, [1] or [], got [2]",
    ),
    (
        CONTIGUOUS,
        {"out_scale": torch.ones(1, dtype=torch.float64)},
        "out_scale: expected dtype float32, got float64",
    ),
    (CONTIGUOUS, {"out_scale": meta(1)}, "out_scale: expected device cpu, got meta"),
    (CONTIGUOUS, {"out_scale": 0.5}, "out_scale: expected a tensor, got 0.5"),
    (
        CONTIGUOUS,
        {"out": True},
        "out: expected a tensor [batch=2, seqlen_q=3, num_heads=8, head_dim_v=24], got True",
    ),
]

RANGES: list[Row] = [
    (
        VARLEN,
        {"bidirectional_ranges": ints(2, 2)},
        "bidirectional_ranges: expected [batch=2, ranges, (first, end)=2], got [2, 2]",
    ),
    (
        VARLEN,
        {"bidirectional_ranges": ints(3, 1, 2)},
        "bidirectional_ranges: expected [batch=2, ranges, (first, end)=2], got [3, 1, 2]",
    ),
    (
        VARLEN,
        {"bidirectional_ranges": ints(2, 1, 2, dtype=torch.int64)},
        "bidirectional_ranges: expected dtype int32, got int64; pass bidirectional_ranges.int()",
    ),
    (
        VARLEN,
        {"bidirectional_ranges": ints(2, 2, 2).transpose(1, 2)},
        "bidirectional_ranges: expected contiguous memory, got strides [4, 1, 2]; "
        "pass bidirectional_ranges.contiguous()",
    ),
    (
        VARLEN,
        {"bidirectional_ranges": [(0, 4)]},
        "bidirectional_ranges: expected a tensor [batch=2, ranges, (first, end)=2], got [(0, 4)]; "
        "pass torch.as_tensor(bidirectional_ranges)",
    ),
]

SPLITS: list[Row] = [
    (CONTIGUOUS, {"num_splits": -1}, "num_splits: expected 0 to 1024, got -1"),
    (CONTIGUOUS, {"num_splits": 1025}, "num_splits: expected 0 to 1024, got 1025"),
    (CONTIGUOUS, {"num_splits": 2.0}, "num_splits: expected an integer, got 2.0"),
    (CONTIGUOUS, {"num_splits": None}, "num_splits: expected an integer, got None"),
    (CONTIGUOUS, {"plan": "waves"}, "plan: expected a splitkv.Plan, got 'waves'"),
    (CONTIGUOUS, {"plan": 4}, "plan: expected a splitkv.Plan, got 4"),
]

DECODE: list[Row] = [
    *TENSORS,
    *LENGTHS,
    *((CONTIGUOUS, wrong, message) for wrong, message in MASKS_AND_SCORES),
    *SCALES,
    *OUT,
    *SPLITS,
]

TRAINING: list[tuple[dict[str, Any], str]] = [
    *MASKS_AND_SCORES,
    ({"dropout_p": 1.0}, "dropout_p: expected from 0 to less than 1, got 1.0"),
    ({"dropout_p": -0.1}, "dropout_p: expected from 0 to less than 1, got -0.1"),
    ({"dropout_p": NAN}, "dropout_p: expected a finite number, got nan"),
    ({"dropout_p": None}, "dropout_p: expected a finite number, got None"),
    ({"deterministic": None}, "deterministic: expected True or False, got None"),
    ({"plan": "waves"}, "plan: expected a splitkv.Plan, got 'waves'"),
]

ATTENTION: list[Row] = [
    *((DENSE, wrong, message) for wrong, message in TRAINING),
    (DENSE, {"q": None}, "q: expected a tensor, got None"),
    (DENSE, {"k": None}, "k: expected a tensor, got None"),
    (DENSE, {"v": 1}, "v: expected a tensor, got 1"),
    (
        DENSE,
        {"q": rand(6, HEADS, DIM)},
        "q: expected [batch, seqlen_q, num_heads, head_dim], got [6, 8, 16]",
    ),
    (
        DENSE,
        {"k": rand(BATCH, 5, KV_HEADS, DIM + 1)},
        "k: expected [batch=2, seqlen_k, num_kv_heads, head_dim=16], got [2, 5, 2, 17]",
    ),
    (
        DENSE,
        {"v": rand(BATCH, 4, KV_HEADS, DIM_V)},
        "v: expected [batch=2, seqlen_k=5, num_kv_heads=2, head_dim_v], got [2, 4, 2, 24]",
    ),
    (
        DENSE,
        {"q": rand(BATCH, SEQLEN_Q, 9, DIM)},
        "num_heads: expected a multiple of num_kv_heads=2, got 9",
    ),
    (
        DENSE,
        {"v": rand(BATCH, 5, KV_HEADS, 0)},
        "head_dim_v: expected more than 0, got 0",
    ),
    (
        DENSE,
        {"q": ints(BATCH, SEQLEN_Q, HEADS, DIM, dtype=torch.int8)},
        f"q: expected dtype {FLOATS}, got int8",
    ),
    (
        DENSE,
        {"k": rand(BATCH, 5, KV_HEADS, DIM, dtype=torch.float16)},
        "k: expected dtype float32, got float16",
    ),
    (
        DENSE,
        {"v": rand(BATCH, 5, KV_HEADS, DIM_V, dtype=torch.bfloat16)},
        "v: expected dtype float32, got bfloat16",
    ),
    (DENSE, {"k": meta(BATCH, 5, KV_HEADS, DIM)}, "k: expected device cpu, got meta"),
    (DENSE, {"v": meta(BATCH, 5, KV_HEADS, DIM_V)}, "v: expected device cpu, got meta"),
    (
        DENSE,
        {"k": gaps(BATCH, 5, KV_HEADS, DIM)},
        f"k: {STRIDE} [320, 64, 32, 2]; pass k.contiguous()",
    ),
]

PRODUCTS = "'widened', 'half' or 'full'"
QUANTISED: list[Row] = [
    (INT8, {"products": "int8"}, f"products: expected {PRODUCTS}, got 'int8'"),
    (INT8, {"products": True}, f"products: expected {PRODUCTS}, got True"),
    (CONTIGUOUS, {"products": "half"}, "products: expected None with a float32 cache, got 'half'"),
]
DENSE_QUANTISED: list[Row] = [
    (DENSE_INT8, {"k_scale": None}, "k_scale: expected a value with int8 keys, got None"),
    (DENSE_INT8, {"v_scale": None}, "v_scale: expected a value with int8 keys, got None"),
    (DENSE, {"k_scale": ONE}, "k_scale: expected None with float32 keys, got a tensor of shape []"),
    (DENSE, {"q_scale": ONE}, "q_scale: expected None with float32 keys, got a tensor of shape []"),
    (DENSE, {"products": "full"}, "products: expected None with float32 keys, got 'full'"),
    (DENSE_INT8, {"products": "both"}, f"products: expected {PRODUCTS}, got 'both'"),
    (
        DENSE_INT8,
        {"q_scale": ONE},
        "q_scale: expected None with a float32 q, got a tensor of shape []",
    ),
    (DENSE_INT8_QUERY, {}, "q_scale: expected a value with a int8 q, got None"),
    (
        DENSE_INT8_QUERY,
        {"q_scale": torch.ones(KV_HEADS)},
        "q_scale: expected one element, [num_heads=8], [batch=2, num_heads=8] or "
        "[batch=2, seqlen_q=3, num_heads=8], got [2]",
    ),
    (
        DENSE_INT8,
        {"v": DENSE["v"].to(torch.float8_e4m3fn)},
        "v: expected dtype int8, got float8_e4m3fn",
    ),
    (
        DENSE_INT8,
        {"q": DENSE["q"].to(torch.float8_e4m3fn), "q_scale": ONE},
        "q: expected dtype int8, got float8_e4m3fn",
    ),
    (
        DENSE_INT8,
        {"k_scale": torch.ones(5, KV_HEADS)},
        "k_scale: expected one element, [num_kv_heads=2], [batch=2, num_kv_heads=2] or "
        "[batch=2, seqlen_k=5, num_kv_heads=2], got [5, 2]",
    ),
    (
        DENSE_INT8,
        {"v_scale": torch.ones(BATCH, 5, KV_HEADS)},
        "v_scale: expected the granularity of k_scale (head), got 'token'",
    ),
    (
        DENSE_INT8,
        {"k_scale": torch.ones(KV_HEADS, dtype=torch.bfloat16)},
        "k_scale: expected dtype float32, got bfloat16",
    ),
    (DENSE_INT8, {"v_scale": meta(KV_HEADS)}, "v_scale: expected device cpu, got meta"),
    (DENSE_INT8, {"k_scale": 1.0}, "k_scale: expected a tensor, got 1.0"),
]
RAGGED_QUANTISED: list[Row] = [
    (VARLEN_INT8, {"v_scale": None}, "v_scale: expected a value with int8 keys, got None"),
    (
        VARLEN_INT8,
        {"k_scale": torch.ones(BATCH, KV_HEADS)},
        "k_scale: expected one element, [num_kv_heads=2] or [total_k=10, num_kv_heads=2], "
        "got [2, 2]",
    ),
    (VARLEN_FP8_QUERY, {}, "q_scale: expected a value with a float8_e4m3fn q, got None"),
    (
        VARLEN_FP8_QUERY,
        {"q_scale": torch.ones(BATCH, HEADS)},
        "q_scale: expected one element, [num_heads=8] or [total_q=6, num_heads=8], got [2, 8]",
    ),
    (
        PAGED_VARLEN_INT8,
        {"v_scale": torch.ones(NUM_PAGES, KV_HEADS)},
        "v_scale: expected one element, [num_kv_heads=2], [batch=2, num_kv_heads=2] or "
        "[num_pages=7, page_size=4, num_kv_heads=2], got [7, 2]",
    ),
    (PAGED_VARLEN_INT8, {"k_scale": None}, "k_scale: expected a value with int8 keys, got None"),
]

RAGGED: list[Row] = [
    *((VARLEN, wrong, message) for wrong, message in TRAINING),
    *RANGES,
    (
        VARLEN,
        {"q": rand(2, 3, HEADS, DIM)},
        "q: expected [total_q, num_heads, head_dim], got [2, 3, 8, 16]",
    ),
    (
        VARLEN,
        {"k": rand(10, KV_HEADS, DIM - 1)},
        "k: expected [total_k, num_kv_heads, head_dim=16], got [10, 2, 15]",
    ),
    (
        VARLEN,
        {"v": rand(9, KV_HEADS, DIM_V)},
        "v: expected [total_k=10, num_kv_heads=2, head_dim_v], got [9, 2, 24]",
    ),
    (VARLEN, {"cu_seqlens_q": None}, "cu_seqlens_q: expected a tensor, got None"),
    (VARLEN, {"cu_seqlens_k": None}, "cu_seqlens_k: expected a tensor, got None"),
    (
        VARLEN,
        {"cu_seqlens_q": [0, 3, 6]},
        "cu_seqlens_q: expected a tensor, got [0, 3, 6]; pass torch.as_tensor(cu_seqlens_q)",
    ),
    (
        VARLEN,
        {"cu_seqlens_q": ints(1, 3)},
        "cu_seqlens_q: expected [batch + 1], got [1, 3]",
    ),
    (
        VARLEN,
        {"cu_seqlens_q": ints(0)},
        "cu_seqlens_q.shape[0] (batch + 1): expected more than 0, got 0",
    ),
    (
        VARLEN,
        {"cu_seqlens_k": ints(4)},
        "cu_seqlens_k: expected [batch + 1=3], got [4]",
    ),
    (
        VARLEN,
        {"cu_seqlens_k": ints(3, dtype=torch.int64)},
        "cu_seqlens_k: expected dtype int32, got int64; pass cu_seqlens_k.int()",
    ),
    (
        VARLEN,
        {"cu_seqlens_q": ints(3, device="meta")},
        "cu_seqlens_q: expected device cpu, got meta",
    ),
    (
        VARLEN,
        {"cu_seqlens_q": ints(6)[::2]},
        f"cu_seqlens_q: {STRIDE} [2]; pass cu_seqlens_q.contiguous()",
    ),
    (VARLEN, {"max_seqlen_q": None}, "max_seqlen_q: expected an integer, got None"),
    (VARLEN, {"max_seqlen_k": 6.0}, "max_seqlen_k: expected an integer, got 6.0"),
    (VARLEN, {"max_seqlen_q": -1}, "max_seqlen_q: expected at least 0, got -1"),
    (VARLEN, {"max_seqlen_k": -3}, "max_seqlen_k: expected at least 0, got -3"),
    (VARLEN, {"max_seqlen_q": 1 << 30}, f"max_seqlen_q: {TOO_LARGE}, got {1 << 30}"),
    (VARLEN, {"max_seqlen_q": 1 << 70}, f"max_seqlen_q: {TOO_LARGE}, got {1 << 70}"),
    (VARLEN, {"max_seqlen_k": 1 << 70}, f"max_seqlen_k: {TOO_LARGE}, got {1 << 70}"),
    (
        VARLEN,
        {"max_seqlen_k": torch.tensor(6)},
        "max_seqlen_k: expected an integer, got a tensor of shape []",
    ),
]

PAGES: list[Row] = [
    (
        VARLEN,
        {"cache_seqlens": ints(BATCH)},
        "cache_seqlens: expected None with cu_seqlens_k, got a tensor of shape [2]",
    ),
    (
        PAGED_VARLEN,
        {"cu_seqlens_k": ints(BATCH + 1)},
        "cu_seqlens_k: expected None with a page_table, got a tensor of shape [3]",
    ),
    (
        PAGED_VARLEN,
        {"cache_seqlens": None},
        "cache_seqlens: expected a value with a page_table, got None",
    ),
    (PAGED_VARLEN, {"cache_seqlens": ints(3)}, "cache_seqlens: expected [batch=2], got [3]"),
    (
        PAGED_VARLEN,
        {"cache_seqlens": ints(BATCH, dtype=torch.int64)},
        "cache_seqlens: expected dtype int32, got int64; pass cache_seqlens.int()",
    ),
    (
        PAGED_VARLEN,
        {"cache_seqlens": [4, 6]},
        "cache_seqlens: expected a tensor [batch=2], got [4, 6]; "
        "pass torch.as_tensor(cache_seqlens)",
    ),
    (
        PAGED_VARLEN,
        {"page_table": ints(3, MAX_PAGES)},
        "page_table: expected [batch=2, max_pages], got [3, 3]",
    ),
    (
        PAGED_VARLEN,
        {"page_table": ints(BATCH, MAX_PAGES, dtype=torch.int64)},
        "page_table: expected dtype int32, got int64; pass page_table.int()",
    ),
    (
        PAGED_VARLEN,
        {"page_table": [[0]]},
        "page_table: expected a tensor [batch=2, max_pages], got [[0]]; "
        "pass torch.as_tensor(page_table)",
    ),
    (
        PAGED_VARLEN,
        {"k": VARLEN["k"]},
        "k: expected [num_pages, page_size, num_kv_heads, head_dim=16], got [10, 2, 16]",
    ),
    (
        PAGED_VARLEN,
        {"v": rand(NUM_PAGES, 8, KV_HEADS, DIM_V)},
        "v: expected [num_pages=7, page_size=4, num_kv_heads=2, head_dim_v], got [7, 8, 2, 24]",
    ),
    (
        PAGED_VARLEN,
        {n: rand(NUM_PAGES, 0, KV_HEADS, DIM) for n in ("k", "v")},
        "k.shape[1] (page_size): expected more than 0, got 0",
    ),
    (
        PAGED_VARLEN,
        {"max_seqlen_k": MAX_PAGES * PAGE_SIZE + 1},
        "max_seqlen_k: expected 0 to 12, got 13",
    ),
    (PAGED_VARLEN, {"max_seqlen_k": None}, "max_seqlen_k: expected an integer, got None"),
    (PAGED_VARLEN, {"cu_seqlens_q": None}, "cu_seqlens_q: expected a tensor, got None"),
]

WARMUPS: list[Row] = [
    (WARMUP, {"num_heads": 7}, "num_heads: expected a multiple of num_kv_heads=2, got 7"),
    (WARMUP, {"num_heads": 0}, "num_heads: expected more than 0, got 0"),
    (WARMUP, {"num_kv_heads": 2.0}, "num_kv_heads: expected an integer, got 2.0"),
    (WARMUP, {"head_dim": -64}, "head_dim: expected more than 0, got -64"),
    *(
        (WARMUP, {name: 1 << 70}, f"{name}: {TOO_LARGE}, got {1 << 70}")
        for name in ("num_heads", "head_dim", "max_seqlen_k", "max_seqlen_q", "page_size")
    ),
    (WARMUP, {"batch_sizes": (1, 1 << 70)}, f"batch_sizes: {TOO_LARGE}, got {1 << 70}"),
    (WARMUP, {"head_dim_v": 0}, "head_dim_v: expected more than 0, got 0"),
    (WARMUP, {"max_seqlen_k": 0}, "max_seqlen_k: expected more than 0, got 0"),
    (WARMUP, {"page_size": 0}, "page_size: expected more than 0, got 0"),
    (WARMUP, {"batch_sizes": 4}, "batch_sizes: expected a sequence of integers, got 4"),
    (WARMUP, {"batch_sizes": (1, 0)}, "batch_sizes: expected more than 0, got 0"),
    (WARMUP, {"seqlens_q": ("1",)}, "seqlens_q: expected an integer, got '1'"),
    (WARMUP, {"dtype": "bfloat16"}, "dtype: expected a torch.dtype, got 'bfloat16'"),
    (WARMUP, {"softcap": -1.0}, "softcap: expected at least 0, got -1.0"),
    (WARMUP, {"max_seqlen_q": 65}, "max_seqlen_q: expected 1 to 64, got 65"),
    (WARMUP, {"max_seqlen_q": 0}, "max_seqlen_q: expected more than 0, got 0"),
    (
        WARMUP,
        {"stored": "int4"},
        "stored: expected 'as_is', 'fp8', 'fp8_e5m2' or 'int8', got 'int4'",
    ),
    (
        WARMUP,
        {"granularity": "head"},
        "granularity: expected None with a cache stored as_is, got 'head'",
    ),
    (
        WARMUP,
        {"stored": "int8", "granularity": "none"},
        "granularity: expected 'tensor', 'head' or 'token', got 'none'",
    ),
    (
        WARMUP,
        {"stored": "int8", "granularity": ""},
        "granularity: expected 'tensor', 'head' or 'token', got ''",
    ),
    (
        WARMUP | {"append": True},
        {"stored": "fp8", "granularity": "token"},
        "granularity: expected 'tensor' or 'head' with append, got 'token'",
    ),
    (
        WARMUP,
        {"products": "half"},
        "products: expected None with a bfloat16 cache, got 'half'",
    ),
    (
        WARMUP | {"stored": "int8"},
        {"products": "all"},
        "products: expected 'widened', 'half' or 'full', got 'all'",
    ),
    (
        WARMUP,
        {"k_scale": rand(1)},
        "k_scale: expected None with warmup, which makes tensors itself, got a tensor of shape [1]",
    ),
    (
        WARMUP | {"append": True},
        {"cache_seqlens": False},
        "cache_seqlens: expected True with append, got False",
    ),
    (
        WARMUP | {"append": True},
        {"early_kv": True},
        "early_kv: expected False with append, got True",
    ),
    (
        WARMUP | {"append": True},
        {"out": rand(HEADS)},
        f"out: expected None with append, got a tensor of shape [{HEADS}]",
    ),
    (
        WARMUP,
        {"rotary_cos": rand(64, 4)},
        "rotary_cos: expected None with append=False, got a tensor of shape [64, 4]",
    ),
    (
        WARMUP | {"append": True},
        {"rotary_sin": rand(64, 4)},
        "rotary_sin: expected None with no rotary_cos, got a tensor of shape [64, 4]",
    ),
    (
        WARMUP | {"append": True},
        {"rotary_cos": rand(64, 4)},
        "rotary_sin: expected a value with rotary_cos, got None",
    ),
    (
        WARMUP | {"append": True, "rotary_cos": rand(64, 4).float()},
        {"rotary_sin": rand(64, 3).float()},
        "rotary_sin: expected [seqlen_ro=64, rotary_dim / 2=4], got [64, 3]",
    ),
    (
        WARMUP | {"append": True, "rotary_sin": rand(64, 4).half()},
        {"rotary_cos": rand(64, 4).half()},
        "rotary_cos: expected dtype bfloat16 or float32, got float16",
    ),
    (
        WARMUP | {"append": True, "rotary_sin": rand(64, DIM).float()},
        {"rotary_cos": rand(64, DIM).float()},
        f"rotary_cos.shape[1] (rotary_dim / 2): expected 1 to {DIM // 2}, got {DIM}",
    ),
    *(
        (WARMUP, {"dtype": dtype}, f"dtype: expected {WORKING}, got '{name}'")
        for dtype, name in ((torch.int32, "int32"), (torch.int8, "int8"))
    ),
    *(
        (WARMUP, {name: value}, f"{name}: expected True or False, got {shown}")
        for name, value, shown in (
            ("cache_seqlens", None, "None"),
            ("append", 1, "1"),
            ("rotary_interleaved", None, "None"),
            ("sink_logits", rand(HEADS), f"a tensor of shape [{HEADS}]"),
            ("alibi_slopes", 1, "1"),
        )
    ),
]

TABLE: list[tuple[Callable[..., Any], Row]] = [
    (function, row)
    for function, rows in (
        (splitkv.decode, DECODE),
        (splitkv.decode, QUANTISED),
        (splitkv.attention, ATTENTION + DENSE_QUANTISED),
        (splitkv.attention_varlen, RAGGED + PAGES + RAGGED_QUANTISED),
        (splitkv.warmup, WARMUPS),
    )
    for row in rows
]
IDS = [f"{function.__name__}-{message}" for function, (_, _, message) in TABLE]


def refused(message: str) -> Any:
    return pytest.raises(ValueError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize(("function", "row"), TABLE, ids=IDS)
def test_call(function: Callable[..., Any], row: Row) -> None:
    good, wrong, message = row
    with refused(message):
        function(**good | wrong)


@pytest.mark.parametrize("device", ["sideways", b"x", 1.5, 99, "cuda:99", True, object()])
def test_a_device_that_torch_has_not(device: Any) -> None:
    said = re.escape(f"device: expected a device that torch has here, got {device!r}; torch: ")
    with pytest.raises(ValueError, match=f"^{said}"):
        splitkv.warmup(**WARMUP, device=device)


def test_the_rest_of_each_call_is_right() -> None:
    """Otherwise a row above could be refused for something that is wrong in its base."""
    for base in (CONTIGUOUS, PAGED, INT8, FP8, PAGED_INT8):
        assert splitkv.decode(**base).shape == (BATCH, SEQLEN_Q, HEADS, DIM_V)
    assert splitkv.decode(**INT8_QUERY, q_scale=torch.ones(())).dtype == torch.bfloat16
    assert splitkv.attention(**DENSE).shape == (BATCH, SEQLEN_Q, HEADS, DIM_V)
    assert splitkv.attention_varlen(**VARLEN).shape == (6, HEADS, DIM_V)
    assert splitkv.attention_varlen(**PAGED_VARLEN).shape == (6, HEADS, DIM_V)
    assert splitkv.attention(**DENSE_INT8).shape == (BATCH, SEQLEN_Q, HEADS, DIM_V)
    assert splitkv.attention(**DENSE_INT8_QUERY, q_scale=ONE).dtype == torch.bfloat16
    assert splitkv.attention_varlen(**VARLEN_INT8).shape == (6, HEADS, DIM_V)
    assert splitkv.attention_varlen(**VARLEN_FP8_QUERY, q_scale=ONE).dtype == torch.bfloat16
    assert splitkv.attention_varlen(**PAGED_VARLEN_INT8).shape == (6, HEADS, DIM_V)
    assert len(splitkv.warmup(**WARMUP)) == 1


def test_a_refused_call_is_refused_again() -> None:
    """Nothing of it is remembered, and a good call before it does not let it pass."""
    splitkv.decode(**CONTIGUOUS)
    for _ in range(2):
        with refused("causal: expected True or False, got None"):
            splitkv.decode(**CONTIGUOUS, causal=None)
    splitkv.decode(**CONTIGUOUS)


PLAN = [splitkv.plan, splitkv.explain]
POSITIONAL_DECODE = tuple(CONTIGUOUS.values())
POSITIONAL_DENSE = tuple(DENSE.values())
POSITIONAL_VARLEN = tuple(VARLEN.values())
PROBLEM = Problem("decode", 1, 8, 2, 64, 64, 1, 600)
H200 = Device.named("h200")
DECODE_ARGUMENTS = (
    "'cache_seqlens', 'page_table', 'max_seqlen_k', 'causal', 'window_size', 'sink_tokens', "
    "'max_sink_tokens', 'attention_chunk', "
    "'sink_logits', 'softmax_scale', 'softcap', 'alibi_slopes', 'return_lse', 'q_scale', "
    "'k_scale', 'v_scale', 'products', 'out', 'out_scale' or 'early_kv'"
)
DENSE_ARGUMENTS = (
    "'causal', 'window_size', 'sink_tokens', 'max_sink_tokens', 'attention_chunk', "
    "'sink_logits', 'softmax_scale', 'softcap', "
    "'alibi_slopes', 'return_lse', 'q_scale', 'k_scale', 'v_scale', 'products', 'dropout_p', "
    "'deterministic', 'out' or 'out_scale'"
)
VARLEN_ARGUMENTS = DENSE_ARGUMENTS.replace("'sink_logits'", "'bidirectional_ranges', 'sink_logits'")
POLICIES = (
    "'waves', 'tuned', 'flash_attention_2', 'flash_attention_3', 'sequence_aware', "
    "'paged_attention_v2', "
    "'paged_attention_v2_permissive', 'fixed', 'batch_invariant', 'scheduled' or 'balanced'"
)

DECISIONS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((None,), {}, "problem: expected a tensor, got None"),
    (("decode",), {}, "problem: expected a tensor, got 'decode'"),
    (
        POSITIONAL_DECODE[:2],
        {},
        "decode: expected q, keys and values by position, got 2",
    ),
    (
        POSITIONAL_VARLEN + (3,),
        {},
        "attention_varlen: expected q, keys and values by position, cu_seqlens_q, cu_seqlens_k, "
        "max_seqlen_q, max_seqlen_k, got 8",
    ),
    (
        POSITIONAL_DECODE,
        {"num_split": 3},
        f"argument of decode: expected {DECODE_ARGUMENTS}, got 'num_split'",
    ),
    (
        POSITIONAL_DECODE,
        {"dropout_p": 0.1},
        f"argument of decode: expected {DECODE_ARGUMENTS}, got 'dropout_p'",
    ),
    (
        POSITIONAL_DENSE,
        {"dense": True, "page_table": None},
        f"argument of attention: expected {DENSE_ARGUMENTS}, got 'page_table'",
    ),
    (
        POSITIONAL_VARLEN,
        {"k_descale": None},
        "argument of attention_varlen: expected 'cu_seqlens_q', 'cu_seqlens_k', 'max_seqlen_q', "
        f"'max_seqlen_k', 'page_table', 'cache_seqlens', {VARLEN_ARGUMENTS}, got 'k_descale'",
    ),
    (
        POSITIONAL_VARLEN,
        {"max_seqlen_q": 3},
        "max_seqlen_q: expected by position or by name, got both",
    ),
    (POSITIONAL_VARLEN[:4], {}, "cu_seqlens_k: expected a tensor, got None"),
    (POSITIONAL_VARLEN[:5], {}, "max_seqlen_q: expected an integer, got None"),
    (
        POSITIONAL_DENSE,
        {"cu_seqlens_q": None, "cu_seqlens_k": None},
        "cu_seqlens_q: expected a tensor, got None",
    ),
    (POSITIONAL_DECODE, {"causal": 1}, "causal: expected True or False, got 1"),
    (POSITIONAL_DECODE, {"softcap": -1}, "softcap: expected at least 0, got -1"),
    (
        POSITIONAL_DECODE[:2] + (rand(BATCH, CAPACITY, 1, DIM_V),),
        {},
        "v_cache: expected [batch=2, seqlen_k=32, num_kv_heads=2, head_dim_v], got [2, 32, 1, 24]",
    ),
    (POSITIONAL_DECODE[:2] + (None,), {}, "v: expected a tensor, got None"),
    (POSITIONAL_DECODE, {"num_splits": -2}, "num_splits: expected 0 to 1024, got -2"),
    (POSITIONAL_DECODE, {"num_splits": "2"}, "num_splits: expected an integer, got '2'"),
    (POSITIONAL_DECODE, {"device": "h200"}, "device: expected a splitkv.Device, got 'h200'"),
    ((PROBLEM,), {"device": "h200"}, "device: expected a splitkv.Device, got 'h200'"),
    (
        (PROBLEM, *POSITIONAL_DECODE),
        {},
        "tensors: expected none beside a Problem, got 3",
    ),
    ((PROBLEM,), {"causal": False}, "causal: expected nothing beside a Problem, got False"),
    *(
        ((replace(PROBLEM, **changes),), {}, message)
        for changes, message in (
            ({"num_heads": 7}, "num_heads: expected a multiple of num_kv_heads=2, got 7"),
            ({"num_kv_heads": 0}, "num_kv_heads: expected more than 0, got 0"),
            ({"head_dim": 64.0}, "head_dim: expected an integer, got 64.0"),
            ({"seqlen_k": -1}, "seqlen_k: expected at least 0, got -1"),
            ({"seqlen_k": 1 << 70}, f"seqlen_k: {TOO_LARGE}, got {1 << 70}"),
            ({"batch": 1 << 70}, f"batch: {TOO_LARGE}, got {1 << 70}"),
            ({"kind": "prefill"}, "kind: expected 'decode', 'dense' or 'varlen', got 'prefill'"),
            ({"dtype": "bf16"}, f"dtype: expected {WORKING}, got 'bf16'"),
        )
    ),
]


@pytest.mark.parametrize("function", PLAN, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("tensors", "wrong", "message"), DECISIONS, ids=[d[2] for d in DECISIONS])
def test_plan_and_explain(
    tensors: tuple[Any, ...], wrong: dict[str, Any], message: str, function: Callable[..., Any]
) -> None:
    with refused(message):
        function(*tensors, **wrong)


def test_policy() -> None:
    with refused(f"policy: expected {POLICIES}, got 'best'"):
        splitkv.plan(PROBLEM, device=H200, policy="best")
    with refused("policy: expected a name or a function, got 3"):
        splitkv.plan(PROBLEM, device=H200, policy=3)
    with refused("policy: expected one that returns a Choice, got None"):
        splitkv.plan(PROBLEM, device=H200, policy=lambda *described: None)  # type: ignore[arg-type]
    with refused(f"policy: expected {POLICIES}, got 'best'"):
        splitkv.explain(PROBLEM, device=H200, policies=("waves", "best"))
    with refused("policies: expected names of policies, got 'waves'"):
        splitkv.explain(PROBLEM, device=H200, policies="waves")
    with refused("policies: expected names of policies, got ()"):
        splitkv.explain(PROBLEM, device=H200, policies=())


def test_a_plan_is_explained_as_it_is() -> None:
    made = splitkv.plan(PROBLEM, device=H200)
    for name, value in (
        ("causal", True),
        ("device", H200),
        ("num_splits", 2),
        ("policies", ["fixed"]),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected nothing beside a Plan, got "):
            splitkv.explain(made, **{name: value})


def test_gpu_name() -> None:
    with pytest.raises(ValueError, match=r"^gpu: expected one of a100, .*, b200, got h2000$"):
        Device.named("h2000")
    with pytest.raises(ValueError, match=r"^gpu: expected one of a100, .*, b200, got 90$"):
        Device.named(90)  # type: ignore[arg-type]


WRONG_PLANS: list[tuple[dict[str, Any], str]] = [
    ({"batch": 3}, "batch 3"),
    ({"num_heads": 4}, "heads 4/2"),
    ({"head_dim_v": 16}, "head_dim 16"),
    ({"seqlen_q": 1}, "seqlen_q 1"),
    ({"seqlen_k": CAPACITY - 1}, "seqlen_k 31"),
    ({"dtype": "bfloat16"}, "bfloat16"),
    ({"return_lse": True}, "return lse"),
    ({"sink_logits": True}, "sink logits"),
    ({"kind": "dense"}, "dense: batch 2"),
]


@pytest.mark.parametrize(("changes", "shown"), WRONG_PLANS, ids=[w[1] for w in WRONG_PLANS])
def test_plan_for_another_problem(changes: dict[str, Any], shown: str) -> None:
    made = splitkv.plan(*POSITIONAL_DECODE)
    other = splitkv.plan(replace(made.problem, **changes))
    assert shown in str(other.problem)
    with refused(f"plan: expected one for ({made.problem}), got one for ({other.problem})"):
        splitkv.decode(**CONTIGUOUS, plan=other)


def test_plan_for_another_device() -> None:
    made = splitkv.plan(*POSITIONAL_DECODE, device=H200)
    with refused("plan: expected one for cpu, got 'sm_90'"):
        splitkv.decode(**CONTIGUOUS, plan=made)


def test_plan_of_an_unknown_kernel() -> None:
    made = replace(splitkv.plan(*POSITIONAL_DECODE), kernel="magic")
    known = (
        "'hopper_decode_split', 'decode_split', 'hopper_prefill', 'hopper_prefill_quantised', "
        "'hopper_prefill_half', 'hopper_prefill_widened', 'prefill', 'torch_sdpa' or 'torch_math'"
    )
    with refused(f"kernel: expected {known}, got 'magic'"):
        splitkv.decode(**CONTIGUOUS, plan=made)


def test_plan_of_a_kernel_that_cannot() -> None:
    made = replace(splitkv.plan(*POSITIONAL_DECODE), kernel="decode_split")
    against = "device cpu: expected cuda; head_dim_v 24: expected a multiple of 16 from 16 to 256"
    with refused(f"plan: expected a kernel without {against}, got 'decode_split'"):
        splitkv.decode(**CONTIGUOUS, plan=made)


def test_plan_of_a_schedule_that_the_kernel_lacks() -> None:
    made = splitkv.plan(*POSITIONAL_DECODE)
    for schedule in ("fixed", "batch"):
        other = replace(made, config=replace(made.config, schedule=schedule))
        with refused(f"plan.config.schedule: expected 'even', got '{schedule}'"):
            splitkv.decode(**CONTIGUOUS, plan=other)


def test_plan_of_a_merge_that_the_kernel_lacks() -> None:
    made = splitkv.plan(*POSITIONAL_DECODE)
    for merge in ("cluster", "last"):
        other = replace(made, config=replace(made.config, num_splits=4, merge=merge))
        with refused(f"plan.config.merge: expected 'combine', got '{merge}'"):
            splitkv.decode(**CONTIGUOUS, plan=other)


def test_plan_and_num_splits() -> None:
    made = splitkv.plan(*POSITIONAL_DECODE)
    with refused("num_splits: expected 0 with a plan, got 3"):
        splitkv.decode(**CONTIGUOUS, plan=made, num_splits=3)


@pytest.mark.parametrize("function", [splitkv.decode, splitkv.attention], ids=["decode", "dense"])
def test_unknown_keyword(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="window"):
        function(*POSITIONAL_DECODE, window=3)
    with refused(f"argument of decode: expected {DECODE_ARGUMENTS}, got 'window'"):
        splitkv.warmup(**WARMUP, window=3)
