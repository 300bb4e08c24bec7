"""Caches that store int8 and fp8: what they hold is what quantize_kv makes of the same tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.cache import PagedKVCache, SinkWindowCache, quantize_kv
from splitkv.rounding import dequantize
from splitkv.runtime.append import append

HEADS, KV_HEADS, DIM, DIM_V, LAYERS = 4, 2, 16, 32, 2
NAMES, GRANULARITIES = ("int8", "fp8", "fp8_e5m2"), ("tensor", "head", "token")
EVERY = [(name, granularity) for name in NAMES for granularity in GRANULARITIES]
every = pytest.mark.parametrize(("name", "granularity"), EVERY)


def paged(**options: Any) -> PagedKVCache:
    sizes = {"num_pages": 40, "page_size": 4, "max_batch": 5, "max_seqlen": 64}
    shape = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "head_dim_v": DIM_V, "num_layers": LAYERS}
    return PagedKVCache(**{**sizes, **shape, **options})


def sink_window(**options: Any) -> SinkWindowCache:
    shape = {"num_kv_heads": KV_HEADS, "head_dim": DIM, "head_dim_v": DIM_V, "num_layers": LAYERS}
    return SinkWindowCache(**{"batch": 1, "sink_tokens": 3, "window": 6, **shape, **options})


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [LAYERS, count, ..], keys around a mean of their own."""
    g = torch.Generator().manual_seed(seed)
    mean = 5 * torch.randn(LAYERS, 1, KV_HEADS, DIM, generator=g)
    k = torch.randn(LAYERS, count, KV_HEADS, DIM, generator=g) + mean
    v = torch.randn(LAYERS, count, KV_HEADS, DIM_V, generator=g)
    return torch.randn(LAYERS, count, HEADS, DIM, generator=g), k, v


def settled(cache: Any, k: Tensor, v: Tensor) -> None:
    """Every layer, by all the tokens that will come."""
    if cache._layers.settles:
        for layer in range(LAYERS):
            cache.calibrate(layer, k[layer], v[layer])


def held(k: Tensor, v: Tensor, name: str, granularity: str, smooth: bool) -> tuple[Tensor, Tensor]:
    """What a cache that was settled by all of them reads as, in a line: [1, tokens, ..]."""
    stored = quantize_kv(k, v, name, granularity, smooth_k=smooth)
    keys = dequantize(stored.k, stored.k_scale, torch.float32)
    keys = keys if stored.k_mean is None else keys + stored.k_mean
    return keys[None], dequantize(stored.v, stored.v_scale, torch.float32)[None]


def close(found: Any, wanted: Any) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("smooth", [False, True])
@every
def test_paged(name: str, granularity: str, smooth: bool) -> None:
    """A prompt, steps, and forks that copy a page with its scales; the LSE is that of all keys."""
    cache = paged(dtype=name, granularity=granularity, smooth_k=smooth)
    q, k, v = tokens(40)
    settled(cache, k, v)
    keys = [held(k[layer], v[layer], name, granularity, smooth) for layer in range(LAYERS)]
    owner, done = cache.allocate(), 0
    for count in (18, 1, 2, 1, 17):
        cache.extend([owner], count)
        new = slice(done, done + count)
        done += count
        options: dict[str, Any] = {"return_lse": True, "softmax_scale": 0.3}
        for layer in range(LAYERS):
            packed = count == 18
            lead = (...,) if packed else (None, ...)
            cache.append(layer, k[layer, new][lead], v[layer, new][lead])
            out, lse = cache.attend(layer, q[layer, new][lead], **options)
            seen = (x[:, :done] for x in keys[layer])
            wanted = splitkv.attention(q[layer, new][None], *seen, causal=True, **options)
            close((out, lse) if not packed else (out[None], lse[None]), wanted)
        parent, owner = owner, cache.fork(owner)
        cache.extend([parent], 1)  # both write after what they share
        for layer in range(LAYERS):
            cache.append(layer, 9 * k[layer, :1][None], 9 * v[layer, :1][None])


@pytest.mark.parametrize("smooth", [False, True])
@every
def test_sink_window(name: str, granularity: str, smooth: bool) -> None:
    cache = sink_window(dtype=name, granularity=granularity, smooth_k=smooth)
    q, k, v = tokens(25)
    settled(cache, k, v)
    keys = [held(k[layer], v[layer], name, granularity, smooth) for layer in range(LAYERS)]
    cache.extend(8)
    for layer in range(LAYERS):
        cache.append(layer, k[layer, :8][None], v[layer, :8][None])
    for n in range(8, 25):
        cache.extend()
        for layer in range(LAYERS):
            at = q[layer, n : n + 1][None]
            cache.append(layer, k[layer, n : n + 1][None], v[layer, n : n + 1][None])
            seen = (x[:, : n + 1] for x in keys[layer])
            wanted = splitkv.attention(at, *seen, return_lse=True, **cache.mask)
            close(cache.attend(layer, at, return_lse=True), wanted)


def test_scales_lie_beside_the_pages() -> None:
    shapes = {"token": (LAYERS, 40, 4, KV_HEADS), "head": (LAYERS, KV_HEADS), "tensor": (LAYERS, 1)}
    for granularity, shape in shapes.items():
        cache = paged(dtype="fp8", granularity=granularity)
        assert cache.k_scale is not None and cache.v_scale is not None
        assert cache.k_scale.shape == cache.v_scale.shape == shape
        assert cache.k.dtype == torch.float8_e4m3fn and cache.k_mean is None
    assert paged(dtype="int8")._layers.granularity == "token"
    plain = paged()
    assert plain.k_scale is None and plain.v_scale is None and plain.k_mean is None


def test_calibrated_again_scales_grow() -> None:
    """To the largest seen, by keys less the mean of the first call."""
    cache = paged(dtype="int8", granularity="head", smooth_k=True)
    assert cache.k_scale is not None and cache.v_scale is not None and cache.k_mean is not None
    _, k, v = tokens(12)
    for part in (slice(0, 5), slice(5, 9), slice(9, 12)):
        cache.calibrate(-1, k[1, part], v[1, part])
    mean = k[1, :5].mean(0)
    torch.testing.assert_close(cache.k_mean[1], mean)
    torch.testing.assert_close(cache.k_scale[1], (k[1] - mean).abs().amax((0, 2)) / 127)
    torch.testing.assert_close(cache.v_scale[1], v[1].abs().amax((0, 2)) / 127)
    assert not cache.k_scale[0].any()


@pytest.mark.parametrize("method", ["calibrate", "set_scales"])
def test_scales_need_no_gradient(method: str) -> None:
    """Also those of keys and values that do, and a model's parameters."""
    cache = paged(dtype="int8", granularity="head", smooth_k=True)
    _, k, v = (x.requires_grad_() for x in tokens(3))
    if method == "calibrate":
        cache.calibrate(0, k[0], v[0])
    else:
        scale = torch.nn.Parameter(torch.ones(KV_HEADS))
        cache.set_scales(0, scale, scale, torch.nn.Parameter(torch.ones(KV_HEADS, DIM)))
    held = cache.k_scale, cache.v_scale, cache.k_mean
    assert all(x is not None and x[0].any() and not x.requires_grad for x in held)


def test_scales_of_a_model() -> None:
    """What is past the largest that a scale can say is stored as that."""
    cache = paged(dtype="int8", granularity="tensor")
    cache.set_scales(0, torch.tensor([0.5]), torch.tensor([0.25]))
    a = cache.allocate()
    cache.extend([a], 1)
    k, v = torch.full((1, 1, KV_HEADS, DIM), 7.0), torch.full((1, 1, KV_HEADS, DIM_V), -99.0)
    cache.append(0, k, v)
    assert (cache.k[0, cache.page_table[0, 0], 0] == 14).all()
    assert (cache.v[0, cache.page_table[0, 0], 0] == -127).all()


def begun(cache: Any) -> Any:
    """With one token to be appended."""
    if isinstance(cache, PagedKVCache):
        cache.extend([cache.allocate()], 1)
    else:
        cache.extend(1)
    return cache


@pytest.mark.parametrize("make", [paged, sink_window])
def test_malformed(make: Any) -> None:
    q, k, v = (x[:, None] for x in tokens(1))
    head: dict[str, Any] = {"dtype": "int8", "granularity": "head"}
    smooth: dict[str, Any] = {"dtype": "fp8", "smooth_k": True}
    int8 = [x[0].to(torch.int8) for x in (k, v)]
    one, two, mean = torch.ones(1), torch.ones(2), torch.ones(2, DIM)
    unsettled, each = begun(make(**head)), begun(make(dtype="int8"))
    less_mean = make(**smooth)
    less_mean.calibrate(0, k[0], v[0])
    begun(less_mean)
    for wrong, message in (
        (lambda: make(granularity="head"), "granularity: expected None with a bfloat16 cache"),
        (lambda: make(smooth_k=True), "smooth_k: expected False with a bfloat16 cache"),
        (lambda: make(dtype="int8", granularity="page"), "granularity: expected 'tensor', "),
        (lambda: unsettled.append(0, k[0], v[0]), "layer: expected calibrate or set_scales before"),
        (lambda: unsettled.calibrate(0, k[0], v[0]), "calibrate: expected no tokens held, "),
        (lambda: unsettled.set_scales(0, one, one), "set_scales: expected no tokens held, "),
        (
            lambda: make(dtype="int8").calibrate(0, k[0], v[0]),
            "calibrate: expected granularity 'tensor' or 'head', or smooth_k, got 'token'",
        ),
        (lambda: make().set_scales(0, one, one), "set_scales: expected granularity 'tensor'"),
        (
            lambda: make(**head).set_scales(0, one, one),
            "k_scale: expected [num_kv_heads=2], got [1]",
        ),
        (lambda: make(**head).set_scales(0), "k_scale: expected a value with granularity head"),
        (
            lambda: make(**head).set_scales(0, two, two.double()),
            "v_scale: expected dtype float32, got float64",
        ),
        (
            lambda: make(**head).set_scales(0, two, two, mean),
            "k_mean: expected None with smooth_k=False",
        ),
        (
            lambda: make(**smooth).set_scales(0, one, one, mean),
            "k_scale: expected None with scales of each token",
        ),
        (
            lambda: less_mean.attend(0, q[0], softcap=3.0),
            "softcap: expected none with smooth_k",
        ),
        (
            lambda: less_mean.attend(0, q[0], sink_logits=torch.ones(HEADS)),
            "sink_logits: expected none with smooth_k",
        ),
        (
            lambda: each.attend(0, q[0], k_scale=one),
            "k_scale: expected None with a cache that holds its scales",
        ),
        (
            lambda: each.append(0, *int8),
            "k: expected dtype bfloat16, float16 or float32, got int8",
        ),
        (lambda: each.append(0, k[0], v[0].half()), "v: expected dtype float32, got float16"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            wrong()


@pytest.mark.parametrize("smooth", [False, True])
@every
def test_warmup_appends_to_every_layer_and_writes_nothing(
    name: str, granularity: str, smooth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before scales are settled, or with tokens held."""
    calls: list[Any] = []
    monkeypatch.setattr(
        "splitkv.cache.paged.append", lambda call: (calls.append(call), append(call))
    )
    cache = paged(dtype=name, granularity=granularity, smooth_k=smooth)
    for scale in (cache.k_scale, cache.v_scale):
        assert scale is not None
        scale.fill_(3)
    for x in (cache.k, cache.v):
        x.view(torch.uint8).fill_(5)
    cache.warmup()
    cache.warmup("fp16")
    assert [call.k.dtype for call in calls] == [torch.bfloat16] * 4 + [torch.float16] * 4
    assert [call.k.shape[0] for call in calls] == [1, cache.max_tokens] * 4
    layers = [cache.k[layer].data_ptr() for layer in (0, 0, 1, 1)]
    assert [call.k_cache.data_ptr() for call in calls] == layers * 2
    for call in calls:
        assert call.k_scale is not None and (call.k_mean is not None) == smooth
    for x in (cache.k, cache.v):
        assert bool((x.view(torch.uint8) == 5).all())
    for scale in (cache.k_scale, cache.v_scale):
        assert bool((scale == 3).all())
    with pytest.raises(ValueError, match=r"^dtype: expected one of"):
        cache.warmup(torch.int32)


def test_warmup_is_for_the_type_that_a_cache_takes() -> None:
    cache = paged(dtype="fp16")
    cache.warmup()
    with pytest.raises(ValueError, match=r"^k: expected dtype float16, got bfloat16$"):
        cache.warmup("bf16")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("new", [1, 4])
def test_one_slot_of_one_head(name: str, new: int) -> None:
    """Its scale is one of a token, though it is one number."""
    shape = {"num_kv_heads": 1, "head_dim": DIM, "head_dim_v": DIM_V, "num_layers": 1}
    cache = SinkWindowCache(batch=1, sink_tokens=0, window=1, dtype=name, **shape)
    pages = PagedKVCache(num_pages=1, page_size=1, max_batch=1, max_seqlen=1, dtype=name, **shape)
    for count in (new, 1):
        k, v, q = torch.randn(1, count, 1, DIM), torch.randn(1, count, 1, DIM_V), torch.randn(DIM)
        stored = quantize_kv(k[:, -1:], v[:, -1:], name)
        wanted = dequantize(stored.v, stored.v_scale, torch.float32)
        cache.extend(count)
        cache.append(0, k, v)
        assert cache.k_scale is not None and torch.equal(cache.k_scale[0], stored.k_scale)
        torch.testing.assert_close(cache.attend(0, q.view(1, 1, 1, DIM)), wanted)
        sequence = pages.allocate()
        pages.extend([sequence])
        pages.append(0, k[:, -1:], v[:, -1:])
        assert pages.v_scale is not None and torch.equal(pages.v_scale[0], stored.v_scale)
        torch.testing.assert_close(pages.attend(0, q.view(1, 1, 1, DIM)), wanted)
        pages.free(sequence)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_sequence(granularity: str) -> None:
    """Of which fewer keys are looked at than there is room for."""
    empty = torch.zeros(0, 17, KV_HEADS, DIM)
    stored = quantize_kv(empty, empty, "int8", granularity)
    scales = {"k_scale": stored.k_scale, "v_scale": stored.v_scale}
    for seqlen_k in (0, 2, 17):
        out = splitkv.decode(
            torch.zeros(0, 1, HEADS, DIM), stored.k, stored.v, max_seqlen_k=seqlen_k, **scales
        )
        assert out.shape == (0, 1, HEADS, DIM)
    out = splitkv.attention(torch.zeros(0, 3, HEADS, DIM), stored.k, stored.v, **scales)
    assert out.shape == (0, 3, HEADS, DIM)
