"""The warp of `hopper_decode_split` that asks for tiles where those that multiply are spared it.

Boxes of small pages are many. Their page numbers are loaded together, one a lane, a round of tiles
ahead; those that multiply only say which slots are free.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.cluster import arrive_running, arrive_written, wait_cluster
from splitkv.kernels.hopper.decode_narrow import RowScoring, attend_narrow
from splitkv.kernels.hopper.decode_query import places_of_rows, rows_to_multiply, scales_of_rows
from splitkv.kernels.hopper.decode_rows import own_tiles, slopes_of, tiles_within
from splitkv.kernels.hopper.decode_scales import copy_scales, keys_of_threads
from splitkv.kernels.hopper.decode_wide import attend_wide
from splitkv.kernels.hopper.effect import act, act_alone
from splitkv.kernels.hopper.ring import (
    arrivals,
    async_load,
    foresee,
    keys_of_box,
    next_slot,
    thread_barrier,
    tile_at,
)

LANES = gl.constexpr(32)
ROUND = gl.constexpr(8)  # tiles whose page numbers are loaded together, at most
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
def attend_rows(
    q,
    unit,  # of `rows_to_multiply`, as q
    of_rows,  # of_part of `own_tiles`, KV head, row tile; Row and Scales, or None; strides of
    # slopes, of scales of keys: b, h, of those of q: b, t, h; scale and softcap; KeyScales
    rings,  # ring, k_ring, v_ring of `attend_narrow`
    tiles,
    keys,
    free,
    LATE: gl.constexpr,  # a warp of its own asks for tiles from here on
    CLUSTER: gl.constexpr,
    S: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM_V: gl.constexpr,
    TILE_M: gl.constexpr,
    WIDEN: gl.constexpr,
    HALF: gl.constexpr,
    OF_K: gl.constexpr,
    MORE: gl.constexpr,
    BULK: gl.constexpr,
):
    """(acc, m, l) of `attend_narrow` or `attend_wide`, times the scale that values share."""
    of_part, h, tile_m, scales, strides, by, of_keys = of_rows
    _, _, seqlen_q, b, _, _, _, bounds, t_first, t_last = of_part
    ring, k_ring, v_ring = rings
    scale, softcap = by
    places = places_of_rows(h, tile_m, seqlen_q, gl.SliceLayout(1, S), GROUP, TILE_M)
    row_ok, t, head = places
    slope = slopes_of(scales[0], b * strides[0] + head, row_ok)
    scale, v_scale = scales_of_rows(scale, unit, scales, strides, places, b, h, WIDEN)
    first_pos = keys - seqlen_q
    pos = (first_pos + t)[:, None]
    given = ring, k_ring, v_ring, tiles, b, h, keys, bounds
    scoring = RowScoring(pos, first_pos + t_first, first_pos + t_last, scale, softcap, slope)
    rest = scoring, of_keys
    if LATE:
        acc, m, l = attend_late(q, given, rest, S, PAGE_SIZE, DIM_V, WIDEN, HALF, CLUSTER)
    elif OF_K is None:
        acc, m, l = attend_narrow(
            *q, *given, *rest, free, S, PAGE_SIZE, DIM_V, WIDEN, HALF, MORE, BULK
        )
    else:
        acc, m, l = attend_wide(q[0], *given, *rest, S, PAGE_SIZE, WIDEN)
    if WIDEN is not None:
        acc *= v_scale
    return acc, m, l


@gluon.jit
def attend_beside(
    q_rows,  # arguments of `rows_to_multiply` up to `stride_h`
    of_rows,  # as `attend_rows`
    rings,
    S: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM_V: gl.constexpr,
    TILE_M: gl.constexpr,
    WIDEN: gl.constexpr,
    HALF: gl.constexpr,
    DIM: gl.constexpr,
    ROUNDED: gl.constexpr,
    CLUSTER: gl.constexpr,
    MORE: gl.constexpr,
):
    """(acc, m, l) of `attend_rows` and the number of parts, while a warp of its own asks for tiles.
    It begins before anything is waited for: the length and q are read while it does so."""
    of_part, h, _, _, _, _, _ = of_rows
    ring, k_ring, _ = rings
    free = arrivals(k_ring.shape[0], 1 if MORE else 0)
    thread_barrier()  # the warps that ask find them ready
    TILE_N: gl.constexpr = k_ring.shape[1]
    R: gl.constexpr = ASKING_REGISTERS_HALF if HALF else ASKING_REGISTERS
    asked = ring, free, h, of_part
    acc, m, l, num_parts = gl.warp_specialize(
        [
            (
                attend_own,
                (
                    q_rows,
                    of_rows,
                    rings,
                    free,
                    S,
                    GROUP,
                    PAGE_SIZE,
                    DIM_V,
                    TILE_M,
                    WIDEN,
                    HALF,
                    DIM,
                    ROUNDED,
                    MORE,
                ),
            ),
            (ask_apart, (asked, PAGE_SIZE, TILE_N, CLUSTER, MORE)),
            # three warps that Triton would add anyway
            (scales_apart, (asked, of_rows[6], PAGE_SIZE, CLUSTER, MORE)),
            (meet_cluster, (CLUSTER,)),
            (meet_cluster, (CLUSTER,)),
        ],
        [1, 1, 1, 1],
        [R, R, R, R],
    )
    return acc, m, l, num_parts


@gluon.jit
def attend_own(
    q_rows,
    of_rows,
    rings,
    free,
    S: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM_V: gl.constexpr,
    TILE_M: gl.constexpr,
    WIDEN: gl.constexpr,
    HALF: gl.constexpr,
    DIM: gl.constexpr,
    ROUNDED: gl.constexpr,
    MORE: gl.constexpr,
):
    """What the warps that multiply do."""
    keys, tiles, num_parts = own_tiles(of_rows[0], rings[1].shape[1])
    q, unit = rows_to_multiply(
        *q_rows, None, S, GROUP, DIM, TILE_M, None, 0, 0, WIDEN, ROUNDED, HALF
    )
    of_slots = free if MORE else None
    acc, m, l = attend_rows(
        *(q, unit, of_rows, rings, tiles, keys),
        of_slots,
        *(False, 0),
        *(S, GROUP, PAGE_SIZE, DIM_V, TILE_M, WIDEN, HALF, None, MORE, 0),
    )
    return acc, m, l, num_parts


@gluon.jit
def ask_apart(
    asked,  # ring: Pool, boxes of keys, of values, barriers; barriers: the warps that multiply have
    # read a slot, of no use unless MORE; KV head; of_part of `own_tiles`
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    CLUSTER: gl.constexpr,
    MORE: gl.constexpr,
):
    """Have the tiles copied; for one warp."""
    ring, free, h, of_part = asked
    pool = ring[0]
    b, bounds = of_part[3], of_part[7]
    declare_page(0)
    coming = first_round(pool, of_part, PAGE_SIZE, TILE_N)
    keys, tiles, _ = own_tiles(of_part, TILE_N)
    if bounds.left is not None:
        coming = pages_of_round(pool, b, tiles, tiles.first, keys, PAGE_SIZE, TILE_N)
    ask_rounds(ring, free, b, h, tiles, keys, coming, PAGE_SIZE, TILE_N, MORE)
    meet_cluster(CLUSTER)


@gluon.jit
def first_round(pool, of_part, PAGE_SIZE: gl.constexpr, TILE_N: gl.constexpr):
    """`pages_of_round` of the first tiles, which with no window are known before the length is."""
    _, most, _, b, _, _, _, bounds, _, _ = of_part
    coming = None
    if bounds.left is None:
        tiles, _ = tiles_within(of_part, most, TILE_N)
        coming = pages_of_round(pool, b, tiles, tiles.first, most, PAGE_SIZE, TILE_N)
    return coming


@gluon.jit
def ask_rounds(
    ring,
    free,
    b,
    h,
    tiles,
    keys,
    coming,  # of `pages_of_round`
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    MORE: gl.constexpr,
):
    """Ask for tiles, a round of pages after the other."""
    pool, k_boxes, v_boxes, arrived = ring
    SLOTS: gl.constexpr = arrived.shape[0]
    BOX: gl.constexpr = keys_of_box(pool.k.block_type.shape)
    BOXES: gl.constexpr = TILE_N // BOX
    A_ROUND: gl.constexpr = LANES // BOXES  # tiles
    BYTES: gl.constexpr = BOXES * (pool.k.block_type.nbytes + pool.v.block_type.nbytes)
    slot = tiles.first * 0
    phase = slot + 1  # nobody has a slot yet
    for some in range(tiles.first, tiles.last, A_ROUND * tiles.by):
        keep_pages(coming, 0)
        behind = some + A_ROUND * tiles.by
        coming = pages_of_round(pool, b, tiles, behind, keys, PAGE_SIZE, TILE_N)
        lane = some * 0
        for i in range(some, gl.minimum(behind, tiles.last), tiles.by):
            inner = tile_at(tiles, i) * TILE_N
            if MORE:
                mbarrier.wait(free.index(slot), phase)
            full = arrived.index(slot)
            mbarrier.expect(full, BYTES)
            for n in gl.static_range(BOXES):
                at = [page_of_lane(lane + n, 0), h, 0, (inner + n * BOX) % PAGE_SIZE, 0]
                async_load(pool.k, at, full, k_boxes.index(slot * BOXES + n))
                async_load(pool.v, at, full, v_boxes.index(slot * BOXES + n))
            lane += BOXES
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def attend_late(
    rows,  # (q, q_odd) of attend_narrow
    given,  # its arguments from `ring` to `bounds`
    rest,  # RowScoring, KeyScales
    S: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM_V: gl.constexpr,
    WIDEN: gl.constexpr,
    HALF: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """`attend_narrow`, while a warp of its own asks for tiles, and another for scales."""
    ring, k_ring, v_ring, tiles, b, h, keys, bounds = given
    free = arrivals(k_ring.shape[0], 1)
    thread_barrier()  # the warp that asks finds them ready
    TILE_N: gl.constexpr = k_ring.shape[1]
    R: gl.constexpr = ASKING_REGISTERS_HALF if HALF else ASKING_REGISTERS
    acc, m, l = gl.warp_specialize(
        [
            (attend_only, (rows, given, rest, free, S, PAGE_SIZE, DIM_V, WIDEN, HALF)),
            (ask_late, (ring, free, b, h, tiles, keys, PAGE_SIZE, TILE_N, CLUSTER)),
            # three warps that Triton would add anyway
            (scales_late, (ring, rest[1], free, b, h, tiles, keys, PAGE_SIZE, CLUSTER)),
            (meet_cluster, (CLUSTER,)),
        ],
        [1, 1, 2],
        [R, R, R],
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
    """What the warps that multiply do there."""
    return attend_narrow(*rows, *given, *rest, free, S, PAGE_SIZE, DIM_V, WIDEN, HALF, True, 0)


@gluon.jit
def ask_late(
    ring,
    free,
    b,
    h,
    tiles,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    CLUSTER: gl.constexpr,
):
    """`ask_apart` where the length is known."""
    declare_page(0)
    coming = pages_of_round(ring[0], b, tiles, tiles.first, keys, PAGE_SIZE, TILE_N)
    ask_rounds(ring, free, b, h, tiles, keys, coming, PAGE_SIZE, TILE_N, True)
    meet_cluster(CLUSTER)


@gluon.jit
def scales_late(
    ring,
    of_keys,
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
        TILE_N: gl.constexpr = of_keys.place.shape[1] // 2
        declare_page(1)
        coming = pages_of_round(ring[0], b, tiles, tiles.first, keys, PAGE_SIZE, TILE_N)
        copy_rounds(ring, of_keys, free, b, h, tiles, keys, coming, PAGE_SIZE, True)
    meet_cluster(CLUSTER)


@gluon.jit
def scales_apart(
    asked,  # as `ask_apart`
    of_keys,
    PAGE_SIZE: gl.constexpr,
    CLUSTER: gl.constexpr,
    MORE: gl.constexpr,
):
    """`scales_late` before the length is known."""
    if of_keys.scales is not None:
        TILE_N: gl.constexpr = of_keys.place.shape[1] // 2
        ring, free, h, of_part = asked
        pool, b, bounds = ring[0], of_part[3], of_part[7]
        declare_page(1)
        coming = first_round(pool, of_part, PAGE_SIZE, TILE_N)
        keys, tiles, _ = own_tiles(of_part, TILE_N)
        if bounds.left is not None:
            coming = pages_of_round(pool, b, tiles, tiles.first, keys, PAGE_SIZE, TILE_N)
        copy_rounds(ring, of_keys, free, b, h, tiles, keys, coming, PAGE_SIZE, MORE)
    meet_cluster(CLUSTER)


@gluon.jit
def copy_rounds(
    ring,
    of_keys,
    free,
    b,
    h,
    tiles,
    keys,
    coming,  # of `pages_of_round`
    PAGE_SIZE: gl.constexpr,
    MORE: gl.constexpr,
):
    """Have scales of tiles copied, a round of pages after the other."""
    SLOTS: gl.constexpr = of_keys.place.shape[0]
    TILE_N: gl.constexpr = of_keys.place.shape[1] // 2
    asked = of_keys, ring[3], b, h
    BOX: gl.constexpr = keys_of_box(ring[0].k.block_type.shape)
    BOXES: gl.constexpr = TILE_N // BOX
    A_ROUND: gl.constexpr = LANES // BOXES  # tiles
    boxes = keys_of_threads(0, TILE_N) // BOX
    slot = tiles.first * 0
    phase = slot + 1
    for some in range(tiles.first, tiles.last, A_ROUND * tiles.by):
        keep_pages(coming, 1)
        behind = some + A_ROUND * tiles.by
        coming = pages_of_round(ring[0], b, tiles, behind, keys, PAGE_SIZE, TILE_N)
        lane = some * 0
        for i in range(some, gl.minimum(behind, tiles.last), tiles.by):
            pages = page_of_lane(lane + boxes, 1)
            if MORE:
                mbarrier.wait(free.index(slot), phase)
            copy_scales(*asked, slot, tile_at(tiles, i), pages, keys, PAGE_SIZE, TILE_N)
            lane += BOXES
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def meet_cluster(CLUSTER: gl.constexpr):
    """What warps that do not multiply do for `merge_cluster`: all threads of a cluster have to be
    there. They send nothing and read nothing, and so do not wait for the others' sums."""
    arrive_running(CLUSTER)
    if CLUSTER:
        wait_cluster()
        arrive_written()


@gluon.jit
def pages_of_round(
    pool,
    b,
    tiles,
    first,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
):
    """The pages of the boxes of the tiles from `first` on, one a lane."""
    BOX: gl.constexpr = keys_of_box(pool.k.block_type.shape)
    BOXES: gl.constexpr = TILE_N // BOX
    lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    i = first + lanes // BOXES * tiles.by
    inner = tile_at(tiles, i) * TILE_N + lanes % BOXES * BOX
    row = pool.table_ptr + b.to(gl.int64) * pool.stride_table
    return gl.load(row + inner // PAGE_SIZE, mask=(i < tiles.last) & (inner < keys), other=0)


@gluon.jit
def foresee_part(
    pool,
    lens_ptr,
    most,  # keys that a sequence may have
    b,
    part,
    parts,
    size,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    APART: gl.constexpr,
):
    """Have page numbers brought nearer, of a part whose start needs no length: of its first tile,
    or where warps of their own ask of all tiles of a round, and the length."""
    last = (most - 1) // TILE_N
    if APART:
        if lens_ptr is not None:
            act("prefetch.global.L1 [$1];", "l", (lens_ptr + b,))
        lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        foresee(pool, b, gl.minimum(part + lanes % ROUND * parts, last), PAGE_SIZE, TILE_N)
    else:
        start = part if size is None else part * size
        foresee(pool, b, gl.minimum(start, last), PAGE_SIZE, TILE_N)


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
