"""A GPU on which nothing runs: launches reach a recorder in the place of Triton's C function.

Tensors are the CPU's, plans those of a GPU of the table, kernels the real ones and Triton's
dispatch and specialisation its own. So what a call does on the host is what it does beside a GPU,
but for the driver's part of allocations and launches. Of a kernel that it compiles it has a
stand-in for the machine code, see uncompiled.py: that kernels compile is for tests/kernels.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from uncompiled import uncompiled

from splitkv import api
from splitkv.core.device import Device
from splitkv.integrations import serving
from splitkv.kernels.hopper.backward import launcher as hopper_backward
from splitkv.kernels.host import workspace
from splitkv.runtime import dispatch, growing, schedule

STREAM = 7
_numbers = itertools.count()


@dataclass
class Recorded:
    """The launches: what the C function was called with, as a kernel's name and its arguments."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    through_triton: int = 0


class CFunction:
    """In the place of Triton's C function of a kernel."""

    def __init__(self, name: str, recorded: Recorded) -> None:
        self.name, self.recorded = name, recorded

    def __call__(self, *args: Any) -> None:
        self.recorded.calls.append((self.name, args))


class Launcher:
    """A launcher as Triton 3.6 makes it for a kernel; descriptors are taken apart by Triton."""

    global_scratch_size = profile_scratch_size = 0
    __module__ = nvidia.__name__  # where the types of TMA are found

    def __init__(self, name: str, metadata: Any, recorded: Recorded) -> None:
        self.launch = CFunction(name, recorded)
        self.recorded, self.metas = recorded, metadata.tensordesc_meta or ()

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        if getattr(self, "recorded", None) is None or len(rest) < 4:
            raise TypeError("no launch")
        packed, metadata, enter, leave, *args = rest
        self.recorded.through_triton += not all(type(arg) is object for arg in args)
        metas, flat = iter(self.metas), list[Any]()
        for arg in args:
            if hasattr(arg, "block_shape"):
                next(metas)
                address = arg.base.data_ptr()
                flat += [("map", address), *arg.shape, *arg.strides]
            else:
                flat.append(_as_addresses(arg))
        self.launch(x, y, z, stream, function, False, True, packed, metadata, enter, leave, *flat)


def _as_addresses(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr()
    if isinstance(arg, tuple) and any(isinstance(x, torch.Tensor) for x in arg):
        return tuple(map(_as_addresses, arg))
    return arg


class Driver:
    """Triton's driver of that GPU."""

    def __init__(self, gpu: Device, recorded: Recorded) -> None:
        self.gpu, self.recorded = gpu, recorded
        self.name = f"recorded, {next(_numbers)}"  # kernels of another are not taken for its own
        fill = lambda address, *layout: ("map", address)  # noqa: E731
        properties = {"max_shared_mem": gpu.smem_per_block}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, binary, *rest: (None, zlib.crc32(binary), 0, 0, 1024),
            fill_tma_descriptor=fill,
            fill_tma_descriptor_tiled=fill,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 10 * self.gpu.capability[0] + self.gpu.capability[1], 32)

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return STREAM

    def launcher_cls(self, src: Any, metadata: Any) -> Launcher:
        return Launcher(src.fn.__name__, metadata, self.recorded)


@contextmanager
def fake_gpu(name: str = "h200", parsed: bool = False) -> Iterator[Recorded]:
    """Plans are those of a GPU meanwhile, launches go to what is given, and nothing is compiled.

    parsed   kernels are parsed, see uncompiled.py
    """
    recorded, gpu = Recorded(), Device.named(name)
    guards = torch._C._dynamo.guards
    zeros = lambda device, numel, captured: torch.zeros(numel, dtype=torch.int64)  # noqa: E731
    buffer = lambda device, numel, captured=False: _buffer(numel)  # noqa: E731
    with ExitStack() as patches:
        for target, attribute, value in (
            (torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM),
            *(
                (x, "_cuda_isCurrentStreamCapturing", lambda: False)
                for x in (torch._C, torch.cuda.graphs)
            ),
            (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
            (workspace, "make_buffer", buffer),
            (workspace, "_zeros", zeros),
            *((where, "device_of", lambda tensor: gpu) for where in (dispatch, api, schedule)),
            (driver, "_active", Driver(gpu, recorded)),
        ):
            patches.enter_context(mock.patch.object(target, attribute, value, create=True))
        for table in ("_buffers", "_counters", "_of_streams"):
            patches.enter_context(mock.patch.dict(getattr(workspace, table), clear=True))
        kernels = growing.compiled, hopper_backward.compiled
        for known in (*kernels, serving._planned, serving._one_launch):
            patches.enter_context(mock.patch.dict(known, clear=True))
        patches.enter_context(uncompiled(parsed))
        dispatch.calls.clear()
        yield recorded
        dispatch.calls.clear()


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that Triton compiles, or loads from its cache, meanwhile."""
    made: list[str] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, **_: made.append(src.fn.__name__)
        yield made


def functions_called(run: Callable[[], Any]) -> int:
    """How many functions Python calls for it, C functions counted."""
    count = 0

    def counted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


def _buffer(numel: int) -> workspace.Buffer:
    memory = torch.empty(1 << (numel - 1).bit_length())
    return memory.data_ptr(), memory.numel(), memory
