"""Tiles of `hopper_backward` where the head dimension is more than 128, and the warp that asks.

Shared memory holds 64 keys, two tiles of 64 rows of q and one or two of their gradient, which come
and go by themselves, p, and where dq is summed up ds and a piece of dq of each consumer. Where q
and k have 192 columns TMA fills tiles up to 256 with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.backward_loop import Boxes
from splitkv.kernels.hopper.backward_sinks import sink_weights
from splitkv.kernels.hopper.clear import all_cleared
from splitkv.kernels.hopper.ring import arrivals, async_load, next_slot, reinterpret

# With sink logits the first consumer has p times 2^15, so that in fp16 small p have as many bits as
# large ones, three more than in bf16: the rounding of p would be in dsink.
P_EXPONENT = gl.constexpr(15)


class Tiles(NamedTuple):
    """q and grad [stages, 64, dim], k and v [64, dim]; total and what the softmax gives a sink, if
    there is one, as q, delta as grad [stages, 64]; p in the order of registers; of q and grad also
    strips [strips, 16, 64], the columns of a tile 64 at a time."""

    q: Any
    grad: Any
    k: Any
    v: Any
    total: Any
    delta: Any
    p_sink: Any
    p: Any
    q_strips: Any
    grad_strips: Any


class Barriers(NamedTuple):
    """Arrival of k and v [1]; arrival and release of q with total and of grad with delta [stages],
    and of p [1]."""

    kv: Any
    q: Any
    q_free: Any
    grad: Any
    grad_free: Any
    p: Any
    p_free: Any


@gluon.jit
def allocate_tiles(inputs, STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr):
    """(Boxes, Tiles, Barriers) of a program, the barriers initialised."""
    dtype: gl.constexpr = inputs.q.dtype
    M: gl.constexpr = inputs.q.block_type.shape[1]
    N: gl.constexpr = inputs.k.block_type.shape[1]
    DIM: gl.constexpr = inputs.q.block_type.shape[3]
    DIM_V: gl.constexpr = inputs.v.block_type.shape[3]
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    boxes = Boxes(
        gl.allocate_shared_memory(dtype, [STAGES, 1, M, 1, DIM], inputs.q.layout),
        gl.allocate_shared_memory(dtype, [GRAD_STAGES, 1, M, 1, DIM_V], inputs.q.layout),
        gl.allocate_shared_memory(dtype, [1, N, 1, DIM], inputs.k.layout),
        gl.allocate_shared_memory(dtype, [1, N, 1, DIM_V], inputs.k.layout),
    )
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    P_TYPE: gl.constexpr = dtype if inputs.sink_ptr is None else gl.float16
    total = gl.allocate_shared_memory(gl.float32, [STAGES, M], ROW)
    p_sink = total
    if inputs.sink_ptr is not None:
        p_sink = gl.allocate_shared_memory(gl.float32, [STAGES, M], ROW)
    tiles = Tiles(
        reinterpret(boxes.q, dtype, [STAGES, M, DIM], WIDE),
        reinterpret(boxes.grad, dtype, [GRAD_STAGES, M, DIM_V], WIDE),
        reinterpret(boxes.k, dtype, [N, DIM], WIDE),
        reinterpret(boxes.v, dtype, [N, DIM_V], WIDE),
        total,
        gl.allocate_shared_memory(gl.float32, [GRAD_STAGES, M], ROW),
        p_sink,
        gl.allocate_shared_memory(P_TYPE, [M * N // 256, 256], FLAT),
        reinterpret(boxes.q, dtype, [STAGES * M * DIM // 1024, 16, 64], WIDE),
        reinterpret(boxes.grad, dtype, [GRAD_STAGES * M * DIM_V // 1024, 16, 64], WIDE),
    )
    bars = Barriers(
        *(arrivals(1, 1), arrivals(STAGES, 2), arrivals(STAGES, 2)),
        *(arrivals(GRAD_STAGES, 2), arrivals(GRAD_STAGES, 2)),
        *(arrivals(1, 1), arrivals(1, 1)),
    )
    return boxes, tiles, bars


@gluon.jit
def allocate_ds(inputs):
    """Shared memory of ds, its arrival and release."""
    dtype: gl.constexpr = inputs.q.dtype
    M: gl.constexpr = inputs.q.block_type.shape[1]
    N: gl.constexpr = inputs.k.block_type.shape[1]
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return gl.allocate_shared_memory(dtype, [2, N, M], WIDE), arrivals(2, 1), arrivals(2, 2)


@gluon.jit
def allocate_pieces(sums_desc):
    """Shared memory of a piece of dq of each consumer, its arrival and release."""
    shape: gl.constexpr = [2, sums_desc.block_type.shape[0], sums_desc.block_type.shape[1]]
    piece = gl.allocate_shared_memory(gl.float32, shape, sums_desc.layout)
    return piece, arrivals(2, 1), arrivals(2, 1)


@gluon.jit
def produce_tiles(inputs, boxes, tiles, bars, work, visit, GROUP: gl.constexpr):
    """Have K and V copied to shared memory, then every row tile, q and its gradient each when there
    is room for it.

    One more follows, of which consumers make weights that nobody uses.
    """
    M: gl.constexpr = inputs.q.block_type.shape[1]
    STAGES: gl.constexpr = bars.q.shape[0]
    GRAD_STAGES: gl.constexpr = bars.grad.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, M, layout=layout)
    mbarrier.expect(bars.kv.index(0), inputs.k.block_type.nbytes + inputs.v.block_type.nbytes)
    async_load(inputs.k, [work.b, work.first_k, work.h, 0], bars.kv.index(0), boxes.k)
    async_load(inputs.v, [work.b, work.first_k, work.h, 0], bars.kv.index(0), boxes.v)
    slot = work.h * 0
    phase = slot + 1
    grad_slot = slot
    grad_phase = phase
    i = slot
    g = slot
    for j in range(work.steps + 1):
        t = i * M
        at = [work.b, work.first_q + t, work.h * GROUP + g, 0]
        count = gl.where(j < work.steps, work.len_q - t, 0)
        row = g * work.stat_head + t
        total = gl.load(inputs.total_ptr + row + rows, mask=rows < count, other=float("inf"))
        delta = gl.load(inputs.delta_ptr + row + rows, mask=rows < count, other=0.0)
        bar = bars.q.index(slot)
        mbarrier.wait(bars.q_free.index(slot), phase)
        mbarrier.expect(bar, inputs.q.block_type.nbytes)
        async_load(inputs.q, at, bar, boxes.q.index(slot))
        if inputs.sink_ptr is not None:
            of_sink = sink_weights(inputs, gl.minimum(g, GROUP - 1), total)
            tiles.p_sink.index(slot).store(of_sink)
            total -= P_EXPONENT
            delta *= 2.0**-P_EXPONENT
        tiles.total.index(slot).store(total)
        mbarrier.arrive(bar, count=1)
        bar = bars.grad.index(grad_slot)
        mbarrier.wait(bars.grad_free.index(grad_slot), grad_phase)
        mbarrier.expect(bar, inputs.grad.block_type.nbytes)
        async_load(inputs.grad, at, bar, boxes.grad.index(grad_slot))
        tiles.delta.index(grad_slot).store(delta)
        mbarrier.arrive(bar, count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        grad_slot, grad_phase = next_slot(grad_slot, grad_phase, GRAD_STAGES)
        i += 1
        if i == visit.count:
            i = 0
            g += 1


@gluon.jit
def await_tile(tiles, strips, slot, bar, phase, count, PACKED: gl.constexpr):
    """A tile of rows when it is there. Of its rows `count` exist; the others are made zero by each
    consumer for itself, as it comes to them in its own time."""
    tile = tiles.index(slot)
    mbarrier.wait(bar, phase)
    if PACKED:
        M: gl.constexpr = tile.shape[0]
        DIM: gl.constexpr = tile.shape[1]
        if count < M:
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            rows = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))[:, None]
            for n in range(M * DIM // 1024):
                left = count - n * 16 % M
                if left < 16:
                    strip = strips.index(slot * (M * DIM // 1024) + n)
                    kept = strip.load(layout)
                    strip.store(gl.where(rows < left, kept, gl.zeros_like(kept)))
            all_cleared(1)
    return tile
