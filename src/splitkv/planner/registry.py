"""Everything that exists, in order of preference, and how a plan is made from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.errors import (
    UnsupportedProblem,
    expect,
    expect_in_range,
    expect_int,
    expect_one_of,
)
from splitkv.core.plan import Choice, Config, Kernel, Plan
from splitkv.core.problem import Problem
from splitkv.core.variants import Plain
from splitkv.kernels import records
from splitkv.planner.policies import (
    DEFAULT,
    POLICIES,
    Policy,
    appending,
    backward,
    fixed,
    widening,
)
from splitkv.planner.policies.shared import MAX_SPLITS
from splitkv.planner.policies.variants import CHOOSERS

KERNELS: tuple[Kernel, ...] = (
    records.HOPPER_DECODE_SPLIT,
    records.DECODE_SPLIT,
    records.HOPPER_PREFILL,
    records.HOPPER_PREFILL_QUANTISED,
    records.HOPPER_PREFILL_HALF,
    records.HOPPER_PREFILL_WIDENED,
    records.PREFILL,
    records.TORCH_SDPA,
    records.TORCH_MATH,
)

BY_TIME = ("waves", "tuned", "scheduled", "balanced")
"""Policies that weigh times, which a few keys hardly change. The others are rules to be followed to
the key."""

MAX_CHOICES = 4096  # kept; past it the cache starts afresh
_choices: dict[Hashable, Choice] = {}

__all__ = [
    "BY_TIME",
    "DEFAULT",
    "KERNELS",
    "POLICIES",
    "completed",
    "decided_lengths",
    "in_bucket",
    "kernel_named",
    "make_plan",
    "plan_at_length",
    "rounded_up",
]


def kernel_named(name: str) -> Kernel:
    """The kernel with this name."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    names = [kernel.name for kernel in KERNELS]
    expect_one_of("kernel", name, names)
    raise AssertionError(f"{name} is one of {names}")


def make_plan(
    problem: Problem,
    device: Device,
    *,
    policy: str | Policy = DEFAULT,
    num_splits: int = 0,
    unfit: Callable[[Kernel], list[str]] = lambda kernel: [],
) -> Plan:
    """Let a policy choose among the kernels that can run the problem.

    policy      a name of POLICIES, or a policy made by the caller
                (`policies.fixed.with_split_size`)
    num_splits  above 0: this many parts of the keys of each sequence, whatever the policy
    unfit       unfit(kernel): reasons of the tensors against it, besides those of the problem

    A policy of `BY_TIME` decides for lengths `rounded_up`, see `in_bucket`, so that a cache that
    grows by a key a step is decided for once in a while and not in every step. All else about the
    plan is the problem's own. What a policy of `POLICIES` has chosen is kept.

    Raises UnsupportedProblem with every kernel's reasons where none can.
    """
    expect(isinstance(device, Device), "device", "a splitkv.Device", device)
    expect_int("num_splits", num_splits)
    expect_in_range("num_splits", num_splits, 0, MAX_SPLITS)
    reasons = tuple((k.name, (*k.unsupported(problem, device), *unfit(k))) for k in KERNELS)
    candidates = [k for k, (_, against) in zip(KERNELS, reasons, strict=True) if not against]
    if not candidates:
        raise UnsupportedProblem(problem, device, reasons)
    rejected = tuple((kernel, against) for kernel, against in reasons if against)
    return _decided(problem, device, candidates, rejected, policy, num_splits)


def plan_at_length(plan: Plan, problem: Problem, num_splits: int = 0) -> Plan:
    """The plan of the default policy for a problem that differs from a plan's in lengths, in the
    number of packed sequences and in edges of the mask, which are in the limits of no kernel: what
    is rejected stays so.

    num_splits  as in `make_plan`
    """
    rejected = dict(plan.rejected)
    candidates = [kernel for kernel in KERNELS if kernel.name not in rejected]
    return _decided(problem, plan.device, candidates, plan.rejected, DEFAULT, num_splits)


def _decided(
    problem: Problem,
    device: Device,
    candidates: list[Kernel],
    rejected: tuple[tuple[str, tuple[str, ...]], ...],
    policy: str | Policy,
    num_splits: int,
) -> Plan:
    """The plan that a policy, or the caller's number of splits, makes of the candidates."""
    kept: Hashable = None  # by what the choice is known again
    if isinstance(policy, str):
        expect_one_of("policy", policy, POLICIES)
        name, choose = policy, POLICIES[policy]
        kept = choose
    else:
        expect(callable(policy), "policy", "a name or a function", policy)
        name, choose = getattr(policy, "__module__", "policy").rpartition(".")[2], policy
    if num_splits or not problem.batch * problem.rows:  # with no rows there is nothing to weigh
        splits = max(1, int(num_splits))
        name, choose, kept = "fixed", fixed.with_splits(splits), splits
    asked = in_bucket(problem) if name in BY_TIME else problem
    candidates = widening.in_order(asked, device, candidates)
    key = asked, device, kept, tuple(candidates)
    choice = _choices.get(key) if kept is not None else None
    if choice is None:
        choice = choose(asked, device, candidates)
        expect(isinstance(choice, Choice), "policy", "one that returns a Choice", choice)
        if kept is not None:
            _keep(key, choice)
    choice = appending.with_new_tokens(problem, kernel_named(choice.kernel), choice)
    why = choice.why
    if asked is not problem:
        queries = f"{asked.seqlen_q} queries and " if asked.kind != "decode" else ""
        sequences = f"{asked.batch} sequences, " if asked.batch != problem.batch else ""
        why += f"; decided as for {sequences}{queries}{asked.seqlen_k} keys"
    kernel = kernel_named(choice.kernel)
    config = _with_variant(problem, device, kernel, choice.config)
    gradients = backward.choose(asked, device, kernel)  # of every length in the bucket, the same
    return Plan(problem, device, name, kernel.name, config, why, rejected, gradients)


def completed(plan: Plan) -> Plan:
    """The plan with all that is chosen beside the numbers of its config: the variant of a kernel
    that has several, where the config has none, and what makes the gradients, where the plan lacks
    them. What is there already stays."""
    kernel, problem, device = kernel_named(plan.kernel), plan.problem, plan.device
    config, gradients = _with_variant(problem, device, kernel, plan.config), plan.backward
    if gradients is None:
        gradients = backward.choose(problem, device, kernel)
    if config is plan.config and gradients is plan.backward:
        return plan
    return replace(plan, config=config, backward=gradients)


def _with_variant(problem: Problem, device: Device, kernel: Kernel, config: Config) -> Config:
    """The config, with a chosen variant where it has none and the kernel has several."""
    if not isinstance(config.variant, Plain) or kernel.name not in CHOOSERS:
        return config
    legal = kernel.variants(problem, device, config)
    return replace(config, variant=CHOOSERS[kernel.name](problem, config, legal))


def _keep(key: Hashable, choice: Choice) -> None:
    if len(_choices) >= MAX_CHOICES:
        _choices.clear()
    _choices[key] = choice


def decided_lengths(longest: int) -> list[int]:
    """The numbers of keys up to `longest` that decode is decided for, the longest first."""
    lengths = [longest]
    while lengths[-1] > 1:
        step = 1 << max(0, (lengths[-1] - 1).bit_length() - 5)
        lengths.append((lengths[-1] - 1) // step * step)
    return lengths


def in_bucket(problem: Problem) -> Problem:
    """The problem of the longest sequences that are decided alike, or the problem itself: as many
    keys as `rounded_up` says, and queries, but for decode, which is made for just so many, and
    sequences where they are packed, as every step of an engine has others."""
    batch, queries, keys = problem.batch, problem.seqlen_q, rounded_up(problem.seqlen_k)
    if problem.kind != "decode":
        queries = rounded_up(queries)
    if problem.kind == "varlen":
        batch = rounded_up(batch)
    if (batch, queries, keys) == (problem.batch, problem.seqlen_q, problem.seqlen_k):
        return problem
    return replace(problem, batch=batch, seqlen_q=queries, seqlen_k=keys)


def rounded_up(number: int) -> int:
    """The next of 16 steps an octave: exact up to 32 keys, 34, 36, ... 64, 68, ... 4096, 4352, ...

    What deciding by it costs: measurements/thresholds.md#waves.
    """
    return rounded_alike(number)[1]


def rounded_alike(number: int) -> tuple[int, int]:
    """(first, last) of the numbers that are rounded up as this one is."""
    step = 1 << max(0, (number - 1).bit_length() - 5)
    last = -(-number // step) * step
    return last - step + 1, last
