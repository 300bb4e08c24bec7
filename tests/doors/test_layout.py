"""Results are contiguous whatever is asked for, as compiled graphs take them to be, and a graph of
autograd goes through calls that have nothing to compute."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import splitkv
from splitkv import flash_attn, reference

CU_Q, CU_K = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 9))


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return splitkv.attention(q, k, v, **options)


def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return splitkv.attention_varlen(q, k, v, CU_Q, CU_K, 5, 9, **options)


def decode(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return splitkv.decode(q, k, v, **options)


def flash(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **options: Any) -> Any:
    options["s_aux"] = options.pop("sink_logits", None)
    return flash_attn.flash_attn_func(q, k, v, return_softmax_lse=return_lse, **options)


def kvcache(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **options: Any) -> Any:
    options["s_aux"] = options.pop("sink_logits", None)
    call = flash_attn.flash_attn_with_kvcache
    return call(q, k, v, return_softmax_lse=return_lse, **options)


CALLS = {f.__name__: f for f in (dense, varlen, decode, flash, kvcache)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 2.0},
    "window": {"window_size": (3, 0)},
    "sinks": {"sink_logits": torch.zeros(4)},
}


@pytest.mark.parametrize("dims", [(16, 16), (16, 24), (12, 20)], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_contiguous(
    name: str,
    options: str,
    grad: bool,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> None:
    call, given = CALLS[name], OPTIONS[options]
    q = torch.randn(2, 5, heads[0], dims[0], dtype=dtype, requires_grad=grad)
    k, v = (torch.randn(2, 9, heads[1], dim, dtype=dtype) for dim in dims)
    out, (beside, lse) = (call(q, k, v, return_lse=lse, **given) for lse in (False, True))
    for x in (out, beside, lse):
        assert x.is_contiguous(), x.stride()


@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", ["dense", "varlen", "decode", "flash"])
def test_fakes_promise_what_comes(name: str, return_lse: bool) -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 4, 16)
    real = CALLS[name](q, k, k, return_lse=return_lse)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = CALLS[name](*(mode.from_tensor(x) for x in (q, k, k)), return_lse=return_lse)
    pairs = zip(real, fake, strict=True) if return_lse else [(real, fake)]
    for a, b in pairs:
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_merged_results_are_contiguous() -> None:
    out, lse = torch.randn(2, 5, 4, 16), torch.randn(2, 4, 5)
    for x in (out, out.transpose(1, 2).contiguous().transpose(1, 2)):
        merged = splitkv.merge_states(x, lse, x, lse)
        with_sinks = reference.apply_sink_logits(x, lse, torch.zeros(4))
        assert all(t.is_contiguous() for t in (*merged, with_sinks))


def test_a_sink_that_gets_next_to_nothing_has_its_gradient() -> None:
    out, lse = torch.ones(1, 1, 1, 1).double(), torch.zeros(1, 1, 1)
    for sink in (-30.0, -15.0, 0.0, 15.0, 30.0):
        x = torch.tensor([sink], requires_grad=True)
        reference.apply_sink_logits(out, lse, x).sum().backward()
        exact = -math.exp(sink) / (1 + math.exp(sink)) ** 2
        assert x.grad is not None and abs(x.grad.item() / exact - 1) < 1e-5


EMPTY = {
    "no_queries": ((2, 0), (2, 9), (0, 0, 0), (0, 9, 18)),
    "no_keys": ((2, 5), (2, 0), (0, 5, 10), (0, 0, 0)),
    "nothing": ((2, 0), (2, 0), (0, 0, 0), (0, 0, 0)),
    "no_batch": ((0, 5), (0, 9), (0,), (0,)),
}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("features", [False, True], ids=["", "features"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", ["dense", "varlen", "planned_for_none", "flash", "flash_varlen"])
def test_graphs_go_through_calls_of_nothing(
    name: str, return_lse: bool, features: bool, empty: str
) -> None:
    rows, keys, cu_q, cu_k = EMPTY[empty]
    q = torch.randn(*rows, 4, 8, requires_grad=True)
    k, v = (torch.randn(*keys, 2, 8, requires_grad=True) for _ in "kv")
    leaves, options = {"q": q, "k": k, "v": v}, dict[str, Any]()
    if features:
        options["alibi_slopes"] = leaves["slopes"] = torch.rand(4).requires_grad_()
        sinks = leaves["sinks"] = torch.rand(4).requires_grad_()
        options["s_aux" if name.startswith("flash") else "sink_logits"] = sinks
    options["return_softmax_lse" if name.startswith("flash") else "return_lse"] = return_lse
    if name in ("dense", "flash"):
        function = splitkv.attention if name == "dense" else flash_attn.flash_attn_func
        result: Any = function(q, k, v, **options)  # type: ignore[operator]
    else:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        lengths = [torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k)]
        longest = rows[1], keys[1]
        if name == "planned_for_none":
            longest = 0, 0
        function = splitkv.attention_varlen
        if name == "flash_varlen":
            function = flash_attn.flash_attn_varlen_func
        result = function(*packed, *lengths, *longest, **options)  # type: ignore[operator]
    out = result[0] if return_lse else result
    assert out.requires_grad and (out == 0).all()
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves.values()), strict=True):
        assert (grad == 0).all(), leaf


@pytest.mark.parametrize("form", ["return_softmax_lse", "return_attn_probs"])
@pytest.mark.parametrize("sink", [0.7, -math.inf])
def test_lse_of_rows_without_keys_beside_a_sink(sink: float, form: str) -> None:
    """FlashAttention's LSE includes the sink, which is all there is in such a row."""
    q, k = torch.randn(1, 3, 2, 8, requires_grad=True), torch.randn(1, 1, 2, 8, requires_grad=True)
    sinks = torch.full((2,), sink, requires_grad=True)
    call = flash_attn.flash_attn_func
    out, lse, *_ = call(q, k, k, causal=True, s_aux=sinks, **{form: True})
    nothing = math.inf if form == "return_attn_probs" and sink == -math.inf else sink
    assert (lse[..., :2] == nothing).all() and lse[..., 2].isfinite().all()
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, sinks))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :2] == 0).all()
    if sink == -math.inf:
        assert (grads[2] == 0).all()
        without = call(q, k, k, causal=True, **{form: True})
        assert torch.equal(out, without[0]) and torch.equal(lse, without[1])


def test_sink_tokens_end_at_the_right_edge_of_a_window() -> None:
    q, k = torch.zeros(1, 6, 1, 8), torch.zeros(1, 6, 1, 8)
    v = torch.eye(6)[None, :, None]
    seen = splitkv.attention(q, k, v, window_size=(1, 1), sink_tokens=4)[0, :, 0] > 0
    key, pos = torch.arange(6), torch.arange(6)[:, None]
    assert torch.equal(seen, (key <= pos + 1) & ((key >= pos - 1) | (key < 4)))


def gaps(*shape: int) -> Tensor:
    """Ones. Where there is none, `contiguous()` leaves the stride of 2 in the last dimension."""
    return torch.ones(*shape[:-1], 2 * shape[-1])[..., ::2].contiguous()


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 9), (2, 0, 9), (2, 5, 0)])
@pytest.mark.parametrize("name", ["dense", "decode", "flash", "kvcache"])
def test_a_tensor_without_elements_has_any_strides(
    name: str, batch: int, queries: int, keys: int
) -> None:
    q, k, v = gaps(batch, queries, 4, 16), gaps(batch, keys, 2, 16), gaps(batch, keys, 2, 8)
    assert 2 in (q.stride(-1), k.stride(-1))
    out = CALLS[name](q, k, v)
    assert out.shape == (batch, queries, 4, 8) and out.is_contiguous() and not out.any()


@pytest.mark.parametrize(("queries", "keys"), [(0, 9), (5, 0)])
def test_packed_tokens_of_which_there_are_none(queries: int, keys: int) -> None:
    q, k, v = gaps(queries, 4, 16), gaps(keys, 2, 16), gaps(keys, 2, 8)
    assert 2 in (q.stride(-1), k.stride(-1))
    bounds = [torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys)]
    for function in (splitkv.attention_varlen, flash_attn.flash_attn_varlen_func):
        out = function(q, k, v, *bounds, queries, keys)
        assert out.shape == (queries, 4, 8) and out.is_contiguous() and not out.any()


def test_packed_in_one_tensor_without_a_token() -> None:
    for out in (
        flash_attn.flash_attn_qkvpacked_func(gaps(2, 0, 3, 4, 16)),
        flash_attn.flash_attn_kvpacked_func(gaps(2, 0, 4, 16), gaps(2, 9, 2, 2, 16)),
        flash_attn.flash_attn_kvpacked_func(gaps(2, 5, 4, 16), gaps(2, 0, 2, 2, 16)),
    ):
        assert out.is_contiguous() and not out.any()
