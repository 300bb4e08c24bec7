"""The warps of `hopper_backward` up to head_dim 128: one asks for rows, eight multiply, one adds.

The maths and its letters are those of kernels/backward.py; scores are transposed, keys by rows. Of
the TILE_N = 128 keys of a program each consumer, a warpgroup, has 64: it owns their dk and dv. What
its ds adds to dq needs the keys of both, so the two exchange ds through shared memory, and each
makes a half of dq: half of the columns where a step has 64 rows, half of the rows where it has 128.
The last warp has TMA add the halves to sums in memory: see backward_sums.py.

With head_dim 64 exponentials take as long as two products. So they run under one, and dq is made a
step later, when ds of both has long been there: the consumers need not be in step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.backward_sinks import add_sinks, sink_weights, start_sinks
from splitkv.kernels.hopper.backward_sums import finish_sums, put_sums, start_sums
from splitkv.kernels.hopper.clear import all_cleared, clear_behind
from splitkv.kernels.hopper.eight_bits import halves_of_words, words_of_pairs
from splitkv.kernels.hopper.prefill_mask import choose, from_column
from splitkv.kernels.hopper.prefill_sums import sums_of_threads
from splitkv.kernels.hopper.ring import async_load

HALF = gl.constexpr(64)  # keys of a consumer


class Inputs(NamedTuple):
    """TMA descriptors of q, grad and k, v [batch, tokens, heads, dim]; pointers to total and delta
    of the first row of a program, and to the sink logit of its first head, or None."""

    q: Any
    grad: Any
    k: Any
    v: Any
    total_ptr: Any
    delta_ptr: Any
    sink_ptr: Any


class Boxes(NamedTuple):
    """Shared memory as TMA sees it: of q and grad [STAGES, 1, TILE_M, 1, dim], k and v [1, 128, 1,
    dim]."""

    q: Any
    grad: Any
    k: Any
    v: Any


class Tiles(NamedTuple):
    """The same as tiles: q and grad [STAGES, TILE_M, dim], k and v [128, dim]; total, -delta, from
    which products dp are summed up, and what the softmax gives a sink, if there is one, [STAGES,
    TILE_M]."""

    q: Any
    grad: Any
    k: Any
    v: Any
    total: Any
    less: Any
    p_sink: Any


class Barriers(NamedTuple):
    """Arrival of k and v; of q, grad, total and -delta [STAGES], and their release."""

    kv: Any
    rows: Any
    rows_free: Any


class RowTiles(NamedTuple):
    """How many row tiles a program visits, once for each head of a group. From `middle` to before
    `middle_end` every row sees every key."""

    count: Any
    middle: Any
    middle_end: Any


class Work(NamedTuple):
    """What one program does.

    steps            row tiles that it visits, of all heads of the group
    b, h             of the descriptors: sequence, KV head
    tile             of keys
    first_k, len_k   its first key; how many from there on are in the sequence
    first_q, len_q   the same of the rows that it visits
    shift            key position of the first row, from the first key on
    stat_head        rows from a head to the next in total and delta
    sum_tile         of the first row of the first head in the sums of dq; sum_head: to the next
    """

    steps: Any
    b: Any
    h: Any
    tile: Any
    first_k: Any
    len_k: Any
    first_q: Any
    len_q: Any
    shift: Any
    stat_head: Any
    sum_tile: Any
    sum_head: Any


class KeyGradients(NamedTuple):
    """Pointers to dk and dv of the first key; elements between tokens; scale of dk. Of tiles in
    parts of rows, or None: this part [keys, dk and dv] fp32; and whether the program has one. The
    program's sums for dsink or None, as in `start_sinks`; and from a head to the next."""

    dk_ptr: Any
    dv_ptr: Any
    dk_stride: Any
    dv_stride: Any
    scale: Any
    part_ptr: Any
    in_part: Any
    sink_ptr: Any
    sink_head: Any


@gluon.jit
def own_tokens(
    tile,
    lane,
    cu_ptr,  # [batch + 1] of the tokens that are tiled, or None: dense
    other_cu_ptr,  # of the others
    length,  # tokens of a sequence where dense
    other_length,
    batch,
    total,  # tokens that are tiled, of all sequences
    num_heads,
    TILE: gl.constexpr,
):
    """(b, head, tile, first, length, other first, other length) as of `own_tile`, a row a token."""
    if cu_ptr is None:
        b = lane // num_heads
        head = lane % num_heads
        first = b * 0
        other_first = b * 0
    else:
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        head = lane
        b = lane * 0
        for past in range(1, batch + 1, 128):
            offs = past + gl.arange(0, 128, layout=layout)
            starts = gl.load(cu_ptr + offs, mask=offs <= batch, other=0)
            before = (starts // TILE + offs <= tile) & (offs <= batch)
            b += gl.sum(before.to(gl.int32), 0)
        known = b < batch
        first = gl.load(cu_ptr + b)
        length = gl.where(known, gl.load(cu_ptr + b + 1, mask=known, other=0), total) - first
        other_first = gl.load(other_cu_ptr + b)
        other_length = gl.load(other_cu_ptr + b + 1, mask=known, other=0) - other_first
        other_length = gl.where(known, other_length, 0)
        tile -= first // TILE + b
    return b, head, tile, first, length, other_first, other_length


@gluon.jit
def put_stats(tiles, slot, inputs, row, count, g):
    """Copy total and -delta of a row tile of head g, of which `count` rows exist, to shared memory.

    TMA would have to start at a multiple of 16 bytes.
    """
    TILE_M: gl.constexpr = tiles.total.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, TILE_M, layout=layout)
    total = gl.load(inputs.total_ptr + row + rows, mask=rows < count, other=float("inf"))
    delta = gl.load(inputs.delta_ptr + row + rows, mask=rows < count, other=0.0)
    tiles.total.index(slot).store(total)
    tiles.less.index(slot).store(-delta)
    if inputs.sink_ptr is not None:
        tiles.p_sink.index(slot).store(sink_weights(inputs, g, total))


@gluon.jit
def produce(inputs, boxes, tiles, bars, work, visit, GROUP: gl.constexpr):
    """Have K and V copied to shared memory, then every row tile to its turn of the ring.

    One more follows, of which consumers make weights that nobody uses.
    """
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    STAGES: gl.constexpr = bars.rows.shape[0]
    mbarrier.expect(bars.kv.index(0), inputs.k.block_type.nbytes + inputs.v.block_type.nbytes)
    async_load(inputs.k, [work.b, work.first_k, work.h, 0], bars.kv.index(0), boxes.k)
    async_load(inputs.v, [work.b, work.first_k, work.h, 0], bars.kv.index(0), boxes.v)
    slot = work.h * 0
    phase = slot + 1
    i = work.h * 0
    g = slot
    for j in range(work.steps + 1):
        t = i * TILE_M
        at = [work.b, work.first_q + t, work.h * GROUP + g, 0]
        bar = bars.rows.index(slot)
        mbarrier.wait(bars.rows_free.index(slot), phase)
        mbarrier.expect(bar, inputs.q.block_type.nbytes + inputs.grad.block_type.nbytes)
        async_load(inputs.q, at, bar, boxes.q.index(slot))
        async_load(inputs.grad, at, bar, boxes.grad.index(slot))
        count = gl.where(j < work.steps, work.len_q - t, 0)
        put_stats(tiles, slot, inputs, g * work.stat_head + t, count, gl.minimum(g, GROUP - 1))
        mbarrier.arrive(bar, count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        i += 1
        if i == visit.count:
            i = 0
            g += 1


@gluon.jit
def await_rows(tiles, bars, slot, phase, count, PACKED: gl.constexpr, W: gl.constexpr):
    """Wait for a row tile; of its rows `count` exist, and the others are made to count for nothing,
    those of q by one consumer and those of its gradient by the other."""
    q = tiles.q.index(slot)
    mbarrier.wait(bars.rows.index(slot), phase)
    if PACKED:
        if count < q.shape[0]:
            STRIP: gl.constexpr = q.shape[0]
            clear_behind(q if W == 0 else tiles.grad.index(slot), count, STRIP, 0, 1)
            all_cleared(2)


@gluon.jit
def masked(p, bounds, FIRST: gl.constexpr, first_pos, keys):
    """p [keys, rows] where it is visible, else 0; keys from FIRST and rows from `first_pos` on.

    A thread has the same columns of two keys, each seen in bits between two numbers: see
    prefill_mask.py.
    """
    like = sums_of_threads(p)
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, like.type.layout))[None, :]
    n = gl.arange(0, HALF, layout=gl.SliceLayout(1, like.type.layout))[:, None] + FIRST
    ahead = n - first_pos
    seen = gl.where(n < keys, -1, 0) + 0 * quarter
    if bounds.right is not None:
        seen &= from_column(ahead - bounds.right, quarter)
    if bounds.left is not None:
        near = ~from_column(ahead + bounds.left + 1, quarter)
        if bounds.sink_tokens is not None:
            near |= gl.where(n < bounds.sink_tokens, -1, 0)
        seen &= near
    return choose(p, seen, 0)


@gluon.constexpr_function
def holding(count):
    """Instructions of `held` for so many words of a thread, and their constraints."""
    code = "{ .reg .pred negative; .reg .b32 all; or.b32 all, $0, $1;"
    code += "".join(f"or.b32 all, all, ${n};" for n in range(2, count))
    code += "setp.lt.s32 negative, all, 0; @negative bar.sync 15, 128; }"
    return code, ",".join(["=r"] * count + [str(n) for n in range(count)])


@gluon.jit
def held(p, dtype: gl.constexpr):
    """p [keys, rows] in 16 bits, two a word, known before the next wait for a product.

    As `before_wait`: the barrier that ptxas does not move the wait over is for weights with a sign,
    which exponentials do not have.
    """
    words = words_of_pairs(p, dtype)
    COUNT: gl.constexpr = words.shape[0] * words.shape[1] // 128  # of a thread
    CODE: gl.constexpr = holding(COUNT)
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [words], dtype=gl.int32, is_pure=False, pack=COUNT
    )


@gluon.jit
def weights(s, total, visit, i, work, bounds, FIRST: gl.constexpr, scale_log2):
    """p [keys, rows] of products s with row tile i; total [1, rows]."""
    p = gl.exp2(s * scale_log2 - total)
    if (i < visit.middle) | (i >= visit.middle_end):
        first = i * s.shape[1] + work.shift
        p = masked(p, bounds, FIRST, first, work.len_k)
    return p


@gluon.jit
def start_dp(v, tiles, slot, zero, FROM_DELTA: gl.constexpr):
    """Ask for dp of a row tile, or for dp - delta."""
    grad = tiles.grad.index(slot).permute((1, 0))
    if FROM_DELTA:
        row: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
        less = tiles.less.index(slot).load(row)[None, :].broadcast_to(zero.shape)
        dp = warpgroup_mma(v, grad, less, is_async=True)
    else:
        dp = warpgroup_mma(v, grad, zero, use_acc=False, is_async=True)
    return dp


@gluon.jit
def consume(
    tiles,  # Tiles
    exchange,  # Exchange
    bars,  # Barriers
    work,  # Work
    visit,  # RowTiles
    bounds,  # Bounds
    scale_log2,
    out,  # KeyGradients
    PACKED: gl.constexpr,  # sequences: TMA does not know where they end
    W: gl.constexpr,  # which consumer
):
    """(dk, dv) [64, dim] of the keys of consumer W, dk without the scale."""
    STAGES: gl.constexpr = tiles.q.shape[0]
    TILE_M: gl.constexpr = tiles.q.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    HOLD: gl.constexpr = DIM == 64
    LATE: gl.constexpr = DIM == 64 and exchange.sums is not None  # dq
    # delta is in dp from the start where reading it in between would hold up more
    FROM_DELTA: gl.constexpr = DIM > 64 or out.sink_ptr is not None
    dtype: gl.constexpr = tiles.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM * TILE_M // 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)

    k = tiles.k.slice(W * HALF, HALF)
    v = tiles.v.slice(W * HALF, HALF)
    mbarrier.wait(bars.kv.index(0), 0)
    if PACKED:
        count = work.len_k - W * HALF
        if count < HALF:
            clear_behind(k, count, HALF, 0, 1)
            clear_behind(v, count, HALF, 0, 1)
            all_cleared(1)
    of_weights = work, bounds, W * HALF, scale_log2

    zero = gl.zeros([HALF, TILE_M], gl.float32, S)
    dk = gl.zeros([HALF, DIM], gl.float32, ACC)
    dv = gl.zeros([HALF, DIM], gl.float32, ACC)
    sinks = start_sinks(out, zero, W)
    slot = work.h * 0
    phase = slot
    i = work.h * 0
    await_rows(tiles, bars, slot, phase, work.len_q - i * TILE_M, PACKED, W)
    s = warpgroup_mma(k, tiles.q.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = start_dp(v, tiles, 0, zero, FROM_DELTA)
    s = warpgroup_mma_wait(1, deps=[s])
    total = tiles.total.index(0).load(ROW)[None, :]
    p = weights(s, total, visit, i, *of_weights)
    words = p
    if HOLD:
        words = held(p, dtype)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for j in range(work.steps):
        q = tiles.q.index(slot)
        if HOLD:
            weight = halves_of_words(words, dtype, A)
        else:
            weight = gl.convert_layout(p.to(dtype), A)
        dv = warpgroup_mma(weight, tiles.grad.index(slot), dv, is_async=True)
        if not FROM_DELTA:
            dp += tiles.less.index(slot).load(ROW)[None, :]
        of_scores = p * dp
        ds = of_scores.to(dtype)
        if exchange.sums is not None:
            if LATE:
                mbarrier.wait(exchange.ds_free.index(j & 1), ((j >> 1) & 1) ^ 1)
            exchange.ds.index(j & 1).slice(W * HALF, HALF).store(ds)
            fence_async_shared()
            mbarrier.arrive(exchange.ds_bar.index(j & 1), count=1)
        last = j - 1
        end = i + 1 == visit.count
        if LATE:
            # dq of the row tile before; of the first one, numbers that nobody uses
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            mbarrier.wait(exchange.ds_bar.index(last & 1), (last >> 1) & 1)
            dv = warpgroup_mma_wait(1, deps=[dv])  # registers of p are free for dq
            sinks = add_sinks(sinks, out, of_scores, tiles.p_sink.index(slot), end)
            dq = start_sums(exchange, tiles.k, last, DQ, W)
        elif exchange.sums is not None:
            mbarrier.wait(exchange.ds_bar.index(j & 1), (j >> 1) & 1)
            dv = warpgroup_mma_wait(0, deps=[dv])  # registers of p are free for dq
            dq = start_sums(exchange, tiles.k, j, DQ, W)
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            sinks = add_sinks(sinks, out, of_scores, tiles.p_sink.index(slot), end)
            dq = warpgroup_mma_wait(1, deps=[dq])
            put_sums(exchange, dq, j, W)
        else:
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            sinks = add_sinks(sinks, out, of_scores, tiles.p_sink.index(slot), end)
            dv = warpgroup_mma_wait(1, deps=[dv])

        # weights of the next row tile, under dk
        before = slot
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        i += 1
        if i == visit.count:
            i = 0
        await_rows(tiles, bars, slot, phase, work.len_q - i * TILE_M, PACKED, W)
        q_next = tiles.q.index(slot).permute((1, 0))
        s = warpgroup_mma(k, q_next, zero, use_acc=False, is_async=True)
        if LATE:
            dk, dq = warpgroup_mma_wait(1, deps=[dk, dq])
        else:
            dk = warpgroup_mma_wait(1, deps=[dk])
        mbarrier.arrive(bars.rows_free.index(before), count=1)
        if LATE:
            if j > 0:
                mbarrier.arrive(exchange.ds_free.index(last & 1), count=1)
                put_sums(exchange, dq, last, W)
        dp = start_dp(v, tiles, slot, zero, FROM_DELTA)
        s = warpgroup_mma_wait(1, deps=[s])
        total = tiles.total.index(slot).load(ROW)[None, :]
        p = weights(s, total, visit, i, *of_weights)
        if HOLD:
            words = held(p, dtype)
        dp = warpgroup_mma_wait(0, deps=[dp])
    if LATE:
        if work.steps > 0:
            finish_sums(exchange, tiles.k, work.steps - 1, DQ, W)
    return dk, dv


@gluon.jit
def store_rows(x, stage, ptr, stride, first, count, COLUMNS: gl.constexpr):
    """COLUMNS of x [64, dim] to rows `first + 0..63` below `count`; rounded, by way of shared
    memory, or fp32.

    ptr is that of row 0; stage [64, dim] in the type of the rows.
    """
    DIM: gl.constexpr = x.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    if ptr.dtype.element_ty != gl.float32:
        stage.store(x.to(stage.dtype))
        x = stage.load(COPY)
    layout: gl.constexpr = x.type.layout
    rows = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    ptrs = ptr + rows.to(gl.int64)[:, None] * stride + offs_d[None, :]
    ok = (rows < count)[:, None]
    if COLUMNS < DIM:
        ok &= (offs_d < COLUMNS)[None, :]
    gl.store(ptrs, x, mask=ok)


@gluon.jit
def finish_keys(
    tiles,  # Tiles
    exchange,  # Exchange
    bars,  # Barriers
    work,  # Work
    visit,  # RowTiles
    bounds,  # Bounds
    scale_log2,
    out,  # KeyGradients
    PACKED: gl.constexpr,
    W: gl.constexpr,
):
    """A consumer from its first to its last instruction."""
    DIM: gl.constexpr = tiles.q.shape[2]
    dk, dv = consume(tiles, exchange, bars, work, visit, bounds, scale_log2, out, PACKED, W)
    dk *= out.scale
    first_n: gl.constexpr = W * HALF
    stage = tiles.v.slice(W * HALF, HALF)
    count = work.len_k
    if out.part_ptr is not None:
        if out.in_part:
            store_rows(dv, stage, out.part_ptr + DIM, 2 * DIM, first_n, count, DIM)
            store_rows(dk, stage, out.part_ptr, 2 * DIM, first_n, count, DIM)
        count = gl.where(out.in_part, 0, count)
    store_rows(dv, stage, out.dv_ptr, out.dv_stride, first_n, count, DIM)
    store_rows(dk, stage, out.dk_ptr, out.dk_stride, first_n, count, DIM)
