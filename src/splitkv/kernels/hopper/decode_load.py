"""The warp of `hopper_decode_split` that asks for tiles where those that multiply are spared it.

Boxes of small pages are many. Their page numbers are loaded together, one a lane, a round of tiles
ahead; those that multiply only say which slots are free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.cluster import arrive_running, arrive_written, wait_cluster
from splitkv.kernels.hopper.decode_narrow import attend_narrow
from splitkv.kernels.hopper.decode_scales import copy_scales, keys_of_threads
from splitkv.kernels.hopper.effect import act, act_alone
from splitkv.kernels.hopper.ring import (
    arrivals,
    async_load,
    keys_of_box,
    next_slot,
    thread_barrier,
    tile_at,
)

LANES = gl.constexpr(32)
# of each thread of a warp that does not multiply; where those that do have weights of eight rows
ASKING_REGISTERS, ASKING_REGISTERS_HALF = gl.constexpr(24), gl.constexpr(32)


@gluon.constexpr_function
def asking(gathered, scaled, ready, apart, warps):
    """How many threads arrive at a tile's barrier: one that asks for it, or all that gather it; and
    those that copy scales, all or a warp of its own, or one for all that make them ready."""
    every = 32 * warps
    scales = 1 if ready else 32 if apart else every
    return (every if gathered else 1) + (scales if scaled else 0)


@gluon.jit
def attend(
    rows,  # (q, q_odd) of attend_narrow
    given,  # its arguments from `ring` to `bounds`
    rest,  # (RowScoring, KeyScales)
    S: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM_V: gl.constexpr,
    WIDEN: gl.constexpr,
    HALF: gl.constexpr,
    APART: gl.constexpr,
    CLUSTER: gl.constexpr,
    BULK: gl.constexpr,
):
    """`attend_narrow`; APART: while a warp of its own asks for tiles, and another for scales."""
    ring, k_ring, v_ring, tiles, b, h, keys, bounds = given
    if APART:
        free = arrivals(k_ring.shape[0], 1)
        thread_barrier()  # the warp that asks finds them ready
        TILE_N: gl.constexpr = k_ring.shape[1]
        REGISTERS: gl.constexpr = ASKING_REGISTERS_HALF if HALF else ASKING_REGISTERS
        acc, m, l = gl.warp_specialize(
            [
                (attend_only, (rows, given, rest, free, S, PAGE_SIZE, DIM_V, WIDEN, HALF)),
                (ask_apart, (ring, free, b, h, tiles, keys, PAGE_SIZE, TILE_N, CLUSTER)),
                # three warps that Triton would add anyway
                (scales_apart, (ring, rest[1], free, b, h, tiles, keys, PAGE_SIZE, CLUSTER)),
                (meet_cluster, (CLUSTER,)),
            ],
            [1, 1, 2],
            [REGISTERS, REGISTERS, REGISTERS],
        )
    else:
        acc, m, l = attend_narrow(
            *rows, *given, *rest, None, S, PAGE_SIZE, DIM_V, WIDEN, HALF, BULK
        )
    return acc, m, l


@gluon.jit
def attend_only(
    rows,
    given,
    rest,
    free,
    S: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM_V: gl.constexpr,
    WIDEN: gl.constexpr,
    HALF: gl.constexpr,
):
    """What the warps that multiply do."""
    return attend_narrow(*rows, *given, *rest, free, S, PAGE_SIZE, DIM_V, WIDEN, HALF, 0)


@gluon.jit
def ask_apart(
    ring,  # Pool, boxes of keys, of values, barriers
    free,  # barriers: the warps that multiply have read a slot
    b,
    h,
    tiles,  # Tiles
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """Have the tiles copied; for one warp."""
    pool, k_boxes, v_boxes, arrived = ring
    SLOTS: gl.constexpr = arrived.shape[0]
    BOX: gl.constexpr = keys_of_box(pool.k.block_type.shape)
    BOXES: gl.constexpr = TILE_N // BOX
    BYTES: gl.constexpr = BOXES * (pool.k.block_type.nbytes + pool.v.block_type.nbytes)
    A_ROUND: gl.constexpr = LANES // BOXES  # tiles
    slot = tiles.first * 0
    phase = slot + 1  # nobody has a slot yet
    declare_page(0)
    coming = pages_of_round(pool, b, tiles, tiles.first, keys, PAGE_SIZE, TILE_N)
    for some in range(tiles.first, tiles.last, A_ROUND * tiles.by):
        keep_pages(coming, 0)
        behind = some + A_ROUND * tiles.by
        coming = pages_of_round(pool, b, tiles, behind, keys, PAGE_SIZE, TILE_N)
        lane = some * 0
        for i in range(some, gl.minimum(behind, tiles.last), tiles.by):
            inner = tile_at(tiles, i) * TILE_N
            mbarrier.wait(free.index(slot), phase)
            full = arrived.index(slot)
            mbarrier.expect(full, BYTES)
            for n in gl.static_range(BOXES):
                at = [page_of_lane(lane + n, 0), h, 0, (inner + n * BOX) % PAGE_SIZE, 0]
                async_load(pool.k, at, full, k_boxes.index(slot * BOXES + n))
                async_load(pool.v, at, full, v_boxes.index(slot * BOXES + n))
            lane += BOXES
            slot, phase = next_slot(slot, phase, SLOTS)
    meet_cluster(CLUSTER)


@gluon.jit
def scales_apart(
    ring,
    of_keys,  # KeyScales
    free,
    b,
    h,
    tiles,
    keys,
    PAGE_SIZE: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """Have the scales of the tiles' keys copied where they have any; for another warp."""
    if of_keys.scales is not None:
        SLOTS: gl.constexpr = of_keys.place.shape[0]
        TILE_N: gl.constexpr = of_keys.place.shape[1] // 2
        asked = of_keys, ring[3], b, h
        BOX: gl.constexpr = keys_of_box(ring[0].k.block_type.shape)
        BOXES: gl.constexpr = TILE_N // BOX
        A_ROUND: gl.constexpr = LANES // BOXES  # tiles
        boxes = keys_of_threads(0, TILE_N) // BOX
        slot = tiles.first * 0
        phase = slot + 1
        declare_page(1)
        coming = pages_of_round(ring[0], b, tiles, tiles.first, keys, PAGE_SIZE, TILE_N)
        for some in range(tiles.first, tiles.last, A_ROUND * tiles.by):
            keep_pages(coming, 1)
            behind = some + A_ROUND * tiles.by
            coming = pages_of_round(ring[0], b, tiles, behind, keys, PAGE_SIZE, TILE_N)
            lane = some * 0
            for i in range(some, gl.minimum(behind, tiles.last), tiles.by):
                pages = page_of_lane(lane + boxes, 1)
                mbarrier.wait(free.index(slot), phase)
                copy_scales(*asked, slot, tile_at(tiles, i), pages, keys, PAGE_SIZE, TILE_N)
                lane += BOXES
                slot, phase = next_slot(slot, phase, SLOTS)
    meet_cluster(CLUSTER)


@gluon.jit
def meet_cluster(CLUSTER: gl.constexpr):
    """What warps that do not multiply do for `merge_cluster`: all threads of a cluster have to be
    there. They send nothing and read nothing, and so do not wait for the others' sums."""
    arrive_running(CLUSTER)
    if CLUSTER:
        wait_cluster()
        arrive_written()


@gluon.jit
def pages_of_round(pool, b, tiles, first, keys, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """The pages of the boxes of the tiles from `first` on, one a lane."""
    BOX: gl.constexpr = keys_of_box(pool.k.block_type.shape)
    BOXES: gl.constexpr = TILE_N // BOX
    lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    i = first + lanes // BOXES * tiles.by
    inner = tile_at(tiles, i) * TILE_N + lanes % BOXES * BOX
    row = pool.table_ptr + b.to(gl.int64) * pool.stride_table
    return gl.load(row + inner // PAGE_SIZE, mask=(i < tiles.last) & (inner < keys), other=0)


@gluon.constexpr_function
def code_of_pages(role, what):
    """Instructions on the register of `page_of_lane`. PTX knows it and LLVM does not, so that a
    number of one lane can become one of others without shared memory. Each role has one."""
    name = f"page_of_lane_{role}"
    return {
        "declare": f".reg .b32 {name};",
        "keep": f"mov.b32 {name}, $1;",
        "give": f"shfl.sync.idx.b32 $0, {name}, $1, 31, 0xffffffff;",
    }[what]


@gluon.jit
def declare_page(ROLE: gl.constexpr):
    CODE: gl.constexpr = code_of_pages(ROLE, "declare")
    act_alone(CODE)


@gluon.jit
def keep_pages(pages, ROLE: gl.constexpr):
    """Have them given out by `page_of_lane` from here on."""
    CODE: gl.constexpr = code_of_pages(ROLE, "keep")
    act(CODE, "r", (pages,))


@gluon.jit
def page_of_lane(lane, ROLE: gl.constexpr):
    CODE: gl.constexpr = code_of_pages(ROLE, "give")
    return gl.inline_asm_elementwise(CODE, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
