"""The kernel for whole sequences of 8 bits compiles without a GPU: its units, no spills in loops.

As in test_compile_hopper_prefill.py, of which this takes the tools.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle
from typing import Any
from unittest import mock

import cases
import pytest
import torch
from compiling import (
    AnyGPU,
    Launched,
    Layout,
    Reached,
    Recorder,
    compiling_up_to,
    instructions,
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
from splitkv.kernels import records
from splitkv.kernels.hopper.prefill import launch
from splitkv.kernels.hopper.prefill import quantised as prefill_quantised
from splitkv.kernels.hopper.prefill.load import ROWS
from splitkv.kernels.hopper.primitives.named_barriers import FIRST, NEVER
from splitkv.kernels.host import sequences, workspace
from splitkv.kernels.limits import hopper_prefill_quantised as limits
from splitkv.kernels.tile.merge import parts_a_step, rows_a_step
from splitkv.planner.policies.shared import clusters
from splitkv.planner.registry import completed

H200 = GPUS["h200"]
UNITS = {  # q . k and p . v
    ("int8", "widened"): {"f32.f16.f16"},
    ("int8", "half"): {"s32.s8.s8", "f32.f16.f16"},
    ("int8", "full"): {"s32.s8.s8"},
    ("fp8", "widened"): {"f32.f16.f16"},
    ("fp8", "half"): {"f32.e4m3.e4m3", "f32.f16.f16"},
    ("fp8", "full"): {"f32.e4m3.e4m3"},
}
OF_Q = {units: 2 if units[1] == "widened" else 1 for units in UNITS}  # bytes of an element
STACK_BYTES = 80  # scalars, read once a row tile: what a loop mostly does has none
AXES: cases.Axes = {
    "kind": ("dense", "varlen", "decode"),
    "units": tuple(UNITS),
    "granularity": ("tensor", "head", "token"),
    "q": ("bfloat16", "float16", "stored"),
    "head_dim": (64, 128),
    "heads": ((8, 8), (14, 2), (16, 1)),
    "mask": (Mask(), Mask(True), Mask(True, 128, -1, 4)),
    "softcap": (False, True),
    "place": (Contiguous(), Paged(16), Paged(256)),
    "parts": (1, 3),
    "shape": (0, 1, 2),
}
# Each kind of products with one kind of scales, in turns.
EVERYDAY = tuple(
    {
        **{"kind": "dense", "units": units, "granularity": granularity, "q": "stored"},
        **{"head_dim": 128, "heads": (8, 2), "mask": Mask(), "softcap": False},
        **{"place": Contiguous(), "parts": 1, "shape": 0},
    }
    for units, granularity in zip(UNITS, cycle(("head", "token")), strict=False)
)


def valid(values: cases.Values) -> bool:
    return values.get("kind") != "dense" or not isinstance(values.get("place"), Paged)


def problem_of(values: cases.Values) -> Problem:
    codec, products = values["units"]
    q = values.get("q", "stored")
    num_heads, num_kv_heads = values.get("heads", (8, 2))
    kind, place = values.get("kind", "dense"), values.get("place", Contiguous())
    return Problem(
        kind,
        batch=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=values["head_dim"],
        head_dim_v=values["head_dim"],
        seqlen_q=3 if kind == "decode" else 4096,
        seqlen_k=4096,
        mask=values.get("mask", Mask()),
        place=Ragged() if kind == "varlen" and place == Contiguous() else place,
        lengths="host" if kind == "dense" else "device",
        codec=Codec(codec, values["granularity"]),
        products=products,
        q_granularity="token" if q == "stored" else "none",
        dtype="bfloat16" if q == "stored" else q,
        score=Score(values.get("softcap", False), False),
    )


def compiled(problem: Problem, config: Config) -> Any:
    """What the launcher would launch."""
    name = "hopper_prefill_quantised"
    plan = completed(Plan(problem, H200, "fixed", name, config, "a test"))
    kernel = prefill_quantised.hopper_prefill_quantised
    x, recorder = layouts_in_8_bits(problem), Recorder(kernel, listens=True)
    merge, partials = Launched(sequences.combine), workspace.partials
    with (
        mock.patch.object(driver, "_active", AnyGPU(90)),
        mock.patch.object(prefill_quantised, name, recorder),
        mock.patch.object(sequences, "combine", merge),
        mock.patch.object(workspace, "partials", lambda like, *n: partials(torch.empty(0), *n)),
        mock.patch.object(workspace, "counter_for", lambda _: Layout((4,), torch.int64)),
        mock.patch.object(launch, "in_clusters", mock.MagicMock()),
        mock.patch.object(launch.HopperLauncher, "keep", mock.Mock(return_value=None)),
    ):
        prefill_quantised.bind(plan, x).forward(x, None)
    assert len(merge.compiled) == (config.num_splits > 1 and config.merge == "combine")
    (made,) = recorder.compiled
    return made


def describe(values: cases.Values) -> str:
    names = ("kind", "units", "granularity", "place", "parts", "shape")
    return "-".join(re.sub(r"\W+", "_", str(values[name])) for name in names)


def as_meant(values: cases.Values) -> tuple[Problem, Config, Any]:
    """What is compiled of a combination: on the units meant, in the shared memory that was said."""
    problem = problem_of(values)
    config = list(limits.configs(problem, H200))[values["shape"]]
    config = replace(config, num_splits=values["parts"])
    made = compiled(problem, config)
    ptx = made.asm["ptx"]
    units = set(re.findall(r"wgmma\.mma_async\S*k\d+\.(\S+)", ptx))
    assert units == UNITS[values["units"]]
    transposed = "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert transposed == (problem.products == "full")
    # and perhaps a second row tile of q
    said = limits.shared_bytes(problem, config)
    assert made.metadata.shared <= said + config.tile_m * problem.head_dim * OF_Q[values["units"]]
    assert made.metadata.shared <= H200.smem_per_block
    assert "serialized" not in ptxas_said(made)
    return problem, config, made


@variants(AXES, most=4, valid=valid, besides=EVERYDAY, newest=2, ids=describe)
def test_variants(values: cases.Values) -> None:
    as_meant(values)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("units", UNITS, ids=str)
def test_parts_that_are_merged_are_as_wide_as_values(units: tuple[str, str], head_dim: int) -> None:
    """Whatever the keys of a tile, which are what a tile of transposed values is as wide as."""
    values = {"kind": "varlen", "units": units, "granularity": "token", "q": "bfloat16"}
    problem = problem_of({**values, "head_dim": head_dim, "place": Paged(16)})
    found = limits.configs(problem, H200)
    config = next(config for config in found if config.tile_n == 192 - head_dim)
    with pytest.raises(Reached) as code, compiling_up_to("ttgir"):
        compiled(problem, replace(config, num_splits=3, merge="last"))
    step = parts_a_step(3, head_dim)
    rows = rows_a_step(step, head_dim, config.tile_m // 16)
    loads = set(re.findall(rf"tt\.load.*tensor<{rows}x{step}x(\d+)x", str(code.value)))
    assert loads == {str(head_dim)}


@pytest.mark.parametrize("values", EVERYDAY, ids=describe)
def test_loops_are_as_meant(values: cases.Values) -> None:
    maxima_are_exceptions(*as_meant(values))


# Few rows of many keys.
@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
@pytest.mark.parametrize("units", [("int8", "half"), ("fp8", "widened")], ids=str)
def test_loops_of_few_rows_are_as_meant(units: tuple[str, str], place: Any) -> None:
    values = {"kind": "decode", "units": units, "granularity": "head", "place": place}
    problem = problem_of({**values, "q": "bfloat16", "head_dim": 128, "heads": (16, 1)})
    found = (c for c in limits.configs(problem, H200) if c.tile_m == 64)
    config = replace(next(found), num_splits=66)
    maxima_are_exceptions(problem, config, compiled(problem, config))


@pytest.mark.parametrize("kind", ["dense", "decode"])
def test_programs_that_go_through_several_sequences(kind: str) -> None:
    values = {"kind": kind, "units": ("int8", "half"), "granularity": "head", "q": "bfloat16"}
    problem = problem_of({**values, "head_dim": 128, "heads": (16, 2)})
    problem = replace(problem, batch=300, seqlen_q=3)
    config = next(c for c in limits.configs(problem, H200) if c.tile_m == 64 and c.programs)
    maxima_are_exceptions(problem, config, compiled(problem, config))


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
@pytest.mark.parametrize("units", [("int8", "half"), ("fp8", "widened")], ids=str)
def test_two_parts_are_a_cluster(units: tuple[str, str], place: Any) -> None:
    """Clusters, of which all warps are told that they run. No barrier of the cluster waits for
    sums: they tell one of the program that they are sent to, from both branches."""
    values = {"kind": "decode", "units": units, "granularity": "head", "place": place}
    problem = problem_of({**values, "q": "bfloat16", "head_dim": 128, "heads": (16, 1)})
    found = list(clusters(records.HOPPER_PREFILL_QUANTISED, problem, H200))
    for config, made in zip(found, [compiled(problem, config) for config in found], strict=True):
        ptx = made.asm["ptx"]
        # those that multiply, that make ready, that ask, and two roles of what is left of 12 warps
        assert ptx.count("barrier.cluster.arrive.relaxed") == 5
        assert ptx.count("barrier.cluster.arrive") == 5
        assert ptx.count("barrier.cluster.wait") == 1
        half = ROWS.value * problem.head_dim // 128 // 2
        assert ptx.count("st.async") == 2 * (half // 4 + 1)
        maxima_are_exceptions(problem, config, made)
        # descriptors are in uniform registers, else every copy is a loop
        assert not any("BRA.U.ANY" in line for _, line in instructions(made.asm["cubin"]))


def maxima_are_exceptions(problem: Problem, config: Config, made: Any) -> None:
    """A warp votes on whether it looks for maxima: a step without has no exchange between threads
    and no spills, and 16-bit weights are worked out under a product."""
    assert measure(made).stack_bytes <= STACK_BYTES
    of_k, of_v = (limits.SIZES[x] for x in limits.types(problem)[1:3])
    products = 128 * of_k // 32 + config.tile_n * of_v // 32
    loops = key_loops(made.asm["cubin"], products, 1)
    assert len(loops) == 1  # of all warpgroups
    ptx = made.asm["ptx"]
    taken = {int(number) for number in re.findall(r"\bbar(?:rier)?\.sync\s+(\d+)", ptx)}
    assert max(taken - {NEVER.value}) < FIRST.value  # by Triton, of the barriers of the hardware
    for body in loops:
        met = [line for line in body if re.search(r"BAR\.SYNC\S* 0x", line)]
        assert all(f" {NEVER.value:#x}," in line for line in met)  # warps meet for no other barrier
        waits = [n for n, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]
        votes = [n for n, line in enumerate(body) if "VOTE.ANY" in line]
        if (problem.codec.name, problem.products) == ("int8", "full"):
            usual = body
        else:
            usual = body[: votes[0]] + body[votes[-1] :]
            assert not any("SHFL" in line for line in usual)
        assert not spilled(usual)
        worked_out = body[waits[0] : votes[0]] if of_v == 2 else usual
        weights = sum("MUFU.EX2" in line for line in worked_out)
        assert weights >= ROWS.value * config.tile_n // 128  # of a thread
        values_first = problem.products == "full" and problem.codec == Codec("fp8", "head")
        assert len(waits) == of_v + values_first
        if values_first:  # what was multiplied is added up under the product of keys
            added = sum("FADD" in line for line in body[waits[0] : waits[1]])
            assert added >= ROWS.value * problem.head_dim // 128


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("units", UNITS, ids=str)
def test_few_rows_have_shapes(units: tuple[str, str], head_dim: int) -> None:
    """One warpgroup that multiplies, with scales of each key and without."""
    for granularity in ("head", "token"):
        values = {"kind": "decode", "units": units, "granularity": granularity, "q": "bfloat16"}
        problem = problem_of({**values, "head_dim": head_dim})
        found = list(limits.configs(problem, H200))
        assert {config.tile_m for config in found} == {64, 128}


def test_what_is_refused() -> None:
    problem = problem_of({"units": ("int8", "half"), "granularity": "head", "head_dim": 128})
    assert limits.unsupported(problem, H200) == []
    assert limits.unsupported(replace(problem, return_lse=True), H200) == []
    odd = replace(problem, head_dim=96, codec=AS_IS, q_granularity="none", needs_grad=True)
    assert limits.unsupported(odd, H200) == [
        "kv as_is: expected int8 or fp8",
        "gradient: expected inputs that require none",
        "head_dim/head_dim_v 96/128: expected 64/64 or 128/128",
    ]
    paged = replace(problem, place=Paged(8), codec=Codec("fp8", "head"), return_lse=True)
    assert limits.unsupported(paged, H200)[-2:] == [
        "page_size 8: expected a multiple of 16",
        "return_lse of fp8, products half: expected widened, as units keep 14 bits",
    ]
    assert len(limits.unsupported(replace(paged, products="widened"), H200)) == 1
