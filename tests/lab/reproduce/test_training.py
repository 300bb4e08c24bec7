"""Loss curves as rows."""

from __future__ import annotations

import pytest
import torch

from splitkv.lab.reproduce import training


def test_training_says_where_every_way_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"float32": [[2.0] * 12], "eager": [[2.5] * 12] * 2, "splitkv": [[2.25] * 12] * 2}
    made = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in runs.items()}
    monkeypatch.setattr(training.curves, "all_losses", lambda steps, device, orders: made)
    monkeypatch.setattr(training.curves, "losses", lambda *_: made["eager"][0] + 1)
    rows = {row["kernel"]: row for row in training.measure(3, 12)}
    assert rows["splitkv"]["distance"] == 0.25 and rows["eager"]["loss"] == 2.5
    assert rows["float32"]["distance"] == 0.0 and rows["without sinks"]["distance"] is None
    assert rows["without sinks"]["loss"] == 3.5 and rows["without sinks"]["runs"] == 1
