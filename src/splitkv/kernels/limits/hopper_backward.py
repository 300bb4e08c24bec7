"""Limits of `hopper_backward`, and the variants that fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.problem import Problem
from splitkv.core.tiles import next_power_of_2
from splitkv.core.variants import BackwardTiles, HopperBackward
from splitkv.kernels.limits.hopper_prefill_tiles import COLUMNS, tile_dims
from splitkv.kernels.limits.reasons import Reasons, expect_hopper

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of tiles: see `tile_dims`
# By columns of q and k: rows a step, keys a program, stages of rows, the best first. More rows do
# not fit into registers, nor do dk and dv of more keys.
KEY_TILES: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((128, 128, 3), (128, 128, 2), (64, 128, 3)),
    128: ((64, 128, 3), (64, 128, 2)),
    192: ((64, 64, 2),),
    256: ((64, 64, 2),),
}
QUERY_ROWS = 128  # rows a program of `hopper_backward_queries`: 64 a consumer
QUERY_WARPS = 4  # of the first consumer there
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


def unsupported(problem: Problem, device: Device) -> list[str]:
    """Every reason why these kernels cannot make the gradients of a problem."""
    if against := expect_hopper(device):
        return against
    reasons = Reasons()

    cached = problem.kind == "decode" or isinstance(problem.place, Paged)
    forward_only = cached or problem.codec != AS_IS
    reasons.expect(
        not (forward_only and problem.needs_grad), "gradient: expected inputs that require none"
    )
    reasons.expect_16_bits(problem)
    dims, tiles = (problem.head_dim, problem.head_dim_v), tile_dims(problem)
    fits = tiles in HEAD_DIMS and not any(dim % COLUMNS for dim in dims)
    if not fits or tiles[0] > HALF_KEYS_DIM and dims != tiles:
        known = ", ".join(f"{a}/{b}" for a, b in HEAD_DIMS)
        expected = f"one of {known}, or multiples of {COLUMNS} in tiles of the first two"
        reasons.append(f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected {expected}")
    reasons.expect(not problem.score.softcap, "softcap: expected none")
    reasons.expect(not problem.score.alibi, "alibi: expected none")
    reasons.expect(not problem.dropout, "dropout: expected none")
    reasons.expect(not problem.bidirectional_ranges, "bidirectional_ranges: expected None")
    reasons.expect(
        not problem.sequence_sink_tokens, "sink_tokens: expected one number, got one a sequence"
    )
    reasons += problem.mask.beyond("sink_tokens")
    return reasons


def variants(problem: Problem, device: Device) -> Iterator[HopperBackward]:
    """Every variant that fits, without its row splits, the best first."""
    dq, head_dim = way_of_dq(problem), tile_dims(problem)[0]
    for tile_m, tile_n, num_stages in KEY_TILES[head_dim]:
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


def query_tiles(problem: Problem, device: Device) -> Iterator[BackwardTiles]:
    """Every tile shape of `hopper_backward_queries` that fits, the best first."""
    head_dim, head_dim_v = tile_dims(problem)
    dim = next_power_of_2(head_dim)
    for tile_n, num_stages in QUERY_TILES[head_dim]:
        elements = QUERY_ROWS * (dim + head_dim_v) + num_stages * tile_n * dim
        if elements * problem.element_bytes + 1024 <= device.smem_per_block:
            yield BackwardTiles(QUERY_ROWS, tile_n, QUERY_WARPS, num_stages)


def sum_dim(problem: Problem) -> int:
    """Columns of the fp32 sums of dq: those of tiles, but for what 192 are padded by."""
    return tile_dims(problem)[0]


def shared_bytes(problem: Problem, variant: HopperBackward) -> int:
    """Shared memory of a variant: keys, stages of rows and their statistics, p, ds, sums of dq."""
    head_dim, head_dim_v = tile_dims(problem)
    dim, adds = next_power_of_2(head_dim), variant.dq != "recomputed"
    stores_p = variant.consumers == "one_gradient"
    keys = variant.tile_n * (dim + head_dim_v)
    rows = variant.num_stages * dim + variant.grad_stages * head_dim_v
    square = variant.tile_m * variant.tile_n  # p, ds
    elements = keys + variant.tile_m * rows + (stores_p + 2 * adds) * square
    vectors = variant.num_stages * (1 + problem.sink_logits) + variant.grad_stages
    sums = 2 * adds * variant.tile_m * head_dim * 4 // variant.dq_pieces
    bytes_of_tiles = elements * problem.element_bytes + vectors * variant.tile_m * 4
    return bytes_of_tiles + sums + BARRIER_BYTES[variant.consumers]
