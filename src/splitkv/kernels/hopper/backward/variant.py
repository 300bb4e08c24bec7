"""What there is to choose of the backward on Hopper: tiles, how dq is made, splits of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import triton

from splitkv.core.device import Device
from splitkv.core.problem import Problem
from splitkv.kernels.backward.row_splits import RowSplits, row_splits

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
# By head_dim: rows a step, keys a program, stages of rows, the best first. More rows do not fit
# into registers, nor do dk and dv of more keys.
KEY_TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((128, 128, 3), (128, 128, 2), (64, 128, 3)),
    128: ((64, 128, 3), (64, 128, 2)),
    192: ((64, 64, 2),),
    256: ((64, 64, 2),),
}
QUERY_ROWS = 128  # rows a program of `hopper_backward_queries`: 64 a consumer
# By head_dim: keys a step, and tiles of k and v in the ring, the best first.
QUERY_TILES: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((128, 4), (64, 8), (64, 4)),
    128: ((128, 4), (64, 8), (64, 4)),
    192: ((64, 3),),
    256: ((32, 4), (64, 3)),
}
HALF_KEYS_DIM = 128  # the largest head_dim of which registers hold dk and dv of 64 keys
# Shared memory of barriers and alignment.
BARRIER_BYTES = {"half_keys": 768, "one_gradient": 1024}
LEAST_FULL = 0.9  # tiles that lanes have together, for each SM


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The tiles of `hopper_backward_queries`: rows a program, keys a step, tiles of k and v in the
    ring."""

    tile_m: int
    tile_n: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class HopperBackward:
    """All that is chosen for the backward of a problem on Hopper.

    tile_m, tile_n     rows a step and keys a program
    num_stages         tiles of q in shared memory; grad_stages: of the gradient of the output
    consumers          half_keys: each has the gradients of 64 keys; one_gradient: one has dv and
                       the other dk of all 64
    dq                 added: programs add to fp32 sums in any order; added_in_turns: in the order
                       of their keys; recomputed: `hopper_backward_queries` makes it
    dq_pieces          pieces in which a tile of dq is added
    row_splits         which tiles of keys come first, and how many programs share their rows
    queries            tiles of `hopper_backward_queries`; None: it does not run
    """

    tile_m: int
    tile_n: int
    num_stages: int
    grad_stages: int
    consumers: Literal["half_keys", "one_gradient"]
    dq: Literal["added", "added_in_turns", "recomputed"]
    dq_pieces: int
    row_splits: RowSplits
    queries: QueryTiles | None


class Tiling(NamedTuple):
    """Tiles of a lane, lanes, and how many lanes go together."""

    tiles: int
    lanes: int
    width: int


def variants(problem: Problem, device: Device) -> Iterator[HopperBackward]:
    """Every variant that fits, the best first."""
    dq = way_of_dq(problem)
    for tile_m, tile_n, num_stages in KEY_TILES[problem.head_dim]:
        for queries in query_tiles(problem, device) if dq == "recomputed" else (None,):
            large = problem.head_dim == 256 and dq != "recomputed"  # dq leaves room for one
            variant = HopperBackward(
                tile_m=tile_m,
                tile_n=tile_n,
                num_stages=num_stages,
                grad_stages=1 if large else num_stages,
                consumers="half_keys" if problem.head_dim <= HALF_KEYS_DIM else "one_gradient",
                dq=dq,
                dq_pieces=problem.head_dim // 64 if problem.head_dim > HALF_KEYS_DIM else 2,
                row_splits=row_splits(problem, device, tile_m, tile_n),
                queries=queries,
            )
            if shared_bytes(problem, variant) <= device.smem_per_block:
                yield variant


def way_of_dq(problem: Problem) -> Literal["added", "added_in_turns", "recomputed"]:
    """How dq is made: in turns where the same bits are wanted and every row sees every key."""
    if not problem.deterministic:
        return "added"
    full = problem.mask.left is None and problem.mask.right is None
    return "added_in_turns" if full and problem.head_dim <= HALF_KEYS_DIM else "recomputed"


def query_tiles(problem: Problem, device: Device) -> Iterator[QueryTiles]:
    """Every tile shape of `hopper_backward_queries` that fits, the best first."""
    dim = triton.next_power_of_2(problem.head_dim)
    for tile_n, num_stages in QUERY_TILES[problem.head_dim]:
        elements = QUERY_ROWS * (dim + problem.head_dim_v) + num_stages * tile_n * dim
        if elements * problem.element_bytes + 1024 <= device.smem_per_block:
            yield QueryTiles(QUERY_ROWS, tile_n, num_stages)


def shared_bytes(problem: Problem, variant: HopperBackward) -> int:
    """Shared memory of a variant: keys, stages of rows and their statistics, p, ds, sums of dq."""
    dim, adds = triton.next_power_of_2(problem.head_dim), variant.dq != "recomputed"
    stores_p = variant.consumers == "one_gradient"
    keys = variant.tile_n * (dim + problem.head_dim_v)
    rows = variant.num_stages * dim + variant.grad_stages * problem.head_dim_v
    square = variant.tile_m * variant.tile_n  # p, ds
    elements = keys + variant.tile_m * rows + (stores_p + 2 * adds) * square
    vectors = variant.num_stages * (1 + problem.sink_logits) + variant.grad_stages
    sums = 2 * adds * variant.tile_m * problem.head_dim * 4 // variant.dq_pieces
    bytes_of_tiles = elements * problem.element_bytes + vectors * variant.tile_m * 4
    return bytes_of_tiles + sums + BARRIER_BYTES[variant.consumers]


def tiling(problem: Problem, device: Device, total: int, heads: int, tile: int) -> Tiling:
    """The Tiling of `total` tokens in tiles of `tile`, a lane being a head, dense of one sequence.

    Together go the least number of lanes, of those that divide all, that has a tile for nearly
    every SM. Where the tiles of a lane are not equally heavy, fewer would leave SMs idle at the
    end.
    """
    if problem.kind == "varlen":
        return Tiling(total // tile + problem.batch + 1, heads, heads)
    tiles, lanes = triton.cdiv(total // problem.batch, tile), problem.batch * heads
    widths = (n for n in range(1, lanes + 1) if lanes % n == 0)
    enough = LEAST_FULL * device.num_sms
    return Tiling(tiles, lanes, next((n for n in widths if n * tiles >= enough), lanes))
