"""`decode_split` and `combine` in Triton's interpreter, against the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from torch import Tensor

from splitkv import reference
from splitkv.core.device import GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.kernels.limits import decode_split
from splitkv.planner.legality import expect_config
from splitkv.planner.policies import fixed
from splitkv.testing import (
    Call,
    assert_close,
    assert_lse_close,
    bind,
    check,
    expected,
    make_operands,
)

# NumPy warns of what the kernels do on purpose: log2 of 0 is -inf for a row without keys, of the
# mark FINISHED it is NaN and dropped, and e^2x may overflow in tanh. The interpreter itself uses
# what NumPy will drop.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

SCHEDULES = ("even 1", "even 3", "even 5", "fixed", "batch")
MAX_ROWS = 64  # of a problem: the interpreter takes milliseconds for each
AXES: cases.Axes = {
    **cases.AXES,
    "seqlen_k": (17, 100),
    "schedule": SCHEDULES,
    "tile_n": (16, 32),
}


def small(values: cases.Values) -> bool:
    """Few rows, and the batch schedule only where it has lengths to share out by."""
    sizes = (values.get(n, 1) for n in ("batch", "num_kv_heads", "group", "seqlen_q"))
    on_host = values.get("lengths") == "host" and values.get("schedule") == "batch"
    return math.prod(sizes) <= MAX_ROWS and not on_host


def plan_of(problem: Problem, schedule: str, tile_n: int = 16) -> Plan:
    """A plan whose tiles are so small that 100 keys are several parts."""
    name, _, splits = schedule.partition(" ")
    config = Config(int(splits or 1), decode_split.tile_m(problem), tile_n)
    if name == "fixed":
        size = 2 * tile_n
        most = max(1, math.ceil(problem.seqlen_k / size))
        config = replace(config, schedule="fixed", split_size=size, num_splits=most)
    elif name == "batch":
        config = replace(config, schedule="batch", programs=problem.batch + 3, num_splits=4)
    device = GPUS["h200"]
    assert decode_split.unsupported(problem, device) == []
    return Plan(problem, device, "fixed", "decode_split", config, "a test")


def run(plan: Plan) -> Any:
    """`run=` of `check`: memory that the kernels should write is NaN before (see conftest)."""

    def launch(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        return records.DECODE_SPLIT.launch(bind(problem, call), plan)

    return launch


@pytest.mark.parametrize("number", range(len(PAIRS := cases.pairs(AXES, small))))
def test_pairs(number: int) -> None:
    """Every pair of values of two axes, garbage in tables and caches past the sequences' ends."""
    values = dict(PAIRS[number])
    schedule, tile_n = values.pop("schedule"), values.pop("tile_n")
    problem = cases.decode_problem(values)
    on_device = problem.lengths == "device" and problem.batch > 1
    options = {"zero_length": on_device and number % 2 == 0, "strided": number % 3 == 0}
    check(problem, run=run(plan_of(problem, schedule, tile_n)), **options)


QUANTIZED: cases.Axes = {
    **cases.QUANTIZED_AXES,
    "head_dims": ((32, 32), (48, 16)),
    "group": (1, 3),
    "seqlen_k": (70,),
    "schedule": ("even 1", "even 3", "batch"),
}


@pytest.mark.parametrize("number", range(len(IN_CODECS := cases.pairs(QUANTIZED, small))))
def test_codecs(number: int) -> None:
    """int8 and e4m3 with scales for all, for a head, or beside each key; garbage past the ends."""
    values = dict(IN_CODECS[number])
    schedule = values.pop("schedule")
    problem = cases.decode_problem(values)
    options = {"zero_length": problem.lengths == "device", "strided": number % 3 == 0}
    check(problem, run=run(plan_of(problem, schedule)), **options)


@pytest.mark.parametrize("codec", [AS_IS, Codec("int8", "token")], ids=str)
@pytest.mark.parametrize("head_dims", [(16, 32), (48, 16)], ids=str)
def test_tiles_wider_than_heads(head_dims: tuple[int, int], codec: Codec) -> None:
    """Of 64 rows, which wgmma multiplies on sm_90; columns past a head's are nobody's."""
    head_dim, head_dim_v = head_dims
    problem = replace(DECODE, head_dim=head_dim, head_dim_v=head_dim_v, codec=codec)
    problem = replace(problem, num_heads=20, num_kv_heads=1)
    plan = plan_of(problem, "even 3")
    assert plan.config.tile_m == 64
    check(problem, run=run(plan), strided=True)


@pytest.mark.parametrize("case", cases.EDGES, ids=str)
def test_edges(case: cases.Case) -> None:
    """In even parts, and in those of one of the other schedules, which take turns. One KV head, as
    `test_pairs` has several."""
    group = case.problem.group
    problem = replace(case.problem, num_heads=group, num_kv_heads=1)
    for schedule in ("even 3", ("fixed", "batch")[cases.EDGES.index(case) % 2]):
        check(problem, run=run(plan_of(problem, schedule, 32)), **case.options)


DECODE = Problem(
    *("decode", 3, 4, 2, 16, 32, 2, 100),
    mask=Mask(causal=True),
    lengths="device",
    return_lse=True,
)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("schedule", ["even 1", "even 3", "fixed", "batch"])
def test_a_row_that_is_not_finite_is_written(schedule: str) -> None:
    """As NaN, whatever was there; others are as they were."""
    problem = replace(DECODE, return_lse=False)
    call = make_operands(problem)
    launch = run(plan_of(problem, schedule))
    clean, _ = launch(problem, call)
    call["q"][1, 0, 2, 3], call["out"] = math.nan, torch.zeros_like(clean)
    out, _ = launch(problem, call)
    assert out[1, 0, 2].isnan().all()
    out[1, 0, 2] = clean[1, 0, 2]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("place", [Contiguous(), Paged(16)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_same_plan_same_bits(schedule: str, place: Any) -> None:
    problem = replace(DECODE, place=place)
    call = make_operands(problem)
    launch = run(plan_of(problem, schedule))
    (out, lse), (again, lse_again) = launch(problem, call), launch(problem, call)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(True, 30, -1, 5)], ids=str)
@pytest.mark.parametrize("length", [1, 32, 33, 100])
def test_fixed_parts_make_a_row_independent_of_its_batch(length: int, mask: Mask) -> None:
    """The bits of a sequence alone are those beside longer, shorter and empty neighbours."""
    alone = replace(DECODE, batch=1, mask=mask, seqlen_k=length)
    together = replace(DECODE, mask=mask)
    call = make_operands(together, lengths=(100, length, 0))
    kept = length + 3  # a smaller cache, too
    sliced = {
        "q": call["q"][1:2],
        "k_cache": call["k_cache"][1:2, :kept],
        "v_cache": call["v_cache"][1:2, :kept],
        "cache_seqlens": call["cache_seqlens"][1:2],
        "max_seqlen_k": length,
    }
    out, lse = run(plan_of(together, "fixed"))(together, call)
    out_alone, lse_alone = run(plan_of(alone, "fixed"))(alone, call | sliced)
    assert torch.equal(out[1:2], out_alone) and torch.equal(lse[1:2], lse_alone)


def compare(problem: Problem, call: Call, out: Tensor, lse: Tensor) -> None:
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(True, 30, -1, 5)], ids=str)
@pytest.mark.parametrize("schedule", ["even 1", "even 3", "even 7"])
def test_a_plan_serves_shorter_caches(schedule: str, mask: Mask) -> None:
    """Lengths on the host: the plan is for more keys, the run-time length is the call's own. Parts
    that a shorter cache leaves empty change nothing."""
    longest = replace(DECODE, lengths="host", mask=mask, batch=1)
    plan = plan_of(longest, schedule)
    for keys in (1, 2, 15, 16, 17, 48, 63, 99, 100):
        problem = replace(longest, seqlen_k=keys, seqlen_q=min(2, keys))
        here = replace(plan, problem=replace(longest, seqlen_q=problem.seqlen_q))
        call = make_operands(problem, seed=keys)
        operands = bind(problem, call)
        operands.seqlen_k = keys
        out, lse = records.DECODE_SPLIT.launch(operands, here)
        compare(problem, call, out, lse)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_launcher_serves_any_lengths(schedule: str) -> None:
    """As in the replays of a graph: lengths change on the device, nothing is planned again."""
    problem = replace(DECODE, place=Paged(16), mask=Mask(True, 60, -1, 5), sink_logits=True)
    launcher = None
    every: Sequence[tuple[int, int, int]] = ((100, 100, 100), (0, 0, 0), (1, 100, 0), (33, 2, 64))
    for lengths in every:
        call = make_operands(problem, lengths=lengths)
        operands = bind(problem, call)
        launcher = launcher or records.DECODE_SPLIT.bind(plan_of(problem, schedule), operands)
        compare(problem, call, *launcher(operands))


def test_parts_of_a_size_for_shorter_sequences() -> None:
    """Their window starts inside a tile: a tile more than the longest has."""
    problem = replace(DECODE, lengths="host", seqlen_k=128, mask=Mask(True, 62))
    choice = fixed.with_split_size(64)(problem, GPUS["h200"], [records.DECODE_SPLIT])
    plan = replace(plan_of(problem, "fixed"), config=choice.config)
    for seqlen_k in (128, 127, 65, 64):
        shorter = replace(problem, seqlen_k=seqlen_k)
        check(shorter, run=run(replace(plan, problem=shorter)))


@pytest.mark.parametrize("schedule", ["even 1", "even 3", "batch"])
def test_writes_into_the_buffer_of_the_caller(schedule: str) -> None:
    """A slice of a larger buffer, of which nothing else is written."""
    call = make_operands(DECODE)
    operands = bind(DECODE, call)
    buffer = torch.full((3, 3, 5, 40), math.nan, dtype=torch.bfloat16)
    operands.out = buffer[:, :2, :4, :32]
    out, lse = records.DECODE_SPLIT.launch(operands, plan_of(DECODE, schedule))
    assert out is operands.out
    compare(DECODE, call, out, lse)
    out.fill_(math.nan)
    assert buffer.isnan().all()


@pytest.mark.parametrize("dims", [1, 2])
def test_slopes_for_every_sequence(dims: int) -> None:
    problem = replace(DECODE, score=replace(DECODE.score, alibi=True))
    call = make_operands(problem)
    slopes = torch.rand((3, 4)[2 - dims :]) + 0.05
    call["alibi_slopes"] = slopes
    compare(problem, call, *run(plan_of(problem, "batch"))(problem, call))


@pytest.mark.parametrize("more", [0, 1, 2, 40])
def test_programs_beside_one_a_sequence(more: int) -> None:
    """None are left to cut a sequence into parts, or far more than there are tiles."""
    plan = plan_of(DECODE, "batch")
    programs = DECODE.batch + more
    plan = replace(plan, config=replace(plan.config, programs=programs))
    expect_config(records.DECODE_SPLIT, DECODE, plan.device, plan.config)
    for lengths in ((100, 100, 100), (0, 0, 0), (1, 100, 0)):
        call = make_operands(DECODE, lengths=lengths)
        compare(DECODE, call, *run(plan)(DECODE, call))


@pytest.mark.parametrize("codec", [AS_IS, Codec("fp8", "head")], ids=str)
@pytest.mark.parametrize("schedule", ["even 1", "even 3", "batch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_out_in_8_bits(dtype: str, schedule: str, codec: Codec) -> None:
    """By the kernel, or by `combine`; q in its own type."""
    problem = replace(DECODE, dtype=dtype, codec=codec, out_scale=True, sink_logits=True)
    check(problem, run=run(plan_of(problem, schedule)), zero_length=True)


@pytest.mark.parametrize("schedule", ["even 1", "even 3"])
def test_out_in_8_bits_of_the_caller(schedule: str) -> None:
    """The bits of `reference.scaled`, and nothing beside them."""
    problem = replace(DECODE, dtype="float32", out_scale=True)
    plan, call = plan_of(problem, schedule), make_operands(problem)
    plain = replace(plan, problem=replace(problem, out_scale=False))
    wanted = run(plain)(plain.problem, call | {"out_scale": None})[0]
    room = torch.full((3, 2, 5, 48), 0x55, dtype=torch.uint8)
    out = room.view(torch.float8_e4m3fn)[:, :, 1:, 8:40]
    assert run(plan)(problem, call | {"out": out})[0] is out
    bits = reference.scaled(wanted, call["out_scale"]).view(torch.uint8)
    assert torch.equal(room[:, :, 1:, 8:40], bits)
    assert (room[:, :, 0] == 0x55).all() and (room[..., 40:] == 0x55).all()


@pytest.mark.parametrize("schedule", ["even 1", "even 3", "fixed", "batch"])
def test_a_length_below_0_is_none(schedule: str) -> None:
    """As of a padded row with padding before its keys: others are computed as beside no keys."""
    problem = replace(DECODE, mask=Mask())
    launch = run(plan_of(problem, schedule))
    call = make_operands(problem, lengths=(100, 0, 70))
    wanted, wanted_lse = launch(problem, call)
    call["cache_seqlens"][1] = -1000
    out, lse = launch(problem, call)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


@pytest.mark.parametrize("schedule", ["even 1", "even 3", "batch"])
def test_scales_of_a_sequence_without_keys_may_be_anything(schedule: str) -> None:
    problem = replace(DECODE, codec=Codec("int8", "head"))
    call = make_operands(problem, lengths=(100, 0, 70))
    scales = {name: call[name].expand(3, 2).clone() for name in ("k_scale", "v_scale")}
    for scale in scales.values():
        scale[1] = math.nan
    out, lse = run(plan_of(problem, schedule))(problem, call | scales)
    compare(problem, call, out, lse)
