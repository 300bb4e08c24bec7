"""Quantised keys and values on a GPU: quantize_kv, append and caches, whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from running import HERE, SERVING, decode
from training import paged

import splitkv
from splitkv.cache import PagedKVCache, quantize_kv
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.kernels import records
from splitkv.kernels.limits import prefill
from splitkv.planner.registry import completed
from splitkv.testing import Codec, Contiguous, Paged, Problem, Ragged, bind, check

DEVICE = "cuda"
STORED = ("int8", "fp8", "fp8_e5m2")
WAYS = [(name, granularity) for name in STORED for granularity in ("tensor", "head", "token")]
DENSE = Problem("dense", 2, 16, 4, 128, 128, 700, 700, mask=Mask(True), return_lse=True)


@pytest.mark.parametrize("shape", [(3, 700, 8, 128), (5000, 2, 80), (2, 33, 3, 576)], ids=str)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("name", "granularity"), WAYS)
def test_quantize_kv_has_the_bits_of_the_cpu(
    name: str, granularity: str, mean: bool, shape: tuple[int, ...]
) -> None:
    size = torch.randn(shape[:-1]).exp()[..., None]
    x = (torch.randn(shape) * size).bfloat16()
    x[..., 0, :] = 0
    x.view(-1)[-1] = float("inf")
    k_mean = torch.randn(shape[-2:]) if mean else None
    wanted = quantize_kv(x, x, name, granularity, k_mean=k_mean)
    on_gpu = None if k_mean is None else k_mean.to(DEVICE)
    found = quantize_kv(x.to(DEVICE), x.to(DEVICE), name, granularity, k_mean=on_gpu)
    for a, b in zip(found[:4], wanted[:4], strict=True):
        assert a is not None and b is not None
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("name", "granularity"), WAYS)
def test_cache_holds_what_the_cpu_holds(name: str, granularity: str) -> None:
    """A prompt and steps, bit by bit, and attention to them."""
    q = torch.randn(40, 8, 64).bfloat16()
    k, v = (torch.randn(40, 2, 64).bfloat16() for _ in range(2))
    sizes = {"num_pages": 20, "page_size": 16, "max_batch": 2, "max_seqlen": 64}
    caches = [
        PagedKVCache(
            **sizes,
            num_kv_heads=2,
            head_dim=64,
            dtype=name,
            granularity=granularity,
            device=device,
        )
        for device in ("cpu", DEVICE)
    ]
    outs: list[Any] = [[], []]
    for cache, found in zip(caches, outs, strict=True):
        on = cache.k.device
        if granularity != "token":
            cache.calibrate(0, k.to(on), v.to(on))
        number = cache.allocate()
        for rows in (slice(0, 38), slice(38, 39), slice(39, 40)):
            cache.extend([number], rows.stop - rows.start)
            cache.append(0, *(x[rows].to(on)[None] for x in (k, v)))
            found.append(cache.attend(0, q[rows].to(on)[None]))
    for field in ("k", "v", "k_scale", "v_scale"):
        a, b = (getattr(cache, field).cpu().view(torch.uint8) for cache in caches)
        assert torch.equal(a, b)
    for wanted, found in zip(*outs, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=3e-2, atol=3e-2)


AXES: cases.Axes = {
    "codec": cases.CODECS,
    "products": ("widened", "half", "full"),
    "kind": ("dense", "varlen", "paged"),
}


@pytest.mark.parametrize(
    "values", cases.pairs(AXES), ids=lambda values: "-".join(map(str, values.values()))
)
def test_prefill(values: cases.Values) -> None:
    """The Triton kernel, in the shape that it takes first."""
    kind = values["kind"]
    problem = replace(DENSE, codec=values["codec"], products=values["products"])
    if kind != "dense":
        problem = replace(problem, kind="varlen", place=Ragged(), lengths="device")

    def run(problem: Problem, call: Any) -> Any:
        if kind == "paged":
            problem, call = paged(problem, call, 16)
        config = next(prefill.configs(problem, HERE))
        plan = completed(Plan(problem, HERE, "fixed", "prefill", config, "a test"))
        return records.PREFILL.launch(bind(problem, call), plan)

    check(problem, device=DEVICE, run=run)


QUERY_AXES: cases.Axes = {
    "codec": cases.CODECS,
    "products": ("widened", "half", "full"),
    "q_granularity": ("head", "token", "tensor"),
    "rows": ((7, 1), (8, 2), (8, 4), (4, 16)),  # heads a KV head, query tokens
    "place": (Contiguous(), Paged(16)),
    "kernel": ("hopper_decode_split", "decode_split"),
}


@pytest.mark.parametrize(
    "values", cases.pairs(QUERY_AXES), ids=lambda values: "-".join(map(str, values.values()))
)
def test_decode_of_queries_in_8_bits(values: cases.Values) -> None:
    rest = dict(values)
    (group, seqlen_q), kernel = rest.pop("rows"), rest.pop("kernel")
    heads = {"num_kv_heads": 2, "num_heads": 2 * group}
    problem = replace(SERVING, **heads, **rest, seqlen_q=seqlen_q, seqlen_k=700)
    check(problem, device=DEVICE, run=decode(kernel))


@pytest.mark.parametrize("q_granularity", ["none", "token", "head"])
@pytest.mark.parametrize(("name", "products"), [("int8", "half"), ("fp8", "full")])
def test_attention(name: Any, products: Any, q_granularity: Any) -> None:
    """Whatever kernel the policy takes."""
    codec = Codec(name, "head")
    problem = replace(DENSE, codec=codec, products=products, q_granularity=q_granularity)
    assert splitkv.plan(problem).kernel not in ("torch_math", "torch_sdpa")
    check(problem, device=DEVICE)


def test_a_gradient_is_refused_by_name() -> None:
    problem = replace(DENSE, codec=Codec("int8", "head"), products="half", needs_grad=True)
    reasons = dict(splitkv.plan(replace(problem, return_lse=True)).rejected)
    assert "gradient: expected inputs that require none" in reasons["prefill"]
