"""`splitkv demo --ranks`: losses over ranks are those of one process."""

from __future__ import annotations

import pytest
import torch
from rank_tasks import demo_losses
from ranks import Ranks

pytest.importorskip("rich", reason="the lab extra is not installed")

from splitkv.demo.model import Shape  # noqa: E402
from splitkv.demo.ranks import CLOSE, losses  # noqa: E402

SMALL = Shape(width=32, hidden=48, num_layers=2, head_dim=16, window=12, context=64)


@pytest.mark.parametrize("exchange", ["heads", "keys", "ring"])
def test_losses_are_those_of_one_process(exchange: str, ranks: Ranks) -> None:
    alone = losses(SMALL, 6, 0, torch.device("cpu"))
    assert alone[-1] < alone[0]
    for found in ranks.run(demo_losses, 2, SMALL, 6, exchange):
        assert max(abs(a - b) for a, b in zip(alone, found, strict=True)) <= CLOSE
