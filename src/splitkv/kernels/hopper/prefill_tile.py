"""The warpgroups of the kernels for whole sequences, which multiply what others have made ready.

Every warpgroup has 64 rows of a row tile, and the role that it is in has them all: in bf16 each is
one by itself, in 8 bits all are one. Its steps are the tiles of keys of an item, counted over
all items of a program: step n has its keys and its values in slots of two rings, n modulo their
length.

While the tensor cores multiply p of one step with its values, a warpgroup works out p of the next:
see `before_wait`; under the last product of an item, what that is divided by and what the next item
is. Warpgroups issue their products in turns, so that the exponentials of one run under the products
of the others.

Where registers allow it, `with_last_maximum`, weights are relative to a maximum of tiles before, so
that a step has no maximum of its own to find unless a weight is too large or the mask is asked.

Keys in 8 bits have `scales`, which are all None of others. Beside values of 16 bits that are there
as they are multiplied, rows have a factor from products to scores and steps are the same; where
tiles are made ready beside the steps, and `signals.numbers` say so, steps are of scaled_steps.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.clear import all_cleared, clear_behind
from splitkv.kernels.hopper.eight_bits import halves_of_words, words_of_pairs
from splitkv.kernels.hopper.known import again, before_wait, known, known_now
from splitkv.kernels.hopper.numbered import arrive, give_first_turn
from splitkv.kernels.hopper.prefill_load import ROWS, wait_rows
from splitkv.kernels.hopper.prefill_mask import MINUS_INFINITY, choose, seen_keys
from splitkv.kernels.hopper.prefill_rows import (
    Own,
    index_in_round,
    is_item,
    own_item,
    own_visit,
    round_count,
    tile_of_step,
)
from splitkv.kernels.hopper.prefill_scaled import (
    MIDDLE,
    factor_of_rows,
    rows_layout,
    scales_of_item,
)
from splitkv.kernels.hopper.prefill_sums import (
    TOO_LARGE,
    along_rows,
    any_above,
    declare_any,
    grown,
    max_of_rows,
    pass_turn,
    shrunk,
    sums_of_threads,
    wait_turn,
)
from splitkv.kernels.hopper.prefill_write import finish, mark_absent, write, write_part_or_all
from splitkv.kernels.hopper.scaled_steps import (
    attend_scaled,
    finished,
    multiply_keys,
)
from splitkv.kernels.tile.score import score_log2
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.weight import Queries, scores


@gluon.jit
def clear_last(tiles, signals, own, tile, n, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Clear the values of step n behind the last key of a sequence, as all warpgroups do."""
    SLOTS: gl.constexpr = tiles.v.shape[0]
    count = own.len_k - tile * tiles.v.shape[1]
    if count < tiles.v.shape[1]:
        slot = n % SLOTS
        mbarrier.wait(signals.v_full.index(slot), n // SLOTS & 1)
        clear_behind(tiles.v.index(slot), count, 16, W, WARPGROUPS)
        all_cleared(WARPGROUPS)


@gluon.jit
def multiply_values(p, tiles, slot, acc):
    """Start acc + p @ v."""
    p = halves_of_words(p, tiles.v.dtype, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(p, tiles.v.index(slot), acc, is_async=True)


@gluon.constexpr_function
def keeps_products(warpgroups, dim_v, tile_n, box, cut, others):
    """Whether steps look for no maximum: a warpgroup then needs registers for the products of a
    tile until it is known that their weights are good, and has something to gain. With tiles of 128
    keys it has them from the warp that asks for small pages, which spills some; but not where keys
    are cut into parts as well.

    box      keys that are copied at once, of one page
    cut      keys are cut into parts
    others   what else takes registers: a soft cap, columns that q and k have beside those of v
    """
    shape = warpgroups, tile_n
    fits = shape == (3, 64) or (shape == (2, 128) and not (cut and tile_n // box > 2))
    return dim_v == 128 and fits and not others


@gluon.jit
def positions(like, work, own, W: gl.constexpr, PACK: gl.constexpr, WARPGROUPS: gl.constexpr):
    """[ROWS], as `like`: where among the keys the tokens of a warpgroup's rows are."""
    rows = again(own.tile, work.scarce) * (WARPGROUPS * ROWS) + W * ROWS
    rows += gl.arange(0, ROWS, layout=like.type.layout)
    return own.len_k - own.len_q + rows // PACK


@gluon.jit
def scores_of(qk, factor, work):
    """(s, unit) of products: s * unit are the scores in base 2, unit one number or, where rows have
    a factor, [ROWS]. Sums of integers are numbers MIDDLE more, and so is s but with a soft cap."""
    if factor is None:
        s, unit = scores(qk, work.scoring, Queries(None, None, None, None), None)
    else:
        s = qk
        if qk.dtype == gl.int32:
            s = qk.to(gl.float32, bitcast=True)
        unit = factor
        if work.scoring.softcap is not None:
            if qk.dtype == gl.int32:
                s = s - MIDDLE
            s = s * factor[:, None]
            s = score_log2(s, work.scoring.scale, work.scoring.softcap, None, None, None)
            unit = gl.full_like(factor, 1.0)
    return s, unit


@gluon.jit
def exponentials(s, unit, m, factor, MORE: gl.constexpr):
    """Weights of the scores of `scores_of`, of which s is MIDDLE more if MORE, relative to m."""
    if factor is None:
        y = s * unit - m[:, None]
    else:
        if MORE:
            m = gl.fma(unit, gl.full_like(unit, MIDDLE), m)
        y = s * unit[:, None] - m[:, None]
    return gl.exp2(y)


@gluon.jit
def with_maximum(
    qk,
    m,
    factor,  # [ROWS], or None
    work,
    own,
    tile,
    asks,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """(p in fp32, its sums by thread, m, by how much shrinks what came before) after the products
    of one more tile, where the maximum of each row is looked for."""
    MORE: gl.constexpr = qk.dtype == gl.int32 and work.scoring.softcap is None
    s, unit = scores_of(qk, factor, work)
    if work.scarce is not None:
        # else scores would be worked out before it is known whether a maximum is wanted
        unit = known_now(unit)
    if asks:
        pos = positions(m, work, own, W, PACK, WARPGROUPS)
        s = choose(s, seen_keys(qk, work, own, tile, pos), MINUS_INFINITY)
    highest = max_of_rows(s)
    if MORE:
        highest = highest - MIDDLE
    m_new = grown(m, highest * unit)
    top = finite_or_zero(m_new)
    x = exponentials(s, unit, top, factor, MORE)
    return x, sums_of_threads(x), m_new, gl.exp2(m - top)


@gluon.jit
def with_last_maximum(
    p,  # of the step before, for its type
    l,
    product,
    qk,
    m,
    factor,  # [ROWS], or None
    work,
    own,
    tile,
    asks,
    tiles,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """(p, l, m, acc) after the products of one more tile and the product under way of the step
    before.

    Weights are relative to the maximum of tiles before while that does: the mask is not asked, and
    no weight is too large, as all are of a row that has seen nothing, where m = -inf.
    """
    looks = asks
    sums = l
    if not asks:
        MORE: gl.constexpr = qk.dtype == gl.int32 and work.scoring.softcap is None
        s, unit = scores_of(qk, factor, work)
        x = exponentials(s, unit, m, factor, MORE)
        sums = sums_of_threads(x)
        p = words_of_pairs(x, tiles.v.dtype)
        looks = any_above(sums, TOO_LARGE, W)
    if looks:
        of_keys = work, own, tile, asks
        x, sums, m, shrink = with_maximum(qk, m, factor, *of_keys, W, PACK, WARPGROUPS)
        p = words_of_pairs(x, tiles.v.dtype)
        l = before_wait(l * along_rows(shrink, l) + sums, 0)
        acc = shrunk(warpgroup_mma_wait(0, deps=[product]), shrink)
        p = known_now(p)
    else:
        l = before_wait(l + sums, 1)
        acc = warpgroup_mma_wait(0, deps=[product])
        p = known_now(p)
    return p, l, m, acc


@gluon.jit
def step(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS, 4], see `sums_of_threads`
    m,  # [ROWS] in base 2
    p,  # [ROWS, TILE_N] of step n - 1
    n,
    tile,  # of keys
    asks,  # whether a row may see a part of the tile
    factor,  # [ROWS], from products to scores, or None
    work,  # Work
    own,  # Own
    tiles,  # Parts
    signals,  # Signals
    q_slot,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """(acc, l, m, p) after step n, whose p is still to be multiplied."""
    S: gl.constexpr = m.type.layout.parent
    K_SLOTS: gl.constexpr = tiles.k.shape[0]
    V_SLOTS: gl.constexpr = tiles.v.shape[0]
    slot = n % K_SLOTS
    last_slot = (n - 1) % V_SLOTS
    if signals.turn is not None:
        wait_turn(W)
    mbarrier.wait(signals.k_full.index(slot), n // K_SLOTS & 1)
    qk = multiply_keys(tiles, q_slot, slot, S)
    mbarrier.wait(signals.v_full.index(last_slot), (n - 1) // V_SLOTS & 1)
    product = multiply_values(p, tiles, last_slot, acc)
    if signals.turn is not None:
        pass_turn((W + 1) % WARPGROUPS)
    qk = warpgroup_mma_wait(1, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    if work.keys.behind is not None:
        if asks:
            clear_last(tiles, signals, own, tile, n, W, WARPGROUPS)
    of_keys = work, own, tile, asks
    if work.scarce is not None:
        sums = p, l, product, qk, m
        p, l, m, acc = with_last_maximum(*sums, factor, *of_keys, tiles, W, PACK, WARPGROUPS)
        mbarrier.arrive(signals.v_free.index(last_slot), count=1)
    else:
        x, sums, m, shrink = with_maximum(qk, m, factor, *of_keys, W, PACK, WARPGROUPS)
        sums = before_wait(sums, 0)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(signals.v_free.index(last_slot), count=1)
        acc = shrunk(product, shrink)
        l = l * along_rows(shrink, l) + sums
        p = words_of_pairs(x, tiles.v.dtype)
    return acc, l, m, p


@gluon.jit
def attend(
    work,  # Work
    own,  # Own
    visit,  # Visit
    steps,
    asking,
    n,  # steps before
    done,  # items before
    tiles,  # Parts
    of_item,  # see `known_of_item`
    scales,  # Scales
    signals,  # Signals
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """(the last product of an item, under way, l [ROWS], m [ROWS] in base 2)."""
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2]
    K_SLOTS: gl.constexpr = tiles.k.shape[0]
    V_SLOTS: gl.constexpr = tiles.v.shape[0]
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    K_INNER: gl.constexpr = 256 // tiles.k.dtype.primitive_bitwidth
    V_INNER: gl.constexpr = 256 // tiles.v.dtype.primitive_bitwidth
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, K_INNER])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, V_INNER])
    M: gl.constexpr = gl.SliceLayout(1, S)
    factor = None
    if scales.k_ptr is None:
        wait_rows(signals, done)
    else:
        factor = factor_of_rows(work, of_item, done, tiles, scales, signals, W, M)
    q_slot = done % Q_SLOTS * WARPGROUPS + W
    if signals.turn is not None:
        wait_turn(W)
    slot = n % K_SLOTS
    mbarrier.wait(signals.k_full.index(slot), n // K_SLOTS & 1)
    qk = multiply_keys(tiles, q_slot, slot, S)
    if signals.turn is not None:
        pass_turn((W + 1) % WARPGROUPS)
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    m = gl.full([ROWS], float("-inf"), gl.float32, M)
    tile = tile_of_step(visit, 0, asking)
    x, l, m, _ = with_maximum(qk, m, factor, work, own, tile, True, W, PACK, WARPGROUPS)
    acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
    p = words_of_pairs(x, tiles.v.dtype)
    if work.keys.behind is not None:
        clear_last(tiles, signals, own, tile, n, W, WARPGROUPS)
    rest = work, own, tiles, signals, q_slot
    for i in range(1, steps):
        tile = tile_of_step(visit, i, asking)
        sums, now = (acc, l, m, p), (n + i, tile, i < asking)
        acc, l, m, p = step(*sums, *now, factor, *rest, W, PACK, WARPGROUPS)
    if tiles.out is not None:
        if scales.wide is None:
            mbarrier.arrive(signals.q_free.index(done % Q_SLOTS), count=1)
    last = n + steps - 1
    slot = last % V_SLOTS
    mbarrier.wait(signals.v_full.index(slot), last // V_SLOTS & 1)
    product = multiply_values(p, tiles, slot, acc)
    return product, gl.convert_layout(gl.sum(l, 1), M), m


@gluon.jit
def last_sums(acc, product, shrink, v_scale, last, tiles, signals):
    """The sums [ROWS, DIM_V] of an item, of which step `last` is the last."""
    V_SLOTS: gl.constexpr = tiles.v.shape[0]
    product = warpgroup_mma_wait(0, deps=[product])
    if signals.k_free is not None:
        mbarrier.arrive(signals.v_free.index(last % V_SLOTS), count=1)
    else:
        arrive(signals.numbers.v_free + last % V_SLOTS, signals.numbers.v_threads)
        product = finished(acc, product, shrink, v_scale, tiles)
    return product


@gluon.jit
def consume(
    whole,  # Work, of Parts maps, boxes and tiles, Scales, Signals, Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """The rows of role W, of WARPGROUPS that share a row tile, in all items."""
    work, maps, boxes, tiles, scales, signals, output = whole
    ROWS: gl.constexpr = tiles.q.shape[1]
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    n = gl.program_id(0) * 0
    done = n
    declare_any(W)
    if signals.k_free is None:
        give_first_turn(signals.numbers)
    own = next_item(work, n, PACK, TILE_M)
    of_item = known_of_item(own, tiles, scales, W, GROUP, PACK, TILE_M)
    if signals.turn is not None:
        if W == WARPGROUPS - 1:
            pass_turn(0)
    r = n
    while r < round_count(work):
        visit, steps, asking, alone = own_visit(work, own, PACK, TILE_M, TILE_N)
        ours = is_item(work, own, index_in_round(work, r), PACK, TILE_M)
        where = own, work, output, W, GROUP, PACK, TILE_M
        if ours & (steps > 0):
            item = work, own, visit, steps, asking, n, done, tiles
            if signals.k_free is not None:
                product, l, m = attend(*item, of_item, scales, signals, W, PACK, WARPGROUPS)
                acc = product
                shrink = m, m
                v_scale = 1.0
            else:
                acc, product, l, m, shrink, v_scale = attend_scaled(
                    *item, of_item, scales, signals, W, GROUP, PACK
                )
            n += steps
            done += 1
            # what is known without the last product, while that is under way
            if output.partial is None:
                factor = known(finish(l, m, *where))
                after = next_item(work, r + 1, PACK, TILE_M)
                after_item = known_of_item(after, tiles, scales, W, GROUP, PACK, TILE_M)
            acc = last_sums(acc, product, shrink, v_scale, n - 1, tiles, signals)
            if output.partial is None:
                write(acc, l, factor, maps, boxes, tiles, *where)
            else:
                write_part_or_all(acc, l, m, alone, maps, boxes, tiles, *where)
            if tiles.out is None:
                tma.store_wait(0)
                mbarrier.arrive(signals.q_free.index(0), count=1)
        else:
            if output.partial is None:
                after = next_item(work, r + 1, PACK, TILE_M)
                after_item = known_of_item(after, tiles, scales, W, GROUP, PACK, TILE_M)
            elif ours:
                mark_absent(ROWS, *where)
        r += 1
        if output.partial is None:
            own = after
            of_item = after_item
        elif r < round_count(work):  # parts are mostly one a program
            own = next_item(work, r, PACK, TILE_M)
            of_item = known_of_item(own, tiles, scales, W, GROUP, PACK, TILE_M)
    if signals.turn is not None:
        if W == 0:  # the last turn is nobody's
            wait_turn(0)
    tma.store_wait(0)


@gluon.jit
def known_of_item(
    own,
    tiles,
    scales,
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """What is read of an item besides, before it begins."""
    if scales.k_ptr is None:
        of_item = own.tile, own.tile
    else:
        M: gl.constexpr = rows_layout(tiles.k.shape[1], tiles.k.dtype, gl.num_warps())
        first = own.tile * TILE_M + W * tiles.q.shape[1]
        of_item = scales_of_item(own, first, scales, GROUP, PACK, tiles.q.shape[1], M)
    return of_item


@gluon.jit
def next_item(work, r, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """The Own of round r, the last item after all; known before the next wait for a product."""
    index = index_in_round(work, r)
    if work.placed is None:
        index = gl.minimum(index, again(work.items, work.scarce) - 1)
    own = own_item(work, index, PACK, TILE_M)
    return Own(
        own.b,
        own.sequence,
        own.part,
        own.head,
        known(own.tile),
        own.first_q,
        own.len_q,
        own.first_k,
        own.len_k,
    )
