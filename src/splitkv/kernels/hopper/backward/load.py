"""The load role of `hopper_backward`: one warp has TMA copy keys, then tiles of rows.

Rows are visited once for each head of the group; their statistics follow by ordinary loads, as TMA
would have to start at a multiple of 16 bytes. After the last tile of rows one more is loaded, of
which consumers make weights that nobody uses.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.primitives.tma_ring import async_load, next_stage

# With sink logits the consumer of dv has p times 2^15, so that in fp16 small p have as many bits as
# large ones, three more than in bf16: the rounding of p would be in dsink.
P_EXPONENT = gl.constexpr(15)


@gluon.jit
def issue_keys(inputs, boxes, work, kv):
    """Issues the copies of k and v [TILE_N, dim], whose barrier is `kv`."""
    mbarrier.expect(kv, inputs.k.block_type.nbytes + inputs.v.block_type.nbytes)
    async_load(inputs.k, [work.sequence, work.first_key, work.kv_head, 0], kv, boxes.k)
    async_load(inputs.v, [work.sequence, work.first_key, work.kv_head, 0], kv, boxes.v)


@gluon.jit
def load_whole_rows(inputs, boxes, tiles, barriers, work, CONFIG: gl.constexpr):
    """Loads keys, then q, the gradient of the output and statistics of each tile of rows, which
    share a stage and a barrier; of delta the stage gets -delta."""
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    STAGES: gl.constexpr = CONFIG.num_stages
    issue_keys(inputs, boxes, work, barriers.kv_full.index(0))
    stage = work.kv_head * 0
    phase = stage + 1
    i = work.kv_head * 0
    g = stage
    for j in range(work.steps + 1):
        t = i * TILE_M
        at = [work.sequence, work.first_row + t, work.kv_head * CONFIG.group + g, 0]
        full = barriers.q_full.index(stage)
        mbarrier.wait(barriers.q_empty.index(stage), phase)
        mbarrier.expect(full, inputs.q.block_type.nbytes + inputs.grad.block_type.nbytes)
        async_load(inputs.q, at, full, boxes.q.index(stage))
        async_load(inputs.grad, at, full, boxes.grad.index(stage))
        count = gl.where(j < work.steps, work.num_rows - t, 0)
        copy_statistics(inputs, tiles, stage, g * work.stat_head + t, count)
        mbarrier.arrive(full, count=1)
        stage, phase = next_stage(stage, phase, STAGES)
        i += 1
        if i == work.rows.count:
            i = 0
            g += 1


@gluon.jit
def copy_statistics(inputs, tiles, stage, row, count):
    """Copies total, -delta and weights of a tile of rows, of which `count` rows exist, to shared
    memory."""
    TILE_M: gl.constexpr = tiles.total.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, TILE_M, layout=layout)
    total = gl.load(inputs.total_ptr + row + rows, mask=rows < count, other=float("inf"))
    delta = gl.load(inputs.delta_ptr + row + rows, mask=rows < count, other=0.0)
    tiles.total.index(stage).store(total)
    tiles.delta.index(stage).store(-delta)
    if inputs.weight_ptr is not None:
        weight = gl.load(inputs.weight_ptr + row + rows, mask=rows < count, other=0.0)
        tiles.weight.index(stage).store(weight)


@gluon.jit
def load_rows_apart(inputs, boxes, tiles, barriers, work, CONFIG: gl.constexpr):
    """Loads keys, then of each tile of rows q and its gradient, each when there is room for it.

    With sink logits total and delta are scaled, so that p comes out times 2^P_EXPONENT.
    """
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, TILE_M, layout=layout)
    issue_keys(inputs, boxes, work, barriers.kv_full.index(0))
    stage = work.kv_head * 0
    phase = stage + 1
    grad_stage = stage
    grad_phase = phase
    i = stage
    g = stage
    for j in range(work.steps + 1):
        t = i * TILE_M
        at = [work.sequence, work.first_row + t, work.kv_head * CONFIG.group + g, 0]
        count = gl.where(j < work.steps, work.num_rows - t, 0)
        row = g * work.stat_head + t
        total = gl.load(inputs.total_ptr + row + rows, mask=rows < count, other=float("inf"))
        delta = gl.load(inputs.delta_ptr + row + rows, mask=rows < count, other=0.0)
        full = barriers.q_full.index(stage)
        mbarrier.wait(barriers.q_empty.index(stage), phase)
        mbarrier.expect(full, inputs.q.block_type.nbytes)
        async_load(inputs.q, at, full, boxes.q.index(stage))
        if inputs.weight_ptr is not None:
            weight = gl.load(inputs.weight_ptr + row + rows, mask=rows < count, other=0.0)
            tiles.weight.index(stage).store(weight)
            total -= P_EXPONENT
            delta *= 2.0**-P_EXPONENT
        tiles.total.index(stage).store(total)
        mbarrier.arrive(full, count=1)
        full = barriers.grad_full.index(grad_stage)
        mbarrier.wait(barriers.grad_empty.index(grad_stage), grad_phase)
        mbarrier.expect(full, inputs.grad.block_type.nbytes)
        async_load(inputs.grad, at, full, boxes.grad.index(grad_stage))
        tiles.delta.index(grad_stage).store(delta)
        mbarrier.arrive(full, count=1)
        stage, phase = next_stage(stage, phase, CONFIG.num_stages)
        grad_stage, grad_phase = next_stage(grad_stage, grad_phase, CONFIG.grad_stages)
        i += 1
        if i == work.rows.count:
            i = 0
            g += 1
