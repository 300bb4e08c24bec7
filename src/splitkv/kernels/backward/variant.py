"""What there is to choose of the backward for any GPU: tiles, warps, splits of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from splitkv.core.device import Device
from splitkv.core.plan import Config
from splitkv.core.problem import Problem
from splitkv.core.scores import PLAIN
from splitkv.kernels.backward.row_splits import RowSplits, row_splits
from splitkv.kernels.host.partition import padded, padded_dims

Shape = tuple[int, int, int]  # keys or rows that a program owns, those of a step, warps
KEYS: tuple[Shape, ...] = (
    *((128, 64, 8), (128, 32, 8), (64, 64, 8), (64, 32, 8), (64, 64, 4), (32, 32, 4)),
    *((32, 16, 4), (16, 16, 4)),
)
QUERIES: tuple[Shape, ...] = (
    *((128, 64, 8), (128, 32, 8), (64, 64, 4), (64, 32, 8), (64, 32, 4), (32, 32, 4)),
    *((32, 16, 4), (16, 16, 4)),
)
# In fp32 products are made in registers: by the larger padded head dimension.
SINGLE: dict[int, tuple[Shape, ...]] = {
    64: ((32, 32, 8), (16, 16, 4)),
    128: ((32, 16, 8), (16, 16, 4)),
    256: ((16, 16, 8), (16, 16, 4)),
}


@dataclass(frozen=True, slots=True)
class Backward:
    """All that is chosen for the backward of a problem.

    keys         of `backward_keys`: tile_n keys a program, tile_m rows a step
    queries      of `backward_queries`: tile_m rows a program, tile_n keys a step
    row_splits   which tiles of keys come first, and how many programs share their rows
    """

    keys: Config
    queries: Config
    row_splits: RowSplits


def variant_of(problem: Problem, device: Device) -> Backward:
    """The best variant of a problem."""
    keys, queries = next(key_configs(problem, device)), next(query_configs(problem, device))
    return Backward(keys, queries, row_splits(problem, device, keys.tile_m, keys.tile_n))


def fitting(problem: Problem, device: Device, found: Sequence[Shape], sums: int) -> Iterator[Shape]:
    """The shapes that fit, two stages each, for a program that sums up columns of k or of both.

    sums   1: its sums are as wide as k; 2: as k and v together

    Registers hold the sums, s and ds, and more beside padding or score modifiers; without wgmma
    also what is multiplied. The limits are from where ptxas spills inside a loop. On sm_100 weights
    and sums go through shared memory.
    """
    of_problem = problem.head_dim, problem.head_dim_v
    if problem.element_bytes > 2:
        found = SINGLE[max(64, *map(padded, of_problem))]
    wgmma, staged = device.capability[0] == 9, device.capability[0] in (10, 11)
    modified = problem.score != PLAIN or problem.dropout
    for own, step, warps in found:
        dims = padded_dims(problem, device, own, warps)
        more = 32 * (dims != of_problem or modified)
        registers = own * (sum(dims[:sums]) + 2 * step) / (32 * warps) + more
        tiles = (own + 2 * step) * sum(dims) * problem.element_bytes
        moved = max(2 * step, sum(dims)) * own * problem.element_bytes * staged
        fits = tiles + moved + 16 * (own + step) + 1024 <= device.smem_per_block
        if fits and (registers <= (192 if wgmma or staged else 144) or own <= 32):
            yield own, step, warps


def key_configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape of `backward_keys`, the best first."""
    for own, step, warps in fitting(problem, device, KEYS, 2):
        yield Config(tile_m=step, tile_n=own, num_warps=warps, num_stages=2)


def query_configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape of `backward_queries`, the best first."""
    for own, step, warps in fitting(problem, device, QUERIES, 1):
        yield Config(tile_m=own, tile_n=step, num_warps=warps, num_stages=2)
