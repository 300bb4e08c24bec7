"""Variants: the choices that one kernel alone has, named values that `Config.variant` holds.

`Kernel.variants` lists those that are legal beside a config, `planner/policies/variants.py` chooses
among them, `explain` prints them, and the launcher reads them from the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from splitkv.core.values import Value


@dataclass(frozen=True, slots=True)
class Plain(Value):
    """The variant of kernels that have nothing to choose but the numbers of a Config."""

    TAG: ClassVar[str | None] = "plain"


@dataclass(frozen=True, slots=True)
class HopperDecode(Value):
    """The choices of decode on Hopper: how tiles and scales of keys arrive.

    load        tma: the warps that multiply issue TMA copies; producer_warp: a warp that does not
                multiply issues them, from before q is read; gather: all warps copy rows
    key_scales  scales of each key: none; per_tile, beside their tile; preloaded, before the tiles;
                bulk, those of all KV heads together
    """

    TAG: ClassVar[str | None] = "hopper_decode"

    load: Literal["tma", "producer_warp", "gather"] = "tma"
    key_scales: Literal["none", "per_tile", "preloaded", "bulk"] = "none"


@dataclass(frozen=True, slots=True)
class HopperPrefill(Value):
    """The choices of `hopper_prefill`, `hopper_prefill_half` and `hopper_prefill_widened`.

    mma_order   in_turns: warpgroups take turns at issuing products; any: whenever they can
    maxima      each_tile: every step looks for the maxima of its rows; lazy: only steps whose
                weights are too large
    q_stages    row tiles of q in shared memory: with two, that of the next is loaded meanwhile
    out         own_tiles: results leave through shared memory of their own; place_of_q
    """

    TAG: ClassVar[str | None] = "hopper_prefill"

    mma_order: Literal["in_turns", "any"] = "any"
    maxima: Literal["each_tile", "lazy"] = "each_tile"
    q_stages: int = 1
    out: Literal["own_tiles", "place_of_q"] = "own_tiles"


@dataclass(frozen=True, slots=True)
class HopperPrefillQuantised(Value):
    """The choices of `hopper_prefill_quantised`.

    mma_order      in_turns: warpgroups take turns at issuing products; any: whenever they can
    items          numbered: programs find the row tiles and splits that they work on by number;
                   by_grid: the place of a program in the grid says which
    issued_first   steps whose tiles are copied before warps have their roles
    q_stages       row tiles of q in shared memory: with two, that of the next is loaded meanwhile
    """

    TAG: ClassVar[str | None] = "hopper_prefill_quantised"

    mma_order: Literal["in_turns", "any"] = "any"
    items: Literal["numbered", "by_grid"] = "numbered"
    issued_first: int = 0
    q_stages: int = 1


@dataclass(frozen=True, slots=True)
class RowSplits(Value):
    """The first `tiles` tiles of keys come first, and `splits` programs share the rows that see
    each of them; (0, 1): no rows are shared."""

    tiles: int = 0
    splits: int = 1


@dataclass(frozen=True, slots=True)
class BackwardTiles(Value):
    """The tiles of one kernel of the backward: rows and keys of a step or a program, warps, and
    stages of its pipeline or ring."""

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Backward(Value):
    """The choices of the backward on any GPU: `Plan.backward`.

    keys         of `backward_keys`: tile_n keys a program, tile_m rows a step
    queries      of `backward_queries`: tile_m rows a program, tile_n keys a step
    row_splits   which tiles of keys come first, and how many programs share their rows
    """

    TAG: ClassVar[str | None] = "backward"

    keys: BackwardTiles
    queries: BackwardTiles
    row_splits: RowSplits = RowSplits()


@dataclass(frozen=True, slots=True)
class HopperBackward(Value):
    """The choices of the backward on Hopper: `Plan.backward`.

    tile_m, tile_n     rows a step and keys a program
    num_stages         tiles of q in shared memory; grad_stages: of the gradient of the output
    consumers          half_keys: each has the gradients of 64 keys; one_gradient: one has dv and
                       the other dk of all 64
    dq                 added: programs add to fp32 sums in any order; added_in_turns: in the order
                       of their keys; recomputed: `hopper_backward_queries` makes it
    dq_pieces          pieces in which a tile of dq is added
    row_splits         which tiles of keys come first, and how many programs share their rows
    queries            tiles of `hopper_backward_queries`: tile_m rows a program, tile_n keys a
                       step, num_stages tiles of k and v in the ring; None: it does not run
    """

    TAG: ClassVar[str | None] = "hopper_backward"

    tile_m: int
    tile_n: int
    num_stages: int
    grad_stages: int
    consumers: Literal["half_keys", "one_gradient"]
    dq: Literal["added", "added_in_turns", "recomputed"]
    dq_pieces: int
    row_splits: RowSplits = RowSplits()
    queries: BackwardTiles | None = None


Variant = Plain | HopperDecode | HopperPrefill | HopperPrefillQuantised
Gradients = Backward | HopperBackward
