"""The warpgroups of the kernels for whole sequences, which multiply what others have made ready.

Every warpgroup has 64 rows of a row tile. Its steps are the tiles of keys of an item, counted over
all items of a program: step n has its keys and its values in slots of two rings, n modulo their
length.

While the tensor cores multiply p of one step with its values, a warpgroup works out p of the next:
see `before_wait`; under the last product of an item, what that is divided by and what the next item
is. Warpgroups issue their products in turns, so that the exponentials of one run under the products
of the others.

Keys and values in 8 bits have `scales`, which are all None of others: see prefill_scaled.py.
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

from splitkv.kernels.combine import FINISHED
from splitkv.kernels.hopper.clear import all_cleared, clear_behind
from splitkv.kernels.hopper.prefill_load import ROWS, wait_rows
from splitkv.kernels.hopper.prefill_mask import MINUS_INFINITY, choose, seen_keys
from splitkv.kernels.hopper.prefill_rows import (
    Own,
    index_in_round,
    own_item,
    own_visit,
    round_count,
    tile_of_step,
)
from splitkv.kernels.hopper.prefill_scaled import (
    added,
    are_whole,
    factor_of_rows,
    finished,
    multiply_values,
    rounded,
    scaled_weights,
    shared_scales,
)
from splitkv.kernels.hopper.prefill_sums import (
    along_rows,
    before_wait,
    grown,
    known,
    max_of_rows,
    pass_turn,
    shrunk,
    sums_of_threads,
    wait_turn,
)
from splitkv.kernels.hopper.prefill_write import finish, mark, write, write_part
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
def multiply_keys(tiles, q_slot, slot, S: gl.constexpr):
    """Start q @ k.T of the rows of a warpgroup."""
    TILE_N: gl.constexpr = tiles.k.shape[1]
    SUM: gl.constexpr = gl.int32 if tiles.k.dtype == gl.int8 else gl.float32
    start = gl.zeros([ROWS, TILE_N], SUM, S)
    k = tiles.k.index(slot).permute((1, 0))
    qk = warpgroup_mma(tiles.q.index(q_slot), k, start, use_acc=False, is_async=True)
    if tiles.q_rest is not None:
        k_rest = tiles.k_rest.index(slot).permute((1, 0))
        qk = warpgroup_mma(tiles.q_rest.index(q_slot), k_rest, qk, is_async=True)
    return qk


@gluon.jit
def plain_weights(qk, m, work, own, tile, asks, pos):
    """(p in fp32, its sums by thread, m, what has to shrink by how much) after the products of one
    more tile."""
    s, unit = scores(qk, work.scoring, Queries(None, None, None, None), None)
    if asks:
        s = choose(s, seen_keys(qk, work, own, tile, pos), MINUS_INFINITY)
    m_new = grown(m, max_of_rows(s) * unit)
    top = finite_or_zero(m_new)
    x = gl.exp2(s * unit - top[:, None])
    shrink = gl.exp2(m - top)
    return x, sums_of_threads(x), m_new, (shrink, shrink)


@gluon.jit
def weights(qk, m, factor, work, own, n, tile, asks, pos, scales, tiles):
    """(p in fp32, its sums by thread, m, shrink) after the products of one more tile; see
    `plain_weights` and `scaled_weights`."""
    if scales.k_ptr is None:
        x, sums, m, shrink = plain_weights(qk, m, work, own, tile, asks, pos)
    else:
        rest = work, own, n, tile, asks, pos, scales, tiles
        x, sums, m, shrink = scaled_weights(qk, m, factor, *rest)
    return x, sums, m, shrink


@gluon.jit
def step(
    acc,  # [ROWS, DIM_V]; where p is of 8 bits, without step n - 1
    l,  # [ROWS, 4], see `sums_of_threads`
    m,  # [ROWS] in base 2
    shrink,  # [ROWS] each: by how much step n - 1 shrank acc, and its own product
    p,  # [ROWS, TILE_N] of step n - 1
    n,
    tile,  # of keys
    asks,  # whether a row may see a part of the tile
    factor,  # [ROWS] beside scales
    work,  # Work
    own,  # Own
    tiles,  # Parts
    scales,  # Scales
    signals,  # Signals
    q_slot,
    pos,  # [ROWS]
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """(acc, l, m, shrink, p) after step n, whose p is still to be multiplied."""
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
    if scales.k_ptr is None:
        if work.keys.behind is not None:
            if asks:
                clear_last(tiles, signals, own, tile, n, W, WARPGROUPS)
    ONE_SCALE: gl.constexpr = scales.of_k is None
    if are_whole(qk.dtype, tiles.v.dtype, ONE_SCALE, work.scoring.softcap is None):
        if asks:
            rest = work, own, n, tile, True, pos, scales, tiles
            x, sums, m, shrink_n = weights(qk, m, factor, *rest)
            sums = before_wait(sums, 0)
        else:
            rest = work, own, n, tile, False, pos, scales, tiles
            x, sums, m, shrink_n = weights(qk, m, factor, *rest)
            sums = before_wait(sums, 1)
    else:
        rest = work, own, n, tile, asks, pos, scales, tiles
        x, sums, m, shrink_n = weights(qk, m, factor, *rest)
        sums = before_wait(sums, 0)
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(signals.v_free.index(last_slot), count=1)
    if scales.k_ptr is None:
        acc = shrunk(product, shrink_n[0])
    else:
        acc = added(acc, product, shrink, shrink_n, tiles)
    l = l * along_rows(shrink_n[0], l) + sums
    return acc, l, m, shrink_n, rounded(x, tiles, acc)


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
    scales,  # Scales
    signals,  # Signals
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """(acc as of `step`, the last product of an item, under way, l [ROWS], m [ROWS] in base 2,
    shrink, the scale that values share)."""
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2] if scales.k_ptr is None else tiles.q.shape[2]
    K_SLOTS: gl.constexpr = tiles.k.shape[0]
    V_SLOTS: gl.constexpr = tiles.v.shape[0]
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    K_INNER: gl.constexpr = 256 // tiles.k.dtype.primitive_bitwidth
    V_INNER: gl.constexpr = 256 // tiles.v.dtype.primitive_bitwidth
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, K_INNER])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, V_INNER])
    M: gl.constexpr = gl.SliceLayout(1, S)
    if scales.k_ptr is None:
        wait_rows(signals, done)
    q_slot = done % Q_SLOTS * WARPGROUPS + W
    rows = (own.tile * WARPGROUPS + W) * ROWS + gl.arange(0, ROWS, layout=M)
    pos = own.len_k - own.len_q + rows // PACK
    factor = gl.full([ROWS], 1.0, gl.float32, M)
    k_scale, v_scale = shared_scales(own, scales, GROUP)
    if scales.k_ptr is not None:
        given = work, own, rows, k_scale, done, tiles, scales, signals
        factor = factor_of_rows(*given, W, PACK, M)
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
    first = work, own, n, tile, True, pos, scales, tiles
    x, l, m, shrink = weights(qk, m, factor, *first)
    acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
    p = rounded(x, tiles, acc)
    if scales.k_ptr is None:
        if work.keys.behind is not None:
            clear_last(tiles, signals, own, tile, n, W, WARPGROUPS)
    rest = factor, work, own, tiles, scales, signals, q_slot, pos
    for i in range(1, steps):
        tile = tile_of_step(visit, i, asking)
        sums = acc, l, m, shrink, p
        acc, l, m, shrink, p = step(*sums, n + i, tile, i < asking, *rest, W, WARPGROUPS)
    if tiles.out is not None:
        if scales.wide is None:
            mbarrier.arrive(signals.q_free.index(done % Q_SLOTS), count=1)
    last = n + steps - 1
    slot = last % V_SLOTS
    mbarrier.wait(signals.v_full.index(slot), last // V_SLOTS & 1)
    product = multiply_values(p, tiles, slot, acc)
    return acc, product, gl.convert_layout(gl.sum(l, 1), M), m, shrink, v_scale


@gluon.jit
def last_sums(acc, product, shrink, v_scale, last, tiles, scales, signals):
    """acc [ROWS, DIM_V] of an item, of which step `last` is the last."""
    V_SLOTS: gl.constexpr = tiles.v.shape[0]
    product = warpgroup_mma_wait(0, deps=[product])
    mbarrier.arrive(signals.v_free.index(last % V_SLOTS), count=1)
    if scales.k_ptr is None:
        acc = product
    else:
        acc = finished(acc, product, shrink, v_scale, tiles)
    return acc


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
):
    """The rows of warpgroup W in all items."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    n = gl.program_id(0) * 0
    done = n
    own = next_item(work, n, PACK, TILE_M)
    if signals.turn is not None:
        if W == WARPGROUPS - 1:
            pass_turn(0)
    for r in range(round_count(work)):
        visit, steps, asking, parts = own_visit(work, own, PACK, TILE_M, TILE_N)
        ours = (index_in_round(r) < work.items) & (own.tile * TILE_M < own.len_q * PACK)
        where = own, work, output, W, GROUP, PACK, TILE_M
        if ours & (own.part < parts):
            acc, product, l, m, shrink, v_scale = attend(
                work,
                own,
                visit,
                steps,
                asking,
                n,
                done,
                tiles,
                scales,
                signals,
                W,
                GROUP,
                PACK,
                WARPGROUPS,
            )
            n += steps
            done += 1
            # what is known without the last product, while that is under way
            if output.partial is None:
                factor = known(finish(l, m, *where))
                after = next_item(work, r + 1, PACK, TILE_M)
            acc = last_sums(acc, product, shrink, v_scale, n - 1, tiles, scales, signals)
            if output.partial is None:
                write(acc, l, factor, maps, boxes, tiles, *where)
            elif parts == 1:
                write(acc, l, finish(l, m, *where), maps, boxes, tiles, *where)
                mark(m, FINISHED, *where)
            else:
                write_part(acc, l, m, *where)
            if tiles.out is None:
                tma.store_wait(0)
                mbarrier.arrive(signals.q_free.index(0), count=1)
        else:
            if output.partial is None:
                after = next_item(work, r + 1, PACK, TILE_M)
            elif ours:
                layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
                nothing = gl.zeros([ROWS], gl.float32, layout)
                mark(nothing, 0.0, *where)
        if output.partial is None:
            own = after
        elif r + 1 < round_count(work):  # parts are mostly one a program
            own = next_item(work, r + 1, PACK, TILE_M)
    if signals.turn is not None:
        if W == 0:  # the last turn is nobody's
            wait_turn(0)
    tma.store_wait(0)


@gluon.jit
def next_item(work, r, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """The Own of round r, the last item after all; known before the next wait for a product."""
    index = gl.minimum(index_in_round(r), work.items - 1)
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
