"""The kernel for whole sequences of 8 bits compiles without a GPU: its units, no spills in loops.

As in test_compile_hopper_prefill.py, of which this takes the tools.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from compiling import AnyGPU, Layout, Recorder, key_loops, measure, ptxas_said, variants
from triton.experimental.gluon import language as gl
from triton.runtime.driver import driver

from splitkv.device import GPUS
from splitkv.kernels.hopper import prefill_quantised
from splitkv.kernels.hopper.prefill import ROWS
from splitkv.kv import AS_IS, Codec, Contiguous, Paged, Ragged
from splitkv.masks import Mask
from splitkv.plans import Config, Plan
from splitkv.problem import Operands, Problem
from splitkv.scores import Score

H200 = GPUS["h200"]
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
UNITS = {  # q . k and p . v
    ("int8", "half"): {"s32.s8.s8", "f32.f16.f16"},
    ("int8", "full"): {"s32.s8.s8"},
    ("fp8", "half"): {"f32.e4m3.e4m3", "f32.f16.f16"},
    ("fp8", "full"): {"f32.e4m3.e4m3"},
}
STACK_BYTES = 40  # scalars, read once a row tile: loops have none
AXES: cases.Axes = {
    "kind": ("dense", "varlen"),
    "units": tuple(UNITS),
    "granularity": ("tensor", "head", "token"),
    "q": ("bfloat16", "float16", "stored"),
    "head_dim": (64, 128),
    "heads": ((8, 8), (14, 2), (16, 1)),
    "mask": (Mask(), Mask(True), Mask(True, 128, -1, 4)),
    "softcap": (False, True),
    "shape": (0, 1, 2),
}


def problem_of(values: cases.Values) -> Problem:
    codec, products = values["units"]
    q = values.get("q", "stored")
    num_heads, num_kv_heads = values.get("heads", (8, 2))
    kind = values.get("kind", "dense")
    return Problem(
        kind,
        batch=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=values["head_dim"],
        head_dim_v=values["head_dim"],
        seqlen_q=4096,
        seqlen_k=4096,
        mask=values.get("mask", Mask()),
        place=Ragged() if kind == "varlen" else Contiguous(),
        codec=Codec(codec, values["granularity"]),
        products=products,
        q_granularity="token" if q == "stored" else "none",
        dtype="bfloat16" if q == "stored" else q,
        score=Score(values.get("softcap", False), False),
    )


def operands_of(problem: Problem) -> Operands:
    """Operands without memory."""
    p, stored = problem, STORED[problem.codec.name]
    lead = (p.batch, p.seqlen_q) if p.kind == "dense" else (p.batch * p.seqlen_q,)
    cu = None if p.kind == "dense" else Layout((p.batch + 1,), torch.int32)
    shapes = {"tensor": (1,), "head": (p.num_kv_heads,), "token": (*lead, p.num_kv_heads)}
    keys = torch.Size([*lead, p.num_kv_heads, p.head_dim])
    q_type, q_scale = getattr(torch, p.dtype), None
    if p.q_granularity == "token":
        q_type, q_scale = stored, Layout(torch.Size([*lead, p.num_heads]), torch.float32)
    of_keys = Layout(torch.Size(shapes[p.codec.granularity]), torch.float32)
    return Operands(
        q=Layout(torch.Size([*lead, p.num_heads, p.head_dim]), q_type),
        k=Layout(keys, stored),
        v=Layout(keys, stored),
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        q_scale=q_scale,
        k_scale=of_keys,
        v_scale=of_keys,
        softmax_scale=p.head_dim**-0.5,
        softcap=3.0 if p.score.softcap else 0.0,
    )


def compiled(problem: Problem, config: Config) -> Any:
    """What the launcher would launch."""
    name = "hopper_prefill_quantised"
    plan = Plan(problem, H200, "fixed", name, config, "a test")
    kernel = prefill_quantised.hopper_prefill_quantised
    x, recorder = operands_of(problem), Recorder(kernel, listens=True)
    with (
        mock.patch.object(driver, "_active", AnyGPU(90)),
        mock.patch.object(prefill_quantised, name, recorder),
    ):
        prefill_quantised.Launcher(plan, x).forward(x, None)
    (made,) = recorder.compiled
    return made


def describe(values: cases.Values) -> str:
    names = (str(values[name]) for name in ("kind", "units", "granularity", "mask", "shape"))
    return "-".join(re.sub(r"\W+", "_", name) for name in names)


@variants(AXES, most=6, newest=2, ids=describe)
def test_variants(values: cases.Values) -> None:
    problem = problem_of(values)
    config = list(prefill_quantised.configs(problem, H200))[values["shape"]]
    made = compiled(problem, config)
    ptx = made.asm["ptx"]
    units = set(re.findall(r"wgmma\.mma_async\S*k\d+\.(\S+)", ptx))
    expected = UNITS[values["units"]]
    if prefill_quantised.wide_type(problem) == gl.bfloat16:
        expected = expected - {"f32.f16.f16"} | {"f32.bf16.bf16"}
    assert units == expected
    transposed = "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert transposed == (problem.products == "full")
    assert made.metadata.shared <= prefill_quantised.shared_bytes(problem, config)
    assert made.metadata.shared <= H200.smem_per_block
    assert "serialized" not in ptxas_said(made)


# Each kind of products with one kind of scales, in turns.
@pytest.mark.parametrize(
    ("units", "granularity"),
    list(zip(UNITS, ("head", "token", "token", "head"), strict=True)),
    ids=str,
)
def test_loops_are_as_meant(units: tuple[str, str], granularity: str) -> None:
    problem = problem_of({"units": units, "granularity": granularity, "head_dim": 128})
    config = next(prefill_quantised.configs(problem, H200))
    made = compiled(problem, config)
    assert measure(made).stack_bytes <= STACK_BYTES
    warpgroups = config.tile_m // ROWS.value
    keys_per_product = 16 if problem.products == "half" else 32
    products = 128 // 32 + config.tile_n // keys_per_product
    loops = key_loops(made.asm["cubin"], products, warpgroups)
    assert len(loops) == warpgroups
    for body in loops:
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in body)
        first, last = [n for n, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
        under_product = sum("MUFU.EX2" in line for line in body[first:last])
        assert under_product >= ROWS.value * config.tile_n // 128  # a thread's weights


def test_what_is_refused() -> None:
    problem = problem_of({"units": ("int8", "half"), "granularity": "head", "head_dim": 128})
    assert prefill_quantised.unsupported(problem, H200) == []
    assert prefill_quantised.unsupported(replace(problem, return_lse=True), H200) == []
    odd = replace(problem, head_dim=96, codec=AS_IS, q_granularity="none", needs_grad=True)
    assert prefill_quantised.unsupported(odd, H200) == [
        "kv as_is, products half: expected int8 or fp8 with half or full",
        "gradient: expected inputs that require none",
        "head_dim/head_dim_v 96/128: expected 64/64 or 128/128",
    ]
    paged = replace(problem, place=Paged(16), codec=Codec("fp8", "head"), return_lse=True)
    assert prefill_quantised.unsupported(paged, H200)[-2:] == [
        "kv paged(16): expected no pages",
        "return_lse: expected none of fp8, as its units keep 14 bits of sums",
    ]
