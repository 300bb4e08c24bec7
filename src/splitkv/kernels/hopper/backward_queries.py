"""dq for Hopper where every sum has to be made in one order: no atomics, S and dP once more.

Computes dq of kernels/backward.py, whose letters these are: a program owns 128 rows of a head, 64 a
consumer warpgroup, and visits the tiles of keys that they see; one warp asks for the tiles.

Grid        tiles of rows x lanes, a lane being a query head, dense of one sequence; the last and so
            heaviest rows first
Traffic     reads q, dout, k, v and 8 bytes of statistics a row, writes dq; flops 3 products of
            2 * pairs * head_dim
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from triton import next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.device import Device
from splitkv.kernels.hopper.backward_loop import (
    HALF,
    own_tokens,
    store_rows,
)
from splitkv.kernels.hopper.clear import all_cleared, clear_behind
from splitkv.kernels.hopper.ring import arrivals, async_load, next_slot, reinterpret
from splitkv.kernels.tile.band import Bounds, visible, visited_tiles
from splitkv.kernels.tile.visit import tile_and_lane
from splitkv.plans import Config
from splitkv.problem import Problem

TILE_M = 128  # rows a program: 64 a consumer
# By head_dim: keys a step, and tiles of k and v in the ring, the best first.
SHAPES: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((128, 4), (64, 8), (64, 4)),
    128: ((128, 4), (64, 8), (64, 4)),
    192: ((64, 3),),
    256: ((32, 4), (64, 3)),
}
SIZES = (  # arguments whose values are no reason to compile again
    *("scale", "scale_log2", "left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch"),
    *("num_heads", "total_q", "tiles", "lanes", "width"),
)


class Inputs(NamedTuple):
    """TMA descriptors of q, grad, k and v."""

    q: Any
    grad: Any
    k: Any
    v: Any


class Memory(NamedTuple):
    """Shared memory as TMA sees it, q and grad [1, 128, 1, dim] and the ring in which k and v take
    turns [STAGES, 1, TILE_N, 1, dim]; or the same as tiles [128, dim], [STAGES, TILE_N, dim]. `v`
    is the ring in tiles of v, of which it has as many or twice as many."""

    q: Any
    grad: Any
    k: Any
    v: Any


class Barriers(NamedTuple):
    """Arrival of the rows; arrival and release of tiles of the ring [STAGES]."""

    rows: Any
    ring: Any
    free: Any


class Work(NamedTuple):
    """Sequence and heads, for the descriptors; first token and token in its sequence; numbers of
    tokens; key position of the first query; tiles of keys as `visited_tiles` gives them."""

    b: Any
    head: Any
    kv_head: Any
    first_q: Any
    t: Any
    len_q: Any
    first_k: Any
    len_k: Any
    shift: Any
    count: Any
    near: Any
    skip: Any


class RowGradients(NamedTuple):
    """Pointers to dq of the first token, total and delta; elements between tokens of dq; scale."""

    dq_ptr: Any
    total_ptr: Any
    delta_ptr: Any
    stride: Any
    scale: Any


@gluon.jit
def produce(desc, boxes, bars, work):
    """Have the rows copied to shared memory, then every tile of keys to its turn of the ring.

    One more follows, of which consumers make weights that nobody uses.
    """
    TILE_N: gl.constexpr = desc.k.block_type.shape[1]
    STAGES: gl.constexpr = bars.ring.shape[0]
    V_STEP: gl.constexpr = boxes.v.shape[0] // STAGES
    at = [work.b, work.first_q + work.t, work.head, 0]
    mbarrier.expect(bars.rows.index(0), desc.q.block_type.nbytes + desc.grad.block_type.nbytes)
    async_load(desc.q, at, bars.rows.index(0), boxes.q)
    async_load(desc.grad, at, bars.rows.index(0), boxes.grad)
    slot = work.kv_head * 0
    phase = slot + 1
    for j in range(work.count + 1):
        tile = gl.where(j < work.near, j, j + work.skip)
        at = [work.b, work.first_k + tile * TILE_N, work.kv_head, 0]
        mbarrier.wait(bars.free.index(slot), phase)
        mbarrier.expect(bars.ring.index(slot), desc.k.block_type.nbytes)
        async_load(desc.k, at, bars.ring.index(slot), boxes.k.index(slot))
        slot, phase = next_slot(slot, phase, STAGES)
        mbarrier.wait(bars.free.index(slot), phase)
        mbarrier.expect(bars.ring.index(slot), desc.v.block_type.nbytes)
        async_load(desc.v, at, bars.ring.index(slot), boxes.v.index(slot * V_STEP))
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def weights(s, total, scale_log2, bounds, pos, start, keys):
    """p [64, TILE_N] of products s with the keys from `start`; pos [64, 1], of rows in order."""
    TILE_N: gl.constexpr = s.shape[1]
    p = gl.exp2(s * scale_log2 - total)
    offs_n = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, s.type.layout))[None, :]
    masked = start + TILE_N > keys
    if bounds.right is not None:
        masked = masked | (start + TILE_N > pos.first + bounds.right + 1)
    if bounds.left is not None:
        masked = masked | (start < pos.first + HALF - 1 - bounds.left)
    if masked:
        p = gl.where(visible(bounds, pos.all, start + offs_n, keys), p, 0.0)
    return p


class Positions(NamedTuple):
    """Key positions of 64 rows [64, 1], and of the first."""

    all: Any
    first: Any


@gluon.jit
def await_keys(tiles, bars, slot, phase, count, W: gl.constexpr):
    """A tile of k or v when it is there, from `count` on zeroed, with the other consumer."""
    x = tiles.index(slot * (tiles.shape[0] // bars.ring.shape[0]))
    mbarrier.wait(bars.ring.index(slot), phase)
    if count < x.shape[0]:
        clear_behind(x, count, 16, W, 2)
        all_cleared(2)
    return x


@gluon.jit
def consume(tiles, bars, work, bounds, out, scale_log2, KEY_DIM: gl.constexpr, W: gl.constexpr):
    """dq of the rows of consumer W."""
    STAGES: gl.constexpr = tiles.k.shape[0]
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM: gl.constexpr = tiles.k.shape[2]
    dtype: gl.constexpr = tiles.k.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)

    t = work.t + W * HALF
    rows = t + gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
    total = gl.load(out.total_ptr + rows, mask=rows < work.len_q, other=float("inf"))[:, None]
    delta = gl.load(out.delta_ptr + rows, mask=rows < work.len_q, other=0.0)[:, None]
    pos = Positions((rows + work.shift)[:, None], t + work.shift)
    zero = gl.zeros([HALF, TILE_N], gl.float32, S)
    dq = gl.zeros([HALF, DIM], gl.float32, ACC)
    q = tiles.q.slice(W * HALF, HALF)
    grad = tiles.grad.slice(W * HALF, HALF)
    mbarrier.wait(bars.rows.index(0), 0)
    slot = work.kv_head * 0
    phase = slot
    start = gl.where(work.near > 0, 0, work.skip) * TILE_N
    k = await_keys(tiles.k, bars, slot, phase, work.len_k - start, W)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    v_slot = slot + 1
    v_phase = phase
    v = await_keys(tiles.v, bars, v_slot, v_phase, work.len_k - start, W)
    dp = warpgroup_mma(grad, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = weights(s, total, scale_log2, bounds, pos, start, work.len_k)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for j in range(work.count):
        mbarrier.arrive(bars.free.index(v_slot), count=1)
        ds = gl.convert_layout((p * (dp - delta)).to(dtype), A)
        dq = warpgroup_mma(ds, tiles.k.index(slot), dq, is_async=True)

        # weights of the next tile of keys
        before = slot
        slot, phase = next_slot(v_slot, v_phase, STAGES)
        v_slot, v_phase = next_slot(slot, phase, STAGES)
        start = gl.where(j + 1 < work.near, j + 1, j + 1 + work.skip) * TILE_N
        k = await_keys(tiles.k, bars, slot, phase, work.len_k - start, W)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if TILE_N * 4 == DIM:  # the ring has one of k and v: v is asked for under s
            dq = warpgroup_mma_wait(1, deps=[dq])
            mbarrier.arrive(bars.free.index(before), count=1)
            v = await_keys(tiles.v, bars, v_slot, v_phase, work.len_k - start, W)
            dp = warpgroup_mma(grad, v.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
        else:
            s, dq = warpgroup_mma_wait(0, deps=[s, dq])  # dp has room where ds was
            mbarrier.arrive(bars.free.index(before), count=1)
            v = await_keys(tiles.v, bars, v_slot, v_phase, work.len_k - start, W)
            dp = warpgroup_mma(grad, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        p = weights(s, total, scale_log2, bounds, pos, start, work.len_k)
        dp = warpgroup_mma_wait(0, deps=[dp])

    store_rows(dq * out.scale, q, out.dq_ptr, out.stride, t, work.len_q, KEY_DIM)


@gluon.jit
def allocate(desc, STAGES: gl.constexpr):
    """(boxes, tiles, Barriers) of a program, the barriers initialised."""
    dtype: gl.constexpr = desc.q.dtype
    TILE_M: gl.constexpr = desc.q.block_type.shape[1]
    TILE_N: gl.constexpr = desc.k.block_type.shape[1]
    DIM: gl.constexpr = desc.q.block_type.shape[3]
    DIM_V: gl.constexpr = desc.v.block_type.shape[3]
    V_SLOTS: gl.constexpr = STAGES * DIM // DIM_V
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    keys: gl.constexpr = [STAGES, 1, TILE_N, 1, DIM]
    q = gl.allocate_shared_memory(dtype, [1, TILE_M, 1, DIM], desc.q.layout)
    grad = gl.allocate_shared_memory(dtype, [1, TILE_M, 1, DIM_V], desc.q.layout)
    ring = gl.allocate_shared_memory(dtype, keys, desc.k.layout)
    boxes = Memory(
        *(q, grad, ring, reinterpret(ring, dtype, [V_SLOTS, 1, TILE_N, 1, DIM_V], desc.v.layout))
    )
    tiles = Memory(
        reinterpret(q, dtype, [TILE_M, DIM], WIDE),
        reinterpret(grad, dtype, [TILE_M, DIM_V], WIDE),
        reinterpret(ring, dtype, [STAGES, TILE_N, DIM], WIDE),
        reinterpret(ring, dtype, [V_SLOTS, TILE_N, DIM_V], WIDE),
    )
    return boxes, tiles, Barriers(arrivals(1, 1), arrivals(STAGES, 1), arrivals(STAGES, 2))


@gluon.jit(do_not_specialize=SIZES)
def hopper_backward_queries(
    q_desc,  # [batch, seqlen_q, num_heads, DIM], or [1, total_q, num_heads, DIM], in tiles of rows
    grad_desc,  # as q_desc
    k_desc,  # the same of keys and KV heads
    v_desc,
    dq_ptr,  # as q
    dq_strides,  # Strides
    total_ptr,  # [sequences, num_heads, tokens] fp32; packed sequences are one
    delta_ptr,
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    scale,
    scale_log2,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    num_heads,
    total_q,
    tiles,  # tiles of rows of a lane
    lanes,
    width,  # lanes that go together
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    KEY_DIM: gl.constexpr,  # of q and k without padding
):
    desc = Inputs(q_desc, grad_desc, k_desc, v_desc)
    TILE_M: gl.constexpr = desc.q.block_type.shape[1]
    TILE_N: gl.constexpr = desc.k.block_type.shape[1]
    bounds = Bounds(left, right, sink_tokens)
    tile, lane = tile_and_lane(gl.program_id(0), tiles, lanes, width)
    own = tiles - 1 - tile, lane, cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, batch, total_q
    b, head, tile, first_q, len_q, first_k, len_k = own_tokens(*own, num_heads, TILE_M)
    t = tile * TILE_M
    if t >= len_q:
        return
    shift = len_k - len_q
    last = gl.minimum(t + TILE_M, len_q) - 1
    count, near, skip = visited_tiles(bounds, shift + t, shift + last, len_k, TILE_N)
    at = b
    length = seqlen_q
    if cu_q_ptr is not None:
        at = b * 0
        length = total_q
    work = Work(
        *(at, head, head // GROUP, first_q, t, len_q, first_k, len_k, shift, count, near, skip)
    )
    first = at.to(gl.int64) * dq_strides.b + first_q.to(gl.int64) * dq_strides.t
    row = (at * num_heads + head).to(gl.int64) * length + first_q
    out = RowGradients(
        dq_ptr + first + head.to(gl.int64) * dq_strides.h,
        total_ptr + row,
        delta_ptr + row,
        dq_strides.t,
        scale,
    )
    boxes, held, bars = allocate(desc, STAGES)
    gl.warp_specialize(
        [
            (consume, (held, bars, work, bounds, out, scale_log2, KEY_DIM, 0)),
            (consume, (held, bars, work, bounds, out, scale_log2, KEY_DIM, 1)),
            (produce, (desc, boxes, bars, work)),
        ],
        [4, 1],
        [240, 24],
    )


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, the best first."""
    dim = next_power_of_2(problem.head_dim)
    for tile_n, num_stages in SHAPES[problem.head_dim]:
        elements = TILE_M * (dim + problem.head_dim_v) + num_stages * tile_n * dim
        if elements * problem.element_bytes + 1024 <= device.smem_per_block:
            yield Config(tile_m=TILE_M, tile_n=tile_n, num_warps=8, num_stages=num_stages)
