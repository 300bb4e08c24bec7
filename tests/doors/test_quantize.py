"""quantize_kv: what it stores is near, its scales fit, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import splitkv
from splitkv import reference
from splitkv.cache import quantize_kv
from splitkv.core.masks import Mask
from splitkv.rounding import LARGEST, MIN_SCALE, dequantize
from splitkv.testing import assert_close

STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
NAMES, GRANULARITIES = tuple(STORED), ("tensor", "head", "token")
EVERY = [(name, granularity) for name in NAMES for granularity in GRANULARITIES]
every = pytest.mark.parametrize(("name", "granularity"), EVERY)


def tokens(seed: int, *shape: int, spread: float = 2.0, dtype: Any = torch.float32) -> Tensor:
    """Values of many sizes, zeros among them."""
    g = torch.Generator().manual_seed(seed)
    x = (
        torch.randn(shape, generator=g)
        * (spread * torch.randn(shape[:-1], generator=g)).exp()[..., None]
    )
    return x.masked_fill(torch.rand(shape, generator=g) < 0.1, 0.0).to(dtype)


def scale_shape(x: Tensor, granularity: str) -> tuple[int, ...]:
    shapes = {"tensor": (1,), "head": x.shape[-2:-1], "token": x.shape[:-1]}
    return tuple(shapes[granularity])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(EVERY),
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.sampled_from([1, 8, 24])),
    st.sampled_from([0.0, 2.0, 9.0]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.booleans(),
)
def test_stored_values_are_the_nearest(
    seed: int,
    how: tuple[str, str],
    shape: tuple[int, ...],
    spread: float,
    dtype: torch.dtype,
    packed: bool,
) -> None:
    name, granularity = how
    x = tokens(seed, *shape, spread=spread, dtype=dtype).nan_to_num(posinf=6e4, neginf=-6e4)
    x = x.flatten(0, 1) if packed else x
    stored = quantize_kv(x, x, name, granularity)
    assert torch.equal(stored.k.view(torch.uint8), stored.v.view(torch.uint8))
    assert torch.equal(stored.k_scale, stored.v_scale)
    scale = stored.k_scale
    assert stored.k.dtype == STORED[name] and stored.k.shape == x.shape
    assert scale.dtype == torch.float32 and scale.shape == scale_shape(x, granularity)
    assert (scale >= MIN_SCALE).all() and scale.isfinite().all()
    back = dequantize(stored.k, scale, torch.float64)
    by_row = scale if granularity != "tensor" else scale.expand(x.shape[-2])
    step = by_row.double()[..., None].expand(x.shape)
    half = step / 2
    if name == "fp8":  # half of a step that grows with the value, from 2^-9 on
        half = torch.maximum(x.double().abs() / 16, step * 2**-10)
    elif name == "fp8_e5m2":  # from 2^-16 on
        half = torch.maximum(x.double().abs() / 8, step * 2**-17)
    slack = 127 * 2**-22 * step  # scale, reciprocal and product are each rounded in fp32
    assert ((back - x.double()).abs() <= half + slack).all()

    again = quantize_kv(back.float(), back.float(), name, granularity)
    assert torch.equal(again.k.view(torch.uint8), stored.k.view(torch.uint8))
    torch.testing.assert_close(again.k_scale, scale, rtol=1e-6, atol=0)


@every
def test_the_largest_of_a_scale_is_stored_as_the_largest(name: str, granularity: str) -> None:
    x = tokens(3, 2, 7, 3, 16)
    stored = quantize_kv(x, x, name, granularity)
    dims = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "token": (3,)}[granularity]
    assert (stored.k.float().abs().amax(dims) == LARGEST[STORED[name]]).all()


@every
def test_zeros_and_nothing(name: str, granularity: str) -> None:
    for shape in ((2, 3, 2, 8), (0, 3, 2, 8), (2, 0, 2, 8), (0, 2, 8), (2, 3, 0, 8)):
        x = torch.zeros(shape)
        stored = quantize_kv(x, x, name, granularity, smooth_k=True)
        assert (stored.k_scale == MIN_SCALE).all() and stored.k_mean is not None
        assert stored.k.shape == shape and not stored.k.float().any()
        assert stored.k_scale.shape == scale_shape(x, granularity)
        assert stored.k_mean.shape == shape[-2:] and not stored.k_mean.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@every
def test_what_shares_a_scale_with_something_not_finite_reads_as_nan(
    name: str, granularity: str, bad: float
) -> None:
    x = tokens(1, 2, 4, 2, 8)
    x[1, 2, 0, 5] = bad
    stored = quantize_kv(x, x, name, granularity)
    back = dequantize(stored.k, stored.k_scale, torch.float32)
    spoilt = torch.zeros(2, 4, 2, dtype=torch.bool)
    at: Any = {"tensor": (...,), "head": (..., 0), "token": (1, 2, 0)}[granularity]
    spoilt[at] = True
    assert back[spoilt].isnan().all() and back[~spoilt].isfinite().all()


@every
def test_pages_are_as_contiguous_keys(name: str, granularity: str) -> None:
    k, v = tokens(5, 2, 12, 2, 16), tokens(6, 2, 12, 2, 24)
    q = torch.randn(2, 1, 4, 16)
    whole = quantize_kv(k, v, name, granularity)
    cut = quantize_kv(*(x.view(6, 4, *x.shape[2:]) for x in (k, v)), name, granularity)
    for a, b in zip(whole[:4], cut[:4], strict=True):
        assert a is not None and b is not None
        assert a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))
    scales = [{"k_scale": x.k_scale, "v_scale": x.v_scale} for x in (whole, cut)]
    out = splitkv.decode(q, whole.k, whole.v, **scales[0])
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    paged = splitkv.decode(q, cut.k, cut.v, page_table=table, **scales[1])
    assert_close(paged, reference.decode(q, whole.k, whole.v, **scales[0])[0], out)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_sequences_in_pages_may_have_their_own_scales(name: str) -> None:
    """As contiguous ones: in decode, and in attention_varlen as the same pages dequantised."""
    g = torch.Generator().manual_seed(0)
    k, v = tokens(5, 2, 12, 2, 16), tokens(6, 2, 12, 2, 24)
    q = torch.randn(2, 3, 4, 16, generator=g)
    stored = quantize_kv(k, v, name, "tensor")
    scale = torch.rand(2, 2, generator=g) + 0.5
    scales = {"k_scale": scale, "v_scale": scale / 3}
    pages = [x.view(6, 4, *x.shape[2:]) for x in (stored.k, stored.v)]
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    out = splitkv.decode(q, stored.k, stored.v, **scales)
    paged = splitkv.decode(q, *pages, page_table=table, **scales)
    lengths = torch.tensor([12, 12], dtype=torch.int32)
    call = {"page_table": table, "cache_seqlens": lengths, "causal": True, **scales}
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32)
    packed = splitkv.attention_varlen(q.flatten(0, 1), *pages, bounds, None, 3, 12, **call)
    call["mask"] = Mask(call.pop("causal"))
    ref, _ = reference.attention_varlen(q.flatten(0, 1), *pages, bounds, None, **call)
    for other in (paged.flatten(0, 1), packed):
        assert_close(other, ref, out.flatten(0, 1))


@every
def test_smooth_keys(name: str, granularity: str) -> None:
    """The same attention, every lse less by the mean key's score, and nearer where keys share a
    large mean."""
    g = torch.Generator().manual_seed(0)
    offset = 30 * torch.randn(2, 16, generator=g)
    k, v = torch.randn(2, 40, 2, 16, generator=g) + offset, torch.randn(2, 40, 2, 16, generator=g)
    q = torch.randn(2, 1, 4, 16, generator=g)
    ref, ref_lse = splitkv.decode(q, k, v, return_lse=True)
    errors = []
    for smooth in (False, True):
        stored = quantize_kv(k, v, name, granularity, smooth_k=smooth)
        given = {"k_scale": stored.k_scale, "v_scale": stored.v_scale}
        out, lse = splitkv.decode(
            q, stored.k, stored.v, return_lse=True, products="widened", **given
        )
        errors.append((out - ref).norm() / ref.norm())
        if smooth:
            mean = stored.k_mean
            assert mean is not None
            torch.testing.assert_close(mean, k.mean((0, 1)))
            shift = torch.einsum("bshd,hd->bhs", q, mean.repeat_interleave(2, 0)) / 4
            torch.testing.assert_close(lse + shift, ref_lse, atol=0.1, rtol=0)
            later = quantize_kv(k, v, name, granularity, k_mean=mean)
            assert torch.equal(later.k.view(torch.uint8), stored.k.view(torch.uint8))
            assert later.k_mean is mean
    step = 2 if name == "fp8_e5m2" else 1  # which has a bit less
    assert errors[1] < errors[0] / 2 and errors[1] < 0.05 * step


GOOD: dict[str, Any] = {"k": torch.zeros(2, 5, 2, 8), "v": torch.zeros(2, 5, 2, 16)}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    (
        {"k": None},
        "k: expected a tensor [batch or pages, tokens, num_kv_heads, head_dim], got None",
    ),
    (
        {"k": torch.zeros(5, 8)},
        "k: expected [batch or pages, tokens, num_kv_heads, head_dim], got [5, 8]",
    ),
    (
        {"v": torch.zeros(2, 4, 2, 8)},
        "v: expected [batch or pages=2, tokens=5, num_kv_heads=2, head_dim_v], got [2, 4, 2, 8]",
    ),
    (
        {"k": torch.zeros(5, 2, 8)},
        "v: expected [total_k=5, num_kv_heads=2, head_dim_v], got [2, 5, 2, 16]",
    ),
    (
        {"k": torch.zeros(2, 5, 2, 8, dtype=torch.int8)},
        "k: expected dtype bfloat16, float16, float32 or float64, got int8",
    ),
    ({"v": GOOD["v"].half()}, "v: expected dtype float32, got float16"),
    ({"v": GOOD["v"].to("meta")}, "v: expected device cpu, got meta"),
    ({"dtype": "int4"}, "dtype: expected 'int8', 'fp8' or 'fp8_e5m2', got 'int4'"),
    ({"dtype": torch.int8}, "dtype: expected 'int8', 'fp8' or 'fp8_e5m2', got torch.int8"),
    (
        {"granularity": "page"},
        "granularity: expected 'tensor', 'head' or 'token', got 'page'",
    ),
    ({"smooth_k": 1}, "smooth_k: expected True or False, got 1"),
    (
        {"smooth_k": True, "k_mean": torch.zeros(2, 8)},
        "smooth_k: expected False with a k_mean, got True",
    ),
    (
        {"k_mean": torch.zeros(2, 16)},
        "k_mean: expected [num_kv_heads=2, head_dim=8], got [2, 16]",
    ),
    (
        {"k_mean": torch.zeros(2, 8, dtype=torch.float16)},
        "k_mean: expected dtype float32, got float16",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), MALFORMED, ids=[m for _, m in MALFORMED])
def test_malformed(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        quantize_kv(**{**GOOD, **wrong})


def test_no_gradient_is_recorded() -> None:
    x = torch.randn(2, 3, 2, 8, requires_grad=True)
    stored = splitkv.quantize_kv(x, x, "fp8", "head", smooth_k=True)
    assert not any(y.requires_grad for y in stored if y is not None)
