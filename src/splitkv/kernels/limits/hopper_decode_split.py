"""Limits of `hopper_decode_split`, its configs, variants, shared memory and other plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Literal

from splitkv.core.device import REGISTERS_PER_SM, Device
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import SCHEDULED, Config, Plan, Traffic, tile_config
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import WIDE, box_rows, ceil_div, visited
from splitkv.core.variants import HopperDecode, Variant
from splitkv.kernels.host.partition import num_parts as parts_of_problem
from splitkv.kernels.host.partition import traffic_of_parts, traffic_of_shares
from splitkv.kernels.limits import decode_split
from splitkv.kernels.limits.reasons import Reasons, expect_hopper
from splitkv.kernels.limits.scale_layout import unfit as unfit_scales
from splitkv.planner.policies.variants import (
    MOST_HEADS_IN_BULK,
    hopper_decode,
    issues_all_tiles_first,
)

NAME = "hopper_decode_split"
HEAD_DIMS = 64, 128, 256
MAX_NARROW_ROWS = 32  # packed rows that are multiplied by mma


def most_rows(problem: Problem) -> int:
    """Packed rows that a tile may have. head_dim 256 in 8 bits is for mma alone, as a thread has
    too few registers."""
    in_halves = max(problem.head_dim, problem.head_dim_v) > 128
    narrow = in_halves and problem.codec != AS_IS
    return MAX_NARROW_ROWS if narrow else WIDE


def rows_of_tile(problem: Problem) -> tuple[int, ...]:
    """The values of TILE_M for a problem, least first. By mma every warp holds all rows of q, of
    which 32 of 256 would need more registers than exist; by wgmma a warp has 16."""
    rows, in_halves = problem.rows, max(problem.head_dim, problem.head_dim_v) > 128
    narrow = 16 if rows <= 16 or in_halves else 32
    if rows <= 16 or most_rows(problem) < WIDE:
        return (narrow,)
    return (narrow, WIDE) if rows <= MAX_NARROW_ROWS else (WIDE,)


def rounds_rows(problem: Problem) -> bool:
    """Whether q is rounded to int8, so that keys are multiplied as they are."""
    return problem.codec.name == "int8" and problem.products != "widened"


# Codecs that its device code dequantizes.
CODECS = ("as_is", "int8", "fp8", "fp8_e5m2")
# Parts of a sequence that may be a cluster. Every GPU of sm_90 runs clusters of 8; of 16, which not
# all do, no plan was faster (measurements/thresholds.md).
CLUSTERS = (2, 4, 8)


def exchange_bytes(rows: int, head_dim_v: int, parts: int) -> int:
    """Bytes of acc [parts, rows, head_dim_v / parts], m and l [parts, rows] in fp32."""
    return 4 * rows * (head_dim_v + 2 * parts)


def bulk_bytes(stages: int, tile_n: int, heads: int) -> int:
    """Bytes of the scales of K and of V and of a barrier, of all stages."""
    return -(-stages * (8 * tile_n * heads + 8) // 16) * 16


BARRIER_BYTES, SCRATCH_BYTES = 8, 2048  # of shared memory: a stage; sums across warps
RESERVED_BYTES = 1024  # of each program, by CUDA
MERGING = REGISTERS_PER_SM // 4  # registers for programs of `combine_slots`, four of them


def most_registers(problem: Problem, config: Config, device: Device) -> int:
    """Registers of a thread, on average, where there is a producer warp: what as many programs as
    an SM has shared memory for leave each. Triton fills its warps up to four. Beside 8 bits a
    fourth program would have threads spill, by a schedule a third, and no more run than it has.
    Beside two of that programs of the merge may find room."""
    registers = REGISTERS_PER_SM
    held = device.smem_per_sm // (shared_bytes(problem, config) + RESERVED_BYTES)
    most = 4 if problem.codec == AS_IS else 3
    if config.schedule in SCHEDULED:
        groups = problem.num_kv_heads * ceil_div(problem.rows, config.tile_m)
        groups = 1 if config.schedule == "ranges" else groups
        most = min(2, ceil_div(groups * config.programs, device.num_sms))
        if min(held, most) == 2 and spares_registers(problem, config):
            registers -= MERGING
    return registers // (256 * max(1, min(held, most))) // 8 * 8


def spares_registers(problem: Problem, config: Config) -> bool:
    """Whether programs by a schedule do with fewer registers and no thread spills: of 16 bits and
    few rows, which were timed."""
    small = config.tile_m == 16 and max(problem.head_dim, problem.head_dim_v) <= 128
    plain = problem.codec == AS_IS and not config.appends
    return small and plain and config.schedule == "head_ranges"


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config: the ring, its barriers, p on its way to another layout, or acc;
    where tiles are wide, q, and what keys and values are widened to, in the place of p."""
    a_key = problem.head_dim + problem.head_dim_v
    tile = config.tile_n * a_key * problem.kv_element_bytes
    total = 1024
    if problem.codec.granularity == "token":
        variant = config.variant
        if not isinstance(variant, HopperDecode):
            variant = hopper_decode(problem, config)
        if variant.key_scales == "bulk":
            total += bulk_bytes(config.num_stages, config.tile_n, problem.num_kv_heads)
        else:
            tile += 8 * config.tile_n
    total += config.num_stages * (tile + BARRIER_BYTES)
    if config.merge == "cluster":
        rows = min(config.tile_m, problem.rows)
        total += exchange_bytes(rows, problem.head_dim_v, config.num_splits)
    if config.tile_m == WIDE:
        size = 1 if problem.codec != AS_IS and rounds_rows(problem) else 2
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
    """Every reason why TMA cannot describe a memory layout."""
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


def unsupported(problem: Problem, device: Device) -> list[str]:
    if against := expect_hopper(device):
        return against
    reasons = Reasons(decode_split.unsupported(problem, device))

    reasons.expect_16_bits(problem)
    if problem.codec.name not in CODECS:
        reasons.append(f"kv {problem.codec}: expected {', '.join(CODECS)}")
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim not in HEAD_DIMS:
            reasons.append(f"{name} {dim}: expected 64, 128 or 256")
    rows, most = problem.rows, most_rows(problem)
    if rows > most:
        said = f"query heads a KV head x query tokens {rows}"
        reasons.append(f"{said}: expected at most {most}")
    reasons.expect_pages(problem.place)
    against = decode_split.against_head_tiles(problem, rows_of_tile(problem)[0])
    against += problem.mask.beyond("sink_tokens")
    reasons += [x for x in against if x not in reasons]
    return reasons


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every ring that fits, with one split; `num_splits` may then be anything up to 1024. Then
    those whose parts are a cluster."""
    widest, found = max(problem.head_dim, problem.head_dim_v), []
    for tile_m in rows_of_tile(problem):
        tiles = (64, 32, 128) if tile_m != 32 and widest <= 128 else (64, 32)
        for tile_n, num_stages in product(tiles, (3, 2, 1, 4, 6)):
            config = tile_config(tile_m, tile_n, 4, num_stages)
            if shared_bytes(problem, config) <= device.smem_per_block:
                found.append(config)
                yield config
    for config, parts in product(found, CLUSTERS):
        ring = config.tile_m, config.tile_n, config.num_warps, config.num_stages
        clustered = tile_config(*ring, in_cluster=parts)
        if shared_bytes(problem, clustered) <= device.smem_per_block:
            yield clustered


def traffic(problem: Problem, config: Config) -> Traffic:
    """Counts the bytes of kernels/decode_split.py; by the even rule splits are even as can be."""
    if config.schedule in SCHEDULED:
        return traffic_of_shares(problem, config)
    parts = parts_of_problem(problem, config)
    if config.schedule == "even":
        parts = max(1, min(visited(problem, config.tile_n), config.num_splits))
    if config.merge == "cluster":  # what is exchanged stays on the SMs
        parts = 1
    return traffic_of_parts(problem, parts)


def without_tma(plan: Plan, why: str) -> Plan:
    """The plan with the same splits of the keys by the kernel for any GPU."""
    config = plan.config
    shapes = decode_split.configs(plan.problem, plan.device)
    shape = min(shapes, key=lambda shape: abs(shape.tile_n - config.tile_n))
    rule = ("num_splits", "schedule", "split_size", "programs", "appends")
    cut = {name: getattr(config, name) for name in rule}
    kernel = decode_split.NAME
    return replace(plan, kernel=kernel, config=replace(shape, **cut), why=f"{plan.why}; {why}")


def refit(plan: Plan, operands: Operands) -> Plan:
    """The plan for tensors that this one does not fit: without TMA where that cannot describe them;
    scales by tile where they do not lie in one piece; without gathering where keys are further
    apart than its addresses reach. Else the plan itself."""
    against, variant = unfit(operands), variant_of(plan)
    if against:
        return without_tma(plan, against[0])
    why = []
    if variant.key_scales == "bulk" and not in_one_piece(operands):
        variant = replace(variant, key_scales="per_tile")
        why.append("scales of keys do not lie in one piece")
    if variant.load == "gather" and not all(within_gathers(x) for x in (operands.k, operands.v)):
        variant = replace(variant, load="tma")
        why.append("keys are too far apart to be gathered")
    if not why:
        return plan
    config = replace(plan.config, variant=variant)
    return replace(plan, config=config, why="; ".join([plan.why, *why]))


def within_gathers(x: Any) -> bool:
    """Whether warps that gather rows of K or V in 8 bits reach all of it: they count pairs of
    bytes, between pages in 32 bits, and from the first of a page to its last key and head in 31."""
    page, key, head = x.stride()[:3]
    inside = (x.shape[1] - 1) * key + (x.shape[2] - 1) * head + x.shape[3]
    return page < 1 << 32 and inside < 1 << 32


def in_one_piece(operands: Operands) -> bool:
    """Whether the scales of the keys of a tile [keys, num_kv_heads] lie in one piece of memory, of
    multiples of 16 bytes."""
    for x in (operands.k_scale, operands.v_scale):
        heads = x.shape[2]
        if x.stride(1) != heads or (x.stride(0) | x.shape[1] * heads) % 4 or x.data_ptr() & 15:
            return False
    return True


def variants(problem: Problem, device: Device, config: Config) -> list[Variant]:
    """Every variant that computes the problem with these numbers."""
    narrow, boxes = config.tile_m < WIDE, config.tile_n // box_rows(problem, config.tile_n)
    alone = not problem.early_kv and not config.appends
    loads: list[Any] = ["tma"]
    several = boxes > 1 and config.tile_m == 16 and config.num_stages > 1
    if several and config.schedule == "even" and alone:
        loads.append("producer_warp")
    gathered = isinstance(problem.place, Paged) and problem.codec != AS_IS and narrow
    if gathered and problem.head_dim == problem.head_dim_v:
        loads.append("gather")
    if config.schedule in SCHEDULED:
        loads = ["producer_warp"] if narrow else []
    found: list[Variant] = []
    for load in loads:
        scales: list[Any] = ["none"]
        if problem.codec.granularity == "token":
            scales = ["per_tile"]
            if narrow and alone and load != "producer_warp":
                scales.append("preloaded")
                if boxes == 1 and load == "tma" and problem.num_kv_heads <= MOST_HEADS_IN_BULK:
                    scales.append("bulk")
        found += [HopperDecode(load, key_scales) for key_scales in scales]
    return found


def variant_of(plan: Plan) -> HopperDecode:
    """The variant of a plan for this kernel."""
    variant = plan.config.variant
    assert isinstance(variant, HopperDecode), f"expected a plan for {NAME}, got {plan}"
    return variant


def ring_of(problem: Problem, config: Config) -> Literal["holds_split", "wraps"]:
    """Whether no split has more tiles than the ring has stages, whatever the lengths are (a window
    of a shorter sequence may have a tile more)."""
    holds = issues_all_tiles_first(problem, config) and problem.mask.left is None
    return "holds_split" if holds and config.tile_m < WIDE else "wraps"
