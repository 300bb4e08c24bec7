"""The warpgroup of `hopper_prefill_quantised` that makes keys and values ready for the products.

They arrive as they are stored. What a product takes in 16 bits is widened, values that it takes in
8 bits are transposed: see eight_bits.py. Scales of single keys are laid beside them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from splitkv.kernels.hopper.eight_bits import PART, transpose, widen
from splitkv.kernels.hopper.numbered import READY, begin_step, wait
from splitkv.kernels.hopper.prefill_rows import (
    has_number,
    index_in_round,
    own_item,
    own_visit,
    round_count,
    tile_of_step,
)
from splitkv.kernels.hopper.prefill_scaled import LEAST_SCALE, by_key, key_at
from splitkv.kernels.hopper.ring import reinterpret, thread_barrier


class Ring(NamedTuple):
    """Tiles as they arrive, and those made of them.

    stored       [slots * parts of a tile, keys, columns]: where tiles arrive, of 16 bits and PART
                 keys for `transpose`
    ready        what is made of them: tiles to be widened into, or [slots * parts, dim, PART // 2]
                 of 16 bits for `transpose`
    full, free   of `stored`; ready_full: of `ready`, or None
    """

    stored: Any
    ready: Any
    full: Any
    free: Any
    ready_full: Any


@gluon.jit
def as_made_ready(tiles, ready, WIDENED: gl.constexpr):
    """`stored` and `ready` of a Ring, of tiles [slots, TILE_N, dim] as they arrive and tiles
    `ready`: [slots, TILE_N, dim] to be widened into, WIDENED keys at a time, or [slots, dim,
    TILE_N] of the same 8 bits."""
    DIM: gl.constexpr = tiles.shape[2]
    if ready.dtype == tiles.dtype:
        PARTS: gl.constexpr = tiles.shape[1] // PART
        SLOTS: gl.constexpr = ready.shape[0] * PARTS
        SWIZZLE: gl.constexpr = tiles.layout.swizzle_byte_width
        pairs: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, 16, rank=2)
        stored = reinterpret(tiles, gl.int16, [tiles.shape[0] * PARTS, PART, DIM // 2], pairs)
        # rows of PART keys: each part is in one piece
        narrow: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
        ready = reinterpret(ready, gl.int16, [SLOTS, DIM, PART // 2], narrow)
    else:
        SOME: gl.constexpr = tiles.shape[0] * tiles.shape[1] // WIDENED
        stored = reinterpret(tiles, tiles.dtype, [SOME, WIDENED, DIM], tiles.layout)
    return stored, ready


@gluon.jit
def make_ready(ring, n, count, of_keys, number, threads, TILE_N: gl.constexpr):
    """Turn the tile of step n, of which `count` keys exist, into what a product takes.
    Barriers from `number` on, of so many threads, say that places are free again."""
    KEYS: gl.constexpr = PART if ring.stored.dtype == gl.int16 else ring.stored.shape[1]
    PARTS: gl.constexpr = TILE_N // KEYS
    SLOTS: gl.constexpr = ring.full.shape[0]
    slot = n % SLOTS
    ready = n % READY
    mbarrier.wait(ring.full.index(slot), n // SLOTS & 1)
    if n >= READY:
        wait(number + ready, threads)
    for i in gl.static_range(PARTS):
        some = ring.stored.index(slot * PARTS + i)
        if ring.stored.dtype == gl.int16:
            transpose(some, ring.ready.index(ready * PARTS + i), count - i * KEYS)
        else:
            wide = ring.ready.index(ready).slice(i * KEYS, KEYS)
            by = None
            if of_keys is not None:
                by = of_keys.index(n % of_keys.shape[0]).slice(i * KEYS, KEYS)
            widen(some, wide, by, count - i * KEYS)
    fence_async_shared()
    thread_barrier()  # all threads have read the one and written the other
    mbarrier.arrive(ring.free.index(slot), count=1)
    if ring.ready_full is not None:
        mbarrier.arrive(ring.ready_full.index(ready), count=1)


@gluon.jit
def load_scales(ptr, strides, work, own, h, keys, PAGE_SIZE: gl.constexpr):
    """Scales of keys [TILE_N], 0 behind the last key."""
    ok = (keys >= 0) & (keys < own.len_k)
    outer = keys * 0 + own.b
    inner = own.first_k + keys
    if work.keys.table_ptr is not None:
        row = work.keys.table_ptr + own.sequence.to(gl.int64) * work.keys.stride_table
        outer = gl.load(row + keys // PAGE_SIZE, mask=ok, other=0)
        inner = keys % PAGE_SIZE
    at = outer.to(gl.int64) * strides.b + inner.to(gl.int64) * strides.t
    return gl.load(ptr + at + h * strides.h, mask=ok, other=0.0)


@gluon.jit
def store_scales(n, of_k, of_v, scales):
    """Lay the scales of step n out for those who multiply.

    The slot was last used by step n - slots, whose values are used up: `make_ready` of step n - 1
    waited until those were that had its place, and there is a slot more than such places.
    """
    SLOTS: gl.constexpr = scales.of_k.shape[0]
    slot = n % SLOTS
    if scales.inverse is None:
        # neither of a value that is not finite nor 0
        largest = gl.max(gl.where(of_v < float("inf"), of_v, LEAST_SCALE), 0)
        largest = gl.maximum(largest, LEAST_SCALE)
        scales.of_k.index(slot).store(of_k)
        scales.of_v.index(slot).store(by_key((of_v * (1.0 / largest)).to(gl.float16)))
        one = gl.full([1], 1.0, gl.float32, of_k.type.layout)
        scales.of_tile.index(2 * slot).store(one * gl.log2(largest))
        scales.of_tile.index(2 * slot + 1).store(one / largest)
    else:
        of_v = gl.where(of_v < LEAST_SCALE, LEAST_SCALE, of_v)
        scales.of_k.index(slot).store(gl.join(of_k, gl.log2(of_v)))
        scales.inverse.index(slot).store(1.0 / of_v)


@gluon.jit
def prepare(
    work,  # Work
    rings,  # what says that keys have arrived, their Ring, of None unless widened, that of values
    scales,  # Scales
    numbers,  # Numbers
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Make keys and values of all items ready, in the order in which they arrive."""
    k_full, k_ring, v_ring = rings
    n = gl.program_id(0) * 0
    places = gl.arange(0, TILE_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if scales.inverse is None:
        places = key_at(places)
    for r in range(round_count(work)):
        index = index_in_round(work, r)
        if has_number(work, index):
            own = own_item(work, index, PACK, TILE_M)
            if own.tile * TILE_M < own.len_q * PACK:
                visit, steps, asking, _ = own_visit(work, own, PACK, TILE_M, TILE_N)
                h = own.head // GROUP
                if scales.of_k is not None:
                    at = work, own, h, tile_of_step(visit, 0, asking) * TILE_N + places
                    of_k = load_scales(scales.k_ptr, scales.k, *at, PAGE_SIZE)
                    of_v = load_scales(scales.v_ptr, scales.v, *at, PAGE_SIZE)
                for i in range(0, steps):
                    count = own.len_k - tile_of_step(visit, i, asking) * TILE_N
                    if scales.of_k is not None:
                        store_scales(n, of_k, of_v, scales)
                        # of the next step, which arrive while this one is made ready
                        after = tile_of_step(visit, gl.minimum(i + 1, steps - 1), asking)
                        at = work, own, h, after * TILE_N + places
                        of_k = load_scales(scales.k_ptr, scales.k, *at, PAGE_SIZE)
                        of_v = load_scales(scales.v_ptr, scales.v, *at, PAGE_SIZE)
                    if k_ring.stored is None:
                        SLOTS: gl.constexpr = k_full.shape[0]
                        mbarrier.wait(k_full.index(n % SLOTS), n // SLOTS & 1)
                    else:
                        of_k_ring = numbers.k_free, numbers.k_threads
                        make_ready(k_ring, n, count, None, *of_k_ring, TILE_N)
                    begin_step(n, numbers)
                    of_v_ring = numbers.v_free, numbers.v_threads
                    make_ready(v_ring, n, count, scales.of_v, *of_v_ring, TILE_N)
                    n += 1
