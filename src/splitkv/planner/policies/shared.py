"""Common parts of policies: C++ float arithmetic, and from a number of splits to a Config.

A policy decides how many splits; the kernel says which shapes of tile it has. `fit` brings the two
together, so that every policy drives every kernel.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div

Policy = Callable[[Problem, Device, Sequence[Kernel]], Choice]
"""A policy: which of the kernels that can, in order of preference, with which config."""

MAX_TILES = 1 << 31  # of a batch and its head tiles, where a schedule of the step counts them
MAX_SPLITS = 1024  # the most parts a kernel of this package merges
QUANTISED = "hopper_prefill_quantised"
HALF, WIDENED = "hopper_prefill_half", "hopper_prefill_widened"
READY_BEFORE = (HALF, WIDENED)
"""The kernels of a launch that makes values, or keys too, a working type before another."""
WHOLE_SEQUENCES = ("hopper_prefill", QUANTISED, *READY_BEFORE, "prefill")
"""The kernels that take any number of query tokens."""
SHARP = 3.0  # the power of the soft maximum: measurements/thresholds.md#waves


def float32(x: float) -> float:
    """The nearest IEEE single. One operation on singles, done in double and rounded, is exact."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def count(number: int, noun: str) -> str:
    """`1 split`, `2 splits`: for the reasons that policies give."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def slowest(*seconds: float) -> float:
    """The time of things that go on side by side: their soft maximum."""
    most = max(seconds)
    return most * sum([(s / most) ** SHARP for s in seconds]) ** (1 / SHARP) if most else 0.0


def num_tiles(problem: Problem, tile_n: int) -> int:
    """The most tiles of `tile_n` keys that the visible keys of one sequence touch."""
    tiles = 0
    for lo, hi in problem.span:
        # a shorter sequence's window or chunk starts inside a tile
        if (lo or problem.mask.chunk) and problem.lengths == "device":
            tiles += (hi - lo + tile_n - 2) // tile_n + 1
        else:
            tiles += ceil_div(hi, tile_n) - lo // tile_n
    return max(1, min(tiles, ceil_div(problem.seqlen_k, tile_n)))


def row_tiles(problem: Problem, tile_m: int) -> int:
    """Programs needed for the packed query rows of one sequence and KV head."""
    return max(1, ceil_div(problem.rows, tile_m))


@lru_cache(maxsize=64)  # a policy asks for those of the same few kernels again and again
def all_configs(kernel: Kernel, problem: Problem, device: Device) -> tuple[Config, ...]:
    """Every config that a kernel has for a problem."""
    return tuple(kernel.configs(problem, device))


def shapes(kernel: Kernel, problem: Problem, device: Device) -> list[Config]:
    """The kernel's tile shapes, as its legal configs at one split, in its own order."""
    every = all_configs(kernel, problem, device)
    found = list(takewhile(lambda config: config.num_splits == 1, every))
    assert found, f"{kernel.name} has no config for {problem} on {device}"
    return found


def clusters(kernel: Kernel, problem: Problem, device: Device) -> list[Config]:
    """The kernel's configs whose parts are merged by a cluster."""
    return [c for c in all_configs(kernel, problem, device) if c.merge == "cluster"]


def splits_keys(problem: Problem, found: Sequence[Config], kernel: Kernel | None = None) -> bool:
    """Whether there is a number of splits to decide.

    Only decode splits its keys, and the kernels of whole sequences those of calls without a
    gradient; a kernel with a single config leaves nothing to decide.
    """
    can = problem.kind == "decode"
    if kernel is not None and kernel.name in WHOLE_SEQUENCES:
        can = not problem.needs_grad
    return can and len(found) > 1


def max_splits(
    problem: Problem, found: Sequence[Config], shape: Config, kernel: Kernel | None = None
) -> int:
    """The most splits that make sense with a shape: one a tile."""
    if not splits_keys(problem, found, kernel):
        return 1
    return min(MAX_SPLITS, num_tiles(problem, shape.tile_n))


def even_splits(tiles: int, splits: int) -> int:
    """The fewest splits whose longest part is no longer than with so many."""
    return ceil_div(tiles, ceil_div(tiles, splits))


def best_shape(found: Sequence[Config], problem: Problem, tile_n: int | None = None) -> Config:
    """The kernel's own first shape among those that hold the query rows best and are nearest to
    `tile_n` keys a step, where the rule being followed has such a number."""

    def mismatch(config: Config) -> tuple[int, int, int]:
        padded = row_tiles(problem, config.tile_m) * config.tile_m
        off = 0 if tile_n is None else abs(config.tile_n - tile_n)
        return row_tiles(problem, config.tile_m), padded, off

    return min(found, key=mismatch)


def fit(
    problem: Problem,
    device: Device,
    candidates: Sequence[Kernel],
    num_splits: int,
    why: str,
    tile_n: int | None = None,
) -> Choice:
    """`num_splits` on the first candidate, or for several the first that splits at all, in its
    shape nearest to the rule's own tile."""
    able = (k for k in candidates if splits_keys(problem, shapes(k, problem, device), k))
    kernel = next(able, candidates[0]) if num_splits > 1 else candidates[0]
    found = shapes(kernel, problem, device)
    shape = best_shape(found, problem, tile_n)
    most = max_splits(problem, found, shape, kernel)
    splits = min(num_splits, most)
    if splits < num_splits:
        why += f"; {kernel.name} takes {splits}, the most that it can use here"
    return Choice(kernel.name, replace(shape, num_splits=splits), why)
