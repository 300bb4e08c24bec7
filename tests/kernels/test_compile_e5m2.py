"""Kernels that read and write e5m2, for GPUs with and without an instruction for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from compiling import compile_plan
from kernels.test_compile_prefill import forward

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.variants import HopperDecode
from splitkv.kernels.limits import decode_split, hopper_decode_split, prefill

DECODE = Problem(
    "decode", 4, 32, 8, 128, 128, 1, 4096, mask=Mask(causal=True), place=Paged(16), lengths="device"
)
DENSE = Problem("dense", 2, 8, 2, 128, 128, 300, 700, mask=Mask(causal=True))
BY_HEAD, BY_TOKEN = Codec("fp8_e5m2", "head"), Codec("fp8_e5m2", "token")


@pytest.mark.parametrize("codec", [BY_HEAD, BY_TOKEN], ids=str)
@pytest.mark.parametrize("gpu", ["a100", "l4", "h200", "rtx5090"])
def test_decode(gpu: str, codec: Codec) -> None:
    problem, device = replace(DECODE, codec=codec), GPUS[gpu]
    plan = Plan(problem, device, "fixed", "decode_split", Config(4, 16, 64, 4, 2), "a test")
    assert plan.config.shape in list(decode_split.configs(problem, device))
    made = compile_plan(plan, besides=("combine",))["decode_split"]
    assert made.stack_bytes == 0


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_prefill(gpu: str) -> None:
    problem, config = replace(DENSE, codec=BY_HEAD), Config(1, 64, 64, 4, 2)
    assert config in list(prefill.configs(problem, GPUS[gpu]))
    made = forward(problem, GPUS[gpu], 0, config)["prefill"]
    assert "e5m2x2" in made.asm["ptx"] or gpu == "a100"


@pytest.mark.parametrize("codec", [BY_HEAD, BY_TOKEN], ids=str)
@pytest.mark.parametrize(
    ("group", "seqlen_q", "load"),
    [(4, 1, "tma"), (4, 1, "producer_warp"), (8, 4, "tma"), (16, 4, "tma")],
)
def test_decode_on_hopper(group: int, seqlen_q: int, load: Any, codec: Codec) -> None:
    """Bytes become the first of fp16: no conversion but that of the weights."""
    changed: dict[str, Any] = {"num_heads": 8 * group, "seqlen_q": seqlen_q, "codec": codec}
    problem, device = replace(DECODE, **changed), GPUS["h200"]
    tile_m = hopper_decode_split.rows_of_tile(problem)[0]
    scales = "none" if codec == BY_HEAD else "per_tile"
    variant = HopperDecode(load=load, key_scales=scales)
    config = Config(4, tile_m, 64, 4, 2, variant=variant)
    plan = Plan(problem, device, "fixed", "hopper_decode_split", config, "a test")
    made = compile_plan(plan, besides=("combine",))["hopper_decode_split"]
    assert made.stack_bytes == 0 and "cvt.rn.f16x2.e" not in made.ptx
