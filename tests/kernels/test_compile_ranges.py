"""`prefill` beside ranges of keys that are read on the device, for every architecture."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from kernels.test_compile_prefill import forward

from splitkv.core.device import GPUS
from splitkv.core.kv import Paged, Place, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config
from splitkv.core.problem import Problem
from splitkv.kernels.limits import prefill

EVERY = ("a100", "a10", "l4", "h200", "b200", "rtx5090")


# These take turns.
CALLS: tuple[tuple[Mask, Place, Any], ...] = (
    (Mask(True), Ragged(), "combine"),
    (Mask(True, 200, -1, 4), Paged(16), "last"),
)


@pytest.mark.parametrize(
    ("gpu", "mask", "place", "merge"),
    [(gpu, *call) for gpu, call in zip(EVERY, cycle(CALLS), strict=False)],
    ids=str,
)
def test_compiles(gpu: str, mask: Mask, place: Place, merge: Any) -> None:
    problem = Problem(
        *("varlen", 2, 8, 2, 128, 128, 300, 700),
        mask=mask,
        place=place,
        lengths="device",
        bidirectional_ranges=True,
    )
    config = Config(2, 64, 32, 4, 2, merge=merge)
    assert config.shape in list(prefill.configs(problem, GPUS[gpu]))
    assert forward(problem, GPUS[gpu], 0, config)
