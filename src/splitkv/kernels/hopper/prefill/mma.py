"""The mma role: the warpgroups of the kernels for whole sequences that multiply.

Every warpgroup has 64 rows of a row tile, and the role that it is in has them all: with 16 bits
each is one by itself, in 8 bits all are one. Its steps are the tiles of keys of an item, counted
over all items of a program: step n has its keys and its values in stages of two rings, n modulo
their length.

While the tensor cores multiply p of one step with its values, a warpgroup works out p of the next:
see `hold_sums`; under the last product of an item, what that is divided by and what the next item
is. Warpgroups issue their products in turns, so that the exponentials of one run under the products
of the others.

Where registers allow it, `lazy_softmax`, weights are relative to a maximum of tiles before, so that
a step has no maximum of its own to find unless a weight is too large or the mask is asked.

Keys in 8 bits have OperandScales. Beside values of 16 bits that are there as they are multiplied,
rows have a factor from products to scores and steps are the same; where tiles are converted beside
the steps, and `barriers.named` say so, steps are of prefill/mma_scaled.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.prefill.epilogue import (
    finish_rows,
    store_absent_split,
    store_results,
    store_split_or_results,
)
from splitkv.kernels.hopper.prefill.items import (
    has_number,
    has_rows,
    index_in_round,
    item_at,
    round_count,
    tile_of_step,
    tiles_of_item,
)
from splitkv.kernels.hopper.prefill.lazy_maxima import TOO_LARGE, raised_maxima
from splitkv.kernels.hopper.prefill.load import wait_q_full
from splitkv.kernels.hopper.prefill.mask import MINUS_INFINITY, choose, seen_keys
from splitkv.kernels.hopper.prefill.mma_scaled import finish_scaled_sums, mainloop_scaled
from splitkv.kernels.hopper.prefill.products import multiply_keys, multiply_values
from splitkv.kernels.hopper.prefill.records import (
    Item,
    LastProduct,
    Progress,
    RowScales,
    RunningSoftmax,
    Shrink,
    Step,
    TileSoftmax,
)
from splitkv.kernels.hopper.prefill.scales import (
    MIDDLE,
    factor_of_rows,
    rows_layout,
    scales_of_item,
)
from splitkv.kernels.hopper.prefill.soft_cap import HALF, soft_capped
from splitkv.kernels.hopper.primitives.conversion import words_of_pairs
from splitkv.kernels.hopper.primitives.named_barriers import (
    all_cleared,
    arrive,
    give_first_turn,
    pass_turn,
    wait_turn,
)
from splitkv.kernels.hopper.primitives.row_sums import (
    along_rows,
    max_of_rows,
    rescaled,
    sums_of_threads,
)
from splitkv.kernels.hopper.primitives.scheduling_fences import (
    hold_bits,
    hold_sums,
    opaque,
    rematerialized,
)
from splitkv.kernels.hopper.primitives.votes import any_above, declare_any
from splitkv.kernels.hopper.primitives.zero_rows import clear_behind
from splitkv.kernels.tile.softmax import finite_or_zero


@gluon.jit
def clear_tail(program, item, step, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """Zeroes the values of a Step behind the last key of the sequence; all warpgroups do it
    together."""
    v = program.tiles.v
    STAGES: gl.constexpr = v.shape[0]
    count = item.len_k - step.tile * v.shape[1]
    if count < v.shape[1]:
        stage = step.n % STAGES
        mbarrier.wait(program.barriers.v_full.index(stage), step.n // STAGES & 1)
        clear_behind(v.index(stage), count, 16, ROLE, CONFIG.mma_roles)
        all_cleared(CONFIG.mma_roles)


@gluon.jit
def positions(like, batch, item, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """The positions among the keys of the tokens of a role's rows [ROWS], as `like`."""
    ROWS: gl.constexpr = CONFIG.tile_m // CONFIG.mma_roles
    rows = rematerialized(item.tile, batch.scarce) * CONFIG.tile_m + ROLE * ROWS
    rows += gl.arange(0, ROWS, layout=like.type.layout)
    return item.len_k - item.len_q + rows // CONFIG.packed_heads


@gluon.jit
def scores_of(qk, factor, scoring):
    """(s, unit) of products: s less `offset_of`, times unit, are the scores in base 2; unit is one
    number or, where rows have a factor, [ROWS]."""
    if factor is None:
        s = qk
        unit = scoring.scale
        if scoring.softcap is not None:
            s, unit = soft_capped(qk, scoring.scale, scoring.softcap)
    else:
        s = qk
        if qk.dtype == gl.int32:
            s = qk.to(gl.float32, bitcast=True)
        unit = factor
        if scoring.softcap is not None:
            if qk.dtype == gl.int32:
                s = s - MIDDLE
            s = s * factor[:, None]
            s, unit = soft_capped(s, scoring.scale, scoring.softcap)
            unit = gl.full_like(factor, 1.0) * unit
    return s, unit


@gluon.constexpr_function
def offset_of(dtype, plain):
    """Tells what `scores_of` has beside the scores: HALF with a soft cap, MIDDLE without one for
    sums of integers, else 0."""
    if not plain:
        return HALF.value
    return MIDDLE.value if dtype.name == "int32" else 0.0


@gluon.jit
def exponentials(s, unit, m, factor, OFFSET: gl.constexpr):
    """Computes the weights of the scores of `scores_of`, beside which it has OFFSET, relative to
    m."""
    if factor is None:
        if OFFSET != 0:
            m = m + unit * OFFSET
        y = s * unit - m[:, None]
    else:
        if OFFSET != 0:
            m = gl.fma(unit, gl.full_like(unit, OFFSET), m)
        y = s * unit[:, None] - m[:, None]
    return gl.exp2(y)


@gluon.jit
def softmax_of_tile(
    qk,  # [ROWS, TILE_N]
    m,  # [ROWS]
    factor,  # [ROWS], or None
    batch,  # SequenceBatch
    item,  # Item
    step,  # Step
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Computes the TileSoftmax of the products of one more tile, with a search for the maximum of
    each row."""
    OFFSET: gl.constexpr = offset_of(qk.dtype, batch.scoring.softcap is None)
    s, unit = scores_of(qk, factor, batch.scoring)
    if batch.lazy_maxima is not None:
        # else scores would be worked out before it is known whether a maximum is wanted
        unit = opaque(unit)
    if step.masked:
        pos = positions(m, batch, item, CONFIG, ROLE)
        s = choose(s, seen_keys(qk, batch, item, step.tile, pos), MINUS_INFINITY)
    highest = max_of_rows(s)
    if OFFSET != 0:
        highest = highest - OFFSET
    m_new = raised_maxima(m, highest * unit)
    top = finite_or_zero(m_new)
    x = exponentials(s, unit, top, factor, OFFSET)
    return TileSoftmax(x, sums_of_threads(x), m_new, gl.exp2(m - top))


@gluon.jit
def lazy_softmax(
    softmax,  # RunningSoftmax, whose p is the type of the next
    product,  # under way, of the step before
    qk,  # [ROWS, TILE_N]
    factor,  # [ROWS], or None
    program,  # PrefillProgram
    item,  # Item
    step,  # Step
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """The RunningSoftmax after the products of one more tile and the product under way of the step
    before, whose sums it has.

    Weights are relative to the maximum of tiles before while that does: the mask is not asked, and
    no weight is too large, as all are of a row that has seen nothing, where m = -inf.
    """
    batch = program.batch
    dtype: gl.constexpr = program.tiles.v.dtype
    p = softmax.p
    l = softmax.l
    m = softmax.m
    looks = step.masked
    sums = l
    if not step.masked:
        OFFSET: gl.constexpr = offset_of(qk.dtype, batch.scoring.softcap is None)
        s, unit = scores_of(qk, factor, batch.scoring)
        x = exponentials(s, unit, m, factor, OFFSET)
        sums = sums_of_threads(x)
        p = words_of_pairs(x, dtype)
        looks = any_above(sums, TOO_LARGE, ROLE)
    if looks:
        new = softmax_of_tile(qk, m, factor, batch, item, step, CONFIG, ROLE)
        m = new.m
        sums = new.sums
        p = words_of_pairs(new.weights, dtype)
        l = hold_sums(l * along_rows(new.shrink, l) + sums, 0)
        acc = rescaled(warpgroup_mma_wait(0, deps=[product]), new.shrink)
        p = opaque(p)
    else:
        l = hold_sums(l + sums, 1)
        acc = warpgroup_mma_wait(0, deps=[product])
        p = opaque(p)
    return RunningSoftmax(m, l, acc, p)


@gluon.jit
def run_step(
    softmax,  # RunningSoftmax
    step,  # Step
    factor,  # [ROWS], from products to scores, or None
    program,  # PrefillProgram
    item,  # Item
    q_tile,  # index of the role's rows of q
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Computes the RunningSoftmax after one more tile of keys; its p is multiplied in the next
    step."""
    S: gl.constexpr = softmax.m.type.layout.parent
    tiles, barriers = program.tiles, program.barriers
    batch = program.batch
    n = step.n
    K_STAGES: gl.constexpr = tiles.k.shape[0]
    V_STAGES: gl.constexpr = tiles.v.shape[0]
    stage = n % K_STAGES
    last_stage = (n - 1) % V_STAGES
    if barriers.mma_turns is not None:
        wait_turn(ROLE)
    mbarrier.wait(barriers.k_full.index(stage), n // K_STAGES & 1)
    qk = multiply_keys(tiles, q_tile, stage, S)
    mbarrier.wait(barriers.v_full.index(last_stage), (n - 1) // V_STAGES & 1)
    product = multiply_values(softmax.p, tiles, last_stage, softmax.acc)
    if barriers.mma_turns is not None:
        pass_turn((ROLE + 1) % CONFIG.mma_roles)
    qk = warpgroup_mma_wait(1, deps=[qk])
    mbarrier.arrive(barriers.k_empty.index(stage), count=1)
    if batch.keys.undefined_tail is not None:
        if step.masked:
            clear_tail(program, item, step, CONFIG, ROLE)
    if batch.lazy_maxima is not None:
        softmax = lazy_softmax(softmax, product, qk, factor, program, item, step, CONFIG, ROLE)
        mbarrier.arrive(barriers.v_empty.index(last_stage), count=1)
    else:
        new = softmax_of_tile(qk, softmax.m, factor, batch, item, step, CONFIG, ROLE)
        sums = hold_sums(new.sums, 0)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(barriers.v_empty.index(last_stage), count=1)
        acc = rescaled(product, new.shrink)
        l = softmax.l * along_rows(new.shrink, softmax.l) + sums
        p = words_of_pairs(new.weights, tiles.v.dtype)
        softmax = RunningSoftmax(new.m, l, acc, p)
    return softmax


@gluon.jit
def mainloop(
    program,  # PrefillProgram
    item,  # Item
    item_tiles,  # ItemTiles
    done,  # Progress
    row_scales,  # RowScales
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Runs all steps of an item with tiles as they are copied: the LastProduct."""
    tiles, barriers = program.tiles, program.barriers
    batch = program.batch
    n = done.steps
    ROWS: gl.constexpr = tiles.q.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2]
    K_STAGES: gl.constexpr = tiles.k.shape[0]
    V_STAGES: gl.constexpr = tiles.v.shape[0]
    Q_STAGES: gl.constexpr = barriers.q_full.shape[0]
    V_INNER: gl.constexpr = 256 // tiles.v.dtype.primitive_bitwidth
    M: gl.constexpr = rows_layout(tiles.k.shape[1], tiles.k.dtype, gl.num_warps())
    S: gl.constexpr = M.parent
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, V_INNER])
    factor = None
    if program.scales.k_ptr is None:
        wait_q_full(barriers, done.items)
    else:
        factor = factor_of_rows(program, row_scales, done.items, ROLE, M)
    q_tile = done.items % Q_STAGES * CONFIG.mma_roles + ROLE
    if barriers.mma_turns is not None:
        wait_turn(ROLE)
    stage = n % K_STAGES
    mbarrier.wait(barriers.k_full.index(stage), n // K_STAGES & 1)
    qk = multiply_keys(tiles, q_tile, stage, S)
    if barriers.mma_turns is not None:
        pass_turn((ROLE + 1) % CONFIG.mma_roles)
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(barriers.k_empty.index(stage), count=1)
    m = gl.full([ROWS], float("-inf"), gl.float32, M)
    tile = tile_of_step(item_tiles, 0)
    # a Step that is assigned is one of values: that this one is masked is known when compiling
    new = softmax_of_tile(qk, m, factor, batch, item, Step(n, tile, True), CONFIG, ROLE)
    acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
    p = words_of_pairs(new.weights, tiles.v.dtype)
    if batch.keys.undefined_tail is not None:
        clear_tail(program, item, Step(n, tile, True), CONFIG, ROLE)
    softmax = RunningSoftmax(new.m, new.sums, acc, p)
    for i in range(1, item_tiles.steps):
        tile = tile_of_step(item_tiles, i)
        step = Step(n + i, tile, i < item_tiles.masked_steps)
        softmax = run_step(softmax, step, factor, program, item, q_tile, CONFIG, ROLE)
    if tiles.out is not None:
        if program.scales.unrounded_q is None:
            mbarrier.arrive(barriers.q_empty.index(done.items % Q_STAGES), count=1)
    last = n + item_tiles.steps - 1
    stage = last % V_STAGES
    mbarrier.wait(barriers.v_full.index(stage), last // V_STAGES & 1)
    product = multiply_values(softmax.p, tiles, stage, softmax.acc)
    l = gl.convert_layout(gl.sum(softmax.l, 1), M)
    return LastProduct(product, product, l, softmax.m, Shrink(softmax.m, softmax.m), 1.0)


@gluon.jit
def wait_last_product(last, n, program):
    """Waits for the LastProduct of an item, whose last step is n: its sums [ROWS, DIM_V]."""
    tiles, barriers = program.tiles, program.barriers
    STAGES: gl.constexpr = tiles.v.shape[0]
    acc = warpgroup_mma_wait(0, deps=[last.product])
    if barriers.k_empty is not None:
        mbarrier.arrive(barriers.v_empty.index(n % STAGES), count=1)
    else:
        arrive(barriers.named.v_empty + n % STAGES, barriers.named.v_threads)
        acc = finish_scaled_sums(last, acc, tiles)
    return acc


@gluon.jit
def first_row(item, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """The first packed row that a role multiplies."""
    ROWS: gl.constexpr = CONFIG.tile_m // CONFIG.mma_roles
    return item.tile * CONFIG.tile_m + ROLE * ROWS


@gluon.jit
def num_rows(item, CONFIG: gl.constexpr):
    """The packed rows of a sequence."""
    return item.len_q * CONFIG.packed_heads


@gluon.jit
def sit_out_steps(
    program,  # PrefillProgram
    item,  # Item
    item_tiles,  # ItemTiles
    done,  # Progress
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Takes all turns of an item of which the role has no rows, and gives its tiles back: the other
    roles then have the tensor cores for themselves."""
    tiles, barriers = program.tiles, program.barriers
    K_STAGES: gl.constexpr = tiles.k.shape[0]
    V_STAGES: gl.constexpr = tiles.v.shape[0]
    Q_STAGES: gl.constexpr = barriers.q_full.shape[0]
    for i in range(0, item_tiles.steps):
        n = done.steps + i
        if barriers.mma_turns is not None:
            wait_turn(ROLE)
            pass_turn((ROLE + 1) % CONFIG.mma_roles)
        mbarrier.arrive(barriers.k_empty.index(n % K_STAGES), count=1)
        if program.batch.keys.undefined_tail is not None:
            if (i == 0) | (i < item_tiles.masked_steps):
                step = Step(n, tile_of_step(item_tiles, i), True)
                clear_tail(program, item, step, CONFIG, ROLE)
        if i > 0:
            mbarrier.arrive(barriers.v_empty.index((n - 1) % V_STAGES), count=1)
    last = done.steps + item_tiles.steps - 1
    mbarrier.arrive(barriers.v_empty.index(last % V_STAGES), count=1)
    mbarrier.arrive(barriers.q_empty.index(done.items % Q_STAGES), count=1)


@gluon.jit
def mainloop_of_item(
    program, item, item_tiles, done, row_scales, CONFIG: gl.constexpr, ROLE: gl.constexpr
):
    """The LastProduct of an item, with tiles as they are copied or as they were converted."""
    if program.barriers.k_empty is not None:
        last = mainloop(program, item, item_tiles, done, row_scales, CONFIG, ROLE)
    else:
        last = mainloop_scaled(program, item, item_tiles, done, row_scales, CONFIG)
    return last


@gluon.jit
def mma_role(program, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """The mma role ROLE: multiplies its rows of the row tile, in all items."""
    batch, tiles, barriers = program.batch, program.tiles, program.barriers
    results = program.results
    ROWS: gl.constexpr = tiles.q.shape[1]
    n = gl.program_id(0) * 0
    items = n
    declare_any(ROLE)
    if barriers.k_empty is None:
        give_first_turn(barriers.named)
    item = next_item(batch, n, CONFIG)
    row_scales = row_scales_of(item, program, CONFIG, ROLE)
    if barriers.mma_turns is not None:
        if CONFIG.mma_roles - 1 == ROLE:
            pass_turn(0)
    r = n
    while r < round_count(batch):
        item_tiles = tiles_of_item(batch, item, CONFIG)
        ours = has_number(batch, index_in_round(batch, r)) & has_rows(item, CONFIG)
        multiplies = ours & (item_tiles.steps > 0)
        if batch.splitting.items_ptr is not None:
            # by a schedule a program has one item, so no stage follows those that a role sat out
            if ROLE > 0:
                sits_out = multiplies & (first_row(item, CONFIG, ROLE) >= num_rows(item, CONFIG))
                if sits_out:
                    sit_out_steps(program, item, item_tiles, Progress(n, items), CONFIG, ROLE)
                multiplies = multiplies & (not sits_out)
        if multiplies:
            done = Progress(n, items)
            last = mainloop_of_item(program, item, item_tiles, done, row_scales, CONFIG, ROLE)
            n += item_tiles.steps
            items += 1
            # what is known without the last product, while that is under way
            if results.partial is None:
                factor = hold_bits(finish_rows(last.l, last.m, item, program, CONFIG, ROLE))
                after = next_item(batch, r + 1, CONFIG)
                after_scales = row_scales_of(after, program, CONFIG, ROLE)
            acc = wait_last_product(last, n - 1, program)
            if results.partial is None:
                store_results(acc, last.l, factor, item, program, CONFIG, ROLE)
            else:
                whole = item_tiles.is_whole
                store_split_or_results(acc, last.l, last.m, whole, item, program, CONFIG, ROLE)
            if tiles.out is None:
                tma.store_wait(0)
                mbarrier.arrive(barriers.q_empty.index(0), count=1)
        else:
            if results.partial is None:
                after = next_item(batch, r + 1, CONFIG)
                after_scales = row_scales_of(after, program, CONFIG, ROLE)
            elif batch.splitting.items_ptr is None:  # else there are no others
                if ours:
                    store_absent_split(ROWS, item, program, CONFIG, ROLE)
        r += 1
        if results.partial is None:
            item = after
            row_scales = after_scales
        elif r < round_count(batch):  # splits are mostly one a program
            item = next_item(batch, r, CONFIG)
            row_scales = row_scales_of(item, program, CONFIG, ROLE)
    if barriers.mma_turns is not None:
        if ROLE == 0:  # the last turn is nobody's
            wait_turn(0)
    tma.store_wait(0)


@gluon.jit
def row_scales_of(item, program, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """The RowScales of an item, read before it begins."""
    tiles = program.tiles
    if program.scales.k_ptr is None:
        row_scales = RowScales(item.tile, item.tile)
    else:
        M: gl.constexpr = rows_layout(tiles.k.shape[1], tiles.k.dtype, gl.num_warps())
        ROWS: gl.constexpr = tiles.q.shape[1]
        first = item.tile * CONFIG.tile_m + ROLE * ROWS
        row_scales = scales_of_item(item, first, program.scales, CONFIG, ROWS, M)
    return row_scales


@gluon.jit
def next_item(batch, r, CONFIG: gl.constexpr):
    """Computes the Item of round r, past the end the last one again; it is known before the next
    wait for a product, under which it is computed."""
    index = index_in_round(batch, r)
    if batch.by_grid is None:
        index = gl.minimum(index, rematerialized(batch.items, batch.scarce) - 1)
    item = item_at(batch, index, CONFIG)
    return Item(
        b=item.b,
        sequence=item.sequence,
        split=item.split,
        head=item.head,
        tile=hold_bits(item.tile),
        first_q=item.first_q,
        len_q=item.len_q,
        first_k=item.first_k,
        len_k=item.len_k,
    )
