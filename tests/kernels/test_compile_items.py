"""`hopper_prefill` by a schedule of items, the schedule and its merge compile for sm_90 without a
GPU, and no loop spills."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from compiling import (
    AnyGPU,
    Recorder,
    key_loops,
    measure,
    meetings,
    overwritten_barriers,
    ptxas_said,
    variants,
)
from test_compile_hopper_prefill import H200, operands_of, problem_of
from triton.runtime.driver import driver

from splitkv.core.kv import Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import combine_items, records, schedule_items
from splitkv.kernels.hopper.prefill import kernel as prefill
from splitkv.kernels.hopper.primitives.zero_rows import ALL_CLEARED
from splitkv.kernels.host import workspace
from splitkv.kernels.limits import hopper_prefill as limits
from splitkv.planner.legality import expect_config
from splitkv.planner.registry import completed

STEPS: cases.Axes = {
    "kind": ("varlen",),
    "dtype": ("bfloat16", "float16"),
    "head_dims": limits.HEAD_DIMS,
    "heads": ((8, 2), (14, 2), (8, 8)),
    "place": (Paged(16), Paged(64), Paged(256)),
    "mask": (Mask(True), Mask(), Mask(True, 1000, -1, 4)),
    "softcap": (False, True),
    "sink_logits": (False, True),
}
FULL = {"dtype": "bfloat16", "mask": Mask(True), "softcap": False, "sink_logits": False}
EVERYDAY = tuple(
    {"kind": "varlen", "head_dims": (128, 128), "heads": (8, 2), "place": Paged(size), **FULL}
    for size in (16, 64)
)


def scheduled(problem: Problem, shape: tuple[int, int] | None = None) -> Config:
    """A config of a schedule, in the first shape or in one in particular."""
    found = (c for c in limits.configs(problem, H200) if c.programs == 0)
    config = next(c for c in found if shape in (None, (c.tile_m, c.tile_n)))
    config = replace(config, schedule="items", split_size=8 * config.tile_n, num_splits=8)
    expect_config(records.HOPPER_PREFILL, problem, H200, config)
    return config


def compiled(problem: Problem, config: Config) -> tuple[Any, Any, Any]:
    """What the launcher would launch: the schedule, attention, and the merge."""
    plan = completed(Plan(problem, H200, "fixed", "hopper_prefill", config, "a test"))
    x, attention = operands_of(problem, 0), Recorder(prefill.hopper_prefill, listens=True)
    schedule = Recorder(schedule_items.schedule_items)
    merge, partials = Recorder(combine_items.combine_items), workspace.partials
    with (
        mock.patch.object(driver, "_active", AnyGPU(90)),
        mock.patch.object(prefill, "hopper_prefill", attention),
        mock.patch.object(schedule_items, "schedule_items", schedule),
        mock.patch.object(combine_items, "combine_items", merge),
        mock.patch.object(workspace, "partials", lambda like, *n: partials(torch.empty(0), *n)),
    ):
        prefill.bind(plan, x).forward(x, None)
    return *schedule.compiled, *attention.compiled, *merge.compiled


def hold(problem: Problem, config: Config) -> None:
    schedule, attention, merge = compiled(problem, config)
    for small in (schedule, merge):
        assert measure(small).stack_bytes == 0
    assert attention.metadata.shared <= H200.smem_per_block
    assert "serialized" not in ptxas_said(attention)
    assert "griddepcontrol.wait" in attention.asm["ptx"]
    assert overwritten_barriers(attention.asm["ptx"]) == []
    met = meetings(attention.asm["cubin"], ALL_CLEARED.value)
    assert met and all(met)
    warpgroups = config.tile_m // prefill.ROWS.value
    products = (problem.head_dim + config.tile_n) // 16
    loops = key_loops(attention.asm["cubin"], products, warpgroups)
    assert len(loops) == warpgroups
    for body in loops:
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in body)


def describe(values: cases.Values) -> str:
    return "-".join(str(value).replace(" ", "_") for value in values.values())


@variants(
    STEPS, most=3, besides=tuple(FULL | values for values in EVERYDAY), newest=0, ids=describe
)
def test_variants(values: cases.Values) -> None:
    problem = problem_of(values)
    hold(problem, scheduled(problem))


@pytest.mark.parametrize("page_size", [16, 64])
def test_tiles_of_fewer_rows(page_size: int) -> None:
    values = {"kind": "varlen", "head_dims": (128, 128), "heads": (8, 2)}
    problem = problem_of(values | {"place": Paged(page_size)})
    hold(problem, scheduled(problem, (128, 64)))
