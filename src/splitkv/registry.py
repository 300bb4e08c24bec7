"""Everything that exists, in order of preference, and how a plan is made from it."""

from __future__ import annotations

from splitkv.device import Device
from splitkv.errors import (
    UnsupportedProblem,
    expect,
    expect_in_range,
    expect_int,
    expect_one_of,
)
from splitkv.kernels import decode_split, torch_math, torch_sdpa
from splitkv.plans import Kernel, Plan
from splitkv.policies import DEFAULT, POLICIES, Policy, fixed
from splitkv.policies.shared import MAX_SPLITS
from splitkv.problem import Problem

KERNELS: tuple[Kernel, ...] = (decode_split.KERNEL, torch_sdpa.KERNEL, torch_math.KERNEL)

__all__ = ["DEFAULT", "KERNELS", "POLICIES", "kernel_named", "make_plan"]


def kernel_named(name: str) -> Kernel:
    """The kernel with this name."""
    kernels = {kernel.name: kernel for kernel in KERNELS}
    expect_one_of("kernel", name, kernels)
    return kernels[name]


def make_plan(
    problem: Problem,
    device: Device,
    *,
    policy: str | Policy = DEFAULT,
    num_splits: int = 0,
) -> Plan:
    """Let a policy choose among the kernels that can run the problem.

    policy      a name of POLICIES, or a policy made by the caller
                (`policies.fixed.with_split_size`)
    num_splits  above 0: this many parts of the keys of each sequence, whatever the policy

    Raises UnsupportedProblem with every kernel's reasons where none can.
    """
    expect(isinstance(device, Device), "device", "a splitkv.Device", device)
    expect_int("num_splits", num_splits)
    expect_in_range("num_splits", num_splits, 0, MAX_SPLITS)
    reasons = tuple((k.name, tuple(k.unsupported(problem, device))) for k in KERNELS)
    candidates = [kernel_named(name) for name, against in reasons if not against]
    if not candidates:
        raise UnsupportedProblem(problem, device, reasons)
    if isinstance(policy, str):
        expect_one_of("policy", policy, POLICIES)
        name, choose = policy, POLICIES[policy]
    else:
        expect(callable(policy), "policy", "a name or a function", policy)
        name, choose = getattr(policy, "__module__", "policy").rpartition(".")[2], policy
    if num_splits or not problem.batch * problem.rows:  # with no rows there is nothing to weigh
        name, choose = "fixed", fixed.with_splits(max(1, num_splits))
    choice = choose(problem, device, candidates)
    rejected = tuple((kernel, against) for kernel, against in reasons if against)
    return Plan(problem, device, name, choice.kernel, choice.config, choice.why, rejected)
