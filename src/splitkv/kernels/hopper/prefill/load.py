"""The load role: one warp that issues TMA copies of q and of the rings of keys and values.

A tile of keys is one box of TMA. In pages it is boxes of one page, each of 128 bytes a key, as a
tile in TMA's 128-byte swizzle has all its rows for so many columns before those for the next: so
the boxes of many pages make up the tile that the tensor cores take.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.prefill.items import (
    has_number,
    has_rows,
    index_in_round,
    item_at,
    round_count,
    tile_of_step,
    tiles_of_item,
)
from splitkv.kernels.hopper.prefill.records import Progress, TileCopy
from splitkv.kernels.hopper.primitives.named_barriers import wait
from splitkv.kernels.hopper.primitives.tma_ring import async_load, prefetch_page_id
from splitkv.kernels.limits import hopper_prefill_tiles

ROWS = gl.constexpr(hopper_prefill_tiles.ROWS)  # of a warpgroup
ROWS_OF_WARP = gl.constexpr(16)


@gluon.jit
def wait_q_empty(barriers, items):
    """Waits until the place of the next row tile of q has been read; `items` row tiles came
    before."""
    STAGES: gl.constexpr = barriers.q_full.shape[0]
    mbarrier.wait(barriers.q_empty.index(items % STAGES), (items // STAGES & 1) ^ 1)


@gluon.jit
def wait_q_full(barriers, items):
    """Waits until q of the next item has arrived; `items` came before."""
    STAGES: gl.constexpr = barriers.q_full.shape[0]
    mbarrier.wait(barriers.q_full.index(items % STAGES), items // STAGES & 1)


@gluon.jit
def issue_q(loads, item, items, CONFIG: gl.constexpr):
    """Issues the copies of the next row tile of q; `items` came before."""
    maps, boxes = loads.maps, loads.boxes
    ROLES: gl.constexpr = CONFIG.mma_roles
    STAGES: gl.constexpr = loads.barriers.q_full.shape[0]
    stage = items % STAGES
    full = loads.barriers.q_full.index(stage)
    BYTES: gl.constexpr = ROLES * maps.q.block_type.nbytes
    if maps.q_rest is None:
        mbarrier.expect(full, BYTES)
    else:
        mbarrier.expect(full, BYTES + ROLES * maps.q_rest.block_type.nbytes)
    TOKENS: gl.constexpr = maps.q.block_type.shape[1]
    for w in gl.static_range(ROLES):
        t = item.first_q + (item.tile * ROLES + w) * TOKENS
        async_load(maps.q, [item.b, t, item.head, 0], full, boxes.q.index(stage * ROLES + w))
        if maps.q_rest is not None:
            at = [item.b, t, item.head, maps.q.block_type.shape[3]]
            async_load(maps.q_rest, at, full, boxes.q_rest.index(stage * ROLES + w))


@gluon.jit
def page_of(batch, item, key, CONFIG: gl.constexpr):
    """Loads the page of a key; of one that the sequence does not have, any page."""
    row = batch.keys.table_ptr + item.sequence.to(gl.int64) * batch.keys.stride_table
    entry = row + key // CONFIG.page_size
    return gl.load(entry, mask=key < item.len_k, other=0)


@gluon.jit
def issue_operand(
    copy,  # TileCopy
    full,  # the barrier that is told
    stage,
    batch,  # SequenceBatch
    item,  # Item
    tile,
    kv_head,
    ordered,  # not None: this operand is in order, whatever K is
    FIRST: gl.constexpr,  # column
    CONFIG: gl.constexpr,
):
    """Issues the copies of a tile of keys or values [TILE_N, dim]."""
    desc, boxes = copy.desc, copy.boxes
    PAGES: gl.constexpr = batch.keys.table_ptr is not None and ordered is None
    TILE_N: gl.constexpr = copy.tiles.shape[1]
    BOX: gl.constexpr = desc.block_type.shape[1]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    BOXES: gl.constexpr = TILE_N // BOX
    PANELS: gl.constexpr = copy.tiles.shape[2] // COLUMNS
    AT_ONCE: gl.constexpr = min(BOXES, 4)  # look-ups of pages, which else wait for copies
    for first in gl.static_range(0, BOXES, AT_ONCE):
        pages = ()
        if PAGES:
            for n in gl.static_range(AT_ONCE):
                page = page_of(batch, item, tile * TILE_N + (first + n) * BOX, CONFIG)
                pages += (page,)  # type: ignore[assignment]
        for n in gl.static_range(AT_ONCE):
            outer = item.b
            inner = item.first_k + tile * TILE_N + (first + n) * BOX
            if PAGES:
                outer = pages[n]
                inner %= CONFIG.page_size
            if ordered is not None:
                outer = item.sequence
            for panel in gl.static_range(PANELS):
                at = [outer, inner, kv_head, FIRST + panel * COLUMNS]
                box = boxes.index((stage * PANELS + panel) * BOXES + first + n)
                async_load(desc, at, full, box)


@gluon.constexpr_function
def bytes_of_tile(tiles):
    """Bytes of one of the tiles [stages, keys, dim]."""
    return tiles.shape[1] * tiles.shape[2] * tiles.dtype.primitive_bitwidth // 8


@gluon.jit
def issue_k(loads, item, tile, kv_head, stage, CONFIG: gl.constexpr):
    """Issues the copies of a tile of K [TILE_N, head_dim]."""
    maps, boxes, tiles = loads.maps, loads.boxes, loads.tiles
    batch = loads.batch
    full = loads.barriers.k_full.index(stage)
    BYTES: gl.constexpr = bytes_of_tile(tiles.k)
    if maps.k_rest is None:
        mbarrier.expect(full, BYTES)
    else:
        mbarrier.expect(full, BYTES + bytes_of_tile(tiles.k_rest))
        FIRST: gl.constexpr = CONFIG.head_dim_v
        rest = TileCopy(maps.k_rest, boxes.k_rest, tiles.k_rest)
        issue_operand(rest, full, stage, batch, item, tile, kv_head, None, FIRST, CONFIG)
    copy = TileCopy(maps.k, boxes.k, tiles.k)
    issue_operand(copy, full, stage, batch, item, tile, kv_head, None, 0, CONFIG)


@gluon.jit
def issue_v(loads, item, tile, kv_head, stage, CONFIG: gl.constexpr):
    """Issues the copies of a tile of V [TILE_N, head_dim_v]."""
    batch = loads.batch
    full = loads.barriers.v_full.index(stage)
    mbarrier.expect(full, bytes_of_tile(loads.tiles.v))
    copy = TileCopy(loads.maps.v, loads.boxes.v, loads.tiles.v)
    ordered = batch.keys.ordered_values
    issue_operand(copy, full, stage, batch, item, tile, kv_head, ordered, 0, CONFIG)


@gluon.jit
def issue_first_steps(loads, item, CONFIG: gl.constexpr):
    """Issues the copies of q and the first tiles of an item, before the warps have their roles."""
    item_tiles = tiles_of_item(loads.batch, item, CONFIG)
    kv_head = item.head // CONFIG.group
    STEPS: gl.constexpr = CONFIG.issued_first
    for i in gl.static_range(STEPS):
        if i < item_tiles.steps:
            tile = tile_of_step(item_tiles, i)
            issue_k(loads, item, tile, kv_head, i, CONFIG)
            if i == 0:
                issue_q(loads, item, 0, CONFIG)
            issue_v(loads, item, tile, kv_head, i, CONFIG)


@gluon.jit
def issue_step(loads, item, item_tiles, i, kv_head, done, CONFIG: gl.constexpr):
    """Issues the copies of step i of an item, each once its stage is empty. done: the Progress
    before this step."""
    batch, barriers = loads.batch, loads.barriers
    STAGES: gl.constexpr = CONFIG.num_stages
    tile = tile_of_step(item_tiles, i)
    stage = done.steps % STAGES
    phase = (done.steps // STAGES & 1) ^ 1
    if barriers.k_empty is not None:
        mbarrier.wait(barriers.k_empty.index(stage), phase)
    elif done.steps >= STAGES:
        wait(barriers.named.k_empty + stage, barriers.named.k_threads)
    issue_k(loads, item, tile, kv_head, stage, CONFIG)
    if i == 0:
        wait_q_empty(barriers, done.items)
        issue_q(loads, item, done.items, CONFIG)
    after = tile_of_step(item_tiles, gl.minimum(i + 1, item_tiles.steps - 1))
    prefetch_page_id(batch.keys, item.sequence, after, CONFIG.page_size, CONFIG.tile_n)
    mbarrier.wait(barriers.v_empty.index(stage), phase)
    issue_v(loads, item, tile, kv_head, stage, CONFIG)


@gluon.jit
def load_role(loads, CONFIG: gl.constexpr):
    """The load role: issues the copies of q, keys and values of all items, each once there is
    room."""
    batch = loads.batch
    n = gl.program_id(0) * 0
    items = n
    for r in range(round_count(batch)):
        index = index_in_round(batch, r)
        if has_number(batch, index):
            item = item_at(batch, index, CONFIG)
            if has_rows(item, CONFIG):
                item_tiles = tiles_of_item(batch, item, CONFIG)
                kv_head = item.head // CONFIG.group
                first = n * 0
                if CONFIG.issued_first > 0:
                    ISSUED: gl.constexpr = CONFIG.issued_first
                    first = gl.where(r == 0, gl.minimum(ISSUED, item_tiles.steps), 0)
                    n += first
                for i in range(first, item_tiles.steps):
                    issue_step(loads, item, item_tiles, i, kv_head, Progress(n, items), CONFIG)
                    n += 1
                if item_tiles.steps > 0:
                    items += 1
    if CONFIG.dependents == "launched_last":  # `combine` may start, which waits for this grid
        tl.extra.cuda.gdc_launch_dependents()
