"""The caller decides: a number of splits, or a split size.

A fixed number of splits is for sweeps and for forcing (`num_splits=` in `decode`). A fixed split
size is batch invariant: which keys share a part depends on the sequence alone, so a row's bits do
not depend on its batch neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.planner.policies.shared import (
    MAX_SPLITS,
    Policy,
    best_shape,
    count,
    fit,
    num_tiles,
    shapes,
    splits_keys,
)


def with_splits(num_splits: int) -> Policy:
    """A policy that always takes `num_splits` splits, or as many as there are tiles."""
    if num_splits < 1:
        raise ValueError(f"num_splits: expected at least 1, got {num_splits}")

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        why = f"{count(num_splits, 'split')}, as asked"
        return fit(problem, device, candidates, num_splits, why)

    return choose


def with_split_size(keys: int) -> Policy:
    """A policy that cuts every sequence into parts of `keys` keys, whatever its length or batch.

    Parts are whole tiles: where no tile divides `keys` it is rounded up to the next one.
    """
    if keys < 1:
        raise ValueError(f"split_size: expected at least 1, got {keys}")

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        kernel = candidates[0]
        found = shapes(kernel, problem, device)
        dividing = [config for config in found if keys % config.tile_n == 0]
        shape = best_shape(dividing or found, problem)
        if not splits_keys(problem, found):
            return Choice(kernel.name, found[0], f"{kernel.name} does not split its keys")
        size = ceil_div(keys, shape.tile_n) * shape.tile_n
        # the plan may serve shorter sequences, whose window starts inside a tile
        tiles = num_tiles(replace(problem, lengths="device"), shape.tile_n)
        splits = ceil_div(tiles, size // shape.tile_n)
        if splits > MAX_SPLITS:
            least = ceil_div(problem.visible_keys, MAX_SPLITS)
            raise ValueError(f"split_size: expected at least {least} keys, got {keys}")
        config = replace(shape, num_splits=splits, schedule="fixed", split_size=size)
        rounded = "" if size == keys else f", asked for {keys}"
        why = f"parts of {size} keys{rounded}: {problem.visible_keys} visible keys"
        why += f", {count(splits, 'split')}"
        return Choice(kernel.name, config, why)

    return choose


choose = with_splits(1)
