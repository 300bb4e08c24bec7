"""Compiling one kernel at a time, whatever threads ask for it.

CPython 3.11 counts the recursion of `ast.parse` for a whole interpreter, so that two threads in
which Triton parses a kernel may fail with "recursion depth mismatch". Launches are not held up: who
holds the lock while a full queue of a GPU waits for what another thread is about to launch would
wait forever.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from typing import Any

compiling = threading.RLock()
"""Held while a kernel of this package is parsed or compiled."""


class OnePerDevice(dict[Any, Any]):
    """A kernel's caches of compiled variants, one for each device. Two threads that ask first for a
    device get the same, where of a defaultdict one may fill what the other has replaced by then."""

    def __init__(self, known: defaultdict[Any, Any]) -> None:
        super().__init__(known)
        self.new = known.default_factory

    def __missing__(self, device: Any) -> Any:
        with compiling:
            if device not in self:
                assert self.new is not None
                self[device] = self.new()
            return self[device]


def one_at_a_time(kernel: Any) -> Any:
    """The kernel of Triton or Gluon, which compiles under the lock from now on, and what another
    thread has compiled meanwhile not again."""
    attributes = getattr(kernel, "__dict__", {})
    if "_do_compile" in attributes or not hasattr(kernel, "_do_compile"):  # or the interpreter's
        return kernel
    compile_variant = kernel._do_compile
    if isinstance(kernel.device_caches, defaultdict):
        kernel.device_caches = OnePerDevice(kernel.device_caches)

    @functools.wraps(compile_variant)
    def under_lock(key: Any, signature: Any, device: Any, *rest: Any, **named: Any) -> Any:
        with compiling:
            known = kernel.device_caches[device][0].get(key)
            if known is not None:
                return known
            return compile_variant(key, signature, device, *rest, **named)

    kernel._do_compile = under_lock
    return kernel
