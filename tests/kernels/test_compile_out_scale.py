"""Kernels that store their output in e4m3, for GPUs with and without an instruction for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from compiling import compile_plan
from kernels.test_compile_prefill import forward
from step_compiling import compile_step

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import SCHEDULED, Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.variants import HopperDecode
from splitkv.kernels.limits import decode_split, hopper_decode_split, prefill
from splitkv.planner.registry import completed

DECODE = Problem(
    *("decode", 4, 32, 8, 128, 128, 1, 4096),
    mask=Mask(causal=True),
    place=Paged(16),
    lengths="device",
    out_scale=True,
)
VARLEN = Problem(
    *("varlen", 2, 8, 2, 128, 128, 300, 700),
    mask=Mask(causal=True),
    place=Ragged(),
    lengths="device",
    out_scale=True,
)
EVERY = ("a100", "a10", "l4", "h200", "b200", "rtx5090")


def test_every_architecture_is_compiled_for() -> None:
    known = {gpu.capability for gpu in GPUS.values()}
    assert {GPUS[name].capability for name in EVERY} == known


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("gpu", EVERY)
def test_decode(gpu: str, parts: int) -> None:
    plan = Plan(DECODE, GPUS[gpu], "fixed", "decode_split", Config(parts, 16, 64, 4, 2), "a test")
    assert plan.config.shape in list(decode_split.configs(DECODE, GPUS[gpu]))
    made = compile_plan(plan, besides=("decode_split",) if parts > 1 else ())
    assert sorted(made) == (["combine", "decode_split"] if parts > 1 else ["decode_split"])
    stores = made["combine" if parts > 1 else "decode_split"]
    # the same plan spills two registers without an out_scale, too, on an H200
    assert stores.stack_bytes <= 8 and "st.global" in stores.ptx


@pytest.mark.parametrize("kernel", ["decode_split", "hopper_decode_split"])
@pytest.mark.parametrize("schedule", SCHEDULED)
def test_by_a_schedule_of_the_step(schedule: Any, kernel: str) -> None:
    config = Config(1, 16, 64, 4, 2, schedule=schedule, programs=132)
    plan = completed(Plan(DECODE, GPUS["h200"], "fixed", kernel, config, "a test"))
    for made in compile_step(plan).values():
        assert made.stack_bytes == 0


@pytest.mark.parametrize(
    ("gpu", "merge"), [*((gpu, "last") for gpu in EVERY), ("a100", "combine"), ("h200", "combine")]
)
def test_prefill(gpu: str, merge: Any) -> None:
    """What stores the output; where that is `combine`, `test_decode` has it of other GPUs."""
    config = Config(2, 64, 32, 4, 2, merge=merge)
    assert config.shape in list(prefill.configs(VARLEN, GPUS[gpu]))
    forward(VARLEN, GPUS[gpu], 0, config, merged=True)


@pytest.mark.parametrize("codec", [AS_IS, Codec("fp8", "head"), Codec("int8", "token")], ids=str)
@pytest.mark.parametrize(
    ("group", "seqlen_q", "load"),
    [(4, 1, "tma"), (4, 1, "producer_warp"), (8, 4, "tma"), (16, 4, "tma")],
)
def test_decode_on_hopper(group: int, seqlen_q: int, load: Any, codec: Codec) -> None:
    """Where a cluster merges its parts; parts that `combine` merges are stored as ever."""
    problem = replace(DECODE, num_heads=8 * group, seqlen_q=seqlen_q, codec=codec)
    device, tile_m = GPUS["h200"], hopper_decode_split.rows_of_tile(problem)[0]
    config = Config(4, tile_m, 64, 4, 2, merge="cluster")
    fitting = [
        x
        for x in hopper_decode_split.variants(problem, device, config)
        if isinstance(x, HopperDecode) and x.load == load
    ]
    if not fitting:
        return
    config = replace(config, variant=fitting[0])
    plan = Plan(problem, device, "fixed", "hopper_decode_split", config, "a test")
    assert compile_plan(plan)["hopper_decode_split"].stack_bytes == 0
