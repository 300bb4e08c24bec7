"""The items of programs that go through sequences by their place in the grid, past the last, too.

Gluon cannot be interpreted, so the device function runs with numbers in the place of its language.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec
from splitkv.core.problem import Problem
from splitkv.kernels.hopper.prefill import items
from splitkv.kernels.hopper.prefill.quantised import grid_of_places
from splitkv.planner.registry import make_plan

PROBLEM = Problem(
    "decode", 64, 64, 8, 128, 128, 8, 4096, codec=Codec("int8", "head"), products="half"
)


def item_of(place: int, r: int, grid: Any, rounds: int, batch: int, lens: list[int] | None) -> Any:
    """The r-th Item of the program at a place along the axis of sequences."""
    language = SimpleNamespace(
        program_id=lambda axis: place if axis == 2 else 0,
        num_programs=lambda axis: grid[axis],
        where=lambda condition, yes, no: yes if condition else no,
        load=lambda at, mask, other: lens[at] if lens and mask else other,
    )
    keys = SimpleNamespace(seqlen_k=4096, lens_ptr=None if lens is None else 0)
    work = SimpleNamespace(seqlen_q=8, keys=keys, items=rounds, batch=batch)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(items, "gl", language)
        return items.item_at_grid.fn(work, r, SimpleNamespace(packed_heads=8))


@pytest.mark.parametrize("batch", [64, 67])
@pytest.mark.parametrize("ragged", [False, True])
def test_what_lies_past_the_last_sequence_has_no_keys(batch: int, ragged: bool) -> None:
    """Every role looks at the item after its last, whose scales are those of a sequence only where
    it has keys."""
    plan = make_plan(replace(PROBLEM, batch=batch), GPUS["h200"])
    grid, rounds = grid_of_places(plan, batch)
    assert rounds is not None, plan
    lens = [100] * batch if ragged else None
    seen = []
    for place in range(grid[2]):
        for r in range(rounds + 1):
            item = item_of(place, r, grid, rounds, batch, lens)
            if item.sequence < batch:
                seen.append(item.sequence)
                assert (item.len_q, item.len_k) == (8, 100 if ragged else 4096)
            else:
                assert (item.len_q, item.len_k) == (0, 0)
    assert sorted(seen) == list(range(batch))
