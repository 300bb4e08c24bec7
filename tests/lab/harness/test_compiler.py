"""Compiling in other processes, which launch nothing."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import AnyGPU
from studying import CASE, H200, POLICY, console
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.kernels.host import launcher
from splitkv.lab.harness import compiler
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.compiler import Compiler, in_order_of_readiness
from splitkv.lab.tune import studies
from splitkv.lab.tune.studies import Effort
from splitkv.planner import registry
from splitkv.runtime import dispatch


@pytest.fixture(autouse=True)
def one_kernel_that_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = records.DECODE_SPLIT, records.TORCH_SDPA, records.TORCH_MATH
    monkeypatch.setattr(registry, "KERNELS", kernels)


ALL_KERNELS = registry.KERNELS


def run(cases: list[Case], path: Path | None = None, **options: Any) -> tuple[Any, Any, str]:
    out, screen = console()
    options = {"effort": Effort(), "jobs": 0, "time_limit": None, "console": out, **options}
    policies = options.pop("policies", POLICY)
    records, lost = studies.run_studies(cases, H200, policies, json_path=path, **options)
    return records, lost, screen.getvalue()


def one(case: Case = CASE) -> dict[str, Any]:
    who = studies.entries(case, H200, POLICY, 12)
    return studies.study(case, H200, who, 9)


def plan(splits: int = 4, tile_n: int = 64, problem: Problem = CASE.problem) -> Plan:
    return Plan(problem, H200, "test", "decode_split", Config(splits, 16, tile_n, 4, 2), "")


def test_plans_that_differ_in_run_time_numbers_share_their_kernels() -> None:
    wide = replace(CASE.problem, batch=7, seqlen_k=9999)
    same = [plan(3), plan(4), plan(4, problem=wide)]
    assert len({compiler.key(p) for p in same}) == 1
    grouped = replace(CASE.problem, num_heads=16)
    tokens = [replace(CASE.problem, num_heads=4, seqlen_q=n) for n in (2, 4)]  # 8 and 16 rows
    other = [plan(1), plan(2), plan(5), plan(4, 32), plan(problem=grouped)]
    other += [plan(problem=problem) for problem in tokens]
    assert len({compiler.key(p) for p in (*same, *other)}) == 1 + len(other)


class FakePool:
    """Runs nothing: its work is done when the test says so."""

    def __init__(self) -> None:
        self.work: list[tuple[Any, ...]] = []
        self.futures: list[Future[None]] = []

    def submit(self, function: Any, *args: Any) -> Future[None]:
        if len(self.work) == 3:
            raise compiler.BrokenExecutor
        self.work.append((function, *args))
        self.futures.append(Future())
        return self.futures[-1]


def test_what_is_still_compiling_is_ended_with_the_run() -> None:
    with Compiler(1) as ahead:
        assert ahead.pool is not None
        ahead.pool.submit(int).result()  # until its process has started
        long = ahead.pool.submit(time.sleep, 600)
        end = time.monotonic() + 20
        while not long.running() and time.monotonic() < end:
            time.sleep(0.01)
    with pytest.raises(compiler.BrokenExecutor):
        long.result(20)


def test_each_kernel_is_compiled_once_and_small_caches_only() -> None:
    ahead = Compiler(0)
    assert ahead.submit([plan()]) == []
    ahead.pool = pool = FakePool()  # type: ignore[assignment]
    first = ahead.submit([plan(3), plan(4)])
    assert len(first) == 1 and ahead.submit([plan(4)]) == first
    huge = replace(CASE.problem, batch=256, seqlen_k=1 << 19)
    assert ahead.submit([plan(4, 128, huge)]) == []
    assert pool.work == [
        (compiler.compile_plan, CASE.problem, H200, "decode_split", plan(4).config)
    ]
    pool.futures[0].set_exception(RuntimeError("ptxas\ndied"))
    assert ahead.failures() == ["RuntimeError: ptxas"]
    assert len(ahead.submit([plan(1), plan(2), plan(8), plan(16)])) == 2
    assert ahead.pool is None and ahead.submit([plan(32)]) == []


def test_what_is_ready_comes_first() -> None:
    futures = {name: Future[None]() for name in "abc"}
    futures["b"].set_result(None)
    order = in_order_of_readiness("abcd", lambda name: [futures[name]] if name in futures else [])
    assert next(order) == "b" and next(order) == "d"
    futures["c"].set_exception(RuntimeError("no matter"))
    assert next(order) == "c"
    futures["a"].set_result(None)
    assert list(order) == ["a"]


def test_no_more_wait_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    order = in_order_of_readiness(range(1000), lambda i: asked.append(i) or [])
    assert next(order) == 0 and len(asked) == compiler.AHEAD
    assert next(order) == 1 and len(asked) == compiler.AHEAD + 1
    assert list(order) == list(range(2, 1000))


class Loaded:
    """What Triton makes to launch a kernel, in its own module as far as anyone looks."""

    __module__ = nvidia.__name__
    global_scratch_size = profile_scratch_size = 0
    launch = staticmethod(print)  # of C, as Triton's; never called

    def __call__(self, *args: Any) -> None:
        self.launch(*args)


# Other heads each: a kernel that was compiled for one test is not compiled for another.
@pytest.mark.parametrize(("kernel", "heads"), [("decode_split", 3), ("hopper_decode_split", 5)])
def test_a_process_compiles_the_kernels_of_a_plan_and_launches_none(
    kernel: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    class Driver(AnyGPU):
        utils = SimpleNamespace(fill_tma_descriptor=None)

        def launcher_cls(self, src: Any, metadata: Any) -> Loaded:
            compiled.append(metadata.name)
            return Loaded()

    for owner, name in (
        (JITFunction, "run"),
        (CompiledKernel, "_init_handles"),
        (CompiledKernel, "__getitem__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("_cuda_getCurrentRawStream", "_cuda_isCurrentStreamCapturing"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    monkeypatch.setattr(registry, "KERNELS", ALL_KERNELS)
    monkeypatch.setattr(compiler.os, "nice", lambda by: None)
    monkeypatch.setattr(driver, "_active", Driver(90))
    monkeypatch.setattr(dispatch, "fit_plan", lambda plan, *_: registry.completed(plan))
    monkeypatch.setattr(
        compiler, "Inputs", lambda case, count, blank: Inputs(case, count, "cpu", blank=blank)
    )
    compiler.only_compile()
    merge = launcher.combine  # whichever test has compiled it in this process before
    monkeypatch.setattr(merge, "device_caches", defaultdict(merge.create_binder))
    problem = replace(CASE.problem, num_heads=heads)
    compiler.compile_plan(problem, H200, kernel, Config(4, num_stages=2))
    assert compiled == [kernel, "combine"]
