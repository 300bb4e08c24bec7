"""A bad argument of FlashAttention's functions is refused by its name, and nothing is written."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from splitkv import UnsupportedProblem, flash_attn

Wrong = tuple[str, dict[str, Any]]
"""The argument that the message starts with, and what is given."""


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CU = ints(0, 3, 5)
VARLEN = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "flash_attn_func": lambda: {n: floats(2, 5, 4, 16) for n in "qkv"},
    "flash_attn_kvpacked_func": lambda: {
        "q": floats(2, 5, 4, 16),
        "kv": floats(2, 7, 2, 2, 16),
    },
    "flash_attn_qkvpacked_func": lambda: {"qkv": floats(2, 5, 3, 4, 16)},
    "flash_attn_varlen_func": lambda: {n: floats(5, 4, 16) for n in "qkv"} | VARLEN,
    "flash_attn_varlen_kvpacked_func": lambda: {
        "q": floats(5, 4, 16),
        "kv": floats(5, 2, 2, 16),
        **VARLEN,
    },
    "flash_attn_varlen_qkvpacked_func": lambda: {
        "qkv": floats(5, 3, 4, 16),
        "cu_seqlens": CU,
        "max_seqlen": 3,
    },
    "flash_attn_with_kvcache": lambda: {
        "q": floats(2, 1, 4, 16),
        "k_cache": floats(2, 8, 2, 16),
        "v_cache": floats(2, 8, 2, 16),
        "k": floats(2, 1, 2, 16),
        "v": floats(2, 1, 2, 16),
        "cache_seqlens": ints(3, 0),
    },
    "get_scheduler_metadata": lambda: {
        "batch_size": 2,
        "max_seqlen_q": 1,
        "max_seqlen_k": 64,
        "num_heads_q": 4,
        "num_heads_kv": 2,
        "headdim": 16,
        "cache_seqlens": ints(3, 0),
    },
    "flash_attn_combine": lambda: {
        "out_partial": floats(3, 2, 5, 4, 16, dtype=torch.float32),
        "lse_partial": floats(3, 2, 5, 4, dtype=torch.float32),
    },
}
ATTENTION = [name for name in CALLS if name.endswith("_func")]
VALUES: dict[str, list[Any]] = {
    "softmax_scale": [True, 0, -1.0, "a", float("nan"), floats(1)],
    "causal": [1, None, "yes"],
    "window_size": [3, (1,), (1, 2, 3), (-2, 0), (0.5, 0), ("a", 0), None, ints(1), floats(2)],
    "softcap": [-1.0, None, "x", float("inf")],
    "alibi_slopes": [floats(3, dtype=torch.float32), floats(4), 3.0, floats(9, 4)],
    "attention_chunk": [-1, 1.5, None],
    "num_splits": [-1, 1.5, 5000, True, None],
    "pack_gqa": [1, "auto"],
    "sm_margin": [-1, 0.5, None],
    "s_aux": [floats(3), ints(1, 2, 3, 4), 1.0],
    "learnable_sink": [floats(3), floats(4, 1)],
    "qv": [floats(2, 5, 4, 16)],
    "q_descale": [floats(1, dtype=torch.float32)],
    "k_descale": [floats(2, 2, dtype=torch.float32)],
    "v_descale": [1.0],
}
OF_ATTENTION: dict[str, list[Any]] = {
    **VALUES,
    "dropout_p": [None, "x", -0.1, 1.0, floats(1)],
    "deterministic": [1, None],
    "return_attn_probs": [1, "yes"],
    "return_softmax_lse": [0],
}
INDEX: list[Any] = [ints(1), ints(1, 2).long(), 2.5, ints(1, 2)[:, None]]
OF_CACHE: dict[str, list[Any]] = {
    **VALUES,
    "q": [floats(2, 1, 4), floats(2, 1, 4, 8), floats(2, 1, 3, 16), 3, floats(2, 1, 4, 16).int()],
    "k_cache": [floats(1, 8, 2, 16), floats(2, 8, 2), None, floats(2, 8, 2, 16).half()],
    "v_cache": [floats(2, 7, 2, 16), floats(2, 8, 1, 16), floats(2, 8, 2, 16).float(), 0],
    "k": [floats(2, 1, 1, 16), floats(1, 1, 2, 16), floats(2, 9, 2, 16), None],
    "v": [floats(2, 2, 2, 16), floats(2, 1, 2, 8), floats(2, 1, 2, 16).half(), None],
    "cache_seqlens": [*INDEX, None, -1, 9, True],
    "cache_batch_idx": INDEX,
    "cache_leftpad": INDEX,
    "leftpad_k": INDEX,
    "block_table": [ints(0, 1), ints(0, 1)[:, None].long(), 3],
    "page_table": [ints(0, 1), ints(0, 1, 2)[:, None], "table"],
    "rotary_cos": [floats(4, 8), floats(8), floats(8, 9), floats(8, 8).half(), 1.0],
    "rotary_sin": [floats(8, 8)],
    "rotary_seqlens": INDEX,
    "cu_seqlens_k_new": [ints(0, 1), ints(0, 1, 2).long()],
    "max_seqlen_q": [3],
    "scheduler_metadata": [ints(1, 2), "plan"],
    "return_softmax_lse": [1, None],
}
OF_METADATA: dict[str, list[Any]] = {
    **{
        name: [0, -1, 1.5, None, "3", 1 << 30, 1 << 70]
        for name in ("batch_size", "max_seqlen_q", "num_heads_kv", "headdim")
    },
    "num_heads_q": [0, 3, 2.0],
    "max_seqlen_k": [-1, 0.5, 1 << 70],
    "max_seqlen_k_new": [-1, None, 1 << 70],
    "cache_seqlens": [ints(1), ints(1, 2).long(), None, 3],
    "cache_leftpad": INDEX,
    "cu_seqlens_q": [ints(0, 1), 3],
    "cu_seqlens_k_new": [ints(0, 1, 2).long()],
    "qkv_dtype": [torch.int8, "bfloat16", []],
    "headdim_v": [0, 1.5],
    "page_size": [0, -3, 1.5],
    "has_softcap": [1],
    "sm_margin": [-1, 10**6, 1 << 70],
    **{n: VALUES[n] for n in ("causal", "window_size", "attention_chunk", "num_splits")},
    "pack_gqa": [1],
    "policy": ["fastest", 3, 1.5, []],
}
OF_COMBINE: dict[str, list[Any]] = {
    "out_partial": [floats(3, 5, 16), floats(0, 2, 5, 4, 16), ints(1), None],
    "lse_partial": [floats(3, 2, 4, 5), floats(3, 2, 5, 4), 1.0],
    "out": [floats(2, 5, 4, 8), floats(2, 5, 4, 16).int()],
    "out_dtype": [torch.int8, torch.float64, "bf16"],
}
ROTARY = {"rotary_cos": floats(8, 8), "rotary_sin": floats(8, 8)}
MASKS = ("causal", "window_size", "attention_chunk")
TOGETHER: dict[str, list[Wrong]] = {
    "flash_attn_func": [
        ("return_softmax_lse", {"return_attn_probs": True, "return_softmax_lse": True}),
        ("return_attn_probs", {"return_attn_probs": True, "dropout_p": 0.1}),
        ("learnable_sink", {"learnable_sink": floats(4), "s_aux": floats(4)}),
        ("q", {"q": floats(2, 5, 4, 16).to(torch.float8_e4m3fn)}),
        ("q", {"q": floats(2, 5, 4)}),
        ("k", {"k": floats(3, 5, 4, 16)}),
        ("k", {"k": floats(2, 5, 4, 8)}),
        ("v", {"v": floats(2, 6, 4, 16)}),
        ("v", {"v": floats(2, 5, 4, 16).half()}),
        ("num_heads", {"k": floats(2, 5, 3, 16), "v": floats(2, 5, 3, 16)}),
        ("q", {"q": None}),
        ("v", {"v": floats()}),
        ("k", {"k": [1.0]}),
    ],
    "flash_attn_kvpacked_func": [
        ("kv", {"kv": floats(2, 7, 3, 2, 16)}),
        ("kv", {"kv": floats(2, 7, 2, 16)}),
        ("kv", {"kv": floats(3, 7, 2, 2, 16)}),
        ("kv", {"kv": None}),
        ("q", {"q": 1}),
    ],
    "flash_attn_qkvpacked_func": [
        ("qkv", {"qkv": floats(2, 5, 2, 4, 16)}),
        ("qkv", {"qkv": floats(2, 5, 12, 16)}),
        ("qkv", {"qkv": floats(2, 5, 3, 4, 16), "num_heads_q": 4}),
        ("num_heads_q", {"qkv": floats(2, 5, 8, 16), "num_heads_q": 8}),
        ("num_heads_q", {"qkv": floats(2, 5, 8, 16), "num_heads_q": 3}),
        ("num_heads_q", {"qkv": floats(2, 5, 8, 16), "num_heads_q": 0}),
        ("num_heads_q", {"qkv": floats(2, 5, 8, 16), "num_heads_q": 4.0}),
    ],
    "flash_attn_varlen_func": [
        ("q", {"q": floats(1, 5, 4, 16)}),
        ("k", {"k": floats(5, 4, 8)}),
        ("v", {"v": floats(6, 4, 16)}),
        ("v", {"v": None}),
        ("cu_seqlens_q", {"cu_seqlens_q": None}),
        ("cu_seqlens_q", {"cu_seqlens_q": CU.long()}),
        ("cu_seqlens_k", {"cu_seqlens_k": ints(0, 5)}),
        ("cu_seqlens_k", {"cu_seqlens_k": CU.long()}),
        ("seqused_k", {"cu_seqlens_k": None}),
        ("page_table", {"cu_seqlens_k": None, "seqused_k": ints(1, 1)}),
        ("max_seqlen_q", {"max_seqlen_q": None}),
        ("max_seqlen_q", {"max_seqlen_q": -1}),
        ("max_seqlen_k", {"max_seqlen_k": 2.0}),
        ("max_seqlen_q", {"max_seqlen_q": 1 << 70}),
        ("max_seqlen_k", {"max_seqlen_k": 1 << 30}),
        ("seqused_q", {"seqused_q": ints(1)}),
        ("seqused_q", {"seqused_q": ints(1, 2).long()}),
        ("seqused_k", {"seqused_k": 3}),
        ("block_table", {"block_table": ints(0, 1)}),
        ("block_table", {"block_table": [1], "seqused_q": ints(1, 1)}),
        ("page_table", {"page_table": torch.tensor(1), "seqused_q": ints(1, 1)}),
        ("block_table", {"block_table": ints(0, 1)[:, None], "page_table": ints(0, 1)[:, None]}),
        ("page_table", {"k": floats(3, 4, 4, 16), "v": floats(3, 4, 4, 16), "page_table": CU}),
        ("block_table", {"k": floats(3, 4, 4, 16), "v": floats(3, 4, 4, 16), "block_table": CU}),
    ],
    "flash_attn_varlen_kvpacked_func": [
        ("kv", {"kv": floats(5, 3, 2, 16)}),
        ("kv", {"kv": floats(5, 2, 2, 8)}),
        ("q", {"q": floats(1, 5, 4, 16)}),
        ("cu_seqlens_q", {"cu_seqlens_q": CU.long()}),
        ("cu_seqlens_k", {"cu_seqlens_k": ints(0)}),
        ("max_seqlen_q", {"max_seqlen_q": 1.5}),
        ("max_seqlen_q", {"max_seqlen_q": 1 << 70}),
        ("max_seqlen_k", {"max_seqlen_k": -1}),
    ],
    "flash_attn_varlen_qkvpacked_func": [
        ("qkv", {"qkv": floats(5, 2, 4, 16)}),
        ("cu_seqlens", {"cu_seqlens": CU.long()}),
        ("cu_seqlens", {"cu_seqlens": None}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor(1, dtype=torch.int32)}),
        ("max_seqlen", {"max_seqlen": 0.5}),
        ("max_seqlen", {"max_seqlen": 1 << 70}),
    ],
    "flash_attn_with_kvcache": [
        ("k", {"k": None, "v": None, "rotary_cos": floats(8, 8), "rotary_sin": floats(8, 8)}),
        ("rotary_sin", {"rotary_cos": floats(8, 8)}),
        ("rotary_sin", {"rotary_cos": floats(8, 8), "rotary_sin": floats(8, 4)}),
        ("rotary_cos", {"rotary_cos": floats(7, 8), "rotary_sin": floats(7, 8)}),
        ("rotary_cos", {"rotary_cos": floats(8, 9), "rotary_sin": floats(8, 9)}),
        (
            "rotary_interleaved",
            {"rotary_cos": floats(8, 8), "rotary_sin": floats(8, 8), "rotary_interleaved": 1},
        ),
        (
            "rotary_seqlens",
            {"rotary_cos": floats(8, 8), "rotary_sin": floats(8, 8), "rotary_seqlens": ints(1)},
        ),
        *((n, ROTARY | {n: x}) for n in MASKS for x in (*VALUES[n], floats(2), [])),
        ("return_softmax_lse", {"return_softmax_lse": floats(2)}),
        ("block_table", {"page_table": ints(0, 1)[:, None], "block_table": ints(0, 1)[:, None]}),
        ("leftpad_k", {"cache_leftpad": ints(0, 1), "leftpad_k": ints(0, 1)}),
        ("max_seqlen_q", {"q": floats(2, 4, 16), "cu_seqlens_q": ints(0, 1, 2)}),
        ("q", {"cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1}),
        (
            "max_seqlen_q",
            {"q": floats(2, 4, 16), "cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1 << 70},
        ),
        ("cu_seqlens_q", {"q": floats(2, 4, 16), "cu_seqlens_q": ints(0).long()}),
        ("cu_seqlens_k_new", {"k": None, "v": None, "cu_seqlens_k_new": ints(0, 1, 2)}),
        ("k", {"cu_seqlens_k_new": ints(0, 1, 2)}),
    ],
}
NAMED_OTHERWISE = {  # the argument that is wrong only because of this one
    ("flash_attn_with_kvcache", "rotary_cos"): ("rotary_cos", "rotary_sin"),
    ("flash_attn_varlen_func", "block_table"): ("block_table", "k"),
    ("flash_attn_with_kvcache", "k_cache"): ("k_cache", "v_cache"),
    ("flash_attn_with_kvcache", "q"): ("q", "k_cache", "num_heads"),
    ("flash_attn_with_kvcache", "v"): ("v", "k"),
    ("flash_attn_with_kvcache", "k"): ("k", "v"),
    ("flash_attn_with_kvcache", "leftpad_k"): ("leftpad_k", "cache_leftpad"),
    ("flash_attn_with_kvcache", "cu_seqlens_k_new"): ("cu_seqlens_k_new", "k"),
    ("flash_attn_with_kvcache", "page_table"): ("page_table", "k_cache"),
    ("flash_attn_with_kvcache", "block_table"): ("block_table", "k_cache"),
    ("get_scheduler_metadata", "num_heads_kv"): ("num_heads_kv", "num_heads_q"),
    ("get_scheduler_metadata", "batch_size"): ("batch_size", "cache_seqlens"),
    ("flash_attn_combine", "out_partial"): ("out_partial", "lse_partial"),
}


def every_wrong_call() -> Iterator[Any]:
    tables = dict.fromkeys(ATTENTION, OF_ATTENTION)
    tables |= {
        "flash_attn_with_kvcache": OF_CACHE,
        "get_scheduler_metadata": OF_METADATA,
        "flash_attn_combine": OF_COMBINE,
    }
    for function, table in tables.items():
        for argument, values in table.items():
            for n, value in enumerate(values):
                yield pytest.param(
                    function, argument, {argument: value}, id=f"{function}-{argument}{n}"
                )
        for n, (argument, given) in enumerate(TOGETHER.get(function, [])):
            yield pytest.param(function, argument, given, id=f"{function}-{argument}-together{n}")


WRONG = list(every_wrong_call())


@pytest.mark.parametrize("function", CALLS)
def test_calls_that_are_right(function: str) -> None:
    assert getattr(flash_attn, function)(**CALLS[function]()) is not None


@pytest.mark.parametrize(("function", "argument", "given"), WRONG)
def test_refused_by_name(function: str, argument: str, given: dict[str, Any]) -> None:
    call = CALLS[function]() | given
    caches = {n: call[n].clone() for n in ("k_cache", "v_cache") if hasattr(call.get(n), "clone")}
    with pytest.raises((ValueError, UnsupportedProblem)) as refused:
        getattr(flash_attn, function)(**call)
    names = "|".join(NAMED_OTHERWISE.get((function, argument), (argument,)))
    found = re.search(
        rf"(^| )({names})( left| right|\.shape\[\d\] \(.*\))?: expected ", str(refused.value)
    )
    assert found, str(refused.value)
    for name, cache in caches.items():
        assert torch.equal(cache.float(), call[name].float())


def test_the_list_is_long() -> None:
    """And has every argument of every function."""
    assert len(WRONG) >= 400
    listed = {wrong.values[:2] for wrong in WRONG}
    for function in flash_attn.__all__:
        for argument in inspect.signature(getattr(flash_attn, function)).parameters:
            assert (function, argument) in listed
