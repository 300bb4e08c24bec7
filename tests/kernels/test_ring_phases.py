"""A model of the ring of persistent decode on Hopper: stages and phases over a program's splits.

Gluon cannot be interpreted, so two roles of Python, which use the kernel's own functions for stages
and phases, run in any order that barriers allow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitkv.kernels.hopper.primitives.tma_ring import next_stage, stage_after


class Barrier:
    """An mbarrier that opens with one arrival: a wait for a parity passes once the phase of that
    parity is over."""

    def __init__(self) -> None:
        self.completed = 0

    def passes(self, parity: int) -> bool:
        return self.completed % 2 != parity


class Ring:
    """Stages, with what is in them: (tile, whether it has been read)."""

    def __init__(self, stages: int) -> None:
        self.full = [Barrier() for _ in range(stages)]
        self.empty = [Barrier() for _ in range(stages)]
        self.tiles: list[tuple[int, bool]] = [(-1, True)] * stages


Wait = tuple[Barrier, int]


def load_role(ring: Ring, splits: Sequence[int]) -> Iterator[Wait]:
    """Issues tile after tile; yields what it waits for."""
    stages, before = len(ring.full), 0
    for count in splits:
        stage, phase = stage_after.fn(before, 0, stages)
        phase = 1 - phase
        for tile in range(before, before + count):
            yield ring.empty[stage], phase
            assert ring.tiles[stage][1], f"tile {tile} is written over {ring.tiles[stage]}"
            ring.tiles[stage] = tile, False
            ring.full[stage].completed += 1
            stage, phase = next_stage.fn(stage, phase, stages)
        before += count


def mma_role(ring: Ring, splits: Sequence[int], read: list[int]) -> Iterator[Wait]:
    """Reads tile after tile; yields what it waits for."""
    stages, before = len(ring.full), 0
    for count in splits:
        stage, phase = stage_after.fn(before, 0, stages)
        for _ in range(count):
            yield ring.full[stage], phase
            read.append(ring.tiles[stage][0])
            ring.tiles[stage] = ring.tiles[stage][0], True
            ring.empty[stage].completed += 1
            stage, phase = next_stage.fn(stage, phase, stages)
        before += count


def run(stages: int, splits: Sequence[int], seed: int) -> list[int]:
    """The tiles that are read, in order, with roles that run as the seed says."""
    ring, read, draw = Ring(stages), [], random.Random(seed)  # type: ignore[var-annotated]
    roles = [load_role(ring, splits), mma_role(ring, splits, read)]
    waits = [next(role, None) for role in roles]
    while any(wait is not None for wait in waits):
        ready = [n for n, wait in enumerate(waits) if wait is not None and wait[0].passes(wait[1])]
        assert ready, f"both roles wait: {read}"
        n = draw.choice(ready)
        waits[n] = next(roles[n], None)
    return read


@given(
    stages=st.integers(1, 6),
    splits=st.lists(st.integers(0, 13), max_size=8),
    seed=st.integers(0, 1 << 20),
)
@example(stages=3, splits=[3, 3, 3], seed=0)
@example(stages=2, splits=[1, 0, 1, 0, 5], seed=1)
def test_every_tile_is_read_once_in_order(stages: int, splits: list[int], seed: int) -> None:
    assert run(stages, splits, seed) == list(range(sum(splits)))


def test_the_model_sees_a_phase_that_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every split would by itself: with an odd number of rounds before, it is the wrong one."""
    monkeypatch.setattr(stage_after, "fn", lambda before, zero, stages: (before % stages, 0))
    with pytest.raises(AssertionError, match="wait|written over"):
        for seed in range(5):
            assert run(3, [3, 4], seed) == list(range(7)), "a tile is not waited for"
