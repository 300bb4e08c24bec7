"""The schedule of a step of whole sequences, and its merge, in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import schedules
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitkv.core.device import GPUS
from splitkv.core.kv import Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.combine import Final, Partial
from splitkv.kernels.combine_items import ItemMerge
from splitkv.kernels.host.sequence_sizes import ResultLayouts, SequenceLengths, SequenceSizes
from splitkv.kernels.schedule_items import ITEM_FIELDS, ItemRow, ItemRule, ItemSchedule
from splitkv.kernels.tile.visit import Strides

# The interpreter uses what NumPy will drop.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
)
MASKS = (Mask(causal=True), Mask(), Mask(True, 100), Mask(True, 37, -1, 5))
TILE_M, TILE_N = 64, 16
RULE = ItemRule(short=16, least=4, further=12, programs=6, lanes=2, pack=4)
Step = Sequence[tuple[int, int]]
"""Queries and keys of every sequence."""


def plan_of(batch: int, mask: Mask) -> Plan:
    problem = Problem(
        "varlen", batch, 8, 2, 16, 16, 4096, 4096, place=Paged(16), lengths="device", mask=mask
    )
    config = Config(tile_m=TILE_M, tile_n=TILE_N, schedule="items", split_size=RULE.least * TILE_N)
    return Plan(problem, GPUS["h200"], "fixed", "hopper_prefill", config, "a test")


def starts_of(step: Step) -> list[int]:
    return [0, *accumulate(queries for queries, _ in step)]


def sizes_of(step: Step, total: int) -> SequenceSizes:
    """Of a call with so many rows of q."""
    results = ResultLayouts(((), ()), ((), ()), Strides(0, 128, 16), Strides(0, 1, total))
    lengths = SequenceLengths(4096, 4096, total, len(step))
    return SequenceSizes((1, 1, 1), (), lengths, RULE.short, results)


def items_of(step: Step, mask: Mask, behind: int, rule: ItemRule) -> list[ItemRow]:
    """The list that the kernel makes, of a q with `behind` rows after the last sequence."""
    schedule = ItemSchedule(plan_of(len(step), mask), rule, early=False)
    cu = starts_of(step)
    sizes = sizes_of(step, cu[-1] + behind)
    items = torch.full((schedule.numel(sizes),), -7, dtype=torch.int32)
    lens = torch.tensor([keys for _, keys in step], dtype=torch.int32)
    schedule.launch(items, torch.tensor(cu, dtype=torch.int32), lens, sizes)
    return [ItemRow(*row) for row in items.view(-1, ITEM_FIELDS.value).tolist()]


def tiles_of(step: Step, mask: Mask) -> list[int]:
    """Tiles of keys of the whole of each sequence, one at least."""
    return [schedules.num_tiles(mask, keys, queries, TILE_N) for queries, keys in step]


def hold(step: Step, mask: Mask, behind: int = 0, rule: ItemRule = RULE) -> list[ItemRow]:
    """Every row tile is there once, and every piece of the keys of few queries; partials are apart,
    and nothing else is listed."""
    found = items_of(step, mask, behind, rule)
    listed = [row for row in found if row.len_q > 0]
    assert found[: len(listed)] == listed, "what is nobody's comes last"
    cu, tiles = starts_of(step), tiles_of(step, mask)
    few = [0 < queries <= rule.short for queries, _ in step]
    work = sum(n for n, is_few in zip(tiles, few, strict=True) if is_few)
    work += 0 < behind <= rule.short  # a tile at least, of the keys that those rows have not
    piece = max(rule.least, math.ceil(work / rule.further))
    expected = set()
    for b, (queries, keys) in enumerate(step):
        splits = math.ceil(tiles[b] / piece) if few[b] else 1
        row_tiles = 1 if few[b] else math.ceil(queries * rule.pack / TILE_M)
        whole = {(b, tile, split) for tile in range(row_tiles) for split in range(splits)}
        expected |= whole if queries else set()
        for row in listed:
            if row.sequence == b:
                assert (row.splits, row.first_q, row.len_q, row.len_k) == (
                    *(splits, cu[b]),
                    *(queries, keys),
                )
    expected |= {(len(step), tile, 0) for tile in range(math.ceil(behind * rule.pack / TILE_M))}
    assert {(row.sequence, row.tile, row.split) for row in listed} == expected
    assert len(listed) == len(expected)
    slots = [row.slot for row in listed if row.splits > 1]
    assert len({*slots}) == len(slots) and all(0 <= slot < rule.slots for slot in slots)
    for row in listed:
        if row.splits > 1:
            first = next(r for r in listed if (r.sequence, r.split) == (row.sequence, 0))
            assert row.slot == first.slot + row.split
    return listed


QUERIES = st.one_of(st.integers(0, 17), st.integers(1, 90), st.just(1))


@settings(max_examples=120)
@given(
    step=st.lists(st.tuples(QUERIES, st.integers(0, 700)), min_size=1, max_size=14),
    mask=st.sampled_from(MASKS),
    behind=st.sampled_from((0, 0, 1, 16, 17, 80)),
    further=st.sampled_from((1, 12, 500)),
)
@example([(0, 0)], MASKS[0], 0, 1)
@example([(0, 5)] * 3, MASKS[0], 3, 1)
@example([(70, 700), (1, 650), (1, 0), (16, 16)], MASKS[0], 0, 12)
@example([(1, 300)] * 9, MASKS[0], 0, 12)
def test_every_item_is_listed_once(
    step: list[tuple[int, int]], mask: Mask, behind: int, further: int
) -> None:
    step = [(queries, max(queries, keys)) for queries, keys in step]
    hold(step, mask, behind, RULE._replace(further=further))


def test_more_sequences_than_a_step() -> None:
    """A batch that the kernel goes through in several steps."""
    step = [(1 + (b % 7 == 0) * 40, 17 * (b % 50) + 41) for b in range(530)]
    hold(step, MASKS[0], rule=RULE._replace(further=200))


def test_pieces_and_row_tiles_take_turns() -> None:
    """And what is left when the last row tile of a prompt starts fills the programs until that
    ends, as far as there are any."""
    step = [(320, 640), *[(1, 600)] * 60, (320, 640)]
    rule = RULE._replace(further=500)
    listed = hold(step, MASKS[0], rule=rule)
    long = [n for n, row in enumerate(listed) if row.len_q > rule.short]
    assert long[0] == 0 and len(long) == 40
    gaps = [b - a for a, b in pairwise(long)]
    assert max(gaps) - min(gaps) <= 1
    behind = sum(math.ceil(38 / row.splits) for row in listed[long[-1] + 1 :]) * rule.lanes
    assert 20 * rule.programs <= behind <= 60 * rule.programs  # the heaviest has 40
    heavy = [row.tile for n, row in enumerate(listed) if n in long]
    assert heavy == [*reversed(range(20))] * 2


def test_few_pieces_come_behind_prompts() -> None:
    listed = hold([(320, 640), (1, 600)], MASKS[0])
    assert [row.sequence for row in listed] == [0] * 20 + [1] * 10


def test_the_same_lengths_give_the_same_schedule() -> None:
    step = [(70, 700), (1, 650), (1, 9), (16, 16)]
    assert hold(step, MASKS[0]) == hold(step, MASKS[0])


@pytest.mark.parametrize("seed", range(3))
def test_merge(seed: int) -> None:
    """The partials of pieces become results; rows that are no piece's stay."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    step = [(number(5) if number(3) else 40, 40 + number(700)) for _ in range(9)]
    plan, total = plan_of(len(step), MASKS[0]), starts_of(step)[-1]
    schedule = ItemSchedule(plan, RULE, early=False)
    rows = items_of(step, MASKS[0], 0, RULE)
    items = torch.tensor(rows, dtype=torch.int32)
    shape = RULE.lanes, RULE.slots, RULE.slot_rows
    acc, m, l = draw(*shape, 16), draw(*shape), draw(*shape).exp()
    out, lse, sink = draw(total, 8, 16), draw(8, total), draw(8)
    before, lse_before = out.clone(), lse.clone()
    sizes = sizes_of(step, total)
    operands = Operands(out, out, out, sink_logits=sink)
    merge = ItemMerge(plan, schedule, early=False)
    merge.launch(Partial(acc, m, l), Final(out, lse), items, operands, sizes)
    expected, expected_lse = before.clone(), lse_before.clone()
    merged = [row for row in rows if row.len_q and row.splits > 1 and row.split == 0]
    assert merged
    for row in merged:
        for r in range(row.len_q * RULE.pack):
            for lane in range(RULE.lanes):
                head, t = lane * RULE.pack + r % RULE.pack, row.first_q + r // RULE.pack
                at = lane, slice(row.slot, row.slot + row.splits), r
                weight = (m[at] - m[at].max()).exp2()
                top, of_sink = m[at].max() * math.log(2), sink[head]
                of_all = (weight * l[at]).sum()
                denominator = of_all + (of_sink - top).exp()
                expected[t, head] = (weight[:, None] * acc[at]).sum(0) / denominator
                expected_lse[head, t] = top + of_all.log()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
