"""Which of the kernels for 8-bit keys on Hopper comes first, by `policies/widening.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Kernel
from splitkv.core.problem import Problem
from splitkv.planner.policies import widening
from splitkv.planner.policies.shared import HALF, QUANTISED, READY_BEFORE, WHOLE_SEQUENCES, WIDENED
from splitkv.planner.registry import KERNELS, make_plan

H200 = GPUS["h200"]
PROMPTS = Problem("dense", 4, 32, 8, 128, 128, 4096, 4096, mask=Mask(True))
PROMPTS = replace(PROMPTS, codec=Codec("fp8", "token"))
CHUNK = replace(PROMPTS, kind="decode", batch=1, seqlen_k=16384, lengths="device", place=Paged(16))
PACKED = replace(CHUNK, kind="varlen", seqlen_q=1024)


def able(problem: Problem) -> list[Kernel]:
    return [kernel for kernel in KERNELS if not kernel.unsupported(problem, H200)]


def first_of(problem: Problem) -> str:
    """The first of the kernels for whole sequences."""
    names = [k.name for k in widening.in_order(problem, H200, able(problem))]
    return next(name for name in names if name in WHOLE_SEQUENCES)


@pytest.mark.parametrize("problem", [PROMPTS, replace(PROMPTS, kind="varlen", place=Ragged())])
def test_prompts_are_widened_first(problem: Problem) -> None:
    assert first_of(problem) == WIDENED
    plan = make_plan(problem, H200)
    assert plan.kernel == WIDENED and plan.config.num_splits == 1


@pytest.mark.parametrize("codec", [Codec(n, g) for n in ("int8", "fp8") for g in ("head", "token")])
@pytest.mark.parametrize("products", ["widened", "half", "full"])
def test_more_rows_are_widened_sooner(codec: Codec, products: str) -> None:
    """Where a number of rows pays for the launch, more do."""
    chunks = [replace(CHUNK, codec=codec, products=products, seqlen_q=1 << n) for n in range(13)]
    first = [first_of(chunk) for chunk in chunks]
    taken = [name in READY_BEFORE for name in first]
    assert taken == sorted(taken) and not taken[0]
    halves = products != "widened" and codec.granularity == "head"
    best = widening.RATES_OF_HALF[codec.name] if halves else 1
    assert taken[-1] == (widening.rate_of(chunks[-1]) < best)
    assert first[-1] == ((HALF if best > 1 else WIDENED) if taken[-1] else QUANTISED)
    for chunk, name in zip(chunks, first, strict=True):
        if chunk.rows > 64:  # else decode's own kernels are weighed
            assert make_plan(chunk, H200).kernel == name


def test_of_packed_pages_only_the_longest_is_known() -> None:
    """63 sequences beside one of 1024 tokens may have a token each."""
    assert first_of(PACKED) == WIDENED
    assert first_of(replace(PACKED, batch=64)) == QUANTISED
    assert first_of(replace(PACKED, batch=2)) == WIDENED


def test_memory_is_bounded() -> None:
    """A key of 8 heads of 128 takes 4096 bytes: 1 GiB holds 262144."""
    long = replace(PROMPTS, batch=1, seqlen_q=1 << 18, seqlen_k=1 << 18)
    assert widening.workspace_bytes(WIDENED, long) == widening.MOST_BYTES
    assert first_of(long) == WIDENED
    for more in ({"batch": 2}, {"seqlen_k": (1 << 18) + 1}):
        assert first_of(replace(long, **more)) == QUANTISED
        assert make_plan(replace(long, **more), H200).kernel == QUANTISED
    served = replace(PACKED, batch=64, seqlen_k=1 << 17)  # 34 GB
    assert make_plan(served, H200).kernel == QUANTISED


def test_values_alone_are_widened() -> None:
    """With a scale a head, where keys may be multiplied in 8 bits."""
    e4m3 = replace(PROMPTS, codec=Codec("fp8", "head"))
    for products, name in (("widened", WIDENED), ("half", HALF), ("full", HALF)):
        assert first_of(replace(e4m3, products=products)) == name
        assert first_of(replace(e4m3, products=products, codec=Codec("fp8", "token"))) == WIDENED

    int8 = replace(PROMPTS, codec=Codec("int8", "tensor"), products="half")
    assert first_of(int8) == WIDENED  # rounding q takes what its products save
    assert first_of(replace(int8, mask=Mask())) == HALF
    assert first_of(replace(int8, q_granularity="token")) == HALF


def test_what_units_cannot_say_of_an_lse() -> None:
    """e4m3 products keep 14 bits, so few rows are left to the kernel for any GPU."""
    problem = replace(PROMPTS, products="full", return_lse=True)
    assert QUANTISED not in [kernel.name for kernel in able(problem)]
    assert first_of(problem) == WIDENED
    assert first_of(replace(problem, q_granularity="token")) == "prefill"
    few = replace(CHUNK, seqlen_q=2, products="full", return_lse=True)
    assert first_of(few) == "prefill"
    exact = replace(PROMPTS, products="widened", return_lse=True)
    assert first_of(exact) == QUANTISED  # in bf16 rounded keys would be too far off


def test_other_problems_keep_their_order() -> None:
    as_is = replace(PROMPTS, codec=Codec(), products="widened", place=Contiguous())
    for problem in (as_is, replace(PROMPTS, needs_grad=True)):
        assert widening.in_order(problem, H200, able(problem)) == able(problem)
    assert first_of(as_is) == "hopper_prefill"
