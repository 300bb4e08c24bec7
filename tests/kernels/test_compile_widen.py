"""`widen_rows` compiles for every architecture, without a GPU: 16 bytes a load and a store."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import cases
import torch
from compiling import AnyGPU, Recorder, measure, tensor, variants
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.core.masks import Mask
from splitkv.kernels import widen as kernel

MAX_REGISTERS = 128
AXES: cases.Axes = {
    "gpu": ("h200", "a100", "a10", "l4", "b200", "rtx5090"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dims": ((128, 128), (64, 64), (192, 128), (80, 80), (256, 256)),
    "stored": (torch.int8, torch.float8_e4m3fn),
    "granularity": ("head", "token"),
    "pages": (0, 16, 256),
    "mask": (Mask(True), Mask(True, 128, -1, 4)),
    "row_gap": (0, 16),
    "tensors": (2, 1),
}


@variants(AXES, most=8, ids=lambda v: f"{v['gpu']}-{v['dims'][0]}")
def test_compiles(values: cases.Values) -> None:
    major, minor = GPUS[values["gpu"]].capability
    batch, room, heads, pages = 2, 5120, 8, values["pages"]
    lead, table, lens, cu_q = (batch, room), None, None, None
    if pages:
        lead = batch * room // pages, pages
        table = tensor(batch, room // pages, of=torch.int32)
        lens, cu_q = (tensor(n, of=torch.int32) for n in (batch, batch + 1))
    scale = tensor(*(heads,) if values["granularity"] == "head" else (*lead, heads))
    tensors: list[Any] = [
        (tensor(*lead, heads, dim, of=values["stored"], row_gap=values["row_gap"]), scale)
        for dim in values["dims"][: values["tensors"]]
    ]
    recorder = Recorder(kernel.widen_rows)
    with (
        mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
        mock.patch.object(kernel, "widen_rows", recorder),
    ):
        as_bits = (major, minor) < (8, 9) and values["stored"] != torch.int8
        given: Any = {"mask": values["mask"], "table": table, "packed": pages > 0}
        widen = kernel.Widening(tensors, values["dtype"], batch, room, as_bits=as_bits, **given)
        widen(tensors, lens, table, cu_q)  # type: ignore[arg-type]
    made = measure(recorder.compiled[0])
    assert made.stack_bytes == 0
    assert made.registers <= MAX_REGISTERS
    assert re.search(r"ld\.global\S*v4|ld\.global\S*v2\.b64", made.ptx)
    assert re.search(r"st\.global\S*v4|st\.global\S*v2\.b64", made.ptx)


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[gpu].capability for gpu in AXES["gpu"]} == known
