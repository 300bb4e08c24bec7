"""A pool of processes that are the ranks of gloo groups, for many tests: starting them costs most.

    with Ranks(4) as ranks:
        results = ranks.run(task, 2, argument)     # [task(group, argument) of rank 0, of rank 1]

A task is a function of an importable module; what it is given and returns is pickled. What a task
raises comes back as an instance of `Raised`. A pool that does not answer is ended.

On GPUs of which there is one a rank the groups are of NCCL. NCCL takes no two ranks of one GPU, so
on fewer they are of gloo, and what is moved goes through host memory: see rank_staging.py.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOAD = "torch", "splitkv.distributed", "rank_tasks"
PATIENCE = 90.0  # seconds


@dataclass(frozen=True)
class Raised:
    """What a rank's task raised: its type's name, what it says, and the traceback."""

    kind: str
    message: str
    where: str


class Ranks:
    """Processes 0 .. count - 1, of which the first few are the ranks of a call.

    on_gpu   whether each has a GPU, its own where there are enough
    staged   whether what is moved is copied as it is on too few GPUs
    """

    def __init__(self, count: int, *, on_gpu: bool = False, staged: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
        if not on_gpu:
            context.set_forkserver_preload(list(PRELOAD))
        # kernels are compiled within a call
        self.patience = 4 * PATIENCE if on_gpu else PATIENCE
        how = on_gpu, staged
        self.meeting = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(count)]
        self.connections = [ours for ours, _ in pipes]
        where = str(Path(self.meeting.name) / "store")
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, count, where, how), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.close()  # the loop of the process ends
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.terminate()
        self.meeting.cleanup()

    def each(self, task: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """What the task returns or raises on each of `size` ranks."""
        message = pickle.dumps((task, size, arguments))
        for connection in self.connections[:size]:
            connection.send_bytes(message)
        end = time.monotonic() + self.patience
        found = []
        for rank, connection in enumerate(self.connections[:size]):
            if not connection.poll(max(end - time.monotonic(), 0)):
                for process in self.processes:
                    process.terminate()
                raise TimeoutError(f"rank {rank} of {size} did not return from {task.__name__}")
            found.append(pickle.loads(connection.recv_bytes()))
        return found

    def run(self, task: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
        """What the task returns on each of `size` ranks; none may raise."""
        found = self.each(task, size, *arguments)
        for rank, result in enumerate(found):
            assert not isinstance(result, Raised), f"rank {rank} of {size}\n{result.where}"
        return found


def _serve(connection: Any, rank: int, count: int, where: str, how: tuple[bool, bool]) -> None:
    import rank_staging
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    on_gpu, staged = how
    gpus = torch.cuda.device_count() if on_gpu else 0
    if on_gpu:
        torch.cuda.set_device(rank % gpus)
    backend = "nccl" if on_gpu and gpus >= count else "gloo"
    dist.init_process_group(backend, init_method=f"file://{where}", rank=rank, world_size=count)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, count + 1)}
    if staged or (on_gpu and backend == "gloo"):
        rank_staging.install()
    while True:
        try:
            task, size, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            result = task(groups[size], *arguments)
        except Exception as error:  # told to who asked
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        connection.send_bytes(pickle.dumps(result))
