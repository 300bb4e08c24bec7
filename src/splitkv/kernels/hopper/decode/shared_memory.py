"""Shared memory and registers that decode on Hopper takes."""

from __future__ import annotations

import triton

from splitkv.core.device import REGISTERS_PER_SM, Device
from splitkv.core.kv import AS_IS
from splitkv.core.plan import SCHEDULED, WIDE, Config, HopperDecode, hopper_decode
from splitkv.core.problem import Problem
from splitkv.kernels.hopper.decode.bulk_scales import bulk_bytes
from splitkv.kernels.hopper.decode.row_tiles import type_of_keys
from splitkv.kernels.hopper.primitives.cluster import exchange_bytes

BARRIER_BYTES, SCRATCH_BYTES = 8, 2048  # of shared memory: a stage; sums across warps
RESERVED_BYTES = 1024  # of each program, by CUDA


def most_registers(problem: Problem, config: Config, device: Device) -> int:
    """Registers of a thread, on average, where there is a producer warp: what as many programs as
    an SM has shared memory for leave each. Triton fills its warps up to four. Beside 8 bits a
    fourth program would have threads spill. By a schedule no more programs run than it has."""
    held = device.smem_per_sm // (shared_bytes(problem, config) + RESERVED_BYTES)
    most = 4 if problem.codec == AS_IS else 3
    if config.schedule in SCHEDULED:
        groups = problem.num_kv_heads * triton.cdiv(problem.rows, config.tile_m)
        groups = 1 if config.schedule == "ranges" else groups
        most = min(most, triton.cdiv(groups * config.programs, device.num_sms))
    return REGISTERS_PER_SM // (256 * max(1, min(held, most))) // 8 * 8


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config: the ring, its barriers, p on its way to another layout, or acc;
    where tiles are wide, q, and what keys and values are widened to, in the place of p."""
    a_key = problem.head_dim + problem.head_dim_v
    tile = config.tile_n * a_key * problem.kv_element_bytes
    total = 1024
    variant = config.variant
    if not isinstance(variant, HopperDecode):
        variant = hopper_decode(problem, config)
    if variant.key_scales == "bulk":
        total += bulk_bytes(config.num_stages, config.tile_n, problem.num_kv_heads)
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
