"""The schedule of a step of whole sequences: row tiles of prompts, and pieces of the keys of few
queries, in the order in which programs take them.

Computes the list of what the programs of attention work on, from lengths on the device. An engine's
step has prompts, or chunks of them, beside many sequences of one query or a few. Row tiles of
prompts multiply all the time, and those of few queries wait for memory all the time. So they are
mixed: with P programs at a time, H lanes a row tile, C the tiles of keys of all row tiles
of prompts and S those of sequences of at most `short` queries,

    a piece has max(least, S / further) tiles of keys or fewer, all those of a sequence alike
    the greatest row tile of a prompt, of d tiles, starts when the pieces that are left take
    P d (C / 2 + S) / (C + S) / H tiles; up to there pieces and row tiles take turns evenly

Launches follow that order, as the GPU starts programs by number. Prompts come from the last to the
first, and of each the last row tile, the heaviest, first. Nothing is read by the host, and the list
has one size whatever the lengths are: a graph may hold it.

Shapes      cu_q [batch + 1] int32, lens [batch] int32, 0 included; items [entries, 8] int32
Grid        (entries / TILE_E,); each program goes through the whole batch, TILE_B sequences a step
Traffic     the lengths, three times a program; 32 bytes an entry are written
Numerics    integers: the same lengths give the same schedule, and the same splits
Limits      tiles of the batch below 2^31; as many entries as `ItemSchedule.entries`
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.core.tiles import ceil_div
from splitkv.kernels.host.arguments import Tail, in_order
from splitkv.kernels.host.launch import (
    LatestKernel,
    Launch,
    LaunchOn,
    bind_to_grids,
    launch_latest,
)
from splitkv.kernels.host.sequence_sizes import SequenceLengths, SequenceSizes
from splitkv.kernels.tile.band import Bounds, visited_tiles

ITEM_FIELDS = tl.constexpr(8)  # 32-bit integers of an entry
MAX_STEP, CELLS = 256, 4096  # sequences a step; sequences times entries of a step
INTEGERS = (
    *("batch", "total_q", "left", "right", "sink_tokens", "short", "least", "further"),
    *("entries", "programs", "lanes"),
)
PER_CALL = "items_ptr", "cu_q_ptr", "lens_ptr"
"""The arguments of the kernel that change from call to call."""
OF_LENGTHS = "batch", "total_q", "entries"


class ItemRow(NamedTuple):
    """An entry of the list.

    sequence   index in the batch
    tile       row tile of the sequence
    split      which split of its keys; splits: how many there are
    slot       where the partial of the split is, of a row tile with several; those of one follow
               each other
    first_q, len_q   first token in memory, and tokens, of the sequence; an entry of 0 tokens is
               nobody's; len_k: keys
    """

    sequence: Any
    tile: Any
    split: Any
    splits: Any
    slot: Any
    first_q: Any
    len_q: Any
    len_k: Any


@triton.jit
def load_item(items_ptr, entry):
    """The ItemRow of an entry."""
    at = items_ptr + entry * ITEM_FIELDS
    return ItemRow(
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
    )


@triton.jit
def store_items_row(items_ptr, entry, ok, row):
    """Stores the ItemRow of entries [TILE_E], where ok."""
    at = items_ptr + entry * ITEM_FIELDS
    tl.store(at, row.sequence, mask=ok)
    tl.store(at + 1, row.tile, mask=ok)
    tl.store(at + 2, row.split, mask=ok)
    tl.store(at + 3, row.splits, mask=ok)
    tl.store(at + 4, row.slot, mask=ok)
    tl.store(at + 5, row.first_q, mask=ok)
    tl.store(at + 6, row.len_q, mask=ok)
    tl.store(at + 7, row.len_k, mask=ok)


class StepLengths(NamedTuple):
    """Queries and keys of sequences, and of how few queries keys are split.

    cu_q_ptr   [batch + 1] int32; lens_ptr: [batch] int32
    total_q    rows of q, those behind the last sequence too
    """

    cu_q_ptr: Any
    lens_ptr: Any
    batch: Any
    total_q: Any
    short: Any


@triton.jit
def lengths_at(of, offs_b):
    """(first token, tokens, keys) of sequences `offs_b`. Number `batch` is what lies behind the
    last one, which has no keys; there is nothing beyond."""
    here = offs_b < of.batch
    first_q = tl.load(of.cu_q_ptr + offs_b, mask=offs_b <= of.batch, other=0)
    end_q = tl.load(of.cu_q_ptr + offs_b + 1, mask=here, other=0)
    end_q = tl.where(here, end_q, tl.where(offs_b == of.batch, of.total_q, first_q))
    return first_q, end_q - first_q, tl.load(of.lens_ptr + offs_b, mask=here, other=0)


@triton.jit
def tiles_of_short(of, bounds, len_q, len_k, TILE_N: tl.constexpr):
    """Tiles of keys that the only row tile of a sequence of few queries visits, one at least; 0 of
    other sequences."""
    tiles = visited_tiles(bounds, len_k - len_q, len_k - 1, len_k, TILE_N)[0]
    few = (len_q > 0) & (len_q <= of.short)
    return tl.where(few, tl.maximum(tiles, 1), 0)


@triton.jit
def row_tiles_of_long(of, len_q, PACK: tl.constexpr, TILE_M: tl.constexpr):
    """Row tiles of a sequence of more queries; 0 of other sequences."""
    return tl.where(len_q > of.short, (len_q * PACK + TILE_M - 1) // TILE_M, 0)


@triton.jit
def pieces_of(tiles, piece):
    """Pieces that so many tiles of keys are cut into."""
    return (tiles + piece - 1) // piece


@triton.jit(do_not_specialize=INTEGERS)
def schedule_items(
    items_ptr,  # [entries, 8] int32
    cu_q_ptr,  # [batch + 1] int32
    lens_ptr,  # [batch] int32
    batch,
    total_q,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    short,  # queries of the longest sequences whose keys are split
    least,  # tiles of keys of a piece, unless a sequence has fewer
    further,  # pieces beside one a sequence, at most
    entries,
    programs,  # that the GPU runs at a time
    lanes,  # items of an entry
    PACK: tl.constexpr,  # rows a token
    TILE_M: tl.constexpr,  # of attention
    TILE_N: tl.constexpr,
    TILE_B: tl.constexpr,
    TILE_E: tl.constexpr,
    DEPENDENTS: tl.constexpr,  # early: attention is launched before this grid has ended; in_order
):
    if DEPENDENTS == "early":  # it waits for this grid before it reads anything
        tl.extra.cuda.gdc_launch_dependents()
    bounds = Bounds(left, right, sink_tokens)
    of = StepLengths(cu_q_ptr, lens_ptr, batch, total_q, short)

    # row tiles of prompts, their tiles of keys, most of one; tiles of keys of others
    row_tiles = tl.zeros([TILE_B], tl.int32)
    prompts = tl.zeros([TILE_B], tl.float32)
    heaviest = tl.zeros([TILE_B], tl.int32)
    singles = tl.zeros([TILE_B], tl.int32)
    for step in range(0, batch + 1, TILE_B):
        first_q, len_q, len_k = lengths_at(of, step + tl.arange(0, TILE_B))
        singles += tiles_of_short(of, bounds, len_q, len_k, TILE_N)
        tiles_m = row_tiles_of_long(of, len_q, PACK, TILE_M)
        pos = len_k - len_q
        tokens: tl.constexpr = max(TILE_M // PACK, 1)
        lightest = visited_tiles(bounds, pos, pos + tokens - 1, len_k, TILE_N)[0]
        most = visited_tiles(bounds, len_k - tokens, len_k - 1, len_k, TILE_N)[0]
        most = tl.where(tiles_m > 0, tl.maximum(most, lightest), 0)
        row_tiles += tiles_m
        prompts += tiles_m.to(tl.float32) * (lightest + most).to(tl.float32) * 0.5
        heaviest = tl.maximum(heaviest, most)
    all_row_tiles = tl.sum(row_tiles, 0)
    all_singles = tl.sum(singles, 0)
    piece = tl.maximum(least, (all_singles + further - 1) // further)

    # how many pieces there are, and how many of them come behind the last row tile of a prompt
    pieces = tl.zeros([TILE_B], tl.int32)
    for step in range(0, batch + 1, TILE_B):
        first_q, len_q, len_k = lengths_at(of, step + tl.arange(0, TILE_B))
        pieces += pieces_of(tiles_of_short(of, bounds, len_q, len_k, TILE_N), piece)
    all_pieces = tl.sum(pieces, 0)
    of_prompts = tl.sum(prompts, 0)
    of_singles = all_singles.to(tl.float32)
    behind = programs.to(tl.float32) * tl.max(heaviest, 0).to(tl.float32)
    behind *= (0.5 * of_prompts + of_singles) / tl.maximum(of_prompts + of_singles, 1.0)
    behind *= all_pieces.to(tl.float32) / (lanes * tl.maximum(of_singles, 1.0))
    behind = tl.minimum(behind, all_pieces.to(tl.float32)).to(tl.int32)
    last = all_row_tiles + all_pieces - behind  # entries up to the last row tile of a prompt

    # which of them an entry is
    entry = tl.program_id(0) * TILE_E + tl.arange(0, TILE_E)
    reach = tl.maximum(last, 1).to(tl.int64)
    before = tl.minimum((entry.to(tl.int64) * all_row_tiles + reach - 1) // reach, all_row_tiles)
    after = ((entry + 1).to(tl.int64) * all_row_tiles + reach - 1) // reach
    after = tl.minimum(after, all_row_tiles)
    is_long = after > before
    number = tl.where(is_long, all_row_tiles - 1 - before, entry - before).to(tl.int32)

    # whose it is: sequences have their row tiles, or their pieces, one behind the other
    sequence = entry * 0
    begin = entry * 0
    slot = entry * 0
    seen_long = all_pieces * 0
    seen_short = all_pieces * 0
    for step in range(0, batch + 1, TILE_B):
        offs_b = step + tl.arange(0, TILE_B)
        first_q, len_q, len_k = lengths_at(of, offs_b)
        long_b = row_tiles_of_long(of, len_q, PACK, TILE_M)
        short_b = pieces_of(tiles_of_short(of, bounds, len_q, len_k, TILE_N), piece)
        end_long = seen_long + tl.cumsum(long_b, 0)
        end_short = seen_short + tl.cumsum(short_b, 0)
        end = tl.where(is_long[:, None], end_long[None, :], end_short[None, :])
        passed = (end <= number[:, None]) & (offs_b <= batch)[None, :]  # [TILE_E, TILE_B]
        sequence += tl.sum(passed.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(passed, end, 0), 1))
        slots_b = tl.where(short_b > 1, short_b, 0)
        slot += tl.sum(tl.where(passed, slots_b[None, :], 0), 1)
        seen_long += tl.sum(long_b, 0)
        seen_short += tl.sum(short_b, 0)
    there = entry < all_row_tiles + all_pieces
    sequence = tl.where(there, sequence, batch + 1)
    first_q, len_q, len_k = lengths_at(of, sequence)
    splits = tl.maximum(pieces_of(tiles_of_short(of, bounds, len_q, len_k, TILE_N), piece), 1)
    inside = tl.where(there, number - begin, 0)
    row = ItemRow(
        sequence=tl.where(there, sequence, 0),
        tile=tl.where(is_long, inside, 0),
        split=tl.where(is_long, 0, inside),
        splits=splits,
        slot=slot + tl.where(is_long, 0, inside),
        first_q=first_q,
        len_q=len_q,
        len_k=len_k,
    )
    store_items_row(items_ptr, entry, entry < entries, row)


SHORT = 16  # queries of sequences whose keys are split, at most
PIECES_PER_SM = 6


class ItemRule(NamedTuple):
    """The numbers that a schedule goes by, besides lengths.

    short      queries of the longest sequences whose keys are split
    least      tiles of keys of a piece, unless a sequence has fewer
    further    pieces beside one a sequence, at most
    programs   that the GPU runs at a time; lanes: items of an entry
    pack       rows a token
    """

    short: int
    least: int
    further: int
    programs: int
    lanes: int
    pack: int

    @property
    def slots(self) -> int:
        """Partials of a lane, at most: what has several pieces has at least two."""
        return 2 * self.further

    @property
    def slot_rows(self) -> int:
        """Rows of a partial."""
        return self.short * self.pack


def rule_of(plan: Plan, pack: int, rows: int) -> ItemRule:
    """The ItemRule of a plan.

    pack   heads in the rows of a token; rows: of a warpgroup, which has all of few queries
    """
    problem, config = plan.problem, plan.config
    lanes = problem.num_heads // pack
    return ItemRule(
        short=min(SHORT, rows // pack),
        least=config.split_size // config.tile_n,
        further=ceil_div(PIECES_PER_SM * plan.device.num_sms, lanes),
        programs=plan.device.num_sms,
        lanes=lanes,
        pack=pack,
    )


class ItemSchedule:
    """`schedule_items` bound to one plan.

    early   attention may be launched before it has ended
    """

    def __init__(self, plan: Plan, rule: ItemRule, early: bool) -> None:
        problem, config = plan.problem, plan.config
        left, right, sink_tokens = problem.mask.bounds[:3]
        # the same for all batches that are planned alike, which differ by less than one in 32
        step = min(triton.next_power_of_2(problem.batch + problem.batch // 32 + 1), MAX_STEP)
        self.rule, self.tile_m = rule, config.tile_m
        self.early = early
        self.options = {"num_warps": 4, "enable_fp_fusion": True}
        fixed = {
            "batch": 0,
            "total_q": 0,
            "left": left,
            "right": right,
            "sink_tokens": sink_tokens,
            "short": rule.short,
            "least": rule.least,
            "further": rule.further,
            "entries": 0,
            "programs": rule.programs,
            "lanes": rule.lanes,
            "PACK": rule.pack,
            "TILE_M": config.tile_m,
            "TILE_N": config.tile_n,
            "TILE_B": step,
            "TILE_E": min(CELLS // step, 32),
            "DEPENDENTS": "early" if early else "in_order",
        }
        self.tail = Tail(schedule_items, PER_CALL, fixed, (), OF_LENGTHS)
        self.fixed = fixed
        self.launches: LatestKernel[LaunchOn] = LatestKernel(bind_to_grids)

    def entries(self, of: SequenceLengths) -> int:
        """Entries of the list of a call: there is room for all row tiles, and for all pieces."""
        return self.entries_of(of.total_q, of.batch)

    def entries_of(self, total_q: int, batch: int) -> int:
        """Computes the entries for so many tokens of so many sequences."""
        return total_q * self.rule.pack // self.tile_m + batch + 1 + self.rule.further

    def numel(self, sizes: SequenceSizes) -> int:
        """32-bit integers of the list."""
        return self.entries(sizes.lengths) * ITEM_FIELDS.value

    def arguments(self, sizes: SequenceSizes) -> tuple[int, ...]:
        """Arguments that follow from the lengths of a call, in the order of OF_LENGTHS."""
        lengths = sizes.lengths
        return lengths.batch, lengths.total_q, self.entries(lengths)

    def grid(self, sizes: SequenceSizes) -> tuple[int, int, int]:
        return ceil_div(self.entries(sizes.lengths), self.fixed["TILE_E"]), 1, 1

    def launch(self, items: Any, cu_q: Any, lens: Any, sizes: SequenceSizes) -> Any:
        """Launches it through Triton; the compiled kernel.

        items   [entries * 8] int32 that is written; cu_q [batch + 1], lens [batch] int32
        """
        given = {"items_ptr": items, "cu_q_ptr": cu_q, "lens_ptr": lens}
        given |= self.fixed | dict(zip(OF_LENGTHS, self.arguments(sizes), strict=True))
        return schedule_items[self.grid(sizes)](*in_order(schedule_items, given), **self.options)

    def make(self, operands: Operands, sizes: SequenceSizes) -> tuple[Any, Any]:
        """(a schedule in memory of its own, the compiled kernel), through Triton."""
        x = operands
        items = x.q.new_empty((self.numel(sizes),), dtype=torch.int32)
        return items, self.launch(items, x.cu_seqlens_q, x.cache_seqlens, sizes)

    def variant(self) -> Hashable:
        """A key of the kernel that Triton compiles."""
        return self.tail.variant()

    def relaunch(self, compiled: Any, sizes: SequenceSizes) -> Launch:
        """A function that launches it again: launch(stream, at_items, at_cu_q, at_lens)."""
        tail = self.tail.changed(self.arguments(sizes))
        return launch_latest(self.launches, compiled, self.grid(sizes), tail)
