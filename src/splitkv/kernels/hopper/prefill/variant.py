"""What only the kernels for whole sequences on Hopper can choose: values of a plan, by name.

`variant_of(problem, config, device)` of each kernel (kernel.py, half.py, quantised.py) makes them,
and nothing else does. `Config.variant` is where they belong: `configs()` yields each config with
its variant, `explain` prints its fields, and the launcher reads them from the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HopperPrefill:
    """The choices of `hopper_prefill` and `hopper_prefill_half` beside tiles and splits.

    mma_roles   warpgroups that multiply, each 64 rows of a row tile
    mma_order   in_turns: they take turns at issuing products; any: whenever they can
    maxima      each_tile: every step looks for the maxima of its rows; lazy: only steps whose
                weights are too large, where registers suffice to hold products until that is known
    q_stages    row tiles of q in shared memory: with two, that of the next is loaded meanwhile
    out         own_tiles: results leave through shared memory of their own; place_of_q
    """

    mma_roles: int
    mma_order: Literal["in_turns", "any"]
    maxima: Literal["each_tile", "lazy"]
    q_stages: int
    out: Literal["own_tiles", "place_of_q"]


@dataclass(frozen=True)
class HopperPrefillQuantised:
    """The choices of `hopper_prefill_quantised` beside tiles and splits.

    warpgroups     that multiply, as one role
    mma_order      in_turns: they take turns at issuing products; any: whenever they can
    items          numbered: programs find the row tiles and splits that they work on by number;
                   by_grid: the place of a program in the grid says which
    issued_first   steps whose tiles are copied before warps have their roles
    q_stages       row tiles of q in shared memory: with two, that of the next is loaded meanwhile
    """

    warpgroups: int
    mma_order: Literal["in_turns", "any"]
    items: Literal["numbered", "by_grid"]
    issued_first: int
    q_stages: int
