"""What every test gets: seeds, poisoned memory, and a guard against hidden host syncs."""

from __future__ import annotations

import gc
import os
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import hypothesis
import pytest
import torch
from poisoning import poison_fresh_memory

pytest_plugins = ["codegen"]

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
    poison_fresh_memory(monkeypatch)


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
