"""Sink tokens of each sequence in Triton's interpreter: `decode_split` and `prefill` beside the
reference, and beside themselves with one number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter import test_decode_split as decode
from interpreter import test_prefill as prefill

from splitkv.core.kv import Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import FAR, Mask
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.testing import Call, check, make_operands

pytestmark = decode.pytestmark

# any number, a bound in the middle of a tile, one that no window leaves a gap behind, and a chunk
MASKS = (
    *(Mask(True, 20, -1, FAR), Mask(True, 9, -1, 25), Mask(True, 60, -1, 50)),
    *(Mask(window_left=7, window_right=3, sink_tokens=FAR), Mask(True, chunk=24, sink_tokens=40)),
    Mask(True, 5, -1, 3, 20),
)
DECODE = replace(decode.DECODE, batch=4, num_heads=3, num_kv_heads=1, sequence_sink_tokens=True)
VARLEN = Problem(
    *("varlen", 4, 2, 1, 16, 32, 30, 70, "float16"),
    place=Ragged(),
    lengths="device",
    return_lse=True,
    sequence_sink_tokens=True,
)
SPLITS: tuple[dict[str, Any], ...] = ({}, {"num_splits": 3}, {"num_splits": 2, "merge": "last"})


def seed_of(*values: Any) -> int:
    """Another draw of each test, the same every time."""
    return sum(map(ord, repr(values)))


@pytest.mark.parametrize("schedule", ["even 1", "even 3", "fixed"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_decode(mask: Mask, schedule: str) -> None:
    problem = replace(DECODE, mask=mask)
    launch = decode.run(decode.plan_of(problem, schedule))
    check(problem, run=launch, seed=seed_of(mask, schedule), zero_length=schedule == "even 3")


@pytest.mark.parametrize("codec", [Codec(), Codec("int8", "token"), Codec("fp8", "head")], ids=str)
def test_decode_of_pages_beside_all_else(codec: Codec) -> None:
    mask, score = Mask(True, 20, -1, 50), Score(True, True)
    problem = replace(DECODE, mask=mask, codec=codec, score=score, sink_logits=True)
    problem = replace(problem, place=Paged(8), out_scale=True, seqlen_q=3)
    check(problem, run=decode.run(decode.plan_of(problem, "even 3")), seed=seed_of(codec))


@pytest.mark.parametrize("options", SPLITS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed_sequences(mask: Mask, options: dict[str, Any]) -> None:
    seed = seed_of(mask, options)
    check(replace(VARLEN, mask=mask), run=prefill.run(**options), seed=seed, zero_length=seed % 2)


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_dense_batches(options: dict[str, Any]) -> None:
    problem = replace(VARLEN, kind="dense", place=Contiguous(), lengths="host")
    problem = replace(problem, mask=Mask(True, 9, -1, FAR))
    check(problem, run=prefill.run(32, 16, **options), seed=seed_of(options), strided=True)


@pytest.mark.parametrize("merge", prefill.MERGES)
def test_pages(merge: Any) -> None:
    problem = replace(VARLEN, mask=Mask(True, 12, -1, FAR), bidirectional_ranges=True)
    launch = prefill.in_pages(16, prefill.run(num_splits=2, merge=merge))
    check(problem, run=launch, seed=seed_of(merge))


def as_one_number(call: Call, sink_tokens: int) -> Call:
    """The call with as many sink tokens in all sequences."""
    return call | {"sink_tokens": sink_tokens, "max_sink_tokens": None}


@pytest.mark.parametrize("schedule", ["even 3", "fixed"])
def test_the_bits_of_a_sequence_are_those_of_its_number(schedule: str) -> None:
    """Of 0, of some, of more than there are keys; below 0 it is as 0."""
    problem = replace(DECODE, mask=Mask(True, 20, -1, FAR), return_lse=True)
    call = make_operands(problem, lengths=(100, 90, 37, 64))
    numbers = (0, 33, 2**31 - 1, -(2**31))
    call["sink_tokens"] = torch.tensor(numbers, dtype=torch.int32)
    out, lse = decode.run(decode.plan_of(problem, schedule))(problem, call)
    for b, number in enumerate(numbers):
        mask = replace(problem.mask, sink_tokens=min(max(number, 0), FAR))
        alike = replace(problem, mask=mask, sequence_sink_tokens=False)
        launch = decode.run(decode.plan_of(alike, schedule))
        of_one, lse_of_one = launch(alike, as_one_number(call, mask.sink_tokens))
        assert torch.equal(out[b], of_one[b]) and torch.equal(lse[b], lse_of_one[b])


def test_the_bits_of_a_packed_sequence_are_those_of_its_number() -> None:
    problem = replace(VARLEN, mask=Mask(True, 12, -1, FAR))
    call = make_operands(problem, seed=3)
    numbers = (17, 0, -5, 2**31 - 1)
    call["sink_tokens"] = torch.tensor(numbers, dtype=torch.int32)
    out, _ = prefill.run(num_splits=2)(problem, call)
    rows = call["cu_seqlens_q"].tolist()
    for b, number in enumerate(numbers):
        mask = replace(problem.mask, sink_tokens=min(max(number, 0), FAR))
        alike = replace(problem, mask=mask, sequence_sink_tokens=False)
        of_one, _ = prefill.run(num_splits=2)(alike, as_one_number(call, mask.sink_tokens))
        own = slice(rows[b], rows[b + 1])
        assert torch.equal(out[own], of_one[own])
