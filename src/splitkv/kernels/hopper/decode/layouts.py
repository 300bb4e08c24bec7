"""Layouts in registers and shared memory of tiles of decode on Hopper."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def wgmma_layout(columns, warps, bits=16):
    """The layout of products [64, columns] of operands of so many bits."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 256 // bits])


@gluon.constexpr_function
def scores_layout(config, warps):
    """The layout of scores [TILE_M, TILE_N]: mma shares out the keys over the warps, wgmma (64
    rows) the rows."""
    if config.tile_m < 64:
        return gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8])
    instruction = [16, config.tile_n, 256 // config.k_type.primitive_bitwidth]
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], instruction)


@gluon.constexpr_function
def row_a_warp(dim, warps):
    """The layout of rows [rows, dim] of which a warp loads one at a time."""
    return gl.BlockedLayout([1, dim // 32], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def vectors_of_rows(dim, warps):
    """The layout of rows [rows, dim] of which a thread has eight neighbours at a time."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def weights_layout(columns):
    """The layout of p [rows, columns] of 16 bits in shared memory, to be read by ldmatrix."""
    rows = max(1, 64 // columns)
    return gl.SwizzledSharedLayout(8, rows, 8 // rows, [1, 0])


@gluon.jit
def allocate_operand(dtype: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr):
    """Allocates shared memory [ROWS, DIM] for an operand of wgmma."""
    BITS: gl.constexpr = dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(min(128, DIM * BITS // 8), BITS, rank=2)
    return gl.allocate_shared_memory(dtype, [ROWS, DIM], layout)
