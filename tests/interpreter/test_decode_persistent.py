"""`decode_persistent` and `combine_slots` in Triton's interpreter, against the reference."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import SCHEDULED, Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.kernels.host.step import StepLauncher
from splitkv.kernels.limits import decode_split as limits
from splitkv.kernels.schedule import ScheduleKernel, buffer_shape
from splitkv.planner.legality import expect_config
from splitkv.testing import (
    Call,
    assert_close,
    assert_lse_close,
    bind,
    check,
    expected,
    make_operands,
)

# As of tests/interpreter/test_decode_split.py.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
MAX_ROWS = 64  # of a problem: the interpreter takes milliseconds for each
AXES: cases.Axes = {
    **cases.AXES,
    "lengths": ("device",),
    "head_dims": ((32, 32), (80, 80), (48, 16)),
    "group": (1, 7, 16),
    "num_kv_heads": (1, 2),
    "seqlen_q": (1, 2, 16),
    "seqlen_k": (17, 70),
    "schedule": SCHEDULED,
    "programs": (1, 5, 40),
    "tile_n": (16, 32),
}
QUANTIZED: cases.Axes = {
    **cases.QUANTIZED_AXES,
    "lengths": ("device",),
    "head_dims": ((32, 32), (48, 16)),
    "group": (1, 3),
    "seqlen_k": (70,),
    "schedule": SCHEDULED,
    "programs": (3, 7),
}
DECODE = Problem(
    *("decode", 3, 4, 2, 16, 32, 2, 100),
    mask=Mask(causal=True),
    lengths="device",
    return_lse=True,
)


def small(values: cases.Values) -> bool:
    sizes = (values.get(n, 1) for n in ("batch", "num_kv_heads", "group", "seqlen_q"))
    return math.prod(sizes) <= MAX_ROWS


def plan_of(problem: Problem, schedule: str, programs: int, tile_n: int = 16) -> Plan:
    """A plan with tiles so small that 70 keys are several."""
    programs += problem.batch * (schedule == "proportional")
    rows = limits.tile_m(problem)
    config = Config(1, rows, tile_n, schedule=schedule, programs=programs)
    return Plan(problem, GPUS["h200"], "fixed", "decode_split", config, "a test")


def run(plan: Plan) -> Any:
    """`run=` of `check`."""

    def launch(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        return records.DECODE_SPLIT.launch(bind(problem, call), plan)

    return launch


def compare(problem: Problem, call: Call, out: Tensor, lse: Tensor) -> None:
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(AXES, small))))
def test_pairs(number: int) -> None:
    """Every pair of values of two axes, garbage in tables and caches past the sequences' ends."""
    values = dict(PAIRS[number])
    cut = {name: values.pop(name) for name in ("schedule", "programs", "tile_n")}
    problem = cases.decode_problem(values)
    options = {"zero_length": problem.batch > 1 and number % 2 == 0, "strided": number % 3 == 0}
    check(problem, run=run(plan_of(problem, **cut)), **options)


@pytest.mark.parametrize("number", range(len(IN_CODECS := cases.pairs(QUANTIZED, small))))
def test_codecs(number: int) -> None:
    """int8 and e4m3 with scales for all, for a head, or beside each key; garbage past the ends."""
    values = dict(IN_CODECS[number])
    cut = {name: values.pop(name) for name in ("schedule", "programs")}
    problem = cases.decode_problem(values)
    check(problem, run=run(plan_of(problem, **cut)), zero_length=True, strided=number % 3 == 0)


def random_mix(draw: random.Random, batch: int, most: int) -> list[int]:
    """Lengths as an engine has them: few long, many short, some none."""
    lengths = [min(most, int(draw.lognormvariate(2.5, 1.2))) for _ in range(batch)]
    lengths[draw.randrange(batch)] = most
    return lengths


@pytest.mark.parametrize("seed", range(8))
def test_random_mixes(seed: int) -> None:
    """Many sequences a program, and many programs a sequence; one launcher serves all lengths."""
    draw = random.Random(seed)
    place: Any = draw.choice([Contiguous(), Paged(1), Paged(16), Paged(7)])
    mask = draw.choice([Mask(True), Mask(True, 30, -1, 5), Mask(), Mask(True, chunk=48)])
    problem = replace(
        DECODE,
        batch=draw.choice([1, 6, 11]),
        place=place,
        mask=mask,
        seqlen_k=150,
        seqlen_q=draw.choice([1, 2, 16]),
        sink_logits=draw.random() < 0.5,
        codec=draw.choice([DECODE.codec, Codec("int8", "token"), Codec("fp8", "head")]),
    )
    plan = plan_of(problem, draw.choice(SCHEDULED), draw.choice([2, 9, 30]))
    launcher = None
    for _ in range(2):
        call = make_operands(problem, lengths=random_mix(draw, problem.batch, 150))
        operands = bind(problem, call)
        launcher = launcher or records.DECODE_SPLIT.bind(plan, operands)
        compare(problem, call, *launcher(operands))


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_a_schedule_made_before(schedule: str) -> None:
    """For all layers of a step: the result is that of a call that makes its own, bit for bit."""
    plan = plan_of(DECODE, schedule, 5)
    expect_config(records.DECODE_SPLIT, DECODE, plan.device, plan.config)
    call = make_operands(DECODE, lengths=(100, 3, 41))
    out, lse = run(plan)(DECODE, call)
    operands = bind(DECODE, call)
    operands.starts = torch.empty(buffer_shape(plan), dtype=torch.int32)
    ScheduleKernel(plan).launch(operands.starts, call["cache_seqlens"])
    launcher = records.DECODE_SPLIT.bind(plan, operands)
    assert isinstance(launcher, StepLauncher)
    again, lse_again = launcher(operands)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_writes_into_the_buffer_of_the_caller(schedule: str) -> None:
    """A slice of a larger buffer, of which nothing else is written."""
    call = make_operands(DECODE)
    operands = bind(DECODE, call)
    buffer = torch.full((3, 3, 5, 40), math.nan, dtype=torch.bfloat16)
    operands.out = buffer[:, :2, :4, :32]
    out, lse = records.DECODE_SPLIT.launch(operands, plan_of(DECODE, schedule, 4))
    assert out is operands.out
    compare(DECODE, call, out, lse)
    out.fill_(math.nan)
    assert buffer.isnan().all()


@pytest.mark.parametrize("dims", [1, 2])
def test_slopes_for_every_sequence(dims: int) -> None:
    problem = replace(DECODE, score=replace(DECODE.score, alibi=True))
    call = make_operands(problem)
    call["alibi_slopes"] = torch.rand((3, 4)[2 - dims :]) + 0.05
    compare(problem, call, *run(plan_of(problem, "ranges", 5))(problem, call))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_a_row_that_is_not_finite_is_written() -> None:
    problem = replace(DECODE, return_lse=False)
    call = make_operands(problem)
    call["q"][1, 0, 2, 3], call["out"] = math.nan, torch.zeros(3, 2, 4, 32, dtype=torch.bfloat16)
    out, _ = run(plan_of(problem, "ranges", 5))(problem, call)
    assert out[1, 0, 2].isnan().all() and out[0].isfinite().all()


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_out_in_8_bits(schedule: str) -> None:
    """Of sequences that one program has, and of those that `combine_slots` merges."""
    problem = replace(DECODE, out_scale=True, sink_logits=True)
    check(problem, run=run(plan_of(problem, schedule, 5)), lengths=(100, 3, 40))


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_a_sequence_without_keys(schedule: str) -> None:
    """Its scales may be anything, and its length below 0."""
    problem = replace(DECODE, codec=Codec("int8", "head"))
    call = make_operands(problem, lengths=(100, 0, 70))
    scales = {name: call[name].expand(3, 2).clone() for name in ("k_scale", "v_scale")}
    for scale in scales.values():
        scale[1] = math.nan
    lengths = torch.tensor([100, -1000, 70], dtype=torch.int32)
    launch = run(plan_of(problem, schedule, 5))
    out, lse = launch(problem, call | scales | {"cache_seqlens": lengths})
    compare(problem, call, out, lse)
