"""What every test gets: seeds, poisoned memory, and a guard against hidden host syncs."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest
import torch

SRC = str(Path(__file__).parents[1] / "src")
os.environ["SPLITKV_CACHE"] = str(Path(__file__).parent / "no-cache")  # nobody's own tables
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, os.environ.get("PYTHONPATH")]))

hypothesis.settings.register_profile("splitkv", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("splitkv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-docs", action="store_true", help="rewrite the outputs quoted in docs/"
    )


gc.disable()  # nothing that collecting tests makes is garbage


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


torch.set_num_threads(1)  # one a worker: two of them on two cores wait for each other


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """The same numbers in every run of a test, other numbers in another test."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory that the package asks for is NaN, so that an element left unwritten shows."""

    def poisoning(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Any:
            fresh = allocate(*args, **kwargs)
            if torch.compiler.is_compiling():
                return fresh
            return poison_for(sys._getframe(1), fresh)

        return allocate_poisoned

    new_empty = torch.Tensor.new_empty

    def poisoned_new_empty(x: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():  # which cannot trace a method taken off its class
            return x.new_zeros(*size, **kwargs)
        return poison_for(sys._getframe(1), new_empty(x, *size, **kwargs))

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned_new_empty)
    guards = torch._C._dynamo.guards
    if hasattr(guards, "_empty_strided_cuda"):
        monkeypatch.setattr(guards, "_empty_strided_cuda", poisoning(guards._empty_strided_cuda))


def poison_for(caller: FrameType, x: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or the type's largest integer, if the package is the caller."""
    if caller.f_globals.get("__name__", "").split(".")[0] != "splitkv":
        return x
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)


@pytest.fixture
def no_host_sync() -> Callable[[], AbstractContextManager[None]]:
    """A context in which a call that waits for the GPU raises: for calls that are already warm."""

    @contextmanager
    def guard() -> Iterator[None]:
        with warnings.catch_warnings():  # "a prototype feature"
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return guard
