"""`kernels/append.py` on a GPU: numbers of its definition, graphs, large offsets, no sync."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cases
import pytest
import torch
from interpreter.test_append import AXES, call_of, valid
from torch import Tensor

from splitkv.cache import PagedKVCache, SinkWindowCache
from splitkv.kernels.host.append_call import Append, Rotary, append_in_torch
from splitkv.runtime.append import append
from splitkv.testing import captured

DEVICE = "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_device(value: Any) -> Any:
    """The tensors of a call, of its rotary too, on the GPU; slices stay slices."""
    if isinstance(value, Tensor):
        base = value if value._base is None else value._base
        return base.to(DEVICE).as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, Append | Rotary):
        return type(value)(*map(on_device, value))
    return value


def comparable(cache: Tensor) -> Tensor:
    """On the CPU, NaN as a number; of floats of 8 bits the bits."""
    if cache.is_floating_point() and cache.itemsize == 1:
        return cache.cpu().view(torch.uint8)
    return cache.cpu().nan_to_num(9)


def compare(call: Append) -> None:
    """Twice: the first call of a layout goes through Triton, the second is launched directly."""
    first, there = on_device(call), on_device(call)
    append(first)
    wanted, results = append_in_torch(call), append(there)
    for once, again in ((first.k_cache, there.k_cache), (first.v_cache, there.v_cache)):
        assert torch.equal(comparable(once), comparable(again))
    rtol = 2 * torch.finfo(call.k.dtype).eps
    pairs = [(there.k_cache, call.k_cache), *zip(results, wanted, strict=True)]
    assert torch.equal(comparable(there.v_cache), comparable(call.v_cache))
    for actual, exact in pairs:
        assert (actual is None) == (exact is None)
        if actual is not None and exact is not None:
            if exact.is_floating_point() and exact.itemsize == 1:  # a step off, as what is rounded
                steps = comparable(actual).short() - comparable(exact).short()
                assert steps.abs().max() <= 1
                continue
            torch.testing.assert_close(
                actual.cpu(), exact, rtol=rtol, atol=rtol / 4, equal_nan=True
            )


@pytest.mark.parametrize(
    "values", cases.pairs({**AXES, "dtype": DTYPES}, valid), ids=lambda v: v["place"]
)
def test_kernel_is_the_definition(values: cases.Values) -> None:
    compare(call_of(values))


@pytest.mark.parametrize("tokens", [1, 3, 300])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_shapes_of_models(head_dim: int, tokens: int) -> None:
    batch, heads, page_size = 5, 8, 16
    angles = 6 * torch.rand(1024, head_dim // 2)
    before = torch.randint(0, 600, (batch,), dtype=torch.int32)
    table = torch.randperm(batch * 64).view(batch, 64).int()
    k, v, q = (torch.randn(batch, tokens, n, head_dim).bfloat16() for n in (heads, heads, 32))
    caches = [torch.zeros(batch * 64, page_size, heads, head_dim).bfloat16() for _ in range(2)]
    rotary = Rotary(angles.cos(), angles.sin(), interleaved=False)
    compare(Append(k, v, *caches, before=before, page_table=table, q=q, rotary=rotary))


def test_offsets_past_two_to_the_31() -> None:
    keys, heads, dim = 2**20 + 64, 16, 128
    caches = [torch.zeros(1, keys, heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    assert caches[0].numel() > 2**31
    new = torch.randn(1, 3, heads, dim, device=DEVICE).bfloat16()
    before = torch.tensor([keys - 3], dtype=torch.int32, device=DEVICE)
    append(Append(new, new, *caches, before=before))
    assert torch.equal(caches[0][:, -3:], new) and torch.equal(caches[1][:, -3:], new)
    slots = torch.tensor([keys - 5], dtype=torch.int32, device=DEVICE)
    append(Append(new[0, :1], new[0, :1], *caches, slots=slots))
    assert torch.equal(caches[0][0, -5], new[0, 0])


def test_no_host_sync(no_host_sync: Callable[[], AbstractContextManager[None]]) -> None:
    values = {name: options[0] for name, options in AXES.items()}
    call = on_device(call_of(values | {"seqlen": 3, "rotary_dim": 16, "q": True}))
    append(call)
    with no_host_sync():
        append(call)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one
def test_compiled_with_graphs() -> None:
    """As an operator inside torch.compile's own CUDA graphs: the cache is written in place."""
    values = {name: options[0] for name, options in AXES.items()}
    call = on_device(call_of(values | {"place": "paged", "rotary_dim": 16, "q": True}))
    other = call._replace(k_cache=call.k_cache.clone(), v_cache=call.v_cache.clone())
    compiled = torch.compile(append, fullgraph=True, mode="reduce-overhead")
    for step in range(4):
        before = torch.full_like(call.before, step)
        results = compiled(call._replace(before=before))
        wanted = append(other._replace(before=before))
        for actual, exact in zip(results, wanted, strict=True):
            assert torch.equal(actual, exact)
    for actual, exact in ((call.k_cache, other.k_cache), (call.v_cache, other.v_cache)):
        assert torch.equal(actual.nan_to_num(9), exact.nan_to_num(9))


def test_steps_of_a_paged_cache_in_a_graph() -> None:
    """Captured once; then sequences grow over pages and a fork copies, between replays."""
    shape = {"num_kv_heads": 2, "head_dim": 64, "num_layers": 2, "dtype": "bf16"}
    sizes = {"num_pages": 32, "page_size": 16, "max_batch": 4, "max_seqlen": 128}
    caches = [PagedKVCache(**sizes, **shape, device=d) for d in ("cpu", DEVICE)]
    inputs = [torch.zeros(2, 3, 1, n, 64, dtype=torch.bfloat16, device=DEVICE) for n in (8, 2, 2)]
    numbers = []
    for cache in caches:
        a, b = cache.allocate(), cache.allocate()
        numbers = [a, b, cache.fork(a)]
        cache.extend(numbers)

    def run() -> Tensor:
        outs = []
        for layer, (q, k, v) in enumerate(zip(*inputs, strict=True)):
            caches[1].append(layer, k, v)
            outs.append(caches[1].attend(layer, q))
        return torch.stack(outs)

    replay, out = captured(run)
    for cache in caches:
        for number in numbers:
            cache.truncate(number, 0)
    for step in range(40):
        new = [torch.randn(x.shape).bfloat16() for x in inputs]
        for x, y in zip(inputs, new, strict=True):
            x.copy_(y)
        if step == 21:  # the third becomes a fork of the first
            for cache in caches:
                cache.free(numbers[2])
                child = cache.fork(numbers[0])
            numbers[2] = child
        for cache in caches:
            cache.extend(numbers)
        replay()
        for layer, (q, k, v) in enumerate(zip(*new, strict=True)):
            caches[0].append(layer, k, v)
            wanted = caches[0].attend(layer, q)
            torch.testing.assert_close(out[layer].cpu(), wanted, rtol=2e-2, atol=2e-2)
    assert torch.equal(caches[0].page_table[:3], caches[1].page_table[:3].cpu())


def test_steps_of_a_sink_window_cache_in_a_graph() -> None:
    """`extend` is in the graph too: nothing but the replay is needed for a step."""
    sizes = {"batch": 3, "sink_tokens": 4, "window": 32, "num_kv_heads": 2, "head_dim": 64}
    caches = [SinkWindowCache(**sizes, device=d) for d in ("cpu", DEVICE)]
    inputs = [torch.zeros(3, 1, n, 64, dtype=torch.bfloat16, device=DEVICE) for n in (8, 2, 2)]

    def run() -> Tensor:
        q, k, v = inputs
        caches[1].extend()
        caches[1].append(0, k, v)
        return caches[1].attend(0, q)

    replay, out = captured(run)
    caches[1].reset()
    for _ in range(80):
        new = [torch.randn(x.shape).bfloat16() for x in inputs]
        for x, y in zip(inputs, new, strict=True):
            x.copy_(y)
        replay()
        caches[0].extend()
        caches[0].append(0, *new[1:])
        wanted = caches[0].attend(0, new[0])
        torch.testing.assert_close(out.cpu(), wanted, rtol=2e-2, atol=2e-2)
    assert caches[1].lengths.tolist() == caches[0].lengths.tolist() == [80] * 3
