"""The public functions on CPU tensors, held to the reference by the tolerance rule."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import cases
import numpy
import pytest
import torch
from running import run_by
from torch import Tensor
from training import paged

import splitkv
from splitkv import Device, UnsupportedProblem, flash_attn, reference
from splitkv.core.problem import Operands
from splitkv.kernels import torch_math, torch_sdpa
from splitkv.planner.policies import POLICIES, fixed
from splitkv.runtime import dispatch
from splitkv.runtime.arguments import AttentionOptions, DecodeOptions, VarlenOptions
from splitkv.runtime.call_cache import CallCache
from splitkv.testing import (
    Call,
    Mask,
    Paged,
    Problem,
    Ragged,
    Score,
    assert_close,
    assert_lse_close,
    check,
    expected,
    make_operands,
    quantize,
)

DECODE = Problem("decode", 2, 8, 2, 32, 32, 2, 24, "float32", mask=Mask(True), lengths="device")
DENSE = Problem("dense", 2, 6, 2, 32, 32, 20, 40, "float32")
VARLEN = replace(DENSE, kind="varlen", place=Ragged(), batch=4, lengths="device")
TRAINING = {"dense": DENSE, "varlen": VARLEN}
MASKS = {
    "full": Mask(),
    "causal": Mask(True),
    "window": Mask(True, 9),
    "both_sides": Mask(False, 3, 4),
    "right_only": Mask(False, -1, 2),
    "sink_tokens": Mask(True, 9, -1, 3),
    "chunk": Mask(True, chunk=7),
    "chunk_and_sink_tokens": Mask(False, 4, -1, 3, 10),
}
SCORES = {
    "plain": {},
    "softcap": {"score": Score(softcap=True)},
    "alibi": {"score": Score(alibi=True)},
    "sink_logits": {"sink_logits": True},
    "lse": {"return_lse": True},
    "all": {"score": Score(True, True), "sink_logits": True, "return_lse": True},
}
H200 = Device.named("h200")


def caches(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    return call["q"], call["k_cache"], call["v_cache"]


def rest(call: Call, *left_out: str) -> Call:
    """The arguments that go by name."""
    by_position = ("q", "k", "v", "k_cache", "v_cache", *left_out)
    return {name: x for name, x in call.items() if name not in by_position}


# The kernels that serve these calls have a test of their own with every case.
@pytest.mark.parametrize("case", cases.PAIRWISE[::5] + cases.QUANTIZED + cases.EDGES, ids=str)
def test_decode(case: cases.Case) -> None:
    """Entries past a length NaN, page tables padded with garbage."""
    check(case.problem, **case.options)


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_and_its_gradients(mask: str, score: str, kind: str) -> None:
    problem = replace(TRAINING[kind], mask=MASKS[mask], needs_grad=True, **SCORES[score])
    check(problem, zero_length=kind == "varlen")


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("score", ["plain", "all"])
@pytest.mark.parametrize("lengths", [(20, 40), (40, 20), (1, 40)], ids=str)
def test_attention_in_16_bits(lengths: tuple[int, int], score: str, dtype: str, kind: str) -> None:
    """With fewer keys than queries the first rows see none; strides are those of a slice."""
    problem = replace(
        TRAINING[kind],
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        dtype=dtype,
        head_dim_v=48,
        mask=Mask(True),
        needs_grad=True,
        **SCORES[score],
    )
    check(problem, strided=True)


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", ["causal", "both_sides", "sink_tokens"])
def test_gradcheck(mask: str, score: str, kind: str) -> None:
    """Derivatives by differences of every output by every input, rows without keys included."""
    problem = replace(
        TRAINING[kind],
        batch=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        head_dim_v=3,
        seqlen_q=4,
        seqlen_k=3,
        dtype="float64",
        mask=MASKS[mask],
        **SCORES[score],
    )
    call = make_operands(problem)
    function = splitkv.attention if kind == "dense" else splitkv.attention_varlen
    names = [n for n in ("q", "k", "v", "sink_logits", "alibi_slopes") if call.get(n) is not None]
    leaves = tuple(call[n].detach().double().requires_grad_() for n in names)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        result = function(**call | dict(zip(names, leaves, strict=True)))
        if not problem.return_lse:
            return (result,)
        out, lse = result
        # fp32, and -inf for rows without keys: differences of those say nothing.
        return (out, torch.where(lse.isfinite(), lse, 0.0).double() * 0)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("kind", TRAINING)
def test_gradient_of_the_lse(kind: str) -> None:
    problem = replace(TRAINING[kind], mask=Mask(True), return_lse=True, sink_logits=True)
    call = make_operands(problem)
    leaves = [call[n].requires_grad_() for n in ("q", "k")]
    function = splitkv.attention if kind == "dense" else splitkv.attention_varlen
    for lse, factor in ((function(**call)[1], 1), (expected(problem, call)[1], -1)):
        assert lse is not None
        for x, g in zip(leaves, torch.autograd.grad(lse.logsumexp(-1).sum(), leaves), strict=True):
            x.grad = factor * g if x.grad is None else x.grad + factor * g
    assert all(x.grad.abs().max() < 1e-5 for x in leaves)


def test_decode_is_differentiable_on_the_cpu() -> None:
    check(replace(DECODE, needs_grad=True, sink_logits=True, score=Score(True)), poison=False)


@pytest.mark.parametrize("kind", TRAINING)
def test_dropout(kind: str) -> None:
    """Unbiased, another draw every time, and the gradient is that of the draw."""
    problem = replace(TRAINING[kind], dropout=True, needs_grad=True)
    call = make_operands(problem)
    function = splitkv.attention if kind == "dense" else splitkv.attention_varlen
    call["v"] = torch.ones_like(call["v"]).requires_grad_()
    torch.manual_seed(3)
    first, second = function(**call), function(**call)
    torch.manual_seed(3)
    assert torch.equal(function(**call), first)
    assert not torch.equal(first, second)
    assert abs(first.sum() / function(**call | {"dropout_p": 0.0}).sum() - 1) < 0.05
    (dv,) = torch.autograd.grad(first.sum(), call["v"])
    assert abs(dv.sum() / first.sum() - 1) < 1e-4


def test_deterministic_backward() -> None:
    problem = replace(DENSE, deterministic=True, needs_grad=True)
    call = make_operands(problem)
    grads = [torch.autograd.grad(splitkv.attention(**call).sum(), call["q"])[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("seqlen_q", [0, 1, 3])
@pytest.mark.parametrize("seqlen_k", [0, 5])
@pytest.mark.parametrize("place", ["contiguous", "paged"])
@pytest.mark.parametrize("sink_logits", [False, True], ids=["", "sink_logits"])
def test_decode_of_nothing(
    sink_logits: bool, place: str, seqlen_k: int, seqlen_q: int, batch: int
) -> None:
    """Empty batches, no queries, no capacity: the shapes are right, the rows 0 and -inf."""
    q = torch.randn(batch, seqlen_q, 4, 16)
    kwargs: dict[str, Any] = {"cache_seqlens": torch.zeros(batch, dtype=torch.int32)}
    if place == "paged":
        kwargs["page_table"] = torch.full((batch, -(-seqlen_k // 4)), 99, dtype=torch.int32)
        cache = torch.full((3, 4, 2, 16), math.nan)
    else:
        cache = torch.full((batch, seqlen_k, 2, 16), math.nan)
    if sink_logits:
        kwargs["sink_logits"] = torch.randn(4)
    out, lse = splitkv.decode(q, cache, cache[..., :8], return_lse=True, **kwargs)
    assert out.shape == (batch, seqlen_q, 4, 8) and lse.shape == (batch, 4, seqlen_q)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("lengths", list(product((0, 3), repeat=2)), ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_attention_of_nothing(batch: int, lengths: tuple[int, int]) -> None:
    q, k, v = (torch.randn(batch, n, 2, 8, requires_grad=True) for n in (*lengths, lengths[1]))
    out, lse = splitkv.attention(q, k, v, return_lse=True)
    plain = splitkv.attention(q, k, v)
    assert out.shape == plain.shape == q.shape and lse.shape == (batch, 2, lengths[0])
    if lengths[1] == 0:
        assert (out == 0).all() and (plain == 0).all() and (lse == -math.inf).all()
    for result in (out, plain):
        for x, grad in zip((q, k, v), torch.autograd.grad(result.sum(), (q, k, v)), strict=True):
            assert grad.shape == x.shape and not grad.isnan().any()


@pytest.mark.parametrize("bounds", [[0], [0, 0, 0], [0, 3, 3]], ids=str)
def test_ragged_attention_of_nothing(bounds: list[int]) -> None:
    total = bounds[-1]
    q, k = torch.randn(total, 2, 8), torch.randn(4, 1, 8)
    cu_q = torch.tensor(bounds, dtype=torch.int32)
    cu_k = torch.zeros_like(cu_q)
    out, lse = splitkv.attention_varlen(q, k, k, cu_q, cu_k, 3, 0, return_lse=True)
    assert out.shape == q.shape and lse.shape == (2, total)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_varlen_is_dense_attention_of_each_sequence() -> None:
    problem = replace(VARLEN, mask=Mask(True, 5), return_lse=True, sink_logits=True)
    call = make_operands(problem)
    out, lse = splitkv.attention_varlen(**call)
    cu_q, cu_k = (call.pop(n).tolist() for n in ("cu_seqlens_q", "cu_seqlens_k"))
    for name in ("max_seqlen_q", "max_seqlen_k"):
        del call[name]
    for b in range(problem.batch):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = call | {"q": call["q"][None, rows]} | {n: call[n][None, keys] for n in "kv"}
        out_b, lse_b = splitkv.attention(**one)
        torch.testing.assert_close(out[rows], out_b[0])
        torch.testing.assert_close(lse[:, rows], lse_b[0])


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_varlen_of_pages(page_size: int) -> None:
    """As decode of each sequence alone."""
    problem = replace(VARLEN, mask=Mask(True, 5, -1, 2), return_lse=True, sink_logits=True)
    _, call = paged(problem, make_operands(problem, zero_length=True), page_size)
    out, lse = splitkv.attention_varlen(**call)
    rest = {n: x for n, x in call.items() if n not in ("q", "k", "v")}
    made = splitkv.plan(call["q"], call["k"], call["v"], **rest).problem
    assert made.kind == "varlen" and made.place == Paged(page_size) and made.lengths == "device"
    ends = call["cu_seqlens_q"].tolist()
    own = ("softmax_scale", "window_size", "causal", "sink_tokens", "sink_logits", "return_lse")
    for b, rows in enumerate(slice(*pair) for pair in pairwise(ends)):
        lengths = {n: call[n][b : b + 1] for n in ("page_table", "cache_seqlens")}
        one = {n: call[n] for n in own} | lengths
        out_b, lse_b = splitkv.decode(call["q"][None, rows], call["k"], call["v"], **one)
        torch.testing.assert_close(out[rows], out_b[0])
        torch.testing.assert_close(lse[:, rows], lse_b[0])


def test_pages_that_need_a_gradient() -> None:
    """Served by torch: the gradients of the keys lie in their pages."""
    problem = replace(VARLEN, mask=Mask(True))
    call = make_operands(problem)
    _, in_pages = paged(problem, call, 4)
    for n in ("k", "v"):
        in_pages[n] = in_pages[n].nan_to_num().requires_grad_()
        call[n].requires_grad_()
    for c in (call, in_pages):
        splitkv.attention_varlen(**c).square().sum().backward()
    keys = call["cu_seqlens_k"].diff()
    for n in ("k", "v"):
        found = reference.gather_pages(in_pages[n].grad, in_pages["page_table"], problem.seqlen_k)
        wanted = reference.pad_sequences(call[n].grad, call["cu_seqlens_k"], problem.seqlen_k)
        found = found * (torch.arange(problem.seqlen_k) < keys[:, None])[..., None, None]
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "shape", [(), (1,), (2,), (3, 2), (3, 16, 2)], ids=["scalar", "one", "head", "batch", "token"]
)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_scales_of_every_shape(name: Any, shape: tuple[int, ...]) -> None:
    """Against the same values, dequantised beforehand."""
    stored, scales = [], []
    for _ in range(2):
        codec = cases.Codec(name, "token")
        stored.append(quantize(torch.randn(3, 16, 2, 32), codec)[0])
        scales.append(torch.rand(shape) + 0.5)
    q = torch.randn(3, 2, 4, 32)
    out = splitkv.decode(q, *stored, k_scale=scales[0], v_scale=scales[1])
    widened = []
    for x, scale in zip(stored, scales, strict=True):
        rows = {2: (slice(None), None, slice(None)), 3: (...,)}.get(len(shape), (...,))
        widened.append(x.float() * (scale[rows][..., None] if shape not in ((), (1,)) else scale))
    torch.testing.assert_close(out, splitkv.decode(q, *widened))


@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (3, 2, 4)], ids=str)
def test_quantised_query(shape: tuple[int, ...]) -> None:
    q = torch.randint(-127, 128, (3, 2, 4, 32), dtype=torch.int8)
    k, v = (torch.randint(-127, 128, (3, 9, 2, 32), dtype=torch.int8) for _ in range(2))
    q_scale, scale = (torch.rand(shape) + 0.5) / 50, torch.full((), 1 / 64)
    out = splitkv.decode(q, k, v, q_scale=q_scale, k_scale=scale, v_scale=scale)
    assert out.dtype == torch.bfloat16
    wide = q_scale[:, None, :, None] if len(shape) == 2 else q_scale[..., None]
    wide = q_scale if not shape else wide
    ref = splitkv.decode(q * wide, k * scale, v * scale)
    low = splitkv.decode(*(x.bfloat16() for x in (q * wide, k * scale, v * scale)))
    assert_close(out, ref, low)


@pytest.mark.parametrize("parts", [(10, 14), (24, 0), (0, 24), (1, 22, 1), (7, 0, 9, 8)], ids=str)
def test_merge_states(parts: tuple[int, ...]) -> None:
    """Attention to each part of the keys, merged, is attention to all of them."""
    call = make_operands(replace(DECODE, lengths="host", mask=Mask(), return_lse=True))
    q, k, v = caches(call)
    out, lse = splitkv.decode(q, k, v, causal=False, return_lse=True)
    merged: tuple[Tensor, Tensor] | None = None
    for keys, values in zip(k.split(parts, 1), v.split(parts, 1), strict=True):
        state = splitkv.decode(q, keys, values, causal=False, return_lse=True)
        merged = state if merged is None else splitkv.merge_states(*merged, *state)
    assert merged is not None
    torch.testing.assert_close(merged[0], out)
    assert_lse_close(merged[1], lse)


def test_merge_states_of_no_keys() -> None:
    empty = torch.zeros(2, 1, 4, 8), torch.full((2, 4, 1), -math.inf)
    out, lse = splitkv.merge_states(*empty, *empty)
    assert (out == 0).all() and (lse == -math.inf).all()
    state = torch.randn(2, 1, 4, 8), torch.randn(2, 4, 1)
    for a, b in ((state, empty), (empty, state)):
        out, lse = splitkv.merge_states(*a, *b)
        assert torch.equal(out, state[0]) and torch.equal(lse, state[1])


OF_STATE = {"out": (2, 1, 4, 8), "lse": (2, 4, 1)}
WRONG_STATES = [
    ("lse_a", "lse", (2, 1, 4), "[batch=2, num_heads=4, seqlen_q=1], got [2, 1, 4]"),
    ("lse_b", "lse", (), "[batch=2, num_heads=4, seqlen_q=1], got []"),
    ("out_a", "out", (8,), "[batch, seqlen_q, num_heads, head_dim_v], got [8]"),
    ("out_b", "out", (2, 1, 4, 4), "[batch=2, seqlen_q=1, num_heads=4, head_dim_v=8], got "),
]


@pytest.mark.parametrize(("name", "kind", "shape", "message"), WRONG_STATES, ids=str)
def test_merge_states_of_other_shapes(
    name: str, kind: str, shape: tuple[int, ...], message: str
) -> None:
    state = {f"{x}_{i}": torch.zeros(n) for i in "ab" for x, n in OF_STATE.items()}
    with pytest.raises(ValueError, match=f"^{name}: expected {re.escape(message)}"):
        splitkv.merge_states(**state | {name: torch.zeros(shape)})


PLANNED: dict[str, tuple[Problem, Callable[..., Any]]] = {
    "decode": (DECODE, splitkv.decode),
    "paged": (replace(DECODE, place=Paged(5), return_lse=True), splitkv.decode),
    "dense": (replace(DENSE, mask=Mask(True)), splitkv.attention),
    "varlen": (replace(VARLEN, return_lse=True, sink_logits=True), splitkv.attention_varlen),
}


def positional(problem: Problem, call: Call) -> tuple[tuple[Any, ...], Call]:
    """A call as `plan` and `explain` take it."""
    if problem.kind == "decode":
        return caches(call), rest(call)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    tensors = tuple(call[n] for n in ("q", "k", "v"))
    if problem.kind == "dense":
        return tensors, rest(call) | {"dense": True}
    return tensors + tuple(call[n] for n in names), rest(call, *names)


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_comes_back(name: str) -> None:
    """`plan` describes the call as the call itself is, and passing it back changes no bit."""
    problem, function = PLANNED[name]
    call = make_operands(problem)
    tensors, by_name = positional(problem, call)
    made = splitkv.plan(*tensors, **by_name)
    assert made.problem == problem
    assert made.device.kind == "cpu"
    assert made == splitkv.plan(problem)
    results = function(**call), function(**call, plan=made)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", PLANNED)
def test_explain_takes_a_call(name: str) -> None:
    problem, _ = PLANNED[name]
    tensors, by_name = positional(problem, make_operands(problem))
    explained = splitkv.explain(*tensors, **by_name)
    assert explained.problem == problem
    assert str(explained).startswith(str(problem))
    assert "can run it" in str(explained)
    again = splitkv.explain(splitkv.plan(*tensors, **by_name))
    assert again.plans == explained.plans
    assert splitkv.explain(*tensors, **by_name, device=H200).device == H200


def test_varlen_by_name() -> None:
    call = make_operands(VARLEN)
    tensors = tuple(call.pop(n) for n in ("q", "k", "v"))
    assert splitkv.plan(*tensors, **call).problem == VARLEN


def test_plan_of_a_call_that_will_need_gradients() -> None:
    call = make_operands(replace(DECODE, needs_grad=True))
    tensors, by_name = positional(DECODE, call)
    assert splitkv.plan(*tensors, **by_name).problem.needs_grad
    with torch.no_grad():
        assert not splitkv.plan(*tensors, **by_name).problem.needs_grad


def test_a_plan_serves_shorter_caches() -> None:
    made = splitkv.plan(replace(DECODE, seqlen_k=4096))
    for seqlen_k in (1, 24, 100):
        call = make_operands(replace(DECODE, seqlen_k=seqlen_k))
        assert torch.equal(splitkv.decode(**call, plan=made), splitkv.decode(**call))


def test_a_plan_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_operands(DECODE)
    tensors, by_name = positional(DECODE, call)
    made = splitkv.plan(*tensors, **by_name)
    assert made.kernel == "torch_sdpa"
    ran = run_by((torch_sdpa, torch_math), monkeypatch)
    for plan in (made, replace(made, kernel="torch_math")):
        check(DECODE, run=lambda _, call, plan=plan: (splitkv.decode(**call, plan=plan), None))
    assert ran == ["torch_sdpa", "torch_math"]
    monkeypatch.setattr(dispatch, "make_plan", lambda *a, **k: pytest.fail("decided again"))
    monkeypatch.setattr(dispatch, "calls", CallCache())
    splitkv.decode(**call, plan=made)


def test_plans_for_gpus_that_are_not_here() -> None:
    problem = Problem("decode", 1, 28, 4, 128, 128, 1, 600, mask=Mask(True))
    made = splitkv.plan(problem, device=H200)
    assert made.kernel == "hopper_decode_split" and made.config.num_splits > 1
    elsewhere = splitkv.plan(problem, device=Device.named("a100"))
    assert elsewhere.kernel == "decode_split" and elsewhere.config.num_splits > 1
    assert splitkv.plan(problem, device=H200, num_splits=3).config.num_splits == 3
    by_name = splitkv.plan(problem, device=H200, policy="flash_attention_2")
    assert by_name.policy == "flash_attention_2"
    sized = splitkv.plan(problem, device=H200, policy=fixed.with_split_size(128))
    assert (sized.config.schedule, sized.config.split_size) == ("fixed", 128)
    q, k = torch.zeros(1, 1, 28, 128, dtype=torch.bfloat16), torch.zeros(1, 600, 4, 128).bfloat16()
    assert splitkv.plan(q, k, k, device=H200) == made


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nothing", ["batch", "seqlen_q", "seqlen_k"])
def test_plans_for_nothing(nothing: str, policy: str) -> None:
    """There is no split to decide, and no policy stumbles over it."""
    problem = replace(DECODE, head_dim=64, head_dim_v=64, **{nothing: 0})
    made = splitkv.plan(problem, device=H200, policy=policy)
    assert made.config.num_splits == 1 or made.config.schedule == "batch"
    assert str(splitkv.explain(problem, device=H200, policies=(policy,)))


def test_what_nobody_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from splitkv.planner import registry

    monkeypatch.setattr(registry, "KERNELS", registry.KERNELS[:2])
    with pytest.raises(UnsupportedProblem) as error:
        splitkv.plan(DECODE)
    assert "\n  hopper_decode_split  device cpu: expected sm_90\n" in str(error.value)
    assert "\n  decode_split         device cpu: expected cuda" in str(error.value)
    assert splitkv.explain(DECODE).plans == ()


def test_num_splits_changes_nothing_on_the_cpu() -> None:
    call = make_operands(DECODE)
    assert torch.equal(splitkv.decode(**call, num_splits=7), splitkv.decode(**call))


def test_windows_may_be_lists() -> None:
    for problem, function in PLANNED.values():
        problem = replace(problem, mask=Mask(False, 3, 1))
        call = make_operands(problem)
        listed = call | {"window_size": list(call["window_size"])}
        results = function(**call), function(**listed)
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in results), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("far", [1 << 30, (1 << 31) - 1, 1 << 31, sys.maxsize])
def test_edges_past_every_key(far: int) -> None:
    """A kernel adds them to a position in 32 bits."""
    problem = replace(DECODE, lengths="host", mask=Mask())
    q, k, v = caches(make_operands(problem))
    windows: dict[str, Any] = {"window_size": (far, far), "attention_chunk": far}
    assert splitkv.plan(q, k, v, causal=False, **windows).problem.mask == Mask()
    made = splitkv.plan(q, k, v, window_size=(3, -1), sink_tokens=far)
    assert made.problem.mask == Mask(True, 3, sink_tokens=1 << 30)
    full = splitkv.decode(q, k, v, causal=False)
    assert torch.equal(splitkv.decode(q, k, v, causal=False, **windows), full)
    lengths = torch.full((2,), 24, dtype=torch.int32)
    metadata = flash_attn.get_scheduler_metadata(2, 2, 24, 8, 2, 32, lengths, q.dtype, **windows)
    assert metadata.problem.mask == Mask()
    call = {"cache_seqlens": lengths, "scheduler_metadata": metadata, **windows}
    for function in (
        partial(splitkv.attention, **windows),
        partial(flash_attn.flash_attn_with_kvcache, **call),
    ):
        check(problem, run=lambda _, call, function=function: (function(*caches(call)), None))


def test_lengths_are_bounds_that_may_be_loose() -> None:
    call = make_operands(VARLEN)
    loose = splitkv.attention_varlen(**call | {"max_seqlen_q": 1 << 24, "max_seqlen_k": 1 << 24})
    torch.testing.assert_close(loose, splitkv.attention_varlen(**call))


@pytest.mark.parametrize("given", [30, numpy.float64(30), numpy.float32(30)], ids=repr)
def test_kernels_are_given_a_float(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles another kernel for an integer, which no float can be given to later."""
    found: list[Any] = []

    def launcher(operands: Operands) -> tuple[Tensor, None]:
        found.extend((operands.softcap, operands.softmax_scale))
        return operands.q, None

    monkeypatch.setattr(dispatch, "calls", CallCache())
    monkeypatch.setattr(dispatch, "bind", lambda *described: launcher)
    tensors = caches(make_operands(DECODE))
    for _ in range(2):
        splitkv.decode(*tensors, softcap=given, softmax_scale=given)
        splitkv.attention(*tensors, softcap=given, softmax_scale=given)
    assert found == [30.0] * 8 and {type(x) for x in found} == {float}


def test_numbers_of_numpy_are_plain_in_a_plan() -> None:
    q, k, v = caches(make_operands(DECODE))
    options = {"softmax_scale": 1 / numpy.sqrt(32), "softcap": numpy.float32(30)}
    edges = {"window_size": (numpy.int64(9), numpy.int32(-1)), "sink_tokens": numpy.int8(2)}
    n = numpy.int64(8)
    made = splitkv.plan(q, k, v, max_seqlen_k=n, num_splits=numpy.int64(2), **options, **edges)
    plain = {"window_size": (9, -1), "sink_tokens": 2, "softcap": 30.0}
    same = splitkv.plan(q, k, v, max_seqlen_k=8, num_splits=2, **plain)
    assert json.dumps(made.as_dict()) == json.dumps(same.as_dict())
    new = {"cache_seqlens": n, "num_splits": numpy.int64(2)}
    flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), k[:, :2], v[:, :2], **new)
    sizes = map(numpy.int64, (2, 1, 24, 8, 2, 32))
    of_lengths = torch.zeros(2, dtype=torch.int32)
    metadata = flash_attn.get_scheduler_metadata(*sizes, of_lengths, page_size=n, num_splits=n)
    json.dumps(metadata.as_dict())


OPTIONS = {
    splitkv.attention: AttentionOptions,
    splitkv.attention_varlen: VarlenOptions,
    splitkv.decode: DecodeOptions,
}


@pytest.mark.parametrize("function", OPTIONS, ids=lambda f: f.__name__)
def test_options_are_those_of_the_signature(function: Callable[..., Any]) -> None:
    """What a type checker is told, and what the function takes."""
    parameters = inspect.signature(function).parameters.values()
    by_name = {x.name: x.annotation for x in parameters if x.kind is x.KEYWORD_ONLY}
    assert by_name.pop("return_lse") == "bool"
    told = {name: x.__forward_arg__ for name, x in OPTIONS[function].__annotations__.items()}
    assert told == by_name


def test_out() -> None:
    """Written in place whatever its strides, and nothing around it."""
    call = make_operands(replace(DECODE, return_lse=True))
    wanted = splitkv.decode(**call)
    room = torch.full((2, 8, 2, 40), math.nan)
    out = room.transpose(1, 2)[..., :32]
    result, lse = splitkv.decode(**call, out=out)
    assert result is out
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert room[..., 32:].isnan().all()


@pytest.mark.parametrize("kind", TRAINING)
def test_out_of_whole_sequences(kind: str) -> None:
    """Written in place whatever its strides; a graph has no part in it."""
    call = make_operands(replace(TRAINING[kind], return_lse=True))
    function = PLANNED[kind][1]
    wanted = function(**call)
    shape = wanted[0].shape
    out = torch.empty(*shape[:-1], shape[-1] + 8)[..., : shape[-1]]
    for trace in (lambda f: f, lambda f: torch.compile(f, backend="eager", fullgraph=True)):
        torch._dynamo.reset()
        out.fill_(math.nan)
        result, lse = trace(function)(**call, out=out)
        assert result is out
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
        recorded = call | {"q": call["q"].clone().requires_grad_()}
        with pytest.raises(ValueError, match="out: expected None where a gradient is recorded"):
            function(**recorded, out=out)
        with torch.no_grad():
            assert function(**recorded, out=out)[0] is out
    with pytest.raises(ValueError, match=r"out: expected \["):
        function(**call, out=out[:-1])


def test_return_lse_does_not_change_out() -> None:
    for kind, problem in {"decode": DECODE, **TRAINING}.items():
        function = {"dense": splitkv.attention, "varlen": splitkv.attention_varlen}.get(
            kind, splitkv.decode
        )
        call = make_operands(problem)
        out, lse = function(**call | {"return_lse": True})
        torch.testing.assert_close(out, function(**call))
        assert lse.dtype == torch.float32 and lse.isfinite().any()


def test_the_lse_leaves_the_sink_out() -> None:
    for problem, function in PLANNED.values():
        call = make_operands(replace(problem, return_lse=True, sink_logits=True))
        with_sink = function(**call)
        without = function(**call | {"sink_logits": None})
        assert_lse_close(with_sink[1], without[1])
        assert not torch.equal(with_sink[0], without[0])


def test_values_that_change_between_calls_are_read_again() -> None:
    """Later calls of a kind skip describing, planning and binding, and nothing else."""
    call = make_operands(DECODE, poison=False)
    shared = make_operands(replace(DECODE, place=Paged(8)), poison=False)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        call["cache_seqlens"].copy_(torch.randint(0, 25, (2,), generator=g))
        call["softmax_scale"] = 0.1 * (seed + 1)
        shared["page_table"].copy_(torch.randint(0, 5, (2, 3), generator=g))
        for problem, given in ((DECODE, call), (replace(DECODE, place=Paged(8)), shared)):
            ref, _ = expected(problem, given)
            torch.testing.assert_close(splitkv.decode(**given), ref.float())


def test_remembered_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "calls", CallCache(max_calls=5))
    call = make_operands(DECODE)
    for scale in range(1, 30):
        splitkv.decode(**call | {"softmax_scale": float(scale)})
        assert 0 < len(dispatch.calls) <= 5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 16, "batch_sizes": (1, 3), "seqlens_q": (1, 2)},
        {"dtype": torch.float32, "head_dim_v": 16, "cache_seqlens": False},
        {"sink_logits": True, "alibi_slopes": True, "window_size": (64, 0), "return_lse": True},
        {"device": "cpu", "num_splits": 2, "softcap": 30.0},
    ],
    ids=str,
)
def test_warmup(options: dict[str, Any]) -> None:
    plans = splitkv.warmup(num_heads=4, num_kv_heads=2, head_dim=32, max_seqlen_k=200, **options)
    batches, queries = options.get("batch_sizes", (1,)), options.get("seqlens_q", (1,))
    page_size = options.get("page_size", 1)
    longest = -(-200 // page_size) * page_size  # on a CPU shorter ones differ in nothing
    assert [(p.problem.batch, p.problem.seqlen_q, p.problem.seqlen_k) for p in plans] == [
        (b, s, longest) for b, s in product(batches, queries)
    ]
    problem = plans[0].problem
    assert problem.lengths == ("device" if options.get("cache_seqlens", True) else "host")
    assert problem.sink_logits == options.get("sink_logits", False)
    assert problem.score.alibi == options.get("alibi_slopes", False)
    assert problem.dtype == str(options.get("dtype", torch.bfloat16)).removeprefix("torch.")


def test_signatures_are_the_published_ones() -> None:
    common = (
        "causal window_size sink_tokens max_sink_tokens attention_chunk sink_logits softmax_scale "
        "softcap alibi_slopes q_scale k_scale v_scale products dropout_p deterministic out "
        "out_scale return_lse plan"
    )
    published = {
        "attention": "q k v " + common,
        "attention_varlen": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "page_table cache_seqlens "
        + common.replace("sink_logits", "bidirectional_ranges sink_logits"),
        "decode": "q k_cache v_cache cache_seqlens page_table max_seqlen_k causal window_size "
        "sink_tokens max_sink_tokens attention_chunk sink_logits softmax_scale softcap "
        "alibi_slopes q_scale k_scale v_scale "
        "products num_splits out out_scale return_lse early_kv plan schedule",
        "merge_states": "out_a lse_a out_b lse_b more sink_logits out lse",
    }
    defaults = {
        "causal": False,
        "window_size": (-1, -1),
        "sink_tokens": 0,
        "attention_chunk": 0,
        "softcap": 0.0,
        "dropout_p": 0.0,
        "deterministic": False,
        "return_lse": False,
        "early_kv": False,
        "num_splits": 0,
    }
    for name, arguments in published.items():
        parameters = inspect.signature(getattr(splitkv, name)).parameters
        assert " ".join(parameters) == arguments
        for argument, parameter in parameters.items():
            if parameter.kind == parameter.KEYWORD_ONLY:
                default = defaults.get(argument)
                default = True if (name, argument) == ("decode", "causal") else default
                assert parameter.default == default, argument
            else:
                assert parameter.default is parameter.empty
