"""Kernels that Triton takes for compiled: of each a text in the place of its machine code.

What the host does with a kernel follows from its arguments, from what Triton specialises it for and
from the options it is launched with, and not from its instructions, which take seconds to make.
Triton's own compile runs: it looks into its cache, calls its listener and returns a kernel that
can be launched. Only the stages of its backend are left out.

Two kernels have the same text where Triton's key of them is the same: the function and all that it
calls, the types and specialisations of its arguments, its compile-time values and its options.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import triton
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

# What later stages would find out of a kernel that needs no memory but registers.
NEEDS = {
    "shared": 0,
    "tmem_size": None,
    "global_scratch_size": 0,
    "global_scratch_align": 1,
    "profile_scratch_size": 0,
    "profile_scratch_align": 1,
}
DESCRIPTOR = re.compile(r"tensordesc<\w*?(\d+)\w*\[([\d, ]+)\]")


@dataclass(frozen=True)
class Unbuilt:
    """What is known of a kernel before it is compiled, in the place of every text on the way."""

    name: str
    key: str
    descriptors: tuple[tuple[int, tuple[int, ...]], ...]  # bits of an element, box

    def __str__(self) -> str:
        return f"{self.name} {self.key}"

    def described(self) -> list[dict[str, Any]]:
        """Its tensor descriptors, as Triton has them in the metadata of a kernel."""
        plain = {"swizzle": 0, "elem_type": 0, "fp4_padded": False}
        return [
            {**plain, "elem_size": bits // 8, "block_size": [*box]}
            for bits, box in self.descriptors
        ]


def _unbuilt(source: ASTSource, *_: Any) -> Unbuilt:
    return Unbuilt(source.name, source.hash(), (*_descriptors(source.signature.values()),))


def _after(make_ir: Callable[..., Any]) -> Callable[..., Unbuilt]:
    """Parses a kernel, and throws away what comes of it."""

    def unbuilt(source: ASTSource, *rest: Any) -> Unbuilt:
        make_ir(source, *rest)
        return _unbuilt(source)

    return unbuilt


def _descriptors(types: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    for kind in types:
        if isinstance(kind, tuple):
            yield from _descriptors(kind)
        elif isinstance(kind, str) and (found := DESCRIPTOR.match(kind)):
            yield int(found[1]), tuple(map(int, found[2].split(",")))


def _no_stages(*of_backend: Any) -> tuple[str, str]:
    """Leaves the stages of a backend out, as a hook of Triton's that may change them."""
    if of_backend:
        stages, options = of_backend[1:3]

        def last(kernel: Unbuilt, metadata: dict[str, Any]) -> bytes:
            metadata |= {**NEEDS, "name": kernel.name, "tensordesc_meta": kernel.described()}
            return f"{kernel} {options.hash()}".encode()

        stages |= dict.fromkeys(stages, lambda kernel, metadata: kernel)
        stages["cubin"] = last
    return "uncompiled", "uncompiled"  # of what is cached, the key and its hash


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """For what is no machine code: nobody is to find it in Triton's cache."""
    return tempfile.TemporaryDirectory(prefix="splitkv-uncompiled-")


@contextmanager
def uncompiled(parsed: bool = False) -> Iterator[None]:
    """Triton compiles nothing meanwhile and takes every kernel for compiled.

    parsed   it parses each as ever: a kernel in Python that its front end refuses raises
    """
    knobs = triton.knobs
    with knobs.runtime.scope(), ExitStack() as patches:
        for source in (ASTSource, GluonASTSource):
            made = _after(source.make_ir) if parsed else _unbuilt
            patches.enter_context(mock.patch.object(source, "make_ir", made))
        # not by Triton's own setter, by which processes that tests start would have it, too
        patches.enter_context(mock.patch.dict(vars(knobs.cache), dir=_folder().name))
        knobs.runtime.add_stages_inspection_hook = _no_stages
        yield
