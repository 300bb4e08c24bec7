"""Triton's interpreter without what takes most of its time and decides nothing.

A kernel of a few tiles is thousands of operations on arrays of a few numbers, so what surrounds an
operation is what costs: types that are described in words nobody reads, shapes that are checked and
wrapped over and over. Here the same values are made once, or when they are asked for.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
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


def bfloat16_as_on_a_gpu(patch: Patch) -> None:
    """The interpreter keeps bf16 as raw bits, rounds towards zero and multiplies the bits."""
    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        types = src.dtype.scalar, dst_type.scalar
        if types == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(src.data).bfloat16().view(torch.uint16)
            return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)
        if types == (tl.bfloat16, tl.float32):
            data = (src.data.astype("uint32") << 16).view("float32")
            return interpreter.TensorHandle(data, tl.float32)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (cast_impl(self, x, tl.float32) for x in (a, b))
        return dot(self, a, b, *rest)

    patch.setattr(builder, "cast_impl", cast_impl)
    patch.setattr(builder, "create_dot", create_dot)


def kernels_run_calls(patch: Patch, num_sms: int = 0) -> None:
    """Calls on the CPU are planned as for an A100, or one of so many SMs, and launch its kernels,
    which run as Python."""
    import splitkv.cache
    import splitkv.flash_attn
    import splitkv.integrations.torch_sdpa
    import splitkv.runtime.append
    import splitkv.runtime.warmup
    from splitkv.core.device import GPUS, Device, cpu
    from splitkv.kernels.append import AppendLauncher
    from splitkv.kernels.host.append_call import Append

    gpu = replace(GPUS["a100"], num_sms=num_sms or GPUS["a100"].num_sms)

    def device_of(tensor: torch.Tensor) -> Device:
        return gpu if tensor.device.type == "cpu" else cpu()

    for name, module in list(sys.modules.items()):
        if name.startswith("splitkv") and hasattr(module, "device_of"):
            patch.setattr(module, "device_of", device_of)

    def run(call: Append, tensors: object, options: object) -> object:
        return AppendLauncher(call)(call, call.given)

    patch.setattr(splitkv.runtime.append, "_run", run)
    # A growing cache is launched by what Triton compiled, and here it compiles nothing.
    patch.setattr(splitkv.runtime.dispatch, "GROWS", ())
    patch.setattr(
        splitkv.runtime.dispatch, "_unfit", lambda operands, kernel: kernel.unfit(operands)
    )
    patch.setattr(torch.cuda, "device", lambda device: nullcontext())


class WithinTensors:
    """The interpreter's reads and writes, which have to lie within tensors that a launch is given;
    it would read anything that the process has. Other attributes are the interpreter's.

    access   where they are; spans: first address of each tensor, and that behind it
    """

    def __init__(self, access: Any) -> None:
        self.access, self.spans, self.kernel = access, [], ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.access, name)

    def load(self, places: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.expect_within("reads", places, mask, numpy.dtype(dtype).itemsize)
        return self.access.load(places, mask, other, dtype)

    def store(self, places: Any, value: Any, mask: Any) -> Any:
        self.expect_within("writes", places, mask, value.dtype.itemsize)
        return self.access.store(places, value, mask)

    def expect_within(self, does: str, places: Any, mask: Any, size: int) -> None:
        at = places[numpy.broadcast_to(mask, places.shape).astype(bool)].astype(numpy.int64)
        inside = numpy.zeros(at.shape, bool)
        for first, end in self.spans:
            inside |= (at >= first) & (at + size <= end)
        outside = at.size - inside.sum()
        assert not outside, f"{self.kernel} {does} {outside} of {at.size} numbers of no tensor"


def span_of(x: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor that has elements, and that behind its last one."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def accesses_within_tensors(patch: Patch) -> None:
    """Has launches fail that read or write what none of their tensors has."""
    access = WithinTensors(interpreter._interpreter)
    host_arguments = interpreter.GridExecutor._init_args_hst

    def tensors_in(values: Any) -> Any:
        for x in values:
            if isinstance(x, tuple):
                yield from tensors_in(x)
            elif isinstance(x, torch.Tensor) and x.numel():
                yield x

    def arguments_and_spans(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = host_arguments(self, args, kwargs)
        access.spans = [span_of(x) for x in tensors_in((*args, *kwargs.values()))]
        access.kernel = self.fn.__name__
        return on_host

    patch.setattr(interpreter, "_interpreter", access)
    patch.setattr(interpreter.GridExecutor, "_init_args_hst", arguments_and_spans)


def without_waste(patch: Patch) -> None:
    patch_language_once(patch)
    leave_overflow_unchecked(patch)
    look_up_types(patch)
    share_shapes(patch)
    describe_when_asked(patch)
    call_builtins_at_once(patch)
    unwrap_what_is_wrapped(patch)
    convert_what_differs(patch)
    broadcast_what_differs(patch)
    share_constants(patch)


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


def call_builtins_at_once(patch: Patch) -> None:
    """Not through a wrapper that asks whether there is a `_semantic`, which there is."""
    asks = core.builtin(call_builtins_at_once).__code__

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.TritonSemantic(builder)
        function = member.__wrapped__ if member.__code__ is asks else member

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, builtin)

    patch.setattr(interpreter, "_patch_attr", patch_attr)


def unwrap_what_is_wrapped(patch: Patch) -> None:
    """Most operands are tensors and most types are themselves."""
    unwrap, equal = core._unwrap_if_constexpr, tl.dtype.__eq__
    plain = tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, type(None)
    unwrapped = frozenset(plain)

    def unwrap_if_constexpr(x: Any) -> Any:
        kind = type(x)
        if kind is tl.constexpr:
            return x.value
        return x if kind in unwrapped else unwrap(x)

    def is_equal(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    patch.setattr(core, "_unwrap_if_constexpr", unwrap_if_constexpr)
    patch.setattr(tl.dtype, "__eq__", is_equal)


def convert_what_differs(patch: Patch) -> None:
    """Operands of one type are of the type of the result, but for a quotient's. A type is what it
    is in the interpreter's IR, which has no other."""
    semantic = interpreter.TritonSemantic
    checked, cast = semantic.binary_op_type_checking_impl, semantic.cast
    to_tensor = semantic.to_tensor
    common = functools.cache(semantic.computation_type_impl)

    def check_types(self: Any, a: Any, b: Any, *how: bool) -> Any:
        tensors = type(a) is tl.tensor and type(b) is tl.tensor
        if tensors and a.dtype is b.dtype and not (how[3:] or a.dtype.is_ptr()):
            return self.broadcast_impl_value(a, b)  # pointers are checked, quotients widened
        return checked(self, a, b, *how)

    def cast_what_differs(self: Any, x: Any, to: Any, *rounding: Any) -> Any:
        return x if x.dtype is to.scalar else cast(self, x, to, *rounding)

    patch.setattr(semantic, "binary_op_type_checking_impl", check_types)

    def tensor_of(self: Any, x: Any, *check: bool) -> Any:
        return x if type(x) is tl.tensor else to_tensor(self, x, *check)

    patch.setattr(semantic, "cast", cast_what_differs)
    patch.setattr(semantic, "to_tensor", tensor_of)
    patch.setattr(semantic, "computation_type_impl", common)
    patch.setattr(tl.block_type, "to_ir", lambda self, builder: self)


def broadcast_what_differs(patch: Patch) -> None:
    semantic = interpreter.TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_values(self: Any, a: Any, b: Any) -> Any:
        return (a, b) if a.shape is b.shape else broadcast(self, a, b)

    patch.setattr(semantic, "broadcast_impl_value", broadcast_values)


def share_constants(patch: Patch) -> None:
    """The array of a number is made once, and cannot be written to."""
    semantic = interpreter.TritonSemantic
    make = semantic.scalar_constant

    @functools.lru_cache(maxsize=4096)
    def made(self: Any, value: Any, kind: type, dtype: Any) -> Any:
        handle = make(self, value, dtype).handle
        handle.data.flags.writeable = False
        return handle

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        handle = made(self, value, type(value), dtype)
        return self.tensor(interpreter.TensorHandle(handle.data, handle.dtype), dtype)

    patch.setattr(semantic, "scalar_constant", scalar_constant)
