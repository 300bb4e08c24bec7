"""Compiles what a model needs, in processes on all cores, for a GPU that may not
be there."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from splitkv.runtime import compile_worker
from splitkv.runtime.compile_worker import Answer, Task, read, write
from splitkv.runtime.serving_shapes import Shape
from splitkv.runtime.warmup import Model

AT_ONCE = 64  # calls of a task that finds variants
Progress = Callable[[str, int, int], None]
"""Progress(what, done, of): told after each task."""

Work = tuple[Model, Sequence[Shape]]


@dataclass(frozen=True)
class Compiled:
    """The kernels that a warm-up has compiled.

    calls    calls that were made
    kernels  variants of kernels that these need: name -> the kernel's own name
    folders  of those that are in Triton's cache now: name -> folder
    failures what could not be compiled, in words
    first_calls  of each variant a model and the shape of a call that needs it
    """

    calls: int
    kernels: dict[str, str]
    folders: dict[str, str]
    failures: tuple[str, ...]
    first_calls: dict[str, tuple[Model, Shape]]


def compile_calls(
    works: Sequence[Work],
    *,
    processes: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what, done, of: None,
) -> Compiled:
    """Compiles all that the calls of models launch, each variant once.

    works      models, whose `gpu` is what is compiled for, and the shapes of their calls
    processes  default: one a core
    out        in the place of Triton's cache
    """
    finding = [
        Task(model, list(shapes)[n : n + AT_ONCE])
        for model, shapes in works
        for n in range(0, len(list(shapes)), AT_ONCE)
    ]
    with _workers(processes or os.cpu_count() or 1, len(finding), out) as run:
        asked: dict[str, tuple[str, Shape, Model]] = {}
        failures: list[str] = []
        for done, (task, found) in enumerate(run(finding)):
            failures += found.failures
            for name, (kernel, shape) in found.asked.items():
                asked.setdefault(name, (kernel, shape, task.model))
            progress("plans", done + 1, len(finding))
        compiling = [
            Task(model, [shape], frozenset([name])) for name, (_, shape, model) in asked.items()
        ]
        folders: dict[str, str] = {}
        for done, (_, made) in enumerate(run(compiling)):
            failures += made.failures
            folders |= made.compiled
            progress("kernels", done + 1, len(compiling))
    calls = sum(len(task.shapes) for task in finding)
    kernels = {name: kernel for name, (kernel, _, _) in asked.items()}
    first_calls = {name: (model, shape) for name, (_, shape, model) in asked.items()}
    return Compiled(calls, kernels, folders, tuple(dict.fromkeys(failures)), first_calls)


Run = Callable[[Sequence[Task]], Iterator[tuple[Task, Answer]]]


@contextmanager
def _workers(processes: int, tasks: int, out: str | os.PathLike[str] | None) -> Iterator[Run]:
    """A function that has tasks done by processes, and gives them as they are done."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if out is not None:
        environment["TRITON_CACHE_DIR"] = str(out)
    # not by -m: what is pickled there would be of a module of another name
    main = f"from {compile_worker.__name__} import main; main()"
    command = [sys.executable, "-c", main]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for _ in range(max(1, min(processes, tasks)))
    ]
    try:
        yield lambda tasks: _run(workers, tasks)
    finally:
        for worker in workers:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.close()
        for worker in workers:
            worker.wait()
            worker.stdout.close()  # type: ignore[union-attr]


def _run(
    workers: Sequence[subprocess.Popen[bytes]], tasks: Sequence[Task]
) -> Iterator[tuple[Task, Answer]]:
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Task, Answer] | BaseException] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)

    def serve(worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdin is not None and worker.stdout is not None
        while True:
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                write(worker.stdin, task)  # type: ignore[arg-type]
                answer = read(worker.stdout)  # type: ignore[arg-type]
                if answer is None:
                    raise RuntimeError(f"a process that compiles ended with {worker.wait()}")
                done.put((task, answer))
            except BaseException as error:
                done.put(error)
                return

    threads = [threading.Thread(target=serve, args=(w,), daemon=True) for w in workers]
    for thread in threads:
        thread.start()
    for _ in tasks:
        result = done.get()
        if isinstance(result, BaseException):
            raise result
        yield result
    for thread in threads:
        thread.join()
