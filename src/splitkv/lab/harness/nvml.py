"""The clocks of the GPU by NVML, which is asked without starting a process, as nvidia-smi is."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
KINDS = {"sm_mhz": 1, "memory_mhz": 2}  # NVML_CLOCK_SM, NVML_CLOCK_MEM


@cache
def library() -> Any:
    """NVML, initialised; None where it is not here or does not start."""
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return found if found.nvmlInit_v2() == 0 else None


@cache
def handle(uuid: str) -> ctypes.c_void_p | None:
    """NVML's handle of the GPU, None where it knows of none."""
    nvml, device = library(), ctypes.c_void_p()
    if nvml is None:
        return None
    name = ctypes.c_char_p(f"GPU-{uuid}".encode())
    return device if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(device)) == 0 else None


def clocks() -> dict[str, int] | None:
    """The clocks of the GPU in use in MHz, None where NVML cannot tell."""
    device = handle(str(torch.cuda.get_device_properties().uuid))
    if device is None:
        return None
    found, mhz = {}, ctypes.c_uint()
    for name, kind in KINDS.items():
        if library().nvmlDeviceGetClockInfo(device, ctypes.c_int(kind), ctypes.byref(mhz)) != 0:
            return None
        found[name] = mhz.value
    return found
