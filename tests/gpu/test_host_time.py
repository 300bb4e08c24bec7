"""What a call costs the host: the GPU must not wait for Python."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING

import splitkv
from splitkv import launch
from splitkv.testing import Paged, make_operands

MICROSECONDS = 25.0
CALLS, BATCHES = 50, 100
SMALL = replace(SERVING, batch=1, seqlen_k=512)
PROBLEMS = {
    "plain": SMALL,
    "host_lengths": replace(SMALL, lengths="host", return_lse=False),
    "paged": replace(SMALL, place=Paged(16), batch=4, sink_logits=True),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Not here: filling what was allocated would be timed, also by launchers of earlier tests."""
    launch._calls.clear()


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def host_microseconds(call: Callable[[], Any]) -> float:
    """Median over batches of the time of a call, the GPU idle at the start of each batch."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


@pytest.mark.parametrize("how", ["policy", "plan", "out", "one_split"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_decode(name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    call = make_operands(PROBLEMS[name], device=DEVICE)
    tensors = tuple(call.pop(n) for n in ("q", "k_cache", "v_cache"))
    if how == "plan":
        call["plan"] = splitkv.plan(*tensors, **call)
    elif how == "out":
        call["out"] = torch.empty_like(tensors[0])
    elif how == "one_split":
        call["num_splits"] = 1
    taken = host_microseconds(lambda: splitkv.decode(*tensors, **call))
    with capsys.disabled():
        print(f"\n  decode, {name}, {how}: {taken:.1f} us on the host", end="")
    assert taken <= MICROSECONDS
