"""The steps of the mma role with keys and values that a convert role has made ready.

Products are of 8 bits or of dequantized numbers.

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
values are dequantized they are multiplied by scale / c, c the largest of the tile, which alone
joins the exponent.

Weights of 16 bits are worked out under the product of those before with their values. Of 8 bits,
where what is accumulated outside the tensor cores takes as many registers as a product, a warpgroup
waits for both its products first and works out weights under those of the other. In e4m3 values
come first, and their sums are added up under the product of keys; but with scales of each key
there are instructions enough.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.prefill.items import tile_of_step
from splitkv.kernels.hopper.prefill.lazy_maxima import TOO_LARGE
from splitkv.kernels.hopper.prefill.mask import MINUS_INFINITY, choose, seen_keys
from splitkv.kernels.hopper.prefill.products import (
    has_16_bits,
    multiply_keys,
    multiply_values,
)
from splitkv.kernels.hopper.prefill.records import (
    LastProduct,
    Maxima,
    ScaledRows,
    ScaledSoftmax,
    ScaledTile,
    Shrink,
    Step,
)
from splitkv.kernels.hopper.prefill.scales import (
    MIDDLE,
    beside_rows,
    factor_of_rows,
    pairs_of_columns,
    rows_layout,
    scales_of_columns,
    shared_scale,
)
from splitkv.kernels.hopper.prefill.soft_cap import HALF, soft_capped
from splitkv.kernels.hopper.primitives.conversion import (
    ordered_columns,
    words_of,
    words_of_pairs,
)
from splitkv.kernels.hopper.primitives.named_barriers import (
    arrive,
    pass_turn_on,
    wait_for_step,
    wait_own_turn,
)
from splitkv.kernels.hopper.primitives.reciprocal import fast_reciprocal
from splitkv.kernels.hopper.primitives.row_sums import (
    added_before_wait,
    along_rows,
    dot_of_threads,
    max_of_rows,
    rescaled,
    sums_of_fours,
    sums_of_threads,
)
from splitkv.kernels.hopper.primitives.scheduling_fences import hold_sums, opaque
from splitkv.kernels.hopper.primitives.votes import any_above
from splitkv.kernels.tile.softmax import finite_or_zero

NOMINAL = gl.constexpr(5.0)  # in base 2
NEAR = gl.constexpr(4.0)  # by how much a maximum may be too large for p of e4m3, in base 2
FAR = gl.constexpr(40.0)  # by how much it may be below the largest
NEAR_BITS, MOST_E4M3 = map(gl.constexpr, (0x40800000, 0x43E00000))


@gluon.constexpr_function
def most_log2(dtype):
    """The log2 of the weight that the maximum of a row gets where p has this type."""
    return {"fp8e4nv": NOMINAL.value, "int8": 6.9886846867721655}.get(dtype.name, 0.0)


@gluon.jit
def exponents(qk, base, factor, n, scoring, scales):
    """(scores in base 2 less `base` [ROWS], the logarithms of scales of values among them, or of
    the largest of them, the stage of the scales of step n) after the products of a tile."""
    S: gl.constexpr = qk.type.layout
    STAGES: gl.constexpr = 1 if scales.of_k is None else scales.of_k.shape[0]
    BARE: gl.constexpr = scoring.softcap is None
    stage = n % STAGES
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
            k_scale = scales_of_columns(scales.of_k.index(stage), S)
            base = base - beside_rows(scales.of_tile.index(2 * stage), base)
            y = s * factor[:, None]
            if qk.dtype == gl.int32:  # worked out again, as registers are scarce
                y = y - (opaque(factor) * MIDDLE)[:, None]
            y = y * k_scale
            if BARE:
                y = y - base[:, None]
        else:
            k_scale, v_log2 = pairs_of_columns(scales.of_k.index(stage), S)
            if qk.dtype == gl.int32:
                s = s - MIDDLE
            if BARE:
                unit = fast_reciprocal(factor)
                s = s * k_scale - (base * unit)[:, None]
                y = s * factor[:, None] + v_log2
            else:
                y = s * k_scale * factor[:, None]
    if not BARE:
        y, unit = soft_capped(y, scoring.scale, scoring.softcap)
        y = y * unit - (base + HALF * unit)[:, None]
        if scales.inverse is not None:
            y = y + v_log2
    return y, stage


@gluon.jit
def weights_of_tile(y, stage, scales):
    """Computes the weights [ROWS, TILE_N] of exponents in fp32, and their sums by thread."""
    along: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    x = gl.exp2(y)
    if scales.inverse is not None:
        sums = dot_of_threads(x, scales.inverse.index(stage).load(along)[None, :])
    else:
        sums = sums_of_threads(x)
    return x, sums


@gluon.jit
def leaves_range(x, sums, scales, dtype: gl.constexpr):
    """Whether a weight of a warp may not be in the range of p: a few together are above it."""
    if has_16_bits(dtype):
        too_much = any_above(sums, TOO_LARGE, 0)
    elif scales.inverse is None:
        too_much = any_above(sums_of_fours(x), MOST_E4M3, 0)
    else:
        too_much = any_above(x, MOST_E4M3, 0)
    return too_much


@gluon.jit
def masked_exponents(y, batch, item, step, pos):
    """Replaces exponents [ROWS, TILE_N] of keys that a row at `pos` [ROWS] does not see by -inf."""
    if step.masked:
        y = choose(y, seen_keys(y, batch, item, step.tile, pos), MINUS_INFINITY)
    return y


@gluon.jit
def relative_to_maximum(y, base, maxima, dtype: gl.constexpr):
    """(y less a maximum of each row, the Maxima with it, shrink), where maxima are looked for.

    y     [ROWS, TILE_N] exponents less `base` [ROWS]
    """
    m = maxima.m
    top = maxima.top
    highest = base + (max_of_rows(y) - most_log2(dtype))
    m_new = gl.maximum(m, highest)
    # a row that saw nothing has no maximum for tiles that do not ask the mask
    unseen = gl.where(m_new == float("-inf"), float("inf"), 0.0)
    if has_16_bits(dtype):
        settle = any_above(unseen, NEAR_BITS, 0).to(gl.int32)
    else:
        # beside one large weight others would be nothing: those of further tiles are not beside it
        far_below = (highest < m - NEAR) & (highest > float("-inf"))
        m_new = gl.where(far_below, gl.maximum(highest, top - FAR), m_new)
        raised = gl.where(m_new > m, m_new - m, unseen)
        settle = any_above(raised, NEAR_BITS, 0).to(gl.int32)
        top = gl.maximum(top, m_new)
    above = finite_or_zero(m_new)
    return y - (above - base)[:, None], Maxima(m_new, top, settle), gl.exp2(m - above)


@gluon.jit
def softmax_of_scaled_tile(
    p,  # of the step before, as sums: of the types that they are to have
    sums,
    qk,  # [ROWS, TILE_N]
    maxima,  # Maxima
    rows,  # ScaledRows
    program,  # PrefillProgram
    item,  # Item
    step,  # Step
    FIRST: gl.constexpr,  # of an item
):
    """Computes the ScaledTile of the products of one more tile."""
    batch, scales = program.batch, program.scales
    dtype: gl.constexpr = program.tiles.v.dtype
    m = maxima.m
    base = finite_or_zero(m)
    y, stage = exponents(qk, base, rows.factor, step.n, batch.scoring, scales)
    shrink = gl.full(m.shape, 1.0, gl.float32, m.type.layout)
    own_shrink = shrink
    if dtype == gl.int8:
        y = masked_exponents(y, batch, item, step, rows.pos)
        highest = max_of_rows(y) - most_log2(dtype)
        m_new = gl.maximum(m, base + highest)
        above = finite_or_zero(m_new)
        shrink = gl.exp2(m - above)
        highest = finite_or_zero(highest)
        own_shrink = gl.exp2(highest + (base - above))
        maxima = Maxima(m_new, maxima.top, maxima.settle)
        x, sums = weights_of_tile(y - highest[:, None], stage, scales)
        p = rounded(x, dtype)
        sums = sums * along_rows(own_shrink, sums)
    elif FIRST:
        y = masked_exponents(y, batch, item, step, rows.pos)
        y, maxima, shrink = relative_to_maximum(y, base, maxima, dtype)
        x, sums = weights_of_tile(y, stage, scales)
        p = rounded(x, dtype)
    elif has_16_bits(dtype) or scales.of_k is None:
        x, sums = weights_of_tile(y, stage, scales)
        p = rounded(x, dtype)
        if leaves_range(x, sums, scales, dtype) | step.masked | (maxima.settle != 0):
            y = masked_exponents(y, batch, item, step, rows.pos)
            y, maxima, shrink = relative_to_maximum(y, base, maxima, dtype)
            x, sums = weights_of_tile(y, stage, scales)
            p = rounded(x, dtype)
    else:
        looks = step.masked | (maxima.settle != 0)
        if not looks:
            x, sums = weights_of_tile(y, stage, scales)
            p = rounded(x, dtype)
            looks = leaves_range(x, sums, scales, dtype)
        if looks:
            y = masked_exponents(y, batch, item, step, rows.pos)
            y, maxima, shrink = relative_to_maximum(y, base, maxima, dtype)
            x, sums = weights_of_tile(y, stage, scales)
            p = rounded(x, dtype)
    if scales.of_tile is not None:
        inverse = beside_rows(scales.of_tile.index(2 * stage + 1), maxima.m)
        sums = sums * along_rows(inverse, sums)
    return ScaledTile(p, sums, maxima, Shrink(shrink, own_shrink))


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """Rounds weights x [ROWS, TILE_N] to this type, packed into words as `multiply_values` takes
    them."""
    if has_16_bits(dtype):
        p = words_of_pairs(x, dtype)
    else:
        p = words_of(x, dtype)
    return p


@gluon.jit
def accumulate(acc, product, shrink):
    """acc with a product of 8 bits, by the Shrink of its step: what came before and, of int8, the
    product itself."""
    if product.dtype == gl.int32:
        acc = acc * along_rows(shrink.before, acc)
        acc += product.to(gl.float32) * along_rows(shrink.own, acc)
    else:
        acc += product
    return acc


@gluon.jit
def scaled_softmax(tile, p, l, acc):
    """Computes the ScaledSoftmax after a ScaledTile."""
    return ScaledSoftmax(
        m=tile.maxima.m,
        p=p,
        l=l,
        top=tile.maxima.top,
        settle=tile.maxima.settle,
        shrink=tile.shrink,
        acc=acc,
    )


@gluon.jit
def run_scaled_step(
    softmax,  # ScaledSoftmax
    step,  # Step
    rows,  # ScaledRows
    program,  # PrefillProgram
    item,  # Item
    q_tile,  # index of the rows of q
):
    """Computes the ScaledSoftmax after one more tile of keys; its p is multiplied in the next
    step."""
    S: gl.constexpr = softmax.m.type.layout.parent
    tiles, scales = program.tiles, program.scales
    named = program.barriers.named
    acc = softmax.acc
    K_STAGES: gl.constexpr = tiles.k.shape[0]
    V_STAGES: gl.constexpr = tiles.v.shape[0]
    VALUES_FIRST: gl.constexpr = tiles.v.dtype == gl.float8e4nv and scales.of_k is None
    stage = step.n % K_STAGES
    last_stage = (step.n - 1) % V_STAGES
    wait_for_step(step.n, named)
    wait_own_turn(named)
    if VALUES_FIRST:
        product = multiply_values(softmax.p, tiles, last_stage, acc)
    qk = multiply_keys(tiles, q_tile, stage, S)
    if not VALUES_FIRST:
        product = multiply_values(softmax.p, tiles, last_stage, acc)
    pass_turn_on(named)
    p, l = softmax.p, softmax.l
    maxima = Maxima(softmax.m, softmax.top, softmax.settle)
    if has_16_bits(tiles.v.dtype):
        qk = warpgroup_mma_wait(1, deps=[qk])
        arrive(named.k_empty + stage, named.k_threads)
        new = softmax_of_scaled_tile(p, l, qk, maxima, rows, program, item, step, False)
        sums = hold_sums(new.sums, 0)
        product = warpgroup_mma_wait(0, deps=[product])
        arrive(named.v_empty + last_stage, named.v_threads)
        p = opaque(new.p)
        acc = rescaled(product, new.shrink.before)
    else:
        if VALUES_FIRST:
            product = warpgroup_mma_wait(1, deps=[product])
            arrive(named.v_empty + last_stage, named.v_threads)
            acc = added_before_wait(acc, product)
            qk = warpgroup_mma_wait(0, deps=[qk])
            arrive(named.k_empty + stage, named.k_threads)
        else:
            qk, product = warpgroup_mma_wait(0, deps=[qk, product])
            arrive(named.k_empty + stage, named.k_threads)
            arrive(named.v_empty + last_stage, named.v_threads)
            acc = accumulate(acc, product, softmax.shrink)
        new = softmax_of_scaled_tile(p, l, qk, maxima, rows, program, item, step, False)
        p = new.p
        sums = new.sums
        if product.dtype == gl.float32:
            acc = rescaled(acc, new.shrink.before)
    l = l * along_rows(new.shrink.before, l) + sums
    return scaled_softmax(new, p, l, acc)


@gluon.constexpr_function
def sums_layout(dim, dtype, warps):
    """The layout of sums [rows, dim] of weighted values of this type."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, dim, 256 // dtype.primitive_bitwidth])


@gluon.jit
def mainloop_scaled(
    program,  # PrefillProgram
    item,  # Item
    item_tiles,  # ItemTiles
    done,  # Progress
    row_scales,  # RowScales
    CONFIG: gl.constexpr,
):
    """Runs all steps of an item with tiles that the convert role made ready: the LastProduct."""
    batch, scales = program.batch, program.scales
    tiles, barriers = program.tiles, program.barriers
    n = done.steps
    ROWS: gl.constexpr = tiles.q.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    K_STAGES: gl.constexpr = tiles.k.shape[0]
    V_STAGES: gl.constexpr = tiles.v.shape[0]
    Q_STAGES: gl.constexpr = barriers.q_full.shape[0]
    O: gl.constexpr = sums_layout(DIM, tiles.v.dtype, gl.num_warps())
    M: gl.constexpr = rows_layout(tiles.k.shape[1], tiles.k.dtype, gl.num_warps())
    S: gl.constexpr = M.parent
    v_scale = 1.0
    if batch.by_grid is not None:  # else a register of all steps
        v_scale = shared_scale(item, scales, scales.v_ptr, scales.v, CONFIG)
    q_tile = done.items % Q_STAGES
    packed = item.tile * ROWS + gl.arange(0, ROWS, layout=M)
    pos = item.len_k - item.len_q + packed // CONFIG.packed_heads
    factor = factor_of_rows(program, row_scales, done.items, 0, M)
    rows = ScaledRows(factor, pos)
    stage = n % K_STAGES
    named = barriers.named
    wait_for_step(n, named)
    qk = multiply_keys(tiles, q_tile, stage, S)
    qk = warpgroup_mma_wait(0, deps=[qk])
    arrive(named.k_empty + stage, named.k_threads)
    m = gl.full([ROWS], float("-inf"), gl.float32, M)
    tile = tile_of_step(item_tiles, 0)
    masked = (item_tiles.masked_steps > 0) | (item_tiles.visit.count == 0)
    first = Step(n, tile, masked)
    maxima = Maxima(m, m, n * 0)
    new = softmax_of_scaled_tile(None, None, qk, maxima, rows, program, item, first, True)
    acc = gl.zeros([ROWS, DIM], gl.float32, O)
    softmax = scaled_softmax(new, new.p, new.sums, acc)
    for i in range(1, item_tiles.steps):
        tile = tile_of_step(item_tiles, i)
        step = Step(n + i, tile, i < item_tiles.masked_steps)
        softmax = run_scaled_step(softmax, step, rows, program, item, q_tile)
    if tiles.out is not None:
        if scales.unrounded_q is None:
            mbarrier.arrive(barriers.q_empty.index(done.items % Q_STAGES), count=1)
    if batch.by_grid is None:
        v_scale = shared_scale(item, scales, scales.v_ptr, scales.v, CONFIG)
    last = n + item_tiles.steps - 1
    stage = last % V_STAGES
    mbarrier.wait(barriers.v_full.index(stage), last // V_STAGES & 1)
    product = multiply_values(softmax.p, tiles, stage, softmax.acc)
    l = gl.convert_layout(gl.sum(softmax.l, 1), M)
    return LastProduct(softmax.acc, product, l, softmax.m, softmax.shrink, v_scale)


@gluon.jit
def finish_scaled_sums(last, product, tiles):
    """The sums [ROWS, DIM_V] of an item with its last product, times the scale that its values
    share."""
    if has_16_bits(tiles.v.dtype):
        acc = product
    else:
        acc = ordered_columns(accumulate(last.acc, product, last.shrink))
    return acc * last.v_scale
