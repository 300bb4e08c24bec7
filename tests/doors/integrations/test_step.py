"""Steps of engines: a schedule is made once for all layers whose plans have the same one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch

from splitkv.core.device import GPUS
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.integrations import serving
from splitkv.integrations.serving import Plans, Step
from splitkv.planner.registry import make_plan
from splitkv.runtime.schedule import Schedule
from splitkv.testing import Mask

DECODE = Problem("decode", 4, 32, 8, 128, 128, 1, 4096, mask=Mask(True), lengths="device")
WINDOW = Problem("decode", 4, 32, 8, 128, 128, 1, 4096, mask=Mask(True, 500), lengths="device")


def step_of(lengths: tuple[int, ...]) -> Step:
    keys = torch.tensor(lengths, dtype=torch.int32)
    table = torch.zeros(len(lengths), 256, dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    numbers = {"num_tokens": len(lengths), "max_seqlen_q": 1, "max_seqlen_k": 4096}
    return Step.of(starts, keys, table, num_decodes=len(lengths), decode_len=1, **numbers)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, torch.Tensor]]:
    """The plans and lengths that schedules were made for."""
    asked: list[tuple[Plan, torch.Tensor]] = []

    def make_schedule(plan: Plan, lengths: torch.Tensor) -> Schedule:
        asked.append((plan, lengths))
        return Schedule(plan, torch.empty(plan.config.programs, 8, dtype=torch.int32))

    monkeypatch.setattr(serving, "make_schedule", make_schedule)
    return asked


def balanced(problem: Problem) -> Plan:
    return make_plan(problem, GPUS["h200"], policy="scheduled")


def test_layers_share_a_schedule(made: list[Any]) -> None:
    step = step_of((5, 4096, 0, 300))
    layers = [balanced(problem) for problem in (DECODE, WINDOW, DECODE, WINDOW)]
    schedules = [step.schedule_of(plan) for plan in layers]
    assert schedules[0] is schedules[2] and schedules[1] is schedules[3]
    assert schedules[0] is not schedules[1]
    assert [plan.problem.mask for plan, _ in made] == [DECODE.mask, WINDOW.mask]
    assert all(lengths is step.cache_seqlens for _, lengths in made)
    assert step.with_pages(step.page_table.clone()).schedule_of(layers[0]) is schedules[0]
    assert step_of((1, 1, 1, 1)).schedule_of(layers[0]) is not schedules[0]


def test_a_graph_has_a_schedule_of_its_own(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines run a step before they capture it: the schedule of that run is made once, and a
    replay that reads it would follow lengths of another step."""
    step, plan = step_of((5, 4096, 0, 300)), balanced(DECODE)
    before = step.schedule_of(plan)
    monkeypatch.setattr(serving, "is_captured", lambda x: True)
    captured = step.schedule_of(plan)
    assert captured is not before and step.schedule_of(plan) is captured
    monkeypatch.setattr(serving, "is_captured", lambda x: False)
    assert step.schedule_of(plan) is before
    assert len(made) == 2


def test_plans_without_a_schedule(made: list[Any]) -> None:
    step = step_of((5, 4096, 0, 300))
    assert step.schedule_of(None) is None
    assert step.schedule_of(make_plan(DECODE, GPUS["h200"])) is None
    assert not made


def test_plans_are_for_the_calls_that_are_named() -> None:
    q = torch.randn(4, 1, 8, 64)
    cache = torch.randn(16, 16, 2, 64)
    arguments = {
        "cache_seqlens": torch.tensor([5, 60, 0, 30], dtype=torch.int32),
        "page_table": torch.arange(16, dtype=torch.int32).view(4, 4),
        "max_seqlen_k": 64,
    }
    plans = Plans("scheduled", ["decode"])
    plan = plans.of(("decode", 4), q, cache, cache, **arguments)
    assert plan is not None and plan.policy == "scheduled"
    assert plans.of(("decode", 4), q, cache, cache, **arguments) is plan
    assert plans.of(("rest", 4), q, cache, cache, **arguments) is None
    assert Plans().of(("decode", 4), q, cache, cache, **arguments) is None


def test_layers_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def plan(*tensors: Any, **arguments: Any) -> Plan:
        asked.append(arguments["window_size"])
        return make_plan(DECODE, GPUS["h200"])

    monkeypatch.setattr(serving, "plan", plan)
    monkeypatch.setattr(serving, "_planned", OrderedDict())
    kind = "decode", (4, 1), True, 64

    def of_a_layer(left: int, heads: int) -> Plan | None:
        q, cache = torch.zeros(4, 1, heads, 64), torch.zeros(16, 16, 2, 64)
        lengths = torch.zeros(4, dtype=torch.int32)
        options = {"cache_seqlens": lengths, "sink_logits": None, "window_size": (left, -1)}
        return Plans("scheduled", ["decode"]).of(kind, q, cache, cache, **options)

    assert of_a_layer(-1, 8) is of_a_layer(-1, 8)
    of_a_layer(127, 8)
    of_a_layer(127, 8)
    of_a_layer(127, 16)
    assert asked == [(-1, -1), (127, -1), (127, -1)]


def test_as_many_plans_are_kept_as_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts of every length, as `batch_invariant` has a plan of each; the first go first."""
    asked: list[int] = []

    def plan(tokens: int, *, policy: str) -> Plan:
        asked.append(tokens)
        return make_plan(DECODE, GPUS["h200"])

    monkeypatch.setattr(serving, "plan", plan)
    monkeypatch.setattr(serving, "_planned", OrderedDict())
    monkeypatch.setattr(serving, "MAX_PLANS", 3)
    layers = Plans("batch_invariant"), Plans("batch_invariant")
    for tokens in (1, 2, 3, 4, 5, 5, 4, 3):
        made = [plans.of(("rest", tokens), tokens) for plans in layers]
        assert made[0] is not None and made[0] is made[1]
        assert all(len(plans._made) <= 3 for plans in layers) and len(serving._planned) <= 3
    assert asked == [1, 2, 3, 4, 5]
    layers[0].of(("rest", 1), 1)
    assert asked[5:] == [1] and len(serving._planned) == 3


def test_steps_in_one_launch_are_remembered_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def plan(*_: Any, **__: Any) -> Plan:
        asked.append(1)
        return make_plan(DECODE, GPUS["h200"])

    monkeypatch.setattr(serving, "plan", plan)
    monkeypatch.setattr(serving, "_one_launch", OrderedDict())
    monkeypatch.setattr(serving, "MAX_PLANS", 3)
    lengths, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    every = serving.Rest(torch.zeros(3, dtype=torch.int32), lengths, table)
    q = torch.zeros(4, 1, 64)
    for keys in (1, 2, 3, 4, 5, 5, 4, 3):
        step = Step(0, 1, 4, 2, keys, True, lengths, table, every, every)
        assert not serving.is_one_launch(step, every, (q, q), {})
        assert len(serving._one_launch) <= 3
    assert len(asked) == 5


def test_the_default_plans_those_that_have_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that layers make it once a step; of the rest none, which decides by itself."""
    large = replace(DECODE, batch=64, seqlen_k=32768)
    made = {"large": make_plan(large, GPUS["h200"]), "small": make_plan(DECODE, GPUS["h200"])}
    asked: list[str] = []

    def plan(name: str, *, policy: str) -> Plan:
        asked.append(policy)
        return made[name]

    monkeypatch.setattr(serving, "plan", plan)
    monkeypatch.setattr(serving, "_planned", OrderedDict())
    plans = Plans("", ["decode", "rest"])
    for _ in range(2):
        assert plans.of(("decode", 64), "large") is made["large"]
        assert plans.of(("decode", 4), "small") is None
        assert plans.of(("rest", 4), "small") is None
    assert asked == ["tuned", "tuned"]
    assert serving.DEFAULT_PLANS.of(("decode", 64), "large") is None
