"""Into how many parts the backward cuts the rows that see a tile of keys.

A program of `backward_keys` or `hopper_backward` owns a tile of keys and visits the rows that see
it, those of all query heads of the group. Where some tiles are seen by far more rows than others,
or tiles are few, parts of their rows keep every SM at work to the end.
"""

from __future__ import annotations

import math

import triton

from splitkv.device import Device
from splitkv.plans import Config
from splitkv.problem import Problem

MAX_PARTS = 64  # of the rows that see tiles of sink tokens, times those tiles
LEAST_STEPS = 8  # of a part where every tile is cut: what a part takes besides is that of three


def cut_tiles(problem: Problem, device: Device, config: Config) -> tuple[int, int]:
    """(tiles of keys that come first, parts of the rows that see each of them); (0, 1): none do.

    Every tile, where there are fewer than fill the GPU: in as many parts as there are SMs for it,
    half as many again under a causal mask, whose tiles are not equally heavy. Else those of sink
    tokens, as `sink_parts` says.
    """
    mask, p = problem.mask, problem
    tiles = triton.cdiv(p.seqlen_k, config.tile_n)
    if not p.batch * tiles:
        return 0, 1
    share = p.batch * p.num_kv_heads * tiles / device.num_sms  # tiles that an SM has
    reach = _reach(problem)
    unequal = mask.right is not None and reach is None
    near, parts = sink_parts(problem, config, share)
    wanted = math.ceil(1.5 / share) if unequal else int(1 / share)
    rows = p.seqlen_q if reach is None else min(p.seqlen_q, reach + config.tile_n)
    most = rows * p.group // (LEAST_STEPS * config.tile_m)
    wanted = max(min(wanted, most), parts if wanted > 1 else 1)
    return (tiles, wanted) if 1 < wanted <= most else (near, parts)


def sink_parts(problem: Problem, config: Config, share: float) -> tuple[int, int]:
    """(tiles of sink tokens, parts of the rows that see one); (0, 1) where they are seen by as many
    rows as others. share: tiles of keys that an SM has.

    A part may take about as long as an SM takes for the other tiles: as many times as many rows as
    see one of those as it has of them, but no more than four. Half a tile less, as rows that see
    the first keys alone take longer, since they ask the mask, and so that it is two parts where
    there is a tile for every SM.
    """
    reach = _reach(problem)
    near = triton.cdiv(min(problem.mask.sink_tokens, problem.seqlen_k), config.tile_n)
    if problem.mask.num_bands < 2 or reach is None or not near:
        return 0, 1
    rows = min(max(share - 0.5, 0.5), 4) * (reach + config.tile_n)
    return near, max(min(MAX_PARTS // near, math.ceil(problem.seqlen_q / rows)), 1)


def _reach(problem: Problem) -> int | None:
    """One less than the rows of a head that see a key which is no sink token; None: no bound."""
    mask = problem.mask
    reach = [mask.chunk] if mask.chunk else []
    if mask.left is not None and mask.right is not None:
        reach.append(mask.left + mask.right)
    return min(reach, default=None)
