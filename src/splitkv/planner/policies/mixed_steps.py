"""A part of `waves`: an engine's steps, prompts or chunks of them beside sequences of few queries.

Of packed queries whose keys are in pages only the longest sequence is known. Where the time that
sequences as long as that would take hides what a schedule of items costs, one is made: it has row
tiles of prompts and pieces of the keys of few queries take turns (kernels/schedule_items.py). Else
keys of few queries are cut evenly, which costs next to nothing where there are none.
"""

from __future__ import annotations

from dataclasses import replace

from splitkv.core.kv import Paged
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.planner.policies.shared import MAX_SPLITS, MAX_TILES, num_tiles

# What the schedule, its merge and programs without an item may take longer, and of what share of
# the time of equal prompts that has to be: measurements/prefill.md#steps-of-an-engine.
SCHEDULE_SECONDS = 8e-6
MOST_LONGER = 0.02
LEAST_KEYS = 2048  # of a piece: a program's start and end cost little beside what it reads


def why_not(problem: Problem, kernel: Kernel, seconds: float) -> list[str]:
    """Every reason against a schedule of items.

    kernel    the one that is chosen; seconds: that it takes where all prompts are as long as any
    """
    if "items" not in kernel.schedules:
        return [f"kernel {kernel.name}: expected one that has them"]
    reasons = []
    if problem.kind != "varlen" or not isinstance(problem.place, Paged):
        reasons.append(f"keys {problem.place}: expected pages of packed sequences")
    if problem.batch < 2:
        reasons.append("one sequence: expected several")
    if seconds * MOST_LONGER < SCHEDULE_SECONDS:
        reasons.append(
            f"{SCHEDULE_SECONDS * 1e6:.0f} us more of {seconds * 1e6:.0f} us that equal prompts "
            f"take: expected at most {MOST_LONGER:.0%}"
        )
    return reasons


def scheduled(problem: Problem, kernel: Kernel, shape: Config, seconds: float) -> Choice | None:
    """The choice of a schedule of items in a shape of a kernel, or None: see `why_not`."""
    tiles = problem.batch * num_tiles(problem, shape.tile_n)
    if why_not(problem, kernel, seconds) or shape.programs or tiles >= MAX_TILES:
        return None
    pieces = -(-num_tiles(problem, shape.tile_n) * shape.tile_n // LEAST_KEYS)
    config = replace(
        shape,
        schedule="items",
        split_size=LEAST_KEYS,
        num_splits=min(max(pieces, 2), MAX_SPLITS),
        merge="combine",
    )
    why = "waves: row tiles of prompts and pieces of the keys of few queries take turns, by a "
    why += f"schedule; equal prompts take {seconds * 1e6:.0f} us"
    return Choice(kernel.name, config, why)
