"""`decode_split` that appends, in Triton's interpreter: bit for bit `append` and then decode."""

from __future__ import annotations

from dataclasses import replace

import appending
import cases
import pytest
import torch
from appending import Step, separately, step
from interpreter.test_append import launch
from interpreter.test_decode_persistent import plan_of as plan_of_step
from interpreter.test_decode_split import plan_of
from torch import Tensor

from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import SCHEDULED, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.testing import bind

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
AXES: cases.Axes = {
    **appending.AXES,
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": ((32, 32), (48, 16)),
    "heads": ((2, 1), (6, 2)),
    "batch": (1, 3),
    "seqlen_q": (1, 3, 16),
    "seqlen_k": (17, 100),
    "place": (Contiguous(), Paged(1), Paged(16)),
    "mask": (
        Mask(causal=True),
        Mask(),
        Mask(causal=True, window_left=3),
        Mask(causal=True, window_left=3, sink_tokens=5),
        Mask(causal=True, chunk=24),
    ),
    "codec": (None, Codec("int8", "tensor"), Codec("fp8", "head"), Codec("fp8_e5m2", "head")),
    "schedule": ("even 1", "even 3", "fixed", "batch", *SCHEDULED),
    "tile_n": (16, 32),
}


PLAIN: cases.Values = {name: options[0] for name, options in AXES.items()}


def problem_of(values: cases.Values) -> Problem:
    heads, kv_heads = values["heads"]
    dims = values["head_dims"]
    named = {n: values[n] for n in ("dtype", "place", "mask")}
    if values["codec"] is not None:
        named["codec"] = values["codec"]
    sizes = ("batch", "seqlen_q", "seqlen_k")
    batch, seqlen_q, seqlen_k = (values[n] for n in sizes)
    shape = ("decode", batch, heads, kv_heads, *dims, seqlen_q, seqlen_k)
    return Problem(*shape, lengths="device", return_lse=True, **named)


MAX_ROWS = 96  # of a problem: the interpreter takes milliseconds for each


def valid(values: cases.Values) -> bool:
    heads, _ = values.get("heads", (1, 1))
    rows = heads * values.get("batch", 1) * values.get("seqlen_q", 1)
    widened = values.get("codec") is not None and values.get("dtype") == "float32"
    return appending.valid(values) and rows <= MAX_ROWS and not widened


def same(x: Tensor, y: Tensor) -> bool:
    if x.element_size() == 1:
        return torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    return torch.equal(x.nan_to_num(9), y.nan_to_num(9))


def cut_by(schedule: str, problem: Problem, tile_n: int) -> Plan:
    """A plan by one of the schedules: of a step, for a few programs a head tile."""
    if schedule not in SCHEDULED:
        return plan_of(problem, schedule, tile_n)
    return plan_of_step(problem, schedule, 3, tile_n)


def compare(made: Step, schedule: str, tile_n: int) -> None:
    alone, call, problem = separately(made)
    q, after = launch(alone)
    call |= {"q": call["q"] if q is None else q, "cache_seqlens": after}
    wanted = records.DECODE_SPLIT.launch(bind(problem, call), cut_by(schedule, problem, tile_n))
    plan = cut_by(schedule, made.problem, tile_n)
    plan = replace(plan, config=replace(plan.config, appends=True))
    out, lse = records.DECODE_SPLIT.launch(made.operands(), plan)
    for name in ("k_cache", "v_cache"):
        assert same(made.call[name], call[name]), name
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(AXES, valid))))
def test_pairs(number: int) -> None:
    values = dict(PAIRS[number])
    made = step(problem_of(values), values, zero_length=number % 4 == 0, strided=number % 3 == 0)
    compare(made, values["schedule"], values["tile_n"])


WINDOWS = (Mask(True, 2), Mask(True, 2, -1, 5), Mask(True, chunk=24), Mask(window_left=1))


@pytest.mark.parametrize("schedule", ["even 3", "batch", *SCHEDULED])
@pytest.mark.parametrize("mask", WINDOWS, ids=str)
@pytest.mark.parametrize("new", ["many", "packed"])
def test_tokens_that_no_row_sees(mask: Mask, schedule: str, new: str) -> None:
    """More new keys than queries, and a window behind which whole tiles of them lie."""
    values = PLAIN | {"mask": mask, "new": new, "batch": 3, "seqlen_k": 100}
    made = step(problem_of(values), values)
    compare(made, schedule, 16)


@pytest.mark.parametrize("heads", [(40, 2), (17, 1)])
def test_several_row_tiles(heads: tuple[int, int]) -> None:
    """All of them write the same tokens."""
    dtype = {"dtype": "float32"}  # whose tiles have 16 rows
    values = PLAIN | dtype | {"heads": heads, "seqlen_q": 3, "new": "several", "rotary": "halves"}
    compare(step(problem_of(values), values), "even 3", 16)


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
@pytest.mark.parametrize("schedule", ["even 3", "batch", *SCHEDULED])
def test_tokens_without_room_are_not_written(place: object, schedule: str) -> None:
    """What is past the end of the cache; lengths stop there, too."""
    values = PLAIN | {"place": place, "new": "several", "batch": 2, "seqlen_k": 64}
    made = step(problem_of(values), values, poison=False)
    capacity = made.new.capacity
    before = torch.tensor([capacity - 2, capacity - 6], dtype=torch.int32)
    problem = replace(made.problem, seqlen_k=capacity)
    call = made.call | {"cache_seqlens": before, "max_seqlen_k": capacity}
    compare(Step(problem, call, made.new._replace(before=before)), schedule, 16)
