"""A ring of tiles of keys and values in shared memory, filled by TMA.

One thread asks for whole tiles. Pages smaller than a tile arrive as boxes of one page, written
where the tile has its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from splitkv.kernels.hopper.effect import act

# Renamed between Triton 3.6 and 3.9.
_memory = gl.shared_memory_descriptor
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Pool(NamedTuple):
    """TMA descriptors of K and V as [outer, inner, heads, dim], a box of keys of one head at a
    time, and the page table that gives `outer`; None: it is the sequence.

    k_steps   where rows are gathered by all threads instead, k and v are pointers, and so many
              elements are between two of each of the first three dimensions; v_steps: of V
    """

    k: Any
    v: Any
    table_ptr: Any
    stride_table: Any
    k_steps: Any
    v_steps: Any


@gluon.constexpr_function
def tile_layout(tile_n, dim, box):
    """Boxes of `box` rows in TMA's swizzle, one after another, as a tile [tile_n, dim].

    The swizzle is that of 128 bytes, or of 64 where rows are no longer.
    """
    log_box, log_dim, log_tile = (n.bit_length() - 1 for n in (box, dim, tile_n))
    narrow = 1 if dim == 32 else 0
    bases = [[0, 1 << i] for i in range(6 - narrow)]  # 64 elements of a row,
    bases += [[1, 0]] * narrow
    # their groups of 8 permuted by the row
    bases += [[1 << i, 8 << (i - narrow)] for i in range(narrow, 3)]
    bases += [[1 << i, 0] for i in range(3, log_box)]
    bases += [[0, 1 << i] for i in range(6, log_dim)]
    bases += [[1 << i, 0] for i in range(log_box, log_tile)]
    return gl.SharedLinearLayout(bases, [], 1024)


@gluon.constexpr_function
def keys_of_box(shape):
    """Of [1, keys, 1, dim], or [1, 1, panels, keys, columns]."""
    return shape[1] if len(shape) == 4 else shape[3]


@gluon.constexpr_function
def columns_of_box(shape):
    return shape[3] if len(shape) == 4 else shape[2] * shape[4]


@gluon.jit
def allocate_ring(desc, SLOTS: gl.constexpr, TILE_N: gl.constexpr):
    """Shared memory for tiles, as boxes [slots * boxes, *box] and as tiles [slots, TILE_N, dim]."""
    BOX: gl.constexpr = keys_of_box(desc.block_type.shape)
    DIM: gl.constexpr = columns_of_box(desc.block_type.shape)
    shape: gl.constexpr = [SLOTS * (TILE_N // BOX)] + desc.block_type.shape
    boxes = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    tiles = reinterpret(boxes, desc.dtype, [SLOTS, TILE_N, DIM], tile_layout(TILE_N, DIM, BOX))
    return boxes, tiles


@gluon.constexpr_function
def rows_of_threads(dim, warps):
    """The layout of rows [keys, dim] of 16 bits, of which a thread copies 16 bytes."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [warps, 1], [1, 0])


@gluon.jit
def arrivals(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """A barrier for each slot of a ring, which opens when it has been arrived at so often; 0: they
    are not set up."""
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS if COUNT else 0):
        mbarrier.init(arrived.index(n), count=COUNT)
    return arrived


@gluon.jit
def pages_of(pool, tiles, b, tile, keys, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """The page of each key of a tile, for those who gather rows; else None."""
    pages = None
    if pool.k_steps is not None:
        row = pool.table_ptr + b.to(gl.int64) * pool.stride_table
        inside = keys_of_threads(tiles, PAGE_SIZE, TILE_N)
        if TILE_N % PAGE_SIZE == 0:
            entries = row + tile * (TILE_N // PAGE_SIZE) + inside // PAGE_SIZE
        else:
            entries = row + (tile * TILE_N + inside) // PAGE_SIZE
        pages = gl.load(entries, mask=inside < keys - tile * TILE_N, other=0)
    return pages


@gluon.jit
def keys_of_threads(tiles, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """Of each row of a tile that is gathered, its place in the tile; where a tile has whole pages,
    that of its page's first row, which is known when it is compiled."""
    L: gl.constexpr = rows_of_threads(tiles.shape[2], gl.num_warps())
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, L))
    if TILE_N % PAGE_SIZE == 0:
        inside = inside // PAGE_SIZE * PAGE_SIZE
    return inside


@gluon.jit
def first_pages(
    pool,
    tiles_at_slots,
    b,
    tiles,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """`pages_of` the tiles that `fill` asks for."""
    pages = ()
    for n in gl.static_range(SLOTS):
        tile = tile_at(tiles, tiles.first + n * tiles.by)
        of_tile = pages_of(pool, tiles_at_slots, b, tile, keys, PAGE_SIZE, TILE_N)
        pages += (of_tile,)  # type: ignore[assignment]
    return pages


@gluon.jit
def fill_from(
    pool,
    k_tiles,
    v_tiles,
    arrived,
    pages,  # of `first_pages`, loaded for the most keys that there may be; None: not yet
    b,
    h,
    tiles,  # Tiles
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """`fill`, where page numbers may be there."""
    ring = pool, k_tiles, v_tiles, arrived
    if pages is None:
        fill(*ring, b, h, tiles, keys, None, False, PAGE_SIZE, TILE_N, SLOTS)
    else:
        inside = keys_of_threads(k_tiles, PAGE_SIZE, TILE_N)
        for n in gl.static_range(SLOTS):
            i = tiles.first + n * tiles.by
            tile = tile_at(tiles, i)
            if i < tiles.last:
                # behind the last key there may be any number
                of_tile = gl.where(inside < keys - tile * TILE_N, pages[n], 0)
                gather_tile(*ring, n, h, tile, of_tile, PAGE_SIZE)


@gluon.jit
def gather(ptr, steps, tile_at_slot, h, tile, pages, PAGE_SIZE: gl.constexpr):
    """Have the rows of a tile of K or V copied by all threads."""
    TILE_N: gl.constexpr = tile_at_slot.shape[0]
    DIM: gl.constexpr = tile_at_slot.shape[1]
    L: gl.constexpr = rows_of_threads(DIM, gl.num_warps())
    inner = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, L))
    if TILE_N % PAGE_SIZE > 0:
        inner += tile * TILE_N
    columns = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
    near = (inner % PAGE_SIZE) * steps[1] + h * steps[2]
    rows = ptr + (near[:, None] + columns[None, :])
    # both are positive: one instruction
    far = pages.to(gl.uint32).to(gl.uint64) * steps[0].to(gl.uint32).to(gl.uint64)
    async_gather(tile_at_slot, rows + far[:, None])


@gluon.jit
def gather_tile(pool, k_tiles, v_tiles, arrived, slot, h, tile, pages, PAGE_SIZE: gl.constexpr):
    """`ask` where all threads gather; each of them arrives once."""
    gather(pool.k, pool.k_steps, k_tiles.index(slot), h, tile, pages, PAGE_SIZE)
    gather(pool.v, pool.v_steps, v_tiles.index(slot), h, tile, pages, PAGE_SIZE)
    async_copy.mbarrier_arrive(arrived.index(slot), increment_count=False)


@gluon.jit
def ask(
    pool,
    k_boxes,
    v_boxes,
    arrived,
    slot,
    b,
    h,
    tile,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
):
    """Have the keys and values of a tile copied to a slot of the ring."""
    BOX: gl.constexpr = pool.k.block_type.shape[1]
    BOXES: gl.constexpr = TILE_N // BOX
    # boxes of one page side by side, each with some of the columns
    K_PANELS: gl.constexpr = k_boxes.shape[0] // (arrived.shape[0] * BOXES)
    V_PANELS: gl.constexpr = v_boxes.shape[0] // (arrived.shape[0] * BOXES)
    barrier = arrived.index(slot)
    k_bytes: gl.constexpr = K_PANELS * pool.k.block_type.nbytes
    v_bytes: gl.constexpr = V_PANELS * pool.v.block_type.nbytes
    mbarrier.expect(barrier, BOXES * (k_bytes + v_bytes))
    for n in gl.static_range(BOXES):
        outer = b
        inner = tile * TILE_N + n * BOX
        if pool.table_ptr is not None:
            entry = pool.table_ptr + b.to(gl.int64) * pool.stride_table + inner // PAGE_SIZE
            outer = gl.load(entry, mask=inner < keys, other=0)
            inner %= PAGE_SIZE
        for panel in gl.static_range(K_PANELS):
            at = [outer, inner, h, panel * pool.k.block_type.shape[3]]
            box = k_boxes.index((slot * K_PANELS + panel) * BOXES + n)
            async_load(pool.k, at, barrier, box)
        for panel in gl.static_range(V_PANELS):
            at = [outer, inner, h, panel * pool.v.block_type.shape[3]]
            box = v_boxes.index((slot * V_PANELS + panel) * BOXES + n)
            async_load(pool.v, at, barrier, box)


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot after this one, and the phase of its barrier."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def turn_of(j, SLOTS: gl.constexpr):
    """The slot of the j-th tile where there are one or two, and the phase of its barrier: worked
    out, as a register for each is more than some loops have."""
    return j & (SLOTS - 1), (j >> (SLOTS - 1)) & 1


@gluon.jit
def tile_at(tiles, i):
    return gl.where(i < tiles.near, i, i + tiles.skip)


@gluon.jit
def foresee(pool, b, tile, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """Have the page number of a tile brought nearer."""
    if pool.table_ptr is not None:
        page = tile * TILE_N // PAGE_SIZE
        row = pool.table_ptr + b.to(gl.int64) * pool.stride_table
        act("prefetch.global.L1 [$1];", "l", (row + page,))


@gluon.jit
def fill(
    pool,
    k_boxes,
    v_boxes,
    arrived,
    b,
    h,
    tiles,  # Tiles
    keys,
    new_from,  # keys from here on may not be there yet, None: all are
    NEW: gl.constexpr,  # ask for the tiles with such keys, else for the others
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Have as many of the first tiles copied as the ring has slots."""
    for n in gl.static_range(SLOTS):
        i = tiles.first + n * tiles.by
        tile = tile_at(tiles, i)
        wanted = i < tiles.last
        if new_from is not None:
            wanted &= ((tile + 1) * TILE_N > new_from) == NEW
        if wanted:
            if pool.k_steps is None:
                ask(pool, k_boxes, v_boxes, arrived, n, b, h, tile, keys, PAGE_SIZE, TILE_N)
            else:
                pages = pages_of(pool, k_boxes, b, tile, keys, PAGE_SIZE, TILE_N)
                gather_tile(pool, k_boxes, v_boxes, arrived, n, h, tile, pages, PAGE_SIZE)
