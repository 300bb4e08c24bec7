"""What is refused is refused whatever was called before: 1 and 1.0 equal True, and are not it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import splitkv
from splitkv.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Q, K = torch.randn(1, 2, 2, 8), torch.randn(1, 6, 2, 8)
LENGTHS = torch.tensor([5], dtype=torch.int32)
VARLEN: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 6], dtype=torch.int32),
    "max_seqlen_q": 2,
    "max_seqlen_k": 6,
}
MASK: dict[str, tuple[Any, ...]] = {
    "causal": (True, False),
    "attention_chunk": (0, 1, 6),
    "softcap": (0.0, 1.0),
    "softmax_scale": (1.0,),
    "window_size": ((1, 0), (0, 0), (-1, -1)),
}
OURS = MASK | {"return_lse": (True, False), "sink_tokens": (0, 1)}
DENSE = OURS | {"dropout_p": (0.0,), "deterministic": (True, False)}
BOUNDS = {"max_seqlen_q": (2,), "max_seqlen_k": (1, 6)}
THEIRS = MASK | {
    "num_splits": (0, 1),
    "sm_margin": (0, 1),
    "pack_gqa": (True,),
    "return_softmax_lse": (True, False),
}
OF_CACHE = THEIRS | {"rotary_interleaved": (True, False)}


CALLS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, ...]]]] = {
    "decode": (
        lambda **given: splitkv.decode(Q, K, K, **given),
        OURS | {"num_splits": (0, 1), "max_seqlen_k": (1, 6), "early_kv": (True, False)},
    ),
    "attention": (lambda **given: splitkv.attention(Q, K, K, **given), DENSE),
    "attention_varlen": (
        lambda **given: splitkv.attention_varlen(Q[0], K[0], K[0], **VARLEN | given),
        DENSE | BOUNDS,
    ),
    "flash_attn_func": (lambda **given: flash_attn_func(Q, K, K, **given), THEIRS),
    "flash_attn_varlen_func": (
        lambda **given: flash_attn_varlen_func(Q[0], K[0], K[0], **VARLEN | given),
        THEIRS | BOUNDS,
    ),
    "flash_attn_with_kvcache": (
        lambda **given: flash_attn_with_kvcache(Q, K, K, cache_seqlens=LENGTHS, **given),
        OF_CACHE | {"rotary_interleaved": ()},
    ),
    "flash_attn_with_kvcache, new keys": (
        lambda **given: flash_attn_with_kvcache(
            *(Q, K.clone(), K.clone(), K[:, :1], K[:, :1]),
            cache_seqlens=LENGTHS - 2,
            rotary_cos=torch.ones(8, 4),
            rotary_sin=torch.zeros(8, 4),
            **given,
        ),
        OF_CACHE,
    ),
}


def twins(value: Any) -> Iterator[Any]:
    """What equals it and is of another type."""
    if isinstance(value, tuple):
        for i, x in enumerate(value):
            for twin in twins(x):
                yield (*value[:i], twin, *value[i + 1 :])
        return
    for kind in (bool, int, float):
        if kind is not type(value) and kind(value) == value:
            yield kind(value)


ROWS = [
    (name, argument, value, twin)
    for name, (_, options) in CALLS.items()
    for argument, values in options.items()
    for value in values
    for twin in twins(value)
]


@pytest.mark.parametrize(("name", "argument", "value", "twin"), ROWS, ids=repr)
def test_an_equal_value_of_another_type(name: str, argument: str, value: Any, twin: Any) -> None:
    """Is said to be wrong, or taken, as it was before the call that it equals."""
    call = CALLS[name][0]

    def said() -> str:
        try:
            call(**{argument: twin})
        except ValueError as error:
            return str(error)
        return "taken"

    first = said()
    for _ in range(3):
        call(**{argument: value})
    assert said() == first
    if type(value) is bool or type(twin) is bool:
        assert first != "taken"


def test_windows_that_only_unpack_alike() -> None:
    for call, _ in CALLS.values():
        call(window_size=(3, 0))
        call(window_size=[3, 0])
        for wrong in ({3: 1, 0: 1}, "30", iter((3, 0)), (3,), 3, None):
            with pytest.raises(ValueError, match="^window_size: expected "):
                call(window_size=wrong)
