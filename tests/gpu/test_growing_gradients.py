"""Training on sequences of changing lengths on the GPU: the gradients of every length are right,
and with `deterministic` the same bits whatever was called before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE
from torch import Tensor
from training import FUNCTION, TRAINING, compare_with_reference, gradients

from splitkv.runtime import dispatch
from splitkv.runtime.growing_gradients import GrowingGradients
from splitkv.testing import Call, Mask, Problem, Ragged, Score, make_operands

LENGTHS = (200, 201, 16, 17, 208, 209, 64, 65, 128, 300, 513, 2, 700)
DENSE = replace(TRAINING, seqlen_q=200, seqlen_k=200, needs_grad=True)
VARLEN = replace(DENSE, kind="varlen", place=Ragged(), lengths="device", batch=3)
PROBLEMS: dict[str, Problem] = {
    "dense": DENSE,
    "full": replace(DENSE, mask=Mask()),
    "window": replace(DENSE, mask=Mask(True, 130)),
    "window and sink tokens": replace(DENSE, mask=Mask(True, 60, -1, 5)),
    "sinks": replace(DENSE, sink_logits=True),
    "any GPU's kernels": replace(DENSE, score=Score(True, True), sink_logits=True),
    "packed": VARLEN,
    "packed with sinks": replace(VARLEN, sink_logits=True),
    "packed with a window": replace(VARLEN, mask=Mask(True, 100)),
}


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    dispatch.calls.clear()
    yield
    dispatch.calls.clear()


def call_of(problem: Problem, length: int) -> tuple[Problem, Call]:
    here = replace(problem, seqlen_q=length, seqlen_k=length)
    here = replace(here, mask=problem.mask.within(length, length))
    call = make_operands(here, device=DEVICE, poison=False, seed=length)
    return here, call | problem.mask.arguments


def run(problem: Problem, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = FUNCTION[problem.kind](**call)
    return out, lse


def launchers() -> list[GrowingGradients]:
    entries = [e for of_options in dispatch.calls.recent.values() for e in of_options]
    return [x.launcher for *_, x in entries if isinstance(x.launcher, GrowingGradients)]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_of_every_length_are_right(name: str, deterministic: bool) -> None:
    problem = replace(PROBLEMS[name], deterministic=deterministic)
    found: dict[int, dict[str, Any]] = {}
    for length in LENGTHS:
        here, call = call_of(problem, length)
        outputs = run(here, call)
        compare_with_reference(here, call, outputs)
        found[length] = gradients(call, *run(here, call))
    assert launchers(), "lengths are served by one launcher"
    if deterministic:
        for length in (LENGTHS[0], LENGTHS[5], LENGTHS[-1]):  # again by itself
            dispatch.calls.clear()
            here, call = call_of(problem, length)
            again = gradients(call, *run(here, call))
            assert all(torch.equal(x, found[length][n]) for n, x in again.items())
