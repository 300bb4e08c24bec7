"""A bad argument of the caches and of quantize_kv is refused by its name, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from splitkv import UnsupportedProblem
from splitkv.cache import PagedKVCache, SinkWindowCache, quantize_kv
from splitkv.cache.paged import CacheFull

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 8
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": KV_HEADS,
    "head_dim": DIM,
    "head_dim_v": DIM_V,
    "dtype": "fp32",
}
PAGED = {"num_pages": 6, "page_size": 4, "max_batch": 2, "max_seqlen": 16, "max_tokens": 12}
BOUNDED = {"batch": 2, "sink_tokens": 2, "window": 4}
HUGE = [1 << 30, 1 << 70]
SIZE: list[Any] = [0, -1, 1.5, "3", True, torch.ones(1), *HUGE]
COMMON: dict[str, list[Any]] = {
    **dict.fromkeys(("num_layers", "num_kv_heads", "head_dim", "head_dim_v"), SIZE),
    "dtype": ["int4", torch.float64, torch.float8_e5m2fnuz, 3, None],
    "granularity": ["head", "page", 1],
    "smooth_k": [True, 1, None],
    "device": ["sideways", b"x", 1.5, 99, "cuda:99", True, object()],
}
LAYER: list[Any] = [2, -3, 1 << 70, 0.5, "0", None, True]


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


TOKENS: list[Any] = [None, 3.0, floats(2, 3), floats(2, 2, KV_HEADS, DIM), floats(1, 3, 2, 16)]
TOKENS += [floats(2, 3, 1, DIM), floats(2, 3, KV_HEADS, 7), floats(2, 3, KV_HEADS, DIM).int()]
INDEX: list[Any] = [None, 1.5, "1", [1, 2, 3], True]


def step_of(cache: Any) -> None:
    """Two sequences of three tokens each."""
    if isinstance(cache, PagedKVCache):
        cache.extend([cache.allocate(), cache.allocate()], 3)
    else:
        cache.extend(3)


Good = dict[str, Any]
NEW: Good = {"k": floats(2, 3, KV_HEADS, DIM), "v": floats(2, 3, KV_HEADS, DIM_V)}
OF_SCALES: dict[str, list[Any]] = {
    "layer": LAYER,
    "k_scale": [None, 1.0, floats(1), floats(2, 1), floats(2).double()],
    "v_scale": [None, floats(3), floats(2).half()],
    "k_mean": [floats(2, 16)],
}
Table = dict[str, list[Any]]
WRONG_V = [*TOKENS[:4], floats(2, 3, KV_HEADS, DIM_V).half()]
CALLS: dict[str, tuple[Good, Table]] = {
    "append": (
        NEW | {"layer": 0},
        {"layer": LAYER, "k": TOKENS, "v": WRONG_V},
    ),
    "calibrate": (
        NEW | {"layer": 0},
        {"layer": LAYER, "k": TOKENS[:3], "v": [None, floats(2, 3, 1, 8)]},
    ),
    "set_scales": ({"layer": 0, "k_scale": floats(2), "v_scale": floats(2)}, OF_SCALES),
}
OF_QUERIES: dict[str, list[Any]] = {
    "layer": LAYER,
    "q": [None, 1.0, floats(2, 3, 4), floats(2, 3, HEADS, 8), floats(2, 2, HEADS, DIM)],
    "softcap": [-1.0, None, "x"],
    "softmax_scale": [0.0, "x"],
    "return_lse": [1, None],
    "sink_logits": [floats(3), 1.0],
}
OF_PAGED: dict[str, tuple[Good, Table]] = {
    **CALLS,
    "attend": (
        {"layer": 0, "q": floats(2, 3, HEADS, DIM)},
        {
            **OF_QUERIES,
            "causal": ["yes", None],
            "cache_seqlens": [floats(2).int()],
            "page_table": [floats(2, 4).int()],
            "max_seqlen_k": [-1, 1.5, 17],
            "alibi_slopes": [floats(3)],
            "window_size": [3, (0,)],
        },
    ),
    "extend": (
        {"sequences": [0, 1], "num_tokens": 1},
        {
            "sequences": [[0, 0], [7], [0, 1, 2], None, 3, [[0], 1]],
            "num_tokens": [-1, [1], [1, -1], 1.5, "1", None, [1, 1, 1], [0.5, 1], True, *HUGE],
        },
    ),
    "fork": (
        {"sequence": 0, "num_tokens": 1},
        {"sequence": [5, -1, "a", [0]], "num_tokens": [4, -1, 1.5]},
    ),
    "truncate": (
        {"sequence": 0, "num_tokens": 1},
        {"sequence": [5, None], "num_tokens": [4, *INDEX, *HUGE]},
    ),
    "free": ({"sequence": 0}, {"sequence": [5, -1, None]}),
    "length": ({"sequence": 0}, {"sequence": [5, "0"]}),
}
OF_BOUNDED: dict[str, tuple[Good, Table]] = {
    **CALLS,
    "attend": (
        {"layer": 0, "q": floats(2, 1, HEADS, DIM)},
        {
            **OF_QUERIES,
            "causal": [True],
            "window_size": [(3, 0)],
            "page_table": [floats(2, 2)],
            "max_seqlen_k": [3],
        },
    ),
    "extend": (
        {"num_tokens": 1},
        {"num_tokens": [0, -1, *INDEX, *HUGE], "leftpad": [1, floats(2), floats(3).int(), [0, 0]]},
    ),
}
QUANTIZE: dict[str, list[Any]] = {
    "k": [None, floats(5, 8), floats(2, 3, 4, 5, 6), floats(2, 3, KV_HEADS, DIM).int()],
    "v": [None, floats(2, 2, KV_HEADS, DIM), floats(2, 3, KV_HEADS, DIM).half()],
    "dtype": ["int4", torch.int8, None],
    "granularity": ["page", None, 2],
    "smooth_k": [1, None, "yes"],
    "k_mean": [1.0, floats(2), floats(2, DIM).half()],
}
KINDS: tuple[tuple[Any, Good, Any], ...] = (
    (PagedKVCache, PAGED, OF_PAGED),
    (SinkWindowCache, BOUNDED, OF_BOUNDED),
)
SCALING = ("calibrate", "set_scales")  # of a cache with scales of heads that holds nothing
Call = Callable[[], Any]


def of_constructors() -> Iterator[tuple[str, str, Call]]:
    for kind, sizes, _ in KINDS:
        table = {**COMMON, **dict.fromkeys(sizes, SIZE)}
        if "sink_tokens" in sizes:
            table["sink_tokens"] = SIZE[1:]
        for argument, values in table.items():
            for value in values:
                given = {**SIZES, **sizes, argument: value}
                yield kind.__name__, argument, partial(kind, **given)
        for argument, value in (("granularity", "page"), ("granularity", 3), ("smooth_k", 1)):
            given = {**SIZES, **sizes, "dtype": "int8", argument: value}
            yield f"{kind.__name__} of int8", argument, partial(kind, **given)


def run(kind: Any, sizes: Good, method: str, given: Good) -> Any:
    """One of the methods, of a cache in the middle of a step."""
    how = {"dtype": "int8", "granularity": "head"} if method in SCALING else {}
    cache = kind(**{**SIZES, **sizes, **how})
    if method not in SCALING:
        step_of(cache)
    if kind is SinkWindowCache and method == "attend":
        cache.extend(1)
    return getattr(cache, method)(**given)


def of_methods() -> Iterator[tuple[str, str, Call]]:
    for kind, sizes, methods in KINDS:
        for method, (good, table) in methods.items():
            name = f"{kind.__name__}.{method}"
            yield name, "", partial(run, kind, sizes, method, good)
            for argument, values in table.items():
                for value in values:
                    given = {**good, argument: value}
                    yield name, argument, partial(run, kind, sizes, method, given)


def of_quantize() -> Iterator[tuple[str, str, Call]]:
    good = {"k": floats(2, 3, KV_HEADS, DIM), "v": floats(2, 3, KV_HEADS, DIM)}
    for argument, values in QUANTIZE.items():
        for value in values:
            given = {**good, argument: value}
            yield "quantize_kv", argument, partial(quantize_kv, **given)


EVERY = [*of_constructors(), *of_methods(), *of_quantize()]
WRONG = [row for row in EVERY if row[1]]
# What says more than the argument itself: the one it has to agree with, or what it is called there.
BESIDE = {"v": ("k",), "k": ("v",), "sequences": ("sequence", "number of sequences")}


@pytest.mark.parametrize(("name", "call"), [(n, c) for n, a, c in EVERY if not a])
def test_calls_that_are_right(name: str, call: Call) -> None:
    call()


@pytest.mark.parametrize(
    ("name", "argument", "call"), WRONG, ids=[f"{n}-{a}{i}" for i, (n, a, _) in enumerate(WRONG)]
)
def test_refused_by_name(name: str, argument: str, call: Call) -> None:
    with pytest.raises((ValueError, UnsupportedProblem, CacheFull)) as refused:
        call()
    said = str(refused.value)
    names = (argument, *BESIDE.get(argument, ()))
    assert any(f"{x}: expected " in said or f"{x} left: expected " in said for x in names), said


def test_the_list_is_long() -> None:
    assert len(WRONG) >= 200
