"""The roles of persistent decode on Hopper: each walks over the splits of its program by itself.

All go the same way, from what the schedule of the step says or each of them finds from the lengths,
so none tells another where it is. The load role runs ahead: what holds it up is only that no stage
of the ring is empty, so the tiles of the next split are on their way before the epilogue of this
one. Stages and phases go on from split to split: both sides count the tiles that have gone through
the ring, `before`.

    role               warps           waits for          tells
    load_walk          1               empty; written     full, by TMA; taken
    load_scales_walk   1               empty              full, by 32 threads
    write_walk         WRITING_WARPS   taken              written
    mma_walk           of the launch   full               empty

`written` and `taken` are of write_role.py and only there where the call appends. Where keys have no
scales, or nothing is appended, the roles of these end at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.combine import ResultRows, mask_of_columns, write_final, write_partial
from splitkv.kernels.hopper.decode.attend import attend_tiles
from splitkv.kernels.hopper.decode.epilogue import locate_partial_rows, per_row
from splitkv.kernels.hopper.decode.key_scales import copy_scales
from splitkv.kernels.hopper.decode.mma_loop import mma_loop
from splitkv.kernels.hopper.decode.producer_warp import (
    copy_scale_rounds,
    declare_page_id,
    issue_rounds,
    load_round,
)
from splitkv.kernels.hopper.decode.queries import load_mma_queries, locate_rows
from splitkv.kernels.hopper.decode.records import QueryRows, Ring, Rotation, Split, Work
from splitkv.kernels.hopper.decode.split_range import LANES, locate_rows_of_head
from splitkv.kernels.hopper.decode.write_role import (
    length_of,
    tiles_before_new,
    wait_for_new_tokens,
    write_if_any,
)
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.hopper.primitives.tma_ring import (
    async_load,
    keys_of_box,
    next_stage,
    stage_after,
    thread_barrier,
    tile_at_place,
)
from splitkv.kernels.tile.band import token_range
from splitkv.kernels.tile.new import start_of
from splitkv.kernels.tile.step_share import SEQUENCES, share_of
from splitkv.kernels.tile.walk import (
    first_walk,
    head_tile_of_share,
    next_split,
    slot_of_split,
    split_length,
    tiles_of_split,
)

WRITING_WARPS = gl.constexpr(2)  # that Triton would add to the load roles anyway


@gluon.constexpr_function
def registers_of_load_roles(config):
    """The registers of a thread of the load roles; with wide heads the mma role needs more."""
    return 48 if max(config.head_dim, config.head_dim_v) > 128 else 56


class StepShares(NamedTuple):
    """The shares of the programs of a DecodeStep.

    starts_ptr   [programs, 8] int32 of a schedule; None: programs find their shares
    group        of programs; program: which of the group
    """

    starts_ptr: Any
    step: Any
    group: Any
    program: Any


class WalkInputs(NamedTuple):
    """Inputs of the mma role: pointer and Strides of q, ScoreTerms, Output."""

    q_ptr: Any
    q_strides: Any
    terms: Any
    output: Any


@gluon.jit
def run_roles(kv, ring, scales, inputs, shares, tokens, CONFIG: gl.constexpr):
    """Runs the roles from the start of the program to its end; tokens: AppendedTokens, or None."""
    thread_barrier()  # the producer warps find the barriers ready
    REGISTERS: gl.constexpr = registers_of_load_roles(CONFIG)
    gl.warp_specialize(
        [
            (mma_walk, (kv, ring, scales, inputs, shares, tokens, CONFIG)),
            (load_walk, (kv, ring, shares, tokens, CONFIG)),
            (load_scales_walk, (kv, ring, scales, shares, CONFIG)),
            (write_walk, (kv, shares, tokens, CONFIG)),
        ],
        [1, 1, WRITING_WARPS],
        [REGISTERS, REGISTERS, REGISTERS],
    )


# --- the walk ----------------------------------------------------------------------------------


@gluon.jit
def first_start(shares, WARPS: gl.constexpr, CONFIG: gl.constexpr):
    """The Start of a program, in a role of so many warps: all of them have every length, so that no
    sum waits for other warps."""
    A_THREAD: gl.constexpr = SEQUENCES // 32
    lanes = gl.arange(0, SEQUENCES, layout=gl.BlockedLayout([A_THREAD], [32], [WARPS], [0]))
    return share_of(
        shares.starts_ptr, shares.step, shares.program, lanes, CONFIG.find_share, CONFIG.tile_n
    )


@gluon.jit
def split_of_walk(walk, shares, CONFIG: gl.constexpr):
    """The Split that a program is at; its num_splits is 1 where it is all of a head tile."""
    step = shares.step
    kv_head, row_tile = locate_rows_of_head(head_tile_of(walk, shares), step.seqlen_q, CONFIG)
    tiles = tiles_of_split(walk, step.bounds, step.seqlen_q, CONFIG.tile_n)
    num_splits = gl.where(split_length(walk) == walk.tiles, 1, 2)
    return Split(walk.sequence, kv_head, tiles, walk.keys, num_splits)


@gluon.jit
def count_tiles(tiles):
    """Counts the tiles of Tiles."""
    return (tiles.last - tiles.first + tiles.by - 1) // tiles.by


@gluon.jit
def head_tile_of(walk, shares):
    """The head tile of a split among all of a sequence."""
    return head_tile_of_share(shares.step, shares.group, walk.head_tile)


@gluon.jit
def row_tile_of(walk, shares, CONFIG: gl.constexpr):
    """The row tile of a split among those of its KV head."""
    head_tile = head_tile_of(walk, shares)
    kv_head, row_tile = locate_rows_of_head(head_tile, shares.step.seqlen_q, CONFIG)
    return row_tile


@gluon.jit
def ring_after(ring, before):
    """The Ring after so many more tiles have gone through it, so that stages and phases go on from
    split to split."""
    return Ring(
        k_boxes=ring.k_boxes,
        v_boxes=ring.v_boxes,
        full=ring.full,
        empty=ring.empty,
        k_tiles=ring.k_tiles,
        v_tiles=ring.v_tiles,
        before=before,
    )


# --- load: keys and values ---------------------------------------------------------------------


@gluon.jit
def load_walk(kv, ring, shares, tokens, CONFIG: gl.constexpr):
    """The load role: issues the copies of split after split; one warp."""
    AFTER: gl.constexpr = kv.table_ptr is None and shares.step.head_tiles is None
    declare_page_id(0)
    walk = first_walk(first_start(shares, 1, CONFIG))
    before = walk.tile * 0
    new_splits = walk.tile * 0  # so far, that have new tokens
    while walk.left > 0:
        split = split_of_walk(walk, shares, CONFIG)
        following = walk
        if not AFTER:  # its length comes while this split is issued
            following = next_split(walk, shares.step, CONFIG.tile_n)
        if shares.step.seqlen_new is None:
            issue_split(ring_after(ring, before), kv, split, following, shares, CONFIG)
        else:
            step = shares.step
            row_tile = row_tile_of(walk, shares, CONFIG)
            ahead, with_new = tiles_before_new(split, step, CONFIG)
            issue_split(ring_after(ring, before), kv, ahead, following, shares, CONFIG)
            new_splits = wait_for_new_tokens(split, row_tile, tokens, step, new_splits, CONFIG)
            rest = ring_after(ring, before + count_tiles(ahead.tiles))
            issue_split(rest, kv, with_new, following, shares, CONFIG)
        before += count_tiles(split.tiles)
        if AFTER:  # no copy waits for that length
            following = next_split(walk, shares.step, CONFIG.tile_n)
        walk = following


@gluon.jit
def issue_split(ring, kv, split, following, shares, CONFIG: gl.constexpr):
    """Issues the copies of the tiles of a split, or of a part of one; following: the Walk behind
    it."""
    if kv.table_ptr is None:
        issue_contiguous(ring, kv, split, CONFIG)
    else:
        pages = load_round(kv, split, split.tiles.first, CONFIG)
        prefetch_pages(kv, following, shares.step, CONFIG)
        issue_rounds(ring, kv, split, pages, CONFIG)


@gluon.jit
def prefetch_pages(kv, walk, step, CONFIG: gl.constexpr):
    """Prefetches the page ids of the first round of the next split, where no length says which they
    are; of another sequence at most, as those of this one are near."""
    if step.bounds.left is None:
        BOXES: gl.constexpr = CONFIG.tile_n // keys_of_box(kv.k.block_type.shape)
        BOX: gl.constexpr = CONFIG.tile_n // BOXES
        lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [1], [0]))
        sequence = gl.minimum(walk.sequence, step.batch - 1)
        row = kv.table_ptr + sequence.to(gl.int64) * kv.stride_table
        key = gl.minimum(lanes * BOX, gl.maximum(walk.keys - 1, 0))
        run_ptx("prefetch.global.L1 [$1];", "l", (row + key // CONFIG.page_size,))


@gluon.jit
def issue_contiguous(ring, kv, split, CONFIG: gl.constexpr):
    """Issues the copies of all tiles of a split of a contiguous cache, of the last tile of a
    sequence those boxes that have keys of it."""
    TILE_N: gl.constexpr = CONFIG.tile_n
    tiles = split.tiles
    stage, phase = stage_after(ring.before, tiles.first * 0, CONFIG.num_stages)
    phase = 1 - phase  # all stages are empty in the beginning
    for i in range(tiles.first, tiles.last, tiles.by):
        first_n = tile_at_place(tiles, i) * TILE_N
        mbarrier.wait(ring.empty.index(stage), phase)
        issue_boxes(ring, kv, split, stage, first_n, CONFIG)
        stage, phase = next_stage(stage, phase, CONFIG.num_stages)


@gluon.jit
def issue_boxes(ring, kv, split, stage, first_n, CONFIG: gl.constexpr):
    """Issues the copies of those boxes of a tile that have keys; the first one has."""
    BOX: gl.constexpr = keys_of_box(kv.k.block_type.shape)
    BOXES: gl.constexpr = CONFIG.tile_n // BOX
    BYTES: gl.constexpr = kv.k.block_type.nbytes + kv.v.block_type.nbytes
    keys = split.num_keys - first_n
    full = ring.full.index(stage)
    if keys > CONFIG.tile_n - BOX:
        mbarrier.expect(full, BOXES * BYTES)
    else:
        expect_boxes(full, keys, BOX, BOXES, BYTES)
    for n in range(0, gl.minimum(keys, CONFIG.tile_n), BOX):
        at = [split.sequence, split.kv_head, 0, first_n + n, 0]
        async_load(kv.k, at, full, ring.k_boxes.index(stage * BOXES + n // BOX))
        async_load(kv.v, at, full, ring.v_boxes.index(stage * BOXES + n // BOX))


@gluon.jit
def expect_boxes(full, keys, BOX: gl.constexpr, BOXES: gl.constexpr, BYTES: gl.constexpr):
    """Has the barrier of a stage expect the boxes of a tile that have one of so many keys, of which
    the last box has none; BYTES: of K and V in a box."""
    for n in gl.static_range(BOXES - 1):
        some = True if n == 0 else keys > n * BOX
        last = keys <= (n + 1) * BOX
        mbarrier.expect(full, (n + 1) * BYTES, pred=some & last)


# --- load: scales of keys ----------------------------------------------------------------------


@gluon.jit
def load_scales_walk(kv, ring, scales, shares, CONFIG: gl.constexpr):
    """The load role of scales of each key, where keys have any; one warp."""
    if scales.pointers is not None:
        declare_page_id(1)
        walk = first_walk(first_start(shares, 1, CONFIG))
        before = walk.tile * 0
        while walk.left > 0:
            split = split_of_walk(walk, shares, CONFIG)
            following = next_split(walk, shares.step, CONFIG.tile_n)
            of_split = ring_after(ring, before)
            if kv.table_ptr is None:
                copy_contiguous_scales(of_split, split, scales, CONFIG)
            else:
                pages = load_round(kv, split, split.tiles.first, CONFIG)
                copy_scale_rounds(of_split, kv, split, scales, pages, CONFIG)
            before += count_tiles(split.tiles)
            walk = following


@gluon.jit
def copy_contiguous_scales(ring, split, scales, CONFIG: gl.constexpr):
    """Copies the scales of all keys of a split of a contiguous cache."""
    tiles = split.tiles
    stage, phase = stage_after(ring.before, tiles.first * 0, CONFIG.num_stages)
    phase = 1 - phase
    for i in range(tiles.first, tiles.last, tiles.by):
        mbarrier.wait(ring.empty.index(stage), phase)
        copy_scales(scales, ring, split, stage, tile_at_place(tiles, i), None, CONFIG)
        stage, phase = next_stage(stage, phase, CONFIG.num_stages)


# --- write: new tokens -------------------------------------------------------------------------


@gluon.jit
def write_walk(kv, shares, tokens, CONFIG: gl.constexpr):
    """The write role: writes the new tokens of split after split, where there are any."""
    step = shares.step
    if step.seqlen_new is not None:
        walk = first_walk(first_start(shares, gl.num_warps(), CONFIG))
        new_splits = walk.tile * 0
        while walk.left > 0:
            split = split_of_walk(walk, shares, CONFIG)
            following = next_split(walk, step, CONFIG.tile_n)
            row_tile = row_tile_of(walk, shares, CONFIG)
            new_splits = write_if_any(kv, split, row_tile, tokens, step, new_splits, CONFIG)
            walk = following


# --- mma ---------------------------------------------------------------------------------------


@gluon.jit
def mma_walk(kv, ring, scales, inputs, shares, tokens, CONFIG: gl.constexpr):
    """The mma role: attends to split after split, and writes what each leaves."""
    step = shares.step
    start = first_start(shares, gl.num_warps(), CONFIG)
    walk = first_walk(start)
    before = walk.tile * 0
    while walk.left > 0:
        split = split_of_walk(walk, shares, CONFIG)
        # its length comes while this split is worked on
        following = next_split(walk, step, CONFIG.tile_n)
        kv_head, row_tile = locate_rows_of_head(head_tile_of(walk, shares), step.seqlen_q, CONFIG)
        first_token, last_token = token_range(row_tile, step.seqlen_q, CONFIG.group, CONFIG.tile_m)
        work = Work(
            lens_ptr=step.lens_ptr,
            max_keys=split.num_keys,
            seqlen_q=step.seqlen_q,
            sequence=split.sequence,
            split=0,
            num_splits=split.num_splits,
            split_tiles=None,
            bounds=step.bounds,
            first_token=first_token,
            last_token=last_token,
        )
        q_of_sequence = inputs.q_ptr + split.sequence.to(gl.int64) * inputs.q_strides.b
        stride_t, stride_h = inputs.q_strides.t, inputs.q_strides.h
        rotation = None
        if CONFIG.rotary_dim:
            length = length_of(split, step)
            angle = start_of(tokens.turn, length.before, split.sequence, True)
            rotation = Rotation(tokens.turn, tokens.angles, angle, tokens.q_step)
        queries = QueryRows(
            q_ptr=q_of_sequence,
            kv_head=kv_head,
            row_tile=row_tile,
            seqlen_q=step.seqlen_q,
            stride_t=stride_t,
            stride_h=stride_h,
            rotation=rotation,
        )
        q = load_mma_queries(queries, CONFIG)
        of_split = ring_after(ring, before)
        terms = inputs.terms
        softmax = attend_tiles(
            mma_loop, work, split, queries, terms, q, of_split, kv, scales, CONFIG
        )
        slot = slot_of_split(walk, shares.program, step.programs, shares.group)
        write_split_of_walk(softmax, inputs.output, split, row_tile, slot, CONFIG)
        before += count_tiles(split.tiles)
        walk = following


@gluon.jit
def write_split_of_walk(softmax, output, split, row_tile, slot, CONFIG: gl.constexpr):
    """Writes the result of a split that is all of a head tile, else its partial."""
    acc = softmax.acc
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = locate_rows(split.kv_head, row_tile, output.seqlen_q, CONFIG)
    m, l = per_row(softmax.m, ROWS), per_row(softmax.l, ROWS)
    t, head, ok = per_row(rows.token, ROWS), per_row(rows.head, ROWS), per_row(rows.ok, ROWS)
    offs_v = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    HEAD_DIM_V: gl.constexpr = acc.shape[1]
    out_ok = mask_of_columns(acc, ok, offs_v, HEAD_DIM_V)
    if split.num_splits == 1:
        of_sequence = split.sequence.to(gl.int64) * output.strides.b
        first_head = split.sequence * output.num_kv_heads * CONFIG.group
        places = ResultRows(
            of_sequence + t.to(gl.int64) * output.strides.t + head * output.strides.h,
            (first_head + head).to(gl.int64) * output.seqlen_q + t,
        )
        write_final(output.final, places, output.sink_ptr, acc, m, l, head, ok, offs_v, out_ok)
    else:
        slot_rows = per_row(locate_partial_rows(slot, output.seqlen_q, CONFIG), ROWS)
        write_partial(output.partial, slot_rows, acc, m, l, ok, offs_v, out_ok, HEAD_DIM_V)
