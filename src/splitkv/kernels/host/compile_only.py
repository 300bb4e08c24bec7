"""Compiling for a GPU, here or not, by launching on one that runs nothing.

Kernels are specialised for their arguments, so what a call needs is found by making it: with
tensors that stand for real ones (`stand_in.py`) on a driver that knows an architecture and launches
nothing. All that is compiled is in Triton's cache then, with the C module by which Triton 3.6
launches it, as a process with the GPU will look for both.

Sets Triton's active driver: for a process that does nothing else meanwhile.
"""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from splitkv.core.device import Device

THREADS = 1024  # of a block, at most


@dataclass
class Variants:
    """The specialisations that launches ask Triton to compile while this is entered.

    wanted     whether to compile a variant, by its name; the others are only found
    asked      the variants that were asked for: name -> the kernel's own name
    compiled   of the wanted ones: name -> folder of Triton's cache
    """

    wanted: Callable[[str], bool] = lambda variant: False
    asked: dict[str, str] = field(default_factory=dict)
    compiled: dict[str, str] = field(default_factory=dict)


def variant_name(module: str, kernel: str, key: str) -> str:
    """A name of one kernel's specialisation that is equal in every process."""
    return hashlib.sha256(f"{module}.{kernel} {key}".encode()).hexdigest()[:24]


@contextmanager
def compile_only(gpu: Device, variants: Variants) -> Iterator[None]:
    """Kernels launched meanwhile are asked for, compiled if wanted, and not run."""

    def asked_for(*, key: str, fn: Any, compile: Any, **_: Any) -> bool:
        name = variant_name(fn.module, fn.name, key)
        variants.asked[name] = fn.name
        last[:] = [name]
        return not variants.wanted(name)  # True: Triton compiles nothing

    def compiled(*, src: Any, metadata: Any, cache_hit: bool, **_: Any) -> None:
        variants.compiled[last[0]] = Path(get_cache_manager(metadata["hash"]).cache_dir).name
        if not cache_hit:
            build_launcher(src, SimpleNamespace(**metadata))

    def launched(metadata: Any) -> None:
        """While launches are observed, launchers keep nothing of them."""

    last: list[str] = []  # the variant that is being compiled
    knobs, active = triton.knobs, driver._active
    with knobs.runtime.scope(), knobs.compilation.scope():
        knobs.runtime.jit_cache_hook = asked_for
        knobs.runtime.launch_enter_hook = launched
        knobs.compilation.listener = compiled
        driver.set_active(_Driver(gpu))
        try:
            yield
        finally:
            driver._active = active


class _Driver:
    """A driver of Triton that says what compiling and launching ask for, and runs nothing."""

    def __init__(self, gpu: Device) -> None:
        self.gpu = gpu
        properties = {"max_shared_mem": gpu.smem_per_block}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, binary, shared, device: (None, 0, 0, 0, THREADS),
        )

    def get_current_target(self) -> GPUTarget:
        major, minor = self.gpu.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> str:
        return f"compile only, {self.gpu.arch}"  # no kernel of a real device is known under it

    def get_current_stream(self, device: str) -> int:
        return 0

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        return lambda *args: None


def build_launcher(src: Any, metadata: Any) -> None:
    """Builds into Triton's cache the C modules that launch a kernel, where Triton has such."""
    nvidia = _with_launchers_in_c()
    if nvidia is None:
        return
    _build_utilities()
    with suppress(ImportError):  # built and kept, but there is no libcuda to load it with
        nvidia.CudaLauncher(src, metadata)


@cache
def _build_utilities() -> None:
    from triton.backends.nvidia import driver as nvidia

    with suppress(ImportError):
        nvidia.CudaUtils()


@cache
def _with_launchers_in_c() -> Any:
    """Triton's module that builds a C module for each signature; None where Triton does not, or
    where nothing here compiles C."""
    from triton.backends.nvidia import driver as nvidia

    if not hasattr(nvidia, "make_launcher") or not hasattr(nvidia, "library_dirs"):
        return None
    try:
        nvidia.library_dirs()
    except (AssertionError, OSError, subprocess.SubprocessError):
        return None
    return nvidia


def make_libcuda(folder: Path) -> bool:
    """Makes a libcuda.so.1 with nothing in it, to link against where there is no GPU's; whether
    there is a compiler for that."""
    source = folder / "empty.c"
    source.write_text("")
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", f"-Wl,-soname,{library.name}", "-o", str(library), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def link_without_libcuda() -> None:
    """Lets Triton's modules in C be linked where no libcuda is installed, for this process."""
    from triton.backends.nvidia import driver as nvidia

    if not hasattr(nvidia, "libcuda_dirs"):
        return
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.SubprocessError):
        folder = Path(tempfile.mkdtemp(prefix="splitkv-libcuda-"))
        if make_libcuda(folder):
            triton.knobs.nvidia.libcuda_path = str(folder)
            nvidia.libcuda_dirs.cache_clear()
            nvidia.library_dirs.cache_clear()
