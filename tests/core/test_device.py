"""The device table, and Devices from what torch says of a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from splitkv.core import device
from splitkv.core.device import CPU, DEFAULT_BANDWIDTH, GPUS, Device, KiB, MiB

KEYS = (
    "a100",
    "a10",
    "l4",
    "l40s",
    "rtx4090",
    "rtx5090",
    "h100",
    "h100_pcie",
    "h20",
    "h200",
    "gh200",
    "b200",
)


@pytest.fixture(autouse=True)
def fresh_caches():
    device.cpu.cache_clear()
    device._cuda.cache_clear()
    yield
    device.cpu.cache_clear()
    device._cuda.cache_clear()


def properties(**changed: object) -> SimpleNamespace:
    """What torch reports on an H200."""
    facts = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "shared_memory_per_multiprocessor": 228 * KiB,
        "shared_memory_per_block_optin": 227 * KiB,
        "L2_cache_size": 60 * MiB,
        "memory_clock_rate": 3_201_000,
        "memory_bus_width": 6144,
    }
    return SimpleNamespace(**{k: v for k, v in (facts | changed).items() if v is not None})


def test_the_table_holds_the_known_gpus():
    assert tuple(GPUS) == KEYS
    assert len({gpu.name for gpu in GPUS.values()}) == len(GPUS)


@pytest.mark.parametrize("key", KEYS)
def test_rows_are_plausible(key: str):
    gpu = GPUS[key]
    assert gpu.kind == "cuda"
    assert gpu.capability >= (8, 0)
    assert 50 <= gpu.num_sms <= 200
    assert gpu.smem_per_sm - gpu.smem_per_block == KiB
    assert 6 * MiB <= gpu.l2_bytes <= 256 * MiB
    assert 0.3e12 <= gpu.bandwidth <= 8e12


@pytest.mark.parametrize(
    ("key", "sms", "arch", "smem_kib", "l2_mib", "gb_a_second"),
    [
        ("a100", 108, "sm_80", 164, 40, 2039),
        ("l4", 58, "sm_89", 100, 48, 300),
        ("rtx5090", 170, "sm_120", 100, 96, 1792),
        ("h100", 132, "sm_90", 228, 50, 3350),
        ("h100_pcie", 114, "sm_90", 228, 50, 2000),
        ("h20", 78, "sm_90", 228, 60, 4000),
        ("h200", 132, "sm_90", 228, 60, 4800),
        ("b200", 148, "sm_100", 228, 126, 8000),
    ],
)
def test_rows(key: str, sms: int, arch: str, smem_kib: int, l2_mib: int, gb_a_second: int):
    gpu = Device.named(key)
    assert (gpu.num_sms, gpu.arch) == (sms, arch)
    assert (gpu.smem_per_sm, gpu.l2_bytes) == (smem_kib * KiB, l2_mib * MiB)
    assert gpu.bandwidth == pytest.approx(gb_a_second * 1e9)


def test_named_in_any_case():
    assert Device.named("H200") is GPUS["h200"]


def test_named_says_what_it_knows():
    with pytest.raises(ValueError) as raised:
        Device.named("tpu")
    assert str(raised.value) == (
        "gpu: expected one of a100, a10, l4, l40s, rtx4090, rtx5090, h100, h100_pcie, h20, h200, "
        "gh200, b200, got tpu"
    )


def test_devices_print_as_one_line():
    assert str(GPUS["h200"]) == "NVIDIA H200 (sm_90, 132 SMs)"
    assert str(CPU) == "CPU (1 cores)"


def test_a_known_gpu_equals_its_row():
    assert device.from_properties(properties()) == GPUS["h200"]


def test_a_part_of_a_gpu_is_what_torch_says():
    """A slice of an H200 has another name: its SMs and bandwidth are not the table's."""
    part = device.from_properties(
        properties(name="NVIDIA H200 MIG 1g.18gb", multi_processor_count=16, memory_bus_width=768)
    )
    assert part.num_sms == 16
    assert part.bandwidth == pytest.approx(3.201e9 * 2 * 768 / 8)


def test_torch_that_tells_less():
    old = device.from_properties(
        properties(
            name="NVIDIA New",
            shared_memory_per_block_optin=None,
            memory_clock_rate=None,
            memory_bus_width=None,
        )
    )
    assert old.smem_per_block == 227 * KiB
    assert old.bandwidth == DEFAULT_BANDWIDTH


def test_current_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    here = device.current()
    assert (here.kind, here.num_sms, here.arch) == ("cpu", 7, "cpu")
    assert device.current() is here
    assert device.current(3) is here


def test_current_is_asked_once_for_each_gpu(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def told(index: int) -> SimpleNamespace:
        asked.append(index)
        return properties(multi_processor_count=100 + index)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", told)
    assert device.current().num_sms == 101
    assert device.current(0).num_sms == 100
    assert device.current(1) is device.current()
    assert asked == [1, 0]
