"""These tests run Triton's kernels as Python: they need a process of their own.

Triton reads TRITON_INTERPRET where a kernel is defined, so it has to be set before the first kernel
is imported, and the compile-only tests could not run beside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter: expected to be run before triton is imported")
os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(HERE not in item.path.parents for item in items):
        raise pytest.UsageError("tests/interpreter: expected to be run alone")


@pytest.fixture(scope="session", autouse=True)
def interpreter_without_waste() -> Iterator[None]:
    """See tests/support/interpreting.py, which imports Triton."""
    from interpreting import bfloat16_as_on_a_gpu, without_waste

    with pytest.MonkeyPatch.context() as patch:
        without_waste(patch)
        bfloat16_as_on_a_gpu(patch)
        yield
