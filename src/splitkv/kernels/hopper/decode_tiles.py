"""How tiles of keys and values of `hopper_decode_split` arrive, and where they lie; what runs where
TMA cannot bring them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.device import REGISTERS_PER_SM, Device
from splitkv.kernels import decode_split
from splitkv.kernels.hopper.cluster import exchange_bytes
from splitkv.kernels.hopper.decode_bulk import bytes_in_bulk
from splitkv.kernels.hopper.decode_wide import type_of_keys
from splitkv.kernels.hopper.prefill_load import allocate
from splitkv.kernels.hopper.ring import allocate_ring, tile_layout
from splitkv.kernels.tile.codec import unfit as unfit_scales
from splitkv.kv import AS_IS
from splitkv.plans import WIDE, Config, Plan, scales_in_bulk
from splitkv.problem import Operands, Problem

BARRIER_BYTES, SCRATCH_BYTES = 8, 2048  # of shared memory: a ring slot; sums across warps
RESERVED_BYTES = 1024  # of each program, by CUDA


def most_registers(problem: Problem, config: Config, device: Device) -> int:
    """Of a thread, on average, where a warp asks for tiles: what as many programs as an SM has
    shared memory for leave each. Triton fills its warps up to four. Beside 8 bits a fourth program
    would have threads spill."""
    held = device.smem_per_sm // (shared_bytes(problem, config) + RESERVED_BYTES)
    most = 4 if problem.codec == AS_IS else 3
    return REGISTERS_PER_SM // (256 * max(1, min(held, most))) // 8 * 8


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config: the ring, its barriers, p on its way to another layout, or acc;
    where tiles are wide, q, and what keys and values are widened to, in the place of p."""
    a_key = problem.head_dim + problem.head_dim_v
    tile = config.tile_n * a_key * problem.kv_element_bytes
    total = 1024
    if scales_in_bulk(problem, config):
        total += bytes_in_bulk(config.num_stages, config.tile_n, problem.num_kv_heads)
    elif problem.codec.granularity == "token":
        tile += 8 * config.tile_n
    total += config.num_stages * (tile + BARRIER_BYTES)
    if config.merge == "cluster":
        rows = min(config.tile_m, problem.rows)
        total += exchange_bytes(rows, problem.head_dim_v, config.num_splits)
    if config.tile_m == WIDE:
        size = type_of_keys(problem).primitive_bitwidth // 8
        total += config.tile_m * problem.head_dim * size
        if problem.codec != AS_IS:
            total += 2 * config.tile_n * (a_key if size > 1 else problem.head_dim_v)
        return total + SCRATCH_BYTES
    moved = config.tile_m * config.tile_n * problem.element_bytes
    if problem.codec != AS_IS:
        moved = max(moved, 4 * config.tile_m * problem.head_dim_v)
    if problem.rotary:
        moved = max(moved, config.tile_m * problem.head_dim * problem.element_bytes)
    return total + max(moved, SCRATCH_BYTES)


def unfit(operands: Operands) -> list[str]:
    """What of a memory layout TMA cannot describe."""
    reasons = unfit_scales(operands)
    for name, x in (("k", operands.k), ("v", operands.v)):
        if 0 in x.shape:
            reasons.append(f"{name}: expected a cache with room for a key, got {list(x.shape)}")
        gaps = [stride for stride in x.stride()[:3] if stride * x.element_size() % 16]
        if gaps or x.data_ptr() % 16:
            reasons.append(
                f"{name}: expected strides and an address that are multiples of 16 bytes"
            )
    return reasons


def without_tma(plan: Plan) -> Plan:
    """The same parts of the keys, by the kernel for any GPU."""
    config = plan.config
    shapes = decode_split.configs(plan.problem, plan.device)
    shape = min(shapes, key=lambda shape: abs(shape.tile_n - config.tile_n))
    rule = ("num_splits", "schedule", "split_size", "programs", "appends")
    cut = {name: getattr(config, name) for name in rule}
    return replace(plan, kernel=decode_split.KERNEL.name, config=replace(shape, **cut))


def layout_of(x: Any, panels: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Shape and strides of K or V as TMA sees them.

    panels   one thread asks for all of a box: the panels of 128 bytes that TMA's swizzle makes of a
             key are a dimension, so that a box is one message
    """
    shape, strides = x.shape, x.stride()
    if panels:
        width = min(x.shape[3], 128 // x.element_size())
        shape = shape[0], shape[2], shape[3] // width, shape[1], width
        strides = strides[0], strides[2], width, strides[1], 1
    return shape, strides


def boxes_of(x: Any, box: int, parts: bool, panels: bool) -> TensorDescriptor:
    """K or V [outer, inner, num_kv_heads, dim], `box` keys of one head at a time; `panels` as in
    `layout_of`; parts: boxes of 128 bytes a key, as wide tiles are made of several."""
    shape, strides = layout_of(x, panels)
    size, columns = x.element_size(), shape[-1]
    if parts:
        columns = min(columns, 128 // size)
    block = [1, 1, shape[2], box, columns] if panels else [1, box, 1, columns]
    swizzle = min(128, columns * size)
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=len(block)
    )
    return TensorDescriptor(x, list(shape), list(strides), block, layout)


@gluon.jit
def steps_of(strides, IN_ONE: gl.constexpr):
    """`Pool.k_steps` of the strides of a cache, so many elements of which are one as they are
    copied."""
    return strides[0] // IN_ONE, strides[1] // IN_ONE, strides[2] // IN_ONE


@gluon.jit
def allocate_tiles(
    x,
    SLOTS: gl.constexpr,
    TILE_N: gl.constexpr,
    DIM: gl.constexpr,
    GATHER: gl.constexpr,
    OF_K: gl.constexpr,
):
    """As `allocate_ring`, for tiles of K or V that are gathered, for wgmma (OF_K: not None), or
    neither."""
    if GATHER:
        layout: gl.constexpr = tile_layout(TILE_N, DIM, TILE_N)
        tiles = gl.allocate_shared_memory(x.dtype.element_ty, [SLOTS, TILE_N, DIM], layout)
        boxes = tiles
    elif OF_K is None:
        boxes, tiles = allocate_ring(x, SLOTS, TILE_N)
    else:
        boxes, tiles = allocate(x, SLOTS, TILE_N, DIM)
    return boxes, tiles
