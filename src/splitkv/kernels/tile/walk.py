"""The walk of a program over a schedule of a step: from one split to the next.

A schedule (kernels/schedule.py) cuts the tiles of a whole batch into as many shares as there are
programs. A share is a range: it may end inside a sequence, go on with the next head tile, and with
the next sequence. A head tile is a row tile of a KV head.

Every sequence counts as one tile at least, so that what sees no key is written, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import visited_tiles
from splitkv.kernels.tile.new import Tiles, keys_of

START_FIELDS = tl.constexpr(8)  # 32-bit integers of a program in the memory of a schedule


class Start(NamedTuple):
    """Where the share of a program starts, as a schedule says.

    sequence    index in the batch; the batch where the share is empty
    head_tile   number of the head tile among those that the share goes through
    tile        first of the tiles that the sequence's rows visit
    by          how far apart the tiles of a split are
    count       tiles of the whole share, and `split_tiles` for every split after the first
    tiles       tiles of the sequence; keys: its keys
    merged      splits of this head tile that are merged, where this program has the second of them;
                else 0
    """

    sequence: Any
    head_tile: Any
    tile: Any
    by: Any
    count: Any
    tiles: Any
    keys: Any
    merged: Any


class DecodeStep(NamedTuple):
    """A decode step whose tiles are shared out over programs.

    lens_ptr    [batch] int32 keys of each sequence; bounds: of the mask
    head_tiles  that a share goes through; None: one
    programs    how many shares there are
    split_tiles what a split costs beside its tiles: of a Config
    growth      Growth, where programs write new tokens: the lengths are those before them, of which
                there are seqlen_new of a sequence; capacity: keys that it has room for; or None
    """

    lens_ptr: Any
    bounds: Any
    seqlen_q: Any
    batch: Any
    head_tiles: Any
    programs: Any
    split_tiles: Any
    growth: Any = None
    seqlen_new: Any = None
    capacity: Any = None


class Walk(NamedTuple):
    """The split that a program is at.

    sequence, head_tile, tiles, keys   as in Start, of this split
    tile     its first tile; by: how far apart its tiles are
    left     tiles of the share from there on, counted as `Start.count`; the share ends where it is
             not above 0
    """

    sequence: Any
    head_tile: Any
    tile: Any
    by: Any
    left: Any
    tiles: Any
    keys: Any


@triton.jit
def keys_of_step(step, sequence, here):
    """Keys of sequences of a DecodeStep, the new ones included; 0 where not here."""
    return keys_of(step.lens_ptr, step.growth, sequence, here, step.seqlen_new, step.capacity)


@triton.jit
def counted_tiles(bounds, keys, seqlen_q, TILE_N: tl.constexpr):
    """Tiles of sequences of so many keys, one at least: those that some query token visits."""
    tiles, near, skip = visited_tiles(bounds, keys - seqlen_q, keys - 1, keys, TILE_N)
    return tl.maximum(tiles, 1)


@triton.jit
def store_start(starts_ptr, program, start):
    """Stores the Start of a program."""
    at = starts_ptr + program * START_FIELDS
    tl.store(at, start.sequence)
    tl.store(at + 1, start.head_tile)
    tl.store(at + 2, start.tile)
    tl.store(at + 3, start.by)
    tl.store(at + 4, start.count)
    tl.store(at + 5, start.tiles)
    tl.store(at + 6, start.keys)
    tl.store(at + 7, start.merged)


@triton.jit
def load_start(starts_ptr, program):
    """The Start of a program."""
    at = starts_ptr + program * START_FIELDS
    return Start(
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
def first_walk(start):
    """The Walk of a program at its first split."""
    return Walk(
        start.sequence,
        start.head_tile,
        start.tile,
        start.by,
        start.count,
        start.tiles,
        start.keys,
    )


@triton.jit
def split_length(walk):
    """Tiles of the split that a program is at."""
    return tl.minimum((walk.tiles - walk.tile + walk.by - 1) // walk.by, walk.left)


@triton.jit
def tiles_of_split(walk, bounds, seqlen_q, TILE_N: tl.constexpr):
    """The Tiles of the split that a program is at, of those that its sequence's rows visit."""
    keys = walk.keys
    count, near, skip = visited_tiles(bounds, keys - seqlen_q, keys - 1, keys, TILE_N)
    last = tl.minimum(walk.tile + split_length(walk) * walk.by, count)
    return Tiles(walk.tile, tl.maximum(last, walk.tile), walk.by, near, skip)


@triton.jit
def next_split(walk, step, TILE_N: tl.constexpr):
    """The Walk behind a split of a DecodeStep; without meaning where the share ends."""
    left = walk.left - split_length(walk) - step.split_tiles
    head_tile = walk.head_tile
    sequence = walk.sequence
    keys = walk.keys
    tiles = walk.tiles
    ends = True
    if step.head_tiles is not None:
        head_tile += 1
        ends = head_tile == step.head_tiles
    if ends:
        head_tile = head_tile * 0
        sequence += 1
        keys = keys_of_step(step, sequence, sequence < step.batch)
        tiles = counted_tiles(step.bounds, keys, step.seqlen_q, TILE_N)
    return Walk(sequence, head_tile, walk.tile * 0, walk.by, left, tiles, keys)


@triton.jit
def head_tile_of_share(step, group, head_tile):
    """Which of a sequence's head tiles a head tile of a share is, of programs of `group`."""
    found = group
    if step.head_tiles is not None:
        found = group * step.head_tiles + head_tile
    return found


@triton.jit
def slot_of_split(walk, program, programs, group):
    """Where the partial of a split is stored, of programs of head tiles `group`.

    A program has at most two splits that are not whole: one that goes on from the program before,
    and one that the next program goes on with.
    """
    return group * 2 * programs + program + tl.where(walk.tile == 0, programs, 0)


@triton.jit
def slots_to_merge(offs_p, program, programs, group):
    """The slots of splits `offs_p` of a head tile whose second split `program` has."""
    first = group * 2 * programs + program - 1
    return first + offs_p + tl.where(offs_p == 0, programs, 0)
