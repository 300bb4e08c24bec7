"""attention and attention_varlen of changing lengths on the GPU: every length is right, compiled or
not, and the same bits whatever was called before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from running import DEVICE
from torch import Tensor
from training import FUNCTION, TRAINING, paged

from splitkv.core.kv import Codec
from splitkv.runtime import dispatch
from splitkv.runtime.growing_sequences import GrowingSequences
from splitkv.testing import (
    Call,
    Mask,
    Problem,
    Ragged,
    Score,
    assert_close,
    assert_lse_close,
    expected,
    make_operands,
)

LENGTHS = (200, 201, 1, 16, 17, 208, 209, 64, 65, 128, 300, 513, 2, 700)
DENSE = replace(TRAINING, seqlen_q=200, seqlen_k=200)
VARLEN = replace(DENSE, kind="varlen", place=Ragged(), lengths="device", batch=3)
INT8 = replace(DENSE, codec=Codec("int8", "head"), products="half")
PROBLEMS: dict[str, tuple[Problem, int | None]] = {  # and the queries, where they stay
    "prompts": (DENSE, None),
    "full": (replace(DENSE, mask=Mask()), None),
    "one query": (DENSE, 1),
    "five queries": (DENSE, 5),
    "window": (replace(DENSE, mask=Mask(True, 130)), None),
    "window and sink tokens": (replace(DENSE, mask=Mask(True, 60, -1, 5)), None),
    "chunks": (replace(DENSE, mask=Mask(True, chunk=64)), None),
    "sinks": (replace(DENSE, sink_logits=True), None),
    "softcap": (replace(DENSE, score=Score(softcap=True)), None),
    "alibi": (replace(DENSE, score=Score(alibi=True)), None),
    "fp32": (replace(DENSE, dtype="float32", head_dim=64, head_dim_v=64), None),
    "rows of 72": (replace(DENSE, head_dim=72, head_dim_v=72), None),
    "packed": (VARLEN, None),
    "packed with a window": (replace(VARLEN, mask=Mask(True, 100)), None),
    "packed, one query": (VARLEN, 1),
    "int8": (INT8, None),
    "int8, one query": (INT8, 1),
    "e4m3": (replace(DENSE, codec=Codec("fp8", "head")), None),
    "packed int8": (replace(VARLEN, codec=Codec("int8", "head"), products="half"), None),
}


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    dispatch.calls.clear()
    yield
    dispatch.calls.clear()


def call_of(name: str, length: int, strided: bool = False) -> tuple[Problem, Call]:
    problem, queries = PROBLEMS[name]
    lengths = {"seqlen_q": length if queries is None else queries, "seqlen_k": length}
    here = replace(problem, **lengths)
    here = replace(here, mask=here.mask.within(here.seqlen_q, here.seqlen_k))
    call = make_operands(here, device=DEVICE, poison=False, strided=strided, seed=length)
    return here, call | problem.mask.arguments


def run(problem: Problem, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = FUNCTION[problem.kind](**call)
    return out, lse


def launchers() -> set[GrowingSequences]:
    entries = [e for of_options in dispatch.calls.recent.values() for e in of_options]
    found = (bound.launcher for *_, bound in entries)
    return {launcher for launcher in found if isinstance(launcher, GrowingSequences)}


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_length_is_right(name: str, strided: bool) -> None:
    results: dict[int, tuple[Tensor, Any]] = {}
    for length in LENGTHS:
        here, call = call_of(name, length, strided)
        out, lse = run(here, call)
        wanted, wanted_lse = expected(here, call)
        assert_close(out, wanted, expected(here, call, upcast=False)[0])
        rounded = None
        if here.products != "widened":
            rounded = expected(here, call, products="half")[1]
        assert_lse_close(lse, wanted_lse, rounded=rounded)
        results[length] = out, lse
    if not strided:
        assert launchers(), "lengths are served by one launcher"
    for length in (LENGTHS[0], LENGTHS[4], LENGTHS[-1]):  # again by itself
        dispatch.calls.clear()
        out, lse = run(*call_of(name, length, strided))
        assert torch.equal(out, results[length][0]) and torch.equal(lse, results[length][1])


@pytest.mark.parametrize("page_size", [16, 64])
def test_chunks_whose_keys_are_in_pages(page_size: int) -> None:
    """The last queries of each sequence, as many as there are in this step."""
    problem, packed = call_of("packed", 700)
    _, pages = paged(problem, packed, page_size)
    ends = packed["cu_seqlens_q"].tolist()
    for length in (90, 91, 1, 16, 17, 300, 33, 513):
        taken = [min(b - a, length) for a, b in pairwise(ends)]
        q = torch.cat([packed["q"][b - n : b] for n, b in zip(taken, ends[1:], strict=True)])
        bounds = torch.tensor([0, *accumulate(taken)], dtype=torch.int32, device=DEVICE)
        queries = {"q": q, "cu_seqlens_q": bounds, "max_seqlen_q": length}
        here = replace(problem, seqlen_q=length)
        out, lse = run(here, pages | queries)
        wanted, wanted_lse = expected(here, packed | queries)
        assert_close(out, wanted, expected(here, packed | queries, upcast=False)[0])
        assert_lse_close(lse, wanted_lse)
    assert launchers(), "lengths are served by one launcher"


def test_a_graph_of_one_length_is_not_changed_by_others() -> None:
    """Maps and strides of a captured launch are its own."""
    calls = {n: call_of("prompts", n) for n in (200, 201, 202, 203)}
    for n in (200, 201, 202):
        run(*calls[n])
    graph = torch.cuda.CUDAGraph()
    wanted = run(*calls[203])[0].clone()
    with torch.cuda.graph(graph):
        out = run(*calls[203])[0]
    for n in (200, 201, 202):
        run(*calls[n])
    graph.replay()
    assert torch.equal(out, wanted)
