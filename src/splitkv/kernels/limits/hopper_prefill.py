"""Limits of `hopper_prefill`, its configs, variants, shared memory and traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Literal

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS
from splitkv.core.plan import Config, Plan, Traffic, tile_config
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import box_rows
from splitkv.core.variants import HopperPrefill, Variant
from splitkv.kernels.hopper.primitives.tma_limits import unfit
from splitkv.kernels.limits import prefill
from splitkv.kernels.limits.hopper_prefill_tiles import (
    CODECS_8BIT,
    COLUMNS,
    ROWS,
    ordered,
    tile_dims,
)
from splitkv.kernels.limits.reasons import Reasons, expect_hopper

NAME = "hopper_prefill"

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # of tiles: see `tile_dims`


BARRIER_BYTES = 1024  # of shared memory: all barriers, and what alignment costs


def unsupported(problem: Problem, device: Device) -> list[str]:
    if against := expect_hopper(device):
        return against
    reasons = Reasons()

    reasons.expect_triton(problem, device)
    if problem.needs_grad:
        reasons += prefill.against_gradients(problem)
    reasons.expect_pages(problem.place)
    reasons.expect_16_bits(problem)
    if problem.codec != AS_IS:
        reasons.append(f"kv {problem.codec}: expected as_is")
    reasons += against_dims(problem)
    return reasons + against_features(problem)


def against_dims(problem: Problem) -> Reasons:
    """Reasons against head dimensions."""
    dims, reasons = (problem.head_dim, problem.head_dim_v), Reasons()
    if tile_dims(problem) not in HEAD_DIMS or any(dim % COLUMNS for dim in dims):
        known = ", ".join(f"{a}/{b}" for a, b in HEAD_DIMS)
        expected = f"multiples of {COLUMNS} in tiles of one of {known}"
        reasons.append(f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected {expected}")
    return reasons


def against_features(problem: Problem) -> Reasons:
    """Reasons against what is about neither types, dimensions nor where keys are."""
    reasons = Reasons()
    reasons.expect(not problem.score.alibi, "alibi: expected none")
    reasons.expect(not problem.dropout, "dropout: expected none")
    reasons.expect(not problem.bidirectional_ranges, "bidirectional_ranges: expected None")
    reasons.expect(
        not problem.sequence_sink_tokens, "sink_tokens: expected one number, got one a sequence"
    )
    reasons.expect(
        not problem.out_scale, "out_scale: expected None, as TMA stores the working type"
    )
    reasons += problem.mask.beyond("sink_tokens")
    return reasons


def packed_heads(problem: Problem, config: Config) -> int:
    """Query heads that share a row tile: a power of two that divides the group."""
    group = problem.group
    return min(group & -group, ROWS) if config.pack_gqa else 1


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config, the output in the place of q."""
    head_dim, head_dim_v = tile_dims(problem)
    rows = config.tile_m * head_dim
    keys = config.num_stages * config.tile_n * (head_dim + head_dim_v)
    return (rows + keys) * problem.element_bytes + BARRIER_BYTES


def places_of_rows(
    problem: Problem, config: Config, device: Device
) -> list[tuple[int, Literal["own_tiles", "place_of_q"]]]:
    """Every (row tiles of q, where results leave from) that shared memory has room for.

    With a place of its own the output of one row tile leaves while the next is worked on, whose q
    arrives, given a second place, while that is.
    """
    found: list[tuple[int, Literal["own_tiles", "place_of_q"]]] = [(1, "place_of_q")]
    room = device.smem_per_block - shared_bytes(problem, config)
    bytes_of, (head_dim, head_dim_v) = problem.element_bytes * config.tile_m, tile_dims(problem)
    if bytes_of * head_dim_v <= room:
        found.append((1, "own_tiles"))
    if config.programs and bytes_of * (head_dim_v + head_dim) <= room:
        found.append((2, "own_tiles"))
    return found


def has_lazy_maxima(problem: Problem, config: Config) -> bool:
    """Whether steps may look for maxima only where a weight is too large: a warpgroup then needs
    registers for the products of a tile until it is known that their weights are good, and has
    something to gain.

    With tiles of 128 keys it has them from the warp that issues copies of small pages, which spills
    some; but not where keys are split as well. A soft cap, and columns that q and K have beside
    those of V, take registers, too.
    """
    warpgroups = config.tile_m // ROWS
    splits = config.num_splits > 1 and config.merge != "cluster"
    small_pages = config.tile_n // box_rows(problem, config.tile_n) > 2
    fits = (warpgroups, config.tile_n) == (3, 64)
    fits |= (warpgroups, config.tile_n) == (2, 128) and not (splits and small_pages)
    head_dim, head_dim_v = tile_dims(problem)
    others = head_dim > head_dim_v or problem.score.softcap
    return head_dim_v == 128 and fits and not others


def mma_order(config: Config) -> Literal["in_turns", "any"]:
    """How warpgroups, each with 64 rows of a row tile, issue products: in turns, where several."""
    return "in_turns" if config.tile_m > ROWS else "any"


def maxima(problem: Problem, config: Config) -> list[Literal["each_tile", "lazy"]]:
    """Every way of following the maxima of rows."""
    return ["each_tile", "lazy"] if has_lazy_maxima(problem, config) else ["each_tile"]


def variants(problem: Problem, device: Device, config: Config) -> list[Variant]:
    """Every variant that fits beside the numbers of a config."""
    return [
        HopperPrefill(mma_order(config), followed, q_stages, out)
        for followed in maxima(problem, config)
        for q_stages, out in places_of_rows(problem, config, device)
    ]


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, with and without packed heads, by as many programs as there are
    SMs or by one a row tile.

    Packed sequences start with one a row tile: how heavy each is, only the device knows.
    """
    return fitting(problem, device, ordered(problem, device), shared_bytes)


def fitting(
    problem: Problem,
    device: Device,
    shapes: Sequence[tuple[int, int, int]],
    shared_bytes: Callable[[Problem, Config], int],
) -> Iterator[Config]:
    """The configs of such shapes: see `SHAPES`."""
    programs = (0, device.num_sms) if problem.kind == "varlen" else (device.num_sms, 0)
    packs = (True, False) if problem.group & 1 == 0 else (False,)
    for count, pack_gqa in product(programs, packs):
        for tile_m, tile_n, num_stages in shapes:
            tile = tile_m, tile_n, tile_m // 16, num_stages
            config = tile_config(*tile, programs=count, pack_gqa=pack_gqa)
            if shared_bytes(problem, config) <= device.smem_per_block:
                yield config


def traffic(problem: Problem, config: Config) -> Traffic:
    return prefill.traffic(problem, config)


def refit(plan: Plan, operands: Operands) -> Plan:
    """The plan for tensors that this one does not fit: by the kernel for any GPU where TMA cannot
    describe them. Else the plan itself."""
    against = unfit(operands)
    return prefill.prefill_without_tma(plan, operands, against[0]) if against else plan


def against_8bit(problem: Problem, device: Device) -> Reasons:
    """The reasons of kernels that multiply keys in 8 bits: those of this kernel against what is not
    about the codec, and against other codecs."""
    reasons = Reasons()
    reasons.expect_triton(problem, device)
    reasons.expect_pages(problem.place)
    reasons.expect_16_bits(problem)
    reasons += against_features(problem)
    if problem.codec.name not in CODECS_8BIT:
        reasons.append(f"kv {problem.codec}: expected {' or '.join(CODECS_8BIT)}")
    return reasons


def against_dims_8bit(problem: Problem) -> Reasons:
    """Their reasons against gradients and head dimensions."""
    reasons, dims = Reasons(), (problem.head_dim, problem.head_dim_v)
    reasons.expect(not problem.needs_grad, "gradient: expected inputs that require none")
    if dims not in ((64, 64), (128, 128)):
        reasons.append(f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected 64/64 or 128/128")
    return reasons
