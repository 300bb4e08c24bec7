"""A GPU that is not here, whose kernels take the time of a formula."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from results import MACHINE
from studying import H200, FakeSession

from splitkv.kernels import records
from splitkv.lab.tune import regret, studies, sweep, table
from splitkv.planner import registry


@pytest.fixture(autouse=True)
def one_kernel_that_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = records.DECODE_SPLIT, records.TORCH_SDPA, records.TORCH_MATH
    monkeypatch.setattr(registry, "KERNELS", kernels)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (studies, sweep):
        monkeypatch.setattr(module, "facts", lambda: MACHINE)
    for module in (sweep, table, regret):
        monkeypatch.setattr(module, "current", lambda: H200)
    monkeypatch.setattr(studies, "Session", FakeSession)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(FakeSession, "entered", [])
    yield
