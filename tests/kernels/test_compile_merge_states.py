"""`merge_states` compiles for every architecture, without a GPU: few registers, no spill."""

from __future__ import annotations

import math
from unittest import mock

import cases
import torch
from compiling import AnyGPU, Layout, Recorder, measure, variants
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.kernels import merge_states as kernel

MAX_REGISTERS = 128
AXES: cases.Axes = {
    "gpu": ("h200", "a100", "a10", "l4", "b200", "rtx5090"),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "dim": (128, 64, 80, 256),
    "states": (2, 3, 8),
    "packed": (True, False),
    "sink": (False, True),
    "row_gap": (0, 8),
}


class Shape(tuple[int, ...]):
    """The shape of a Layout, as far as the launcher asks torch's."""

    def numel(self) -> int:
        return math.prod(self)

    def __getitem__(self, item: object) -> object:
        found = super().__getitem__(item)  # type: ignore[index]
        return Shape(found) if isinstance(item, slice) else found


@variants(AXES, most=8, ids=lambda v: f"{v['gpu']}-{v['states']}")
def test_compiles(values: cases.Values) -> None:
    major, minor = GPUS[values["gpu"]].capability
    lead, heads = (300,) if values["packed"] else (3, 100), 8

    def state() -> tuple[Layout, Layout]:
        out = Layout(Shape((*lead, heads, values["dim"])), values["dtype"], values["row_gap"])
        return out, Layout(Shape((*lead[:-1], heads, lead[-1])), torch.float32)

    recorder = Recorder(kernel.merge_states)
    sink = Layout(Shape((heads,)), torch.float32) if values["sink"] else None
    with (
        mock.patch.object(driver, "_active", AnyGPU(10 * major + minor)),
        mock.patch.object(kernel, "merge_states", recorder),
    ):
        kernel.launch([state() for _ in range(values["states"])], *state(), sink)
    (compiled,) = recorder.compiled
    made = measure(compiled)
    assert made.stack_bytes == 0
    assert made.registers <= MAX_REGISTERS


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[gpu].capability for gpu in AXES["gpu"]} == known
