"""`quantize` compiles for every architecture, without a GPU: 16 bytes a load and a store."""

from __future__ import annotations

import re
from unittest import mock

import cases
import torch
from compiling import AnyGPU, Recorder, measure, tensor, variants
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.kernels import quantize as kernel

KERNELS = ("find_largest", "quantize_rows")
MAX_REGISTERS = 96
AXES: cases.Axes = {
    "gpu": ("h200", "a100", "a10", "l4", "b200", "rtx5090"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dim": (64, 80, 128, 256, 576),
    "stored": (torch.int8, torch.float8_e4m3fn),
    "granularity": ("tensor", "head", "token"),
    "mean": (False, True),
    "row_gap": (0, 16),
}


@variants(AXES, most=10, ids=lambda v: f"{v['gpu']}-{v['dim']}")
def test_compiles(values: cases.Values) -> None:
    major, minor = GPUS[values["gpu"]].capability
    dim, heads, granularity = values["dim"], 8, values["granularity"]
    x = tensor(2, 1000, heads, dim, of=values["dtype"], row_gap=values["row_gap"])
    stored = tensor(2, 1000, heads, dim, of=values["stored"])
    shape = {"tensor": (1,), "head": (heads,), "token": (2, 1000, heads)}[granularity]
    recorders = {name: Recorder(getattr(kernel, name)) for name in KERNELS}
    with (
        mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
        mock.patch.multiple(kernel, **recorders),
        mock.patch.object(torch, "zeros_like", lambda x: x),
    ):
        mean = tensor(heads, dim) if values["mean"] else None
        kernel.launch(x, mean, granularity, stored, tensor(*shape))
    compiled = [measure(made) for name in KERNELS for made in recorders[name].compiled]
    assert len(compiled) == 1 + (granularity != "token")
    for made in compiled:
        assert made.stack_bytes == 0
        assert made.registers <= MAX_REGISTERS
        assert re.search(r"ld\.global\S*v4|ld\.global\S*v2\.b64", made.ptx)
    assert re.search(r"st\.global\S*v4|st\.global\S*v2\.b64", compiled[-1].ptx)


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[gpu].capability for gpu in AXES["gpu"]} == known
