"""Limits of `hopper_prefill_widened`, its configs, variants and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS
from splitkv.core.plan import Config, Traffic
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import Variant
from splitkv.kernels.hopper.primitives import tma_limits
from splitkv.kernels.limits import hopper_prefill, prefill
from splitkv.kernels.limits.hopper_prefill_tiles import CODECS_8BIT, tile_dims
from splitkv.kernels.limits.reasons import Reasons, expect_hopper

NAME = "hopper_prefill_widened"
CODECS = (*CODECS_8BIT, "fp8_e5m2")  # that `widen_rows` has code for


def unsupported(problem: Problem, device: Device) -> list[str]:
    if against := expect_hopper(device):
        return against
    reasons = Reasons()

    reasons.expect_triton(problem, device)
    reasons.expect_16_bits(problem)
    reasons += hopper_prefill.against_dims(problem) + hopper_prefill.against_features(problem)
    dims = problem.head_dim, problem.head_dim_v
    if not reasons and dims != tile_dims(problem):
        expected = "columns that are a tile's, as keys that are widened have"
        reasons.append(f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected {expected}")
    if problem.codec.name not in CODECS:
        known = f"{', '.join(CODECS[:-1])} or {CODECS[-1]}"
        reasons.append(f"kv {problem.codec}: expected {known}")
    rounds_q = problem.products != "widened" and problem.q_granularity == "none"
    reasons.expect(
        rounds_q or not problem.return_lse or problem.codec == AS_IS,
        "return_lse: expected products half or full and q of 16 bits, as keys and q are rounded",
    )
    reasons.expect(not problem.needs_grad, "gradient: expected inputs that require none")
    return reasons


def unfit(operands: Operands) -> list[str]:
    """Every reason why TMA cannot describe the tensors that are read as they are given."""
    x = operands
    q = x.q if x.q_scale is None else None  # else `widen_rows` reads it
    reasons = tma_limits.unfit(Operands(q, None, None, x.out))
    for name in ("q", "k", "v"):
        shape = list(getattr(x, name).shape)
        if 0 in shape and (name != "q" or x.q_scale is not None):
            reasons.append(f"{name}: expected at least one token, got {shape}")
    return reasons


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """The configs of `hopper_prefill` for the widened problem."""
    return hopper_prefill.configs(problem.widened, device)


def variants(problem: Problem, device: Device, config: Config) -> list[Variant]:
    """The variants of `hopper_prefill` for the widened problem."""
    return hopper_prefill.variants(problem.widened, device, config)


def traffic(problem: Problem, config: Config) -> Traffic:
    """The lines of the docstring's Traffic section, every sequence at its upper bound."""
    wide = prefill.traffic(problem.widened, config)
    return replace(wide, kv_bytes=problem.kv_bytes + 2 * wide.kv_bytes)
