"""The producer warp of decode on Hopper, which issues copies while the other warps multiply.

Boxes of small pages are many. Their page ids are loaded together, one a lane, a round of tiles
ahead; the warps that multiply only say which stages are empty. A second warp copies the scales of
each key, where keys have any.

Roles: `load_role` and `load_scales_role`, a warp each; `mma_role`, all warps that the launch names;
and two warps that are idle but take part in what a cluster does together. A stage's `full` barrier
counts the one thread that issues its copies and, where keys have scales, the 32 that copy those;
`empty` counts the mma role once. Where no split has more tiles than the ring has stages, there is
no `empty`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.decode.attend import attend_tiles
from splitkv.kernels.hopper.decode.key_scales import copy_scales, key_of_thread
from splitkv.kernels.hopper.decode.mma_loop import mma_loop
from splitkv.kernels.hopper.decode.queries import load_mma_queries
from splitkv.kernels.hopper.decode.split_range import LANES, load_num_keys, locate_split
from splitkv.kernels.hopper.primitives.cluster import arrive_running, arrive_written, wait_cluster
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx, run_ptx_alone
from splitkv.kernels.hopper.primitives.tma_ring import (
    async_load,
    keys_of_box,
    next_stage,
    stage_after,
    thread_barrier,
    tile_at_place,
)


@gluon.constexpr_function
def producer_registers(config):
    """The registers of a thread of the load roles. Where eight rows are used the mma role needs
    fewer, so these get more."""
    return 32 if config.used_rows == 8 else 24


class MmaInputs(NamedTuple):
    """Inputs of the mma role: QueryRows, ScoreTerms and Work of the program."""

    queries: Any
    terms: Any
    work: Any


# --- roles, each of which finds out by itself what it has to do --------------------------------


@gluon.jit
def attend_by_roles(kv, ring, scales, inputs, CONFIG: gl.constexpr):
    """Runs the roles from the start of the program on: (Softmax, number of splits). The length and
    q are read while the first tiles are issued."""
    thread_barrier()  # the producer warps find the barriers ready
    REGISTERS: gl.constexpr = producer_registers(CONFIG)
    CLUSTER: gl.constexpr = CONFIG.cluster_size
    work, kv_head = inputs.work, inputs.queries.kv_head
    softmax, num_splits = gl.warp_specialize(
        [
            (mma_role, (kv, ring, scales, inputs, CONFIG)),
            (load_role, (kv, ring, kv_head, work, CONFIG)),
            # three warps that Triton would add anyway
            (load_scales_role, (kv, ring, kv_head, work, scales, CONFIG)),
            (meet_cluster, (CLUSTER,)),
            (meet_cluster, (CLUSTER,)),
        ],
        [1, 1, 1, 1],
        [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )
    return softmax, num_splits


@gluon.jit
def load_role(kv, ring, kv_head, work, CONFIG: gl.constexpr):
    """The load role: issues the copies of all tiles of the split; one warp."""
    declare_page_id(0)
    pages = load_first_round(kv, kv_head, work, CONFIG)
    keys = load_num_keys(work)
    split = locate_split(work, kv_head, keys, CONFIG)
    if work.bounds.left is not None:
        pages = load_round(kv, split, split.tiles.first, CONFIG)
    issue_rounds(ring, kv, split, pages, CONFIG)
    meet_cluster(CONFIG.cluster_size)


@gluon.jit
def load_scales_role(kv, ring, kv_head, work, scales, CONFIG: gl.constexpr):
    """The load role of scales of each key, where keys have any; one warp."""
    if scales.pointers is not None:
        declare_page_id(1)
        pages = load_first_round(kv, kv_head, work, CONFIG)
        keys = load_num_keys(work)
        split = locate_split(work, kv_head, keys, CONFIG)
        if work.bounds.left is not None:
            pages = load_round(kv, split, split.tiles.first, CONFIG)
        copy_scale_rounds(ring, kv, split, scales, pages, CONFIG)
    meet_cluster(CONFIG.cluster_size)


@gluon.jit
def mma_role(kv, ring, scales, inputs, CONFIG: gl.constexpr):
    """The mma role: reads the length of the sequence, loads q, and runs the main loop."""
    keys = load_num_keys(inputs.work)
    split = locate_split(inputs.work, inputs.queries.kv_head, keys, CONFIG)
    queries = inputs.queries
    q = load_mma_queries(queries, CONFIG)
    terms, work = inputs.terms, inputs.work
    softmax = attend_tiles(mma_loop, work, split, queries, terms, q, ring, kv, scales, CONFIG)
    return softmax, split.num_splits


@gluon.jit
def meet_cluster(CLUSTER: gl.constexpr):
    """Arrives at the barriers of a cluster where `merge_cluster` does, for warps that exchange
    nothing: a cluster barrier counts every thread of its programs. They do not wait for the others'
    sums."""
    arrive_running(CLUSTER)
    if CLUSTER > 0:
        wait_cluster()
        arrive_written()


# --- rounds of tiles ---------------------------------------------------------------------------


@gluon.jit
def load_round(kv, split, first, CONFIG: gl.constexpr):
    """Loads the page ids of the boxes of the tiles from `first` on [32], one a lane."""
    BOX: gl.constexpr = keys_of_box(kv.k.block_type.shape)
    BOXES: gl.constexpr = CONFIG.tile_n // BOX
    tiles = split.tiles
    lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
    i = first + lanes // BOXES * tiles.by
    inner = tile_at_place(tiles, i) * CONFIG.tile_n + lanes % BOXES * BOX
    row = kv.table_ptr + split.sequence.to(gl.int64) * kv.stride_table
    ok = (i < tiles.last) & (inner < split.num_keys)
    return gl.load(row + inner // CONFIG.page_size, mask=ok, other=0)


@gluon.jit
def load_first_round(kv, kv_head, work, CONFIG: gl.constexpr):
    """Loads the page ids of the first tiles, which with no window are known before the length is;
    None where there is a window."""
    pages = None
    if work.bounds.left is None:
        most = locate_split(work, kv_head, work.max_keys, CONFIG)
        pages = load_round(kv, most, most.tiles.first, CONFIG)
    return pages


@gluon.jit
def issue_rounds(ring, kv, split, pages, CONFIG: gl.constexpr):
    """Issues the copies of all tiles of a split, a round of page ids after the other.

    pages   of `load_round`, of the first tiles
    """
    STAGES: gl.constexpr = CONFIG.num_stages
    TILE_N: gl.constexpr = CONFIG.tile_n
    PAGE_SIZE: gl.constexpr = CONFIG.page_size
    BOX: gl.constexpr = keys_of_box(kv.k.block_type.shape)
    BOXES: gl.constexpr = TILE_N // BOX
    ROUND: gl.constexpr = LANES // BOXES  # tiles
    BYTES: gl.constexpr = BOXES * (kv.k.block_type.nbytes + kv.v.block_type.nbytes)
    tiles, kv_head = split.tiles, split.kv_head
    stage, phase = stage_after(ring.before, tiles.first * 0, STAGES)
    phase = 1 - phase  # all stages are empty in the beginning
    for first in range(tiles.first, tiles.last, ROUND * tiles.by):
        keep_page_ids(pages, 0)
        behind = first + ROUND * tiles.by
        pages = load_round(kv, split, behind, CONFIG)
        lane = first * 0
        for i in range(first, gl.minimum(behind, tiles.last), tiles.by):
            inner = tile_at_place(tiles, i) * TILE_N
            if ring.empty is not None:
                mbarrier.wait(ring.empty.index(stage), phase)
            full = ring.full.index(stage)
            mbarrier.expect(full, BYTES)
            for n in gl.static_range(BOXES):
                at = [page_id_of_lane(lane + n, 0), kv_head, 0, (inner + n * BOX) % PAGE_SIZE, 0]
                async_load(kv.k, at, full, ring.k_boxes.index(stage * BOXES + n))
                async_load(kv.v, at, full, ring.v_boxes.index(stage * BOXES + n))
            lane += BOXES
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def copy_scale_rounds(ring, kv, split, scales, pages, CONFIG: gl.constexpr):
    """Copies the scales of all keys of a split, a round of page ids after the other."""
    BOX: gl.constexpr = keys_of_box(kv.k.block_type.shape)
    BOXES: gl.constexpr = CONFIG.tile_n // BOX
    ROUND: gl.constexpr = LANES // BOXES  # tiles
    tiles = split.tiles
    boxes = key_of_thread(0, CONFIG.tile_n) // BOX
    stage, phase = stage_after(ring.before, tiles.first * 0, CONFIG.num_stages)
    phase = 1 - phase
    for first in range(tiles.first, tiles.last, ROUND * tiles.by):
        keep_page_ids(pages, 1)
        behind = first + ROUND * tiles.by
        pages = load_round(kv, split, behind, CONFIG)
        lane = first * 0
        for i in range(first, gl.minimum(behind, tiles.last), tiles.by):
            of_tile = page_id_of_lane(lane + boxes, 1)
            if ring.empty is not None:
                mbarrier.wait(ring.empty.index(stage), phase)
            copy_scales(scales, ring, split, stage, tile_at_place(tiles, i), of_tile, CONFIG)
            lane += BOXES
            stage, phase = next_stage(stage, phase, CONFIG.num_stages)


# --- page ids, one a lane ----------------------------------------------------------------------


@gluon.constexpr_function
def page_id_code(role, what):
    """PTX that declares, sets or reads the register behind `page_id_of_lane`. The register has a
    name in PTX, unknown to LLVM, so that a lane's page id can be shuffled to others without shared
    memory. Each role has a register of its own."""
    name = f"page_of_lane_{role}"
    return {
        "declare": f".reg .b32 {name};",
        "keep": f"mov.b32 {name}, $1;",
        "give": f"shfl.sync.idx.b32 $0, {name}, $1, 31, 0xffffffff;",
    }[what]


@gluon.jit
def declare_page_id(ROLE: gl.constexpr):
    """Declares the register in which a role keeps page ids, one a lane."""
    CODE: gl.constexpr = page_id_code(ROLE, "declare")
    run_ptx_alone(CODE)


@gluon.jit
def keep_page_ids(pages, ROLE: gl.constexpr):
    """Sets that register: each lane keeps the page id of one box, for `page_id_of_lane`."""
    CODE: gl.constexpr = page_id_code(ROLE, "keep")
    run_ptx(CODE, "r", (pages,))


@gluon.jit
def page_id_of_lane(lane, ROLE: gl.constexpr):
    """Reads the page id that `lane` keeps, in all lanes of the warp."""
    CODE: gl.constexpr = page_id_code(ROLE, "give")
    return gl.inline_asm_elementwise(CODE, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)
