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
from splitkv.core.kv import Paged
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
ROUNDED = 1 - 1e-9  # times a bound: what its own rounding may have added is off
SHARP, ROOT = 3.0, 1 / 3.0  # the power of the soft maximum: measurements/thresholds.md#waves


def float32(x: float) -> float:
    """The nearest IEEE single. One operation on singles, done in double and rounded, is exact."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def count(number: int, noun: str) -> str:
    """`1 split`, `2 splits`: for the reasons that policies give."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def slowest(a: float, b: float = 0.0, c: float = 0.0, d: float = 0.0) -> float:
    """The time of up to four things that go on side by side: their soft maximum."""
    most = a if a > b else b
    most = c if c > most else most
    most = d if d > most else most
    if not most:
        return 0.0
    total = (a / most) ** SHARP + (b / most) ** SHARP
    if c:
        total += (c / most) ** SHARP
    if d:
        total += (d / most) ** SHARP
    soft: float = most * total**ROOT
    return soft


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


class TiledKeys:
    """The keys of a problem as models of time see them: their tiles, which are counted once for
    each `tile_n`, and the size of their pages; 0: they lie in none."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.page_size = problem.place.page_size if isinstance(problem.place, Paged) else 0
        self._tiles: dict[int, int] = {}

    def tiles(self, tile_n: int) -> int:
        """Tiles of a sequence: `num_tiles`."""
        found = self._tiles.get(tile_n)
        if found is None:
            found = self._tiles[tile_n] = num_tiles(self.problem, tile_n)
        return found


def row_tiles(problem: Problem, tile_m: int) -> int:
    """Programs needed for the packed query rows of one sequence and KV head."""
    return max(1, ceil_div(problem.rows, tile_m))


@lru_cache(maxsize=64)  # a policy asks for those of the same few kernels again and again
def shapes(kernel: Kernel, problem: Problem, device: Device) -> tuple[Config, ...]:
    """The kernel's tile shapes, as its legal configs at one split, in its own order."""
    every = kernel.configs(problem, device)
    found = tuple(takewhile(lambda config: config.num_splits == 1, every))
    assert found, f"{kernel.name} has no config for {problem} on {device}"
    return found


@lru_cache(maxsize=64)
def clusters(kernel: Kernel, problem: Problem, device: Device) -> tuple[Config, ...]:
    """The kernel's configs whose parts are merged by a cluster."""
    if "cluster" not in kernel.merges:
        return ()
    return tuple(c for c in kernel.configs(problem, device) if c.merge == "cluster")


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
        tiles = row_tiles(problem, config.tile_m)
        off = 0 if tile_n is None else abs(config.tile_n - tile_n)
        return tiles, tiles * config.tile_m, off

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
