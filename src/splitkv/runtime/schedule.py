"""`make_schedule`: which program of decode works on what, from the lengths of a step.

Under torch.compile, torch.export, FakeTensorMode and for tensor subclasses the same function runs
as the operator `splitkv::make_schedule`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.core.errors import (
    expect,
    expect_device,
    expect_dtype,
    expect_last_dim_contiguous,
    expect_one_of,
    expect_shape,
)
from splitkv.core.plan import SCHEDULED, Plan, plan_with_handle
from splitkv.runtime.call_cache import device_to_enter, launch_on
from splitkv.runtime.dispatch import device_of, handle_of, is_plain

if TYPE_CHECKING:
    from splitkv.kernels.schedule import ScheduleLauncher

MAX_LAUNCHERS = 1024  # kept; past it the table starts afresh
_launchers: dict[tuple[int, torch.device], ScheduleLauncher] = {}
"""By the identity of their plans, which they hold, and the device of their kernel."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which program of decode works on what, for the lengths of one step.

    plan    the Plan that it was made for, under which calls with it run
    starts  [programs, 8] int32 on the device: where each program starts, see kernels/schedule.py
    """

    plan: Plan
    starts: Tensor


def make_schedule(plan: Plan, cache_seqlens: Tensor, *, out: Schedule | None = None) -> Schedule:
    """The schedule of a step, for `decode(..., schedule=)` of all layers of one shape.

    plan           a Plan whose config has a schedule of "ranges", "head_ranges" or "proportional"
    cache_seqlens  [batch] int32 on the device: the lengths that the calls will be given; of calls
                   that append new keys first those with them
    out            a Schedule of this plan whose memory is written again, as in a graph that other
                   parts of a program read it from

    One small launch, whatever the lengths are; nothing is read by the host, and nothing but the
    result is allocated. It can be captured in a CUDA graph and replayed with other lengths. Calls
    of other lengths than these are undefined. The same lengths give the same schedule, and the
    same results bit for bit.

    Raises ValueError for what is malformed, a plan without such a schedule, and lengths that are
    not on a device of the plan's kind.
    """
    expect(isinstance(plan, Plan), "plan", "a splitkv.Plan", plan)
    if out is not None:
        own = isinstance(out, Schedule) and (out.plan is plan or out.plan == plan)
        expect(own, "out", "a Schedule of this plan", out)
    if is_dynamo_compiling() or not is_plain(cache_seqlens):
        starts = schedule_op(cache_seqlens, handle_of(plan))
        if out is None:
            return Schedule(plan, starts)
        out.starts.copy_(starts)
        return out
    launcher = _launcher_of(plan, cache_seqlens)
    _expect_lengths(plan, cache_seqlens)
    if out is None:
        starts = cache_seqlens.new_empty(launcher.shape)
        out = Schedule(plan, starts)
    else:
        expect_device("out", out.starts, cache_seqlens.device)
    launch_on(device_to_enter(cache_seqlens), launcher, out.starts, cache_seqlens)
    return out


def plan_of(schedule: Any, plan: Plan | None) -> Plan:
    """The plan of a call with a schedule, beside which no other may be given."""
    expect(isinstance(schedule, Schedule), "schedule", "a splitkv.Schedule", schedule)
    found: Plan = schedule.plan
    own = plan is None or plan is found or plan == found
    expect(own, "schedule", "one that was made for the plan of the call", found)
    return found


def _launcher_of(plan: Plan, cache_seqlens: Any) -> ScheduleLauncher:
    known = id(plan), getattr(cache_seqlens, "device", None)
    launcher = _launchers.get(known)
    if launcher is None:
        expect_one_of("plan.config.schedule", plan.config.schedule, SCHEDULED)
        from splitkv.kernels.schedule import ScheduleLauncher

        if len(_launchers) >= MAX_LAUNCHERS:
            _launchers.clear()
        launcher = _launchers[known] = ScheduleLauncher(plan)
    return launcher


def _expect_lengths(plan: Plan, cache_seqlens: Any) -> None:
    expect_shape("cache_seqlens", cache_seqlens, batch=plan.problem.batch)
    expect_dtype("cache_seqlens", cache_seqlens, "int32")
    expect_last_dim_contiguous("cache_seqlens", cache_seqlens)
    arch = device_of(cache_seqlens).arch
    expect(arch == plan.device.arch, "plan", f"one for {arch}", plan.device.arch)


@torch.library.custom_op(
    "splitkv::make_schedule", mutates_args=(), schema="(Tensor cache_seqlens, str plan) -> Tensor"
)
def schedule_op(cache_seqlens: Tensor, plan: str) -> Tensor:
    return make_schedule(plan_with_handle(plan), cache_seqlens).starts


@schedule_op.register_fake
def _(cache_seqlens: Tensor, plan: str) -> Tensor:
    from splitkv.kernels.schedule import buffer_shape

    return cache_seqlens.new_empty(buffer_shape(plan_with_handle(plan)))
