"""Kernels that read the sink tokens of each sequence on the device."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from compiling import compile_plan
from kernels.test_compile_prefill import forward

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import FAR, Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.variants import HopperDecode
from splitkv.kernels.limits import decode_split, hopper_decode_split, prefill

DECODE = Problem(
    *("decode", 4, 32, 8, 128, 128, 1, 4096),
    mask=Mask(True, 1000, -1, FAR),
    lengths="device",
    sequence_sink_tokens=True,
)
VARLEN = Problem(
    *("varlen", 2, 8, 2, 128, 128, 300, 700),
    mask=Mask(True, 200, -1, FAR),
    place=Ragged(),
    lengths="device",
    sequence_sink_tokens=True,
)
EVERY = ("a100", "a10", "l4", "h200", "b200", "rtx5090")
# These take turns.
MASKS = DECODE.mask, Mask(True, chunk=512, sink_tokens=8)
MERGES = "combine", "cluster"
CODECS = AS_IS, Codec("int8", "token")
# Packed rows of 16, 32 and 64, and pages that a producer warp copies or threads gather.
ON_HOPPER: dict[str, tuple[str, dict[str, Any]]] = {
    "rows_16": ("tma", {"place": Contiguous()}),
    "rows_16_of_pages": ("producer_warp", {"place": Paged(16)}),
    "rows_16_gathered": ("gather", {"place": Paged(16), "codec": Codec("int8", "token")}),
    "rows_32": ("tma", {"num_heads": 64, "seqlen_q": 4}),
    "rows_64": ("tma", {"num_heads": 128, "seqlen_q": 4, "codec": Codec("fp8", "head")}),
}


@pytest.mark.parametrize(("gpu", "mask"), list(zip(EVERY, cycle(MASKS), strict=False)), ids=str)
def test_decode(gpu: str, mask: Mask) -> None:
    problem, config = replace(DECODE, mask=mask), Config(4, 16, 64, 4, 2)
    plan = Plan(problem, GPUS[gpu], "fixed", "decode_split", config, "a test")
    assert config.shape in list(decode_split.configs(problem, GPUS[gpu]))
    assert compile_plan(plan, besides=("combine",))["decode_split"].stack_bytes <= 8


@pytest.mark.parametrize(("name", "merge"), list(zip(ON_HOPPER, cycle(MERGES), strict=False)))
def test_decode_on_hopper(name: str, merge: Any) -> None:
    load, changes = ON_HOPPER[name]
    problem, device = replace(DECODE, **changes), GPUS["h200"]
    rows = hopper_decode_split.rows_of_tile(problem)[-1]
    config = Config(4, rows, 64, 4, 2, merge=merge)
    fitting = [
        x
        for x in hopper_decode_split.variants(problem, device, config)
        if isinstance(x, HopperDecode) and x.load == load
    ]
    config = replace(config, variant=fitting[0])
    plan = Plan(problem, device, "fixed", "hopper_decode_split", config, "a test")
    made = compile_plan(plan, besides=("combine",))["hopper_decode_split"]
    assert made.stack_bytes == 0


@pytest.mark.parametrize(("gpu", "codec"), list(zip(EVERY, cycle(CODECS), strict=False)), ids=str)
def test_prefill(gpu: str, codec: Codec) -> None:
    place = Ragged() if codec == AS_IS else Paged(16)
    problem, config = replace(VARLEN, codec=codec, place=place), Config(2, 64, 32, 4, 2)
    assert config.shape in list(prefill.configs(problem, GPUS[gpu]))
    assert forward(problem, GPUS[gpu], 0, config)
