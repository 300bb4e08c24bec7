"""The prefetch role of persistent decode on Hopper: the memory is busy before shares are found.

A program knows its share only when it has gone through all lengths. Meanwhile one warp prefetches a
tile into the L2 that some program will read: program p takes tile p // batch of sequence p % batch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.launch_name import NAME
from splitkv.kernels.hopper.decode.producer_warp import (
    keep_page_ids,
    load_round,
    page_id_of_lane,
)
from splitkv.kernels.hopper.decode.records import Split
from splitkv.kernels.hopper.decode.split_range import locate_rows_of_head
from splitkv.kernels.hopper.primitives.inline_asm import act
from splitkv.kernels.hopper.primitives.tma_ring import keys_of_box, tile_at_place
from splitkv.kernels.tile.band import visited_tiles
from splitkv.kernels.tile.new import Tiles
from splitkv.kernels.tile.walk import head_tile_of_share, keys_of_step


@gluon.constexpr_function
def prefetch_code(rank):
    """PTX by which one thread of a warp prefetches a box of K and of V, whose maps are the second
    and the third argument of the kernel: of each the map is a parameter, and so is every length and
    stride. Operands: where the box starts."""
    at = ", ".join(f"${1 + n}" for n in reversed(range(rank)))
    box = f"@one cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [map, {{{at}}}];"
    maps = (f"mov.b64 map, {NAME}_param_{n}; cvta.param.u64 map, map; {box}" for n in (1, 2 + 2 * rank))
    start = "{ .reg .pred one; .reg .b64 map; elect.sync _|one, 0xffffffff; "
    return start + " ".join(maps) + " }"


@gluon.jit
def prefetch_early_tile(kv, shares, ROUND: gl.constexpr, CONFIG: gl.constexpr):
    """Prefetches the keys and values of one tile, which no other program of the launch does."""
    step = shares.step
    place = shares.program + ROUND * step.programs
    head_tile = place * 0
    if step.head_tiles is not None:
        head_tile = place % step.head_tiles
        place //= step.head_tiles
    sequence, tile = place % step.batch, place // step.batch
    head_tile = head_tile_of_share(step, shares.group, head_tile)
    kv_head, row_tile = locate_rows_of_head(head_tile, step.seqlen_q, CONFIG)
    keys = keys_of_step(step, sequence, True)
    first = keys - step.seqlen_q
    count, near, skip = visited_tiles(step.bounds, first, keys - 1, keys, CONFIG.tile_n)
    if tile < count:
        tiles = Tiles(tile, tile + 1, 1, near, skip)
        prefetch_tile(kv, Split(sequence, kv_head, tiles, keys, 1), CONFIG)


@gluon.jit
def prefetch_tile(kv, split, CONFIG: gl.constexpr):
    """Prefetches the first tile of a split."""
    BOX: gl.constexpr = keys_of_box(kv.k.block_type.shape)
    BOXES: gl.constexpr = CONFIG.tile_n // BOX
    CODE: gl.constexpr = prefetch_code(len(kv.k.block_type.shape))
    first_n = tile_at_place(split.tiles, split.tiles.first) * CONFIG.tile_n
    if kv.table_ptr is not None:
        keep_page_ids(load_round(kv, split, split.tiles.first, CONFIG), 1)
    many = gl.minimum((split.num_keys - first_n + BOX - 1) // BOX, BOXES)
    for n in range(many):
        key = first_n + n * BOX
        outer = split.sequence
        if kv.table_ptr is not None:
            outer, key = page_id_of_lane(n, 1), key % CONFIG.page_size
        act(CODE, "r,r,r,r,r", (outer, split.kv_head, n * 0, key, n * 0))
