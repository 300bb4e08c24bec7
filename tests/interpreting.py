"""Triton's interpreter without what takes most of its time and decides nothing.

A kernel of a few tiles is thousands of operations on arrays of a few numbers, so what surrounds an
operation is what costs: types that are described in words nobody reads, shapes that are checked and
wrapped over and over. Here the same values are made once, or when they are asked for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

Patch = pytest.MonkeyPatch


class WhenAsked:
    """An attribute that a class sets in each object, made at the first look at it instead."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make

    def __get__(self, owner: Any, kind: type) -> Any:
        made = owner.__dict__[self.name] = self.make(owner)
        return made

    def __set_name__(self, kind: type, name: str) -> None:
        self.name = name


def without_waste(patch: Patch) -> None:
    patch_language_once(patch)
    leave_overflow_unchecked(patch)
    look_up_types(patch)
    share_shapes(patch)
    describe_when_asked(patch)


def patch_language_once(patch: Patch) -> None:
    """Not anew for every call of a device function: the launch around it has done so."""
    patch_lang = interpreter._patch_lang

    @functools.cache
    def seen_by(fn: Any) -> list[Any]:
        return [lang for lang in (tl, core) if any(x is lang for x in fn.__globals__.values())]

    def patch_lang_once(fn: Any) -> Any:
        unpatched = any(core.is_builtin(lang.load) for lang in seen_by(fn))
        return patch_lang(fn) if unpatched else interpreter._LangPatchScope()

    patch.setattr(interpreter, "_patch_lang", patch_lang_once)


def leave_overflow_unchecked(patch: Patch) -> None:
    """Whether an integer overflows is computed without a look at the answer."""
    options = interpreter.interpreter_builder.options
    assert not options.debug, "else what overflows is asserted"
    unchecked = replace(options, sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", unchecked)


def look_up_types(patch: Patch) -> None:
    """NumPy's type for one of Triton's, without a table of all of them for each."""
    of_scalar = functools.cache(interpreter._get_np_dtype)
    of_pointer = numpy.dtype(numpy.uint64)

    def numpy_type(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return of_pointer if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)


def share_shapes(patch: Patch) -> None:
    """Nothing writes to the shape of a type or a tensor: equal ones are one."""

    @functools.cache
    def of_type(sizes: tuple[int, ...]) -> tuple[Any, int]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        return core.tuple(sizes), core.validate_block_shape(sizes)

    @functools.cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes))

    def block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        self.element_ty = element_ty
        self.sizes = tuple([n if type(n) is int else core._unwrap_if_constexpr(n) for n in shape])
        self.shape, self.numel = of_type(self.sizes)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensor(type.sizes if type.is_block() else ())

    patch.setattr(tl.block_type, "__init__", block_type)
    patch.setattr(tl.tensor, "__init__", tensor)


def describe_when_asked(patch: Patch) -> None:
    """The types of tuples and constants, and what a type is called."""
    make_tuple = core.tuple.__init__

    def tuple_of(self: Any, args: Sequence[Any], type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    def constant(self: Any, value: Any) -> None:
        self.value = value.value if isinstance(value, tl.constexpr) else value

    patch.setattr(core.tuple, "__init__", tuple_of)
    patch.setattr(tl.constexpr, "__init__", constant)
    for kind, name, make in (
        (core.tuple, "type", lambda x: core._type_for_tuple_values(x.values)),
        (tl.constexpr, "type", lambda x: core.constexpr_type(x.value)),
        (tl.block_type, "name", lambda x: f"<{x.shape}, {x.element_ty}>"),
    ):
        attribute = WhenAsked(make)
        attribute.__set_name__(kind, name)
        patch.setattr(kind, name, attribute, raising=False)
