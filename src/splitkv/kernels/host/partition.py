"""Sizes on the host: of tiles, of the grid of a plan of decode, what its parts read and write."""

from __future__ import annotations

from dataclasses import replace

from splitkv.core.device import Device
from splitkv.core.plan import SCHEDULED, Config, Traffic
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div, next_power_of_2, visited

WGMMA_ROWS, WGMMA_WARPS = 64, 4  # of one instruction: fewer are multiplied by mma
WGMMA_COLUMNS = 64


def padded_dims(problem: Problem, device: Device, rows: int, num_warps: int) -> tuple[int, int]:
    """Columns of the tiles of keys and of values where products have so many rows.

    Where such a product may be a wgmma, tiles have at least 64 columns: operands with fewer, whose
    rows in shared memory have 32 or 64 bytes, may give wrong sums where Triton stores them there
    from registers, as it does with values that are dequantized or whose rows are not aligned.
    """
    least = 1
    if device.capability == (9, 0) and problem.element_bytes == 2:
        wgmma = rows >= WGMMA_ROWS and num_warps % WGMMA_WARPS == 0
        least = WGMMA_COLUMNS if wgmma else 1
    return max(least, padded(problem.head_dim)), max(least, padded(problem.head_dim_v))


def padded(dim: int) -> int:
    """Columns of a tile in registers: the next power of 2."""
    return next_power_of_2(dim)


def packed_rows(problem: Problem, config: Config) -> tuple[int, int]:
    """Row tiles of a sequence and KV head, and the rows that a partial of one of them stores."""
    return ceil_div(problem.rows, config.tile_m), min(config.tile_m, problem.rows)


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Programs along each axis of the launch.

    The heads of a part that is shared out run beside each other: their keys lie beside each other.
    """
    heads = problem.num_kv_heads * packed_rows(problem, config)[0]
    if config.schedule == "batch":
        return heads, config.programs, 1
    return config.num_splits, heads, problem.batch


def traffic(problem: Problem, config: Config) -> Traffic:
    """The lines of the docstring's Traffic section, every sequence at its upper bound."""
    if config.schedule in SCHEDULED:
        return traffic_of_shares(problem, config)
    return traffic_of_parts(problem, num_parts(problem, config))


def traffic_of_shares(problem: Problem, config: Config) -> Traffic:
    """Traffic of programs with shares of a schedule: each has a split that it leaves as a
    partial at the beginning of its share, and one at the end."""
    row_tiles, rows = packed_rows(problem, config)
    groups = 1 if config.schedule == "ranges" else problem.num_kv_heads * row_tiles
    partials = 2 * groups * config.programs * rows * (problem.head_dim_v + 2) * 4
    return replace(traffic_of_parts(problem, 1), partial_bytes=2 * partials)


def traffic_of_parts(problem: Problem, parts: int) -> Traffic:
    """Traffic of so many splits of every sequence."""
    rows = problem.batch * problem.seqlen_q * problem.num_heads
    return Traffic(
        kv_bytes=problem.kv_bytes,
        q_bytes=rows * problem.head_dim * problem.element_bytes,
        out_bytes=rows * (problem.head_dim_v * problem.out_element_bytes + 4 * problem.return_lse),
        partial_bytes=2 * parts * rows * (problem.head_dim_v + 2) * 4 if parts > 1 else 0,
        flops=2 * rows * problem.visible_keys * (problem.head_dim + problem.head_dim_v),
    )


def num_parts(problem: Problem, config: Config) -> int:
    """Parts of every sequence where all are as long as they may be: tile/share.py on the host."""
    tiles = visited(problem, config.tile_n)
    parts = config.num_splits
    if config.schedule == "batch":  # programs / batch - 1, rounded up
        parts = max(ceil_div(config.programs - problem.batch, problem.batch), 1)
    per = max(ceil_div(tiles, parts), 1)
    if config.schedule == "fixed":
        per = config.split_size // config.tile_n
    return max(ceil_div(tiles, per), 1)
