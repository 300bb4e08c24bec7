"""The policy for batches whose lengths differ, however they do: a schedule of the step wherever the
first kernel has one for several sequences and some mix of lengths may gain by it, else what `tuned`
decides. Which schedule: `persistent.best_known`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.planner.policies import persistent, tuned
from splitkv.planner.policies.decode_cost import batch_of, constants_of


def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    kernel = candidates[0]
    own = tuned.choose(problem, device, candidates)
    reasons = persistent.why_not_several(kernel, problem, device)
    if not reasons:
        schedule = persistent.best_known(problem, device, kernel)
        if own.kernel != kernel.name or own.config.schedule != "even":
            return schedule
        late, costs = late_and_costs(own.config, schedule.config, problem, device, kernel)
        if late >= costs:
            return schedule
        in_us = f"{late * 1e6:.1f} us, a schedule costs {costs * 1e6:.1f}"
        reasons = [f"lengths that differ delay even splits by at most {in_us}"]
    return replace(own, why=f"balanced: {reasons[0]}; {own.why}")


def late_and_costs(
    even: Config, scheduled: Config, problem: Problem, device: Device, kernel: Kernel
) -> tuple[float, float]:
    """The seconds by which even splits are late at most where lengths differ, and those that a
    schedule costs whatever they are."""
    constants = constants_of(kernel)
    batch = batch_of(problem, device, constants)
    costs = batch.shape(scheduled).finding_splits(scheduled) + constants.merge_slots
    return batch.shape(even).longest_alone(even), costs
