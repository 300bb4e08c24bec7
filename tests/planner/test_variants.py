"""What one kernel alone can choose, and how gradients are made, is in the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiling import ADDRESS, Layout

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import (
    Backward,
    HopperBackward,
    HopperDecode,
    HopperPrefill,
    HopperPrefillQuantised,
    Plain,
    RowSplits,
)
from splitkv.kernels.hopper.prefill import kernel as hopper_prefill
from splitkv.planner.explanation import explain
from splitkv.planner.legality import expect_config
from splitkv.planner.registry import completed, kernel_named, make_plan
from splitkv.runtime.dispatch import fit_plan

H200 = GPUS["h200"]
DENSE = Problem("dense", 2, 16, 2, 128, 128, 2048, 2048, mask=Mask(True))
INT8 = replace(DENSE, codec=Codec("int8", "head"), products="half")
FEW = Problem("decode", 4, 32, 2, 128, 128, 3, 4096, mask=Mask(True), lengths="device")
OF_KERNEL = {
    "hopper_decode_split": replace(FEW, seqlen_q=1, place=Paged(16), codec=Codec("fp8", "token")),
    "hopper_prefill": DENSE,
    "hopper_prefill_half": INT8,
    "hopper_prefill_widened": replace(INT8, products="widened"),
    "hopper_prefill_quantised": replace(FEW, codec=Codec("int8", "token"), products="half"),
}


def plan_of(name: str) -> Plan:
    problem = OF_KERNEL[name]
    config = next(kernel_named(name).configs(problem, H200))
    return completed(Plan(problem, H200, "mine", name, config, "made by hand"))


@pytest.mark.parametrize("name", OF_KERNEL)
def test_every_variant_that_is_listed_is_legal_and_stored(name: str) -> None:
    problem, kernel = OF_KERNEL[name], kernel_named(name)
    seen = set()
    for config in kernel.configs(problem, H200):
        listed = kernel.variants(problem, H200, config)
        assert listed and len(set(listed)) == len(listed)
        chosen = completed(Plan(problem, H200, "mine", name, config, "")).config.variant
        assert chosen in listed
        for variant in listed:
            given = replace(config, variant=variant)
            assert expect_config(kernel, problem, H200, given) == given
            plan = Plan(problem, H200, "mine", name, given, "")
            assert Plan.from_dict(json.loads(plan.handle)) == plan == completed(plan)
        seen |= set(listed)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        (
            "hopper_prefill",
            HopperDecode(),
            "variant: expected HopperPrefill",
        ),
        (
            "hopper_prefill",
            HopperPrefill("any"),
            "variant.mma_order: expected",
        ),
        (
            "hopper_prefill",
            HopperPrefill("in_turns", q_stages=3),
            "variant.q_stages: expected 1 or 2, got 3",
        ),
        (
            "hopper_prefill_half",
            HopperPrefill("in_turns", out="place_of_q"),
            "variant.out",
        ),
        (
            "hopper_prefill_quantised",
            HopperPrefillQuantised("in_turns", "by_grid", 0),
            "variant.issued_first: expected 1, got 0",
        ),
    ],
)
def test_a_variant_that_a_kernel_lacks_is_refused(name: str, variant: Any, message: str) -> None:
    plan = plan_of(name)
    config = replace(plan.config, variant=variant)
    with pytest.raises(ValueError, match=message):
        expect_config(kernel_named(name), plan.problem, H200, config)


def test_launchers_read_the_variant_of_the_plan() -> None:
    plan = plan_of("hopper_prefill")
    assert plan.config.variant == HopperPrefill("in_turns", "lazy", 2, "own_tiles")
    tensors = operands_of(DENSE)
    for variant in kernel_named("hopper_prefill").variants(DENSE, H200, plan.config):
        other = replace(plan, config=replace(plan.config, variant=variant))
        compiled = hopper_prefill.bind(other, tensors).bound.fixed["CONFIG"]
        assert isinstance(variant, HopperPrefill)
        assert (compiled.maxima, compiled.q_stages) == (variant.maxima, variant.q_stages)
        assert (compiled.out_stages > 0) == (variant.out == "own_tiles")


def operands_of(problem: Problem, address: int = ADDRESS) -> Operands:
    p, dtype = problem, getattr(torch, problem.dtype)
    shapes = (p.seqlen_q, p.num_heads), (p.seqlen_k, p.num_kv_heads), (p.seqlen_k, p.num_kv_heads)
    q, k, v = (
        Layout(torch.Size([p.batch, tokens, heads, p.head_dim]), dtype, address=address)
        for tokens, heads in shapes
    )
    out = Layout(torch.Size([p.batch, p.seqlen_q, p.num_heads, p.head_dim_v]), dtype)
    return Operands(q=q, k=k, v=v, out=out, softmax_scale=1.0)


@pytest.mark.parametrize("name", ["hopper_prefill", "hopper_prefill_half"])
def test_tensors_that_tma_cannot_read_give_a_plan_for_any_gpu(name: str) -> None:
    plan, kernel = plan_of(name), kernel_named(name)
    assert kernel.refit(plan, operands_of(plan.problem)) == plan
    other = kernel.refit(plan, operands_of(plan.problem, ADDRESS + 2))
    assert (other.kernel, other.config.variant) == ("prefill", Plain())
    assert "multiples of 16 bytes" in other.why
    expect_config(kernel_named("prefill"), plan.problem, H200, other.config)


TRAINED = replace(DENSE, needs_grad=True)


def test_a_plan_says_what_makes_the_gradients() -> None:
    assert make_plan(DENSE, H200).backward is None
    on_hopper, anywhere = (make_plan(TRAINED, GPUS[gpu]) for gpu in ("h200", "a100"))
    assert isinstance(on_hopper.backward, HopperBackward)
    assert isinstance(anywhere.backward, Backward)
    capped = replace(TRAINED, score=replace(TRAINED.score, softcap=True))
    assert isinstance(make_plan(capped, H200).backward, Backward)
    assert "dq added in any order" in str(explain(on_hopper))
    turns = make_plan(replace(TRAINED, mask=Mask(), deterministic=True), H200).backward
    assert isinstance(turns, HopperBackward) and turns.dq == "added_in_turns"
    assert "dk, dv" in str(explain(anywhere))
    for plan in (on_hopper, anywhere):
        read = Plan.from_dict(json.loads(plan.handle))
        assert read == plan and read.backward == plan.backward


def test_gradients_that_a_kernel_lacks_are_refused() -> None:
    plan = make_plan(TRAINED, H200)
    made = plan.backward
    assert isinstance(made, HopperBackward) and fit_plan(plan, TRAINED, H200) == plan
    for wrong in (replace(made, tile_m=32), replace(made, consumers="one_gradient")):
        with pytest.raises(ValueError, match="plan.backward: expected tiles that"):
            fit_plan(replace(plan, backward=wrong), TRAINED, H200)
    more = replace(made, row_splits=RowSplits(-1, 2))
    with pytest.raises(ValueError, match="plan.backward.row_splits.tiles: expected at least 0"):
        fit_plan(replace(plan, backward=more), TRAINED, H200)
    with pytest.raises(ValueError, match="plan.backward: expected None"):
        fit_plan(replace(make_plan(DENSE, H200), backward=made), DENSE, H200)


def test_gradients_of_tensors_that_tma_cannot_read() -> None:
    plan = make_plan(TRAINED, H200)
    refit = kernel_named("prefill").refit
    assert refit(plan, operands_of(TRAINED)) == plan
    other = refit(plan, operands_of(TRAINED, ADDRESS + 2))
    assert isinstance(other.backward, Backward)
    assert "gradients: q: expected strides and an address" in other.why


def test_stored_plans_of_before() -> None:
    """Without a variant today's is chosen; what lacks a field is refused."""
    plan = make_plan(TRAINED, H200)
    data = plan.as_dict()
    data["config"]["variant"], data["backward"] = {"kind": "plain"}, None
    assert fit_plan(Plan.from_dict(data), TRAINED, H200) == plan
    del data["backward"]
    with pytest.raises(ValueError, match="plan.backward: expected a value, got 'none'"):
        Plan.from_dict(data)
    data["backward"] = {"kind": "another"}
    with pytest.raises(ValueError, match=r"plan.backward.kind: expected .*, got 'another'"):
        Plan.from_dict(data)
