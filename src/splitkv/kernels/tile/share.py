"""The share of a program: how the keys of every sequence are cut into splits, computed on the
device.

Every part of a sequence is `tiles_per_part` tiles long, the last one shorter. Three rules give that
number. Each program works it out for itself from the lengths, so nothing is decided on the host
and a captured graph stays right, and balanced, when the lengths change between replays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import visited_tiles


class Share(NamedTuple):
    """The rule: integers known at run time, or None.

    parts     even: every sequence is cut into this many parts, or fewer where it has fewer tiles
    size      fixed: parts of this many tiles, whatever else is in the batch; None: even
    programs  batch: this many parts a head tile, shared out over the whole batch; None: by sequence
    """

    parts: Any
    size: Any
    programs: Any


@triton.jit
def parts_of(tiles, tiles_per_part):
    """Parts that a sequence of so many tiles is cut into; at least one, which may be empty."""
    return tl.maximum((tiles + tiles_per_part - 1) // tiles_per_part, 1)


@triton.jit
def sequence_share(share, tiles):
    """Tiles a part of one sequence by the even or the fixed rule."""
    if share.size is None:
        per = tl.maximum((tiles + share.parts - 1) // share.parts, 1)
    else:
        per = tiles * 0 + share.size
    return per


@triton.jit
def batch_share(
    share,
    bounds,
    keys,  # of each sequence, 0 beyond
    batch,
    seqlen_q,
    t_first,
    t_last,
    offs_b,  # [.] the sequences and beyond
    TILE_N: tl.constexpr,
):
    """Parts, as offs_b, of every sequence by the batch rule, 0 beyond.

    In proportion to the tiles and rounded up, at least one and at most one a tile: so no part has
    more tiles than all of them shared out evenly. Of `programs`, a batch's worth is left for the
    rounding, so that the parts always fit.
    """
    here = offs_b < batch
    pos = keys - seqlen_q
    tiles = visited_tiles(bounds, pos + t_first, pos + t_last, keys, TILE_N)[0]
    tiles = tl.where(here, tl.maximum(tiles, 0), 0).to(tl.int64)  # a length below 0 is none
    total = tl.maximum(tl.sum(tiles, 0), 1)
    # parts a tile, in fixed point and rounded down: exact while tiles * total < 1 << 40
    a_tile = ((share.programs - batch).to(tl.int64) << 40) // total
    parts = tl.minimum((tiles * a_tile + ((1 << 40) - 1)) >> 40, tiles)
    return tl.where(here, tl.maximum(parts, 1), 0).to(tl.int32)


@triton.jit
def part_of_batch(parts_b, offs_b, batch, part):
    """(sequence, which of its parts, how many) of part number `part` of the whole batch.

    The sequence is `batch` where the batch has fewer parts.
    """
    end = tl.cumsum(parts_b, 0)
    before = (end <= part) & (offs_b < batch)
    b = tl.sum(before.to(tl.int32), 0)
    number = part - tl.max(tl.where(before, end, 0), 0)
    return b, number, tl.sum(tl.where(offs_b == b, parts_b, 0), 0)
