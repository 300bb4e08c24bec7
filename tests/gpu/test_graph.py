"""CUDA graphs: captured once, right for any lengths and page tables up to the planned maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING, Result, batch_plan, fixed_plan, plan_with, same_bits
from torch import Tensor

import splitkv
from splitkv.testing import Call, Mask, Paged, Problem, Score, captured, check, make_operands

CAPTURED_AT = (128,) * SERVING.batch
STEPS = (
    (128, 128, 128, 128),
    (1, 1, 1, 1),
    (4096, 4096, 4096, 4096),
    (129, 128, 127, 64),
    (1, 4096, 7, 2000),
    (0, 5, 0, 4096),
    (0, 0, 0, 0),
    (3000, 65, 1024, 1025),
)
SMALL = replace(SERVING, head_dim=64, head_dim_v=64)
PROBLEMS = {
    "plain": SERVING,
    "paged": replace(SMALL, place=Paged(16)),
    "page_size_1": replace(SMALL, place=Paged(1), num_heads=4),
    "window": replace(SMALL, mask=Mask(True, 500, -1, 4), sink_logits=True),
    "several_queries": replace(SMALL, seqlen_q=4, place=Paged(64), score=Score(True, True)),
    "no_lse": replace(SMALL, return_lse=False),
}
HOW: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "policy": lambda problem: {},
    "one_split": lambda problem: {"num_splits": 1},
    "seven_splits": lambda problem: {"num_splits": 7},
    "fixed": lambda problem: {"plan": fixed_plan(problem, 256)},
    "any_gpu": lambda problem: {"plan": plan_with("decode_split", problem)},
    "any_gpu_seven_splits": lambda problem: {"plan": plan_with("decode_split", problem, 7)},
    "any_gpu_fixed": lambda problem: {"plan": fixed_plan(problem, 256, "decode_split")},
    "batch": lambda problem: {
        "plan": batch_plan(problem, problem.batch + 37, splitkv.plan(problem).kernel)
    },
    "any_gpu_batch": lambda problem: {"plan": batch_plan(problem, problem.batch + 37)},
}


def pair(problem: Problem, result: Any) -> Result:
    return result if problem.return_lse else (result, None)


class Captured:
    """A call of decode in a graph; its operands keep their addresses."""

    def __init__(self, problem: Problem, call: Call, repeat: int = 1, **how: Any) -> None:
        self.problem, self.call = problem, call

        def run() -> list[Result]:
            return [pair(problem, splitkv.decode(**call, **how)) for _ in range(repeat)]

        self.start, self.results = captured(run)

    def replay(self) -> Result:
        for result in self.results:
            for x in result:
                if x is not None:
                    x.fill_(torch.nan)
        self.start()
        assert all(same_bits(result, self.results[0]) for result in self.results)
        return self.results[0]

    def run(self, problem: Problem, call: Call) -> Result:
        """`run=` of `check`: other contents at the captured addresses."""
        assert problem == self.problem
        for name, x in call.items():
            if isinstance(x, Tensor):
                self.call[name].copy_(x)
        return tuple(x if x is None else x.clone() for x in self.replay())


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, "policy") for name in PROBLEMS]
    + [(name, how) for name in ("plain", "paged", "window") for how in HOW if how != "policy"],
)
def test_lengths_and_pages_change_between_replays(name: str, how: str) -> None:
    problem = PROBLEMS[name]
    call = make_operands(problem, device=DEVICE, lengths=CAPTURED_AT)
    graph = Captured(problem, call, **HOW[how](problem))
    for seed, lengths in enumerate(STEPS):
        check(problem, seed=seed, device=DEVICE, run=graph.run, lengths=lengths)


def test_every_length_from_one_to_the_maximum() -> None:
    """A generation: one more key a step, the same bits as an eager call at every length."""
    problem = replace(SERVING, batch=2, seqlen_k=700, head_dim=64, head_dim_v=64)
    call = make_operands(problem, device=DEVICE, lengths=(1, 1), poison=False)
    graph = Captured(problem, call)
    for length in range(1, 701, 3):
        call["cache_seqlens"].copy_(torch.tensor([length, 701 - length]))
        assert same_bits(graph.replay(), splitkv.decode(**call)), length


def test_replay_allocates_nothing() -> None:
    call = make_operands(SERVING, device=DEVICE)
    graph = Captured(SERVING, call)
    graph.start()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        graph.start()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_calls_in_a_row_share_the_memory_of_partials() -> None:
    """Layers of a model: each writes its partials where the one before has just merged its own."""
    call = make_operands(SERVING, device=DEVICE)
    graph = Captured(SERVING, call, repeat=20, num_splits=16)
    for seed in range(3):
        check(SERVING, seed=seed, device=DEVICE, run=graph.run)


def test_eager_calls_around_a_graph() -> None:
    """Neither meets the other's partials."""
    call = make_operands(SERVING, device=DEVICE, seed=1)
    other_problem = replace(SERVING, batch=8)
    other = make_operands(other_problem, device=DEVICE, seed=2)
    wanted_other = splitkv.decode(**other, num_splits=32)
    wanted = splitkv.decode(**call, num_splits=16)
    graph = Captured(SERVING, call, num_splits=16)
    for _ in range(5):
        assert same_bits(splitkv.decode(**other, num_splits=32), wanted_other)
        assert same_bits(graph.replay(), wanted)
        assert same_bits(splitkv.decode(**call, num_splits=16), wanted)


def test_two_graphs_replayed_in_turns() -> None:
    graphs, wanted = [], []
    for seed, splits in ((1, 16), (2, 9)):
        call = make_operands(SERVING, device=DEVICE, seed=seed)
        wanted.append(splitkv.decode(**call, num_splits=splits))
        graphs.append(Captured(SERVING, call, num_splits=splits))
    for turn in (0, 1, 1, 0, 0, 1):
        assert same_bits(graphs[turn].replay(), wanted[turn])


def test_a_graph_beside_eager_calls_of_another_stream() -> None:
    call = make_operands(SERVING, device=DEVICE, seed=1)
    other = make_operands(SERVING, device=DEVICE, seed=2)
    wanted, wanted_other = (splitkv.decode(**c, num_splits=16) for c in (call, other))
    graph = Captured(SERVING, call, num_splits=16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(50):
        graph.start()
        with torch.cuda.stream(side):
            results.append(splitkv.decode(**other, num_splits=16))
    torch.cuda.synchronize()
    assert same_bits(graph.results[0], wanted)
    assert all(same_bits(result, wanted_other) for result in results)
