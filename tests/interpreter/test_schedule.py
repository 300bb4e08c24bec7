"""The schedule of a decode step in Triton's interpreter, against plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import schedules
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitkv.core.device import GPUS
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.tiles import SPLIT_TILES
from splitkv.kernels.schedule import ScheduleKernel, buffer_shape, head_tiles_of_share

# The interpreter uses what NumPy will drop.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)
MASKS = (
    Mask(causal=True),
    Mask(),
    Mask(True, 100),
    Mask(True, 37, -1, 5),
    Mask(True, 300, -1, 40),
)
HUGE = (1 << 28) - 1  # keys of a sequence
DECODE = Problem("decode", 3, 4, 2, 16, 16, 1, HUGE, mask=Mask(causal=True), lengths="device")


def plan_of(
    schedule: str, batch: int, programs: int, of_split: int = SPLIT_TILES, **sizes: object
) -> Plan:
    problem = replace(DECODE, batch=batch, **sizes)
    config = Config(tile_n=16, schedule=schedule, programs=programs, split_tiles=of_split)
    return Plan(problem, GPUS["h200"], "fixed", "decode_split", config, "a test")


def starts_of(plan: Plan, lengths: Sequence[int]) -> list[list[int]]:
    starts = torch.full(buffer_shape(plan), -7, dtype=torch.int32)
    ScheduleKernel(plan).launch(starts, torch.tensor(lengths, dtype=torch.int32))
    return starts.tolist()


def walked(plan: Plan, starts: list[list[int]], tiles: Sequence[int]) -> list[schedules.Split]:
    """What programs work on that start so: tile/walk.py on the host."""
    found, of_split = [], plan.config.split_tiles
    for program, (b, head_tile, tile, by, left, *_) in enumerate(starts):
        while left > 0:
            count = min(len(range(tile, tiles[b], by)), left)
            found.append(schedules.Split(program, b, head_tile, tile, count, by))
            left, tile, head_tile = left - count - of_split, 0, head_tile + 1
            if head_tile == head_tiles_of_share(plan):
                b, head_tile = b + 1, 0
    return found


def expect_shares_alike(plan: Plan, found: Sequence[schedules.Split], tiles: Sequence[int]) -> None:
    """No program has more than its part of all tiles and of what splits cost."""
    programs, of_split = plan.config.programs, plan.config.split_tiles
    most = -(-sum(n + of_split for n in tiles) * head_tiles_of_share(plan) // programs)
    for program in range(programs):
        own = [x for x in found if x.program == program]
        after_another = max(len(own) - 1, 0)
        assert sum(x.count for x in own) + of_split * after_another <= most


def hold(plan: Plan, lengths: Sequence[int]) -> None:
    """The schedule is that of plain Python, which has every tile once, and says what is merged."""
    problem, config = plan.problem, plan.config
    mask, seqlen_q = problem.mask, problem.seqlen_q
    tiles = [schedules.num_tiles(mask, n, seqlen_q, config.tile_n) for n in lengths]
    starts = starts_of(plan, lengths)
    found = walked(plan, starts, tiles)
    if config.schedule == "proportional":
        expected = schedules.proportional(tiles, config.programs)
    else:
        expected = schedules.ranges(
            tiles, head_tiles_of_share(plan), config.programs, config.split_tiles
        )
    assert found == expected
    if config.schedule != "proportional":
        expect_shares_alike(plan, found, tiles)
    schedules.expect_cover(found, tiles, head_tiles_of_share(plan))
    for b, _, _, _, count, of_sequence, keys, _ in starts:
        assert count == 0 or (of_sequence, keys) == (tiles[b], lengths[b])
        assert count > 0 or b == len(lengths)
    assert [start[7] for start in starts] == schedules.merged(found, tiles, config.programs)
    schedules.expect_slots_apart(found, tiles, config.programs)


LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from((0, 1, 16, 17, 700)))


@settings(max_examples=100)
@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=12),
    mask=st.sampled_from(MASKS),
    seqlen_q=st.sampled_from((1, 4)),
    schedule=st.sampled_from(("ranges", "head_ranges", "proportional")),
    more=st.integers(1, 20),
    of_split=st.sampled_from((0, 1, 3)),
)
@example([0], MASKS[0], 1, "ranges", 1, 1)
@example([0, 0, 0], MASKS[0], 1, "proportional", 5, 1)
@example([5, 700, 0, 16], MASKS[3], 4, "ranges", 3, 3)
def test_every_tile_is_one_programs(
    lengths: list[int], mask: Mask, seqlen_q: int, schedule: str, more: int, of_split: int
) -> None:
    programs = more + len(lengths) * (schedule == "proportional")
    sizes = {"mask": mask, "seqlen_q": seqlen_q}
    hold(plan_of(schedule, len(lengths), programs, of_split, **sizes), lengths)


@pytest.mark.parametrize("schedule", ["ranges", "head_ranges", "proportional"])
@pytest.mark.parametrize("batch", [1, 128, 129, 600])
def test_large_batches(schedule: str, batch: int) -> None:
    """More sequences than are looked at at a time, and lengths of all sizes."""
    lengths = torch.randint(0, 300, (batch,), generator=torch.Generator().manual_seed(3)).tolist()
    lengths[batch // 2] = 20_000
    hold(plan_of(schedule, batch, 132 + batch * (schedule == "proportional")), lengths)


@pytest.mark.parametrize("schedule", ["ranges", "head_ranges"])
def test_sequences_as_long_as_there_can_be(schedule: str) -> None:
    """No number is more than 32 bits have: ranges start where the whole says."""
    lengths = [HUGE, 1, HUGE]
    plan = plan_of(schedule, 3, 100)
    tiles = [-(-n // 16) for n in lengths]
    starts = starts_of(plan, lengths)
    head_tiles = head_tiles_of_share(plan)
    of_split = plan.config.split_tiles
    of_head_tile = [of_split + n for n in tiles]
    total = sum(of_head_tile) * head_tiles
    each, more = divmod(total, 100)
    firsts = [n * each + min(n, more) for n in range(101)]
    for first, last, (b, head_tile, tile, _, count, *_) in zip(
        firsts, firsts[1:], starts, strict=False
    ):
        begin = sum(of_head_tile[:b]) * head_tiles + head_tile * of_head_tile[b]
        found = begin + of_split + tile
        assert found == (first if tile else max(first, begin + of_split))
        assert found + count == last


def test_the_same_lengths_give_the_same_schedule() -> None:
    plan = plan_of("proportional", 4, 20)
    assert starts_of(plan, [5, 900, 0, 33]) == starts_of(plan, [5, 900, 0, 33])
