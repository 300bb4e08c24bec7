"""The kernels made of PyTorch operators, against the reference, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from torch import Tensor
from training import paged

from splitkv import reference
from splitkv.core.device import CPU, GPUS
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Kernel, Plan
from splitkv.kernels import records
from splitkv.testing import (
    Call,
    Codec,
    Contiguous,
    Paged,
    Problem,
    Ragged,
    Score,
    assert_close,
    bind,
    check,
    expected,
    make_operands,
)

KERNELS = (records.TORCH_MATH, records.TORCH_SDPA)
DENSE = Problem("dense", 2, 6, 2, 32, 32, 40, 40, dtype="float32")
TRAINING_MASKS = {
    "full": Mask(),
    "causal": Mask(causal=True),
    "window": Mask(causal=True, window_left=9),
    "both_sides": Mask(window_left=3, window_right=4),
    "sink_tokens": Mask(causal=True, window_left=9, sink_tokens=3),
    "chunk": Mask(causal=True, chunk=10),
}


def run(kernel: Kernel) -> Any:
    """`run=` of `check`, by way of a plan."""

    def launch(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        (config,) = kernel.configs(problem, CPU)
        plan = Plan(problem, CPU, "fixed", kernel.name, config, "the only configuration")
        return kernel.launch(bind(problem, call), plan)

    return launch


def serves(kernel: Kernel, problem: Problem) -> bool:
    return not kernel.unsupported(problem, CPU)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("case", cases.DECODE, ids=str)
def test_decode(case: cases.Case, kernel: Kernel) -> None:
    problem = case.problem
    if kernel is records.TORCH_SDPA:  # every case, less what SDPA has no argument for
        problem = replace(problem, score=Score(), return_lse=False)
        problem = replace(problem, dtype="float32") if problem.sink_logits else problem
    assert serves(kernel, problem)
    out, lse = run(kernel)(problem, make_operands(problem, **case.options))
    assert out.dtype == getattr(torch, problem.dtype)
    assert (lse is not None) == problem.return_lse
    assert lse is None or lse.dtype == torch.float32
    check(problem, run=run(kernel), **case.options)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("mask", TRAINING_MASKS)
@pytest.mark.parametrize("sink_logits", [False, True], ids=["", "sink_logits"])
@pytest.mark.parametrize("shape", [(40, 40), (12, 40), (40, 12), (1, 40)], ids=str)
def test_training(
    shape: tuple[int, int], sink_logits: bool, mask: str, kind: Any, kernel: Kernel
) -> None:
    """Forward and every gradient, rows without keys and empty sequences included."""
    problem = replace(
        DENSE,
        kind=kind,
        batch=2 if kind == "dense" else 4,
        seqlen_q=shape[0],
        seqlen_k=shape[1],
        mask=TRAINING_MASKS[mask],
        sink_logits=sink_logits,
        needs_grad=True,
    )
    if kind == "varlen":
        problem = replace(problem, place=Ragged())
    assert serves(kernel, problem)
    check(problem, run=run(kernel), zero_length=kind == "varlen")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("page_size", [1, 16, 100])
@pytest.mark.parametrize("mask", [Mask(True), Mask(True, 7, -1, 2)], ids=str)
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (1, 40)], ids=str)
def test_packed_sequences_in_pages(
    shape: tuple[int, int], mask: Mask, page_size: int, kernel: Kernel
) -> None:
    """Also by the reference itself, to which the kernels are held."""
    problem = replace(DENSE, kind="varlen", place=Ragged(), batch=4, mask=mask)
    problem = replace(problem, seqlen_q=shape[0], seqlen_k=shape[1])

    def in_pages(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        return run(kernel)(*paged(problem, call, page_size))

    check(problem, run=in_pages, zero_length=True)
    call = make_operands(problem, zero_length=True)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "page_table", "cache_seqlens")
    results = [
        reference.attention_varlen(mask=mask, **{n: c[n] for n in names if n in c})
        for c in (call, paged(problem, call, page_size)[1])
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dims", [(64, 64), (48, 24)], ids=str)
def test_training_types(head_dims: tuple[int, int], dtype: str, kernel: Kernel) -> None:
    problem = replace(
        DENSE,
        dtype=dtype,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        mask=Mask(causal=True),
        needs_grad=True,
    )
    check(problem, run=run(kernel), strided=True)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_score_feature_and_lse_in_training(dtype: str, kind: Any) -> None:
    problem = replace(
        DENSE,
        kind=kind,
        dtype=dtype,
        score=Score(True, True),
        mask=Mask(True, 7, -1, 2),
        sink_logits=True,
        return_lse=True,
        needs_grad=True,
    )
    check(problem, run=run(records.TORCH_MATH))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("kind", ["dense", "varlen", "decode"])
def test_float64(kind: Any, kernel: Kernel) -> None:
    problem = replace(
        DENSE, kind=kind, dtype="float64", mask=Mask(causal=True), sink_logits=True, batch=3
    )
    call = make_operands(problem)
    out, _ = run(kernel)(problem, call)
    torch.testing.assert_close(out, expected(problem, call)[0])


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("mask", TRAINING_MASKS)
def test_gradcheck(mask: str, kernel: Kernel) -> None:
    """Derivatives by differences, with rows that see no key."""
    problem = replace(
        DENSE,
        batch=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        head_dim_v=2,
        seqlen_q=4,
        seqlen_k=3,
        dtype="float64",
        mask=TRAINING_MASKS[mask],
        sink_logits=True,
        needs_grad=True,
    )
    call = make_operands(problem)
    names = ("q", "k", "v", "sink_logits")
    leaves = tuple(call[n].detach().double().requires_grad_() for n in names)

    def out(*leaves: Tensor) -> Tensor:
        return run(kernel)(problem, call | dict(zip(names, leaves, strict=True)))[0]

    assert torch.autograd.gradcheck(out, leaves)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("sink_logits", [False, True], ids=["", "sink_logits"])
def test_no_keys_at_all(sink_logits: bool, kind: Any, kernel: Kernel) -> None:
    problem = replace(DENSE, kind=kind, seqlen_k=0, sink_logits=sink_logits, needs_grad=True)
    call = make_operands(problem)
    out, _ = run(kernel)(problem, call)
    assert out.numel() > 0 and (out == 0).all()
    (grad,) = torch.autograd.grad(out.sum(), call["q"])
    assert (grad == 0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_tokens_after_the_last_sequence(kind: Any, kernel: Kernel) -> None:
    """Packed buffers may be longer than their sequences; an empty batch is a batch."""
    problem = replace(DENSE, kind="varlen", mask=Mask(causal=True))
    call = make_operands(problem)
    used = call["q"].shape[0]
    ref, _ = expected(problem, call)
    alone, _ = run(kernel)(problem, call)
    for name in "qkv":
        call[name] = torch.cat([call[name], torch.full_like(call[name][:3], math.nan)])
    out, _ = run(kernel)(problem, call)
    assert_close(out[:used], ref, alone)
    assert (out[used:] == 0).all()


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_dropout(mask: str) -> None:
    """Unbiased, different every time, and reproducible from torch's seed."""
    kernel = records.TORCH_MATH
    problem = replace(DENSE, mask=TRAINING_MASKS[mask], dropout=True)
    call = make_operands(problem)
    call["v"] = torch.ones_like(call["v"])
    torch.manual_seed(0)
    first, _ = run(kernel)(problem, call)
    second, _ = run(kernel)(problem, call)
    torch.manual_seed(0)
    again, _ = run(kernel)(problem, call)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert abs(first.mean().item() - 1) < 0.05


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_fills_the_buffer_of_the_caller(kernel: Kernel) -> None:
    problem = replace(DENSE, kind="decode", seqlen_q=2)
    call = make_operands(problem)
    expectation, _ = run(kernel)(problem, call)
    operands = bind(problem, call)
    operands.out = torch.full((2, 2, 6, 32), math.nan)
    plan = Plan(problem, CPU, "fixed", kernel.name, Config(), "")
    out, _ = kernel.bind(plan, operands)(operands)
    assert out is operands.out
    assert torch.equal(out, expectation)


def test_sdpa_says_all_it_cannot() -> None:
    problem = replace(
        DENSE,
        dtype="bfloat16",
        score=Score(True, True),
        sink_logits=True,
        return_lse=True,
        deterministic=True,
        needs_grad=True,
    )
    assert records.TORCH_SDPA.unsupported(problem, GPUS["h200"]) == [
        "softcap: expected 0, got a soft cap",
        "alibi_slopes: expected None, got slopes",
        "return_lse: expected False, got True",
        "sink_logits: expected dtype float32 or float64 beside them, got bfloat16",
        "deterministic: expected False with gradients on cuda, got True",
    ]
    assert len(records.TORCH_SDPA.unsupported(problem, CPU)) == 4
    assert records.TORCH_MATH.unsupported(problem, GPUS["h200"]) == []


QUANTISED_AXES: cases.Axes = {
    "kind": ("dense", "varlen", "decode"),
    "codec": cases.CODECS,
    "products": ("widened", "half", "full"),
    "q_granularity": ("none", "tensor", "head", "token"),
    "dtype": ("bfloat16", "float16"),
    "mask": (Mask(), Mask(True), Mask(True, 5, -1, 2)),
    "sink_logits": (False, True),
    "paged": (False, True),
}


def quantised(values: cases.Values) -> bool:
    """A quantised query works in bf16, and only caches are in pages."""
    if values.get("q_granularity", "none") != "none" and values.get("dtype") == "float16":
        return False
    return not (values.get("paged") and values.get("kind") != "varlen")


@pytest.mark.parametrize("number", range(len(QUANTISED := cases.pairs(QUANTISED_AXES, quantised))))
def test_quantised_keys(number: int) -> None:
    """The working precision that they are held to rounds as `products` allows; they do not."""
    values = dict(QUANTISED[number])
    in_pages, kind = values.pop("paged"), values["kind"]
    place, lengths = (Ragged(), "device") if kind == "varlen" else (Contiguous(), "host")
    values |= {"place": place, "lengths": lengths, "return_lse": True, "seqlen_q": 3}
    problem = replace(DENSE, **values)
    launch = run(records.TORCH_MATH)
    check(problem, run=(lambda p, call: launch(*paged(p, call, 4))) if in_pages else launch)
    if not values["sink_logits"]:
        check(replace(problem, return_lse=False), run=run(records.TORCH_SDPA))


def test_the_reference_rounds_what_products_says() -> None:
    """Queries by half, weights by full, of which the reference itself knows nothing."""
    problem = replace(DENSE, kind="decode", dtype="float64", codec=Codec("int8", "token"))
    call = make_operands(problem)
    outs = []
    for products in ("widened", "half", "full"):
        chosen = replace(problem, products=products)
        exact = expected(chosen, call)[0]
        outs.append((expected(chosen, call, upcast=False)[0] - exact).abs().max().item())
    assert outs[0] < 1e-12 < outs[1] < outs[2] < 0.1


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_traffic_counts_the_tensors(kernel: Kernel) -> None:
    for problem in (
        replace(DENSE, return_lse=True),
        replace(DENSE, kind="decode", dtype="bfloat16", place=Paged(4), head_dim_v=16),
        replace(DENSE, kind="decode", dtype="bfloat16", codec=Codec("int8", "head")),
    ):
        call = make_operands(problem, poison=False)
        decode = problem.kind == "decode"
        names = ("k_cache", "v_cache") if decode else ("k", "v")
        traffic = kernel.traffic(problem, Config())
        keys = problem.batch * problem.seqlen_k
        per_key = sum(call[n][0, 0].numel() * call[n].element_size() for n in names)
        assert traffic.kv_bytes == keys * per_key
        assert traffic.q_bytes == call["q"].numel() * call["q"].element_size()
        out, lse = run(records.TORCH_MATH)(problem, call)
        lse_bytes = 0 if lse is None else lse.numel() * 4
        assert traffic.out_bytes == out.numel() * out.element_size() + lse_bytes
        multiplied = problem.head_dim + problem.head_dim_v
        scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
        assert traffic.flops == 2 * scores * multiplied
        copied = 2 * keys * problem.num_kv_heads * multiplied
        if kernel is records.TORCH_MATH:
            assert traffic.partial_bytes == (copied * decode + 4 * scores) * 4
        else:  # a full mask takes no bytes; lengths are always a mask
            mask = 2 * problem.batch * problem.group * problem.seqlen_q * problem.seqlen_k
            assert traffic.partial_bytes == (copied * problem.element_bytes + mask) * decode
