"""The policy of engines: a schedule of the step wherever the first kernel has one for several
sequences, else what `tuned` decides.

The lengths of most batches of an engine are far below the greatest one that it serves, which is all
that a plan knows. Which schedule: `persistent.best_known`. It is the same for every number of
sequences and every length, so that few variants of kernels have to be warm; `balanced` is faster
where batches are tiny, and has more.
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
        return replace(own, why=f"scheduled: {reasons[0]}; {own.why}")
    return persistent.best_known(problem, device, candidates[0])
