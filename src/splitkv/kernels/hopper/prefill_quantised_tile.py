"""The roles of `hopper_prefill_quantised`: a warpgroup makes values ready, others multiply.

The steps, rings and turns are those of prefill_tile.py. What is added: values arrive as they are
stored, and the producing warpgroup turns them, one step behind the copies, into what the second
product takes (see `widen` and `transpose`); scales of single keys it lays beside them. A q of 16
bits each warpgroup rounds for itself, before its first product (see `round_rows`).

p of 8 bits: e4m3 has weights up to 2 ** 8 of its 448 instead of 1, so that small ones stay in its
range. int8 has weights up to 127, and as its steps are all of one size, they are relative to the
maximum of a row in the tile of keys, not in all tiles up to it. Where values have scales of their
own, these join the exponent, p = exp2(s + log2(scale) - m), so that no weight is rounded away
because its scale is small; sums are of p / scale then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.eight_bits import (
    PART,
    bytes_of_words,
    ordered_columns,
    transpose,
    widen,
    words_of,
)
from splitkv.kernels.hopper.prefill_load import ROWS, ask_rows
from splitkv.kernels.hopper.prefill_rows import (
    index_in_round,
    own_item,
    own_visit,
    round_count,
    tile_of_step,
)
from splitkv.kernels.hopper.prefill_tile import (
    along_rows,
    before_wait,
    multiply_keys,
    sums_of_threads,
    write,
)
from splitkv.kernels.hopper.ring import async_load
from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.score import score_log2
from splitkv.kernels.tile.softmax import finite_or_zero

SLACK = gl.constexpr(8.0)  # in base 2, by which weights of 16 bits may be larger than 1
LEAST_SCALE = gl.constexpr(2.0**-100)  # a scale of 0 is that of a row of zeros


class Scales(NamedTuple):
    """Scales of q, k and v, and of each the elements between sequences, tokens and heads: 0 along
    what has one scale. q_ptr: None where q is still to be rounded; then `wide` are its rows as they
    came, in shared memory [warpgroups, ROWS, dim].

    Where every key has scales of its own, also those of a step, in shared memory [slots, TILE_N]:
    of k; of v; and what says that they are there. For a p of 8 bits `of_v` is the logarithm, and
    there is `inverse`, 1 / scale; else None.
    """

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    q: Any
    k: Any
    v: Any
    of_k: Any
    of_v: Any
    inverse: Any
    full: Any
    wide: Any


class Stored(NamedTuple):
    """Values as they are stored, in shared memory: boxes of TMA; what says that they are there; the
    same as [slots * parts, PART, columns], of 16 bits for `transpose`. `ready`: the values made
    ready as [slots * parts, dim, PART // 2] of 16 bits for `transpose`, or None: to be widened."""

    boxes: Any
    full: Any
    parts: Any
    ready: Any


@gluon.constexpr_function
def most_log2(dtype):
    """The largest weight of a row, in base 2, where p is of this type."""
    return {"fp8e4nv": 8.0, "int8": 6.9886846867721655}.get(dtype.name, 0.0)


@gluon.constexpr_function
def is_wide(dtype):
    """Whether values are multiplied in 16 bits."""
    return dtype.primitive_bitwidth == 16


@gluon.jit
def make_ready(n, count, stored, tiles, signals, TILE_N: gl.constexpr, STAGES: gl.constexpr):
    """Turn the values of step n, of which `count` keys exist, into what wgmma takes."""
    raw = n % 2
    slot = n % STAGES
    mbarrier.wait(stored.full.index(raw), n // 2 & 1)
    mbarrier.wait(signals.v_free.index(slot), (n // STAGES & 1) ^ 1)
    PARTS: gl.constexpr = TILE_N // PART
    for i in gl.static_range(PARTS):
        some = stored.parts.index(raw * PARTS + i)
        if stored.ready is None:
            widen(some, tiles.v.index(slot).slice(i * PART, PART))
        else:
            transpose(some, stored.ready.index(slot * PARTS + i), count - i * PART)
    fence_async_shared()
    mbarrier.arrive(signals.v_full.index(slot), count=1)


@gluon.jit
def load_scales(ptr, strides, own, h, key, TILE_N: gl.constexpr):
    """Scales of the keys of a step [TILE_N], 0 behind the last key."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    keys = key + gl.arange(0, TILE_N, layout=layout)
    row = own.b.to(gl.int64) * strides.b + (own.first_k + keys).to(gl.int64) * strides.t
    return gl.load(ptr + row + h * strides.h, mask=keys < own.len_k, other=0.0)


@gluon.jit
def store_scales(n, of_k, of_v, scales):
    """Lay the scales of step n out for those who multiply.

    The slot was last used by step n - slots, whose values are used up: `make_ready` of step n - 1
    waited for those of n - 1 - STAGES, and there is a slot more than STAGES.
    """
    slot = n % scales.of_k.shape[0]
    scales.of_k.index(slot).store(of_k)
    if scales.inverse is None:
        scales.of_v.index(slot).store(of_v)
    else:
        of_v = gl.where(of_v < LEAST_SCALE, LEAST_SCALE, of_v)
        scales.of_v.index(slot).store(gl.log2(of_v))
        scales.inverse.index(slot).store(1.0 / of_v)
    mbarrier.arrive(scales.full.index(slot), count=1)


@gluon.jit
def produce(
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts, of which v are the values made ready
    scales,  # Scales
    signals,  # Signals
    stored,  # Stored
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Have q, keys and values of all row tiles copied and the values made ready."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    n = gl.program_id(0) * 0
    done = n
    count = n  # keys from the first of the step before on
    for r in range(round_count(work)):
        index = index_in_round(r)
        if index < work.items:
            own = own_item(work, index, PACK, TILE_M)
            if own.tile * TILE_M < own.len_q * PACK:
                visit, steps, asking, _ = own_visit(work, own, PACK, TILE_M, TILE_N)
                h = own.head // GROUP
                for i in range(0, steps):
                    key = tile_of_step(visit, i, asking) * TILE_N
                    if scales.of_k is not None:
                        of_k = load_scales(scales.k_ptr, scales.k, own, h, key, TILE_N)
                        of_v = load_scales(scales.v_ptr, scales.v, own, h, key, TILE_N)
                    slot = n % STAGES
                    mbarrier.wait(signals.k_free.index(slot), (n // STAGES & 1) ^ 1)
                    first = own.first_k + key
                    full = signals.k_full.index(slot)
                    mbarrier.expect(full, maps.k.block_type.nbytes)
                    async_load(maps.k, [own.b, first, h, 0], full, boxes.k.index(slot))
                    if i == 0 and done == 0:
                        ask_rows(maps, boxes, signals, own, done, PACK, WARPGROUPS)
                    full = stored.full.index(n % 2)
                    mbarrier.expect(full, maps.v.block_type.nbytes)
                    async_load(maps.v, [own.b, first, h, 0], full, stored.boxes.index(n % 2))
                    if n > 0:
                        make_ready(n - 1, count, stored, tiles, signals, TILE_N, STAGES)
                    if i == 0 and done > 0:  # the values are still waited for, the rows free soon
                        ask_rows(maps, boxes, signals, own, done, PACK, WARPGROUPS)
                    if scales.of_k is not None:
                        store_scales(n, of_k, of_v, scales)
                    count = own.len_k - key
                    n += 1
                done += 1
    if n > 0:
        make_ready(n - 1, count, stored, tiles, signals, TILE_N, STAGES)


@gluon.jit
def round_rows(wide, rows, M: gl.constexpr):
    """Write 8 bits of the rows `wide`, of 16, and give the scale of each."""
    DIM: gl.constexpr = wide.shape[1]
    MOST: gl.constexpr = 127.0 if rows.dtype == gl.int8 else 448.0
    # rows lie as those of the scores
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32])
    x = wide.load(layout).to(gl.float32)
    size = gl.where(x == x, gl.abs(x), float("inf"))
    scale = gl.maximum(gl.max(size, 1) / MOST, LEAST_SCALE)
    y = x * (1.0 / scale)[:, None]
    if rows.dtype == gl.int8:
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: no room for a fraction
        y = gl.where(y == y, y, 0.0)
    rows.store(y.to(rows.dtype))
    fence_async_shared()
    return gl.convert_layout(scale, M, assert_trivial=True)


@gluon.jit
def scales_of_rows(scales, own, rows, PACK: gl.constexpr):
    """Those of a q that came in 8 bits."""
    ok = rows < own.len_q * PACK
    t = own.first_q + rows // PACK
    head = own.head + rows % PACK
    at = own.b.to(gl.int64) * scales.q.b + t.to(gl.int64) * scales.q.t + head * scales.q.h
    return gl.load(scales.q_ptr + at, mask=ok, other=1.0)


@gluon.jit
def row_factors(factor, scales, work, own, GROUP: gl.constexpr):
    """By what products are multiplied to be scores, as far as rows tell; factor: scales of rows."""
    b = own.b.to(gl.int64)
    if scales.of_k is None:
        factor *= gl.load(scales.k_ptr + b * scales.k.b + own.head // GROUP * scales.k.h)
    if work.scoring.softcap is None:
        factor *= work.scoring.scale
    # not 0: a masked score of -inf stays that
    return gl.where(factor < LEAST_SCALE, LEAST_SCALE, factor)


@gluon.jit
def weights(qk, m, factor, work, own, n, tile, asks, pos, inside, scales, tiles):
    """(p in fp32, sums of weights by thread, m, shrink) after the products of one more tile.

    shrink: by how much shrinks what came before; and this tile's p @ v, if its p is int8
    """
    TILE_N: gl.constexpr = qk.shape[1]
    dtype: gl.constexpr = tiles.v.dtype
    along: gl.constexpr = gl.SliceLayout(0, qk.type.layout)
    s = qk.to(gl.float32)
    if scales.of_k is not None:
        SLOTS: gl.constexpr = scales.of_k.shape[0]
        slot = n % SLOTS
        mbarrier.wait(scales.full.index(slot), n // SLOTS & 1)
        s = s * scales.of_k.index(slot).load(along)[None, :]
    # the last factor is left to the exponential where nothing comes between
    if work.scoring.softcap is not None:
        s = s * factor[:, None]
        s = score_log2(s, work.scoring.scale, work.scoring.softcap, None, None, None)
        factor = gl.full([ROWS], 1.0, gl.float32, m.type.layout)
    if scales.inverse is not None:
        s = s * factor[:, None] + scales.of_v.index(slot).load(along)[None, :]
        factor = gl.full([ROWS], 1.0, gl.float32, m.type.layout)
    if asks:
        offs_n = tile * TILE_N + inside
        s = gl.where(visible(work.bounds, pos, offs_n, own.len_k), s, float("-inf"))
    highest = gl.max(s, 1) * factor - most_log2(dtype)
    if is_wide(dtype):
        m_new = gl.where(highest > m + SLACK, highest, m)
    else:
        m_new = gl.maximum(m, highest)
    top = finite_or_zero(m_new)
    shrink = gl.exp2(m - top)
    own_shrink = shrink
    base = top
    if dtype == gl.int8:
        base = gl.where(highest == float("-inf"), top, highest)
        own_shrink = gl.exp2(base - top)
    x = gl.exp2(s * factor[:, None] - base[:, None])
    if scales.inverse is not None:
        sums = sums_of_threads(x * scales.inverse.index(slot).load(along)[None, :])
    else:
        sums = sums_of_threads(x)
        if scales.of_k is not None:
            x = x * scales.of_v.index(slot).load(along)[None, :]
    if dtype == gl.int8:
        sums = sums * along_rows(own_shrink, sums)
    return x, sums, m_new, (shrink, own_shrink)


@gluon.constexpr_function
def shrinking(elements):
    """Instructions that multiply so many sums of a thread, and their constraints: see `shrunk`."""
    sums, by = range(elements), elements * 2
    code = f"""{{
    .reg .pred some;
    setp.ne.f32 some, ${by}, 0f3F800000;
    setp.ne.or.f32 some, ${by + 2}, 0f3F800000, some;
    vote.sync.any.pred some, some, 0xffffffff;
    @!some bra.uni AS_IT_IS;
    """
    code += "".join(f"mul.rn.f32 ${i}, ${i}, ${by + i};" for i in sums)
    code += "AS_IT_IS: }"
    constraints = ["=r"] * elements + [str(i) for i in sums] + ["r"] * elements
    return code, ",".join(constraints)


@gluon.jit
def shrunk(acc, by):
    """acc times `by` [ROWS], passed over by warps in which that is 1 for all rows.

    A thread has two columns of a row, two of the row 8 below, and so on.
    """
    ELEMENTS: gl.constexpr = acc.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = shrinking(ELEMENTS)
    factors = along_rows(by, acc).broadcast_to(acc.shape)
    return gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [acc, factors],
        dtype=gl.float32,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.jit
def multiply_values(p, tiles, slot, acc):
    """Start p @ v: added to acc in 16 bits; alone in e4m3, of whose sums the tensor cores keep few
    bits, and in int8, where they are integers."""
    O: gl.constexpr = acc.type.layout
    if is_wide(tiles.v.dtype):
        product = warpgroup_mma(p, tiles.v.index(slot), acc, is_async=True)
    else:
        p = bytes_of_words(p, tiles.v.dtype, gl.DotOperandLayout(0, O, 4))
        SUM: gl.constexpr = gl.int32 if tiles.v.dtype == gl.int8 else gl.float32
        start = gl.zeros(acc.shape, SUM, O)
        v = tiles.v.index(slot).permute((1, 0))
        product = warpgroup_mma(p, v, start, use_acc=False, is_async=True)
    return product


@gluon.jit
def rounded(x, tiles, acc):
    """p as `multiply_values` takes it."""
    if is_wide(tiles.v.dtype):
        p = gl.convert_layout(x.to(tiles.v.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    else:
        p = words_of(x, tiles.v.dtype)
    return p


@gluon.jit
def added(acc, product, shrink, tiles):
    """acc and a product that was summed alone, of which `shrink` says what they shrink by."""
    before, own = shrink
    acc = acc * along_rows(before, acc)
    if tiles.v.dtype == gl.int8:
        acc += product.to(gl.float32) * along_rows(own, acc)
    else:
        acc += product
    return acc


@gluon.jit
def step(
    acc,  # [ROWS, DIM_V]; e4m3: without step n - 1
    l,  # [ROWS, 4], see `sums_of_threads`
    m,  # [ROWS] in base 2
    shrink,  # [ROWS] each: by how much step n - 1 shrank acc, and its own product
    p,  # [ROWS, TILE_N] of step n - 1
    n,
    tile,  # of keys
    asks,  # whether a row may see a part of the tile
    factor,  # [ROWS]
    work,  # Work
    own,  # Own
    tiles,  # Parts
    scales,  # Scales
    signals,  # Signals
    pos,  # [ROWS, 1]
    inside,  # [1, TILE_N]
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """(acc, l, m, shrink, p) after step n, whose p is still to be multiplied."""
    S: gl.constexpr = m.type.layout.parent
    slot = n % STAGES
    last_slot = (n - 1) % STAGES
    if signals.turn is not None:
        mbarrier.wait(signals.turn.index(W), (n & 1) ^ (W == 0))
    mbarrier.wait(signals.k_full.index(slot), n // STAGES & 1)
    qk = multiply_keys(tiles, slot, S, W)
    mbarrier.wait(signals.v_full.index(last_slot), (n - 1) // STAGES & 1)
    product = multiply_values(p, tiles, last_slot, acc)
    if signals.turn is not None:
        mbarrier.arrive(signals.turn.index((W + 1) % WARPGROUPS), count=1)
    qk = warpgroup_mma_wait(1, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    rest = work, own, n, tile, asks, pos, inside, scales, tiles
    x, sums, m, shrink_n = weights(qk, m, factor, *rest)
    sums = before_wait(sums)
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(signals.v_free.index(last_slot), count=1)
    if is_wide(tiles.v.dtype):
        acc = shrunk(product, shrink_n[0])
    else:
        acc = added(acc, product, shrink, tiles)
    l = l * along_rows(shrink_n[0], l) + sums
    return acc, l, m, shrink_n, rounded(x, tiles, acc)


@gluon.jit
def consume(
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    scales,  # Scales
    signals,  # Signals
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The rows of warpgroup W in all row tiles."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    dtype: gl.constexpr = tiles.v.dtype
    WIDE: gl.constexpr = is_wide(dtype)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16 if WIDE else 32])
    M: gl.constexpr = gl.SliceLayout(1, S)
    offs_m = W * ROWS + gl.arange(0, ROWS, layout=M)
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, S))[None, :]
    n = gl.program_id(0) * 0
    done = n
    for r in range(round_count(work)):
        index = index_in_round(r)
        if index < work.items:
            own = own_item(work, index, PACK, TILE_M)
            if own.tile * TILE_M < own.len_q * PACK:
                visit, steps, asking, _ = own_visit(work, own, PACK, TILE_M, TILE_N)
                rows = own.tile * TILE_M + offs_m
                pos = (own.len_k - own.len_q + rows // PACK)[:, None]
                if scales.wide is None:
                    factor = scales_of_rows(scales, own, rows, PACK)
                mbarrier.wait(signals.q_full.index(0), done & 1)
                if scales.wide is not None:
                    factor = round_rows(scales.wide.index(W), tiles.q.index(W), M)
                    mbarrier.arrive(signals.q_free.index(0), count=1)
                factor = row_factors(factor, scales, work, own, GROUP)
                if signals.turn is not None:
                    mbarrier.wait(signals.turn.index(W), (n & 1) ^ (W == 0))
                slot = n % STAGES
                mbarrier.wait(signals.k_full.index(slot), n // STAGES & 1)
                qk = multiply_keys(tiles, slot, S, W)
                if signals.turn is not None:
                    mbarrier.arrive(signals.turn.index((W + 1) % WARPGROUPS), count=1)
                qk = warpgroup_mma_wait(0, deps=[qk])
                mbarrier.arrive(signals.k_free.index(slot), count=1)
                m = gl.full([ROWS], float("-inf"), gl.float32, M)
                tile = tile_of_step(visit, 0, asking)
                first = work, own, n, tile, True, pos, inside, scales, tiles
                x, l, m, shrink = weights(qk, m, factor, *first)
                acc = gl.zeros([ROWS, DIM], gl.float32, O)
                p = rounded(x, tiles, acc)
                rest = factor, work, own, tiles, scales, signals, pos, inside
                kind = W, WARPGROUPS, STAGES
                for i in range(1, steps):
                    tile = tile_of_step(visit, i, asking)
                    acc, l, m, shrink, p = step(
                        acc, l, m, shrink, p, n + i, tile, i < asking, *rest, *kind
                    )
                n += steps
                if scales.wide is None:
                    mbarrier.arrive(signals.q_free.index(0), count=1)
                slot = (n - 1) % STAGES
                mbarrier.wait(signals.v_full.index(slot), (n - 1) // STAGES & 1)
                product = multiply_values(p, tiles, slot, acc)
                product = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(signals.v_free.index(slot), count=1)
                if WIDE:
                    acc = product
                else:
                    acc = ordered_columns(added(acc, product, shrink, tiles))
                if scales.of_k is None:
                    of_v = own.b.to(gl.int64) * scales.v.b + own.head // GROUP * scales.v.h
                    acc = acc * gl.load(scales.v_ptr + of_v)
                l = gl.convert_layout(gl.sum(l, 1), M)
                where = own, work, output, W, GROUP, PACK, TILE_M
                write(acc, l, m, maps, boxes, tiles, *where)
                done += 1
    tma.store_wait(0)
