"""The warp that has tiles of whole sequences copied by TMA: q, and the rings of keys and values.

A tile of keys is one box of TMA. In pages it is boxes of one page, each of 128 bytes a key, as a
tile in TMA's 128-byte swizzle has all its rows for so many columns before those for the next: so
the boxes of many pages make up the tile that the tensor cores take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.numbered import wait
from splitkv.kernels.hopper.prefill_rows import (
    has_number,
    index_in_round,
    own_item,
    own_visit,
    round_count,
    tile_of_step,
)
from splitkv.kernels.hopper.ring import async_load, foresee, reinterpret

ROWS = gl.constexpr(64)  # of a warpgroup
ROWS_OF_WARP = gl.constexpr(16)


class Parts(NamedTuple):
    """Operands: TMA descriptors of [batch, tokens, heads, dim], with one sequence where packed and
    pages in the place of sequences; or shared memory, as boxes of TMA or as tiles [slots, rows or
    keys, dim].

    The `rest` are the columns of q and k from head_dim_v on, or None.
    """

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    out: Any


class Signals(NamedTuple):
    """Barriers: what has arrived, what is free again. `turn`: how many warpgroups take turns at
    issuing products, or None: any may at any time. `numbers`: Numbers, or None; of barriers of the
    hardware that stand for some of the others."""

    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    turn: Any
    numbers: Any


@gluon.jit
def allocate(desc, SLOTS: gl.constexpr, TILE: gl.constexpr, DIM: gl.constexpr):
    """Shared memory as boxes [slots * boxes of a tile, *box] and as tiles [SLOTS, TILE, DIM]."""
    BOX: gl.constexpr = desc.block_type.shape
    BOXES: gl.constexpr = TILE * DIM // (BOX[1] * BOX[2] * BOX[3])
    shape: gl.constexpr = [SLOTS * BOXES, BOX[0], BOX[1], BOX[2], BOX[3]]
    SWIZZLE: gl.constexpr = desc.layout.swizzle_byte_width
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, desc.dtype.primitive_bitwidth, rank=2)
    boxes = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return boxes, reinterpret(boxes, desc.dtype, [SLOTS, TILE, DIM], layout)


@gluon.jit
def wait_for_room(signals, done):
    """Wait until the row tile of q is used up, of `done` before, that had the place of the next."""
    SLOTS: gl.constexpr = signals.q_full.shape[0]
    mbarrier.wait(signals.q_free.index(done % SLOTS), (done // SLOTS & 1) ^ 1)


@gluon.jit
def ask_rows(maps, boxes, signals, own, done, WARPGROUPS: gl.constexpr):
    """Have q of a row tile copied, the one after `done`."""
    SLOTS: gl.constexpr = signals.q_full.shape[0]
    slot = done % SLOTS
    full = signals.q_full.index(slot)
    BYTES: gl.constexpr = WARPGROUPS * maps.q.block_type.nbytes
    if maps.q_rest is None:
        mbarrier.expect(full, BYTES)
    else:
        mbarrier.expect(full, BYTES + WARPGROUPS * maps.q_rest.block_type.nbytes)
    TOKENS: gl.constexpr = maps.q.block_type.shape[1]
    for w in gl.static_range(WARPGROUPS):
        t = own.first_q + (own.tile * WARPGROUPS + w) * TOKENS
        async_load(maps.q, [own.b, t, own.head, 0], full, boxes.q.index(slot * WARPGROUPS + w))
        if maps.q_rest is not None:
            at = [own.b, t, own.head, maps.q.block_type.shape[3]]
            async_load(maps.q_rest, at, full, boxes.q_rest.index(slot * WARPGROUPS + w))


@gluon.jit
def wait_rows(signals, done):
    """Wait for q of the item after `done` others."""
    SLOTS: gl.constexpr = signals.q_full.shape[0]
    mbarrier.wait(signals.q_full.index(done % SLOTS), done // SLOTS & 1)


@gluon.jit
def page_of(work, own, key, PAGE_SIZE: gl.constexpr):
    """The page of a key; any for one that the sequence does not have."""
    entry = (
        work.keys.table_ptr + own.sequence.to(gl.int64) * work.keys.stride_table + key // PAGE_SIZE
    )
    return gl.load(entry, mask=key < own.len_k, other=0)


@gluon.jit
def ask_keys(
    desc,  # of keys, of their rest or of values
    boxes,
    tiles,
    full,
    slot,
    work,  # Work
    own,  # Own
    tile,
    h,
    apart,  # not None: in order, whatever keys are
    FIRST: gl.constexpr,  # column
    PAGE_SIZE: gl.constexpr,
):
    """Have a tile of keys copied."""
    PAGES: gl.constexpr = work.keys.table_ptr is not None and apart is None
    TILE_N: gl.constexpr = tiles.shape[1]
    BOX: gl.constexpr = desc.block_type.shape[1]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    BOXES: gl.constexpr = TILE_N // BOX
    PANELS: gl.constexpr = tiles.shape[2] // COLUMNS
    AHEAD: gl.constexpr = min(BOXES, 4)  # look-ups at a time, which else wait for copies
    for first in gl.static_range(0, BOXES, AHEAD):
        pages = ()
        if PAGES:
            for n in gl.static_range(AHEAD):
                page = page_of(work, own, tile * TILE_N + (first + n) * BOX, PAGE_SIZE)
                pages += (page,)  # type: ignore[assignment]
        for n in gl.static_range(AHEAD):
            outer = own.b
            inner = own.first_k + tile * TILE_N + (first + n) * BOX
            if PAGES:
                outer = pages[n]
                inner %= PAGE_SIZE
            if apart is not None:
                outer = own.sequence
            for panel in gl.static_range(PANELS):
                at = [outer, inner, h, FIRST + panel * COLUMNS]
                box = boxes.index((slot * PANELS + panel) * BOXES + first + n)
                async_load(desc, at, full, box)


@gluon.jit
def ask_first(
    work,  # Work
    own,  # Own
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    signals,  # Signals
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    ASKED: gl.constexpr,  # at most as many as there are places
    PAGE_SIZE: gl.constexpr,
):
    """Have q and the first ASKED tiles of an item copied, before there is a warp for that."""
    TILE_M: gl.constexpr = maps.q.block_type.shape[1] * PACK
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM: gl.constexpr = tiles.k.shape[2]
    BYTES: gl.constexpr = TILE_N * DIM * tiles.k.dtype.primitive_bitwidth // 8
    visit, steps, asking, _ = own_visit(work, own, PACK, TILE_M, TILE_N)
    h = own.head // GROUP
    for i in gl.static_range(ASKED):
        if i < steps:
            tile = tile_of_step(visit, i, asking)
            full = signals.k_full.index(i)
            mbarrier.expect(full, BYTES)
            ask_keys(maps.k, boxes.k, tiles.k, full, i, work, own, tile, h, None, 0, PAGE_SIZE)
            if i == 0:
                ask_rows(maps, boxes, signals, own, 0, 1)
            full = signals.v_full.index(i)
            mbarrier.expect(full, BYTES)
            ask_keys(maps.v, boxes.v, tiles.v, full, i, work, own, tile, h, None, 0, PAGE_SIZE)


@gluon.jit
def produce(
    to_copy,  # Work, of Parts maps, boxes and tiles, Signals
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ASKED: gl.constexpr,  # steps of the first item that `ask_first` has asked for, and q; or 0
    PDL: gl.constexpr,  # then `combine` may start, which waits for this grid to be done
):
    """Have q, keys and values of all items copied, each as soon as there is room."""
    work, maps, boxes, tiles, signals = to_copy
    TILE_M: gl.constexpr = WARPGROUPS * maps.q.block_type.shape[1] * PACK
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM: gl.constexpr = tiles.k.shape[2]
    K_BYTES: gl.constexpr = TILE_N * DIM * tiles.k.dtype.primitive_bitwidth // 8
    V_BYTES: gl.constexpr = TILE_N * DIM * tiles.v.dtype.primitive_bitwidth // 8
    n = gl.program_id(0) * 0
    done = n
    for r in range(round_count(work)):
        index = index_in_round(work, r)
        if has_number(work, index):
            own = own_item(work, index, PACK, TILE_M)
            if own.tile * TILE_M < own.len_q * PACK:
                visit, steps, asking, _ = own_visit(work, own, PACK, TILE_M, TILE_N)
                h = own.head // GROUP
                asked = n * 0
                if ASKED:
                    asked = gl.where(r == 0, gl.minimum(ASKED, steps), 0)
                    n += asked
                for i in range(asked, steps):
                    tile = tile_of_step(visit, i, asking)
                    slot = n % STAGES
                    free = (n // STAGES & 1) ^ 1
                    what = slot, work, own, tile, h
                    if signals.k_free is not None:
                        mbarrier.wait(signals.k_free.index(slot), free)
                    elif n >= STAGES:
                        wait(signals.numbers.k_free + slot, signals.numbers.k_threads)
                    full = signals.k_full.index(slot)
                    if maps.k_rest is None:
                        mbarrier.expect(full, K_BYTES)
                    else:
                        mbarrier.expect(full, K_BYTES + TILE_N * tiles.k_rest.shape[2] * 2)
                        rest = maps.k_rest, boxes.k_rest, tiles.k_rest, full
                        ask_keys(*rest, *what, None, DIM, PAGE_SIZE)
                    ask_keys(maps.k, boxes.k, tiles.k, full, *what, None, 0, PAGE_SIZE)
                    if i == 0:
                        wait_for_room(signals, done)
                        ask_rows(maps, boxes, signals, own, done, WARPGROUPS)
                    after = tile_of_step(visit, gl.minimum(i + 1, steps - 1), asking)
                    foresee(work.keys, own.sequence, after, PAGE_SIZE, TILE_N)
                    mbarrier.wait(signals.v_free.index(slot), free)
                    full = signals.v_full.index(slot)
                    mbarrier.expect(full, V_BYTES)
                    of_v = work.keys.apart
                    ask_keys(maps.v, boxes.v, tiles.v, full, *what, of_v, 0, PAGE_SIZE)
                    n += 1
                if steps > 0:
                    done += 1
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
