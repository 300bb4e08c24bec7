"""A model of persistent decode on Hopper: stages and phases over a program's splits.

Gluon cannot be interpreted, so two roles of Python, which use the kernel's own functions for stages
and phases, run in any order that barriers allow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitkv.kernels.hopper.decode.write_role import WRITTEN_AHEAD
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


def take_turns(roles: Sequence[Iterator[Wait]], seed: int) -> None:
    """Runs roles to their ends, in an order that the seed says and barriers allow."""
    draw, waits = random.Random(seed), [next(role, None) for role in roles]
    while any(wait is not None for wait in waits):
        ready = [n for n, wait in enumerate(waits) if wait is not None and wait[0].passes(wait[1])]
        assert ready, "all roles wait"
        n = draw.choice(ready)
        waits[n] = next(roles[n], None)


def run(stages: int, splits: Sequence[int], seed: int) -> list[int]:
    """The tiles that are read, in order, with roles that run as the seed says."""
    ring, read = Ring(stages), []  # type: ignore[var-annotated]
    take_turns([load_role(ring, splits), mma_role(ring, splits, read)], seed)
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


# --- new tokens: the write role tells the load role that they are there --------------------------


class Pairs:
    """The pairs of barriers of the write role, and which splits it has written."""

    def __init__(self) -> None:
        count = WRITTEN_AHEAD.value
        self.written = [Barrier() for _ in range(count)]
        self.taken = [Barrier() for _ in range(count)]
        self.splits: list[int] = []


def writing(pairs: Pairs, has_new: Sequence[bool]) -> Iterator[Wait]:
    """Writes the new tokens of split after split, as `write_if_any` does."""
    new_splits = 0
    for split, new in enumerate(has_new):
        if new:
            pair, phase = stage_after.fn(new_splits, 0, WRITTEN_AHEAD.value)
            yield pairs.taken[pair], 1 - phase
            pairs.splits.append(split)
            pairs.written[pair].completed += 1
            new_splits += 1


def loading(pairs: Pairs, has_new: Sequence[bool]) -> Iterator[Wait]:
    """Waits for the new tokens of split after split, as `wait_for_new_tokens` does."""
    new_splits = 0
    for split, new in enumerate(has_new):
        if new:
            pair, phase = stage_after.fn(new_splits, 0, WRITTEN_AHEAD.value)
            yield pairs.written[pair], phase
            assert split in pairs.splits, f"split {split} is read before it is written"
            ahead = sum(other > split for other in pairs.splits)
            assert ahead < WRITTEN_AHEAD.value, f"{ahead} splits are written ahead"
            pairs.taken[pair].completed += 1
            new_splits += 1


@given(has_new=st.lists(st.booleans(), max_size=12), seed=st.integers(0, 1 << 20))
@example(has_new=[True] * 5, seed=0)
def test_new_tokens_are_written_before_they_are_read(has_new: list[bool], seed: int) -> None:
    pairs = Pairs()
    take_turns([writing(pairs, has_new), loading(pairs, has_new)], seed)
    assert pairs.splits == [n for n, new in enumerate(has_new) if new]
