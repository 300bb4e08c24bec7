"""Steps with keys and values in 8 bits: scales, and products of 8 bits or of widened numbers.

Rows of q are rounded to the type of the keys as they are multiplied, by each warpgroup for itself,
before its first product: to 8 bits with a scale of the row, or beside widened keys to fp16 with a
power of two taken out, which keeps what bf16 can hold. A q that is of that type stays as it is.

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
    warpgroup_mma,
)

from splitkv.kernels.hopper.eight_bits import (
    bytes_of_words,
    halves_of_words,
    ordered_columns,
    words_of,
    words_of_pairs,
)
from splitkv.kernels.hopper.prefill_load import ROWS, wait_rows
from splitkv.kernels.hopper.prefill_mask import MINUS_INFINITY, choose, seen_keys
from splitkv.kernels.hopper.prefill_sums import (
    along_rows,
    grown,
    max_of_rows,
    shrunk,
    sums_of_threads,
)
from splitkv.kernels.tile.score import score_log2
from splitkv.kernels.tile.softmax import finite_or_zero

UNSEEN = gl.constexpr(-(2**31))  # less than any sum of products of 8 bits
LEAST_SCALE = gl.constexpr(2.0**-100)  # a scale of 0 is that of a row of zeros


class Scales(NamedTuple):
    """Scales of q, k and v, and of each the elements between sequences or pages, tokens and heads:
    0 along what has one scale. q_ptr: None where q has none. `wide` are rows that are still to be
    rounded, as they came, in shared memory [warpgroups, ROWS, dim], or None.

    Where every key has scales of its own, also those of a step, in shared memory [slots, TILE_N]:
    of k; of v; and what says that they are there. For a p of fp16 or 8 bits `of_v` is the
    logarithm, and there is `inverse`, 1 / scale; else None.
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


@gluon.constexpr_function
def most_log2(dtype):
    """The largest weight of a row, in base 2, where p is of this type."""
    return {"fp8e4nv": 8.0, "int8": 6.9886846867721655}.get(dtype.name, 0.0)


@gluon.constexpr_function
def is_wide(dtype):
    """Whether values are multiplied in 16 bits."""
    return dtype.primitive_bitwidth == 16


@gluon.jit
def round_rows(wide, rows, M: gl.constexpr):
    """Write the rows `wide` in the type of `rows`, and give the scale of each."""
    DIM: gl.constexpr = wide.shape[1]
    MOST: gl.constexpr = 127.0 if rows.dtype == gl.int8 else 448.0
    # rows lie as those of the scores
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32])
    x = wide.load(layout).to(gl.float32)
    size = gl.max(gl.where(x == x, gl.abs(x), float("inf")), 1)
    if rows.dtype == gl.float16:  # the power of two below the largest, and its inverse
        bits = size.to(gl.int32, bitcast=True) & 0x7F800000
        bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
        scale = bits.to(gl.float32, bitcast=True)
        y = x * (0x7F000000 - bits).to(gl.float32, bitcast=True)[:, None]
    else:
        scale = gl.maximum(size / MOST, LEAST_SCALE)
        y = x * (1.0 / scale)[:, None]
    if rows.dtype == gl.int8:
        y = (y + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: no room for a fraction
        y = gl.where(y == y, y, 0.0)
    rows.store(y.to(rows.dtype))
    fence_async_shared()
    return gl.convert_layout(scale, M, assert_trivial=True)


@gluon.jit
def scales_of_rows(scales, own, rows, PACK: gl.constexpr):
    """Those that q came with."""
    ok = rows < own.len_q * PACK
    t = own.first_q + rows // PACK
    head = own.head + rows % PACK
    at = own.b.to(gl.int64) * scales.q.b + t.to(gl.int64) * scales.q.t + head * scales.q.h
    return gl.load(scales.q_ptr + at, mask=ok, other=1.0)


@gluon.jit
def shared_scales(own, scales, GROUP: gl.constexpr):
    """(k's, v's) scale that all keys of an item share; 1 where they do not."""
    k_scale = 1.0
    v_scale = 1.0
    if scales.k_ptr is not None:
        if scales.of_k is None:
            b, h = own.b.to(gl.int64), own.head // GROUP
            k_scale = gl.load(scales.k_ptr + b * scales.k.b + h * scales.k.h)
            v_scale = gl.load(scales.v_ptr + b * scales.v.b + h * scales.v.h)
    return k_scale, v_scale


@gluon.jit
def factor_of_rows(
    work,  # Work
    own,  # Own
    rows,  # [ROWS]
    k_scale,  # that all keys share
    done,  # items before
    tiles,  # Parts
    scales,  # Scales
    signals,  # Signals
    W: gl.constexpr,
    PACK: gl.constexpr,
    M: gl.constexpr,
):
    """By what products are multiplied to be scores, as far as rows tell, once these are there."""
    factor = gl.full([ROWS], 1.0, gl.float32, M)
    if scales.q_ptr is not None:
        factor = scales_of_rows(scales, own, rows, PACK)
    wait_rows(signals, done)
    if scales.wide is not None:
        factor *= round_rows(scales.wide.index(W), tiles.q.index(W), M)
        mbarrier.arrive(signals.q_free.index(0), count=1)
    factor *= k_scale
    if work.scoring.softcap is None:
        factor *= work.scoring.scale
    # not 0: a masked score of -inf stays that
    return gl.where(factor < LEAST_SCALE, LEAST_SCALE, factor)


@gluon.constexpr_function
def are_whole(sums, values, one_scale, plain):
    """Whether scores are compared as the integers that they are times a factor of each row: it is
    quicker, and only exponents wait for conversions. Steps that ask the mask have a branch of their
    own then, as conversions before it would be in everybody's way."""
    return sums == gl.int32 and is_wide(values) and one_scale and plain


@gluon.jit
def scaled_weights(qk, m, factor, work, own, n, tile, asks, pos, scales, tiles):
    """(p in fp32, sums of weights by thread, m, shrink) after the products of one more tile.

    shrink: by how much shrinks what came before; and this tile's p @ v, if its p is int8
    """
    dtype: gl.constexpr = tiles.v.dtype
    along: gl.constexpr = gl.SliceLayout(0, qk.type.layout)
    ONE_SCALE: gl.constexpr = scales.of_k is None
    WHOLE: gl.constexpr = are_whole(qk.dtype, dtype, ONE_SCALE, work.scoring.softcap is None)
    if not WHOLE:
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
    if WHOLE:
        if asks:
            qk = choose(qk, seen_keys(qk, work, own, tile, pos), UNSEEN)
        most = max_of_rows(qk)
        highest = gl.where(most == UNSEEN, float("-inf"), most.to(gl.float32) * factor)
        s = qk.to(gl.float32)
    else:
        if asks:
            s = choose(s, seen_keys(qk, work, own, tile, pos), MINUS_INFINITY)
        highest = max_of_rows(s) * factor
    highest -= most_log2(dtype)
    if is_wide(dtype):
        m_new = grown(m, highest)
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
    if WHOLE:
        if asks:
            x = choose(x, seen_keys(qk, work, own, tile, pos), 0)
    if scales.inverse is not None:
        sums = sums_of_threads(x * scales.inverse.index(slot).load(along)[None, :])
    else:
        sums = sums_of_threads(x)
        if scales.of_k is not None:
            x = x * scales.of_v.index(slot).load(along)[None, :]
    if dtype == gl.int8:
        sums = sums * along_rows(own_shrink, sums)
    return x, sums, m_new, (shrink, own_shrink)


@gluon.jit
def multiply_values(p, tiles, slot, acc):
    """Start p @ v: added to acc in 16 bits; alone in e4m3, of whose sums the tensor cores keep few
    bits, and in int8, where they are integers."""
    O: gl.constexpr = acc.type.layout
    if is_wide(tiles.v.dtype):
        p = halves_of_words(p, tiles.v.dtype, gl.DotOperandLayout(0, O, 2))
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
        p = words_of_pairs(x, tiles.v.dtype)
    else:
        p = words_of(x, tiles.v.dtype)
    return p


@gluon.jit
def added(acc, product, shrink, shrink_n, tiles):
    """acc and the product of step n - 1, by which `shrink` says what they shrink; a sum in which
    that product is already shrinks as step n says."""
    if is_wide(tiles.v.dtype):
        acc = shrunk(product, shrink_n[0])
    else:
        acc = acc * along_rows(shrink[0], acc)
        if tiles.v.dtype == gl.int8:
            acc += product.to(gl.float32) * along_rows(shrink[1], acc)
        else:
            acc += product
    return acc


@gluon.jit
def finished(acc, product, shrink, v_scale, tiles):
    """The sums of an item after its last product, times the scale that its values share."""
    if is_wide(tiles.v.dtype):
        acc = product
    else:
        acc = ordered_columns(added(acc, product, shrink, shrink, tiles))
    return acc * v_scale
