"""These tests run Triton's kernels as Python: they need a process of their own.

Triton reads TRITON_INTERPRET where a kernel is defined, so it has to be set before the first kernel
is imported, and the compile-only tests could not run beside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter: expected to be run before triton is imported")
os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(HERE not in item.path.parents for item in items):
        raise pytest.UsageError("tests/interpreter: expected to be run alone")


@pytest.fixture(scope="session", autouse=True)
def interpreter_without_waste() -> Iterator[None]:
    """See tests/interpreting.py, which imports Triton."""
    from interpreting import without_waste

    with pytest.MonkeyPatch.context() as patch:
        without_waste(patch)
        yield


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as raw bits, rounds towards zero and multiplies the bits."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        types = src.dtype.scalar, dst_type.scalar
        if types == (float32, bfloat16):
            rounded = torch.from_numpy(src.data).bfloat16().view(torch.uint16)
            return TensorHandle(rounded.numpy(), bfloat16)
        if types == (bfloat16, float32):
            return TensorHandle((src.data.astype("uint32") << 16).view("float32"), float32)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == bfloat16:
            a, b = (cast_impl(self, x, float32) for x in (a, b))
        return dot(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
