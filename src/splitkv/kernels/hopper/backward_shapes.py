"""The tiles of `hopper_backward`: how large, how many at once, and in which order programs go."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from splitkv.device import Device
from splitkv.plans import Config
from splitkv.problem import Problem

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
# By head_dim: rows a step, keys a program, stages of rows, the best first. More rows do not fit
# into registers, nor do dk and dv of more keys.
SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((128, 128, 3), (128, 128, 2), (64, 128, 3)),
    128: ((64, 128, 3), (64, 128, 2)),
    192: ((64, 64, 2),),
    256: ((64, 64, 2),),
}
WIDE = 128  # from above this head_dim on backward_wide.py has the warps
BARRIER_BYTES = 768, 1024  # of shared memory, the second above WIDE: barriers and alignment


def in_turns(problem: Problem) -> bool:
    """Whether programs add to dq in turns: deterministic, and every row sees every key."""
    full = problem.mask.left is None and problem.mask.right is None
    return problem.deterministic and full and problem.head_dim <= WIDE


def adds_up(problem: Problem) -> bool:
    """Whether `hopper_backward` makes dq, too, by adding to sums in memory."""
    return not problem.deterministic or in_turns(problem)


def pieces(problem: Problem) -> int:
    """In how many pieces a tile of dq is added to its sums."""
    return problem.head_dim // 64 if problem.head_dim > WIDE else 2


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config: keys, stages of rows and their statistics, ds, sums."""
    wide = problem.head_dim > WIDE
    dim, adds = triton.next_power_of_2(problem.head_dim), adds_up(problem)
    stages = grad_stages(problem, config)
    keys = config.tile_n * (dim + problem.head_dim_v)
    rows = config.tile_m * (config.num_stages * dim + stages * problem.head_dim_v)
    square = config.tile_m * config.tile_n  # p, ds
    sinks = problem.sink_logits
    elements = keys + rows + (wide + 2 * adds) * square
    stats = (config.num_stages * (1 + sinks) + stages) * config.tile_m * 4
    sums = 2 * adds * config.tile_m * problem.head_dim * 4 // pieces(problem)
    return elements * problem.element_bytes + stats + sums + BARRIER_BYTES[wide]


def grad_stages(problem: Problem, config: Config) -> int:
    """Stages of rows of the output's gradient: as of q, unless dq leaves room for one."""
    return 1 if problem.head_dim == 256 and adds_up(problem) else config.num_stages


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, the best first."""
    for tile_m, tile_n, num_stages in SHAPES[problem.head_dim]:
        config = Config(tile_m=tile_m, tile_n=tile_n, num_warps=8, num_stages=num_stages)
        if shared_bytes(problem, config) <= device.smem_per_block:
            yield config


def tiling(
    problem: Problem, device: Device, total: int, heads: int, tile: int
) -> tuple[int, int, int]:
    """(tiles of a lane, lanes, lanes together) for so many tokens in all, in tiles of `tile`.

    Together: the least number, of those that divide the lanes, that has a tile for nearly every SM.
    Where the tiles of a lane are not equally heavy, fewer would leave SMs idle at the end.
    """
    if problem.kind == "varlen":
        return total // tile + problem.batch + 1, heads, heads
    tiles, lanes = triton.cdiv(total // problem.batch, tile), problem.batch * heads
    widths = (n for n in range(1, lanes + 1) if lanes % n == 0)
    return tiles, lanes, next((n for n in widths if n * tiles >= 0.9 * device.num_sms), lanes)
