"""Whose rows, which of their keys: what the warps of `hopper_prefill` agree on by themselves.

The warp that has tiles copied and the warpgroups that multiply them go through the same items in
the same order: row tiles, and where keys are cut the further parts of row tiles. Each works out
from the lengths what an item is; nothing is handed over but tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.known import again, programs
from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.share import Share, parts_of, sequence_share
from splitkv.kernels.tile.visit import cut, tile_and_lane, tile_at, tiles_seen


class Keys(NamedTuple):
    """Where the keys of a sequence are, and how many.

    cu_ptr    [batch + 1] int32 of packed keys, or None; lens_ptr: [batch] int32, or None
    table_ptr [batch, max_pages] int32, or None; stride_table between sequences
    behind    not None: behind the last key of a sequence memory may hold anything
    seqlen_k  keys of each sequence where nothing else says
    apart     not None: keys are in pages and values are not, [batch, keys, heads, dim]
    """

    cu_ptr: Any
    lens_ptr: Any
    table_ptr: Any
    stride_table: Any
    behind: Any
    seqlen_k: Any
    apart: Any = None


class Cutting(NamedTuple):
    """`parts`, `size` and `most_q` of kernels/prefill.py; parts None: nothing is cut."""

    parts: Any
    size: Any
    most_q: Any


class Work(NamedTuple):
    """What all items have in common.

    cu_q_ptr              [batch + 1] int32, or None: dense
    keys                  Keys
    bounds, scoring       see tile/band.py and tile/weight.py
    cutting               Cutting
    seqlen_q              tokens of each sequence where dense
    total_q               tokens of all sequences where packed
    lane_heads            heads of q that are not packed into rows
    tiles, lanes, width   see `tile_and_lane`
    items                 row tiles of all lanes, and further parts
    scarce                None, or: steps want all registers
    placed                None, or: the place of a program in the grid says which item it has, as
                          part, lane of a sequence, sequence; dense, a lane has one row tile, and
                          `items` is how many sequences a program goes through, None: one
    """

    cu_q_ptr: Any
    keys: Any
    bounds: Any
    scoring: Any
    cutting: Any
    seqlen_q: Any
    batch: Any
    total_q: Any
    lane_heads: Any
    tiles: Any
    lanes: Any
    width: Any
    items: Any
    scarce: Any
    placed: Any = None


class Own(NamedTuple):
    """An item: a part of the keys of a row tile.

    b         where its rows are: the sequence, 0 where packed
    sequence  whose they are
    head      of q, the first; tile: number in the sequence
    """

    b: Any
    sequence: Any
    part: Any
    head: Any
    tile: Any
    first_q: Any
    len_q: Any
    first_k: Any
    len_k: Any


@gluon.jit
def sequence_at(cu_ptr, tile, batch, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """Whose row tile: sequence b starts at tile cu[b] * PACK // TILE_M + b, as in `own_tile`."""
    # every warp looks at all sequences, so that nothing has to be added up across warps
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    b = tile * 0
    for past in range(1, batch + 1, 128):
        offs = past + gl.arange(0, 128, layout=layout)
        starts = gl.load(cu_ptr + offs, mask=offs <= batch, other=0)
        before = (starts * PACK // TILE_M + offs <= tile) & (offs <= batch)
        b += gl.sum(before.to(gl.int32), 0)
    return b


@gluon.jit
def placed_item(work, r, PACK: gl.constexpr):
    """The Own of item r of this program: no division stands before the first request."""
    sequence = gl.program_id(2)
    zero = sequence * 0
    len_q = zero + work.seqlen_q
    len_k = zero + work.keys.seqlen_k
    known = None
    if work.items is not None:
        sequence += r * gl.num_programs(2)
        known = sequence < work.batch
        len_q = gl.where(known, len_q, 0)
    if work.keys.lens_ptr is not None:
        if known is None:
            len_k = gl.load(work.keys.lens_ptr + sequence)
        else:
            len_k = gl.load(work.keys.lens_ptr + sequence, mask=known, other=0)
    place = sequence, sequence, gl.program_id(0), gl.program_id(1) * PACK, zero
    return Own(*place, zero, len_q, zero, len_k)


@gluon.jit
def first_item(work, PACK: gl.constexpr):
    """The Own of the first item of this program, None where places do not say it."""
    own = None
    if work.placed is not None:
        own = placed_item(work, 0, PACK)
    return own


@gluon.jit
def own_item(work, index, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """The Own of item `index`, of all or, where programs have places, of this one's."""
    if work.placed is None:
        own = numbered_item(work, index, PACK, TILE_M)
    else:
        own = placed_item(work, index, PACK)
    return own


@gluon.jit
def numbered_item(work, index, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """The Own of item `index` of all.

    The last row tiles of sequences are the heaviest. They come first among the last lanes that go
    together, and last, first, .. among those before, so that neighbours always weigh alike. After
    all row tiles come the further parts of those that a sequence of `most_q` tokens has.
    """
    part = index * 0
    tiles, lanes = again(work.tiles, work.scarce), again(work.lanes, work.scarce)
    width, lane_heads = again(work.width, work.scarce), work.lane_heads
    row_tiles = tiles * lanes
    if work.cutting.parts is None or index < row_tiles:
        tile, lane = tile_and_lane(index, tiles, lanes, width)
        together = index // (tiles * width)  # known from above: lane // width
        if ((lanes - 1) // width - together) % 2 == 0:
            tile = tiles - 1 - tile
        head = lane % lane_heads * PACK
        sequence = lane // lane_heads
        if work.cu_q_ptr is not None:
            sequence = sequence_at(work.cu_q_ptr, tile, work.batch, PACK, TILE_M)
            tile -= gl.load(work.cu_q_ptr + sequence) * PACK // TILE_M + sequence
    else:
        number = index - row_tiles
        most_q = again(work.cutting.most_q, work.scarce)
        heads, batch = again(lane_heads, work.scarce), again(work.batch, work.scarce)
        cut_tiles = (most_q * PACK + TILE_M - 1) // TILE_M
        tile = number % cut_tiles
        number = number // cut_tiles
        head = number % heads * PACK
        number = number // heads
        sequence = number % batch
        part = number // batch + 1
    b = sequence
    first_q = index * 0
    first_k = index * 0
    len_q = again(work.seqlen_q, work.scarce)
    len_k = again(work.keys.seqlen_k, work.scarce)
    known = sequence < work.batch  # else: what lies after the last sequence, which has no keys
    if work.cu_q_ptr is not None:
        b = index * 0
        first_q = gl.load(work.cu_q_ptr + sequence)
        end_q = gl.load(work.cu_q_ptr + sequence + 1, mask=known, other=0)
        len_q = gl.where(known, end_q, work.total_q) - first_q
        len_k = gl.where(known, len_k, 0)
    if work.keys.cu_ptr is not None:
        first_k = gl.load(work.keys.cu_ptr + sequence)
        end_k = gl.load(work.keys.cu_ptr + sequence + 1, mask=known, other=0)
        len_k = gl.where(known, end_k - first_k, 0)
    if work.keys.lens_ptr is not None:
        len_k = gl.load(work.keys.lens_ptr + sequence, mask=known, other=0)
    return Own(b, sequence, part, head, tile, first_q, len_q, first_k, len_k)


@gluon.jit
def own_visit(work, own, PACK: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """(Visit, steps, those of them that ask the mask, which come first, whether this is all of the
    row tile).

    At least one step, and none of a part that the row tile does not have.
    """
    t_first, t_last = token_range(own.tile, own.len_q, PACK, TILE_M)
    shift = own.len_k - own.len_q
    right = work.bounds.right
    if right is not None:
        right = again(right, work.scarce)
    bounds = Bounds(work.bounds.left, right, work.bounds.sink_tokens)
    visit = tiles_seen(bounds, shift + t_first, shift + t_last, own.len_k, TILE_N)
    whole = own.part == own.part
    steps = gl.maximum(visit.count, 1)
    if work.cutting.parts is not None:
        size = work.cutting.size
        if size is not None:
            size = again(size, work.scarce)
        share = Share(again(work.cutting.parts, work.scarce), size, None)
        per = sequence_share(share, visit.count)
        per = gl.where(own.len_q <= again(work.cutting.most_q, work.scarce), per, steps)
        if work.placed is None:
            parts = parts_of(visit.count, per)
            whole = parts == 1
            exists = own.part < parts
        else:  # no division before the first request
            whole = visit.count <= per
            exists = (own.part == 0) | (own.part * per < visit.count)
        visit = cut(visit, own.part, per)
        steps = gl.where(exists, gl.maximum(visit.count, 1), 0)
    asking = visit.count - (visit.middle_last - visit.middle_first)
    return visit, steps, asking, whole


@gluon.jit
def tile_of_step(visit, i, asking):
    """The tile of keys of an item's step i."""
    inner = tile_at(visit, i - asking + visit.middle_first, False)
    return gl.where(i < asking, tile_at(visit, i, True), inner)


@gluon.jit
def round_count(work):
    """How often the programs take an item each."""
    if work.placed is None:
        count = programs(work.scarce)
        rounds = (again(work.items, work.scarce) + count - 1) // count
    else:
        rounds = gl.program_id(0) * 0 + (1 if work.items is None else work.items)
    return rounds


@gluon.jit
def index_in_round(work, r):
    """The item of this program: rounds go forth and back, which spreads the heavy ones."""
    if work.placed is None:
        last = programs(work.scarce) - 1
        pid = gl.program_id(0)
        index = r * (last + 1) + gl.where(r % 2 == 0, pid, last - pid)
    else:
        index = gl.program_id(0) * 0 + r
    return index


@gluon.jit
def has_number(work, index):
    """Whether there is an item of that number."""
    if work.placed is None:
        ok = index < work.items
    else:
        ok = index == index
    return ok


@gluon.jit
def is_item(work, own, index, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """Whether there is an item of that number, and it has rows."""
    return has_number(work, index) & (own.tile * TILE_M < own.len_q * PACK)
