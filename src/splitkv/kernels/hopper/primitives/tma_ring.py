"""A ring of tiles in shared memory, filled by TMA: its memory, its barriers, its order.

Tile n, from 0 on, of a ring of STAGES stages is in stage n % STAGES, which was used n // STAGES
times before. A stage has two mbarriers: `full`, at which copies arrive, and `empty`, at which
whoever has read the tile arrives. A wait for a parity passes once the phase of that parity is over,
so with phase = n // STAGES & 1 who reads waits for full[stage] with `phase`, and who copies waits
for empty[stage] with 1 - phase, which passes at once where the stage has never been used.

The same memory is seen twice: as `boxes`, which TMA fills one at a time, and as `tiles`, which
products read. A box has the keys of a tile that lie together, all or those in one page, and all of
the columns or a panel of them, 128 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from splitkv.kernels.hopper.primitives.inline_asm import run_ptx

# Renamed between Triton 3.6 and 3.9.
_memory = gl.shared_memory_descriptor
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_gather = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


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
    """Keys of a box [1, keys, 1, dim], or [1, 1, panels, keys, columns]."""
    return shape[1] if len(shape) == 4 else shape[3]


@gluon.constexpr_function
def columns_of_box(shape):
    """Columns of such a box."""
    return shape[3] if len(shape) == 4 else shape[2] * shape[4]


@gluon.jit
def allocate_ldmatrix_tiles(desc, STAGES: gl.constexpr, TILE_N: gl.constexpr):
    """Allocates the memory of a ring whose tiles go to registers by ldmatrix, for mma: (boxes
    [STAGES * boxes of a tile, *box], tiles [STAGES, TILE_N, dim])."""
    BOX: gl.constexpr = keys_of_box(desc.block_type.shape)
    DIM: gl.constexpr = columns_of_box(desc.block_type.shape)
    shape: gl.constexpr = [STAGES * (TILE_N // BOX)] + desc.block_type.shape
    boxes = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    tiles = reinterpret(boxes, desc.dtype, [STAGES, TILE_N, DIM], tile_layout(TILE_N, DIM, BOX))
    return boxes, tiles


@gluon.jit
def allocate_wgmma_tiles(desc, STAGES: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr):
    """Allocates the memory of a ring whose tiles wgmma reads where they are: (boxes [STAGES * boxes
    of a tile, *box], tiles [STAGES, TILE, DIM]). Boxes of the same columns follow each other."""
    BOX: gl.constexpr = desc.block_type.shape
    BOXES: gl.constexpr = TILE * DIM // (BOX[1] * BOX[2] * BOX[3])
    shape: gl.constexpr = [STAGES * BOXES, BOX[0], BOX[1], BOX[2], BOX[3]]
    SWIZZLE: gl.constexpr = desc.layout.swizzle_byte_width
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, desc.dtype.primitive_bitwidth, rank=2)
    boxes = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return boxes, reinterpret(boxes, desc.dtype, [STAGES, TILE, DIM], layout)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """Allocates and initialises an mbarrier for each stage. A phase of it is over when there have
    been COUNT arrivals and all bytes that it was told to expect are there.

    `mbarrier.arrive` of a role is one arrival: its warps meet, and one thread arrives for all.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(barriers.index(n), count=COUNT)
    return barriers


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Computes the (stage, phase) after this one: the phase flips where the ring wraps."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def stage_after(before, zero, STAGES: gl.constexpr):
    """Computes the (stage, phase) of the tile behind `before` others.

    before   None: it is the first tile; `zero` is a 0 of the loop's type
    """
    stage, phase = zero, zero
    if before is not None:
        stage, phase = before % STAGES, before // STAGES & 1
    return stage, phase


@gluon.jit
def stage_of(j, STAGES: gl.constexpr):
    """Computes the (stage, phase) of the j-th tile in a ring of one or two stages. Computed from j,
    as some loops have no register left to carry each."""
    return j & (STAGES - 1), (j >> (STAGES - 1)) & 1


@gluon.jit
def tile_at_place(tiles, i):
    """Computes which tile is at place i of Tiles: those from `near` on lie `skip` tiles further."""
    return gl.where(i < tiles.near, i, i + tiles.skip)


@gluon.jit
def prefetch_page_id(pool, b, tile, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """Prefetches the page id of a tile of sequence b into the L1, where keys are in pages.

    pool   any record with `table_ptr` and `stride_table`: KVCache or KeySource
    """
    if pool.table_ptr is not None:
        page = tile * TILE_N // PAGE_SIZE
        row = pool.table_ptr + b.to(gl.int64) * pool.stride_table
        run_ptx("prefetch.global.L1 [$1];", "l", (row + page,))
