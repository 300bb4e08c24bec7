"""Compiling ahead of measuring: many kernels at once, each in a process, into Triton's cache.

A kernel takes a second to compile and a millisecond to time, so where many plans are measured most
of the time would be compiling. A process here makes the very launcher that a plan gets, with the
operands' true shapes, and stops where the kernel would be launched; the measuring process then
finds what it needs in Triton's cache on disk. Nothing here decides what is right: a kernel that did
not compile ahead, or one that nobody foresaw, is compiled when it is first launched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

from rich.console import Console

from splitkv.core.device import Device
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.terminal import say
from splitkv.lab.harness.timing import one_line

T = TypeVar("T")

AHEAD = 48  # items that wait for their kernels
MAX_BYTES = 2 << 30  # of keys and values of a plan compiled ahead: each process holds as many


class Compiler:
    """`jobs` processes that compile the kernels of plans; none, and nothing is compiled ahead."""

    def __init__(self, jobs: int) -> None:
        self.pool = None
        if jobs:
            context = get_context("spawn")  # a fork has no use of CUDA
            self.pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=only_compile)
        self.known: dict[Any, Future[None]] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: Any) -> None:
        """Ends what is still being compiled: nobody waits for it any more."""
        if self.pool:
            running = list((self.pool._processes or {}).values())
            self.pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()

    def submit(self, plans: Iterable[Plan]) -> list[Future[None]]:
        """Done when the kernels of these plans are compiled, each of them once."""
        found = {key(plan): plan for plan in plans if self.pool and plan.device.kind == "cuda"}
        for needed, plan in found.items():
            if self.pool and needed not in self.known and plan.problem.kv_bytes <= MAX_BYTES:
                work = (plan.problem, plan.device, plan.kernel, plan.config)
                try:
                    self.known[needed] = self.pool.submit(compile_plan, *work)
                except BrokenExecutor:  # its processes cannot start, or one was killed
                    self.pool = None
        return [self.known[needed] for needed in found if needed in self.known]

    def failures(self) -> list[str]:
        """Why kernels did not compile ahead, of those that are done."""
        finished = [future for future in self.known.values() if done(future)]
        return [one_line(e) for future in finished if (e := future.exception())]

    def say_failures(self, console: Console) -> None:
        if failures := self.failures():
            say(console, f"{len(failures)} kernels did not compile ahead: {failures[0]}")


class Needed(NamedTuple):
    """The parts of a plan that decide which kernels it needs.

    few   whether it has so few rows that decode on Hopper has code for them
    """

    kernel: str
    config: Config
    problem: Problem
    few: bool


def key(plan: Plan) -> Needed:
    """The key that plans which need the same kernels share: they differ in run-time numbers."""
    p, c = plan.problem, plan.config
    powers = replace(
        c,
        num_splits=(c.num_splits - 1).bit_length(),
        programs=(p.batch - 1).bit_length() if c.programs else 0,
    )
    alike = replace(
        p, batch=1, num_heads=p.group, num_kv_heads=1, seqlen_q=min(p.seqlen_q, 2), seqlen_k=0
    )
    return Needed(plan.kernel, powers, alike, few=p.rows <= 8)


def in_order_of_readiness(
    items: Sequence[T], needs: Callable[[T], list[Future[None]]]
) -> Iterator[T]:
    """The items, each when what it needs is done, the first of those that are ready first.

    No more than `AHEAD` items wait at a time.
    """
    coming, left = iter(items), list[tuple[T, list[Future[None]]]]()
    while True:
        left += [(item, needs(item)) for item in islice(coming, AHEAD - len(left))]
        if not left:
            return
        ready = next((i for i, (_, futures) in enumerate(left) if all(map(done, futures))), None)
        if ready is None:
            running = {future for _, futures in left for future in futures if not done(future)}
            wait(running, return_when=FIRST_COMPLETED)
        else:
            yield left.pop(ready)[0]


def done(future: Future[None]) -> bool:
    return future.done()


def only_compile() -> None:
    """From here on this process compiles kernels and what launches them, but runs none."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if isinstance(kernel, CompiledKernel):
            kernel._init_handles()
        return kernel

    def make_launcher(self: Any) -> None:  # loading the kernel would take the GPU's time
        if self._run is None:
            self._run = driver.active.launcher_cls(self.src, self.metadata)

    def no_launch(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: None

    JITFunction.run = compile_only
    CompiledKernel.__getitem__ = no_launch
    CompiledKernel._init_handles = make_launcher
    os.nice(10)  # the process that measures goes first


def compile_plan(problem: Problem, device: Device, kernel: str, config: Config) -> None:
    """In a process of the pool: everything up to the launch, gradients included."""
    import torch

    import splitkv
    from splitkv.lab.harness.sequence_cases import blank

    plan = Plan(problem, device, "compiler", kernel, config, "compiled ahead")
    if problem.kind == "decode":
        splitkv.decode(**Inputs(Case("blank", problem), 1, blank=True).arguments(0), plan=plan)
    else:
        inputs = blank(problem)
        out = inputs.attend(plan)
        if problem.needs_grad:
            inputs.gradients(out)
    torch.cuda.empty_cache()  # every process of the pool has its own
