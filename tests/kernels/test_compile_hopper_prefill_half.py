"""What `hopper_prefill_half` launches compiles without a GPU: values, then attention.

As in test_compile_hopper_prefill.py, whose steps these are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from compiling import (
    AnyGPU,
    Launched,
    Layout,
    Recorder,
    key_loops,
    layouts_in_8_bits,
    measure,
    ptxas_said,
    spilled,
    variants,
)
from triton.runtime.driver import driver

from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.kernels import records, widen
from splitkv.kernels.hopper.prefill import half as prefill_half
from splitkv.kernels.hopper.prefill import kernel as prefill
from splitkv.kernels.host import sequences, workspace
from splitkv.kernels.limits import hopper_prefill_half as limits
from splitkv.planner.registry import completed

H200 = GPUS["h200"]
UNITS = {
    "int8": "s32.s8.s8",
    "fp8": "f32.e4m3.e4m3",
}
STACK_BYTES = 40  # scalars, read once a row tile
AXES: cases.Axes = {
    "kind": ("dense", "varlen", "decode"),
    "codec": ("int8", "fp8"),
    "granularity": ("tensor", "head"),
    "q": ("bfloat16", "float16", "stored"),
    "head_dim": (64, 128),
    "heads": ((8, 8), (14, 2), (16, 1)),
    "mask": (Mask(), Mask(True), Mask(True, 128, -1, 4)),
    "softcap": (False, True),
    "place": (Contiguous(), Paged(16), Paged(256)),
    "parts": ((1, "combine"), (3, "combine"), (40, "last")),
    "shape": (0, 1, -1),
}
EVERYDAY = tuple(
    {
        **{"kind": "dense", "codec": codec, "granularity": "head", "q": q, "head_dim": 128},
        **{"heads": (8, 2), "mask": mask, "softcap": False, "place": Contiguous()},
        **{"parts": (1, "combine"), "shape": 0},
    }
    for codec, q, mask in (
        *(("int8", "bfloat16", Mask(True)), ("int8", "stored", Mask())),
        *(("fp8", "bfloat16", Mask()), ("fp8", "stored", Mask(True))),
    )
)


def valid(values: cases.Values) -> bool:
    return values.get("kind") != "dense" or not isinstance(values.get("place"), Paged)


def problem_of(values: cases.Values) -> Problem:
    kind, place, q = values["kind"], values["place"], values["q"]
    num_heads, num_kv_heads = values["heads"]
    return Problem(
        kind,
        batch=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=values["head_dim"],
        head_dim_v=values["head_dim"],
        seqlen_q=40 if kind == "decode" else 4096,
        seqlen_k=4096,
        mask=values["mask"],
        place=Ragged() if kind == "varlen" and place == Contiguous() else place,
        lengths="host" if kind == "dense" else "device",
        codec=Codec(values["codec"], values["granularity"]),
        products="half",
        q_granularity="token" if q == "stored" else "none",
        dtype="bfloat16" if q == "stored" else q,
        score=Score(values["softcap"], False),
    )


def compiled(problem: Problem, config: Config) -> Any:
    """What the launcher would launch."""
    name = "hopper_prefill_half"
    plan = completed(Plan(problem, H200, "fixed", name, config, "a test"))
    operands, partials = layouts_in_8_bits(problem), workspace.partials
    attend = Recorder(prefill_half.hopper_prefill_half, listens=True)
    values, merge = Recorder(widen.widen_rows), Launched(sequences.combine)
    with (
        mock.patch.object(driver, "_active", AnyGPU(90)),
        mock.patch.object(prefill_half, name, attend),
        mock.patch.object(widen, "widen_rows", values),
        mock.patch.object(sequences, "combine", merge),
        mock.patch.object(workspace, "partials", lambda like, *n: partials(torch.empty(0), *n)),
        mock.patch.object(workspace, "counter_for", lambda _: Layout((4,), torch.int64)),
    ):
        out, lse = records.HOPPER_PREFILL_HALF.bind(plan, operands)(operands)
    assert tuple(out.shape) == (*operands.q.shape[:-1], problem.head_dim_v)
    assert out.dtype == getattr(torch, problem.dtype) and lse is None
    assert len(values.compiled) == 1
    assert len(merge.compiled) == (config.num_splits > 1 and config.merge == "combine")
    (made,) = attend.compiled
    return made


def as_meant(values: cases.Values) -> tuple[Problem, Config, Any]:
    """What is compiled of a combination: on the units meant, in the shared memory that was said."""
    problem, (parts, merge) = problem_of(values), values["parts"]
    config = list(limits.configs(problem, H200))[values["shape"]]
    config = replace(config, num_splits=parts, merge=merge)
    made = compiled(problem, config)
    units = set(re.findall(r"wgmma\.mma_async\S*k\d+\.(\S+)", made.asm["ptx"]))
    of_v = "f16.f16" if problem.dtype == "float16" else "bf16.bf16"
    assert units == {UNITS[values["codec"]], f"f32.{of_v}"}
    q_again = problem.head_dim * config.tile_m if values["q"] == "stored" else 0
    assert made.metadata.shared <= limits.shared_bytes(problem, config) + q_again
    assert made.metadata.shared <= H200.smem_per_block
    assert "serialized" not in ptxas_said(made)
    return problem, config, made


def describe(values: cases.Values) -> str:
    names = ("kind", "codec", "q", "head_dim", "place", "parts", "shape")
    return "-".join(re.sub(r"\W+", "_", str(values[name])) for name in names)


def loops_of(problem: Problem, config: Config, made: Any) -> list[list[str]]:
    """Of each warpgroup."""
    warpgroups = config.tile_m // prefill.ROWS.value
    products = problem.head_dim // 32 + config.tile_n // 16
    loops = key_loops(made.asm["cubin"], products, warpgroups)
    assert len(loops) == warpgroups
    return loops


@variants(AXES, most=5, valid=valid, besides=EVERYDAY, newest=0, ids=describe)
def test_variants(values: cases.Values) -> None:
    as_meant(values)


@pytest.mark.parametrize("values", EVERYDAY, ids=describe)
def test_loops_are_as_meant(values: cases.Values) -> None:
    problem, config, made = as_meant(values)
    assert (config.tile_m, config.tile_n) == (192, 64)
    assert measure(made).stack_bytes <= STACK_BYTES
    for body in loops_of(problem, config, made):
        assert not any(re.search(r"\b(LDL|STL|I2F)\b", line) for line in body)
        # a wait for q . k, and one for p . v of steps that look for maxima and of those that do not
        assert sum("WARPGROUP.DEPBAR" in line for line in body) == 3


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_take_no_step_its_registers(page_size: int) -> None:
    values = {**EVERYDAY[0], "kind": "decode", "place": Paged(page_size)}
    problem = problem_of(values)
    found = limits.configs(problem, H200)
    config = next(c for c in found if (c.tile_m, c.tile_n) == (192, 64))
    for body in loops_of(problem, config, compiled(problem, config)):
        assert not spilled(body)


def test_what_is_refused() -> None:
    problem = problem_of(EVERYDAY[0])
    assert limits.unsupported(problem, H200) == []
    assert limits.unsupported(replace(problem, return_lse=True), H200) == []
    assert limits.unsupported(replace(problem, products="full"), H200) == []
    assert limits.unsupported(problem, GPUS["b200"]) == ["device sm_100: expected sm_90"]
    as_is = replace(problem, codec=AS_IS, products="widened")
    assert limits.unsupported(as_is, H200) == ["kv as_is: expected int8 or fp8"]
    odd = replace(problem, head_dim=96, products="widened", needs_grad=True)
    odd = replace(odd, codec=Codec("fp8", "token"), return_lse=True)
    assert limits.unsupported(odd, H200) == [
        "kv fp8 per token: expected scales per tensor or head",
        "products widened: expected half or full",
        "return_lse of fp8: expected none, as units keep 14 bits",
        "gradient: expected inputs that require none",
        "head_dim/head_dim_v 96/128: expected 64/64 or 128/128",
    ]
