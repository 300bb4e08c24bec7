"""What the cost model says of a batch whose lengths are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import schedules
from hypothesis import given
from hypothesis import strategies as st

import splitkv
from splitkv.core.device import GPUS
from splitkv.core.plan import SCHEDULED, Config, Plan
from splitkv.planner import registry
from splitkv.planner.policies import decode_cost, mixes, persistent
from splitkv.testing import Mask, Problem

H200 = GPUS["h200"]
DECODE = Problem("decode", 64, 64, 8, 128, 128, 1, 16000, mask=Mask(causal=True), lengths="device")
ONE_LONG = [16000] + [400] * 63
TILES = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def plan_of(policy: Any) -> Plan:
    return registry.make_plan(DECODE, H200, policy=policy)


def seconds(plan: Plan, lengths: list[int]) -> float:
    kernel = registry.kernel_named(plan.kernel)
    return mixes.seconds_of_mix(plan.problem, plan.device, kernel, plan.config, lengths)


@given(
    tiles=TILES,
    head_tiles=st.integers(1, 3),
    programs=st.integers(1, 30),
    of_split=st.integers(0, 4),
)
def test_ranges_are_those_of_the_schedule(
    tiles: list[int], head_tiles: int, programs: int, of_split: int
) -> None:
    """The splits and tiles of each program, of those that have any."""
    config = Config(schedule="ranges", programs=programs, split_tiles=of_split)
    found = sorted(mixes.programs_of(tiles, head_tiles, config))
    own: dict[int, list[int]] = {}
    for split in schedules.ranges(tiles, head_tiles, programs, of_split):
        own.setdefault(split.program, []).append(split.count)
    assert found == sorted((len(counts), sum(counts)) for counts in own.values())


@given(tiles=TILES, more=st.integers(1, 30))
def test_proportional_splits_are_those_of_the_schedule(tiles: list[int], more: int) -> None:
    config = Config(schedule="proportional", programs=len(tiles) + more)
    expected = [split.count for split in schedules.proportional(tiles, len(tiles) + more)]
    found = list(mixes.programs_of(tiles, 1, config))
    assert sorted(found) == sorted((1, count) for count in expected)


@pytest.mark.parametrize("schedule", ["even", "batch", "fixed", *SCHEDULED])
def test_every_schedule_has_every_tile(schedule: Any) -> None:
    tiles = [250, 7, 1, 33]
    sizes = {"programs": 40, "split_size": 640, "num_splits": 5, "split_tiles": 3}
    config = Config(schedule=schedule, tile_n=64, **sizes)  # type: ignore[arg-type]
    found = list(mixes.programs_of(tiles, 8, config))
    assert sum(count for _, count in found) == 8 * sum(tiles)


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_one_long_sequence_holds_nobody_up(schedule: Any) -> None:
    """A schedule takes about what as many tiles in equal lengths do, and whole sequences more."""
    plan, equal = plan_of(persistent.with_schedule(schedule)), [sum(ONE_LONG) // 64] * 64
    assert seconds(plan, ONE_LONG) < 1.3 * seconds(plan, equal)
    whole = replace(plan, config=replace(plan.config, schedule="even", programs=0))
    assert seconds(whole, ONE_LONG) > 2 * seconds(plan, ONE_LONG)


def test_longer_is_never_sooner() -> None:
    for schedule in SCHEDULED:
        plan = plan_of(persistent.with_schedule(schedule))
        times = [seconds(plan, [n] * 64) for n in (0, 64, 1000, 4000, 16000)]
        assert times == sorted(times)


def test_lengths_that_are_not_of_the_problem() -> None:
    plan = plan_of("waves")
    for lengths in ([1], [16001] * 64, [-1] * 64):
        with pytest.raises(ValueError, match="^lengths: expected"):
            seconds(plan, lengths)


def test_explain_says_it() -> None:
    plan = plan_of(persistent.with_schedule())
    said = splitkv.explain(plan, lengths=ONE_LONG)
    assert "at these lengths" in str(said) and "by the model" in str(said)
    assert "ranges of a schedule" in str(said)
    assert said.as_dict()["mix_seconds"] == [seconds(plan, ONE_LONG)]
    assert "at these lengths" not in str(splitkv.explain(plan))
    both = splitkv.explain(DECODE, device=H200, policies=("waves", "fixed"), lengths=ONE_LONG)
    assert len(both.mix_seconds) == 2


def test_a_call_by_a_schedule_finds_shares_and_walks() -> None:
    """What that takes is in the time of a mix, and in the model's of equal lengths."""
    plan = plan_of(persistent.with_schedule("head_ranges", 2))
    kernel = registry.kernel_named(plan.kernel)
    c = decode_cost.constants_of(kernel)
    none = replace(c, walk=0.0, walk_split=0.0, merge_slots=0.0, share=0.0)
    told = [decode_cost.cost(DECODE, H200, plan.config, x).seconds for x in (c, none)]
    fixed = c.walk + c.merge_slots + c.share
    assert told[0] - told[1] == pytest.approx(fixed + 3 * c.walk_split)  # 64 sequences for 33
    assert seconds(plan, [0] * 64) > fixed
    many = replace(DECODE, batch=1 + decode_cost.SHARE_STEP)
    shape = decode_cost.batch_of(many, H200, replace(c, walk_split=0.0)).shape(plan.config)
    assert shape.finding_splits(plan.config) == pytest.approx(c.walk + 2 * c.share)
