"""What a warpgroup of `hopper_prefill` does with its 64 rows of every row tile.

A step multiplies the queries with a tile of keys and, while the tensor cores multiply the weights
of the step before with their values, works out its own weights: see `before_wait`. Warpgroups issue
their products in turns, so that the exponentials of one run under the products of the others.

The first step of a row tile runs beside the last products of the row tile before in the same way,
if there is room for the queries of both, so that the tensor cores see one long row of steps.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.prefill_output import along_rows, write
from splitkv.kernels.hopper.prefill_tile import (
    ROWS,
    next_rows,
    own_visit,
    round_count,
    slot_and_lap,
    tile_of_step,
)
from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.weight import Queries, scores

FIRST_TURN = 8  # of the hardware's 16 barriers, of which Triton takes the first: of warpgroup 0


@gluon.constexpr_function
def turn_instruction(name, W):
    """On the barrier that two warpgroups share: the one whose turn ends and the next one, W."""
    return f"bar.{name} {FIRST_TURN + W}, 256; mov.b32 $0, 0;"


@gluon.jit
def await_turn(W: gl.constexpr):
    """Until the products of the warpgroup before W are issued."""
    gl.inline_asm_elementwise(
        turn_instruction("sync", W), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def end_turn(W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Let the warpgroup after W issue products."""
    gl.inline_asm_elementwise(
        turn_instruction("arrive", (W + 1) % WARPGROUPS),
        *("=r", []),
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def sums_of_threads(x):
    """[rows, 4]: of each row of x [rows, TILE_N], the sum of what each of four threads has."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    pairs = x.reshape([ROWS, EIGHTS, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def before_wait(sums):
    """The same sums of weights, known before the next wait for a product.

    ptxas moves such a wait up over all arithmetic, and the exponentials would no longer run under
    the product. Over a barrier it does not; this one is for sums that are impossible.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 both; add.f32 both, $2, $3; setp.gt.f32 p, both, 0f7149F2CA;"
        " @p bar.sync 15, 128; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=r,=r,r,r",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def clear_behind(v, count):
    """Zero the rows of a tile from `count` on: another sequence's values may be NaN or infinite."""
    KEYS: gl.constexpr = v.shape[0]
    COLUMNS: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    for first in gl.static_range(0, KEYS, 16):
        if count < first + 16:
            some = v.slice(first, 16)
            some.store(gl.where((rows + first < count)[:, None], some.load(layout), 0.0))


@gluon.jit
def multiply_keys(tiles, slot, q_slot, S: gl.constexpr):
    """Start q @ k.T."""
    TILE_N: gl.constexpr = tiles.k.shape[1]
    start = gl.zeros([ROWS, TILE_N], gl.float32, S)
    k = tiles.k.index(slot).permute((1, 0))
    qk = warpgroup_mma(tiles.q.index(q_slot), k, start, use_acc=False, is_async=True)
    if tiles.q_rest is not None:
        k_rest = tiles.k_rest.index(slot).permute((1, 0))
        qk = warpgroup_mma(tiles.q_rest.index(q_slot), k_rest, qk, is_async=True)
    return qk


@gluon.jit
def multiply(
    acc,
    p,
    n,
    q_slot,
    tiles,
    signals,
    S: gl.constexpr,
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """(q @ k.T of step n, acc to which p @ v of step n - 1 is still being added)."""
    slot, lap = slot_and_lap(signals.k_full, n)
    last_slot, last_lap = slot_and_lap(signals.v_full, n - 1)
    mbarrier.wait(signals.k_full.index(slot), lap)
    mbarrier.wait(signals.v_full.index(last_slot), last_lap)
    if TURNS:
        await_turn(W)
    qk = multiply_keys(tiles, slot, q_slot, S)
    if TURNS == 2:
        end_turn(W, WARPGROUPS)
    acc = warpgroup_mma(p, tiles.v.index(last_slot), acc, is_async=True)
    if TURNS == 1:
        end_turn(W, WARPGROUPS)
    qk = warpgroup_mma_wait(1, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    return qk, acc


@gluon.jit
def weights(
    qk,
    m,
    work,
    own,
    tile,
    asks,
    inside,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """(p in fp32, m, what has to shrink by how much) after the products of one more tile."""
    TILE_N: gl.constexpr = qk.shape[1]
    s, unit = scores(qk, work.scoring, Queries(None, None, None, None), None)
    if asks:
        rows = gl.arange(0, ROWS, layout=m.type.layout) + (own.tile * WARPGROUPS + W) * ROWS
        pos = (own.len_k - own.len_q + rows // PACK)[:, None]
        offs_n = tile * TILE_N + inside
        s = gl.where(visible(work.bounds, pos, offs_n, own.len_k), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * unit)
    top = finite_or_zero(m_new)
    return gl.exp2(s * unit - top[:, None]), m_new, gl.exp2(m - top)


@gluon.jit
def step(
    acc,  # [ROWS, DIM_V]
    m,  # [ROWS] in base 2
    p,  # [ROWS, TILE_N] of step n - 1
    n,
    q_slot,
    tile,  # of keys
    asks,  # whether a row may see a part of the tile
    work,  # Work
    own,  # Own
    tiles,  # Parts
    signals,  # Signals
    inside,  # [1, TILE_N]
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """(acc, sums of weights, m, factor of acc and l, p) after step n, whose p is to be multiplied.

    The results of step n - 1 are not yet multiplied with the factor.
    """
    S: gl.constexpr = m.type.layout.parent
    qk, acc = multiply(acc, p, n, q_slot, tiles, signals, S, W, WARPGROUPS, TURNS)
    if work.cu_q_ptr is not None:
        if asks:
            clear_last(tiles, signals, own, tile, n)
    x, m, shrink = weights(qk, m, work, own, tile, asks, inside, W, PACK, WARPGROUPS)
    sums = before_wait(sums_of_threads(x))
    acc = warpgroup_mma_wait(0, deps=[acc])
    slot, _ = slot_and_lap(signals.v_full, n - 1)
    mbarrier.arrive(signals.v_free.index(slot), count=1)
    return acc, sums, m, shrink, gl.convert_layout(x.to(p.dtype), p.type.layout)


@gluon.jit
def begin(
    n,
    done,
    tile,
    asks,
    work,
    own,
    tiles,
    signals,
    inside,
    S: gl.constexpr,
    A: gl.constexpr,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """(l, m, p) after step n, the first of row tile `done`, with nothing beside it."""
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    slot, lap = slot_and_lap(signals.k_full, n)
    mbarrier.wait(signals.q_full.index(done % Q_SLOTS), done // Q_SLOTS & 1)
    mbarrier.wait(signals.k_full.index(slot), lap)
    if TURNS:
        await_turn(W)
    qk = multiply_keys(tiles, slot, done % Q_SLOTS * WARPGROUPS + W, S)
    if TURNS:
        end_turn(W, WARPGROUPS)
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    if work.cu_q_ptr is not None:
        clear_last(tiles, signals, own, tile, n)
    none = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    x, m, _ = weights(qk, none, work, own, tile, asks, inside, W, PACK, WARPGROUPS)
    return sums_of_threads(x), m, gl.convert_layout(x.to(tiles.v.dtype), A)


@gluon.jit
def end(
    acc,
    l,
    m,
    p,
    n,
    done,
    own,
    work,
    maps,
    boxes,
    tiles,
    signals,
    output,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """After step n, the last of row tile `done`: its values, and the results."""
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    slot, lap = slot_and_lap(signals.v_full, n)
    mbarrier.wait(signals.v_full.index(slot), lap)
    acc = warpgroup_mma(p, tiles.v.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(signals.v_free.index(slot), count=1)
    q_slot = done % Q_SLOTS * WARPGROUPS + W
    write(acc, l, m, own, q_slot, work, maps, boxes, tiles, output, W, PACK, WARPGROUPS)
    if tiles.out is None:
        tma.store_wait(0)
        mbarrier.arrive(signals.q_free.index(done % Q_SLOTS), count=1)


@gluon.jit
def rows_apart(
    r,
    own,
    work,
    maps,
    boxes,
    tiles,
    signals,
    output,
    inside,
    S: gl.constexpr,
    O: gl.constexpr,
    A: gl.constexpr,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """One row tile after another, where there is room for the queries of one."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2]
    rounds = round_count(work)
    n = r * 0
    done = n
    while r < rounds:
        visit, steps, asking = own_visit(work, own, PACK, TILE_M, TILE_N)
        tile = tile_of_step(visit, 0, asking)
        given = work, own, tiles, signals, inside
        l, m, p = begin(n, done, tile, asking > 0, *given, S, A, W, PACK, WARPGROUPS, TURNS)
        acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
        for i in range(1, steps):
            tile = tile_of_step(visit, i, asking)
            acc, sums, m, shrink, p = step(
                acc, m, p, n + i, W, tile, i < asking, *given, W, PACK, WARPGROUPS, TURNS
            )
            acc = acc * along_rows(shrink, acc)
            l = l * along_rows(shrink, l) + sums
        n += steps
        if tiles.out is not None:
            mbarrier.arrive(signals.q_free.index(0), count=1)
        finished = own, work, maps, boxes, tiles, signals, output
        end(acc, l, m, p, n - 1, done, *finished, W, PACK, WARPGROUPS)
        done += 1
        r, own = next_rows(work, r + 1, PACK, TILE_M)


@gluon.jit
def rows_together(
    r,
    own,
    work,
    maps,
    boxes,
    tiles,
    signals,
    output,
    inside,
    S: gl.constexpr,
    O: gl.constexpr,
    A: gl.constexpr,
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """The first step of a row tile runs beside the last values of the row tile before."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2]
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    rounds = round_count(work)
    n = r * 0
    done = n
    if r < rounds:
        visit, steps, asking = own_visit(work, own, PACK, TILE_M, TILE_N)
        tile = tile_of_step(visit, 0, asking)
        given = work, own, tiles, signals, inside
        l, m, p = begin(n, done, tile, asking > 0, *given, S, A, W, PACK, WARPGROUPS, TURNS)
        acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
        last = own
        place = r, own, visit, steps, asking, n, done
        r, own, visit, steps, asking, i, done = go_on(
            *place, work, tiles, signals, PACK, WARPGROUPS
        )
        n += 1
        while r < rounds:
            q_slot = done % Q_SLOTS * WARPGROUPS + W
            tile = tile_of_step(visit, i, asking)
            given = work, own, tiles, signals, inside
            top = gl.where(i == 0, float("-inf"), m)
            acc, sums, top, shrink, p = step(
                *(acc, top, p, n, q_slot, tile, i < asking),
                *given,
                W,
                PACK,
                WARPGROUPS,
                TURNS,
            )
            if i == 0:
                free = (done - 1) % Q_SLOTS
                finished = last, free * WARPGROUPS + W, work, maps, boxes, tiles, output
                write(acc, l, m, *finished, W, PACK, WARPGROUPS)
                if tiles.out is None:
                    tma.store_wait(0)
                    mbarrier.arrive(signals.q_free.index(free), count=1)
                acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
                l = sums
            else:
                acc = acc * along_rows(shrink, acc)
                l = l * along_rows(shrink, l) + sums
            m = top
            last = own
            place = r, own, visit, steps, asking, i, done
            r, own, visit, steps, asking, i, done = go_on(
                *place, work, tiles, signals, PACK, WARPGROUPS
            )
            n += 1
        finished = last, work, maps, boxes, tiles, signals, output
        end(acc, l, m, p, n - 1, done - 1, *finished, W, PACK, WARPGROUPS)


@gluon.jit
def go_on(
    r,
    own,
    visit,
    steps,
    asking,
    i,
    done,
    work,
    tiles,
    signals,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """From a step to the next one."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    i += 1
    if i == steps:
        if tiles.out is not None:
            mbarrier.arrive(signals.q_free.index(done % Q_SLOTS), count=1)
        r, own = next_rows(work, r + 1, PACK, TILE_M)
        visit, steps, asking = own_visit(work, own, PACK, TILE_M, TILE_N)
        i = i * 0
        done += 1
        if r < round_count(work):
            mbarrier.wait(signals.q_full.index(done % Q_SLOTS), done // Q_SLOTS & 1)
    return r, own, visit, steps, asking, i, done


@gluon.jit
def consume(
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    signals,  # Signals
    output,  # Output
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """The rows of warpgroup W in all row tiles."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2]
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, S))[None, :]
    r, own = next_rows(work, gl.program_id(0) * 0, PACK, TILE_M)
    given = r, own, work, maps, boxes, tiles, signals, output, inside
    if TURNS:
        if W == WARPGROUPS - 1:
            end_turn(W, WARPGROUPS)
    if Q_SLOTS == 1:
        rows_apart(*given, S, O, A, W, PACK, WARPGROUPS, TURNS)
    else:
        rows_together(*given, S, O, A, W, PACK, WARPGROUPS, TURNS)
    if TURNS:
        if W == 0:
            await_turn(W)
    tma.store_wait(0)


@gluon.jit
def clear_last(tiles, signals, own, tile, n):
    """Clear the values of step n behind the last key of a sequence.

    All warpgroups do, as each has to before it multiplies; they write the same.
    """
    count = own.len_k - tile * tiles.v.shape[1]
    if count < tiles.v.shape[1]:
        slot, lap = slot_and_lap(signals.v_full, n)
        mbarrier.wait(signals.v_full.index(slot), lap)
        clear_behind(tiles.v.index(slot), count)
        fence_async_shared()
