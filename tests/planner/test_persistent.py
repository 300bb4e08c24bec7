"""Plans whose programs follow a schedule: the policy that makes them, and which are legal."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import schedules

import splitkv
from splitkv.core.device import GPUS
from splitkv.core.errors import UnsupportedProblem
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged
from splitkv.core.plan import SCHEDULED, Config, Kernel, Plan
from splitkv.core.tiles import SPLIT_TILES
from splitkv.core.variants import HopperDecode
from splitkv.planner import registry
from splitkv.planner.legality import expect_config
from splitkv.planner.policies import (
    appending,
    balanced,
    decode_cost,
    mixes,
    persistent,
    waves,
)
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
        ({"num_heads": 512}, "packed rows 64: expected at most 32"),
    ],
    ids=str,
)
def test_balanced_problems_that_have_no_schedule(changed: dict[str, Any], reason: str) -> None:
    problem = replace(DECODE, **changed)
    plan = registry.make_plan(problem, GPUS["h200"], policy="balanced")
    assert plan.config == registry.make_plan(problem, GPUS["h200"]).config
    assert plan.why.startswith(f"balanced: {reason}")


# Batches that take long enough to read that a schedule is the default, and as they are served.
LARGE = replace(DECODE, batch=64, seqlen_k=32768)
BOUNDS = range(1 << 11, 1 << 15, 1 << 7)  # of lengths: with each a schedule costs less beside them


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"place": Paged(16)},
        {"place": Paged(256), "codec": Codec("fp8", "head")},
        {"codec": Codec("fp8", "tensor")},
        {"place": Paged(16), "codec": Codec("fp8", "head")},
        {"codec": Codec("fp8", "token")},
        {"place": Paged(16), "codec": Codec("int8", "token")},
        {"codec": Codec("int8", "head")},
        {"head_dim": 256, "head_dim_v": 256},
        {"mask": Mask(True, 16383, -1, 4), "batch": 256},
        {"num_heads": 128, "return_lse": True, "sink_logits": True},
        {"num_heads": 16, "num_kv_heads": 1, "batch": 256},
        {"batch": 2, "seqlen_k": 1 << 19},
        {"seqlen_new": 1, "rotary": True},
        {"seqlen_new": 3, "place": Paged(16), "codec": Codec("int8", "token")},
    ],
    ids=str,
)
@pytest.mark.parametrize("gpu", ["h200", "h100", "h20"])
@pytest.mark.parametrize("policy", ["tuned", "waves"])
def test_the_default_where_a_schedule_costs_little(
    changed: dict[str, Any], gpu: str, policy: str
) -> None:
    problem = replace(LARGE, **changed)
    plan = registry.make_plan(problem, GPUS[gpu], policy=policy)
    balanced = registry.make_plan(problem, GPUS[gpu], policy="balanced")
    assert plan.config == balanced.config and plan.config.schedule == "head_ranges"
    assert plan.config.appends == (problem.appends and problem.codec.granularity != "token")
    assert plan.why.startswith(f"{policy}: a schedule of the step, as lengths may differ: at equal")
    assert "a schedule of the step, as lengths may differ" in str(splitkv.explain(plan))
    expect_legal(plan)
    assert Plan.from_dict(plan.as_dict()) == plan


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"batch": 4, "seqlen_k": 4096},
            "at equal lengths 4.3 us longer than 20 us without: expected at most 2%",
        ),
        ({"batch": 8192, "seqlen_k": 128}, "at equal lengths"),  # as many splits
        ({"mask": Mask(True, 1023)}, "at equal lengths"),
        ({"early_kv": True}, "early_kv: expected False"),
        ({"num_heads": 256}, "packed rows 32: timed up to 16"),
        ({"num_heads": 512}, "packed rows 64: expected at most 32"),
        ({"place": Paged(7)}, "kernel decode_split: schedules were timed of hopper_decode_split"),
        ({"batch": 1 << 14, "seqlen_k": 1 << 22}, "8590065664 tiles: expected fewer"),
    ],
    ids=str,
)
def test_the_default_says_why_it_has_no_schedule(changed: dict[str, Any], reason: str) -> None:
    plan = registry.make_plan(replace(LARGE, **changed), GPUS["h200"])
    assert plan.config.schedule not in SCHEDULED
    assert f"; no schedule of the step: {reason}" in plan.why
    assert reason in str(splitkv.explain(plan))
    expect_legal(plan)


def test_new_tokens_that_a_schedule_has_a_launch_more_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs of one write none, of what would write them itself."""
    monkeypatch.setattr(appending, "decide", decide_apart)
    constants, of_equal = decode_cost.H200_HOPPER, waves.for_equal_lengths()
    kernel = registry.kernel_named("hopper_decode_split")

    def without(problem: Problem) -> float:
        config = of_equal(problem, GPUS["h200"], [kernel]).config
        return decode_cost.cost(problem, GPUS["h200"], config, constants).seconds

    def by_schedule(problem: Problem) -> bool:
        plan = registry.make_plan(problem, GPUS["h200"])
        return plan.config.schedule in SCHEDULED

    few, many, scales = {"seqlen_new": 1}, {"seqlen_new": 9}, Codec("fp8", "token")
    for changed, launches in ((few, 1), (many, 0), (few | {"codec": scales}, 0)):
        last: dict[bool, int] = {}  # the greatest bound without a schedule
        for new in (False, True):
            given = changed if new else {n: x for n, x in changed.items() if n == "codec"}
            problem = replace(LARGE, **given)
            last[new] = max(n for n in BOUNDS if not by_schedule(replace(problem, seqlen_k=n)))
        took = {new: without(replace(problem, seqlen_k=n)) for new, n in last.items()}
        longer = persistent.MOST_LONGER * (took[True] - took[False])
        assert longer == pytest.approx(launches * constants.append, rel=0.15), changed


def decide_apart(problem: Problem, kernel: Kernel, config: Config) -> tuple[Config, str]:
    config, why = DECIDE(problem, kernel, config)
    return replace(config, appends=config.appends and config.schedule not in SCHEDULED), why


DECIDE = appending.decide


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rotary": True}, "it writes the new tokens itself"),
        ({"place": Paged(16), "seqlen_new": 4}, "it writes the new tokens itself"),
        (
            {"seqlen_new": 5},
            "append runs before it: new keys 5: more than 4 take a launch less time",
        ),
        (
            {"codec": Codec("fp8", "head"), "head_dim": 256, "head_dim_v": 256},
            "append runs before it: head_dim 256: expected at most 128 in 8 bits by a schedule",
        ),
        (
            {"codec": Codec("int8", "token")},
            "append runs before it: scales of the cache: expected none a token",
        ),
    ],
    ids=str,
)
def test_balanced_new_tokens(gpu: str, changed: dict[str, Any], said: str) -> None:
    """The schedule that there is without them, with a few in the same launch."""
    problem = replace(DECODE, **{"seqlen_new": 2, **changed})
    plan = registry.make_plan(problem, GPUS[gpu], policy="balanced")
    alone = replace(problem, seqlen_new=0, rotary=False)
    without = registry.make_plan(alone, GPUS[gpu], policy="balanced").config
    assert replace(plan.config, appends=False) == without
    assert plan.config.schedule == "head_ranges"
    assert f"; {said}" in plan.why
    told = {True: "written by the kernel", False: "append runs before"}[plan.config.appends]
    assert f"new tokens         {told}" in str(splitkv.explain(plan))
    expect_legal(plan)


@pytest.mark.parametrize("changed", [{"lengths": "host"}, {"batch": 1}], ids=str)
def test_lengths_that_cannot_differ(changed: dict[str, Any]) -> None:
    plan = registry.make_plan(replace(LARGE, **changed), GPUS["h200"])
    assert plan.config.schedule == "even" and "schedule of the step" not in plan.why


def test_what_the_caller_decides_has_no_schedule() -> None:
    for how in ({"num_splits": 4}, {"policy": "batch_invariant"}, {"policy": "flash_attention_3"}):
        plan = registry.make_plan(LARGE, GPUS["h200"], **how)  # type: ignore[arg-type]
        assert plan.config.schedule not in SCHEDULED


@pytest.mark.parametrize("gpu", ["h200", "h100", "h20"])
def test_from_some_length_on_there_is_a_schedule(gpu: str) -> None:
    """Once, and never again without: what a growing bound is decided for changes as seldom as
    `rounded_up`. The time to read decides, not the number of keys."""
    lengths = sorted(n for n in registry.decided_lengths(1 << 17) if n >= 512)
    plans = [registry.make_plan(replace(LARGE, seqlen_k=n), GPUS[gpu]) for n in lengths]
    has = [plan.config.schedule in SCHEDULED for plan in plans]
    assert has == sorted(has) and 0 < sum(has) < len(has)
    first = plans[has.index(True)].problem
    seconds = first.kv_bytes / GPUS[gpu].bandwidth
    assert 100e-6 < seconds < 500e-6


@pytest.mark.parametrize("batch", [16, 32, 48, 64])
def test_whole_sequences_where_a_schedule_that_cuts_them_costs_too_much(batch: int) -> None:
    """One program an SM, and of equal lengths nothing is merged."""
    problem = replace(LARGE, batch=batch, seqlen_k=64 * 3072 // batch)
    plan = registry.make_plan(problem, GPUS["h200"])
    assert plan.config.schedule == "head_ranges" and plan.config.programs == 16
    tiles = [48] * batch
    splits = schedules.ranges(tiles, 1, plan.config.programs, SPLIT_TILES)
    assert all(split.count == 48 for split in splits)
    expect_legal(plan)
    best = registry.make_plan(problem, GPUS["h200"], policy="balanced").config
    assert best.programs == 33


@pytest.mark.parametrize(
    "changed",
    [{"batch": 20}, {"batch": 14}, {"head_dim": 64}, {"codec": Codec("fp8", "head")}],
    ids=str,
)
def test_where_whole_sequences_would_leave_sms_idle_or_were_not_timed(
    changed: dict[str, Any],
) -> None:
    problem = replace(LARGE, **changed)
    kernel = registry.kernel_named("hopper_decode_split")
    assert persistent.of_whole_sequences(problem, GPUS["h200"], kernel) == []


@pytest.mark.parametrize(
    ("changed", "by_schedule"),
    [
        ({}, True),
        ({"place": Contiguous()}, False),
        ({"place": Contiguous(), "seqlen_k": 4096}, True),
        ({"place": Paged(128)}, False),
        ({"codec": AS_IS}, True),
        ({"codec": AS_IS, "seqlen_k": 256}, False),
        ({"num_heads": 32}, False),
        ({"num_heads": 8}, False),
        ({"head_dim": 128, "head_dim_v": 128}, False),
        ({"num_heads": 8, "num_kv_heads": 1, "seqlen_k": 8192}, False),
        ({"batch": 16, "seqlen_k": 8192}, False),
    ],
    ids=str,
)
def test_splits_of_small_heads_drift_apart(changed: dict[str, Any], by_schedule: bool) -> None:
    """Several KV heads of 64 in more than one wave of splits: measurements/mixes.md has some."""
    sizes = {"batch": 128, "seqlen_k": 1472, "head_dim": 64, "head_dim_v": 64}
    small = replace(LARGE, place=Paged(16), codec=Codec("fp8", "head"), **sizes)
    plan = registry.make_plan(replace(small, **changed), GPUS["h200"])
    assert (plan.config.schedule in SCHEDULED) == by_schedule
    less = "us less than" in plan.why
    assert not less or by_schedule


def test_the_model_agrees_that_it_costs_little() -> None:
    """By the model of waves, which knows nothing of the rule but its constants."""
    kernel = registry.kernel_named("hopper_decode_split")
    constants = decode_cost.H200_HOPPER
    for changed in ({}, {"num_heads": 16, "num_kv_heads": 16}, {"batch": 2048, "seqlen_k": 1024}):
        problem = replace(LARGE, **changed)
        own = waves.for_equal_lengths()(problem, GPUS["h200"], [kernel]).config
        best = persistent.best_known(problem, GPUS["h200"], kernel).config
        told = [decode_cost.cost(problem, GPUS["h200"], c, constants) for c in (own, best)]
        assert told[1].seconds < 1.02 * told[0].seconds
        assert told[1].merge_seconds == constants.merge_slots


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize(("num_kv_heads", "programs_per_sm"), [(1, 1), (8, 2)])
def test_balanced(gpu: str, num_kv_heads: int, programs_per_sm: int) -> None:
    problem = replace(LARGE, num_kv_heads=num_kv_heads, num_heads=8 * num_kv_heads)
    plan = registry.make_plan(problem, GPUS[gpu], policy="balanced")
    how = {"schedule": "head_ranges", "programs_per_sm": programs_per_sm}
    assert plan.config == plan_of(problem, gpu, **how).config
    assert plan.policy == "balanced"


SMALL = replace(DECODE, batch=8, num_heads=16, num_kv_heads=2)


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
def test_balanced_keeps_even_splits_that_no_mix_delays_by_what_a_schedule_costs(
    place: Any,
) -> None:
    """So it is with few keys, and no longer with many."""
    kernel, gpu = registry.kernel_named("hopper_decode_split"), GPUS["h200"]
    seen = []
    for seqlen_k in (1 << n for n in range(8, 18)):
        problem = replace(SMALL, seqlen_k=seqlen_k, place=place)
        plan = registry.make_plan(problem, gpu, policy="balanced")
        even = registry.make_plan(problem, gpu).config
        best = persistent.best_known(problem, gpu, kernel).config
        late, costs = balanced.late_and_costs(even, best, problem, gpu, kernel)
        wanted = even if late < costs and even.schedule == "even" else best
        assert replace(plan.config, variant=wanted.variant) == wanted
        assert (even.schedule == "even") >= ("delay even splits by at most" in plan.why)
        seen.append(plan.config.schedule)
    assert seen == sorted(seen) and {*seen} == {"even", "head_ranges"}


def test_the_model_bounds_what_a_mix_delays() -> None:
    """Even splits of a mix take no longer, by the cost model, than its bytes and the longest."""
    kernel, gpu = registry.kernel_named("hopper_decode_split"), GPUS["h200"]
    draw = random.Random(5)
    for _ in range(40):
        batch, seqlen_k = draw.randint(2, 64), draw.randint(64, 4096)
        problem = replace(SMALL, batch=batch, seqlen_k=seqlen_k)
        config = registry.make_plan(problem, gpu).config
        lengths = [*(draw.randint(1, seqlen_k) for _ in range(batch - 1)), seqlen_k]
        equal = [sum(lengths) // batch] * batch
        mix, same = (
            mixes.seconds_of_mix(problem, gpu, kernel, config, x) for x in (lengths, equal)
        )
        best = persistent.best_known(problem, gpu, kernel).config
        late, _ = balanced.late_and_costs(config, best, problem, gpu, kernel)
        assert config.schedule == "even" and mix <= same + late + 1e-6


@pytest.mark.parametrize("gpu", ["h200", "a100", "rtx4090"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("codec", [Codec(), Codec("fp8", "tensor")], ids=str)
def test_all_programs_of_a_schedule_run_at_a_time(gpu: str, head_dim: int, codec: Codec) -> None:
    """Those behind would begin when the first have ended, with as much to do."""
    dims = {"num_heads": 32, "num_kv_heads": 8, "head_dim": head_dim, "head_dim_v": head_dim}
    problem = replace(LARGE, codec=codec, **dims)
    plan = registry.make_plan(problem, GPUS[gpu], policy="balanced")
    assert plan.config.schedule == "head_ranges"
    kernel = registry.kernel_named(plan.kernel)
    assert persistent.all_at_once(plan.config, problem, GPUS[gpu], kernel)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lengths": "host"}, "lengths host: expected device"),
        ({"early_kv": True}, "early_kv: expected False"),
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
