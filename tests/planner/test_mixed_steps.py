"""Which steps of an engine have a schedule of items."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import splitkv
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.kernels import records
from splitkv.planner.legality import expect_config
from splitkv.planner.policies import mixed_steps
from splitkv.planner.registry import kernel_named

H200 = GPUS["h200"]
STEP = Problem(
    *("varlen", 64, 32, 8, 128, 128, 2048, 16384),
    mask=Mask(True),
    place=Paged(16),
    lengths="device",
)


def plan(problem: Problem) -> Plan:
    return splitkv.plan(problem, device=H200)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 2},
        {"seqlen_q": 300},
        {"num_heads": 28, "num_kv_heads": 4, "dtype": "float16"},
        {"head_dim": 64, "head_dim_v": 64, "place": Paged(64)},
        {"head_dim": 64, "head_dim_v": 64, "score": Score(True, False)},
        {"head_dim": 192, "num_kv_heads": 32},
        {"mask": Mask(True, 1000, -1, 4), "sink_logits": True, "return_lse": True},
    ],
    ids=str,
)
def test_steps(changes: dict[str, Any]) -> None:
    problem = replace(STEP, **changes)
    made = plan(problem)
    assert made.kernel == "hopper_prefill" and made.config.schedule == "items"
    assert made.config.programs == 0 and made.config.merge == "combine"
    expect_config(records.HOPPER_PREFILL, problem, H200, made.config)
    shown = str(splitkv.explain(problem, device=H200))
    assert "row tiles of prompts and pieces of the keys of few queries take turns" in shown
    assert f"pieces of {mixed_steps.LEAST_KEYS} keys or more, by a schedule of items" in shown


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch": 1}, "one sequence: expected several"),
        ({"place": Ragged()}, "keys ragged: expected pages of packed sequences"),
        ({"batch": 2, "seqlen_q": 512, "seqlen_k": 512}, "us that equal prompts take: expected"),
        ({"codec": Codec("fp8", "head")}, "expected one that has them"),
    ],
    ids=str,
)
def test_others(changes: dict[str, Any], reason: str) -> None:
    problem = replace(STEP, **changes)
    made = plan(problem)
    assert made.config.schedule == "even"
    found = mixed_steps.why_not(problem, kernel_named(made.kernel), 30e-6)
    assert any(reason in said for said in found)


def test_short_steps_are_cut_evenly() -> None:
    """Sequences of few queries alone are no step with prompts."""
    assert plan(replace(STEP, seqlen_q=16)).config.schedule == "even"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"programs": 132}, "plan.config.programs: expected 0, got 132"),
        ({"merge": "last"}, "plan.config.merge: expected 'combine', got 'last'"),
        ({"split_size": 100}, "plan.config.split_size"),
        ({"split_size": 0}, "plan.config.split_size"),
    ],
    ids=str,
)
def test_what_no_schedule_is_for(changes: dict[str, Any], refused: str) -> None:
    config = plan(STEP).config
    with pytest.raises(ValueError, match=refused):
        expect_config(records.HOPPER_PREFILL, STEP, H200, replace(config, **changes))
    contiguous = replace(STEP, place=Ragged())
    with pytest.raises(ValueError, match=r"plan.config.schedule: expected 'even' or 'fixed'"):
        expect_config(records.HOPPER_PREFILL, contiguous, H200, config)


def test_tiles_of_more_rows() -> None:
    """Where equal prompts would take long tiles of fewer rows."""
    few = replace(STEP, seqlen_q=1024)
    assert (plan(few).config.tile_m, plan(few).config.tile_n) == (192, 64)
    narrow = replace(STEP, mask=Mask(True, 127), seqlen_q=4096)
    assert plan(narrow).config.tile_m == 128
