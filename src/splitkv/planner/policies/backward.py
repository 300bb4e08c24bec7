"""How the gradients of a call are made: the first way that a kernel has, and splits of rows."""

from __future__ import annotations

from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.plan import Kernel
from splitkv.core.problem import Problem
from splitkv.core.variants import Backward, Gradients
from splitkv.planner.policies.row_splits import row_splits


def choose(problem: Problem, device: Device, kernel: Kernel) -> Gradients | None:
    """The Plan.backward of a kernel; None: none is wanted, or the kernel has none of its own."""
    if not problem.needs_grad:
        return None
    best = next(iter(kernel.gradients(problem, device)), None)
    return None if best is None else with_row_splits(problem, device, best)


def with_row_splits(problem: Problem, device: Device, found: Gradients) -> Gradients:
    """Sets the RowSplits that are best for the tiles."""
    tiles = found.keys if isinstance(found, Backward) else found
    return replace(found, row_splits=row_splits(problem, device, tiles.tile_m, tiles.tile_n))
