"""GPUs, present or not, as policies know them: SMs, memory, bandwidth, capability."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from splitkv.core.values import Value


@dataclass(frozen=True, slots=True)
class Device(Value):
    """Facts of one device. Bandwidth in bytes a second, as the data sheet says unless measured.

    name          what CUDA reports: a GPU that is here finds its row in `GPUS` by it
    kind          cuda or cpu
    capability    compute capability, (9, 0) for Hopper; (0, 0) for a CPU
    num_sms       streaming multiprocessors (a CPU: cores)
    smem_per_sm   bytes of shared memory an SM; smem_per_block: the most that one block may use
    """

    name: str
    kind: str
    capability: tuple[int, int]
    num_sms: int
    smem_per_sm: int
    smem_per_block: int
    l2_bytes: int
    bandwidth: float

    @property
    def arch(self) -> str:
        return "cpu" if self.kind == "cpu" else f"sm_{self.capability[0]}{self.capability[1]}"

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"{self.name} ({self.num_sms} cores)"
        return f"{self.name} ({self.arch}, {self.num_sms} SMs)"

    @staticmethod
    def named(gpu: str) -> Device:
        """The row of `GPUS` with this key, in any case: `Device.named("h200")`."""
        try:
            return GPUS[gpu.lower()]
        except (AttributeError, KeyError):
            raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, got {gpu}") from None


KiB, MiB = 1024, 1024 * 1024
REGISTERS_PER_SM = 65536  # of 32 bits, of every GPU since sm_30

# Shared memory (an SM, the most for a block after opting in) by compute capability, from the
# technical specifications of the CUDA programming guide.
SHARED_MEMORY = {
    (8, 0): (164 * KiB, 163 * KiB),
    (8, 6): (100 * KiB, 99 * KiB),
    (8, 9): (100 * KiB, 99 * KiB),
    (9, 0): (228 * KiB, 227 * KiB),
    (10, 0): (228 * KiB, 227 * KiB),
    (12, 0): (100 * KiB, 99 * KiB),
}


def _gpu(
    name: str, capability: tuple[int, int], num_sms: int, l2_mib: int, bandwidth: float
) -> Device:
    smem_per_sm, smem_per_block = SHARED_MEMORY[capability]
    return Device(
        name, "cuda", capability, num_sms, smem_per_sm, smem_per_block, l2_mib * MiB, bandwidth
    )


# SMs, L2 and bandwidth from the vendor's data sheets and architecture papers. One name, one
# bandwidth: variants with other memory (A100 40 GB, GH200 with HBM3e) are not in the table.
GPUS: dict[str, Device] = {
    "a100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 2.039e12),
    "a10": _gpu("NVIDIA A10", (8, 6), 72, 6, 600e9),
    "l4": _gpu("NVIDIA L4", (8, 9), 58, 48, 300e9),
    "l40s": _gpu("NVIDIA L40S", (8, 9), 142, 96, 864e9),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 1.008e12),
    "rtx5090": _gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 1.792e12),
    "h100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 3.35e12),
    "h100_pcie": _gpu("NVIDIA H100 PCIe", (9, 0), 114, 50, 2.0e12),
    "h20": _gpu("NVIDIA H20", (9, 0), 78, 60, 4.0e12),
    "h200": _gpu("NVIDIA H200", (9, 0), 132, 60, 4.8e12),
    "gh200": _gpu("NVIDIA GH200 480GB", (9, 0), 132, 60, 4.0e12),
    "b200": _gpu("NVIDIA B200", (10, 0), 148, 126, 8.0e12),
}

CPU = Device("CPU", "cpu", (0, 0), 1, 0, 0, 0, 5e10)

DEFAULT_BANDWIDTH = 1e12  # for a GPU that is in no table and does not tell its memory clock


@cache
def cpu() -> Device:
    """This machine's processor."""
    return replace(CPU, num_sms=os.cpu_count() or 1)


def current(index: int | None = None) -> Device:
    """The GPU with this index (None: torch's current one), or the CPU where torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        return cpu()
    return _cuda(torch.cuda.current_device() if index is None else index)


@cache
def _cuda(index: int) -> Device:
    import torch

    return from_properties(torch.cuda.get_device_properties(index))


def from_properties(properties: Any) -> Device:
    """A Device from torch's CUDA device properties.

    The bandwidth is that of the table where the name is in it, else twice the memory clock times
    the bus width, else `DEFAULT_BANDWIDTH`.
    """
    capability = (properties.major, properties.minor)
    smem_per_sm = properties.shared_memory_per_multiprocessor
    known = next((gpu for gpu in GPUS.values() if gpu.name == properties.name), None)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    estimate = 2 * kilohertz * 1e3 * bus_bits / 8
    return Device(
        name=properties.name,
        kind="cuda",
        capability=capability,
        num_sms=properties.multi_processor_count,
        smem_per_sm=smem_per_sm,
        # CUDA keeps 1 KiB of each SM's shared memory for itself.
        smem_per_block=getattr(
            properties, "shared_memory_per_block_optin", max(0, smem_per_sm - KiB)
        ),
        l2_bytes=properties.L2_cache_size,
        bandwidth=known.bandwidth if known else estimate or DEFAULT_BANDWIDTH,
    )
