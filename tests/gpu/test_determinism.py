"""The same plan gives the same bits; a fixed split size gives them whatever else is in a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, EVERY_PLAN, SERVING, fixed_plan, kernels, plan_with, plans, same_bits

import splitkv
from splitkv.testing import Call, Mask, Paged, Problem, make_operands

RUNS = 100


@pytest.mark.parametrize(
    ("kernel", "name"), [*((kernel, "policy") for kernel in kernels(SERVING)), *EVERY_PLAN]
)
def test_the_same_plan_gives_the_same_bits(kernel: str, name: str) -> None:
    plan = plan_with(kernel, SERVING) if name == "policy" else plans(SERVING, kernel)[name]
    call = make_operands(SERVING, device=DEVICE)
    first = splitkv.decode(**call, plan=plan)
    again = [splitkv.decode(**call, plan=plan) for _ in range(RUNS)]
    assert all(same_bits(result, first) for result in again)


def alone(problem: Problem, call: Call, b: int) -> tuple[Problem, Call]:
    """Sequence b of a call as a batch of its own."""
    one: dict[str, Any] = {"q": call["q"][b : b + 1]}
    one["cache_seqlens"] = call["cache_seqlens"][b : b + 1]
    if call["page_table"] is not None:
        one["page_table"] = call["page_table"][b : b + 1]
    else:
        one |= {n: call[n][b : b + 1] for n in ("k_cache", "v_cache")}
    return replace(problem, batch=1), call | one


@pytest.mark.parametrize("kernel", kernels(SERVING))
@pytest.mark.parametrize("split_size", [64, 256, 1024])
@pytest.mark.parametrize(
    "problem",
    [
        replace(SERVING, batch=8, seqlen_k=3000),
        replace(SERVING, batch=8, seqlen_k=3000, place=Paged(16), sink_logits=True),
        replace(SERVING, batch=8, seqlen_k=3000, mask=Mask(True, 900, -1, 4), seqlen_q=2),
    ],
    ids=["plain", "paged", "window"],
)
def test_a_fixed_split_size_is_batch_invariant(
    problem: Problem, split_size: int, kernel: str
) -> None:
    lengths = (3000, 1, 64, 65, 1024, 0, 2999, 700)
    call = make_operands(problem, device=DEVICE, lengths=lengths, poison=False)
    plan = fixed_plan(problem, split_size, kernel)
    out, lse = splitkv.decode(**call, plan=plan)
    for b in range(problem.batch):
        one_problem, one = alone(problem, call, b)
        result = splitkv.decode(**one, plan=fixed_plan(one_problem, split_size, kernel))
        assert same_bits(result, (out[b : b + 1], lse[b : b + 1])), lengths[b]
    shuffled = torch.randperm(problem.batch, device=DEVICE)
    mixed = call | {n: call[n][shuffled] for n in ("q", "cache_seqlens")}
    if call["page_table"] is not None:
        mixed["page_table"] = call["page_table"][shuffled]
    else:
        mixed |= {n: call[n][shuffled] for n in ("k_cache", "v_cache")}
    result = splitkv.decode(**mixed, plan=plan)
    assert same_bits(result, (out[shuffled], lse[shuffled]))
