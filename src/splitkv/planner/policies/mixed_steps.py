"""A part of `waves`: an engine's steps, prompts or chunks of them beside sequences of few queries.

Of packed queries whose keys are in pages only the longest sequence is known. Where the time that
sequences as long as that would take hides what a schedule of items costs, one is made: it has row
tiles of prompts and pieces of the keys of few queries take turns (kernels/schedule_items.py). Else
keys of few queries are cut evenly, which costs next to nothing where there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.kv import Paged
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.planner.policies.shared import MAX_SPLITS, MAX_TILES, num_tiles, shapes

# What the schedule, its merge and programs without an item may take longer, and of what share of
# the time of equal prompts that has to be: measurements/prefill.md#steps-of-an-engine.
SCHEDULE_SECONDS = 14e-6
MOST_LONGER = 0.02
LEAST_TILE = 64  # keys, of the kernels that have schedules
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
    tiles = problem.batch * num_tiles(problem, LEAST_TILE)
    if tiles >= MAX_TILES:
        reasons.append(f"{tiles} tiles: expected fewer than {MAX_TILES}")
    if seconds * MOST_LONGER < SCHEDULE_SECONDS:
        reasons.append(
            f"{SCHEDULE_SECONDS * 1e6:.0f} us more of {seconds * 1e6:.0f} us that equal prompts "
            f"take: expected at most {MOST_LONGER:.0%}"
        )
    return reasons


def scheduled(
    problem: Problem, device: Device, kernel: Kernel, shape: Config, seconds: float
) -> Choice | None:
    """The choice of a schedule of items by a kernel, or None: see `why_not`.

    shape   that equal prompts would take, in so many seconds
    """
    shape = _tall(shapes(kernel, problem, device), shape)
    if why_not(problem, kernel, seconds):
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


def _tall(found: Sequence[Config], shape: Config) -> Config:
    """The shape of more rows and shorter tiles, where there is one: what few queries leave idle
    costs nothing, and their tiles come in smaller pieces."""
    alike = shape.programs, shape.pack_gqa
    for other in found:
        taller = other.tile_m > shape.tile_m and other.tile_n < shape.tile_n
        if taller and (other.programs, other.pack_gqa) == alike:
            return other
    return shape
