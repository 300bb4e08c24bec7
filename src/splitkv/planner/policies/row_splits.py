"""Among how many programs the backward splits the rows that see a tile of keys.

A program of `backward_keys` or `hopper_backward` owns a tile of keys and visits the rows that see
it, those of all query heads of the group. Where some tiles are seen by far more rows than others,
or tiles are few, splits of their rows keep every SM at work to the end.
"""

from __future__ import annotations

import math

from splitkv.core.device import Device
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.core.variants import RowSplits

MAX_SPLITS = 64  # of the rows that see tiles of sink tokens, times those tiles
LEAST_STEPS = 8  # of a split where every tile is split: what a split takes besides is that of three
SLACK_CAUSAL = 1.5  # splits for each idle SM where tiles are not equally heavy
MAX_SHARE = 4  # tiles of keys that a split may take as long as


def row_splits(problem: Problem, device: Device, tile_m: int, tile_n: int) -> RowSplits:
    """The RowSplits for tiles of tile_n keys, whose rows are visited tile_m at a time.

    Every tile is split where there are fewer than fill the GPU: into as many splits as there are
    SMs for it, half as many again under a causal mask, whose tiles are not equally heavy. Else
    those of sink tokens, as `sink_splits` says.
    """
    mask, p = problem.mask, problem
    tiles = ceil_div(p.seqlen_k, tile_n)
    if not p.batch * tiles:
        return RowSplits(0, 1)
    share = p.batch * p.num_kv_heads * tiles / device.num_sms  # tiles that an SM has
    reach = _reach(problem)
    unequal = mask.right is not None and reach is None
    of_sinks = sink_splits(problem, tile_n, share)
    wanted = math.ceil(SLACK_CAUSAL / share) if unequal else int(1 / share)
    rows = p.seqlen_q if reach is None else min(p.seqlen_q, reach + tile_n)
    most = rows * p.group // (LEAST_STEPS * tile_m)
    wanted = max(min(wanted, most), of_sinks.splits if wanted > 1 else 1)
    return RowSplits(tiles, wanted) if 1 < wanted <= most else of_sinks


def sink_splits(problem: Problem, tile_n: int, share: float) -> RowSplits:
    """The RowSplits of tiles of sink tokens; (0, 1) where they are seen by as many rows as others.
    share: tiles of keys that an SM has.

    A split may take about as long as an SM takes for the other tiles: as many times as many rows as
    see one of those as it has of them, but no more than four. Half a tile less, as rows that see
    the first keys alone take longer, since they ask the mask, and so that there are two splits
    where there is a tile for every SM.
    """
    reach = _reach(problem)
    tiles = ceil_div(min(problem.mask.sink_tokens, problem.seqlen_k), tile_n)
    if problem.mask.num_bands < 2 or reach is None or not tiles:
        return RowSplits(0, 1)
    rows = min(max(share - 0.5, 0.5), MAX_SHARE) * (reach + tile_n)
    splits = min(MAX_SPLITS // tiles, math.ceil(problem.seqlen_q / rows))
    return RowSplits(tiles, max(splits, 1))


def _reach(problem: Problem) -> int | None:
    """Computes one less than the rows of a head that see a key which is no sink token; None: no
    bound."""
    mask = problem.mask
    reach = [mask.chunk] if mask.chunk else []
    if mask.left is not None and mask.right is not None:
        reach.append(mask.left + mask.right)
    return min(reach, default=None)
