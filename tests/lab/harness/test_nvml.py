"""Clocks by NVML, on a library that is not there, and on one that answers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from splitkv.lab.harness import nvml, timing


class Answering:
    """NVML as far as it is called: one GPU, whose clocks are known."""

    def __init__(self, uuid: str, start: int = 0) -> None:
        self.uuid, self.start, self.inits = uuid, start, 0

    def nvmlInit_v2(self) -> int:
        self.inits += 1
        return self.start

    def nvmlDeviceGetHandleByUUID(self, name: Any, device: Any) -> int:
        if name.value != f"GPU-{self.uuid}".encode():
            return 6
        device._obj.value = 42
        return 0

    def nvmlDeviceGetClockInfo(self, device: Any, kind: Any, mhz: Any) -> int:
        if device.value != 42 or kind.value not in (1, 2):
            return 2
        mhz._obj.value = {1: 1980, 2: 3201}[kind.value]
        return 0


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    properties = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    nvml.library.cache_clear()
    nvml.handle.cache_clear()
    yield
    nvml.library.cache_clear()
    nvml.handle.cache_clear()


def test_it_is_started_once_and_asked_for_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Answering("abc")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: there)
    monkeypatch.setattr(timing, "nvidia_smi", lambda *_: pytest.fail("a process was started"))
    for _ in range(2):
        assert timing.clocks() == {"sm_mhz": 1980, "memory_mhz": 3201}
    assert there.inits == 1


@pytest.mark.parametrize("there", [Answering("other"), Answering("abc", start=9), None])
def test_where_it_cannot_tell_nvidia_smi_does(
    there: Answering | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Answering:
        if there is None:
            raise OSError(name)
        return there

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(timing, "nvidia_smi", lambda *_: ["345", "3201"])
    assert nvml.clocks() is None
    assert timing.clocks() == {"sm_mhz": 345, "memory_mhz": 3201}
