"""The mma roles of `hopper_backward` up to head_dim 128: each consumer has half of the keys.

The maths and its letters are those of kernels/backward; scores are transposed, keys by rows. Of the
TILE_N = 128 keys of a program each consumer, a warpgroup, has 64: it owns their dk and dv. What its
ds adds to dq needs the keys of both, so the two exchange ds through shared memory, and each makes a
half of dq: half of the columns where a step has 64 rows, half of the rows where it has 128. Another
warp has TMA add the halves to sums in memory: see dq_sums.py.

With head_dim 64 exponentials take as long as two products. So they run under one, and dq is made a
step later, when ds of both has long been there: the consumers need not be in step.
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
    add_dq_halves,
    finish_dq_half,
    start_dq_half,
    store_dq,
)
from splitkv.kernels.hopper.backward.epilogue import store_both_gradients
from splitkv.kernels.hopper.backward.load import load_whole_rows
from splitkv.kernels.hopper.backward.masked_weights import hold_words, masked_weights
from splitkv.kernels.hopper.backward.records import (
    HALF,
    BackwardBarriers,
    BackwardMemory,
    BackwardTiles,
    DqExchange,
)
from splitkv.kernels.hopper.backward.shared_memory import (
    SWIZZLED,
    VECTORS,
    allocate_backward_boxes,
    allocate_dq_halves,
    allocate_weights,
)
from splitkv.kernels.hopper.backward.sinks import add_to_sinks, start_sinks
from splitkv.kernels.hopper.primitives.conversion import halves_of_words
from splitkv.kernels.hopper.primitives.named_barriers import all_cleared
from splitkv.kernels.hopper.primitives.tma_ring import make_barriers, next_stage, reinterpret
from splitkv.kernels.hopper.primitives.zero_rows import clear_behind


@gluon.jit
def specialize_half_keys(
    inputs,  # BackwardInputs
    sums_desc,  # see `hopper_backward`
    turn_ptr,
    work,  # KeyWork
    scores,  # MaskedScores
    out,  # KeyGradientStore
    CONFIG: gl.constexpr,  # HopperBackwardConfig
):
    """Runs the roles of a program: two consumers with 64 keys each, load, and where dq is summed up
    the warp that adds to its sums."""
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    TILE_N: gl.constexpr = inputs.k.block_type.shape[1]
    DIM: gl.constexpr = inputs.q.block_type.shape[3]
    STAGES: gl.constexpr = CONFIG.num_stages
    dtype: gl.constexpr = inputs.q.dtype
    boxes = allocate_backward_boxes(inputs, STAGES, STAGES)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTORS)
    weight = allocate_weights(inputs, delta, STAGES)
    tiles = BackwardTiles(
        q=reinterpret(boxes.q, dtype, [STAGES, TILE_M, DIM], SWIZZLED),
        grad=reinterpret(boxes.grad, dtype, [STAGES, TILE_M, DIM], SWIZZLED),
        k=reinterpret(boxes.k, dtype, [TILE_N, DIM], SWIZZLED),
        v=reinterpret(boxes.v, dtype, [TILE_N, DIM], SWIZZLED),
        total=gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTORS),
        delta=delta,
        weight=weight,
        p=None,
        q_strips=None,
        grad_strips=None,
    )
    barriers = BackwardBarriers(
        kv_full=make_barriers(1, 1),
        q_full=make_barriers(STAGES, 2),  # TMA, and the warp that copies statistics
        q_empty=make_barriers(STAGES, 2),
        grad_full=None,
        grad_empty=None,
        p_full=None,
        p_empty=None,
    )
    tl.extra.cuda.gdc_wait()  # for statistics, and sums that are 0
    if sums_desc is None:
        # A barrier that no role waits at would be in memory that Triton takes for what it hands to
        # the roles, and would be initialised over it.
        exchange = DqExchange(None, None, None, None, None, None)
        memory = BackwardMemory(tiles, exchange, barriers)
        gl.warp_specialize(
            [
                (mma_half_keys, (memory, work, scores, out, CONFIG, 0)),
                (mma_half_keys, (memory, work, scores, out, CONFIG, 1)),
                (load_whole_rows, (inputs, boxes, tiles, barriers, work, CONFIG)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        exchange = allocate_dq_halves(inputs, sums_desc)
        memory = BackwardMemory(tiles, exchange, barriers)
        gl.warp_specialize(
            [
                (mma_half_keys, (memory, work, scores, out, CONFIG, 0)),
                (mma_half_keys, (memory, work, scores, out, CONFIG, 1)),
                (load_whole_rows, (inputs, boxes, tiles, barriers, work, CONFIG)),
                (add_dq_halves, (sums_desc, turn_ptr, exchange, work)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )


@gluon.jit
def mma_half_keys(memory, work, scores, out, CONFIG: gl.constexpr, W: gl.constexpr):
    """The mma role of consumer W: computes dk and dv of its 64 keys and stores them."""
    dk, dv = mainloop_half_keys(memory, work, scores, out, CONFIG, W)
    dk *= out.scale
    stage = memory.tiles.v.slice(W * HALF, HALF)  # nobody reads v any more
    store_both_gradients(dk, dv, stage, work, out, CONFIG, W * HALF)


@gluon.jit
def wait_keys(k, v, barriers, work, CONFIG: gl.constexpr, W: gl.constexpr):
    """Waits for k and v, and clears of the tiles [64, dim] of consumer W the rows that are another
    sequence's."""
    mbarrier.wait(barriers.kv_full.index(0), 0)
    if CONFIG.sequences == "packed":
        count = work.num_keys - W * HALF
        if count < HALF:
            clear_behind(k, count, HALF, 0, 1)
            clear_behind(v, count, HALF, 0, 1)
            all_cleared(1)


@gluon.jit
def wait_rows(memory, stage, phase, count, CONFIG: gl.constexpr, W: gl.constexpr):
    """Waits for a tile of rows. Of them `count` exist; where TMA does not know that, the others are
    made zero, those of q by one consumer and those of its gradient by the other."""
    q = memory.tiles.q.index(stage)
    mbarrier.wait(memory.barriers.q_full.index(stage), phase)
    if CONFIG.sequences == "packed":
        if count < q.shape[0]:
            STRIP: gl.constexpr = q.shape[0]
            clear_behind(q if W == 0 else memory.tiles.grad.index(stage), count, STRIP, 0, 1)
            all_cleared(2)


@gluon.jit
def start_dp(v, tiles, stage, zero):
    """Starts dp = v grad^T [64, TILE_M] of a tile of rows."""
    grad = tiles.grad.index(stage).permute((1, 0))
    return warpgroup_mma(v, grad, zero, use_acc=False, is_async=True)


@gluon.jit
def start_dp_minus_delta(v, tiles, stage, like):
    """Starts dp - delta [64, TILE_M] of a tile of rows, in the layout of `like`."""
    ROW: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    grad = tiles.grad.index(stage).permute((1, 0))
    less = tiles.delta.index(stage).load(ROW)[None, :].broadcast_to(like.shape)
    return warpgroup_mma(v, grad, less, is_async=True)


@gluon.jit
def mainloop_half_keys(
    memory,  # BackwardMemory
    work,  # KeyWork
    scores,  # MaskedScores
    out,  # KeyGradientStore
    CONFIG: gl.constexpr,  # HopperBackwardConfig
    W: gl.constexpr,  # which consumer
):
    """Computes (dk, dv) [64, dim] of the keys of consumer W, dk without the scale.

    What a step does with dq has three forms: a step late where head_dim is 64, at once where it is
    128, not at all where another kernel makes it. Step j issues products (>) and waits for them (<)
    in this order; p and ds of a tile are worked out between, and ds of j is handed over before dk:

        late      > dv j     > dk j   < dv   > dq j-1   > s j+1   < dk, dq   > dp j+1   < s    < dp
        at once   > dv j     < dv   > dq j   > dk j   < dq   > s j+1   < dk   > dp j+1   < s    < dp
        not       > dv j     > dk j   < dv              > s j+1   < dk       > dp j+1   < s    < dp
    """
    tiles = memory.tiles
    exchange = memory.exchange
    barriers = memory.barriers
    TILE_M: gl.constexpr = tiles.q.shape[1]
    DIM: gl.constexpr = tiles.q.shape[2]
    EXPONENTIALS_FIRST: gl.constexpr = DIM == 64  # p is rounded under dp
    DQ_LATE: gl.constexpr = DIM == 64 and exchange.sums is not None
    # delta is in dp from the start where reading it in between would hold up more
    DELTA_FIRST: gl.constexpr = DIM > 64 or out.sink_ptr is not None
    dtype: gl.constexpr = tiles.q.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM * TILE_M // 128, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, S)

    k = tiles.k.slice(W * HALF, HALF)
    v = tiles.v.slice(W * HALF, HALF)
    wait_keys(k, v, barriers, work, CONFIG, W)

    # prologue: weights and dp of the first tile of rows
    zero = gl.zeros([HALF, TILE_M], gl.float32, S)
    dk = gl.zeros([HALF, DIM], gl.float32, ACC)
    dv = gl.zeros([HALF, DIM], gl.float32, ACC)
    sinks = start_sinks(out, zero, W)
    stage = work.kv_head * 0
    phase = stage
    i = work.kv_head * 0
    wait_rows(memory, stage, phase, work.num_rows - i * TILE_M, CONFIG, W)
    s = warpgroup_mma(k, tiles.q.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    if DELTA_FIRST:
        dp = start_dp_minus_delta(v, tiles, 0, zero)
    else:
        dp = start_dp(v, tiles, 0, zero)
    s = warpgroup_mma_wait(1, deps=[s])
    total = tiles.total.index(0).load(ROW)[None, :]
    p = masked_weights(s, total, i, work, scores, W * HALF)  # [64, TILE_M]
    words = p
    if EXPONENTIALS_FIRST:
        words = hold_words(p, dtype)
    dp = warpgroup_mma_wait(0, deps=[dp])

    for j in range(work.steps):
        q = tiles.q.index(stage)
        if EXPONENTIALS_FIRST:
            weight = halves_of_words(words, dtype, A)
        else:
            weight = gl.convert_layout(p.to(dtype), A)
        dv = warpgroup_mma(weight, tiles.grad.index(stage), dv, is_async=True)
        if not DELTA_FIRST:
            dp += tiles.delta.index(stage).load(ROW)[None, :]
        ds_fp32 = p * dp
        ds = ds_fp32.to(dtype)  # [64, TILE_M]
        if exchange.sums is not None:
            if DQ_LATE:
                mbarrier.wait(exchange.ds_empty.index(j & 1), ((j >> 1) & 1) ^ 1)
            exchange.ds.index(j & 1).slice(W * HALF, HALF).store(ds)
            fence_async_shared()
            mbarrier.arrive(exchange.ds_full.index(j & 1), count=1)
        last = j - 1
        end = i + 1 == work.rows.count
        if DQ_LATE:
            # dq of the row tile before; of the first one, numbers that nobody uses
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            mbarrier.wait(exchange.ds_full.index(last & 1), (last >> 1) & 1)
            dv = warpgroup_mma_wait(1, deps=[dv])  # registers of p are free for dq
            sinks = add_to_sinks(sinks, out, ds_fp32, tiles.weight.index(stage), end)
            dq = start_dq_half(exchange, tiles.k, last, DQ, W)
        elif exchange.sums is not None:
            mbarrier.wait(exchange.ds_full.index(j & 1), (j >> 1) & 1)
            dv = warpgroup_mma_wait(0, deps=[dv])  # registers of p are free for dq
            dq = start_dq_half(exchange, tiles.k, j, DQ, W)
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            sinks = add_to_sinks(sinks, out, ds_fp32, tiles.weight.index(stage), end)
            dq = warpgroup_mma_wait(1, deps=[dq])
            store_dq(exchange, dq, j, W)
        else:
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            sinks = add_to_sinks(sinks, out, ds_fp32, tiles.weight.index(stage), end)
            dv = warpgroup_mma_wait(1, deps=[dv])

        # weights and dp of the next tile of rows, under dk
        before = stage
        stage, phase = next_stage(stage, phase, CONFIG.num_stages)
        i += 1
        if i == work.rows.count:
            i = 0
        wait_rows(memory, stage, phase, work.num_rows - i * TILE_M, CONFIG, W)
        q_next = tiles.q.index(stage).permute((1, 0))
        s = warpgroup_mma(k, q_next, zero, use_acc=False, is_async=True)
        if DQ_LATE:
            dk, dq = warpgroup_mma_wait(1, deps=[dk, dq])
        else:
            dk = warpgroup_mma_wait(1, deps=[dk])
        mbarrier.arrive(barriers.q_empty.index(before), count=1)
        if DQ_LATE:
            if j > 0:
                mbarrier.arrive(exchange.ds_empty.index(last & 1), count=1)
                store_dq(exchange, dq, last, W)
        if DELTA_FIRST:
            dp = start_dp_minus_delta(v, tiles, stage, zero)
        else:
            dp = start_dp(v, tiles, stage, zero)
        s = warpgroup_mma_wait(1, deps=[s])
        total = tiles.total.index(stage).load(ROW)[None, :]
        p = masked_weights(s, total, i, work, scores, W * HALF)
        if EXPONENTIALS_FIRST:
            words = hold_words(p, dtype)
        dp = warpgroup_mma_wait(0, deps=[dp])
    if DQ_LATE:
        if work.steps > 0:
            finish_dq_half(exchange, tiles.k, work.steps - 1, DQ, W)
    return dk, dv
