"""Steps of an engine by a schedule of items: drawn lengths, graphs, the same bits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, HERE, same_bits
from training import TRAINING, paged, run

import splitkv
from splitkv.core.plan import Plan
from splitkv.kernels.limits import hopper_prefill
from splitkv.testing import (
    Call,
    Mask,
    Paged,
    Problem,
    Ragged,
    Score,
    assert_close,
    assert_lse_close,
    captured,
    expected,
    make_operands,
)

HOPPER = HERE.capability == (9, 0)
STEPS = 12  # drawn of each kernel
AXES: cases.Axes = {
    "heads": ((8, 2), (7, 1), (4, 4), (16, 1)),
    "head_dims": (*hopper_prefill.HEAD_DIMS, (96, 96)),
    "dtype": ("bfloat16", "float16"),
    "page_size": (16, 64, 128),
    "mask": (Mask(True), Mask(), Mask(True, 300, -1, 5)),
    "extras": (False, True),  # a soft cap and sink logits
    "pieces": (256, 2048),  # keys of one, at least
}
PAIRS = cases.pairs(AXES) if HOPPER else []
PAGES = (16, 64) if HOPPER else ()
SMALL = Problem("varlen", 40, 8, 2, 128, 128, 400, 3400, mask=Mask(True), lengths="device")


def drawn(draw: random.Random, batch: int, longest: int) -> list[tuple[int, int]]:
    """Queries and keys of every sequence: none, one, a draft, or a prompt or its chunk."""
    step = []
    for _ in range(batch):
        kinds = 0, 1, 1, 1, draw.randint(2, 17), draw.randint(18, 300)
        queries = draw.choice(kinds)
        cached = draw.choice((0, 1, 15, draw.randint(0, longest), draw.randint(0, longest)))
        step.append((queries, queries + cached))
    return [*step, (draw.choice((1, 40)), 60)]


def call_of(problem: Problem, step: list[tuple[int, int]]) -> Call:
    """The call of a step, its keys without pages."""
    call = make_operands(problem, lengths=[keys for _, keys in step], device=DEVICE)
    ends = [0, *accumulate(queries for queries, _ in step)]
    call["cu_seqlens_q"] = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(ends[-1], problem.num_heads, problem.head_dim, generator=g)
    call["q"] = q.to(call["k"])
    return call


def by_items(problem: Problem, pieces: int, **sizes: Any) -> Plan:
    """A plan whose programs follow a schedule, in pieces of at least so many keys."""
    found = hopper_prefill.configs(problem, HERE)
    config = next(c for c in found if c.programs == 0)
    pieces = max(pieces, config.tile_n)
    config = replace(config, schedule="items", split_size=pieces, num_splits=8, **sizes)
    return Plan(problem, HERE, "fixed", "hopper_prefill", config, "a test")


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_drawn_steps(number: int) -> None:
    values, draw = PAIRS[number], random.Random(number)
    (num_heads, num_kv_heads), (head_dim, head_dim_v) = values["heads"], values["head_dims"]
    for _ in range(STEPS):
        step = drawn(draw, draw.choice((1, 3, 20)), draw.choice((100, 3000)))
        problem = replace(
            TRAINING,
            kind="varlen",
            place=Ragged(),
            lengths="device",
            batch=len(step),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=values["dtype"],
            mask=values["mask"],
            seqlen_q=300,
            seqlen_k=max(keys for _, keys in step),
            score=Score(values["extras"], False),
            sink_logits=values["extras"],
            return_lse=True,
        )
        ragged = call_of(problem, step)
        ref, ref_lse = expected(problem, ragged)
        working, _ = expected(problem, ragged, upcast=False)
        in_pages, call = paged(problem, ragged, values["page_size"])
        plan = by_items(in_pages, values["pieces"])
        out, lse = run(in_pages, call | {"plan": plan})
        assert_close(out, ref, working)
        assert ref_lse is not None and lse is not None
        assert_lse_close(lse, ref_lse)
        assert all(same_bits(run(in_pages, call | {"plan": plan}), (out, lse)) for _ in range(3))


@pytest.mark.parametrize("page_size", PAGES)
def test_tokens_after_the_last_sequence(page_size: int) -> None:
    """They see no key, few of them and many."""
    for behind in (3, 90):
        problem = replace(SMALL, place=Ragged(), return_lse=True)
        step = drawn(random.Random(behind), problem.batch - 1, 3000)
        problem, call = paged(problem, call_of(problem, step), page_size)
        ends = call["cu_seqlens_q"]
        ends.clamp_(max=int(ends[-1]) - behind)
        call["cache_seqlens"].zero_()
        out, lse = run(problem, call | {"plan": by_items(problem, 256)})
        assert lse is not None
        assert out[-behind:].abs().max() == 0 and lse[:, -behind:].isneginf().all()


@pytest.mark.parametrize("page_size", PAGES)
def test_replay_with_other_lengths(page_size: int) -> None:
    """A graph is right for every step of as many tokens, also for one that has no query."""
    problem = replace(SMALL, place=Ragged(), return_lse=True)
    steps = [drawn(random.Random(seed), problem.batch - 1, 3000) for seed in range(4)]
    steps.append([(0, 0)] * problem.batch)
    most = max(sum(queries for queries, _ in step) for step in steps)
    longest = [max(of_step[b][1] for of_step in steps) for b in range(problem.batch)]
    ragged = call_of(problem, [(0, keys) for keys in longest[:-1]] + [(most, longest[-1])])
    in_pages, call = paged(problem, ragged, page_size)
    plan = by_items(in_pages, 512)
    replay, (out, lse) = captured(lambda: run(in_pages, call | {"plan": plan}))
    for step in steps:
        ends = [0, *accumulate(queries for queries, _ in step)]
        call["cu_seqlens_q"].copy_(torch.tensor(ends))
        call["cache_seqlens"].copy_(torch.tensor([keys for _, keys in step]))
        replay()
        again = out.clone(), lse.clone()
        direct = run(in_pages, call | {"plan": plan})
        assert same_bits(again, direct)
        even = replace(plan, config=plan.config.shape)
        for x, y in zip(again, run(in_pages, call | {"plan": even}), strict=True):
            assert y is not None
            torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page_size", PAGES)
def test_the_policy_takes_it(page_size: int) -> None:
    problem = replace(SMALL, place=Paged(page_size), batch=64, seqlen_q=2048, seqlen_k=16384)
    problem = replace(problem, num_heads=32, num_kv_heads=8)
    assert splitkv.plan(problem).config.schedule == "items"


@pytest.mark.parametrize("page_size", PAGES)
def test_calls_of_other_lengths(page_size: int) -> None:
    """Calls that differ in lengths alone are launched again, with as many entries as they need."""
    problem = replace(SMALL, place=Ragged(), num_heads=32, num_kv_heads=8, return_lse=True)
    for seed in range(6):
        step = drawn(random.Random(seed), problem.batch - 1, 3000)
        in_pages, call = paged(problem, call_of(problem, step), page_size)
        in_pages = replace(in_pages, seqlen_q=2048 + seed)
        call |= {"max_seqlen_q": in_pages.seqlen_q, "max_seqlen_k": in_pages.seqlen_k}
        plan = splitkv.plan(in_pages)
        assert plan.config.schedule == "items"
        even = replace(plan, config=plan.config.shape)
        found, other = run(in_pages, call), run(in_pages, call | {"plan": even})
        for x, y in zip(found, other, strict=True):
            assert x is not None and y is not None
            torch.testing.assert_close(x.float(), y.float(), atol=2e-2, rtol=2e-2)
