"""splitkv.append: new tokens written by slot mapping, whatever the layout of the pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.cache import quantize_kv
from splitkv.runtime import append as runtime
from splitkv.runtime import slot_mapping

PAGES, SIZE, HEADS, DIM, DIM_V, TOKENS = 6, 4, 2, 16, 24, 7
STORED = {"fp32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def caches(layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pages of zeros: keys and values in tensors of their own, or side by side."""
    if layout == "NHD":
        k, v = (torch.zeros(PAGES, SIZE, HEADS, d) for d in (DIM, DIM_V))
    elif layout == "HND":
        k, v = (torch.zeros(PAGES, HEADS, SIZE, d).transpose(1, 2) for d in (DIM, DIM_V))
    else:
        both = torch.zeros(PAGES, HEADS, SIZE, DIM + DIM_V).transpose(1, 2)
        k, v = both.split((DIM, DIM_V), dim=-1)
        if dtype != torch.float32:
            both = both.to(torch.int8).view(dtype)
            k, v = both.split((DIM, DIM_V), dim=-1)
            return k, v
    return (k, v) if dtype == torch.float32 else (k.to(dtype), v.to(dtype))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randn(TOKENS, HEADS, DIM), torch.randn(TOKENS, HEADS, DIM_V)


@pytest.mark.parametrize("layout", ["NHD", "HND", "side by side"])
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_layouts(layout: str, kind: str, index: torch.dtype) -> None:
    """Attention over what was written is attention over the tokens; skipped slots hold nothing."""
    (k, v), (k_cache, v_cache) = tokens(), caches(layout, STORED[kind])
    slots = torch.tensor([9, -1, 23, 0, -7, 6, PAGES * SIZE], dtype=index)
    scales: dict[str, Any] = {}
    if kind != "fp32":
        scales = {name: torch.zeros(PAGES, SIZE, HEADS) for name in ("k_scale", "v_scale")}
    splitkv.append(k, v, k_cache, v_cache, slots, **scales)
    kept = [n for n, slot in enumerate(slots.tolist()) if 0 <= slot < PAGES * SIZE]
    at = [divmod(int(slots[n]), SIZE) for n in kept]
    wanted = (k, v, None, None)
    if kind != "fp32":
        wanted = quantize_kv(k[None], v[None], kind, "token")[:4]
        wanted = tuple(x[0] for x in wanted)
    for cache, x in zip((k_cache, v_cache, *scales.values()), wanted, strict=False):
        assert x is not None
        bits = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        of = x.view(torch.uint8) if x.element_size() == 1 else x
        for (page, key), n in zip(at, kept, strict=True):
            assert torch.equal(bits[page, key], of[n])
            bits[page, key] = 0
        assert not bits.any()


@pytest.mark.parametrize("shape", [(), (1,), (HEADS,)])
def test_scales_that_are_known(shape: tuple[int, ...]) -> None:
    (k, v), (k_cache, v_cache) = tokens(), caches("HND", torch.float8_e4m3fn)
    scale = torch.full(shape, 0.5)
    slots = torch.arange(TOKENS)
    splitkv.append(k, v, k_cache, v_cache, slots, k_scale=scale, v_scale=scale)
    written = k_cache.transpose(1, 2).transpose(1, 2).reshape(-1, HEADS, DIM)[:TOKENS]
    assert torch.equal(written.float(), (k / 0.5).to(torch.float8_e4m3fn).float())


def test_padded_tokens_are_not_written() -> None:
    """Fewer slots than tokens: what is past them is padding."""
    (k, v), (k_cache, v_cache) = tokens(), caches("NHD", torch.float32)
    splitkv.append(k, v, k_cache, v_cache, torch.tensor([3, 1]))
    assert torch.equal(k_cache[0, 3], k[0]) and torch.equal(v_cache[0, 1], v[1])
    assert int((k_cache.flatten(1) != 0).any(1).sum()) == 1


def test_traced() -> None:
    (k, v), (k_cache, v_cache) = tokens(), caches("NHD", torch.float32)
    compiled = torch.compile(splitkv.append, backend="eager", fullgraph=True)
    compiled(k, v, k_cache, v_cache, torch.arange(TOKENS) + 2)
    assert torch.equal(k_cache.flatten(0, 1)[2 : 2 + TOKENS], k)


def test_a_call_like_an_earlier_one_is_only_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: checked when it is bound, and not again."""
    launched: list[Any] = []

    class Launcher:
        def __call__(self, call: Any, given: list[Tensor]) -> tuple[None, None]:
            launched.append(call)
            return None, None

    (k, v), (k_cache, v_cache) = tokens(), caches("HND", torch.float32)
    monkeypatch.setattr(runtime.calls, "match", lambda options, tensors: Launcher())
    monkeypatch.setattr(slot_mapping, "expect_slots", None)
    slots = torch.arange(TOKENS)
    splitkv.append(k, v, k_cache, v_cache, slots)
    (call,) = launched
    assert call.slots is slots and call.k is k and call.k_cache is k_cache and call.before is None


CALL: dict[str, Any] = {
    "k": torch.zeros(TOKENS, HEADS, DIM),
    "v": torch.zeros(TOKENS, HEADS, DIM_V),
    "k_cache": torch.zeros(PAGES, SIZE, HEADS, DIM),
    "v_cache": torch.zeros(PAGES, SIZE, HEADS, DIM_V),
    "slot_mapping": torch.zeros(TOKENS, dtype=torch.int64),
}
EIGHT = {name: CALL[name].to(torch.int8) for name in ("k_cache", "v_cache")}
BY_TOKEN = torch.zeros(PAGES, SIZE, HEADS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"k": [1.0]}, "k: expected a tensor"),
        ({"k": torch.zeros(())}, "k: expected [tokens, num_kv_heads, head_dim], got []"),
        ({"v": torch.zeros(())}, "v: expected [tokens=7, num_kv_heads=2, head_dim_v], got []"),
        ({"k": torch.zeros(TOKENS, DIM)}, "k: expected [tokens, num_kv_heads, head_dim]"),
        ({"k": CALL["k"][:3]}, "v: expected [tokens=3, num_kv_heads=2, head_dim_v]"),
        ({"slot_mapping": torch.zeros(9).long()}, "slot_mapping: expected [slots=7], got [9]"),
        ({"slot_mapping": torch.zeros(7)}, "slot_mapping: expected dtype int64 or int32"),
        ({"v": CALL["v"].half()}, "v: expected dtype float32, got float16"),
        ({"v": CALL["v"].to("meta")}, "v: expected device cpu, got meta"),
        ({"k": CALL["k"].double()}, "k: expected dtype bfloat16, float16 or float32"),
        (
            {"k_cache": CALL["k_cache"].half()},
            "k_cache: expected dtype float32, int8, float8_e4m3fn",
        ),
        ({"v_cache": CALL["v_cache"][:3]}, "v_cache: expected [num_pages=6, page_size=4, "),
        ({"k_cache": torch.zeros(1).expand(6, 4, 2, 16)}, "k_cache: expected stride 1 in the"),
        ({"k_scale": torch.ones(1)}, "k_scale: expected None with a cache of float32"),
        (EIGHT, "k_scale: expected a value with a cache of int8, got None"),
        (EIGHT | {"k_scale": torch.ones(3)}, "k_scale: expected [], [1], [num_kv_heads=2] or ["),
        (
            EIGHT | {"k_scale": BY_TOKEN, "v_scale": torch.ones(1)},
            "v_scale: expected one a token as k_scale, or neither, got [1]",
        ),
    ],
)
def test_malformed(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        splitkv.append(**CALL | wrong)
    assert str(error.value).startswith(message)
