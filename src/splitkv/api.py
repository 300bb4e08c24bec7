"""The functions that users call: tensors -> Problem -> Plan -> launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from splitkv.core.device import Device, current
from splitkv.core.errors import (
    expect,
    expect_one_of,
    expect_size,
    expect_tensor,
)
from splitkv.core.kv import Paged
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem, expect_heads
from splitkv.core.scales import DTYPE_BYTES
from splitkv.core.values import checked
from splitkv.planner.explanation import Explanation
from splitkv.planner.explanation import explain as explain_problem
from splitkv.planner.policies import DEFAULT, Policy
from splitkv.planner.registry import make_plan
from splitkv.runtime.attention import attention, attention_varlen
from splitkv.runtime.decode import decode
from splitkv.runtime.dispatch import describe, device_of
from splitkv.runtime.merge_states import merge_states
from splitkv.runtime.schedule import Schedule, make_schedule
from splitkv.runtime.slot_mapping import append

__all__ = [
    "Schedule",
    "append",
    "attention",
    "attention_varlen",
    "decode",
    "explain",
    "make_schedule",
    "merge_states",
    "plan",
]


def plan(
    problem: Problem | Tensor,
    *tensors: Any,
    device: Device | None = None,
    policy: str | Policy = DEFAULT,
    num_splits: int = 0,
    **arguments: Any,
) -> Plan:
    """The decision for a problem, without running it.

    problem     a Problem, for any Device (`Device.named("h200")`; default: the one here); or q,
                and then the arguments of `decode` (q, k_cache, v_cache, cache_seqlens=...), of
                `attention_varlen` where cu_seqlens are given, or of `attention` with `dense=True`
    policy      a name (`splitkv explain --help` lists them) or a function (problem, device,
                kernels)
    num_splits  above 0 forces the number of splits

    The plan can be printed, compared, stored, and passed back as `plan=`, which skips deciding.
    Raises UnsupportedProblem where no kernel can run the problem.
    """
    if not isinstance(problem, Problem):
        expect_tensor("problem", problem)
        device = _device(device) or device_of(problem)
        problem = describe(problem, *tensors, **arguments)
    else:
        problem = _checked(problem)
        _expect_nothing_beside(problem, tensors, arguments)
        device = _device(device) or current()
    return make_plan(problem, device, policy=policy, num_splits=num_splits)


def explain(
    problem: Problem | Plan | Tensor,
    *tensors: Any,
    device: Device | None = None,
    policies: Sequence[str] = (DEFAULT,),
    num_splits: int = 0,
    lengths: Sequence[int] = (),
    **arguments: Any,
) -> Explanation:
    """Why a call runs as it does; print it. Takes a Problem, a Plan, or the arguments of a call.

    policies   names of policies to show side by side
    lengths    keys of each sequence of a decode call: what the cost model says of such a batch

    Shows the problem, every kernel with the reasons against it, each policy's plan with its grid,
    waves, share of SMs busy, bytes, and the time that the bytes take at full bandwidth.
    """
    if not isinstance(problem, Problem | Plan):
        expect_tensor("problem", problem)
        device = _device(device) or device_of(problem)
        problem = describe(problem, *tensors, **arguments)
    else:
        if isinstance(problem, Problem):
            problem = _checked(problem)
        _expect_nothing_beside(problem, tensors, arguments)
        device = _device(device)
    names = isinstance(policies, Sequence) and not isinstance(policies, str) and len(policies) > 0
    expect(names, "policies", "names of policies", policies)
    if isinstance(problem, Plan):
        expect(device is None, "device", "nothing beside a Plan", device)
        expect(tuple(policies) == (DEFAULT,), "policies", "nothing beside a Plan", policies)
        expect(num_splits == 0, "num_splits", "nothing beside a Plan", num_splits)
    return explain_problem(problem, device, policies, num_splits, lengths)


def _checked(problem: Problem) -> Problem:
    """Checks a Problem made by hand as `describe` checks a call."""
    problem = checked(problem)
    sizes = "batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v"
    for name in (*sizes, "seqlen_q", "seqlen_k", "seqlen_new"):
        expect_size(name, getattr(problem, name), empty=True)
    expect_heads(*(getattr(problem, name) for name in sizes[1:]))
    expect_one_of("dtype", problem.dtype, DTYPE_BYTES)
    if isinstance(problem.place, Paged):
        expect_size("place.page_size", problem.place.page_size)
    return problem


def _device(device: Any) -> Device | None:
    """A device that was given."""
    if device is None:
        return None
    expect(isinstance(device, Device), "device", "a splitkv.Device", device)
    return checked(device, "device")


def _expect_nothing_beside(
    problem: Problem | Plan, tensors: Sequence[Any], arguments: Mapping[str, Any]
) -> None:
    """A Problem and a Plan say it all: what is given beside them would be ignored."""
    kind = type(problem).__name__
    expect(not tensors, "tensors", f"none beside a {kind}", len(tensors))
    for name, value in arguments.items():
        expect(False, name, f"nothing beside a {kind}", value)
