"""Limits of `hopper_prefill_half`, its configs, variants, shared memory and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS
from splitkv.core.plan import Config, Plan, Traffic
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import HopperPrefill, Variant
from splitkv.kernels.hopper.primitives import tma_limits
from splitkv.kernels.limits import prefill
from splitkv.kernels.limits.hopper_prefill import (
    BARRIER_BYTES,
    against_8bit,
    against_dims_8bit,
    fitting,
    maxima,
    mma_order,
)
from splitkv.kernels.limits.hopper_prefill_tiles import ordered
from splitkv.kernels.limits.reasons import expect_hopper

NAME = "hopper_prefill_half"


def unsupported(problem: Problem, device: Device) -> list[str]:
    if against := expect_hopper(device):
        return against
    reasons = against_8bit(problem, device)
    if problem.codec.granularity == "token":
        reasons.append(f"kv {problem.codec}: expected scales per tensor or head")
    reasons.expect(
        problem.codec == AS_IS or problem.products != "widened",
        "products widened: expected half or full",
    )
    reasons.expect(
        problem.codec.name != "fp8" or not problem.return_lse,
        "return_lse of fp8: expected none, as units keep 14 bits",
    )
    return reasons + against_dims_8bit(problem)


def unfit(operands: Operands) -> list[str]:
    """Every reason why TMA cannot describe the tensors that are read as they are given."""
    reasons = tma_limits.unfit(replace(operands, v=None))
    if 0 in operands.v.shape:
        reasons.append(f"v: expected at least one token, got {list(operands.v.shape)}")
    return reasons


def bytes_of_values(problem: Problem) -> int:
    """Bytes of values that have been widened."""
    return problem.widened.kv_bytes * problem.head_dim_v // (problem.head_dim + problem.head_dim_v)


def bytes_of_q(problem: Problem) -> int:
    """Bytes of an element of q as it comes."""
    return problem.element_bytes if problem.q_granularity == "none" else 1


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config."""
    of_q, of_out, stages = bytes_of_q(problem), problem.element_bytes, config.num_stages
    a_row = of_q + (of_q > 1) + of_out
    a_key = stages * (1 + problem.element_bytes)
    return (config.tile_m * a_row + config.tile_n * a_key) * problem.head_dim + BARRIER_BYTES


def variants(problem: Problem, device: Device, config: Config) -> list[Variant]:
    """Every variant that fits beside the numbers of a config. Rows that are rounded first leave
    their place early, and have one."""
    room = device.smem_per_block - shared_bytes(problem, config)
    stays = bytes_of_q(problem) == 1 and config.tile_m * problem.head_dim <= room
    stages = (1, 2) if config.programs and stays else (1,)
    return [
        HopperPrefill(mma_order(config), followed, q_stages, "own_tiles")
        for followed in maxima(problem, config)
        for q_stages in stages
    ]


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits: the space of `hopper_prefill`."""
    return fitting(problem, device, ordered(problem, device), shared_bytes)


def traffic(problem: Problem, config: Config) -> Traffic:
    """The lines of the docstring's Traffic section, every sequence at its upper bound."""
    of_keys = problem.kv_bytes + 2 * bytes_of_values(problem)
    return replace(prefill.traffic(problem, config), kv_bytes=of_keys)


def refit(plan: Plan, operands: Operands) -> Plan:
    """The plan for tensors that this one does not fit: see `hopper_prefill`."""
    against = unfit(operands)
    return prefill.prefill_without_tma(plan, operands, against[0]) if against else plan
