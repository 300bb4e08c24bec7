"""The products of a step: rows of q with a tile of keys, and weights with a tile of values. They
are issued as wgmma, and not waited for."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from splitkv.kernels.hopper.prefill.scales import MIDDLE_BITS
from splitkv.kernels.hopper.primitives.conversion import bytes_of_words, halves_of_words


@gluon.jit
def multiply_keys(tiles, q_tile, stage, S: gl.constexpr):
    """Issues q @ k.T [ROWS, TILE_N] in layout S; sums of integers are MIDDLE more.

    tiles    PerOperand; q_tile: index of the rows of q; stage: of the tile of keys
    """
    ROWS: gl.constexpr = tiles.q.shape[1]
    TILE_N: gl.constexpr = tiles.k.shape[1]
    k = tiles.k.index(stage).permute((1, 0))
    q = tiles.q.index(q_tile)
    if tiles.k.dtype == gl.int8:
        start = gl.full([ROWS, TILE_N], MIDDLE_BITS, gl.int32, S)
        qk = warpgroup_mma(q, k, start, is_async=True)
    else:
        start = gl.zeros([ROWS, TILE_N], gl.float32, S)
        qk = warpgroup_mma(q, k, start, use_acc=False, is_async=True)
    if tiles.q_rest is not None:
        k_rest = tiles.k_rest.index(stage).permute((1, 0))
        qk = warpgroup_mma(tiles.q_rest.index(q_tile), k_rest, qk, is_async=True)
    return qk


@gluon.constexpr_function
def has_16_bits(dtype):
    """Whether values of this type are multiplied in 16 bits."""
    return dtype.primitive_bitwidth == 16


@gluon.jit
def multiply_values(p, tiles, stage, acc):
    """Issues p @ v: added to acc in 16 bits; alone in e4m3, of whose sums the tensor cores keep few
    bits, and in int8, where they are integers."""
    O: gl.constexpr = acc.type.layout
    if has_16_bits(tiles.v.dtype):
        p = halves_of_words(p, tiles.v.dtype, gl.DotOperandLayout(0, O, 2))
        product = warpgroup_mma(p, tiles.v.index(stage), acc, is_async=True)
    else:
        p = bytes_of_words(p, tiles.v.dtype, gl.DotOperandLayout(0, O, 4))
        SUM: gl.constexpr = gl.int32 if tiles.v.dtype == gl.int8 else gl.float32
        start = gl.zeros(acc.shape, SUM, O)
        v = tiles.v.index(stage).permute((1, 0))
        product = warpgroup_mma(p, v, start, use_acc=False, is_async=True)
    return product
