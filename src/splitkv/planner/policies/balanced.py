"""The policy for batches whose lengths differ, however they do: a schedule of the step wherever the
first kernel has one for several sequences, else what `tuned` decides.

The lengths of most batches of an engine are far below the greatest one that it serves, which is all
that a plan knows. Which schedule: `persistent.best_known`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Kernel
from splitkv.core.problem import Problem
from splitkv.planner.policies import persistent, tuned


def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    reasons = persistent.why_not_several(candidates[0], problem, device)
    if reasons:
        own = tuned.choose(problem, device, candidates)
        return replace(own, why=f"balanced: {reasons[0]}; {own.why}")
    return persistent.best_known(problem, device, candidates[0])
