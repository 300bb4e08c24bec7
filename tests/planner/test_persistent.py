"""Plans whose programs follow a schedule: the policy that makes them, and which are legal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitkv.core.device import GPUS
from splitkv.core.errors import UnsupportedProblem
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.plan import SCHEDULED, Plan
from splitkv.core.variants import HopperDecode
from splitkv.planner import registry
from splitkv.planner.legality import expect_config
from splitkv.planner.policies import persistent
from splitkv.testing import Mask, Problem

DECODE = Problem("decode", 3, 64, 8, 128, 128, 1, 8192, mask=Mask(causal=True), lengths="device")


def plan_of(problem: Problem = DECODE, gpu: str = "h200", **how: Any) -> Plan:
    return registry.make_plan(problem, GPUS[gpu], policy=persistent.with_schedule(**how))


def expect_legal(plan: Plan, **changes: Any) -> None:
    kernel = registry.kernel_named(plan.kernel)
    expect_config(kernel, plan.problem, plan.device, replace(plan.config, **changes))


@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("gpu", ["h200", "a100", "b200", "l4"])
@pytest.mark.parametrize("programs_per_sm", [1, 2])
def test_plans_are_legal(schedule: Any, gpu: str, programs_per_sm: int) -> None:
    for problem in (
        DECODE,
        replace(DECODE, place=Paged(16), codec=Codec("int8", "token")),
        replace(DECODE, place=Paged(1), num_heads=8, seqlen_q=16),
        replace(DECODE, num_heads=512, dtype="float16"),
    ):
        plan = plan_of(problem, gpu, schedule=schedule, programs_per_sm=programs_per_sm)
        expect_legal(plan)
        assert plan.config.schedule == schedule and plan.config.programs > 0
        assert Plan.from_dict(plan.as_dict()) == plan


def test_programs_fill_the_gpu() -> None:
    assert plan_of().config.programs == 132
    assert plan_of(programs_per_sm=2).config.programs == 264
    assert plan_of(schedule="head_ranges", programs_per_sm=2).config.programs == 33
    assert plan_of(schedule="proportional").config.programs == 3 + 2 * 16


def test_tiles_in_flight_are_those_of_all_programs_of_an_sm() -> None:
    assert [plan_of(programs_per_sm=n).config.num_stages for n in (1, 2)] == [3, 2]
    assert plan_of(tile_n=128, num_stages=2).config.num_stages == 2


def test_packed_rows_that_the_kernel_for_hopper_has_no_narrow_tile_for() -> None:
    assert plan_of().kernel == "hopper_decode_split"
    assert plan_of(replace(DECODE, num_heads=256)).kernel == "hopper_decode_split"
    assert plan_of(replace(DECODE, num_heads=512)).kernel == "decode_split"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"batch": 1}, "one sequence: expected several"),
        ({"lengths": "host"}, "lengths host: expected device"),
        ({"seqlen_new": 2}, "2 new keys: expected none"),
        ({"num_heads": 512}, "packed rows 64: expected at most 32"),
    ],
    ids=str,
)
def test_balanced_problems_that_have_no_schedule(changed: dict[str, Any], reason: str) -> None:
    problem = replace(DECODE, **changed)
    plan = registry.make_plan(problem, GPUS["h200"], policy="balanced")
    assert plan.config == registry.make_plan(problem, GPUS["h200"]).config
    assert plan.why.startswith(f"balanced: {reason}")


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(("num_kv_heads", "programs_per_sm"), [(1, 1), (8, 2)])
def test_balanced(gpu: str, num_kv_heads: int, programs_per_sm: int) -> None:
    problem = replace(DECODE, num_kv_heads=num_kv_heads, num_heads=8 * num_kv_heads)
    plan = registry.make_plan(problem, GPUS[gpu], policy="balanced")
    how = {"schedule": "head_ranges", "programs_per_sm": programs_per_sm}
    assert plan.config == plan_of(problem, gpu, **how).config
    assert plan.policy == "balanced"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lengths": "host"}, "lengths host: expected device"),
        ({"early_kv": True}, "early_kv: expected False"),
        ({"seqlen_new": 2}, "2 new keys: expected none"),
    ],
    ids=str,
)
def test_problems_that_have_no_schedule(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedProblem, match=reason):
        plan_of(replace(DECODE, **changed))


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_every_key_arrives_by_a_producer_warp(place: Any) -> None:
    plan = plan_of(replace(DECODE, place=place, codec=Codec("fp8", "token")))
    assert plan.config.variant == HopperDecode("producer_warp", "per_tile")


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"programs": 0}, "plan.config.programs"),
        ({"schedule": "proportional", "programs": 3}, "plan.config.programs"),
        ({"programs": 1 << 17}, "plan.config.programs"),
        ({"split_size": 64}, "plan.config.split_size"),
        ({"appends": True}, "plan.config.appends"),
        ({"merge": "cluster", "num_splits": 2}, "plan.config.schedule"),
        ({"tile_m": 64}, "plan.config"),
        ({"variant": HopperDecode("tma")}, "plan.config.variant.load"),
    ],
    ids=str,
)
def test_configs_that_are_not_legal(changed: dict[str, Any], argument: str) -> None:
    plan = plan_of(replace(DECODE, num_heads=256))  # 32 rows: tiles of 32 and of 64
    expect_legal(plan)
    with pytest.raises(ValueError, match=rf"^{argument}: expected"):
        expect_legal(plan, **changed)


def test_more_tiles_than_32_bits_count() -> None:
    problem = replace(DECODE, batch=1 << 14, seqlen_k=1 << 22)
    with pytest.raises(ValueError, match=r"^plan\.config\.schedule: expected fewer than"):
        expect_legal(plan_of(problem))


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_partials_that_are_counted(schedule: Any) -> None:
    """Two of every program, written and read: rows of head_dim_v sums, a maximum and a sum."""
    plan = plan_of(schedule=schedule)
    kernel = registry.kernel_named(plan.kernel)
    programs = plan.config.programs * (1 if schedule == "ranges" else DECODE.num_kv_heads)
    counted = kernel.traffic(DECODE, plan.config)
    assert counted.partial_bytes == 2 * 2 * programs * 8 * (128 + 2) * 4
    whole = kernel.traffic(DECODE, plan.config.shape)
    assert counted.kv_bytes == whole.kv_bytes and counted.flops == whole.flops


def test_a_kernel_without_schedules_is_not_asked() -> None:
    kernel = registry.kernel_named("hopper_prefill")
    assert persistent.why_not(kernel, DECODE, GPUS["h200"]) == [
        "schedule: expected a kernel that has one of a step"
    ]


@pytest.mark.parametrize(
    ("how", "argument"),
    [
        ({"schedule": "even"}, "schedule"),
        ({"programs_per_sm": 0}, "programs_per_sm"),
        ({"num_stages": -1}, "num_stages"),
    ],
)
def test_what_the_policy_is_asked_for(how: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        persistent.with_schedule(**how)
