"""Which rows and which of their keys a program works on: what its roles agree on by themselves.

All roles of a program go through the same items in the same order: row tiles, and where keys are
split the further splits of row tiles. Each works out from the lengths what an item is; nothing is
handed over but tiles.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.prefill.records import Item, ItemTiles
from splitkv.kernels.hopper.primitives.scheduling_fences import count_programs, rematerialized
from splitkv.kernels.schedule_items import load_item
from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.share import Share, parts_of, sequence_share
from splitkv.kernels.tile.visit import cut, tile_and_lane, tile_at, tiles_seen


@gluon.jit
def find_sequence(cu_ptr, tile, batch, CONFIG: gl.constexpr):
    """Finds the sequence of a row tile of packed queries. Sequence b starts at tile cu[b] *
    packed_heads // TILE_M + b, as in tile/visit.py."""
    # every warp looks at all sequences, so that nothing has to be added up across warps
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    b = tile * 0
    for past in range(1, batch + 1, 128):
        offs = past + gl.arange(0, 128, layout=layout)
        starts = gl.load(cu_ptr + offs, mask=offs <= batch, other=0)
        before = starts * CONFIG.packed_heads // CONFIG.tile_m + offs <= tile
        before = before & (offs <= batch)
        b += gl.sum(before.to(gl.int32), 0)
    return b


@gluon.jit
def item_at_grid(batch, r, CONFIG: gl.constexpr):
    """Computes the r-th Item of this program from its place in the grid, without a division before
    the first copy."""
    sequence = gl.program_id(2)
    zero = sequence * 0
    len_q = zero + batch.seqlen_q
    len_k = zero + batch.keys.seqlen_k
    exists = None
    if batch.items is not None:
        sequence += r * gl.num_programs(2)
        exists = sequence < batch.batch  # else it has no rows, no keys, and no scales to be read
        len_q = gl.where(exists, len_q, 0)
        len_k = gl.where(exists, len_k, 0)
    if batch.keys.lens_ptr is not None:
        if exists is None:
            len_k = gl.load(batch.keys.lens_ptr + sequence)
        else:
            len_k = gl.load(batch.keys.lens_ptr + sequence, mask=exists, other=0)
    return Item(
        b=sequence,
        sequence=sequence,
        split=gl.program_id(0),
        head=gl.program_id(1) * CONFIG.packed_heads,
        tile=zero,
        first_q=zero,
        len_q=len_q,
        first_k=zero,
        len_k=len_k,
    )


@gluon.jit
def item_at(batch, index, CONFIG: gl.constexpr):
    """Computes an Item: number `index` among all, or the one of this program where the grid says
    which."""
    if batch.splitting.items_ptr is not None:
        item = item_of_schedule(batch, index, CONFIG)
    elif batch.by_grid is None:
        item = item_of_number(batch, index, CONFIG)
    else:
        item = item_at_grid(batch, index, CONFIG)
    return item


@gluon.jit
def item_of_schedule(batch, index, CONFIG: gl.constexpr):
    """The Item of number `index` of those that a schedule lists: all heads of an entry, then those
    of the next."""
    entry = index // batch.lane_heads
    row = load_item(batch.splitting.items_ptr, entry)
    head = index % batch.lane_heads * CONFIG.packed_heads
    first_k = index * 0
    return Item(
        b=index * 0,
        sequence=row.sequence,
        split=entry,
        head=head,
        tile=row.tile,
        first_q=row.first_q,
        len_q=row.len_q,
        first_k=first_k,
        len_k=row.len_k,
    )


@gluon.jit
def item_of_number(batch, index, CONFIG: gl.constexpr):
    """The Item of number `index` among all.

    The last row tiles of sequences are the heaviest. They come first among the last lanes that go
    together, and last, first, .. among those before, so that neighbours always weigh alike. After
    all row tiles come the further splits of those that a sequence of max_tokens tokens has.
    """
    PACK: gl.constexpr = CONFIG.packed_heads
    TILE_M: gl.constexpr = CONFIG.tile_m
    split = index * 0
    tiles, lanes = (
        rematerialized(batch.tiles, batch.scarce),
        rematerialized(batch.lanes, batch.scarce),
    )
    width, lane_heads = rematerialized(batch.width, batch.scarce), batch.lane_heads
    row_tiles = tiles * lanes
    if batch.splitting.num_splits is None or index < row_tiles:
        tile, lane = tile_and_lane(index, tiles, lanes, width)
        together = index // (tiles * width)  # known from above: lane // width
        if ((lanes - 1) // width - together) % 2 == 0:
            tile = tiles - 1 - tile
        head = lane % lane_heads * PACK
        sequence = lane // lane_heads
        if batch.cu_q_ptr is not None:
            sequence = find_sequence(batch.cu_q_ptr, tile, batch.batch, CONFIG)
            tile -= gl.load(batch.cu_q_ptr + sequence) * PACK // TILE_M + sequence
    else:
        number = index - row_tiles
        max_tokens = rematerialized(batch.splitting.max_tokens, batch.scarce)
        heads, sequences = (
            rematerialized(lane_heads, batch.scarce),
            rematerialized(batch.batch, batch.scarce),
        )
        split_tiles = (max_tokens * PACK + TILE_M - 1) // TILE_M
        tile = number % split_tiles
        number = number // split_tiles
        head = number % heads * PACK
        number = number // heads
        sequence = number % sequences
        split = number // sequences + 1
    b = sequence
    first_q = index * 0
    first_k = index * 0
    len_q = rematerialized(batch.seqlen_q, batch.scarce)
    len_k = rematerialized(batch.keys.seqlen_k, batch.scarce)
    exists = sequence < batch.batch  # else: what lies after the last sequence, which has no keys
    if batch.cu_q_ptr is not None:
        b = index * 0
        first_q = gl.load(batch.cu_q_ptr + sequence)
        end_q = gl.load(batch.cu_q_ptr + sequence + 1, mask=exists, other=0)
        len_q = gl.where(exists, end_q, batch.total_q) - first_q
        len_k = gl.where(exists, len_k, 0)
    if batch.keys.cu_ptr is not None:
        first_k = gl.load(batch.keys.cu_ptr + sequence)
        end_k = gl.load(batch.keys.cu_ptr + sequence + 1, mask=exists, other=0)
        len_k = gl.where(exists, end_k - first_k, 0)
    if batch.keys.lens_ptr is not None:
        len_k = gl.load(batch.keys.lens_ptr + sequence, mask=exists, other=0)
    return Item(b, sequence, split, head, tile, first_q, len_q, first_k, len_k)


@gluon.jit
def right_bound(batch):
    """The right bound of the mask, or None."""
    right = batch.bounds.right
    if right is not None:
        right = rematerialized(right, batch.scarce)
    return right


@gluon.jit
def tiles_of_item(batch, item, CONFIG: gl.constexpr):
    """The ItemTiles of an Item."""
    t_first, t_last = token_range(item.tile, item.len_q, CONFIG.packed_heads, CONFIG.tile_m)
    shift = item.len_k - item.len_q
    bounds = Bounds(batch.bounds.left, right_bound(batch), batch.bounds.sink_tokens)
    visit = tiles_seen(bounds, shift + t_first, shift + t_last, item.len_k, CONFIG.tile_n)
    is_whole = item.split == item.split
    steps = gl.maximum(visit.count, 1)
    if batch.splitting.items_ptr is not None:
        row = load_item(batch.splitting.items_ptr, item.split)
        is_whole = row.splits == 1
        visit = cut(visit, row.split, (visit.count + row.splits - 1) // row.splits)
        steps = gl.maximum(visit.count, 1)
    elif batch.splitting.num_splits is not None:
        split_tiles = batch.splitting.split_tiles
        if split_tiles is not None:
            split_tiles = rematerialized(split_tiles, batch.scarce)
        share = Share(rematerialized(batch.splitting.num_splits, batch.scarce), split_tiles, None)
        per = sequence_share(share, visit.count)
        per = gl.where(
            item.len_q <= rematerialized(batch.splitting.max_tokens, batch.scarce), per, steps
        )
        if batch.by_grid is None:
            splits = parts_of(visit.count, per)
            is_whole = splits == 1
            exists = item.split < splits
        else:  # no division before the first copy
            is_whole = visit.count <= per
            exists = (item.split == 0) | (item.split * per < visit.count)
        visit = cut(visit, item.split, per)
        steps = gl.where(exists, gl.maximum(visit.count, 1), 0)
    masked_steps = visit.count - (visit.middle_last - visit.middle_first)
    return ItemTiles(visit, steps, masked_steps, is_whole)


@gluon.jit
def tile_of_step(tiles, i):
    """Computes the tile of keys of step i of an item: those in which the mask is evaluated come
    first."""
    visit = tiles.visit
    inner = tile_at(visit, i - tiles.masked_steps + visit.middle_first, "middle")
    return gl.where(i < tiles.masked_steps, tile_at(visit, i, "edges"), inner)


@gluon.jit
def round_count(batch):
    """Computes in how many rounds the programs take an item each."""
    if batch.by_grid is None:
        count = count_programs(batch.scarce)
        rounds = (rematerialized(batch.items, batch.scarce) + count - 1) // count
    else:
        rounds = gl.program_id(0) * 0 + (1 if batch.items is None else batch.items)
    return rounds


@gluon.jit
def index_in_round(batch, r):
    """Computes the number of this program's item in round r. Rounds run alternately up and down,
    which spreads the heavy items."""
    if batch.by_grid is None:
        last = count_programs(batch.scarce) - 1
        pid = gl.program_id(0)
        index = r * (last + 1) + gl.where(r % 2 == 0, pid, last - pid)
    else:
        index = gl.program_id(0) * 0 + r
    return index


@gluon.jit
def has_number(batch, index):
    """Whether there is an item with this number."""
    if batch.by_grid is None:
        ok = index < batch.items
    else:
        ok = index == index
    return ok


@gluon.jit
def has_rows(item, CONFIG: gl.constexpr):
    """Whether the row tile of an item begins before the last row of its sequence."""
    return item.tile * CONFIG.tile_m < item.len_q * CONFIG.packed_heads
