"""A process that finds and compiles what calls of a model need: `main`.

It reads pickled requests from its standard input and writes pickled answers to its standard output,
each behind its length; `compile_pool.py` is the other end. It never asks for a GPU.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from splitkv.core.device import Device
from splitkv.kernels.host.compile_only import Variants, compile_only, link_without_libcuda
from splitkv.runtime.serving_shapes import Shape
from splitkv.runtime.warmup import Model

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Task:
    """A call of a model: what is to be compiled of it, by the names of variants; None: nothing, the
    variants are to be found."""

    model: Model
    shapes: Sequence[Shape]
    wanted: frozenset[str] | None = None


@dataclass(frozen=True)
class Answer:
    """The outcome of a task.

    asked      the variants that were found: name -> the kernel, the first shape that needs it
    compiled   those that were compiled: name -> folder of Triton's cache
    failures   what could not be compiled, in words
    """

    asked: dict[str, tuple[str, Shape]]
    compiled: dict[str, str]
    failures: list[str]


def answer(task: Task) -> Answer:
    """Does a task."""
    gpu = task.model.gpu
    assert isinstance(gpu, Device)
    wanted = task.wanted or frozenset()
    variants = Variants(wanted=wanted.__contains__)
    asked: dict[str, tuple[str, Shape]] = {}
    failures = []
    with compile_only(gpu, variants):
        for shape in task.shapes:
            known = len(variants.asked)
            try:
                task.model.call_of(shape).run()
            except Exception as error:  # one call that fails is not to end all others
                failures.append(f"{shape}: {type(error).__name__}: {error}")
            for name in list(variants.asked)[known:]:
                asked[name] = variants.asked[name], shape
    missing = wanted - variants.compiled.keys()
    failures += [f"{task.shapes[0]}: {name} was not asked for again" for name in missing]
    return Answer(asked, variants.compiled, failures)


def read(stream: BinaryIO) -> Any:
    """The next object; None at the end."""
    length = stream.read(LENGTH.size)
    return pickle.loads(stream.read(LENGTH.unpack(length)[0])) if length else None


def write(stream: BinaryIO, x: Any) -> None:
    data = pickle.dumps(x)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anybody prints is no answer
    logging.getLogger("triton.runtime.build").setLevel(logging.ERROR)
    link_without_libcuda()
    while (task := read(sys.stdin.buffer)) is not None:
        write(answers, answer(task))
