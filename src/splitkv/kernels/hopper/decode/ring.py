"""The ring of K and V tiles of decode on Hopper: its memory, and the copies into it.

TMA copies tiles, one thread issues for all. Pages smaller than a tile arrive as boxes of one page,
written where the tile has its rows. Boxes of a few keys of 8 bits are so small that issuing them
takes longer than copying: there all warps gather rows, each thread 16 bytes at a time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.decode.layouts import vectors_of_rows
from splitkv.kernels.hopper.primitives.tma_ring import (
    allocate_ldmatrix_tiles,
    allocate_wgmma_tiles,
    async_gather,
    async_load,
    tile_at_place,
    tile_layout,
)


@gluon.jit
def gather_steps(strides, CONFIG: gl.constexpr):
    """Converts Strides of a cache to columns of a stage, for warps that gather rows; else None."""
    steps = None
    if CONFIG.load == "gather":
        COLUMN: gl.constexpr = CONFIG.head_dim // CONFIG.dim_k
        steps = strides.b // COLUMN, strides.t // COLUMN, strides.h // COLUMN
    return steps


# --- memory ------------------------------------------------------------------------------------


@gluon.jit
def allocate_rows(x, DIM: gl.constexpr, CONFIG: gl.constexpr):
    """Allocates stages [num_stages, TILE_N, DIM] whose rows are gathered from pointer x."""
    STAGES: gl.constexpr = CONFIG.num_stages
    TILE_N: gl.constexpr = CONFIG.tile_n
    layout: gl.constexpr = tile_layout(TILE_N, DIM, TILE_N)
    tiles = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, TILE_N, DIM], layout)
    return tiles, tiles


@gluon.jit
def allocate_boxes(x, DIM: gl.constexpr, CONFIG: gl.constexpr):
    """Allocates stages for TMA boxes of descriptor x, to be read by ldmatrix: (boxes, tiles)."""
    boxes, tiles = allocate_ldmatrix_tiles(x, CONFIG.num_stages, CONFIG.tile_n)
    return boxes, tiles


@gluon.jit
def allocate_panels(x, DIM: gl.constexpr, CONFIG: gl.constexpr):
    """Allocates stages for TMA boxes of descriptor x, to be read by wgmma: (boxes, tiles)."""
    boxes, tiles = allocate_wgmma_tiles(x, CONFIG.num_stages, CONFIG.tile_n, DIM)
    return boxes, tiles


# --- tiles by TMA ------------------------------------------------------------------------------


@gluon.jit
def issue_tile(ring, kv, split, stage, tile, CONFIG: gl.constexpr):
    """Issues the TMA copies of the keys and values of a tile into a stage."""
    BOX: gl.constexpr = kv.k.block_type.shape[1]
    BOXES: gl.constexpr = CONFIG.tile_n // BOX
    # boxes of one page side by side, each with some of the columns
    K_PANELS: gl.constexpr = ring.k_boxes.shape[0] // (ring.full.shape[0] * BOXES)
    V_PANELS: gl.constexpr = ring.v_boxes.shape[0] // (ring.full.shape[0] * BOXES)
    full = ring.full.index(stage)
    k_bytes: gl.constexpr = K_PANELS * kv.k.block_type.nbytes
    v_bytes: gl.constexpr = V_PANELS * kv.v.block_type.nbytes
    mbarrier.expect(full, BOXES * (k_bytes + v_bytes))
    for n in gl.static_range(BOXES):
        outer = split.sequence
        inner = tile * CONFIG.tile_n + n * BOX
        if kv.table_ptr is not None:
            row = kv.table_ptr + split.sequence.to(gl.int64) * kv.stride_table
            entry = row + inner // CONFIG.page_size
            outer = gl.load(entry, mask=inner < split.num_keys, other=0)
            inner %= CONFIG.page_size
        for panel in gl.static_range(K_PANELS):
            at = [outer, inner, split.kv_head, panel * kv.k.block_type.shape[3]]
            box = ring.k_boxes.index((stage * K_PANELS + panel) * BOXES + n)
            async_load(kv.k, at, full, box)
        for panel in gl.static_range(V_PANELS):
            at = [outer, inner, split.kv_head, panel * kv.v.block_type.shape[3]]
            box = ring.v_boxes.index((stage * V_PANELS + panel) * BOXES + n)
            async_load(kv.v, at, full, box)


# --- tiles by all threads ----------------------------------------------------------------------


@gluon.jit
def first_row_of_page(DIM: gl.constexpr, CONFIG: gl.constexpr):
    """The place in a tile [TILE_N] of each of its rows; where a tile has whole pages, that of the
    first row of the row's page, which is known when it is compiled."""
    L: gl.constexpr = vectors_of_rows(DIM, gl.num_warps())
    inside = gl.arange(0, CONFIG.tile_n, layout=gl.SliceLayout(1, L))
    if CONFIG.tile_n % CONFIG.page_size == 0:
        inside = inside // CONFIG.page_size * CONFIG.page_size
    return inside


@gluon.jit
def load_page_ids(kv, split, tile, CONFIG: gl.constexpr):
    """Loads the page of each key of a tile [TILE_N], for warps that gather rows; else None."""
    pages = None
    if kv.k_steps is not None:
        row = kv.table_ptr + split.sequence.to(gl.int64) * kv.stride_table
        inside = first_row_of_page(CONFIG.dim_k, CONFIG)
        if CONFIG.tile_n % CONFIG.page_size == 0:
            entries = row + tile * (CONFIG.tile_n // CONFIG.page_size) + inside // CONFIG.page_size
        else:
            entries = row + (tile * CONFIG.tile_n + inside) // CONFIG.page_size
        pages = gl.load(entries, mask=inside < split.num_keys - tile * CONFIG.tile_n, other=0)
    return pages


@gluon.jit
def load_first_page_ids(kv, split, CONFIG: gl.constexpr):
    """Loads the pages of the tiles that the ring holds first: a tuple, a stage each."""
    pages = ()
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        tile = tile_at_place(split.tiles, split.tiles.first + n * split.tiles.by)
        of_tile = load_page_ids(kv, split, tile, CONFIG)
        pages += (of_tile,)  # type: ignore[assignment]
    return pages


@gluon.jit
def gather_rows(ptr, steps, stage_tile, kv_head, tile, pages, CONFIG: gl.constexpr):
    """Copies the rows of a tile of K or V into a stage, by all threads."""
    TILE_N: gl.constexpr = stage_tile.shape[0]
    DIM: gl.constexpr = stage_tile.shape[1]
    L: gl.constexpr = vectors_of_rows(DIM, gl.num_warps())
    inner = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, L))
    if TILE_N % CONFIG.page_size > 0:
        inner += tile * TILE_N
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
    near = (inner % CONFIG.page_size) * steps[1] + kv_head * steps[2]
    rows = ptr + (near[:, None] + columns[None, :])
    # both are positive: one instruction
    far = pages.to(gl.uint32).to(gl.uint64) * steps[0].to(gl.uint32).to(gl.uint64)
    async_gather(stage_tile, rows + far[:, None])


@gluon.jit
def gather_tile(ring, kv, split, stage, tile, pages, CONFIG: gl.constexpr):
    """Copies the keys and values of a tile into a stage; every thread arrives at its barrier."""
    k_tile, v_tile = ring.k_tiles.index(stage), ring.v_tiles.index(stage)
    gather_rows(kv.k, kv.k_steps, k_tile, split.kv_head, tile, pages, CONFIG)
    gather_rows(kv.v, kv.v_steps, v_tile, split.kv_head, tile, pages, CONFIG)
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)


# --- the first tiles ---------------------------------------------------------------------------


@gluon.jit
def copy_tile(ring, kv, split, stage, tile, CONFIG: gl.constexpr):
    """Copies a tile into a stage: one thread issues TMA copies, or all threads gather its rows."""
    if kv.k_steps is None:
        issue_tile(ring, kv, split, stage, tile, CONFIG)
    else:
        pages = load_page_ids(kv, split, tile, CONFIG)
        gather_tile(ring, kv, split, stage, tile, pages, CONFIG)


@gluon.jit
def copy_first_tiles(ring, kv, split, CONFIG: gl.constexpr):
    """Copies the first tiles of a split, as many as the ring has stages."""
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        i = split.tiles.first + n * split.tiles.by
        tile = tile_at_place(split.tiles, i)
        if i < split.tiles.last:
            copy_tile(ring, kv, split, n, tile, CONFIG)


@gluon.jit
def is_before(tile, key, CONFIG: gl.constexpr):
    """Whether all keys of a tile lie before a key."""
    return (tile + 1) * CONFIG.tile_n <= key


@gluon.jit
def has_key_from(tile, key, CONFIG: gl.constexpr):
    """Whether a tile has the key `key` or a later one."""
    return (tile + 1) * CONFIG.tile_n > key


@gluon.jit
def copy_first_tiles_that(selects, key, ring, kv, split, CONFIG: gl.constexpr):
    """Copies those of the first tiles for which `selects` (`is_before` or `has_key_from`) is
    true."""
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        i = split.tiles.first + n * split.tiles.by
        tile = tile_at_place(split.tiles, i)
        wanted = i < split.tiles.last
        wanted &= selects(tile, key, CONFIG)
        if wanted:
            copy_tile(ring, kv, split, n, tile, CONFIG)


@gluon.jit
def gather_first_tiles(ring, kv, split, pages, CONFIG: gl.constexpr):
    """Gathers as many tiles as the ring has stages; pages as of `load_first_page_ids`, loaded for
    the most keys that there may be."""
    inside = first_row_of_page(CONFIG.dim_k, CONFIG)
    STAGES: gl.constexpr = CONFIG.num_stages
    for n in gl.static_range(STAGES):
        i = split.tiles.first + n * split.tiles.by
        tile = tile_at_place(split.tiles, i)
        if i < split.tiles.last:
            # behind the last key there may be any number
            known = gl.where(inside < split.num_keys - tile * CONFIG.tile_n, pages[n], 0)
            gather_tile(ring, kv, split, n, tile, known, CONFIG)
