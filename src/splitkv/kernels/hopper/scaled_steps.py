"""Steps with keys and values in 8 bits: products of 8 bits or of widened numbers.

A row's weights are relative to a maximum of its scores that is let be as long as no weight leaves
the range of p. So a step mostly looks for no maximum: it works weights out, and the maximum and the
weights again only where sums of them are too large or the mask is asked. p of fp16 may be up to
2 ** 15, and of e4m3 up to 448; where a maximum is looked for, it gets weight 1, or 2 ** NOMINAL of
e4m3, which has fewer bits below. There a maximum that was raised far is looked for again in the
next tile and may be less: so one large weight does not cost the others their bits.

p of int8 has weights up to 127, and as its steps are all of one size, they are relative to the
maximum of a row in the tile of keys, not in all tiles up to it.

Where values of 8 bits have scales of their own, these join the exponent, p = exp2(s + log2(scale) -
m), so that no weight is rounded away because its scale is small; sums are of p / scale then. Where
values are widened they are multiplied by scale / c, c the largest of the tile, which alone joins
the exponent.

Weights of 16 bits are worked out under the product of those before with their values. Of 8 bits,
where what is added up outside the tensor cores takes as many registers as a product, a warpgroup
waits for both its products first and works out weights under those of the other. In e4m3 values
come first, and their sums are added up under the product of keys; but with scales of each key
there are instructions enough.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.eight_bits import (
    bytes_of_words,
    halves_of_words,
    ordered_columns,
    words_of,
    words_of_pairs,
)
from splitkv.kernels.hopper.known import before_wait, known_now
from splitkv.kernels.hopper.numbered import (
    arrive,
    pass_turn_on,
    wait_for_step,
    wait_for_turn,
)
from splitkv.kernels.hopper.prefill_mask import MINUS_INFINITY, choose, seen_keys
from splitkv.kernels.hopper.prefill_rows import tile_of_step
from splitkv.kernels.hopper.prefill_scaled import (
    MIDDLE,
    MIDDLE_BITS,
    beside_rows,
    factor_of_rows,
    pairs_of_columns,
    rows_layout,
    scales_of_columns,
    shared_scale,
)
from splitkv.kernels.hopper.prefill_sums import (
    TOO_LARGE,
    added_now,
    along_rows,
    any_above,
    dot_of_threads,
    max_of_rows,
    shrunk,
    sums_of_fours,
    sums_of_threads,
)
from splitkv.kernels.tile.score import score_log2
from splitkv.kernels.tile.softmax import finite_or_zero

NOMINAL = gl.constexpr(5.0)  # in base 2
NEAR = gl.constexpr(4.0)  # by how much a maximum may be too large for p of e4m3, in base 2
FAR = gl.constexpr(40.0)  # by how much it may be below the largest
NEAR_BITS, MOST_E4M3 = map(gl.constexpr, (0x40800000, 0x43E00000))


@gluon.constexpr_function
def most_log2(dtype):
    """The weight that a row's maximum gets, in base 2, where p is of this type."""
    return {"fp8e4nv": NOMINAL.value, "int8": 6.9886846867721655}.get(dtype.name, 0.0)


@gluon.constexpr_function
def is_wide(dtype):
    """Whether values are multiplied in 16 bits."""
    return dtype.primitive_bitwidth == 16


@gluon.jit
def multiply_keys(tiles, q_slot, slot, S: gl.constexpr):
    """Start q @ k.T; sums of integers are MIDDLE more."""
    ROWS: gl.constexpr = tiles.q.shape[1]
    TILE_N: gl.constexpr = tiles.k.shape[1]
    k = tiles.k.index(slot).permute((1, 0))
    q = tiles.q.index(q_slot)
    if tiles.k.dtype == gl.int8:
        start = gl.full([ROWS, TILE_N], MIDDLE_BITS, gl.int32, S)
        qk = warpgroup_mma(q, k, start, is_async=True)
    else:
        start = gl.zeros([ROWS, TILE_N], gl.float32, S)
        qk = warpgroup_mma(q, k, start, use_acc=False, is_async=True)
    if tiles.q_rest is not None:
        k_rest = tiles.k_rest.index(slot).permute((1, 0))
        qk = warpgroup_mma(tiles.q_rest.index(q_slot), k_rest, qk, is_async=True)
    return qk


@gluon.jit
def exponents(qk, base, factor, n, work, scales):
    """(scores in base 2 less `base` [ROWS], the logarithms of scales of values among them, or of
    the largest of them, the slot of the scales of step n) after the products of a tile."""
    S: gl.constexpr = qk.type.layout
    SLOTS: gl.constexpr = 1 if scales.of_k is None else scales.of_k.shape[0]
    BARE: gl.constexpr = work.scoring.softcap is None
    slot = n % SLOTS
    if qk.dtype == gl.int32:  # see `multiply_keys`
        s = qk.to(gl.float32, bitcast=True)
    else:
        s = qk
    if scales.of_k is None:
        if BARE:
            if qk.dtype == gl.int32:
                base = gl.fma(factor, gl.full_like(factor, MIDDLE), base)
            y = s * factor[:, None] - base[:, None]
        else:
            if qk.dtype == gl.int32:
                s = s - MIDDLE
            y = s * factor[:, None]
    else:
        if scales.inverse is None:
            k_scale = scales_of_columns(scales.of_k.index(slot), S)
            base = base - beside_rows(scales.of_tile.index(2 * slot), base)
            y = s * factor[:, None]
            if qk.dtype == gl.int32:  # worked out again, as registers are scarce
                y = y - (known_now(factor) * MIDDLE)[:, None]
            y = y * k_scale
            if BARE:
                y = y - base[:, None]
        else:
            k_scale, more = pairs_of_columns(scales.of_k.index(slot), S)
            if qk.dtype == gl.int32:
                s = s - MIDDLE
            if BARE:
                unit = gl.inline_asm_elementwise(
                    "rcp.approx.ftz.f32 $0, $1;",
                    "=r,r",
                    [factor],
                    dtype=gl.float32,
                    is_pure=True,
                    pack=1,
                )
                s = s * k_scale - (base * unit)[:, None]
                y = s * factor[:, None] + more
            else:
                y = s * k_scale * factor[:, None]
    if not BARE:
        y = score_log2(y, work.scoring.scale, work.scoring.softcap, None, None, None)
        y = y - base[:, None]
        if scales.inverse is not None:
            y = y + more
    return y, slot


@gluon.jit
def shares(y, slot, scales):
    """(p in fp32, its sums by thread)"""
    along: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    x = gl.exp2(y)
    if scales.inverse is not None:
        sums = dot_of_threads(x, scales.inverse.index(slot).load(along)[None, :])
    else:
        sums = sums_of_threads(x)
    return x, sums


@gluon.jit
def leaves_range(x, sums, scales, dtype: gl.constexpr, W: gl.constexpr):
    """Whether a weight of a warp may not be in the range of p: a few together are above it."""
    if is_wide(dtype):
        too_much = any_above(sums, TOO_LARGE, W)
    elif scales.inverse is None:
        too_much = any_above(sums_of_fours(x), MOST_E4M3, W)
    else:
        too_much = any_above(x, MOST_E4M3, W)
    return too_much


@gluon.jit
def with_maximum(y, m, base, top, settle, own, tile, asks, pos, work, tiles, W: gl.constexpr):
    """(y less a maximum of each row, m, top, settle, shrink) where maxima are looked for."""
    dtype: gl.constexpr = tiles.v.dtype
    if asks:
        y = choose(y, seen_keys(y, work, own, tile, pos), MINUS_INFINITY)
    highest = base + (max_of_rows(y) - most_log2(dtype))
    m_new = gl.maximum(m, highest)
    # a row that saw nothing has no maximum for tiles that do not ask the mask
    unseen = gl.where(m_new == float("-inf"), float("inf"), 0.0)
    if is_wide(dtype):
        settle = any_above(unseen, NEAR_BITS, W).to(gl.int32)
    else:
        # beside one large weight others would be nothing: those of further tiles are not beside it
        far_below = (highest < m - NEAR) & (highest > float("-inf"))
        m_new = gl.where(far_below, gl.maximum(highest, top - FAR), m_new)
        raised = gl.where(m_new > m, m_new - m, unseen)
        settle = any_above(raised, NEAR_BITS, W).to(gl.int32)
        top = gl.maximum(top, m_new)
    above = finite_or_zero(m_new)
    return y - (above - base)[:, None], m_new, top, settle, gl.exp2(m - above)


@gluon.jit
def weights(
    p,  # of the step before, as sums: of the types that they are to have
    sums,
    qk,
    m,
    top,
    settle,
    factor,
    work,
    own,
    n,
    tile,
    asks,
    pos,
    scales,
    tiles,
    FIRST: gl.constexpr,  # of an item
    W: gl.constexpr,
):
    """(p, sums of weights by thread, m, top, settle, shrink) after the products of one more tile.

    shrink: by how much shrinks what came before; and this tile's p @ v, if its p is int8
    """
    dtype: gl.constexpr = tiles.v.dtype
    base = finite_or_zero(m)
    y, slot = exponents(qk, base, factor, n, work, scales)
    shrink = gl.full(m.shape, 1.0, gl.float32, m.type.layout)
    own_shrink = shrink
    where = own, tile, asks, pos, work, tiles
    if dtype == gl.int8:
        if asks:
            y = choose(y, seen_keys(y, work, own, tile, pos), MINUS_INFINITY)
        highest = max_of_rows(y) - most_log2(dtype)
        m_new = gl.maximum(m, base + highest)
        above = finite_or_zero(m_new)
        shrink = gl.exp2(m - above)
        highest = finite_or_zero(highest)
        own_shrink = gl.exp2(highest + (base - above))
        m = m_new
        x, sums = shares(y - highest[:, None], slot, scales)
        p = rounded(x, tiles)
        sums = sums * along_rows(own_shrink, sums)
    elif FIRST:
        y, m, top, settle, shrink = with_maximum(y, m, base, top, settle, *where, W)
        x, sums = shares(y, slot, scales)
        p = rounded(x, tiles)
    elif is_wide(dtype) or scales.of_k is None:
        x, sums = shares(y, slot, scales)
        p = rounded(x, tiles)
        if leaves_range(x, sums, scales, dtype, W) | asks | (settle != 0):
            y, m, top, settle, shrink = with_maximum(y, m, base, top, settle, *where, W)
            x, sums = shares(y, slot, scales)
            p = rounded(x, tiles)
    else:
        looks = asks | (settle != 0)
        if not looks:
            x, sums = shares(y, slot, scales)
            p = rounded(x, tiles)
            looks = leaves_range(x, sums, scales, dtype, W)
        if looks:
            y, m, top, settle, shrink = with_maximum(y, m, base, top, settle, *where, W)
            x, sums = shares(y, slot, scales)
            p = rounded(x, tiles)
    if scales.of_tile is not None:
        inverse = beside_rows(scales.of_tile.index(2 * slot + 1), m)
        sums = sums * along_rows(inverse, sums)
    return p, sums, m, top, settle, (shrink, own_shrink)


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
def rounded(x, tiles):
    """p as `multiply_values` takes it."""
    if is_wide(tiles.v.dtype):
        p = words_of_pairs(x, tiles.v.dtype)
    else:
        p = words_of(x, tiles.v.dtype)
    return p


@gluon.jit
def added(acc, product, shrink):
    """acc with a product, of a step that shrank what came before and, int8, itself."""
    if product.dtype == gl.int32:
        acc = acc * along_rows(shrink[0], acc)
        acc += product.to(gl.float32) * along_rows(shrink[1], acc)
    else:
        acc += product
    return acc


@gluon.jit
def step(
    acc,  # [ROWS, DIM_V]; where p is of 8 bits, without step n - 1
    l,  # [ROWS, 4], see `sums_of_threads`
    m,  # [ROWS] in base 2
    top,  # [ROWS], the largest m
    settle,  # whether the next step looks for maxima
    shrink,  # [ROWS] each: see `weights`, of step n - 1
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
    q_slot,
    pos,  # [ROWS]
    W: gl.constexpr,
):
    """All seven again, after step n, whose p is still to be multiplied."""
    S: gl.constexpr = m.type.layout.parent
    K_SLOTS: gl.constexpr = tiles.k.shape[0]
    V_SLOTS: gl.constexpr = tiles.v.shape[0]
    WIDE: gl.constexpr = is_wide(tiles.v.dtype)
    VALUES_FIRST: gl.constexpr = tiles.v.dtype == gl.float8e4nv and scales.of_k is None
    slot = n % K_SLOTS
    last_slot = (n - 1) % V_SLOTS
    numbers = signals.numbers
    wait_for_step(n, numbers)
    wait_for_turn(numbers)
    if VALUES_FIRST:
        product = multiply_values(p, tiles, last_slot, acc)
    qk = multiply_keys(tiles, q_slot, slot, S)
    if not VALUES_FIRST:
        product = multiply_values(p, tiles, last_slot, acc)
    pass_turn_on(numbers)
    rest = factor, work, own, n, tile, asks, pos, scales, tiles
    if WIDE:
        qk = warpgroup_mma_wait(1, deps=[qk])
        arrive(numbers.k_free + slot, numbers.k_threads)
        p, sums, m, top, settle, shrink_n = weights(p, l, qk, m, top, settle, *rest, False, W)
        sums = before_wait(sums, 0)
        product = warpgroup_mma_wait(0, deps=[product])
        arrive(numbers.v_free + last_slot, numbers.v_threads)
        p = known_now(p)
        acc = shrunk(product, shrink_n[0])
    else:
        if VALUES_FIRST:
            product = warpgroup_mma_wait(1, deps=[product])
            arrive(numbers.v_free + last_slot, numbers.v_threads)
            acc = added_now(acc, product)
            qk = warpgroup_mma_wait(0, deps=[qk])
            arrive(numbers.k_free + slot, numbers.k_threads)
        else:
            qk, product = warpgroup_mma_wait(0, deps=[qk, product])
            arrive(numbers.k_free + slot, numbers.k_threads)
            arrive(numbers.v_free + last_slot, numbers.v_threads)
            acc = added(acc, product, shrink)
        p, sums, m, top, settle, shrink_n = weights(p, l, qk, m, top, settle, *rest, False, W)
        if product.dtype == gl.float32:
            acc = shrunk(acc, shrink_n[0])
    shrink = shrink_n
    l = l * along_rows(shrink[0], l) + sums
    return acc, l, m, top, settle, shrink, p


@gluon.constexpr_function
def sums_layout(dim, dtype, warps):
    """The layout of sums [rows, dim] of weighted values of this type."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, dim, 256 // dtype.primitive_bitwidth])


@gluon.jit
def attend_scaled(
    work,  # Work
    own,  # Own
    visit,  # Visit
    steps,
    asking,
    n,  # steps before
    done,  # items before
    tiles,  # Parts
    of_item,  # see `scales_of_item`
    scales,  # Scales
    signals,  # Signals
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
):
    """(acc as of `step`, the last product of an item, under way, l [ROWS], m [ROWS] in base 2,
    shrink, the scale that values share)."""
    ROWS: gl.constexpr = tiles.q.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    K_SLOTS: gl.constexpr = tiles.k.shape[0]
    V_SLOTS: gl.constexpr = tiles.v.shape[0]
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    O: gl.constexpr = sums_layout(DIM, tiles.v.dtype, gl.num_warps())
    M: gl.constexpr = rows_layout(tiles.k.shape[1], tiles.k.dtype, gl.num_warps())
    S: gl.constexpr = M.parent
    v_scale = 1.0
    if work.placed is not None:  # else a register of all steps
        v_scale = shared_scale(own, scales, scales.v_ptr, scales.v, GROUP)
    q_slot = done % Q_SLOTS
    rows = own.tile * ROWS + gl.arange(0, ROWS, layout=M)
    pos = own.len_k - own.len_q + rows // PACK
    factor = factor_of_rows(work, of_item, done, tiles, scales, signals, 0, M)
    slot = n % K_SLOTS
    numbers = signals.numbers
    wait_for_step(n, numbers)
    qk = multiply_keys(tiles, q_slot, slot, S)
    qk = warpgroup_mma_wait(0, deps=[qk])
    arrive(numbers.k_free + slot, numbers.k_threads)
    m = gl.full([ROWS], float("-inf"), gl.float32, M)
    tile = tile_of_step(visit, 0, asking)
    masked = (asking > 0) | (visit.count == 0)
    first = factor, work, own, n, tile, masked, pos, scales, tiles
    p, l, m, top, settle, shrink = weights(None, None, qk, m, m, n * 0, *first, True, W)
    acc = gl.zeros([ROWS, DIM], gl.float32, O)
    rest = factor, work, own, tiles, scales, signals, q_slot, pos
    for i in range(1, steps):
        tile = tile_of_step(visit, i, asking)
        sums = acc, l, m, top, settle, shrink, p
        now = n + i, tile, i < asking
        acc, l, m, top, settle, shrink, p = step(*sums, *now, *rest, W)
    if tiles.out is not None:
        if scales.wide is None:
            mbarrier.arrive(signals.q_free.index(done % Q_SLOTS), count=1)
    if work.placed is None:
        v_scale = shared_scale(own, scales, scales.v_ptr, scales.v, GROUP)
    last = n + steps - 1
    slot = last % V_SLOTS
    mbarrier.wait(signals.v_full.index(slot), last // V_SLOTS & 1)
    product = multiply_values(p, tiles, slot, acc)
    return acc, product, gl.convert_layout(gl.sum(l, 1), M), m, shrink, v_scale


@gluon.jit
def finished(acc, product, shrink, v_scale, tiles):
    """The sums of an item after its last product, times the scale that its values share."""
    if is_wide(tiles.v.dtype):
        acc = product
    else:
        acc = ordered_columns(added(acc, product, shrink))
    return acc * v_scale
