"""A decode problem that takes no time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import PLACES

SMALL = Problem("decode", 3, 4, 2, 16, 16, 1, 48, mask=Mask(causal=True), lengths="device")


def small(place: str = "contiguous", lengths: tuple[int, ...] | None = None, **more: Any) -> Case:
    return Case("small", replace(SMALL, place=PLACES[place], **more), lengths)
