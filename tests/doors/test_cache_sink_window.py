"""SinkWindowCache against attention to all tokens under the mask that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv import UnsupportedProblem
from splitkv.cache import SinkWindowCache
from splitkv.cache.sink_window import slots_of

BATCH, HEADS, KV_HEADS, DIM, DIM_V = 3, 4, 2, 16, 32


def make(sink_tokens: int, window: int, **options: Any) -> SinkWindowCache:
    sizes = {"batch": BATCH, "num_kv_heads": KV_HEADS, "head_dim": DIM, "head_dim_v": DIM_V}
    options = {"dtype": "fp32", "num_layers": 2, **options}
    return SinkWindowCache(sink_tokens=sink_tokens, window=window, **sizes, **options)


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of so many tokens a sequence, for two layers."""
    lead = 2, BATCH, count
    return (random(*lead, HEADS, DIM), random(*lead, KV_HEADS, DIM), random(*lead, KV_HEADS, DIM_V))


@pytest.mark.parametrize("prompt", [1, 4, 9, 40])
@pytest.mark.parametrize(("sink_tokens", "window"), [(3, 6), (0, 5), (4, 1)])
def test_decode_is_attention_under_the_mask(prompt: int, sink_tokens: int, window: int) -> None:
    cache, total = make(sink_tokens, window), prompt + 2 * window + 5
    q, k, v = tokens(total)
    cache.extend(prompt)
    for layer in range(2):
        cache.append(layer, k[layer][:, :prompt], v[layer][:, :prompt])
    for n in range(prompt, total):
        cache.extend()
        for layer in range(2):
            cache.append(layer, k[layer][:, n : n + 1], v[layer][:, n : n + 1])
            out, lse = cache.attend(layer, q[layer][:, n : n + 1], return_lse=True)
            seen = slice(0, n + 1)
            wanted, wanted_lse = splitkv.attention(
                q[layer][:, n : n + 1],
                k[layer][:, seen],
                v[layer][:, seen],
                return_lse=True,
                **cache.mask,
            )
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    assert cache.lengths.tolist() == [total] * BATCH
    assert cache.cache_seqlens.tolist() == [min(total, sink_tokens + window)] * BATCH


@pytest.mark.parametrize("prompt", [6, 30])
def test_sequences_of_their_own_lengths(prompt: int) -> None:
    """Padding on the left is not kept, and each sequence has its own first tokens."""
    cache, pads = make(2, 5, num_layers=1), (0, 4, prompt - 1)
    q, k, v = (x[0] for x in tokens(prompt + 12))
    cache.extend(prompt, leftpad=torch.tensor(pads, dtype=torch.int32))
    cache.append(0, k[:, :prompt], v[:, :prompt])
    for n in range(prompt, prompt + 12):
        cache.extend()
        cache.append(0, k[:, n : n + 1], v[:, n : n + 1])
        out = cache.attend(0, q[:, n : n + 1])
        for b, pad in enumerate(pads):
            row = slice(b, b + 1), slice(pad, n + 1)
            wanted = splitkv.attention(q[row[0], n : n + 1], k[row], v[row], **cache.mask)
            torch.testing.assert_close(out[row[0]], wanted, rtol=1e-5, atol=1e-5)


def test_chunks_are_the_same_as_one_prompt() -> None:
    whole, pieces = make(3, 7, num_layers=1), make(3, 7, num_layers=1)
    _, k, v = (x[0] for x in tokens(25))
    whole.extend(25)
    whole.append(0, k, v)
    for first, last in ((0, 2), (2, 3), (3, 14), (14, 25)):
        pieces.extend(last - first)
        pieces.append(0, k[:, first:last], v[:, first:last])
    assert torch.equal(whole.k, pieces.k) and torch.equal(whole.v, pieces.v)
    assert torch.equal(whole.cache_seqlens, pieces.cache_seqlens)


def test_no_slot_is_given_twice() -> None:
    lengths = torch.tensor([0, 3, 11], dtype=torch.int32)
    slots = slots_of(lengths, 20, 3, 5)
    for row in slots:
        kept = row[row >= 0]
        assert len(kept.unique()) == len(kept) and kept.max() < 8


def test_addresses_stay() -> None:
    """What a graph of a step reads and writes is where it was."""
    cache = make(2, 4)
    cache.extend()
    at = [x.data_ptr() for x in (cache.slots, cache.lengths, cache.cache_seqlens, cache.k)]
    cache.extend(7)
    cache.extend()
    cache.reset()
    assert at[1:] == [x.data_ptr() for x in (cache.lengths, cache.cache_seqlens, cache.k)]
    cache.extend()
    assert cache.slots.data_ptr() == at[0] and cache.lengths.tolist() == [1] * BATCH


def test_what_it_refuses() -> None:
    cache = make(2, 4)
    q, k, v = (x[0] for x in tokens(2))
    cache.extend(2)
    for wrong, name in (
        (lambda: make(-1, 4), "sink_tokens"),
        (lambda: make(1, 0), "window"),
        (lambda: make(1, 4, dtype="bf17"), "dtype"),
        (lambda: cache.extend(0), "num_tokens"),
        (lambda: cache.extend(1, leftpad=torch.zeros(2, dtype=torch.int32)), "leftpad"),
        (lambda: cache.append(0, k[:, :1], v), "k"),
        (lambda: cache.append(0, k, v.half()), "v"),
        (lambda: cache.append(2, k, v), "layer"),
        (lambda: cache.attend(0, q[:, :1], window_size=(3, 0)), "window_size"),
        (lambda: cache.attend(0, q[:, :1, :, :8]), "q"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected "):
            wrong()
    with pytest.raises(UnsupportedProblem, match="q: expected one token a sequence"):
        cache.attend(0, q)
    with pytest.raises(ValueError, match="^dtype: expected "):
        make(1, 4, dtype="int4")
