"""torch.autocast: one rule, whatever is asked for, and whether or not a graph is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import splitkv
from splitkv import flash_attn

Q, KV = (2, 5, 4, 16), (2, 9, 2, 16)
CU_Q, CU_K = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 9))


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return splitkv.attention(q, k, v, causal=True, **options)


def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return splitkv.attention_varlen(q, k, v, CU_Q, CU_K, 5, 9, causal=True, **options)


def flash(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
    return flash_attn.flash_attn_func(q, k, v, causal=True, return_softmax_lse=return_lse)


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    lengths = CU_Q, CU_K, 5, 9
    options = {"causal": True, "return_softmax_lse": return_lse}
    return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **options)


CALLS = {f.__name__: f for f in (dense, varlen, splitkv.decode, flash, flash_varlen)}


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=g).to(dtype) for s in (Q, KV, KV))  # type: ignore[return-value]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_of_tensors_that_were_cast(
    name: str, given: torch.dtype, cast: torch.dtype, traced: bool
) -> None:
    """The same bits as without autocast, of q, k and v in its type; with and without the LSE."""
    call: Callable[..., Any] = CALLS[name]
    q, k, v = tensors(given)
    wanted = [call(*(x.to(cast) for x in (q, k, v)), return_lse=lse) for lse in (False, True)]
    if traced:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=cast):
        for _ in range(2):
            out, (beside, lse) = (call(q, k, v, return_lse=lse) for lse in (False, True))
            assert out.dtype == beside.dtype == cast and lse.dtype == torch.float32
            assert torch.equal(out, wanted[0]) and torch.equal(beside, wanted[1][0])
            assert torch.equal(lse, wanted[1][1])
    if not traced:
        assert call(q, k, v).dtype == given


def test_types_are_those_of_torch() -> None:
    """As scaled_dot_product_attention has them, of mixed inputs too; and the gradients."""
    q, k, v = tensors(torch.float32)
    v = v.bfloat16()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = splitkv.attention(q, k, v)
        torchs = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
        )
    assert out.dtype == torchs.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert [x.dtype for x in grads] == [x.dtype for x in leaves]
    wide = tensors(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert splitkv.attention(*wide).dtype == torch.float64


def test_another_type_of_autocast_is_another_call() -> None:
    q, k, v = tensors(torch.bfloat16)
    for cast in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=cast):
            assert splitkv.decode(q, k, v).dtype == splitkv.attention(q, k, v).dtype == cast
            with torch.autocast("cpu", enabled=False):
                assert splitkv.decode(q, k, v).dtype == torch.bfloat16


def test_plans_are_for_what_is_run() -> None:
    q, k, v = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = splitkv.plan(q, k, v)
        assert plan.problem.dtype == "bfloat16"
        assert splitkv.decode(q, k, v, plan=plan).dtype == torch.bfloat16


def test_what_is_written_into_a_cache_has_the_type_of_the_cache() -> None:
    """Functions that write take tensors as they come, and compute as without autocast."""
    q, k, v = tensors(torch.float32)
    results = []
    for enabled in (False, True):
        caches = torch.zeros(2, 16, 2, 16), torch.zeros(2, 16, 2, 16)
        lengths = torch.tensor([3, 4], dtype=torch.int32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths)
        results.append((out, *caches))
    assert all(x.dtype == torch.float32 for x in results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_quantised_keys_stay() -> None:
    q, k, v = tensors(torch.float32)
    k8, v8 = ((x * 20).to(torch.int8) for x in (k, v))
    scale = torch.full((2,), 0.05)
    wanted = splitkv.decode(q.bfloat16(), k8, v8, k_scale=scale, v_scale=scale)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = splitkv.decode(q, k8, v8, k_scale=scale, v_scale=scale)
    assert torch.equal(out, wanted)
