"""decode along the growth of a contiguous cache on the GPU: every length is right, compiled or not,
and the same bits whether a call before it was longer, shorter or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING
from torch import Tensor

import splitkv
from splitkv.core.kv import Codec
from splitkv.core.masks import Mask
from splitkv.runtime import dispatch
from splitkv.runtime.growing_caches import GrowingCaches
from splitkv.testing import Call, Problem, assert_close, assert_lse_close, expected, make_operands

LONGEST = 700
LENGTHS = (500, 501, 502, 503, 511, 512, 513, 514, 545, 544, 640, 641, 30, 31, 5, LONGEST)
GROWING = replace(SERVING, batch=2, seqlen_k=LONGEST, lengths="host", return_lse=True)
PROBLEMS: dict[str, Problem] = {
    "plain": GROWING,
    "fp16, two tokens": replace(GROWING, dtype="float16", seqlen_q=2),
    "fp32": replace(GROWING, dtype="float32"),
    "window and sink tokens": replace(GROWING, mask=Mask(True, 100, -1, 4)),
    "sinks": replace(GROWING, sink_logits=True),
    "one sequence": replace(GROWING, batch=1),
    "lengths on the device": replace(GROWING, lengths="device"),
    "int8": replace(GROWING, codec=Codec("int8", "head")),
    "int8 by token": replace(GROWING, codec=Codec("int8", "token")),
    "e4m3 by token": replace(GROWING, codec=Codec("fp8", "token")),
}
LAYOUTS = "heads", "keys", "slices", "max_seqlen_k"


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    dispatch.calls.clear()
    yield
    dispatch.calls.clear()


def cut(problem: Problem, call: Call, length: int, layout: str) -> tuple[Problem, Call]:
    """The call with so many of its keys, its caches laid out so."""
    cut: dict[str, Any] = {"max_seqlen_k": length if layout == "max_seqlen_k" else None}
    if problem.lengths == "device":
        cut["cache_seqlens"] = call["cache_seqlens"].clamp(max=length)
    if layout == "max_seqlen_k":
        return replace(problem, seqlen_k=length), call | cut
    for name in ("k_cache", "v_cache"):
        cut[name] = laid_out(call[name][:, :length], layout)
    if problem.codec.granularity == "token":
        for name in ("k_scale", "v_scale"):
            cut[name] = laid_out(call[name][:, :length], layout)
    return replace(problem, seqlen_k=length), call | cut


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "slices":
        return x
    if layout == "keys" or x.dim() < 4:
        return x.contiguous()
    return x.transpose(1, 2).contiguous().transpose(1, 2)  # as transformers concatenates them


def grown() -> list[GrowingCaches]:
    entries = [entry for of_options in dispatch.calls.recent.values() for entry in of_options]
    return [b.launcher for *_, b in entries if isinstance(b.launcher, GrowingCaches)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_length_is_right(name: str, layout: str) -> None:
    problem = PROBLEMS[name]
    whole = make_operands(problem, device=DEVICE, poison=False)
    results = {}
    for length in LENGTHS:
        here, call = cut(problem, whole, length, layout)
        out, lse = splitkv.decode(**call)
        wanted, wanted_lse = expected(here, call)
        assert_close(out, wanted, expected(here, call, upcast=False)[0])
        assert_lse_close(lse, wanted_lse)
        results[length] = out, lse
    if layout != "max_seqlen_k" or problem.lengths == "host":
        assert grown(), "lengths are served by one launcher"
    for length in (LENGTHS[1], LENGTHS[-1]):  # again by itself
        dispatch.calls.clear()
        out, lse = splitkv.decode(**cut(problem, whole, length, layout)[1])
        assert torch.equal(out, results[length][0]) and torch.equal(lse, results[length][1])


def test_a_graph_of_one_length_is_not_changed_by_others() -> None:
    """Maps and strides of a captured launch are its own."""
    whole = make_operands(PROBLEMS["plain"], device=DEVICE, poison=False)
    calls = [cut(PROBLEMS["plain"], whole, n, "heads")[1] for n in (500, 501, 502, 503)]
    for call in calls[:3]:
        splitkv.decode(**call)
    graph, call = torch.cuda.CUDAGraph(), calls[3]
    wanted = splitkv.decode(**call)[0].clone()
    with torch.cuda.graph(graph):
        out = splitkv.decode(**call)[0]
    for other in calls[:3]:
        splitkv.decode(**other)
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_behind_a_slice_is_not_seen(name: str) -> None:
    """Not even NaN, though maps of slices go on to the longest caches of a bucket: the bits are the
    same whatever is there."""
    problem = PROBLEMS[name]
    whole = make_operands(problem, device=DEVICE, poison=False)
    for length in (500, 501, 502, 503, 511, 513, 514, 515):
        call = dict(whole)
        for cache in ("k_cache", "v_cache"):
            call[cache] = whole[cache].clone()
            call[cache][:, length:].view(torch.uint8).fill_(0xFF)
        out, lse = splitkv.decode(**cut(problem, call, length, "slices")[1])
        wanted, wanted_lse = splitkv.decode(**cut(problem, whole, length, "slices")[1])
        assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    assert grown(), "lengths are served by one launcher"
