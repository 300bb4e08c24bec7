"""The warps of `hopper_backward`: one that asks for rows, eight that multiply, one that adds.

The maths and its letters are those of kernels/backward.py; scores are transposed, keys by rows. Of
the TILE_N = 128 keys of a program each consumer, a warpgroup, has 64: it owns their dk and dv. What
its ds adds to dq needs the keys of both, so the two exchange ds through shared memory, and each
makes a half of dq: half of the columns where a step has 64 rows, half of the rows where it has 128.
The last warp has TMA add the halves to sums in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.clear import all_cleared, clear_behind
from splitkv.kernels.hopper.ring import async_load

HALF = gl.constexpr(64)  # keys of a consumer


@builtin
def _async_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# Triton 3.6 has the operation without a name in Gluon. `tma.store_wait` waits until src is read.
async_add = getattr(tma, "async_atomic_add", None) or _async_add


class Inputs(NamedTuple):
    """TMA descriptors of q, grad and k, v [batch, tokens, heads, dim]; pointers to total and delta
    of the first row of a program."""

    q: Any
    grad: Any
    k: Any
    v: Any
    total_ptr: Any
    delta_ptr: Any


class Boxes(NamedTuple):
    """Shared memory as TMA sees it: of q and grad [STAGES, 1, TILE_M, 1, dim], k and v [1, 128, 1,
    dim]."""

    q: Any
    grad: Any
    k: Any
    v: Any


class Tiles(NamedTuple):
    """The same as tiles: q and grad [STAGES, TILE_M, dim], k and v [128, dim]; total and delta
    [STAGES, TILE_M]."""

    q: Any
    grad: Any
    k: Any
    v: Any
    total: Any
    delta: Any


class Exchange(NamedTuple):
    """Shared memory of what both consumers make: ds [2, 128, TILE_M], and in fp32 the halves of a
    tile of dq [2, rows, 32] in the order of `put_sums`; the arrival of both halves of ds [2]; that
    of each half of dq [2], and its release. None where dq is made elsewhere."""

    ds: Any
    sums: Any
    ds_bar: Any
    sums_bar: Any
    sums_free: Any


class Barriers(NamedTuple):
    """Arrival of k and v; of q, grad, total and delta [STAGES], and their release."""

    kv: Any
    rows: Any
    rows_free: Any


class RowTiles(NamedTuple):
    """The row tiles that a program visits, `first` to before `end`, once for each head of a group.
    From `middle` to before `middle_end` every row sees every key."""

    first: Any
    end: Any
    middle: Any
    middle_end: Any


class Work(NamedTuple):
    """What one program does.

    steps            row tiles that it visits, of all heads of the group
    b, h             of the descriptors: sequence, KV head
    tile, first_k, len_k, first_q, len_q
    shift            key position of the first query
    stat_head        rows from a head to the next in total and delta
    sum_tile         of the first query of the first head in the sums of dq; sum_head: to the next
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
    parts of rows, or None: where key 0 would be in this part [128, dk and dv] fp32; and whether the
    program has such a part."""

    dk_ptr: Any
    dv_ptr: Any
    dk_stride: Any
    dv_stride: Any
    scale: Any
    part_ptr: Any
    in_part: Any


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
def put_stats(tiles, slot, inputs, row, count):
    """Copy total and delta of a row tile, of which `count` rows exist, to shared memory.

    TMA would have to start at a multiple of 16 bytes.
    """
    TILE_M: gl.constexpr = tiles.total.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, TILE_M, layout=layout)
    total = gl.load(inputs.total_ptr + row + rows, mask=rows < count, other=float("inf"))
    delta = gl.load(inputs.delta_ptr + row + rows, mask=rows < count, other=0.0)
    tiles.total.index(slot).store(total)
    tiles.delta.index(slot).store(delta)


@gluon.jit
def produce(inputs, boxes, tiles, bars, work, visit, GROUP: gl.constexpr):
    """Have K and V copied to shared memory, then every row tile to its turn of the ring.

    One more follows, of which consumers make weights that nobody uses.
    """
    TILE_N: gl.constexpr = inputs.k.block_type.shape[1]
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    STAGES: gl.constexpr = bars.rows.shape[0]
    key = work.first_k + work.tile * TILE_N
    mbarrier.expect(bars.kv, inputs.k.block_type.nbytes + inputs.v.block_type.nbytes)
    async_load(inputs.k, [work.b, key, work.h, 0], bars.kv, boxes.k)
    async_load(inputs.v, [work.b, key, work.h, 0], bars.kv, boxes.v)
    slot = work.h * 0
    phase = slot + 1
    i = visit.first
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
        put_stats(tiles, slot, inputs, g * work.stat_head + t, count)
        mbarrier.arrive(bar, count=1)
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        i += 1
        if i == visit.end:
            i = visit.first
            g += 1


@gluon.jit
def put_sums(sums, dq):
    """Half of a tile of dq to shared memory, in the order of registers.

    A thread of the warpgroup has 4 elements next to each other, 2 columns of 2 rows.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    # [warp, row half, row, step, column pair, column] -> [step, warp, row, pair, half, column]
    parts = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    sums.store(parts.reshape([sums.shape[0], sums.shape[1]]))


@gluon.jit
def add_up(sums_desc, exchange, work, visit):
    """Have both halves of every tile of dq added to the sums in memory."""
    ROWS: gl.constexpr = exchange.sums.shape[1]
    i = visit.first
    tile = work.sum_tile
    for j in range(work.steps):
        for w in gl.static_range(2):
            mbarrier.wait(exchange.sums_bar.index(w), j & 1)
            async_add(sums_desc, [((tile + i) * 2 + w) * ROWS, 0], exchange.sums.index(w))
        tma.store_wait(0)
        for w in gl.static_range(2):
            mbarrier.arrive(exchange.sums_free.index(w), count=1)
        i += 1
        if i == visit.end:
            i = visit.first
            tile += work.sum_head


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
def masked(p, bounds, offs_n, offs_m, first_pos, keys):
    """p [keys, rows] where it is visible, else 0; rows at key positions `first_pos + offs_m`.

    As `visible` in tile/band.py, but of distances, which take fewer registers than positions.
    """
    ahead = offs_n - first_pos - offs_m
    seen = offs_n < keys
    if bounds.right is not None:
        seen = seen & (ahead <= bounds.right)
    if bounds.left is not None:
        near = ahead >= -bounds.left
        if bounds.sink_tokens is not None:
            near = near | (offs_n < bounds.sink_tokens)
        seen = seen & near
    return gl.where(seen, p, 0.0)


@gluon.jit
def consume(
    tiles,  # Tiles
    exchange,  # Exchange
    bars,  # Barriers
    work,  # Work
    visit,  # RowTiles
    bounds,  # Bounds
    scale_log2,
    PACKED: gl.constexpr,  # sequences: TMA does not know where they end
    W: gl.constexpr,  # which consumer
):
    """(dk, dv) [64, dim] of the keys of consumer W, dk without the scale."""
    STAGES: gl.constexpr = tiles.q.shape[0]
    TILE_M: gl.constexpr = tiles.q.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    COLUMNS: gl.constexpr = DIM * TILE_M // 128  # of a half of dq
    dtype: gl.constexpr = tiles.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    TILE_N: gl.constexpr = 2 * HALF

    k = tiles.k.slice(W * HALF, HALF)
    v = tiles.v.slice(W * HALF, HALF)
    mbarrier.wait(bars.kv, 0)
    first_n = work.tile * TILE_N + W * HALF
    if PACKED:
        if first_n + HALF > work.len_k:
            clear_behind(k, work.len_k - first_n, HALF, 0, 1)
            clear_behind(v, work.len_k - first_n, HALF, 0, 1)
            all_cleared(1)
    offs_n = (first_n + gl.arange(0, HALF, layout=gl.SliceLayout(1, S)))[:, None]
    offs_m = gl.arange(0, TILE_M, layout=ROW)[None, :]

    zero = gl.zeros([HALF, TILE_M], gl.float32, S)
    dk = gl.zeros([HALF, DIM], gl.float32, ACC)
    dv = gl.zeros([HALF, DIM], gl.float32, ACC)
    slot = work.h * 0
    phase = slot
    i = visit.first
    await_rows(tiles, bars, slot, phase, work.len_q - i * TILE_M, PACKED, W)
    s = warpgroup_mma(k, tiles.q.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, tiles.grad.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    total = tiles.total.index(0).load(ROW)[None, :]
    p = gl.exp2(s * scale_log2 - total)
    if (i < visit.middle) | (i >= visit.middle_end):
        p = masked(p, bounds, offs_n, offs_m, i * TILE_M + work.shift, work.len_k)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for j in range(work.steps):
        q = tiles.q.index(slot)
        dv = warpgroup_mma(
            gl.convert_layout(p.to(dtype), A), tiles.grad.index(slot), dv, is_async=True
        )
        delta = tiles.delta.index(slot).load(ROW)[None, :]
        ds = (p * (dp - delta)).to(dtype)
        if exchange.sums is not None:
            all_ds = exchange.ds.index(j & 1)
            all_ds.slice(W * HALF, HALF).store(ds)
            fence_async_shared()
            mbarrier.arrive(exchange.ds_bar.index(j & 1), count=1)
            mbarrier.wait(exchange.ds_bar.index(j & 1), (j >> 1) & 1)
            ds_own = all_ds.permute((1, 0))  # [TILE_M, TILE_N]
            k_own = tiles.k
            if TILE_M == 64:
                k_own = k_own.slice(W * COLUMNS, COLUMNS, dim=1)
            else:
                ds_own = ds_own.slice(W * 64, 64)
            dv = warpgroup_mma_wait(0, deps=[dv])  # registers of p are free for dq
            dq = gl.zeros([64, COLUMNS], gl.float32, DQ)
            dq = warpgroup_mma(ds_own, k_own, dq, use_acc=False, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
        if exchange.sums is not None:
            dq = warpgroup_mma_wait(1, deps=[dq])
            mbarrier.wait(exchange.sums_free.index(W), (j & 1) ^ 1)
            put_sums(exchange.sums.index(W), dq)
            fence_async_shared()
            mbarrier.arrive(exchange.sums_bar.index(W), count=1)
        else:
            dv = warpgroup_mma_wait(1, deps=[dv])

        # weights of the next row tile, under dk
        before = slot
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        i += 1
        if i == visit.end:
            i = visit.first
        await_rows(tiles, bars, slot, phase, work.len_q - i * TILE_M, PACKED, W)
        q_next = tiles.q.index(slot).permute((1, 0))
        s = warpgroup_mma(k, q_next, zero, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, deps=[dk])
        mbarrier.arrive(bars.rows_free.index(before), count=1)
        grad_next = tiles.grad.index(slot).permute((1, 0))
        dp = warpgroup_mma(v, grad_next, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        total = tiles.total.index(slot).load(ROW)[None, :]
        p = gl.exp2(s * scale_log2 - total)
        if (i < visit.middle) | (i >= visit.middle_end):
            p = masked(p, bounds, offs_n, offs_m, i * TILE_M + work.shift, work.len_k)
        dp = warpgroup_mma_wait(0, deps=[dp])
    return dk, dv


@gluon.jit
def store_rows(x, stage, ptr, stride, first, count):
    """x [64, dim] to rows `first + 0..63` below `count`; rounded, by way of shared memory, or fp32.

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
    gl.store(ptrs, x, mask=(rows < count)[:, None])


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
    dk, dv = consume(tiles, exchange, bars, work, visit, bounds, scale_log2, PACKED, W)
    dk *= out.scale
    first_n = work.tile * (2 * HALF) + W * HALF
    stage = tiles.v.slice(W * HALF, HALF)
    count = work.len_k
    if out.part_ptr is not None:
        if out.in_part:
            store_rows(dv, stage, out.part_ptr + DIM, 2 * DIM, first_n, count)
            store_rows(dk, stage, out.part_ptr, 2 * DIM, first_n, count)
        count = gl.where(out.in_part, 0, count)
    store_rows(dv, stage, out.dv_ptr, out.dv_stride, first_n, count)
    store_rows(dk, stage, out.dk_ptr, out.dk_stride, first_n, count)
