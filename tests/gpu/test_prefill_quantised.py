"""attention and attention_varlen of 8-bit keys on Hopper's 8-bit units against the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, HERE, only, same_bits
from torch import Tensor
from training import FUNCTION, QUANTISED_AXES, has_units, problem_of

import splitkv
from splitkv.kernels.hopper.prefill_quantised import KERNEL
from splitkv.kv import Codec
from splitkv.testing import (
    Call,
    Mask,
    Problem,
    Ragged,
    assert_close,
    assert_lse_close,
    bind,
    check,
    expected,
    make_operands,
)

INT8 = Problem("dense", 2, 16, 2, 128, 128, 513, 700, mask=Mask(True), codec=Codec("int8", "head"))
INT8 = replace(INT8, products="half", return_lse=True)
PAIRS = cases.pairs(QUANTISED_AXES, has_units)


def plan_of(problem: Problem) -> splitkv.Plan:
    """This kernel's, however few the rows; on other GPUs whatever serves."""
    if KERNEL.unsupported(problem, HERE):
        return splitkv.plan(problem)
    return splitkv.plan(problem, policy=only(KERNEL.name))


def run(
    problem: Problem, call: Call, plan: splitkv.Plan | None = None
) -> tuple[Tensor, Tensor | None]:
    result = FUNCTION[problem.kind](**call, plan=plan or plan_of(problem))
    return result if problem.return_lse else (result, None)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs(number: int) -> None:
    problem = problem_of(PAIRS[number])
    zero_length = problem.kind == "varlen" and problem.batch > 1 and number % 2 == 0
    check(problem, device=DEVICE, run=run, zero_length=zero_length)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("products", ["half", "full"])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_every_config(codec: Any, products: Any, head_dim: int) -> None:
    dims = {"head_dim": head_dim, "head_dim_v": head_dim}
    problem = replace(INT8, codec=Codec(codec, "token"), products=products, **dims)
    problem = replace(problem, return_lse=False)
    if KERNEL.unsupported(problem, HERE):
        return
    plan = plan_of(problem)
    for config in KERNEL.configs(problem, plan.device):
        check(problem, device=DEVICE, run=partial(run, plan=replace(plan, config=config)))


@pytest.mark.parametrize("products", ["half", "full"])
@pytest.mark.parametrize("granularity", ["head", "token"])
def test_outliers(granularity: Any, products: Any) -> None:
    """Keys and values of which a few channels, and a few tokens, are a hundred times the others."""
    problem = replace(INT8, codec=Codec("int8", granularity), products=products)
    plain = replace(problem, codec=Codec(), products="widened", return_lse=False)
    call = make_operands(plain, device=DEVICE)
    for x in (call["k"], call["v"]):
        x[..., 5] *= 30
        x[:, 77] *= 100
    stored = splitkv.quantize_kv(call["k"], call["v"], "int8", granularity)
    call |= stored._asdict() | {"products": products, "return_lse": True}
    del call["k_mean"]
    out, _ = run(problem, call)
    working = expected(problem, call, upcast=False)[0]
    assert_close(out, expected(problem, call)[0], working)


@pytest.mark.parametrize("products", ["half", "full"])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_lse_of_queries_that_8_bits_hold(granularity: Any, products: Any) -> None:
    """Rounding them changes nothing, so the lse is that of the keys as they are stored."""
    problem = replace(INT8, codec=Codec("int8", granularity), products=products)
    call = make_operands(problem, device=DEVICE)
    q = (24 * call["q"]).round().clamp(-127, 127)
    q[..., 3] = 127
    call["q"] = q * 2.0**-5
    out, lse = run(problem, call)
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert lse is not None and ref_lse is not None
    assert_lse_close(lse, ref_lse)


def test_addresses_that_tma_cannot_take() -> None:
    """The same layout and launcher, one call 8 bytes further: another kernel, and a warning."""
    if KERNEL.unsupported(INT8, HERE):
        return
    call = make_operands(INT8, device=DEVICE)
    launcher = KERNEL.bind(plan_of(INT8), bind(INT8, call))
    launcher(bind(INT8, call))
    odd = torch.empty(call["k"].numel() + 8, dtype=torch.int8, device=DEVICE)[8:]
    moved = call | {"k": odd.view(call["k"].shape).copy_(call["k"])}
    with pytest.warns(UserWarning, match="this call runs on prefill: k: expected strides"):
        out, _ = launcher(bind(INT8, moved))
    assert_close(out, expected(INT8, call)[0], expected(INT8, call, upcast=False)[0])


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_the_same_bits_every_time(kind: Any) -> None:
    problem = replace(INT8, kind=kind, sink_logits=True)
    if kind == "varlen":
        problem = replace(problem, place=Ragged(), lengths="device")
    call = make_operands(problem, device=DEVICE)
    first = run(problem, call)
    assert all(same_bits(run(problem, call), first) for _ in range(100))
