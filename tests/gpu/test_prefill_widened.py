"""8-bit keys on `hopper_prefill_widened` against the reference: sequences, caches, pages, parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, HERE, same_bits
from torch import Tensor
from training import QUANTISED_AXES, called, has_units, paged, plan_on, problem_of

import splitkv
from splitkv.core.kv import Codec
from splitkv.core.variants import Plain
from splitkv.kernels.records import HOPPER_PREFILL_WIDENED as KERNEL
from splitkv.testing import (
    Call,
    Contiguous,
    Mask,
    Paged,
    Problem,
    Ragged,
    captured,
    check,
    make_operands,
)

AXES: cases.Axes = {
    **QUANTISED_AXES,
    "kind": ("dense", "varlen", "decode"),
    "head_dims": ((128, 128), (64, 64), (192, 128), (256, 256)),
    "group": (1, 6, 16),
    "batch": (1, 3, 9),
    "seqlens": ((513, 700), (200, 333), (3, 700), (300, 120)),
    "page_size": (0, 1, 16, 48),
    "mask": (Mask(True), Mask(), Mask(True, 60, -1, 5), Mask(True, 130)),
    "parts": (1, 3),
}


def valid(values: cases.Values) -> bool:
    pages = bool(values.get("page_size")) and values.get("kind") == "dense"
    exact = values.get("products") == "widened" or values.get("q_granularity", "none") != "none"
    return has_units(values) and not pages and not (exact and values.get("return_lse", False))


PAIRS = cases.pairs(AXES, valid)
plan_of = partial(plan_on, KERNEL)


def run(
    problem: Problem, call: Call, plan: splitkv.Plan | None = None
) -> tuple[Tensor, Tensor | None]:
    return called(problem, call, plan=plan or plan_of(problem))


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs(number: int) -> None:
    """Three times the same bits: through Triton, and by addresses."""
    values = dict(PAIRS[number])
    page_size, parts = values.pop("page_size"), values.pop("parts")
    given = problem_of(values)
    asked, packed = given, given.kind == "varlen"
    if given.kind != "dense":
        place = Paged(page_size) if page_size else given.place
        asked = replace(given, place=place, lengths="device")
    plan = plan_of(asked)
    if plan.kernel == KERNEL.name:
        plan = replace(plan, config=replace(plan.config, variant=Plain(), num_splits=parts))

    def thrice(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        if packed and page_size:
            problem, call = paged(problem, call, page_size)
        first = run(problem, call, plan)
        assert all(same_bits(run(problem, call, plan), first) for _ in range(2))
        return first

    asked = given if packed else asked
    zero_length = given.kind != "dense" and given.batch > 1
    check(asked, device=DEVICE, run=thrice, zero_length=zero_length)


PROMPTS = Problem("dense", 2, 16, 1, 128, 128, 2048, 2048, mask=Mask(True))
CHUNKS = Problem("decode", 1, 32, 4, 128, 128, 512, 8192, mask=Mask(True), lengths="device")
SERVED = {
    "int8-token": replace(PROMPTS, codec=Codec("int8", "token"), products="half"),
    "e4m3": replace(PROMPTS, codec=Codec("fp8", "head")),
    "chunk": replace(CHUNKS, codec=Codec("fp8", "token"), place=Paged(16)),
}
SERVED = {name: p for name, p in SERVED.items() if not KERNEL.unsupported(p, HERE)}


@pytest.mark.parametrize("problem", SERVED.values(), ids=SERVED)
def test_many_rows_are_served_here(problem: Problem) -> None:
    """Without being asked."""
    plan = splitkv.plan(problem)
    assert plan.kernel == KERNEL.name
    check(problem, device=DEVICE, run=partial(run, plan=plan))


@pytest.mark.parametrize("page_size", [0, 16])
def test_lengths_that_change_between_replays(page_size: int) -> None:
    """What is widened is what sequences hold when the graph runs."""
    problem = Problem("decode", 3, 8, 2, 128, 128, 64, 1000, mask=Mask(True), lengths="device")
    place = Paged(page_size) if page_size else Contiguous()
    problem = replace(problem, place=place, codec=Codec("int8", "token"), products="half")
    call = make_operands(problem, lengths=(1000, 1000, 1000), device=DEVICE)  # keys for any lengths
    plan = plan_of(problem)
    replay, (out, _) = captured(lambda: run(problem, call, plan))
    for lengths in ((1000, 3, 517), (0, 999, 64)):
        call["cache_seqlens"].copy_(torch.tensor(lengths))
        replay()
        assert out.isfinite().all()
        assert same_bits((out, None), run(problem, call, plan))


def test_packed_keys_keep_their_bounds() -> None:
    """cu_seqlens_k is the caller's: sequences of any length, and tokens after the last."""
    problem: Any = Problem("varlen", 3, 8, 2, 128, 128, 300, 700, mask=Mask(True), lengths="device")
    problem = replace(problem, place=Ragged(), codec=Codec("fp8", "token"))
    check(problem, device=DEVICE, run=run, zero_length=True)
