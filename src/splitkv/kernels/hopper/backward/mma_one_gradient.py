"""The mma roles of `hopper_backward` where head_dim is more than 128: each has one gradient.

There dk and dv of 64 keys are all that the registers of two warpgroups hold. So each of the two
consumers has one of the sums and the products that lead to it, and they hand each other little:

    consumer 0   s = k q^T, p, which it stores for the other, and dv += p dout
    consumer 1   dp = v dout^T, ds = p (dp - delta), which it stores for both, and dk += ds q

Of dq = ds^T k each makes half of the columns, in pieces of 64 that take turns at its memory; a warp
for each has TMA add them to the sums in memory: see dq_sums.py. A piece is made a step later, under
the exponentials or ds of the next, so that the tensor cores have something to do.

Shared memory holds 64 keys, two tiles of 64 rows of q and one or two of their gradient, which come
and go by themselves, p, and where dq is summed up ds and a piece of dq of each consumer. Where q
and k have 192 columns TMA fills tiles up to 256 with zeros.
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

from splitkv.kernels.hopper.backward.dq_sums import (
    add_dq_pieces,
    finish_dq_pieces,
    from_register_order,
    num_pieces,
    start_dq_piece,
    store_dq,
    to_register_order,
    wait_ds,
)
from splitkv.kernels.hopper.backward.epilogue import store_dk, store_dv
from splitkv.kernels.hopper.backward.load import P_EXPONENT, load_rows_apart
from splitkv.kernels.hopper.backward.masked_weights import masked_weights
from splitkv.kernels.hopper.backward.records import HALF, BackwardMemory, DqExchange
from splitkv.kernels.hopper.backward.shared_memory import (
    allocate_backward_boxes,
    allocate_dq_pieces,
    allocate_rows_apart,
)
from splitkv.kernels.hopper.backward.sinks import add_to_sinks, start_sinks
from splitkv.kernels.hopper.primitives.named_barriers import all_cleared
from splitkv.kernels.hopper.primitives.tma_ring import stage_of
from splitkv.kernels.hopper.primitives.zero_rows import clear_behind


@gluon.jit
def specialize_one_gradient(
    inputs,  # BackwardInputs
    sums_desc,  # see `hopper_backward`
    turn_ptr,  # None: tiles of this height are added in any order
    work,  # KeyWork
    scores,  # MaskedScores
    out,  # KeyGradientStore
    CONFIG: gl.constexpr,  # HopperBackwardConfig
):
    """Runs the roles of a program: a consumer for dv and one for dk, load, and where dq is summed
    up two warps that add to its sums."""
    boxes = allocate_backward_boxes(inputs, CONFIG.num_stages, CONFIG.grad_stages)
    tiles, barriers = allocate_rows_apart(inputs, boxes, CONFIG.num_stages, CONFIG.grad_stages)
    if sums_desc is None:
        # A barrier that no role waits at would be in memory that Triton takes for what it hands to
        # the roles, and would be initialised over it.
        exchange = DqExchange(None, None, None, None, None, None)
        memory = BackwardMemory(tiles, exchange, barriers)
        tl.extra.cuda.gdc_wait()  # for statistics
        gl.warp_specialize(
            [
                (mma_dv, (memory, work, scores, out, CONFIG)),
                (mma_dk, (memory, work, out, CONFIG)),
                (load_rows_apart, (inputs, boxes, tiles, barriers, work, CONFIG)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        exchange = allocate_dq_pieces(inputs, sums_desc)
        memory = BackwardMemory(tiles, exchange, barriers)
        tl.extra.cuda.gdc_wait()  # for statistics, and sums that are 0
        gl.warp_specialize(
            [
                (mma_dv, (memory, work, scores, out, CONFIG)),
                (mma_dk, (memory, work, out, CONFIG)),
                (load_rows_apart, (inputs, boxes, tiles, barriers, work, CONFIG)),
                (add_dq_pieces, (sums_desc, exchange, work, CONFIG, 0)),
                (add_dq_pieces, (sums_desc, exchange, work, CONFIG, 1)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )


@gluon.jit
def wait_keys_and_clear(x, barriers, work, CONFIG: gl.constexpr):
    """Waits for k and v, and clears of x, one of them, what is another sequence's, as the other
    consumer does of the other."""
    mbarrier.wait(barriers.kv_full.index(0), 0)
    if CONFIG.sequences == "packed":
        if work.num_keys < HALF:
            clear_behind(x, work.num_keys, 16, 0, 1)
            all_cleared(2)


@gluon.jit
def wait_q(tiles, full, stage, phase, count, CONFIG: gl.constexpr):
    """Waits at barrier `full` for a tile of q [TILE_M, dim], of whose rows `count` exist."""
    tile = tiles.q.index(stage)
    mbarrier.wait(full, phase)
    clear_strips(tile, tiles.q_strips, stage, count, CONFIG)
    return tile


@gluon.jit
def wait_grad(tiles, full, stage, phase, count, CONFIG: gl.constexpr):
    """Waits at barrier `full` for a tile of the gradient of the output [TILE_M, dim], of whose rows
    `count` exist."""
    tile = tiles.grad.index(stage)
    mbarrier.wait(full, phase)
    clear_strips(tile, tiles.grad_strips, stage, count, CONFIG)
    return tile


@gluon.jit
def clear_strips(tile, strips, stage, count, CONFIG: gl.constexpr):
    """Makes zero the rows from `count` on of a tile where they may be another sequence's: each
    consumer does it for itself, as it comes to the tile in its own time."""
    if CONFIG.sequences == "packed":
        M: gl.constexpr = tile.shape[0]
        DIM: gl.constexpr = tile.shape[1]
        if count < M:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            rows = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))[:, None]
            for n in range(M * DIM // 1024):
                left = count - n * 16 % M
                if left < 16:
                    strip = strips.index(stage * (M * DIM // 1024) + n)
                    kept = strip.load(layout)
                    strip.store(gl.where(rows < left, kept, gl.zeros_like(kept)))
            all_cleared(1)


@gluon.jit
def start_scores(k, q, zero, CONFIG: gl.constexpr):
    """Starts k q^T [64, TILE_M], in one product or two: of 192 columns those of a tile of 256 that
    are there."""
    WHOLE: gl.constexpr = 256 if CONFIG.head_dim == 256 else 128
    whole = q.slice(0, WHOLE, dim=1).permute((1, 0))
    s = warpgroup_mma(k.slice(0, WHOLE, dim=1), whole, zero, use_acc=False, is_async=True)
    if CONFIG.head_dim > WHOLE:
        REST: gl.constexpr = CONFIG.head_dim - WHOLE
        rest = q.slice(WHOLE, REST, dim=1).permute((1, 0))
        s = warpgroup_mma(k.slice(WHOLE, REST, dim=1), rest, s, is_async=True)
    return s


@gluon.jit
def mma_dv(
    memory,  # BackwardMemory
    work,  # KeyWork
    scores,  # MaskedScores
    out,  # KeyGradientStore
    CONFIG: gl.constexpr,  # HopperBackwardConfig
):
    """The mma role of consumer 0: computes p and dv [64, head_dim_v], stores dv, and makes the
    first columns of dq, of which the pieces are a and b.

    Step j issues products (>) and waits for them (<) in this order, without those of dq where that
    is made elsewhere; p of j is worked out, and handed over, under the first piece:

        > dq a j-1   > dv j   < dq a   > dq b j-1   < dv   > s j+1   < dq b   < s
    """
    tiles = memory.tiles
    exchange = memory.exchange
    barriers = memory.barriers
    W: gl.constexpr = 0
    M: gl.constexpr = tiles.q.shape[1]
    DIM_V: gl.constexpr = tiles.grad.shape[2]
    PIECES: gl.constexpr = num_pieces(CONFIG.head_dim, W)
    dtype: gl.constexpr = tiles.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    SCORE_PRODUCTS: gl.constexpr = 1 if CONFIG.head_dim == 256 else 2  # of `start_scores`
    k = tiles.k
    wait_keys_and_clear(k, barriers, work, CONFIG)

    # prologue: products with the first tile of rows
    zero = gl.zeros([HALF, M], gl.float32, S)
    dv = gl.zeros([HALF, DIM_V], gl.float32, ACC)
    i = work.kv_head * 0
    q = wait_q(tiles, barriers.q_full.index(0), i, 0, work.num_rows, CONFIG)
    s = start_scores(k, q, zero, CONFIG)
    s = warpgroup_mma_wait(0, deps=[s])

    for j in range(work.steps):
        last = j - 1
        stage, phase = stage_of(j, CONFIG.num_stages)
        grad_stage, grad_phase = stage_of(j, CONFIG.grad_stages)
        if exchange.ds is not None:
            wait_ds(exchange, last)
            first = start_dq_piece(exchange, tiles.k, last, 0, W)
        total = tiles.total.index(stage).load(ROW)[None, :]
        p = masked_weights(s, total, i, work, scores, 0)  # [64, M]
        mbarrier.wait(barriers.p_empty.index(0), (j & 1) ^ 1)
        tiles.p.store(to_register_order(p).to(tiles.p.dtype))
        mbarrier.arrive(barriers.p_full.index(0), count=1)
        mbarrier.arrive(barriers.q_empty.index(stage), count=1)
        grad_full = barriers.grad_full.index(grad_stage)
        grad = wait_grad(tiles, grad_full, grad_stage, grad_phase, work.num_rows - i * M, CONFIG)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), A), grad, dv, is_async=True)
        i += 1
        if i == work.rows.count:
            i = 0
        stage, phase = stage_of(j + 1, CONFIG.num_stages)
        full = barriers.q_full.index(stage)
        if exchange.ds is not None:
            first = warpgroup_mma_wait(1, deps=[first])
            if j > 0:
                store_dq(exchange, first, last * PIECES, W)
            second = start_dq_piece(exchange, tiles.k, last, 1, W)
            dv = warpgroup_mma_wait(1, deps=[dv])
            mbarrier.arrive(barriers.grad_empty.index(grad_stage), count=1)
            q = wait_q(tiles, full, stage, phase, work.num_rows - i * M, CONFIG)
            s = start_scores(k, q, zero, CONFIG)
            second = warpgroup_mma_wait(SCORE_PRODUCTS, deps=[second])
            if j > 0:
                mbarrier.arrive(exchange.ds_empty.index(last & 1), count=1)
                store_dq(exchange, second, last * PIECES + 1, W)
            s = warpgroup_mma_wait(0, deps=[s])
        else:
            q = wait_q(tiles, full, stage, phase, work.num_rows - i * M, CONFIG)
            s = start_scores(k, q, zero, CONFIG)
            dv = warpgroup_mma_wait(SCORE_PRODUCTS, deps=[dv])
            mbarrier.arrive(barriers.grad_empty.index(grad_stage), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
    if exchange.ds is not None:
        if work.steps > 0:
            finish_dq_pieces(exchange, tiles.k, work.steps - 1, PIECES, W)
    # of the tile of rows that follows only this consumer has read q
    unread = tiles.q.index(work.steps & (CONFIG.num_stages - 1)).slice(0, DIM_V, dim=1)
    if out.sink_ptr is not None:
        dv *= 2.0**-P_EXPONENT
    store_dv(dv, unread, work, out, CONFIG)


@gluon.jit
def mma_dk(
    memory,  # BackwardMemory
    work,  # KeyWork
    out,  # KeyGradientStore
    CONFIG: gl.constexpr,  # HopperBackwardConfig
):
    """The mma role of consumer 1: computes ds and dk [64, head_dim], stores dk, sums up ds for
    sink logits, and makes the last columns of dq.

    Step j as in `mma_dv`; ds of j is worked out, and handed over, under the first piece; with
    head_dim 192 there is no piece b:

        > dq a j-1   > dk j   < dq a   > dq b j-1   < dk   > dp j+1   < dq b   < dp
    """
    tiles = memory.tiles
    exchange = memory.exchange
    barriers = memory.barriers
    W: gl.constexpr = 1
    M: gl.constexpr = tiles.q.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    PIECES: gl.constexpr = num_pieces(CONFIG.head_dim, W)
    dtype: gl.constexpr = tiles.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    v = tiles.v
    wait_keys_and_clear(v, barriers, work, CONFIG)

    # prologue: dp of the first tile of rows
    zero = gl.zeros([HALF, M], gl.float32, S)
    dk = gl.zeros([HALF, DIM], gl.float32, ACC)
    sinks = start_sinks(out, zero, 0)
    i = work.kv_head * 0
    grad = wait_grad(tiles, barriers.grad_full.index(0), i, 0, work.num_rows, CONFIG)
    dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=[dp])

    for j in range(work.steps):
        last = j - 1
        stage, phase = stage_of(j, CONFIG.num_stages)
        grad_stage, grad_phase = stage_of(j, CONFIG.grad_stages)
        if exchange.ds is not None:
            wait_ds(exchange, last)
            first = start_dq_piece(exchange, tiles.k, last, 0, W)
        delta = tiles.delta.index(grad_stage).load(ROW)[None, :]
        if out.sink_ptr is None:
            dp -= delta
        else:  # for p that is scaled
            dp = dp * 2.0**-P_EXPONENT - delta
        mbarrier.arrive(barriers.grad_empty.index(grad_stage), count=1)
        mbarrier.wait(barriers.p_full.index(0), j & 1)
        ORDER: gl.constexpr = to_register_order(dp).type.layout
        p = from_register_order(tiles.p.load(ORDER), S).to(gl.float32)
        mbarrier.arrive(barriers.p_empty.index(0), count=1)
        ds_fp32 = p * dp
        ds = ds_fp32.to(dtype)  # [64, M]
        # p was made after its tile's weights had come
        weight = tiles.weight.index(stage)
        sinks = add_to_sinks(sinks, out, ds_fp32, weight, i + 1 == work.rows.count)
        if exchange.ds is not None:
            mbarrier.wait(exchange.ds_empty.index(j & 1), ((j >> 1) & 1) ^ 1)
            exchange.ds.index(j & 1).store(ds)
            fence_async_shared()
            mbarrier.arrive(exchange.ds_full.index(j & 1), count=1)
        q = wait_q(tiles, barriers.q_full.index(stage), stage, phase, work.num_rows - i * M, CONFIG)
        dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
        i += 1
        if i == work.rows.count:
            i = 0
        grad_stage, grad_phase = stage_of(j + 1, CONFIG.grad_stages)
        grad_full = barriers.grad_full.index(grad_stage)
        if exchange.ds is not None:
            first = warpgroup_mma_wait(1, deps=[first])
            if j > 0:
                store_dq(exchange, first, last * PIECES, W)
                if PIECES == 1:
                    mbarrier.arrive(exchange.ds_empty.index(last & 1), count=1)
            if PIECES > 1:
                second = start_dq_piece(exchange, tiles.k, last, 1, W)
            dk = warpgroup_mma_wait(PIECES - 1, deps=[dk])
            mbarrier.arrive(barriers.q_empty.index(stage), count=1)
            grad = wait_grad(
                tiles, grad_full, grad_stage, grad_phase, work.num_rows - i * M, CONFIG
            )
            dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
            if PIECES > 1:
                second = warpgroup_mma_wait(1, deps=[second])
                if j > 0:
                    mbarrier.arrive(exchange.ds_empty.index(last & 1), count=1)
                    store_dq(exchange, second, last * PIECES + 1, W)
            dp = warpgroup_mma_wait(0, deps=[dp])
        else:
            grad = wait_grad(
                tiles, grad_full, grad_stage, grad_phase, work.num_rows - i * M, CONFIG
            )
            dp = warpgroup_mma(v, grad.permute((1, 0)), zero, use_acc=False, is_async=True)
            dk = warpgroup_mma_wait(1, deps=[dk])
            mbarrier.arrive(barriers.q_empty.index(stage), count=1)
            dp = warpgroup_mma_wait(0, deps=[dp])
    if exchange.ds is not None:
        if work.steps > 0:
            finish_dq_pieces(exchange, tiles.k, work.steps - 1, PIECES, W)
    # nobody reads the last rows any more, and none came to their place
    unread = tiles.q.index((work.steps + CONFIG.num_stages - 1) % CONFIG.num_stages)
    dk *= out.scale
    store_dk(dk, unread, work, out, CONFIG)
