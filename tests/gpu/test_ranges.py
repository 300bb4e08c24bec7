"""Ranges of keys that the device reads: whole prompts, chunks of pages, and in a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE
from training import paged

import splitkv
from splitkv.core.kv import Codec, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.runtime import dispatch
from splitkv.testing import Call, captured, check, make_operands

RANGED = Problem(
    *("varlen", 5, 8, 2, 128, 128, 300, 900),
    mask=Mask(True),
    place=Ragged(),
    lengths="device",
    return_lse=True,
    bidirectional_ranges=True,
)
MASKS = [Mask(True), Mask(True, 100), Mask(True, 100, -1, 4), Mask(True, chunk=128)]


def planned(problem: Problem, call: Call) -> Plan:
    positional = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    rest = {name: x for name, x in call.items() if name not in positional}
    made = splitkv.plan(*(call[name] for name in positional), **rest)
    assert made.problem == problem and made.kernel == "prefill"
    return made


def run(num_splits: int = 1, merge: Any = "combine") -> Any:
    def launch(problem: Problem, call: Call) -> Any:
        made = planned(problem, call)
        config = replace(made.config, num_splits=num_splits, merge=merge)
        results = [splitkv.attention_varlen(**call, plan=replace(made, config=config))]
        results.append(splitkv.attention_varlen(**call, plan=replace(made, config=config)))
        (out, lse), (again, _) = results
        assert torch.equal(out, again)
        return out, lse

    return launch


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_prompts(mask: Mask, seed: int) -> None:
    check(replace(RANGED, mask=mask), device=DEVICE, run=run(), seed=seed)


@pytest.mark.parametrize("merge", ["combine", "last"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_few_queries_by_splits(mask: Mask, merge: Any) -> None:
    problem = replace(RANGED, mask=mask, seqlen_q=40)
    check(problem, device=DEVICE, run=run(4, merge))


@pytest.mark.parametrize("codec", [Codec(), Codec("fp8", "head"), Codec("int8", "token")], ids=str)
def test_pages(codec: Codec) -> None:
    problem = replace(RANGED, mask=Mask(True, 100), codec=codec)

    def of_pages(problem: Problem, call: Call) -> Any:
        return run()(*paged(problem, call, 16))

    check(problem, device=DEVICE, run=of_pages)


def test_in_a_graph() -> None:
    """Other ranges at the next replay."""
    problem = replace(RANGED, mask=Mask(True, 100), return_lse=False)
    call = make_operands(problem, device=DEVICE)
    replay, out = captured(lambda: splitkv.attention_varlen(**call))
    for seed in (1, 2):
        other = make_operands(problem, seed=seed)["bidirectional_ranges"]
        call["bidirectional_ranges"].copy_(other)
        replay()
        assert torch.equal(out, splitkv.attention_varlen(**call))


def test_gradients_are_those_of_torch() -> None:
    problem = replace(RANGED, needs_grad=True, seqlen_q=60, seqlen_k=90, dtype="float32")
    dispatch._warned.clear()
    with pytest.warns(UserWarning, match="attention_varlen runs on torch"):
        check(problem, device=DEVICE)
