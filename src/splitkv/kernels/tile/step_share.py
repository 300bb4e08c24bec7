"""The share of a program in a decode step, found from the lengths.

Computes, for program p of P, a Start (walk.py). With T[b] the tiles that sequence b visits, one at
least, and H the head tiles that a share goes through:

    range_share         every head tile of sequence b is C + T[b] places: C that a split costs
                        (`split_tiles`), then its tiles. All of them, one behind the other, are
                        W = H * sum_b (C + T[b]); program p has the tiles among those from
                        p * (W / P) on: each as many places as any other, or one more
    proportional_share  sequence b has splits in proportion to T[b], rounded up; split s of n has
                        the tiles s, s + n, s + 2n, ...; those of about the greatest size come
                        first, then those of about half of it, and so on: one a program

Every program can find its own share, so that decode needs no launch before it; all of them find it
by the same functions, whoever asks. A program goes through the lengths so many at a time as there
are `lanes`, and twice; for ranges once, where all of them are as many. All are integers: the same
lengths give the same shares.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from splitkv.kernels.compile_time import CompileTimeRecord
from splitkv.kernels.tile.walk import (
    Start,
    counted_tiles,
    keys_of_step,
    load_start,
)

SEQUENCES = tl.constexpr(128)  # that a program looks at at a time
CLASSES = tl.constexpr(4)  # of sizes of splits, each of half as many tiles as the one before


@triton.jit
def share_of(starts_ptr, step, program, lanes, FIND: tl.constexpr, TILE_N: tl.constexpr):
    """The Start of a program of a DecodeStep, as a schedule says it, or where there is none found.

    starts_ptr   [programs, 8] int32, or None; lanes: 0, 1, 2, ... [SEQUENCES]; FIND: of a ShareRule
    """
    if starts_ptr is None:
        start = FIND(step, program, lanes, TILE_N)
    else:
        start = load_start(starts_ptr, program)
    return start


@triton.jit
def tiles_of_sequences(step, offs_b, TILE_N: tl.constexpr):
    """Tiles of sequences `offs_b`, 0 beyond the batch."""
    here = offs_b < step.batch
    keys = keys_of_step(step, offs_b, here)
    return tl.where(here, counted_tiles(step.bounds, keys, step.seqlen_q, TILE_N), 0)


@triton.jit
def tiles_of_batch(step, lanes, TILE_N: tl.constexpr):
    """Tiles of all sequences."""
    total = step.batch * 0
    for first in range(0, step.batch, lanes.shape[0]):
        total += tl.sum(tiles_of_sequences(step, first + lanes, TILE_N), 0)
    return total


@triton.jit
def tiles_of_sequence(step, sequence, here, TILE_N: tl.constexpr):
    """(Tiles, keys) of a sequence, where it is here."""
    keys = keys_of_step(step, sequence, here)
    return counted_tiles(step.bounds, keys, step.seqlen_q, TILE_N), keys


# --- ranges ------------------------------------------------------------------------------------


@triton.jit
def first_of_range(p, each, more):
    """The first place of program p where programs have `each`, the first `more` one more."""
    return p * each + tl.minimum(p, more)


@triton.jit
def program_of_place(place, each, more):
    """The program that has a place."""
    behind = place - more * (each + 1)
    return tl.where(behind < 0, place // (each + 1), more + behind // tl.maximum(each, 1))


@triton.jit
def of_head_tiles(step, places):
    """So many places of each head tile that a share goes through, together."""
    if step.head_tiles is not None:
        places *= step.head_tiles
    return places


@triton.jit
def shared_out(step, total):
    """(How many of `total` places every program has, how many programs have one more)."""
    each = total // step.programs
    if step.head_tiles is None:
        each = (total.to(tl.uint32) // step.programs.to(tl.uint32)).to(tl.int32)
    return each, total - each * step.programs


@triton.jit
def places_of_sequences(step, offs_b, TILE_N: tl.constexpr):
    """Places that sequences `offs_b` take in all of their head tiles, 0 beyond the batch."""
    tiles = tiles_of_sequences(step, offs_b, TILE_N)
    return tl.where(offs_b < step.batch, of_head_tiles(step, tiles + step.split_tiles), 0)


@triton.jit
def behind_place(places, end, place):
    """(Sequences, their places) of those of [.] places that end where a place is, or before."""
    behind = (end <= place) & (places > 0)
    return tl.sum(behind.to(tl.int32), 0), tl.sum(tl.where(behind, places, 0), 0)


@triton.jit
def range_share(step, program, lanes, TILE_N: tl.constexpr):
    """The Start of a program that has a range of all places."""
    if step.batch <= lanes.shape[0]:
        places = places_of_sequences(step, lanes, TILE_N)
        each, more = shared_out(step, tl.sum(places, 0))
        first = first_of_range(program, each, more)
        sequence, begin = behind_place(places, tl.cumsum(places, 0), first)
    else:
        tiles = tiles_of_batch(step, lanes, TILE_N)
        total = of_head_tiles(step, tiles + step.batch * step.split_tiles)
        each, more = shared_out(step, total)
        first = first_of_range(program, each, more)
        sequence = program * 0
        begin = program * 0
        before = program * 0
        for passed in range(0, step.batch, lanes.shape[0]):
            places = places_of_sequences(step, passed + lanes, TILE_N)
            many, theirs = behind_place(places, before + tl.cumsum(places, 0), first)
            sequence += many
            begin += theirs
            before += tl.sum(places, 0)
    last = first_of_range(program + 1, each, more)

    # the head tile that the range starts in, and its first tile among the range's places
    tiles, keys = tiles_of_sequence(step, sequence, first < last, TILE_N)
    head_tile = program * 0
    if step.head_tiles is not None:
        head_tile = (first - begin) // (tiles + step.split_tiles)
    begin += head_tile * (tiles + step.split_tiles) + step.split_tiles  # of its tiles
    tile = tl.maximum(first - begin, 0)
    count = tl.maximum(last - begin - tile, 0)
    here = count > 0
    sequence = tl.where(here, sequence, step.batch)

    # splits that are merged: a range that starts inside a head tile which the range before begins
    is_second = here & (tile > 0) & (first_of_range(program - 1, each, more) <= begin)
    merged = program_of_place(begin + tiles - 1, each, more) - program + 2
    merged = tl.where(is_second, merged, 0)
    by = 1 if step.head_tiles is None else program * 0 + 1
    return Start(sequence, head_tile, tile, by, count, tiles, keys, merged)


# --- proportional ------------------------------------------------------------------------------


@triton.jit
def proportional_splits(tiles, total, spare):
    """Splits of sequences of so many tiles [.], where `spare` splits are shared out over `total`
    tiles: at least one and at most one a tile."""
    # splits a tile, in fixed point and rounded down: exact while tiles * total < 1 << 40
    a_tile = (spare.to(tl.int64) << 40) // tl.maximum(total, 1).to(tl.int64)
    splits = (tiles.to(tl.int64) * a_tile + ((1 << 40) - 1)) >> 40
    return tl.maximum(tl.minimum(splits, tiles.to(tl.int64)), 1).to(tl.int32)


@triton.jit
def size_class(size, greatest):
    """How often the greatest size of a split is halved, rounded down, before it is below a size."""
    halved = (size * 2 <= greatest).to(tl.int32) + (size * 4 <= greatest) + (size * 8 <= greatest)
    return tl.minimum(halved, CLASSES - 1)


@triton.jit
def proportional_share(step, program, lanes, TILE_N: tl.constexpr):
    """The Start of a program that has one of the splits in proportion to tiles."""
    total = tiles_of_batch(step, lanes, TILE_N)
    spare = step.programs - step.batch
    greatest = (total + spare - 1) // spare

    # the sequence of a program's split, and the program of that sequence's first one
    sequence = program * 0
    first = program * 0
    before = program * 0
    for which in tl.static_range(CLASSES):
        for passed in range(0, step.batch, lanes.shape[0]):
            offs_b = passed + lanes
            tiles_b = tiles_of_sequences(step, offs_b, TILE_N)
            splits_b = proportional_splits(tiles_b, total, spare)
            size_b = (tiles_b + splits_b - 1) // splits_b
            here = (size_class(size_b, greatest) == which) & (offs_b < step.batch)
            splits_b = tl.where(here, splits_b, 0)
            end = before + tl.cumsum(splits_b, 0)
            own = (end > program) & (end - splits_b <= program)
            sequence += tl.sum(tl.where(own, offs_b, 0), 0)
            first += tl.sum(tl.where(own, end - splits_b, 0), 0)
            before += tl.sum(splits_b, 0)
    here = program < before
    sequence = tl.where(here, sequence, step.batch)
    tiles, keys = tiles_of_sequence(step, sequence, here, TILE_N)
    splits = proportional_splits(tiles, total, spare)
    tile = tl.where(here, program - first, 0)
    count = tl.where(here, (tiles - tile + splits - 1) // splits, 0)
    merged = tl.where(here & (tile == 1), splits, 0)
    return Start(sequence, program * 0, tile, splits, count, tiles, keys, merged)


class ShareRule(CompileTimeRecord):
    """How programs share a step: `find` finds the Start of one of them."""

    find: Any


RULES = {
    "ranges": ShareRule(find=range_share),
    "head_ranges": ShareRule(find=range_share),
    "proportional": ShareRule(find=proportional_share),
}
"""The rule of each value of `Config.schedule` that has a schedule of the step."""
