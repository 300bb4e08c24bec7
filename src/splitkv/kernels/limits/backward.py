"""Limits of the kernels of kernels/backward: tiles, warps and stages that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitkv.core.device import Device
from splitkv.core.problem import Problem
from splitkv.core.scores import PLAIN
from splitkv.core.variants import Backward, BackwardTiles
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


def key_configs(problem: Problem, device: Device) -> Iterator[BackwardTiles]:
    """Every tile shape of `backward_keys`, the best first."""
    for own, step, warps in fitting(problem, device, KEYS, 2):
        yield BackwardTiles(tile_m=step, tile_n=own, num_warps=warps, num_stages=2)


def query_configs(problem: Problem, device: Device) -> Iterator[BackwardTiles]:
    """Every tile shape of `backward_queries`, the best first."""
    for own, step, warps in fitting(problem, device, QUERIES, 1):
        yield BackwardTiles(tile_m=own, tile_n=step, num_warps=warps, num_stages=2)


def variants(problem: Problem, device: Device) -> Iterator[Backward]:
    """Every pair of tile shapes without its row splits, the best first."""
    for keys in key_configs(problem, device):
        for queries in query_configs(problem, device):
            yield Backward(keys, queries)
