"""Tensors whose heads are 2^31 elements apart, in Triton's interpreter: offsets are 64 bits wide.

Their memory is mapped, and there only where something is written: what lies 2^32 elements below a
head, where an offset of 32 bits would end, is zeros.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.kernels.limits import decode_split as limits
from splitkv.testing import assert_close, bind, expected, make_operands

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
APART = 1 << 30  # elements between heads: two of them are further apart than an int32 counts
UNCOMMITTED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
DECODE = Problem("decode", 2, 3, 3, 32, 32, 2, 70, mask=Mask(True), lengths="device")
CONFIGS = {
    "even 1": Config(tile_n=16),
    "even 3": Config(3, tile_n=16),
    "ranges": Config(tile_n=16, schedule="ranges", programs=5),
    "proportional": Config(tile_n=16, schedule="proportional", programs=7),
}


@pytest.fixture(autouse=True)
def tensors_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter would write the memory of tensors on the CPU over itself, all of it."""
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *args: None)
    yield


def far_heads(x: Tensor) -> Tensor:
    """Copies x [batch, tokens, heads, ..] to where heads are APART."""
    room = mmap.mmap(-1, (4 * APART + 4096) * x.element_size(), flags=UNCOMMITTED)
    row = x[0, 0, 0].numel()
    strides = x.shape[1] * row, row, APART, *((1,) * (x.dim() - 3))
    memory = torch.frombuffer(room, dtype=x.dtype)
    return memory.as_strided(x.shape, strides, 2 * APART).copy_(x)


def plan_of(problem: Problem, schedule: str) -> Plan:
    config = replace(CONFIGS[schedule], tile_m=limits.tile_m(problem))
    return Plan(problem, GPUS["h200"], "fixed", "decode_split", config, "a test")


@pytest.mark.parametrize("schedule", CONFIGS)
def test_queries_and_output(schedule: str) -> None:
    call: dict[str, Any] = make_operands(DECODE, lengths=(70, 33))
    out = far_heads(torch.full_like(call["q"], math.nan))
    operands = bind(DECODE, call | {"q": far_heads(call["q"]), "out": out})
    assert records.DECODE_SPLIT.launch(operands, plan_of(DECODE, schedule))[0] is out
    ref, _ = expected(DECODE, call)
    assert_close(out, ref, expected(DECODE, call, upcast=False)[0])


@pytest.mark.parametrize("schedule", ["even 1", "ranges"])
def test_scales_of_keys(schedule: str) -> None:
    problem = replace(DECODE, codec=Codec("int8", "token"))
    call: dict[str, Any] = make_operands(problem, lengths=(70, 33))
    scales = {name: far_heads(call[name]) for name in ("k_scale", "v_scale")}
    out, _ = records.DECODE_SPLIT.launch(bind(problem, call | scales), plan_of(problem, schedule))
    ref, _ = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
