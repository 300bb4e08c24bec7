"""Limits of `decode_split`, its configs and the resources of an SM that they take."""

from __future__ import annotations

from collections.abc import Iterator

from splitkv.core.device import Device
from splitkv.core.kv import Paged
from splitkv.core.plan import Config, tile_config
from splitkv.core.problem import Problem
from splitkv.core.scores import PLAIN
from splitkv.core.tiles import ceil_div, next_power_of_2
from splitkv.kernels.host.partition import padded_dims
from splitkv.kernels.limits.reasons import Reasons

NAME = "decode_split"
MAX_HEAD_DIM, MAX_SEQLEN_Q, MAX_GROUP, MAX_GRID = 256, 16, 64, 65535


MAX_REGISTER_NEED = 192  # of the 255 that a thread can have: from here on configs spill on sm_90


def unsupported(problem: Problem, device: Device) -> list[str]:
    reasons = Reasons()

    if problem.kind != "decode":
        reasons.append(f"kind {problem.kind}: expected decode")
    reasons.expect_triton(problem, device)
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 16 or not 16 <= dim <= MAX_HEAD_DIM:
            expected = f"expected a multiple of 16 from 16 to {MAX_HEAD_DIM}"
            reasons.append(f"{name} {dim}: {expected}")
    if problem.seqlen_q > MAX_SEQLEN_Q:
        reasons.append(f"seqlen_q {problem.seqlen_q}: expected at most {MAX_SEQLEN_Q}")
    if problem.group > MAX_GROUP:
        reasons.append(f"query heads a KV head {problem.group}: expected at most {MAX_GROUP}")
    if problem.batch > MAX_GRID:
        reasons.append(f"batch {problem.batch}: expected at most {MAX_GRID}")
    reasons += against_head_tiles(problem, tile_m(problem))
    reasons.expect(not problem.dropout, "dropout_p: expected 0")
    reasons.expect(not problem.bidirectional_ranges, "bidirectional_ranges: expected None")
    reasons.expect(not problem.needs_grad, "gradient: expected inputs that require none")
    reasons += problem.mask.beyond("sink_tokens", "attention_chunk")
    return reasons


def against_head_tiles(problem: Problem, tile_m: int) -> list[str]:
    """The reason against more head tiles, of so many rows each, than the second axis of a grid
    has places for."""
    head_tiles = problem.num_kv_heads * ceil_div(problem.rows, tile_m)
    if head_tiles <= MAX_GRID:
        return []
    return [f"KV heads x row tiles {head_tiles}: expected at most {MAX_GRID}"]


def tile_m(problem: Problem) -> int:
    """Rows a program: the packed rows rounded up to a matrix tile, at most 64.

    In fp32 16: without a matrix unit, more rows would only take registers.
    """
    most = 64 if problem.element_bytes == 2 else 16
    return min(most, max(16, next_power_of_2(max(problem.rows, 1))))


def shared_bytes(problem: Problem, config: Config, device: Device) -> int:
    """The most shared memory that Triton takes for a config.

    In the loop tiles in flight, q, p, sums of rows and the table; after it acc on its way out.
    """
    fixed, a_stage, after = shared_parts(problem, config, device)
    return max(fixed + config.num_stages * a_stage, after)


def shared_parts(problem: Problem, config: Config, device: Device) -> tuple[int, int, int]:
    """(bytes in the loop beside its stages, bytes of a stage, bytes after it) of `shared_bytes`,
    which are of as many stages as may be."""
    dim, dim_v = padded_dims(problem, device, config.tile_m, config.num_warps)
    a_tile, element_bytes = config.tile_n * (dim + dim_v), problem.kv_element_bytes
    rows = config.tile_m * (dim + config.tile_n)
    if element_bytes < problem.element_bytes:  # widened, for the matrix unit
        rows += a_tile
    rows += config.tile_n * dim // 2 * (problem.element_bytes > 2)  # halves: tile/product.py
    fixed = rows * problem.element_bytes + 8 * config.tile_m
    if config.tile_m == 64:  # wgmma still reads the tile before
        fixed += a_tile * element_bytes
    table = 8 * config.tile_n if isinstance(problem.place, Paged) else 0
    return fixed, a_tile * element_bytes + table, 4 * config.tile_m * dim_v


def register_need(problem: Problem, config: Config, device: Device) -> float:
    """Registers of a thread, besides a fixed number, for acc, s, q and for loading keys and values.

    Each 16 bytes that it loads take addresses and masks, more of them beside score modifiers or a
    window; fp32 tiles are multiplied in registers. Fitted to where ptxas spills on sm_90.
    """
    dim, dim_v = padded_dims(problem, device, config.tile_m, config.num_warps)
    element = problem.element_bytes / 4
    plain = problem.score == PLAIN and problem.mask.left is None and not problem.mask.chunk
    a_load = 12 if problem.element_bytes > 2 else 4 if plain else 8
    rows = config.tile_m * (dim_v + config.tile_n + dim * element)
    loads = config.tile_n * (dim + dim_v) * element / 4
    return (rows + a_load * loads) / (32 * config.num_warps)


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, with one split; `num_splits` may then be anything up to 1024."""
    rows, room = tile_m(problem), device.smem_per_block
    for tile_n in (64, 32, 128, 16):
        for num_warps in (4, 2, 8):
            first = tile_config(rows, tile_n, num_warps, 2)
            if register_need(problem, first, device) >= MAX_REGISTER_NEED:
                continue
            fixed, a_stage, after = shared_parts(problem, first, device)
            for num_stages in (2, 3, 1, 4, 6, 8):
                if max(fixed + num_stages * a_stage, after) <= room:
                    yield tile_config(rows, tile_n, num_warps, num_stages)


def apart(problem: Problem) -> list[str]:
    """The reasons why new tokens are written by `append` and not by the kernel."""
    reasons = []
    if problem.lengths == "host":
        reasons.append("lengths host: expected device")
    if problem.codec.granularity == "token":
        reasons.append("scales of the cache: expected none a token")
    if problem.early_kv:
        reasons.append("early_kv: expected False")
    if problem.sequence_sink_tokens:
        reasons.append("sink_tokens: expected one number, got one a sequence")
    return reasons
