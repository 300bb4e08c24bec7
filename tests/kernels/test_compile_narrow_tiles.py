"""Head dimensions below 64 on sm_90: no operand of a wgmma has rows of 32 or 64 bytes of values."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from compiling import compile_plan
from kernels.test_compile_prefill import compiled, forward

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels.host.partition import padded_dims
from splitkv.kernels.limits import backward, decode_split, prefill

H200 = GPUS["h200"]
DECODE = Problem(
    "decode", 2, 7, 1, 128, 32, 16, 700, mask=Mask(causal=True), lengths="device", return_lse=True
)
DENSE = Problem("dense", 2, 6, 3, 64, 32, 300, 700, mask=Mask(causal=True), return_lse=True)
STORED = {
    "odd rows": (AS_IS, 3),
    "fp8": (Codec("fp8", "head"), 0),
    "int8": (Codec("int8", "token"), 0),
}


def columns(ptx: str) -> set[int]:
    """Of the sums of every wgmma."""
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k", ptx)
    assert found, "expected a product by wgmma"
    return set(map(int, found))


@pytest.mark.parametrize("stored", STORED)
def test_decode_of_narrow_values(stored: str) -> None:
    codec, row_gap = STORED[stored]
    problem = replace(DECODE, codec=codec)
    plan = Plan(problem, H200, "fixed", "decode_split", Config(1, 64, 64, 4, 2), "a test")
    assert plan.config in list(decode_split.configs(problem, H200))
    assert columns(compile_plan(plan, row_gap)["decode_split"].ptx) == {64}


@pytest.mark.parametrize("stored", STORED)
def test_prefill_of_narrow_values(stored: str) -> None:
    codec, row_gap = STORED[stored]
    problem = replace(DENSE, codec=codec)
    config = Config(1, 128, 64, 4, 3)
    assert config in list(prefill.configs(problem, H200))
    made = forward(problem, H200, row_gap, config)["prefill"]
    assert columns(made.asm["ptx"]) == {64}


def test_gradients_of_narrow_tiles() -> None:
    """dv and dk sum up columns of values and keys, dq those of keys."""
    problem = replace(DENSE, head_dim=32, needs_grad=True)
    made = compiled(problem, H200, row_gap=3)
    for name in ("backward_keys", "backward_queries"):
        (kernel,) = made[name]
        assert min(columns(kernel.asm["ptx"])) >= 64, name


def widths(problem: Problem, gpu: str, rows: int, num_warps: int) -> tuple[int, int]:
    return padded_dims(problem, GPUS[gpu], rows, num_warps)


def test_columns_of_tiles() -> None:
    narrow = replace(DENSE, head_dim=16, head_dim_v=48)
    assert widths(narrow, "h200", 64, 4) == widths(narrow, "h200", 128, 8) == (64, 64)
    assert widths(replace(narrow, head_dim=72), "h200", 64, 4) == (128, 64)
    for problem, gpu, rows, num_warps in (
        (narrow, "h200", 32, 4),
        (narrow, "h200", 64, 2),
        (replace(narrow, dtype="float32"), "h200", 64, 8),
        *((narrow, gpu, 128, 8) for gpu in ("a100", "l4", "b200", "rtx5090")),
    ):
        assert widths(problem, gpu, rows, num_warps) == (16, 64)


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_what_a_config_takes(gpu: str) -> None:
    """Shared memory and registers are those of what is compiled."""
    narrow = replace(DECODE, head_dim=16, head_dim_v=16)
    wide = replace(narrow, head_dim=64, head_dim_v=64)
    given = Config(1, 64, 64, 4, 2), GPUS[gpu]
    of: Any
    for of in (decode_split.shared_bytes, decode_split.register_need, prefill.shared_bytes):
        assert (of(narrow, *given) == of(wide, *given)) == (gpu == "h200")


def test_shapes_of_gradients_are_those_of_padded_tiles() -> None:
    narrow = replace(DENSE, head_dim=16, head_dim_v=16, needs_grad=True)
    padded = replace(narrow, head_dim=56, head_dim_v=56)
    for configs in (backward.key_configs, backward.query_configs):
        assert list(configs(narrow, H200)) == list(configs(padded, H200))
