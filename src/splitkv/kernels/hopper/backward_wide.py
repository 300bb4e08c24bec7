"""The warps of `hopper_backward` where the head dimension is more than 128.

There dk and dv of 64 keys are all that the registers of two warpgroups hold. So each of the two
consumers has one of the sums and the products that lead to it, and they hand each other little:

    the first    s = k q^T, p, which it stores for the second, and dv += p dout
    the second   dp = v dout^T, ds = p (dp - delta), which it stores for both, and dk += ds q

Of dq = ds^T k each makes half of the columns, in pieces of 64 that take turns at its memory; a warp
for each has TMA add them to the sums in memory: see backward_sums.py. A piece is made a step later,
under the exponentials or ds of the next, so that the tensor cores have something to do.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.hopper.backward_loop import HALF, store_rows, weights
from splitkv.kernels.hopper.backward_sinks import add_sinks, start_sinks
from splitkv.kernels.hopper.backward_sums import (
    Exchange,
    add_pieces,
    await_ds,
    in_order,
    last_pieces,
    out_of_order,
    pieces_of,
    put_sums,
    start_piece,
)
from splitkv.kernels.hopper.backward_wide_load import (
    P_EXPONENT,
    allocate_ds,
    allocate_pieces,
    allocate_tiles,
    await_tile,
    produce_tiles,
)
from splitkv.kernels.hopper.clear import all_cleared, clear_behind
from splitkv.kernels.hopper.ring import turn_of


@gluon.jit
def scores(k, q, zero, KEY_DIM: gl.constexpr):
    """Start k q^T, in one product or two: of 192 columns those of a tile of 256 that are there."""
    WHOLE: gl.constexpr = 256 if KEY_DIM == 256 else 128
    whole = q.slice(0, WHOLE, dim=1).permute((1, 0))
    s = warpgroup_mma(k.slice(0, WHOLE, dim=1), whole, zero, use_acc=False, is_async=True)
    if KEY_DIM > WHOLE:
        rest = q.slice(WHOLE, KEY_DIM - WHOLE, dim=1).permute((1, 0))
        s = warpgroup_mma(k.slice(WHOLE, KEY_DIM - WHOLE, dim=1), rest, s, is_async=True)
    return s


@gluon.jit
def await_keys(x, bars, work, PACKED: gl.constexpr):
    """Wait for k and v, and clear of x, one of them, what is another sequence's, as the other
    consumer does of the other."""
    mbarrier.wait(bars.kv.index(0), 0)
    if PACKED:
        if work.len_k < HALF:
            clear_behind(x, work.len_k, 16, 0, 1)
            all_cleared(2)


@gluon.jit
def finish_dv(
    tiles,  # Tiles
    exchange,  # Exchange
    bars,  # Barriers
    work,  # Work
    visit,  # RowTiles
    bounds,  # Bounds
    scale_log2,
    out,  # KeyGradients
    PACKED: gl.constexpr,
    KEY_DIM: gl.constexpr,  # of q and k without padding
):
    """The first consumer from its first to its last instruction."""
    W: gl.constexpr = 0
    M: gl.constexpr = tiles.q.shape[1]
    DIM_V: gl.constexpr = tiles.grad.shape[2]
    COUNT: gl.constexpr = pieces_of(KEY_DIM, W)
    STAGES: gl.constexpr = tiles.q.shape[0]
    GRAD_STAGES: gl.constexpr = tiles.grad.shape[0]
    dtype: gl.constexpr = tiles.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    SCORES: gl.constexpr = 1 if KEY_DIM == 256 else 2  # products of `scores`
    k = tiles.k
    await_keys(k, bars, work, PACKED)
    zero = gl.zeros([HALF, M], gl.float32, S)
    dv = gl.zeros([HALF, DIM_V], gl.float32, ACC)
    i = work.h * 0
    q = await_tile(tiles.q, tiles.q_strips, i, bars.q.index(0), 0, work.len_q, PACKED)
    s = scores(k, q, zero, KEY_DIM)
    s = warpgroup_mma_wait(0, deps=[s])
    for j in range(work.steps):
        last = j - 1
        slot, phase = turn_of(j, STAGES)
        grad_slot, grad_phase = turn_of(j, GRAD_STAGES)
        if exchange.ds is not None:
            await_ds(exchange, last)
            first = start_piece(exchange, tiles.k, last, 0, W)
        total = tiles.total.index(slot).load(ROW)[None, :]
        p = weights(s, total, visit, i, work, bounds, 0, scale_log2)
        mbarrier.wait(bars.p_free.index(0), (j & 1) ^ 1)
        tiles.p.store(in_order(p).to(tiles.p.dtype))
        mbarrier.arrive(bars.p.index(0), count=1)
        mbarrier.arrive(bars.q_free.index(slot), count=1)
        own_grad = tiles.grad, tiles.grad_strips, grad_slot, bars.grad.index(grad_slot)
        grad = await_tile(*own_grad, grad_phase, work.len_q - i * M, PACKED)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), A), grad, dv, is_async=True)
        i += 1
        if i == visit.count:
            i = 0
        slot, phase = turn_of(j + 1, STAGES)
        next_q = tiles.q, tiles.q_strips, slot, bars.q.index(slot)
        if exchange.ds is not None:
            first = warpgroup_mma_wait(1, deps=[first])
            if j > 0:
                put_sums(exchange, first, last * COUNT, W)
            second = start_piece(exchange, tiles.k, last, 1, W)
            dv = warpgroup_mma_wait(1, deps=[dv])
            mbarrier.arrive(bars.grad_free.index(grad_slot), count=1)
            q = await_tile(*next_q, phase, work.len_q - i * M, PACKED)
            s = scores(k, q, zero, KEY_DIM)
            second = warpgroup_mma_wait(SCORES, deps=[second])
            if j > 0:
                mbarrier.arrive(exchange.ds_free.index(last & 1), count=1)
                put_sums(exchange, second, last * COUNT + 1, W)
            s = warpgroup_mma_wait(0, deps=[s])
        else:
            q = await_tile(*next_q, phase, work.len_q - i * M, PACKED)
            s = scores(k, q, zero, KEY_DIM)
            dv = warpgroup_mma_wait(SCORES, deps=[dv])
            mbarrier.arrive(bars.grad_free.index(grad_slot), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
    if exchange.ds is not None:
        if work.steps > 0:
            last_pieces(exchange, tiles.k, work.steps - 1, COUNT, W)
    # of the tile of rows that follows only this consumer has read q
    stage = tiles.q.index(work.steps & (STAGES - 1)).slice(0, DIM_V, dim=1)
    part = KEY_DIM, KEY_DIM + DIM_V
    if out.sink_ptr is not None:
        dv *= 2.0**-P_EXPONENT
    store_keys(dv, stage, out.dv_ptr, out.dv_stride, out, *part, work.len_k, DIM_V)


@gluon.jit
def finish_dk(
    tiles,  # Tiles
    exchange,  # Exchange
    bars,  # Barriers
    work,  # Work
    visit,  # RowTiles
    out,  # KeyGradients
    PACKED: gl.constexpr,
    KEY_DIM: gl.constexpr,  # of q and k without padding
):
    """The second consumer from its first to its last instruction."""
    W: gl.constexpr = 1
    M: gl.constexpr = tiles.q.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    STAGES: gl.constexpr = tiles.q.shape[0]
    GRAD_STAGES: gl.constexpr = tiles.grad.shape[0]
    COUNT: gl.constexpr = pieces_of(KEY_DIM, W)
    dtype: gl.constexpr = tiles.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    v = tiles.v
    await_keys(v, bars, work, PACKED)
    zero = gl.zeros([HALF, M], gl.float32, S)
    dk = gl.zeros([HALF, DIM], gl.float32, ACC)
    sinks = start_sinks(out, zero, 0)
    i = work.h * 0
    first_grad = tiles.grad, tiles.grad_strips, i, bars.grad.index(0)
    grad = await_tile(*first_grad, 0, work.len_q, PACKED)
    dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for j in range(work.steps):
        last = j - 1
        slot, phase = turn_of(j, STAGES)
        grad_slot, grad_phase = turn_of(j, GRAD_STAGES)
        if exchange.ds is not None:
            await_ds(exchange, last)
            first = start_piece(exchange, tiles.k, last, 0, W)
        delta = tiles.delta.index(grad_slot).load(ROW)[None, :]
        if out.sink_ptr is None:
            dp -= delta
        else:  # for p that is scaled
            dp = dp * 2.0**-P_EXPONENT - delta
        mbarrier.arrive(bars.grad_free.index(grad_slot), count=1)
        mbarrier.wait(bars.p.index(0), j & 1)
        ORDER: gl.constexpr = in_order(dp).type.layout
        p = out_of_order(tiles.p.load(ORDER), S).to(gl.float32)
        mbarrier.arrive(bars.p_free.index(0), count=1)
        of_scores = p * dp
        ds = of_scores.to(dtype)
        # p was made after its tile's p_sink had come
        sinks = add_sinks(sinks, out, of_scores, tiles.p_sink.index(slot), i + 1 == visit.count)
        if exchange.ds is not None:
            mbarrier.wait(exchange.ds_free.index(j & 1), ((j >> 1) & 1) ^ 1)
            exchange.ds.index(j & 1).store(ds)
            fence_async_shared()
            mbarrier.arrive(exchange.ds_bar.index(j & 1), count=1)
        own_q = tiles.q, tiles.q_strips, slot, bars.q.index(slot)
        q = await_tile(*own_q, phase, work.len_q - i * M, PACKED)
        dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
        i += 1
        if i == visit.count:
            i = 0
        grad_slot, grad_phase = turn_of(j + 1, GRAD_STAGES)
        next_grad = tiles.grad, tiles.grad_strips, grad_slot, bars.grad.index(grad_slot)
        if exchange.ds is not None:
            first = warpgroup_mma_wait(1, deps=[first])
            if j > 0:
                put_sums(exchange, first, last * COUNT, W)
                if COUNT == 1:
                    mbarrier.arrive(exchange.ds_free.index(last & 1), count=1)
            if COUNT > 1:
                second = start_piece(exchange, tiles.k, last, 1, W)
            dk = warpgroup_mma_wait(COUNT - 1, deps=[dk])
            mbarrier.arrive(bars.q_free.index(slot), count=1)
            grad = await_tile(*next_grad, grad_phase, work.len_q - i * M, PACKED)
            dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
            if COUNT > 1:
                second = warpgroup_mma_wait(1, deps=[second])
                if j > 0:
                    mbarrier.arrive(exchange.ds_free.index(last & 1), count=1)
                    put_sums(exchange, second, last * COUNT + 1, W)
            dp = warpgroup_mma_wait(0, deps=[dp])
        else:
            grad = await_tile(*next_grad, grad_phase, work.len_q - i * M, PACKED)
            dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
            dk = warpgroup_mma_wait(1, deps=[dk])
            mbarrier.arrive(bars.q_free.index(slot), count=1)
            dp = warpgroup_mma_wait(0, deps=[dp])
    if exchange.ds is not None:
        if work.steps > 0:
            last_pieces(exchange, tiles.k, work.steps - 1, COUNT, W)
    # nobody reads the last rows any more, and none came to their place
    stage = tiles.q.index((work.steps + STAGES - 1) % STAGES)
    part = 0, KEY_DIM + v.shape[1]
    dk *= out.scale
    store_keys(dk, stage, out.dk_ptr, out.dk_stride, out, *part, work.len_k, KEY_DIM)


@gluon.jit
def store_keys(x, stage, ptr, stride, out, first, width, count, COLUMNS: gl.constexpr):
    """x [64, dim] to the gradient at ptr, or where it is a part, `width` columns wide, to that from
    its column `first` on."""
    if out.part_ptr is not None:
        if out.in_part:
            store_rows(x, stage, out.part_ptr + first, width, 0, count, COLUMNS)
        count = gl.where(out.in_part, 0, count)
    store_rows(x, stage, ptr, stride, 0, count, COLUMNS)


@gluon.jit
def run_wide(
    inputs,  # Inputs
    sums_desc,
    work,  # Work
    visit,  # RowTiles
    bounds,  # Bounds
    scale_log2,
    out,  # KeyGradients
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    GRAD_STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    KEY_DIM: gl.constexpr,
):
    """A program of `hopper_backward` from its tiles on."""
    boxes, held, bars = allocate_tiles(inputs, STAGES, GRAD_STAGES)
    if sums_desc is None:
        apart = Exchange(None, None, None, None, None, None)
        tl.extra.cuda.gdc_wait()  # for statistics
        gl.warp_specialize(
            [
                (
                    finish_dv,
                    (held, apart, bars, work, visit, bounds, scale_log2, out, PACKED, KEY_DIM),
                ),
                (finish_dk, (held, apart, bars, work, visit, out, PACKED, KEY_DIM)),
                (produce_tiles, (inputs, boxes, held, bars, work, visit, GROUP)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        ds, ds_bar, ds_free = allocate_ds(inputs)
        piece, bar, free = allocate_pieces(sums_desc)
        exchange = Exchange(ds, piece, ds_bar, ds_free, bar, free)
        tl.extra.cuda.gdc_wait()  # for statistics, and sums that are 0
        gl.warp_specialize(
            [
                (
                    finish_dv,
                    (held, exchange, bars, work, visit, bounds, scale_log2, out, PACKED, KEY_DIM),
                ),
                (finish_dk, (held, exchange, bars, work, visit, out, PACKED, KEY_DIM)),
                (produce_tiles, (inputs, boxes, held, bars, work, visit, GROUP)),
                (add_pieces, (sums_desc, exchange, work, visit, KEY_DIM, 0)),
                (add_pieces, (sums_desc, exchange, work, visit, KEY_DIM, 1)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
