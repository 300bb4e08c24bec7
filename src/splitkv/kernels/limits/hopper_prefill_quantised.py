"""Limits of `hopper_prefill_quantised`, its configs, variants, shared memory and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from splitkv.core.device import Device
from splitkv.core.plan import Config, Plan, Traffic
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import ceil_div
from splitkv.core.variants import HopperPrefillQuantised, Variant
from splitkv.kernels.hopper.primitives.tma_limits import unfit
from splitkv.kernels.limits import prefill
from splitkv.kernels.limits.hopper_prefill import (
    BARRIER_BYTES,
    against_8bit,
    against_dims_8bit,
    fitting,
    packed_heads,
)
from splitkv.kernels.limits.hopper_prefill_tiles import ROWS
from splitkv.kernels.limits.reasons import expect_hopper

NAME = "hopper_prefill_quantised"
PAIR = 2  # splits of a cluster
READY = 2  # slots for tiles that have been made ready to be multiplied
PAIR_THREADS = 128  # of a program of a cluster, those that multiply


def bytes_of_half(head_dim_v: int) -> int:
    """Bytes of a half, 16 of each thread at a time: half of its sums, then m and l of its rows."""
    return 128 * (head_dim_v + 16)  # PAIR_THREADS: device code calls this, and has no such name


def pair_exchange_bytes(head_dim_v: int) -> int:
    """Bytes of a half, and behind it of the barrier that it arrives at."""
    return 128 * (head_dim_v + 16) + 16


# By products: tile_m, tile_n, num_stages, the best guess first. A stage is a tile of keys and one
# of values as they are stored. The shapes of 64 rows are for few rows, which wait for memory.
SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "widened": ((128, 64, 2), (64, 64, 6), (64, 128, 2)),
    "half": ((128, 128, 2), (128, 64, 3), (64, 128, 3), (64, 64, 6)),
    "full": ((128, 128, 2), (128, 128, 3), (128, 64, 3), (64, 128, 4)),
}


# Steps whose tiles are copied before warps have roles: of more, a warp's first instructions come
# later, as they come from the same memory.
ISSUED_FIRST = 1


def unsupported(problem: Problem, device: Device) -> list[str]:
    if against := expect_hopper(device):
        return against
    reasons = against_8bit(problem, device)
    if problem.codec.name == "fp8" and problem.products != "widened" and problem.return_lse:
        expected = "expected widened, as units keep 14 bits"
        reasons.append(f"return_lse of fp8, products {problem.products}: {expected}")
    return reasons + against_dims_8bit(problem)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config."""
    dim, n, stages = problem.head_dim, config.tile_n, config.num_stages
    found = types(problem)
    of_q, of_k, of_v, stored = found.q, found.k, found.v, found.stored
    a_row = SIZES[of_q] + (SIZES[of_k] if of_k != of_q else 0) + problem.element_bytes
    a_key = 2 * stages * SIZES[stored] + READY * SIZES[of_v]
    if of_k != stored:
        a_key += READY * SIZES[of_k]
    columns = 0
    if problem.codec.granularity == "token":
        columns = (READY + 1) * (12 * n if of_v == stored else 6 * n + 8)
    exchanged = 0
    if config.merge == "cluster":  # no tile of results
        a_row -= problem.element_bytes
        exchanged = pair_exchange_bytes(problem.head_dim_v)
    return (config.tile_m * a_row + n * a_key) * dim + columns + exchanged + BARRIER_BYTES


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, in the order of `hopper_prefill`. Then those whose two splits are
    a cluster, where a sequence and the packed heads have one row tile."""
    found = list(fitting(problem, device, SHAPES[problem.products], shared_bytes))
    yield from found
    if problem.kind == "varlen" or problem.products == "full":
        return
    for config in found:
        packed = config.tile_m == ROWS and config.pack_gqa and config.programs
        if packed and problem.seqlen_q * packed_heads(problem, config) <= config.tile_m:
            pair = replace(config, num_splits=PAIR, merge="cluster")
            if shared_bytes(problem, pair) <= device.smem_per_block:
                yield pair


def programs_across(problem: Problem, config: Config) -> int:
    """Programs of one sequence that has one row tile: its splits and packed heads."""
    return config.num_splits * (problem.num_heads // packed_heads(problem, config))


def has_items_by_grid(problem: Problem, config: Config) -> bool:
    """Whether the place of a program in the grid says which its item is: each lane has one row tile
    and all splits of a sequence run at once."""
    rows = problem.seqlen_q * packed_heads(problem, config)
    programs = 0 if config.merge == "cluster" else config.programs
    across = programs_across(problem, config)
    one_tile = problem.kind != "varlen" and ceil_div(rows, config.tile_m) == 1
    return one_tile and across <= (programs or across) and config.merge != "last"


def variants(problem: Problem, device: Device, config: Config) -> list[Variant]:
    """Every variant that fits beside the numbers of a config.

    Warpgroups take turns where int8 keys have scales of their own and barriers of the hardware are
    left for it. Rows that are rounded first leave their place early, and have one. A cluster has
    the splits of one row tile, by the grid.
    """
    found = types(problem)
    room = device.smem_per_block - shared_bytes(problem, config)
    stays = found.q == found.k and config.tile_m * problem.head_dim * SIZES[found.q] <= room
    scarce = problem.codec.granularity == "token" and (found.k, found.v) == ("int8", "float16")
    in_turns = scarce and (config.tile_m // ROWS, config.num_stages) == (2, 2)
    items: list[tuple[Literal["numbered", "by_grid"], int]] = []
    if config.merge != "cluster":
        items.append(("numbered", 0))
    if has_items_by_grid(problem, config):
        items.append(("by_grid", ISSUED_FIRST))
    return [
        HopperPrefillQuantised("in_turns" if in_turns else "any", by, issued_first, q_stages)
        for by, issued_first in items
        for q_stages in ((1, 2) if config.programs and stays else (1,))
    ]


def traffic(problem: Problem, config: Config) -> Traffic:
    if config.merge == "cluster":  # what is exchanged stays on the SMs
        config = replace(config, num_splits=1)
    return prefill.traffic(problem, config)


class OperandTypes(NamedTuple):
    """Names of the types of q as it comes, of K and V as they are multiplied, and of both as they
    are stored."""

    q: str
    k: str
    v: str
    stored: str


SIZES = {"int8": 1, "fp8": 1, "bfloat16": 2, "float16": 2}  # bytes of an element


def types(problem: Problem) -> OperandTypes:
    """The OperandTypes of a problem; fp8: e4m3."""
    stored = problem.codec.name
    return OperandTypes(
        q=problem.dtype if problem.q_granularity == "none" else stored,
        k="float16" if problem.products == "widened" else stored,
        v=stored if problem.products == "full" else "float16",
        stored=stored,
    )


def refit(plan: Plan, operands: Operands) -> Plan:
    """The plan for tensors that this one does not fit: see `hopper_prefill`."""
    against = unfit(operands)
    return prefill.prefill_without_tma(plan, operands, against[0]) if against else plan
