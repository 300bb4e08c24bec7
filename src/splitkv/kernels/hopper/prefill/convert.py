"""The convert role: the warpgroup of `hopper_prefill_quantised` between copies and products.

Tiles arrive as they are stored. What a product takes in 16 bits is dequantized, values that it
takes in 8 bits are transposed: see primitives/conversion.py. Scales of single keys are laid beside
them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from splitkv.kernels.hopper.prefill.items import (
    has_number,
    has_rows,
    index_in_round,
    item_at,
    round_count,
    tile_of_step,
    tiles_of_item,
)
from splitkv.kernels.hopper.prefill.scales import LEAST_SCALE, by_key, key_at
from splitkv.kernels.hopper.primitives.conversion import PART, transpose, widen_rows_of_tile
from splitkv.kernels.hopper.primitives.named_barriers import READY, begin_step, wait
from splitkv.kernels.hopper.primitives.tma_ring import reinterpret, thread_barrier


@gluon.jit
def stored_pieces(tiles, ready, KEYS: gl.constexpr):
    """Tiles [stages, TILE_N, dim] as they arrive in the pieces that are converted at a time: for
    `transpose`, where `ready` has the same type, [pieces, PART, dim / 2] of 16 bits, else KEYS keys
    each."""
    DIM: gl.constexpr = tiles.shape[2]
    if ready.dtype == tiles.dtype:
        PIECES: gl.constexpr = tiles.shape[0] * (tiles.shape[1] // PART)
        SWIZZLE: gl.constexpr = tiles.layout.swizzle_byte_width
        pairs: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, 16, rank=2)
        stored = reinterpret(tiles, gl.int16, [PIECES, PART, DIM // 2], pairs)
    else:
        SOME: gl.constexpr = tiles.shape[0] * tiles.shape[1] // KEYS
        stored = reinterpret(tiles, tiles.dtype, [SOME, KEYS, DIM], tiles.layout)
    return stored


@gluon.jit
def ready_pieces(tiles, ready):
    """Tiles `ready` in the pieces that are written at a time: of 8 bits, of the type of `tiles`,
    [pieces, dim, PART / 2] of 16 bits for `transpose`."""
    if ready.dtype == tiles.dtype:
        PIECES: gl.constexpr = ready.shape[0] * (tiles.shape[1] // PART)
        # rows of PART keys: each piece is contiguous
        narrow: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
        ready = reinterpret(ready, gl.int16, [PIECES, tiles.shape[2], PART // 2], narrow)
    return ready


@gluon.jit
def convert_tile(ring, n, count, scales, number, threads, TILE_N: gl.constexpr):
    """Converts the tile of step n, of which `count` keys exist, to what a product takes.

    ring             ConvertRing
    scales           by which keys are multiplied [stages, TILE_N], or None
    number, threads  the named barriers from `number` on say that stages of `ready` are empty
    """
    KEYS: gl.constexpr = PART if ring.stored.dtype == gl.int16 else ring.stored.shape[1]
    PIECES: gl.constexpr = TILE_N // KEYS
    STAGES: gl.constexpr = ring.full.shape[0]
    stage = n % STAGES
    ready = n % READY
    mbarrier.wait(ring.full.index(stage), n // STAGES & 1)
    if n >= READY:
        wait(number + ready, threads)
    for i in gl.static_range(PIECES):
        piece = ring.stored.index(stage * PIECES + i)
        if ring.stored.dtype == gl.int16:
            transpose(piece, ring.ready.index(ready * PIECES + i), count - i * KEYS)
        else:
            dequantized = ring.ready.index(ready).slice(i * KEYS, KEYS)
            by = None
            if scales is not None:
                by = scales.index(n % scales.shape[0]).slice(i * KEYS, KEYS)
            widen_rows_of_tile(piece, dequantized, by, count - i * KEYS)
    fence_async_shared()
    thread_barrier()  # all threads have read the one and written the other
    mbarrier.arrive(ring.empty.index(stage), count=1)
    if ring.ready_full is not None:
        mbarrier.arrive(ring.ready_full.index(ready), count=1)


@gluon.jit
def load_key_scales(ptr, strides, batch, item, kv_head, keys, CONFIG: gl.constexpr):
    """Scales of keys [TILE_N], 0 behind the last key."""
    ok = (keys >= 0) & (keys < item.len_k)
    outer = keys * 0 + item.b
    inner = item.first_k + keys
    if batch.keys.table_ptr is not None:
        row = batch.keys.table_ptr + item.sequence.to(gl.int64) * batch.keys.stride_table
        outer = gl.load(row + keys // CONFIG.page_size, mask=ok, other=0)
        inner = keys % CONFIG.page_size
    at = outer.to(gl.int64) * strides.b + inner.to(gl.int64) * strides.t
    return gl.load(ptr + at + kv_head * strides.h, mask=ok, other=0.0)


@gluon.jit
def store_key_scales(n, of_k, of_v, scales):
    """Stores the scales of the keys of step n [TILE_N] in shared memory for the mma roles: see
    OperandScales.

    The stage was last used by step n - stages, whose values are used up: `convert_tile` of step
    n - 1 waited until those were that had its place, and there is a stage more than such places.
    """
    STAGES: gl.constexpr = scales.of_k.shape[0]
    stage = n % STAGES
    if scales.inverse is None:
        # neither of a value that is not finite nor 0
        largest = gl.max(gl.where(of_v < float("inf"), of_v, LEAST_SCALE), 0)
        largest = gl.maximum(largest, LEAST_SCALE)
        scales.of_k.index(stage).store(of_k)
        scales.of_v.index(stage).store(by_key((of_v * (1.0 / largest)).to(gl.float16)))
        one = gl.full([1], 1.0, gl.float32, of_k.type.layout)
        scales.of_tile.index(2 * stage).store(one * gl.log2(largest))
        scales.of_tile.index(2 * stage + 1).store(one / largest)
    else:
        of_v = gl.where(of_v < LEAST_SCALE, LEAST_SCALE, of_v)
        scales.of_k.index(stage).store(gl.join(of_k, gl.log2(of_v)))
        scales.inverse.index(stage).store(1.0 / of_v)


@gluon.jit
def convert_step(converts, n, count, TILE_N: gl.constexpr):
    """Converts the keys and values of step n, of which `count` exist, and tells the mma roles."""
    rings, scales = converts.rings, converts.scales
    named = converts.named
    if rings.k.stored is None:
        STAGES: gl.constexpr = rings.k_full.shape[0]
        mbarrier.wait(rings.k_full.index(n % STAGES), n // STAGES & 1)
    else:
        convert_tile(rings.k, n, count, None, named.k_empty, named.k_threads, TILE_N)
    begin_step(n, named)
    convert_tile(rings.v, n, count, scales.of_v, named.v_empty, named.v_threads, TILE_N)


@gluon.jit
def convert_role(converts, CONFIG: gl.constexpr):
    """The convert role: makes keys and values of all items ready to be multiplied, in the order in
    which they arrive."""
    batch, scales = converts.batch, converts.scales
    TILE_N: gl.constexpr = CONFIG.tile_n
    n = gl.program_id(0) * 0
    places = gl.arange(0, TILE_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if scales.inverse is None:
        places = key_at(places)
    for r in range(round_count(batch)):
        index = index_in_round(batch, r)
        if has_number(batch, index):
            item = item_at(batch, index, CONFIG)
            if has_rows(item, CONFIG):
                n = convert_item(converts, item, n, places, CONFIG)


@gluon.jit
def convert_item(converts, item, n, places, CONFIG: gl.constexpr):
    """Converts the keys and values of an item, from step n on; returns the step after.

    places   [TILE_N], the keys of a tile in the order of their scales
    """
    batch, scales = converts.batch, converts.scales
    TILE_N: gl.constexpr = CONFIG.tile_n
    tiles = tiles_of_item(batch, item, CONFIG)
    kv_head = item.head // CONFIG.group
    if scales.of_k is not None:
        keys = tile_of_step(tiles, 0) * TILE_N + places
        of_k = load_key_scales(scales.k_ptr, scales.k, batch, item, kv_head, keys, CONFIG)
        of_v = load_key_scales(scales.v_ptr, scales.v, batch, item, kv_head, keys, CONFIG)
    for i in range(0, tiles.steps):
        count = item.len_k - tile_of_step(tiles, i) * TILE_N
        if scales.of_k is not None:
            store_key_scales(n, of_k, of_v, scales)
            # of the next step, which arrive while this one is made ready
            after = tile_of_step(tiles, gl.minimum(i + 1, tiles.steps - 1))
            keys = after * TILE_N + places
            of_k = load_key_scales(scales.k_ptr, scales.k, batch, item, kv_head, keys, CONFIG)
            of_v = load_key_scales(scales.v_ptr, scales.v, batch, item, kv_head, keys, CONFIG)
        convert_step(converts, n, count, TILE_N)
        n += 1
    return n
