"""Threads that call, plan and clear caches at the same time give and get what one does."""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from fake_gpu import fake_gpu

import splitkv
from splitkv.core.device import Device
from splitkv.kernels.host import tensor_maps, workspace
from splitkv.kernels.host.compile_lock import OnePerDevice
from splitkv.planner import registry
from splitkv.runtime import dispatch

THREADS = 4
ROUNDS, FEWEST, ENOUGH = 60, 10, 20.0  # the least of them, and seconds after which that is enough
HUNG = 120.0  # seconds after that
SPLITS = 1, 2, 3
SIZES = (1, 8), (512, 2), (512, 2)  # tokens and heads of q, k, v
H200 = Device.named("h200")


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    """The interpreter changes between threads after each few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*works: Callable[[random.Random], None]) -> list[int]:
    """Does each work ROUNDS times in a thread of its own, all at once, and raises what one did;
    how often each was done.

    A thread that is to go on needs a processor: beside other processes the changes, of which there
    is one every few operations, take a thousand times as long, and there are fewer rounds.
    """
    begin, errors = threading.Barrier(len(works)), list[BaseException]()
    rounds, end = [0] * len(works), time.monotonic() + ENOUGH

    def run(work: Callable[[random.Random], None], number: int) -> None:
        r = random.Random(number)
        begin.wait()
        try:
            while rounds[number] < (ROUNDS if time.monotonic() < end else FEWEST):
                work(r)
                rounds[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(w, n)) for n, w in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(end + HUNG - time.monotonic(), 0))
        assert not thread.is_alive(), "threads wait for each other"
    if errors:
        raise errors[0]
    return rounds


def test_calls_plans_and_cleared_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where results can be compared."""
    monkeypatch.setattr(registry, "MAX_CHOICES", 8)
    q = torch.randn(2, 1, 4, 16)
    caches = {n: torch.randn(2, 2, n, 2, 16) for n in range(5, 25)}
    wanted = {n: splitkv.decode(q, *caches[n]) for n in caches}

    def call(r: random.Random) -> None:
        n = r.choice(list(caches))
        assert torch.equal(splitkv.decode(q, *caches[n]), wanted[n])

    def plan(r: random.Random) -> None:
        n = r.choice(list(caches))
        made = splitkv.plan(q, *caches[n])
        assert made.problem.seqlen_k == n
        assert torch.equal(splitkv.decode(q, *caches[n], plan=made), wanted[n])

    def clear(r: random.Random) -> None:
        dispatch.calls.clear()
        registry._choices.clear()

    together(call, call, plan, clear)


def test_launches_of_one_stream_are_never_in_one_workspace() -> None:
    """Decode and training beside a GPU on which nothing runs: calls that merge partials take turns
    with buffers, and maps of addresses are made and forgotten."""
    with fake_gpu() as recorded:
        q = torch.randn(2, 1, 8, 128, dtype=torch.bfloat16)
        caches = {n: torch.randn(2, 2, n, 2, 128, dtype=torch.bfloat16) for n in (512, 1024)}
        x = [torch.randn(1, 16, h, 128, dtype=torch.bfloat16) for h in (8, 2, 2)]
        grad = torch.randn_like(x[0])

        def call(r: random.Random) -> None:
            n = r.choice(list(caches))
            out = splitkv.decode(q, *caches[n], num_splits=r.choice(SPLITS))
            assert out.shape == q.shape

        def train(r: random.Random) -> None:
            leaves = [t.detach().requires_grad_() for t in x]
            out = splitkv.attention(*leaves, causal=True)
            for leaf, found in zip(leaves, torch.autograd.grad(out, leaves, grad), strict=True):
                assert found.shape == leaf.shape

        def clear(r: random.Random) -> None:
            dispatch.calls.clear()
            workspace.release()

        *called, trained, _ = together(call, call, train, clear)
        names = [name for name, _ in recorded.calls]
    assert names.count("hopper_backward") == trained == names.count("backward_rows")
    decodes = [args for name, args in recorded.calls if name.startswith("decode")]
    assert len(decodes) == sum(called)


def test_kernels_are_compiled_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, whatever threads ask for: CPython 3.11 may fail where two parse at once."""
    inside, most, made = [0], [0], list[str]()
    compile_source = triton.compiler.compile

    def watched(src: Any, *rest: Any, **named: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        variant = src.name, src.signature, src.constants, src.attrs, named["options"]
        made.append(" ".join(map(str, variant)))
        time.sleep(0.01)
        try:
            return compile_source(src, *rest, **named)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(triton.compiler, "compile", watched)
    x = [torch.randn(1, 16, h, 128, dtype=torch.bfloat16) for h in (8, 2, 2)]
    with fake_gpu(parsed=True):

        def call(r: random.Random) -> None:
            batch, dtype = r.choice((1, 2)), r.choice((torch.bfloat16, torch.float16))
            q, k, v = (torch.zeros(batch, n, h, 128, dtype=dtype) for n, h in SIZES)
            splitkv.decode(q, k, v, num_splits=r.choice(SPLITS), return_lse=r.choice((True, False)))

        def train(r: random.Random) -> None:
            leaves = [t.detach().requires_grad_() for t in x]
            out = splitkv.attention(*leaves, causal=r.choice((True, False)))
            torch.autograd.grad(out, leaves, torch.empty_like(out))

        together(call, train, call, train)
    assert most[0] == 1
    assert len(made) == len({*made}) > 8


def test_threads_that_ask_first_for_a_device_get_the_same() -> None:
    def slowly() -> list[int]:
        time.sleep(0.01)
        return []

    caches, got = OnePerDevice(defaultdict(slowly)), dict[int, list[list[int]]]()

    def ask(device: int) -> None:
        got.setdefault(device, []).append(caches[device])

    for device in range(5):
        threads = [threading.Thread(target=ask, args=(device,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got[device]) == 4 and all(x is caches[device] for x in got[device])


def test_threads_that_parse_at_once() -> None:
    """With nothing in Triton's cache on disk."""
    with fake_gpu(parsed=True), triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True

        def call(splits: int, r: random.Random) -> None:
            q, k, v = (torch.zeros(1, n, h, 64, dtype=torch.bfloat16) for n, h in SIZES)
            splitkv.decode(q, k, v, num_splits=splits, return_lse=r.choice((True, False)))

        together(*(functools.partial(call, splits) for splits in SPLITS))


def test_maps_of_addresses_are_bounded_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "MAX_MAPS", 7)
    monkeypatch.setattr(tensor_maps, "_made", [])
    tile = tensor_maps.Tile(lambda at, *rest: ("map", at), (0, 2, 1, [1]))
    made = tensor_maps.TensorMaps(tile, (8,), (1,))

    def look(r: random.Random) -> None:
        for _ in range(20):
            address = r.randrange(16, 16 * 40, 16)
            assert made[address][0] == ("map", address)

    together(*[look] * THREADS)
    assert len(made) <= 7 + THREADS
