"""The shared memory of `hopper_backward` on the device: tiles, statistics and their barriers.

Two ways to divide the work need different memory. Where each consumer has half of the keys, rows
arrive whole and dq is exchanged in halves; where each has one gradient, q and the gradient of the
output come and go by themselves, and p is exchanged.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.backward.records import (
    BackwardBarriers,
    BackwardBoxes,
    BackwardTiles,
    DqExchange,
)
from splitkv.kernels.hopper.primitives.tma_ring import make_barriers, reinterpret

SUM_COLUMNS = gl.constexpr(256)  # of the sums of dq as TMA sees them: as many as it takes
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
VECTORS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def allocate_backward_boxes(inputs, STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr):
    """Allocates the BackwardBoxes of a program."""
    dtype: gl.constexpr = inputs.q.dtype
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    TILE_N: gl.constexpr = inputs.k.block_type.shape[1]
    DIM: gl.constexpr = inputs.q.block_type.shape[3]
    DIM_V: gl.constexpr = inputs.v.block_type.shape[3]
    return BackwardBoxes(
        gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_M, 1, DIM], inputs.q.layout),
        gl.allocate_shared_memory(dtype, [GRAD_STAGES, 1, TILE_M, 1, DIM_V], inputs.q.layout),
        gl.allocate_shared_memory(dtype, [1, TILE_N, 1, DIM], inputs.k.layout),
        gl.allocate_shared_memory(dtype, [1, TILE_N, 1, DIM_V], inputs.k.layout),
    )


@gluon.jit
def allocate_weights(inputs, like, STAGES: gl.constexpr):
    """Allocates the weights of ds in -dsink [STAGES, TILE_M]; `like` where there are none."""
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    weight = like
    if inputs.weight_ptr is not None:
        weight = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTORS)
    return weight


@gluon.jit
def allocate_rows_apart(inputs, boxes, STAGES: gl.constexpr, GRAD_STAGES: gl.constexpr):
    """Allocates (BackwardTiles, BackwardBarriers) of q and grad that arrive by themselves."""
    dtype: gl.constexpr = inputs.q.dtype
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    TILE_N: gl.constexpr = inputs.k.block_type.shape[1]
    DIM: gl.constexpr = inputs.q.block_type.shape[3]
    DIM_V: gl.constexpr = inputs.v.block_type.shape[3]
    STRIPS: gl.constexpr = STAGES * TILE_M * DIM // 1024
    GRAD_STRIPS: gl.constexpr = GRAD_STAGES * TILE_M * DIM_V // 1024
    P_TYPE: gl.constexpr = dtype if inputs.weight_ptr is None else gl.float16
    total = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], VECTORS)
    weight = allocate_weights(inputs, total, STAGES)
    tiles = BackwardTiles(
        q=reinterpret(boxes.q, dtype, [STAGES, TILE_M, DIM], SWIZZLED),
        grad=reinterpret(boxes.grad, dtype, [GRAD_STAGES, TILE_M, DIM_V], SWIZZLED),
        k=reinterpret(boxes.k, dtype, [TILE_N, DIM], SWIZZLED),
        v=reinterpret(boxes.v, dtype, [TILE_N, DIM_V], SWIZZLED),
        total=total,
        delta=gl.allocate_shared_memory(gl.float32, [GRAD_STAGES, TILE_M], VECTORS),
        weight=weight,
        p=gl.allocate_shared_memory(P_TYPE, [TILE_M * TILE_N // 256, 256], IN_ORDER),
        q_strips=reinterpret(boxes.q, dtype, [STRIPS, 16, 64], SWIZZLED),
        grad_strips=reinterpret(boxes.grad, dtype, [GRAD_STRIPS, 16, 64], SWIZZLED),
    )
    barriers = BackwardBarriers(
        kv_full=make_barriers(1, 1),
        q_full=make_barriers(STAGES, 2),  # TMA, and the warp that copies statistics
        q_empty=make_barriers(STAGES, 2),
        grad_full=make_barriers(GRAD_STAGES, 2),
        grad_empty=make_barriers(GRAD_STAGES, 2),
        p_full=make_barriers(1, 1),
        p_empty=make_barriers(1, 1),
    )
    return tiles, barriers


@gluon.jit
def allocate_dq_halves(inputs, sums_desc):
    """Allocates the DqExchange of consumers that make a half of each tile of dq."""
    dtype: gl.constexpr = inputs.q.dtype
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    TILE_N: gl.constexpr = inputs.k.block_type.shape[1]
    DIM: gl.constexpr = inputs.q.block_type.shape[3]
    ROWS: gl.constexpr = sums_desc.block_type.shape[0]
    ds = gl.allocate_shared_memory(dtype, [2, TILE_N, TILE_M], SWIZZLED)
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS, SUM_COLUMNS], sums_desc.layout)
    ds_full = make_barriers(2, 2)
    # With dq made at once a consumer writes ds of step j + 2 after the other has written that of
    # j + 1, for which that has waited for its product with ds of j, in the same place.
    ds_empty = ds_full
    if DIM == 64:  # dq is made a step late
        ds_empty = make_barriers(2, 2)
    return DqExchange(ds, sums, ds_full, ds_empty, make_barriers(2, 1), make_barriers(2, 1))


@gluon.jit
def allocate_dq_pieces(inputs, sums_desc):
    """Allocates the DqExchange of consumers that make dq in pieces of 64 columns."""
    dtype: gl.constexpr = inputs.q.dtype
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    TILE_N: gl.constexpr = inputs.k.block_type.shape[1]
    ROWS: gl.constexpr = sums_desc.block_type.shape[0]
    ds = gl.allocate_shared_memory(dtype, [2, TILE_N, TILE_M], SWIZZLED)
    ds_full = make_barriers(2, 1)
    ds_empty = make_barriers(2, 2)
    piece = gl.allocate_shared_memory(gl.float32, [2, ROWS, SUM_COLUMNS], sums_desc.layout)
    return DqExchange(ds, piece, ds_full, ds_empty, make_barriers(2, 1), make_barriers(2, 1))
