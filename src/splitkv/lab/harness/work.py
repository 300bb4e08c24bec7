"""A shape and the ways in which it is run, which a backend is asked to time."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case


class Way(NamedTuple):
    """One way to run a shape.

    splits   0: as the library itself decides
    packed   the query heads of a KV head share the rows of a tile; None: as it decides
    margin   SMs left to others
    kernel   the one kernel of ours that may run it; None: any
    ahead    the scheduler metadata of FlashAttention-3 is made ahead of its calls
    """

    name: str
    splits: int = 0
    packed: bool | None = None
    margin: int = 0
    kernel: str | None = None
    ahead: bool = True


DEFAULT = Way("default")


class Work(NamedTuple):
    """A shape and the ways that are timed in turns."""

    step: str
    case: Case
    ways: tuple[Way, ...]


def unpacked(p: Problem) -> Problem:
    """Every query head with a KV head of its own, which all read the same keys."""
    return replace(p, num_kv_heads=p.num_heads)
