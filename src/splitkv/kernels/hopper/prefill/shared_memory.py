"""The shared memory of the kernels whose warpgroups multiply tiles as they are copied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.prefill.load import ROWS
from splitkv.kernels.hopper.prefill.records import OperandMemory, RingBarriers
from splitkv.kernels.hopper.primitives.tma_ring import allocate_wgmma_tiles, make_barriers


@gluon.jit
def allocate_operands(maps, CONFIG: gl.constexpr):
    """The OperandMemory for descriptors `maps`."""
    DIM: gl.constexpr = CONFIG.head_dim_v
    STAGES: gl.constexpr = CONFIG.num_stages
    q_boxes, q = allocate_wgmma_tiles(maps.q, CONFIG.q_stages * CONFIG.mma_roles, ROWS, DIM)
    k_boxes, k = allocate_wgmma_tiles(maps.k, STAGES, CONFIG.tile_n, DIM)
    v_boxes, v = allocate_wgmma_tiles(maps.v, STAGES, CONFIG.tile_n, DIM)
    return OperandMemory(q_boxes, q, k_boxes, k, v_boxes, v)


@gluon.jit
def init_barriers(CONFIG: gl.constexpr):
    """The RingBarriers between one load role and mma roles that take tiles as they are copied."""
    STAGES: gl.constexpr = CONFIG.num_stages
    ROLES: gl.constexpr = CONFIG.mma_roles
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, ROLES)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, ROLES)
    q_full, q_empty = make_barriers(CONFIG.q_stages, 1), make_barriers(CONFIG.q_stages, ROLES)
    return RingBarriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)


@gluon.jit
def undefined_tail(lengths):
    """Not None where memory behind the last key of a sequence may hold anything: Lengths say so."""
    tail = lengths.cu_k_ptr
    if lengths.lens_ptr is not None:
        tail = lengths.lens_ptr
    if lengths.table_ptr is not None:
        tail = lengths.table_ptr
    return tail
