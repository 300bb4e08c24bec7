"""A bad argument of a layer, of its mask or of a cache for `generate` is refused by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the transformers extra is not installed")

from splitkv import UnsupportedProblem  # noqa: E402
from splitkv.integrations import transformers as integration  # noqa: E402


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 5, 5, 16
PACKED = {
    "cu_seq_lens_q": ints(0, 4, 10),
    "cu_seq_lens_k": ints(0, 4, 10),
    "max_length_q": 6,
    "max_length_k": 6,
}
CALLS: dict[str, dict[str, Any]] = {
    "prompt": {"query": floats(BATCH, HEADS, QUERIES, DIM)},
    "packed": {"query": floats(BATCH, HEADS, QUERIES, DIM), **PACKED},
    "decode": {"query": floats(BATCH, HEADS, 1, DIM)},
}
KV = {n: floats(BATCH, KV_HEADS, KEYS, DIM) for n in ("key", "value")}
WRONG: dict[str, list[Any]] = {
    "query": [None, 3.0, floats(2, 4, 5), floats(2, 3, 5, DIM), floats(2, 4, 5, DIM).int()],
    "key": [None, [1.0], floats(2, 5, DIM), floats(2, 2, 5, 8), floats(2, 2, 5, DIM).half()],
    "value": [None, floats(2, 1, 5, DIM), floats(2, 2, 4, DIM), floats(2, 2, 5, DIM).double()],
    "attention_mask": [floats(2, 5), floats(2, 1, 5, 5), "causal", True],
    "scaling": [0.0, -1.0, float("nan"), "x", floats(1)],
    "softcap": [-1.0, float("inf"), "x"],
    "sliding_window": [0, -1, 1.5, "4", True],
    "s_aux": [1.0, floats(3), floats(4).int()],
    "is_causal": [1, "yes"],
    "deterministic": [1, "yes"],
    "position_bias": [floats(1, 4, 5, 5)],
    "output_attentions": [True],
    "head_mask": [floats(4)],
    "cache": [object()],
    "something_new": [1, "x", floats(1)],
}
OF_TRAINING: dict[str, list[Any]] = {"dropout": [-0.1, 1.0, "x", None, floats(1)]}
OF_PACKED: dict[str, list[Any]] = {
    "cu_seq_lens_q": [None, 3, [0, 4, 10], floats(3, 1)],
    "cu_seq_lens_k": [None, ints(0, 10), floats(1, 3)],
    "max_length_q": [None, "6", 1.5, -1],
    "max_length_k": [None, [6], -2],
}
BESIDE = {  # the argument that one has to agree with, or that is read in its place
    "query": ("num_heads", "key"),
    "key": ("query", "value", "attention_mask"),
    "value": ("key",),
    "cu_seq_lens_q": ("cu_seq_lens_k",),
}
OF_DECODE = {name: values for name, values in WRONG.items() if name != "deterministic"}
TABLES = {"prompt": WRONG | OF_TRAINING, "packed": WRONG | OF_TRAINING | OF_PACKED}
TABLES["decode"] = OF_DECODE


def every_wrong_call() -> Iterator[Any]:
    for kind, table in TABLES.items():
        for argument, values in table.items():
            for n, value in enumerate(values):
                yield pytest.param(kind, argument, value, id=f"{kind}-{argument}{n}")


EVERY = list(every_wrong_call())


def mask_of(query: Any) -> Any:
    """What the model would have made of a causal mask for as many queries."""
    shape = getattr(query, "shape", ())
    queries = int(shape[2]) if len(shape) == 4 else QUERIES
    return integration.visible_keys(BATCH, queries, KEYS, KEYS - queries)


def run(call: dict[str, Any]) -> Any:
    call = {**KV, **call}
    tensors = [call.pop(n) for n in ("query", "key", "value")]
    mask = call.pop("attention_mask", mask_of(tensors[0]))
    with torch.no_grad():
        return integration.attention_forward(torch.nn.Module(), *tensors, mask, **call)


@pytest.mark.parametrize("kind", CALLS)
def test_calls_that_are_right(kind: str) -> None:
    assert run(CALLS[kind])[0].shape[2:] == (HEADS, DIM)


@pytest.mark.parametrize(("kind", "argument", "value"), EVERY)
def test_refused_by_name(kind: str, argument: str, value: Any) -> None:
    with pytest.raises((ValueError, UnsupportedProblem)) as refused:
        run({**CALLS[kind], argument: value})
    names = "|".join((argument, *BESIDE.get(argument, ())))
    found = re.search(rf"(^| )({names})(\.shape\[\d\] \(.*\))?: expected ", str(refused.value))
    assert found, str(refused.value)


def test_the_list_is_long() -> None:
    assert len(EVERY) >= 120
