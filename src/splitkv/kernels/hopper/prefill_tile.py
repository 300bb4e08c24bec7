"""The roles of `hopper_prefill`: one warp that has tiles copied, warpgroups that multiply them.

Every warpgroup has 64 rows of a row tile. Its steps are the tiles of keys that the row tile visits,
counted over all row tiles of a program: step n has keys and values in slot n % STAGES of two rings.

While the tensor cores multiply p of one step with its values, a warpgroup works out p of the next:
see `before_wait`. Warpgroups issue their products in turns, so that the exponentials of one run
under the products of the others.
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

from splitkv.kernels.hopper.ring import async_load
from splitkv.kernels.tile.band import token_range, visible
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.visit import tile_and_lane, tile_at, tiles_seen
from splitkv.kernels.tile.weight import Queries, scores

ROWS = gl.constexpr(64)  # of a warpgroup

# Renamed between Triton 3.6 and 3.9.
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Work(NamedTuple):
    """What all row tiles have in common.

    cu_q_ptr, cu_k_ptr    [batch + 1] int32, or None: dense
    bounds, scoring       see tile/band.py and tile/weight.py
    seqlen_q, seqlen_k    tokens of each sequence where dense
    total_q               tokens of all sequences where packed
    lane_heads            heads of q that are not packed into rows
    tiles, lanes, width   see `tile_and_lane`
    """

    cu_q_ptr: Any
    cu_k_ptr: Any
    bounds: Any
    scoring: Any
    seqlen_q: Any
    seqlen_k: Any
    batch: Any
    total_q: Any
    lane_heads: Any
    tiles: Any
    lanes: Any
    width: Any


class Parts(NamedTuple):
    """Operands: TMA descriptors of [batch, tokens, heads, dim], with one sequence where packed, or
    shared memory, as boxes of TMA or as tiles [slots, rows or keys, dim].

    The `rest` are the columns of q and k from head_dim_v on, or None.
    """

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    out: Any


class Signals(NamedTuple):
    """Barriers: what has arrived, what is free again, which warpgroup may issue products (or None:
    any)."""

    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    turn: Any


class Output(NamedTuple):
    """Where results go: out with TMA or, by token and head, as `stride_t` says; lse by sequence and
    head; sink_ptr [num_heads], or None."""

    out_ptr: Any
    lse_ptr: Any
    sink_ptr: Any
    stride_t: Any
    stride_lse_b: Any
    stride_lse_h: Any


class Own(NamedTuple):
    """A row tile: its sequence, first head and number in the sequence, whose tokens and keys."""

    b: Any
    head: Any
    tile: Any
    first_q: Any
    len_q: Any
    first_k: Any
    len_k: Any


@gluon.jit
def sequence_at(cu_ptr, tile, batch, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """Whose row tile: sequence b starts at tile cu[b] * PACK // TILE_M + b, as in `own_tile`."""
    # every warp looks at all sequences, so that nothing has to be added up across warps
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    b = tile * 0
    for past in range(1, batch + 1, 128):
        offs = past + gl.arange(0, 128, layout=layout)
        starts = gl.load(cu_ptr + offs, mask=offs <= batch, other=0)
        before = (starts * PACK // TILE_M + offs <= tile) & (offs <= batch)
        b += gl.sum(before.to(gl.int32), 0)
    return b


@gluon.jit
def own_rows(work, index, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """The Own of row tile `index`.

    The last row tiles of sequences are the heaviest. They come first among the last lanes that go
    together, and last, first, .. among those before, so that neighbours always weigh alike.
    """
    tile, lane = tile_and_lane(index, work.tiles, work.lanes, work.width)
    if ((work.lanes - 1) // work.width - lane // work.width) % 2 == 0:
        tile = work.tiles - 1 - tile
    head = lane % work.lane_heads * PACK
    b = lane // work.lane_heads
    first_q = b * 0
    first_k = b * 0
    len_q = work.seqlen_q
    len_k = work.seqlen_k
    if work.cu_q_ptr is not None:
        batch = work.batch
        number = sequence_at(work.cu_q_ptr, tile, batch, PACK, TILE_M)
        known = number < batch
        first_q = gl.load(work.cu_q_ptr + number)
        end_q = gl.load(work.cu_q_ptr + number + 1, mask=known, other=0)
        len_q = gl.where(known, end_q, work.total_q) - first_q
        first_k = gl.load(work.cu_k_ptr + number)
        end_k = gl.load(work.cu_k_ptr + number + 1, mask=known, other=0)
        len_k = gl.where(known, end_k - first_k, 0)
        tile -= first_q * PACK // TILE_M + number
    return Own(b, head, tile, first_q, len_q, first_k, len_k)


@gluon.jit
def own_visit(work, own, PACK: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """(Visit, steps, those of them that ask the mask, which come first); at least one step."""
    t_first, t_last = token_range(own.tile, own.len_q, PACK, TILE_M)
    shift = own.len_k - own.len_q
    visit = tiles_seen(work.bounds, shift + t_first, shift + t_last, own.len_k, TILE_N)
    asking = visit.count - (visit.middle_last - visit.middle_first)
    return visit, gl.maximum(visit.count, 1), asking


@gluon.jit
def tile_of_step(visit, i, asking):
    """The tile of keys of a row tile's step i."""
    inner = tile_at(visit, i - asking + visit.middle_first, False)
    return gl.where(i < asking, tile_at(visit, i, True), inner)


@gluon.jit
def round_count(work):
    """How often the programs take a row tile each."""
    programs = gl.num_programs(0)
    return (work.tiles * work.lanes + programs - 1) // programs


@gluon.jit
def index_in_round(r):
    """The row tile of this program: rounds go forth and back, which spreads the heavy ones."""
    last = gl.num_programs(0) - 1
    pid = gl.program_id(0)
    return r * (last + 1) + gl.where(r % 2 == 0, pid, last - pid)


@gluon.jit
def ask_rows(maps, boxes, signals, own, done, PACK: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Have q of a row tile copied, once the `done` ones before are used up."""
    mbarrier.wait(signals.q_free.index(0), (done & 1) ^ 1)
    full = signals.q_full.index(0)
    BYTES: gl.constexpr = WARPGROUPS * maps.q.block_type.nbytes
    if maps.q_rest is None:
        mbarrier.expect(full, BYTES)
    else:
        mbarrier.expect(full, BYTES + WARPGROUPS * maps.q_rest.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        t = own.first_q + (own.tile * WARPGROUPS + w) * (ROWS // PACK)
        async_load(maps.q, [own.b, t, own.head, 0], full, boxes.q.index(w))
        if maps.q_rest is not None:
            at = [own.b, t, own.head, maps.q.block_type.shape[3]]
            async_load(maps.q_rest, at, full, boxes.q_rest.index(w))


@gluon.jit
def ask_keys(maps, boxes, full, slot, b, key, h):
    """Have a tile of keys copied."""
    if maps.k_rest is None:
        mbarrier.expect(full, maps.k.block_type.nbytes)
    else:
        mbarrier.expect(full, maps.k.block_type.nbytes + maps.k_rest.block_type.nbytes)
        past: gl.constexpr = maps.k.block_type.shape[3]
        async_load(maps.k_rest, [b, key, h, past], full, boxes.k_rest.index(slot))
    async_load(maps.k, [b, key, h, 0], full, boxes.k.index(slot))


@gluon.jit
def produce(
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    signals,  # Signals
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TILE_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Have q, keys and values of all row tiles copied, each as soon as there is room."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    n = gl.program_id(0) * 0
    done = n
    for r in range(round_count(work)):
        index = index_in_round(r)
        if index < work.tiles * work.lanes:
            own = own_rows(work, index, PACK, TILE_M)
            if own.tile * TILE_M < own.len_q * PACK:
                visit, steps, asking = own_visit(work, own, PACK, TILE_M, TILE_N)
                h = own.head // GROUP
                for i in range(0, steps):
                    key = own.first_k + tile_of_step(visit, i, asking) * TILE_N
                    slot = n % STAGES
                    free = (n // STAGES & 1) ^ 1
                    mbarrier.wait(signals.k_free.index(slot), free)
                    ask_keys(maps, boxes, signals.k_full.index(slot), slot, own.b, key, h)
                    if i == 0:
                        ask_rows(maps, boxes, signals, own, done, PACK, WARPGROUPS)
                    mbarrier.wait(signals.v_free.index(slot), free)
                    full = signals.v_full.index(slot)
                    mbarrier.expect(full, maps.v.block_type.nbytes)
                    async_load(maps.v, [own.b, key, h, 0], full, boxes.v.index(slot))
                    n += 1
                done += 1


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
        "{ .reg .pred p; .reg .f32 both; add.f32 both, $2, $3; setp.gt.f32 p, both, 0f7F7FFFFF;"
        " @p bar.sync 15, 128; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=r,=r,r,r",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def along_rows(x, like):
    """x [rows] to multiply `like` [rows, columns] with."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


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
def multiply_keys(tiles, slot, S: gl.constexpr, W: gl.constexpr):
    """Start q @ k.T of the rows of warpgroup W."""
    TILE_N: gl.constexpr = tiles.k.shape[1]
    SUM: gl.constexpr = gl.int32 if tiles.k.dtype == gl.int8 else gl.float32
    start = gl.zeros([ROWS, TILE_N], SUM, S)
    k = tiles.k.index(slot).permute((1, 0))
    qk = warpgroup_mma(tiles.q.index(W), k, start, use_acc=False, is_async=True)
    if tiles.q_rest is not None:
        k_rest = tiles.k_rest.index(slot).permute((1, 0))
        qk = warpgroup_mma(tiles.q_rest.index(W), k_rest, qk, is_async=True)
    return qk


@gluon.jit
def weights(qk, m, work, own, tile, asks, pos, inside):
    """(p in fp32, m, what has to shrink by how much) after the products of one more tile."""
    TILE_N: gl.constexpr = qk.shape[1]
    s, unit = scores(qk, work.scoring, Queries(None, None, None, None), None)
    if asks:
        offs_n = tile * TILE_N + inside
        s = gl.where(visible(work.bounds, pos, offs_n, own.len_k), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * unit)
    top = finite_or_zero(m_new)
    return gl.exp2(s * unit - top[:, None]), m_new, gl.exp2(m - top)


@gluon.jit
def step(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS, 4], see `sums_of_threads`
    m,  # [ROWS] in base 2
    p,  # [ROWS, TILE_N] of step n - 1
    n,
    tile,  # of keys
    asks,  # whether a row may see a part of the tile
    work,  # Work
    own,  # Own
    tiles,  # Parts
    signals,  # Signals
    pos,  # [ROWS, 1]
    inside,  # [1, TILE_N]
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """(acc, l, m, p) after step n, whose p is still to be multiplied."""
    S: gl.constexpr = m.type.layout.parent
    slot = n % STAGES
    last_slot = (n - 1) % STAGES
    if signals.turn is not None:
        mbarrier.wait(signals.turn.index(W), (n & 1) ^ (W == 0))
    mbarrier.wait(signals.k_full.index(slot), n // STAGES & 1)
    qk = multiply_keys(tiles, slot, S, W)
    mbarrier.wait(signals.v_full.index(last_slot), (n - 1) // STAGES & 1)
    acc = warpgroup_mma(p, tiles.v.index(last_slot), acc, is_async=True)
    if signals.turn is not None:
        mbarrier.arrive(signals.turn.index((W + 1) % WARPGROUPS), count=1)
    qk = warpgroup_mma_wait(1, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    if work.cu_q_ptr is not None:
        if asks:
            clear_last(tiles, signals, own, tile, n, STAGES)
    x, m, shrink = weights(qk, m, work, own, tile, asks, pos, inside)
    sums = before_wait(sums_of_threads(x))
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(signals.v_free.index(last_slot), count=1)
    acc = acc * along_rows(shrink, acc)
    l = l * along_rows(shrink, l) + sums
    return acc, l, m, gl.convert_layout(x.to(p.dtype), p.type.layout)


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
    STAGES: gl.constexpr,
):
    """The rows of warpgroup W in all row tiles."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2]
    dtype: gl.constexpr = tiles.v.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    M: gl.constexpr = gl.SliceLayout(1, S)
    offs_m = W * ROWS + gl.arange(0, ROWS, layout=M)
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, S))[None, :]
    n = gl.program_id(0) * 0
    done = n
    for r in range(round_count(work)):
        index = index_in_round(r)
        if index < work.tiles * work.lanes:
            own = own_rows(work, index, PACK, TILE_M)
            if own.tile * TILE_M < own.len_q * PACK:
                visit, steps, asking = own_visit(work, own, PACK, TILE_M, TILE_N)
                pos = own.len_k - own.len_q + (own.tile * TILE_M + offs_m) // PACK
                pos = pos[:, None]

                mbarrier.wait(signals.q_full.index(0), done & 1)
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
                x, m, _ = weights(qk, m, work, own, tile, True, pos, inside)
                l = sums_of_threads(x)
                p = gl.convert_layout(x.to(dtype), A)
                acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
                if work.cu_q_ptr is not None:
                    clear_last(tiles, signals, own, tile, n, STAGES)
                rest = work, own, tiles, signals, pos, inside, W, WARPGROUPS, STAGES
                for i in range(1, steps):
                    tile = tile_of_step(visit, i, asking)
                    acc, l, m, p = step(acc, l, m, p, n + i, tile, i < asking, *rest)
                n += steps
                if tiles.out is not None:
                    mbarrier.arrive(signals.q_free.index(0), count=1)
                slot = (n - 1) % STAGES
                mbarrier.wait(signals.v_full.index(slot), (n - 1) // STAGES & 1)
                acc = warpgroup_mma(p, tiles.v.index(slot), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(signals.v_free.index(slot), count=1)
                write(acc, gl.sum(l, 1), m, own, work, maps, boxes, tiles, output, W, PACK, TILE_M)
                if tiles.out is None:
                    tma.store_wait(0)
                    mbarrier.arrive(signals.q_free.index(0), count=1)
                done += 1
    tma.store_wait(0)


@gluon.jit
def clear_last(tiles, signals, own, tile, n, STAGES: gl.constexpr):
    """Clear the values of step n behind the last key of a sequence.

    All warpgroups do, as each has to before it multiplies; they write the same.
    """
    count = own.len_k - tile * tiles.v.shape[1]
    if count < tiles.v.shape[1]:
        slot = n % STAGES
        mbarrier.wait(signals.v_full.index(slot), n // STAGES & 1)
        clear_behind(tiles.v.index(slot), count)
        fence_async_shared()


@gluon.jit
def write(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    own,  # Own
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    output,  # Output
    W: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Finish the softmax and store out and lse; see `finish`, which is for rows that saw values."""
    l = gl.convert_layout(l, m.type.layout)
    rows = own.tile * TILE_M + W * ROWS + gl.arange(0, ROWS, layout=m.type.layout)
    ok = rows < own.len_q * PACK
    t = own.first_q + rows // PACK
    head = own.head + rows % PACK
    lse = (m + gl.log2(l)) * 0.6931471805599453
    at = own.b.to(gl.int64) * output.stride_lse_b + head.to(gl.int64) * output.stride_lse_h + t
    gl.store(output.lse_ptr + at, lse, mask=ok)
    factor = 1.0 / l
    if output.sink_ptr is not None:
        sink = gl.load(output.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
        sink *= 1.4426950408889634
        top = finite_or_zero(gl.maximum(m, sink))
        shrink = gl.exp2(m - top)
        factor = shrink / (l * shrink + gl.exp2(sink - top))
    # a row that saw no key: its products are 0 times anything
    out = gl.where(along_rows(l, acc) == 0.0, 0.0, acc * along_rows(factor, acc))
    if tiles.out is None:
        tile = tiles.q.index(W)
        box = boxes.q.index(W)
    else:
        tile = tiles.out.index(W)
        box = boxes.out.index(W)
    tma.store_wait(0)
    tile.store(out.to(tile.dtype))
    TOKENS: gl.constexpr = ROWS // PACK
    t_first = (own.tile * TILE_M + W * ROWS) // PACK
    if work.cu_q_ptr is None:
        fence_async_shared()
        async_store(maps.out, [own.b, t_first, own.head, 0], box)
    elif t_first + TOKENS <= own.len_q:
        fence_async_shared()
        async_store(maps.out, [own.b, own.first_q + t_first, own.head, 0], box)
    else:
        write_some(tile, own, t_first, output, PACK)


@gluon.jit
def write_some(tile, own, t_first, output, PACK: gl.constexpr):
    """Store the rows of a tile that are of the sequence."""
    DIM: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    offs = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    t = t_first + rows // PACK
    at = (own.first_q + t).to(gl.int64) * output.stride_t + (own.head + rows % PACK) * DIM
    ptrs = output.out_ptr + at[:, None] + offs[None, :]
    gl.store(ptrs, tile.load(layout), mask=(t < own.len_q)[:, None])
