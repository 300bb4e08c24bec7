"""A ring of tiles of keys and values in shared memory, filled by TMA.

One thread asks for whole tiles. Pages smaller than a tile arrive as boxes of one page, written
where the tile has its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Renamed between Triton 3.6 and 3.9.
_memory = gl.shared_memory_descriptor
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Pool(NamedTuple):
    """TMA descriptors of K and V as [outer, inner, heads, dim], a box of keys of one head at a
    time, and the page table that gives `outer`; None: it is the sequence.
    """

    k: Any
    v: Any
    table_ptr: Any
    stride_table: Any


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


@gluon.jit
def allocate_ring(desc, SLOTS: gl.constexpr, TILE_N: gl.constexpr):
    """Shared memory for tiles, as boxes [slots * boxes, *box] and as tiles [slots, TILE_N, dim]."""
    BOX: gl.constexpr = desc.block_type.shape[1]
    DIM: gl.constexpr = desc.block_type.shape[3]
    shape: gl.constexpr = [SLOTS * (TILE_N // BOX), 1, BOX, 1, DIM]
    boxes = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    tiles = reinterpret(boxes, desc.dtype, [SLOTS, TILE_N, DIM], tile_layout(TILE_N, DIM, BOX))
    return boxes, tiles


@gluon.jit
def arrivals(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """A barrier for each slot of the ring, which opens when it has been arrived at so often."""
    arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS):
        mbarrier.init(arrived.index(n), count=COUNT)
    return arrived


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
def tile_at(tiles, i):
    return gl.where(i < tiles.near, i, i + tiles.skip)


@gluon.jit
def foresee(pool, b, tile, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """Have the page number of a tile brought nearer."""
    if pool.table_ptr is not None:
        page = tile * TILE_N // PAGE_SIZE
        gl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pool.table_ptr + b.to(gl.int64) * pool.stride_table + page],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


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
            ask(pool, k_boxes, v_boxes, arrived, n, b, h, tile, keys, PAGE_SIZE, TILE_N)
