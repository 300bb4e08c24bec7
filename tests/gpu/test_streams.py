"""Calls on several streams and threads at once: the partials of one are never another's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING, kernels, plan_with, same_bits

import splitkv
from splitkv.core.variants import Plain
from splitkv.kernels.host import workspace
from splitkv.planner.registry import kernel_named
from splitkv.testing import captured, make_operands

# Of different sizes, so that sharing a buffer would show.
PROBLEMS = (
    SERVING,
    replace(SERVING, batch=2, seqlen_k=3000, head_dim=64, head_dim_v=64),
    replace(SERVING, batch=7, num_heads=16, seqlen_k=1000),
)
HOW = [(name, merge) for name in kernels(SERVING) for merge in kernel_named(name).merges]
every_kernel = pytest.mark.parametrize(
    ("kernel", "merge"), [how for how in HOW if how[1] != "cluster"]
)


def made(kernel: str, merge: str, num_splits: int) -> tuple[list[Any], list[Any]]:
    """Calls and what they give when they are alone."""
    calls = []
    for i, problem in enumerate(PROBLEMS):
        plan = plan_with(kernel, problem, num_splits)
        plan = replace(plan, config=replace(plan.config, variant=Plain(), merge=merge))
        calls.append(make_operands(problem, device=DEVICE, seed=i) | {"plan": plan})
    wanted = [splitkv.decode(**call) for call in calls]
    torch.cuda.synchronize()
    return calls, wanted


@every_kernel
def test_streams(kernel: str, merge: str) -> None:
    calls, wanted = made(kernel, merge, num_splits=24)
    streams = [torch.cuda.Stream() for _ in calls]
    results: list[list[Any]] = [[] for _ in calls]
    for _ in range(60):
        for call, stream, found in zip(calls, streams, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(splitkv.decode(**call))
    torch.cuda.synchronize()
    for found, alone in zip(results, wanted, strict=True):
        assert all(same_bits(result, alone) for result in found)


@every_kernel
def test_one_stream_after_another(kernel: str, merge: str) -> None:
    """A buffer that grows for one call is not taken from under the one before."""
    workspace.release()
    calls, wanted = made(kernel, merge, num_splits=24)
    workspace.release()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = [splitkv.decode(**call) for _ in range(10) for call in calls]
    stream.synchronize()
    for i, result in enumerate(results):
        assert same_bits(result, wanted[i % len(calls)])


@every_kernel
def test_threads(kernel: str, merge: str) -> None:
    calls, wanted = made(kernel, merge, num_splits=24)

    def work(i: int) -> bool:
        stream = torch.cuda.Stream(calls[i]["q"].device)  # a thread begins on the first GPU
        with torch.cuda.stream(stream):
            results = [splitkv.decode(**calls[i]) for _ in range(60)]
        stream.synchronize()
        return all(same_bits(result, wanted[i]) for result in results)

    with ThreadPoolExecutor(len(calls)) as threads:
        assert all(threads.map(work, range(len(calls))))


@pytest.mark.parametrize("kernel", [name for name, merge in HOW if merge == "last"])
def test_graphs_at_once(kernel: str) -> None:
    """Each launch in a graph meets in counters of its own, in every replay."""
    calls, wanted = made(kernel, "last", num_splits=24)
    graphs = [
        captured(lambda call=call: [splitkv.decode(**call) for _ in range(10)]) for call in calls
    ]
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(20):
        for (replay, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    for (_, results), alone in zip(graphs, wanted, strict=True):
        assert all(same_bits(result, alone) for result in results)


def test_the_workspace_is_bounded_and_kept() -> None:
    workspace.release()
    call = make_operands(SERVING, device=DEVICE)
    most = 0
    for num_splits in (2, 64, 8, 33, 64, 2):
        splitkv.decode(**call, num_splits=num_splits)
        rows = num_splits * SERVING.num_kv_heads * SERVING.batch * SERVING.rows
        most = max(most, rows * (SERVING.head_dim_v + 2) * 4)
        held = workspace.held_bytes()
        assert held <= 2 * (most + 4096)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    results = [splitkv.decode(**call, num_splits=64) for _ in range(5)]
    after = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert after - before == 2 * len(results)  # out and lse


def test_backwards_on_streams_and_in_a_graph() -> None:
    """The sums of a backward are in its stream's buffer, or in the graph's own memory."""

    def call(length: int, heads: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        like: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        leaves = [torch.randn(1, length, n, 128, **like).requires_grad_() for n in (heads, 2, 2)]
        return leaves, torch.randn_like(leaves[0])

    def step(made: tuple[list[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves, grad = made
        out = splitkv.attention(*leaves, causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, grad)

    calls = [call(n, heads) for n, heads in ((300, 8), (512, 32), (77, 2), (700, 8))]
    wanted = [step(made) for made in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    with torch.cuda.stream(streams[0]):
        step(calls[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        in_graph = [step(made) for made in calls]
    found: list[tuple[int, tuple[torch.Tensor, ...]]] = []
    for _ in range(10):
        graph.replay()
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found += [(i, step(calls[i])) for i in (n, (n + 1) % len(calls))]
    torch.cuda.synchronize()
    for i, grads in [*found, *enumerate(in_graph)]:
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted[i], strict=True))
