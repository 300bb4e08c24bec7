"""Kernels of decode by a schedule of the step, compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from compiling import ADDRESS, AnyGPU, Compiled, Launched, Layout, Recorder, layouts, measure
from triton.runtime.driver import driver

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.kernels import decode_persistent, schedule
from splitkv.kernels.hopper.decode import kernel as hopper_decode_split
from splitkv.kernels.host import step, workspace
from splitkv.planner.registry import kernel_named

KERNELS = "decode", "combine_slots"


def compile_step(
    plan: Plan,
    row_gap: int = 0,
    address: int = ADDRESS,
    given: bool = False,
    new: Callable[[Operands], Any] = lambda operands: None,
    merged: bool = True,
) -> dict[str, Any]:
    """The kernels that a call of the plan launches, by name: that of decode, `combine_slots`.

    given    the call is given a schedule
    new      new(operands): what the call appends
    merged   `combine_slots` is compiled; else None, as its code is for another test
    """
    major, minor = plan.device.capability
    on_host, partials = torch.empty(0), workspace.partials  # slices of a buffer: theirs is real
    decodes = {"decode_persistent": Recorder(decode_persistent.decode_persistent)}
    merge = (Recorder if merged else Launched)(step.combine_slots)
    operands = layouts(plan.problem, row_gap, address)
    operands.new = new(operands)
    if given:
        operands.starts = operands.q.new_empty(schedule.buffer_shape(plan), dtype=torch.int32)
    entries = {
        name: Recorder(hopper_decode_split.entry_point(name))
        for name in hopper_decode_split.ENTRIES
    }
    decodes["hopper_decode_split"] = entries["persistent"]
    with ExitStack() as patches:
        for patch in (
            mock.patch.object(decode_persistent, "decode_persistent", decodes["decode_persistent"]),
            mock.patch.object(hopper_decode_split, "entry_point", entries.__getitem__),
            mock.patch.object(step, "combine_slots", merge),
            mock.patch.object(workspace, "partials", lambda like, *n: partials(on_host, *n)),
            mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", int, create=True),
            mock.patch.object(step.StepLauncher, "keep", mock.Mock()),
        ):
            patches.enter_context(patch)
        kernel_named(plan.kernel).bind(plan, operands)(operands)
    every: list[tuple[str, Any]] = [*decodes.items(), ("combine_slots", merge)]
    return {
        name: None if made is None else measure(made)
        for name, recorder in every
        for made in recorder.compiled
    }


def compile_schedule(plan: Plan) -> Compiled:
    """The kernel that makes schedules of a plan, once a step."""
    major, minor = plan.device.capability
    rule = Recorder(schedule.schedule_step)
    starts = Layout(schedule.buffer_shape(plan), torch.int32)
    lens = Layout((plan.problem.batch,), torch.int32)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(schedule, "schedule_step", rule))
        patches.enter_context(mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)))
        schedule.ScheduleLauncher(plan).kernel.launch(starts, lens)
    return measure(rule.compiled[0])
