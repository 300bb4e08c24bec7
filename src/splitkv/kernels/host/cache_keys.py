"""Keys of Triton's cache on disk that are the same in every process.

Triton's key of a function has the compile-time globals of the functions it calls, as far as these
have keys of their own by then: it takes the globals of each before it asks for its key. So the key
depends on which functions have had theirs before, which is the history of a process, and a kernel
that lies compiled on disk is not found there. Keys that are computed callees first have all of
them, whatever came before.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import jit

from splitkv.kernels.host.compile_lock import compiling


def settle_key(function: Any) -> Any:
    """The function of Triton or Gluon, its key computed callees first."""
    if getattr(function, "hash", "") is not None:  # it has one, or Triton is the interpreter
        return function
    finder = getattr(jit, "DependenciesFinder", None)
    merge = getattr(finder, "_update_hash", None)
    if finder is None or merge is None:  # a Triton that does it otherwise
        return function

    def after_its_key(self: Any, callee: Any) -> None:
        callee.cache_key  # noqa: B018
        merge(self, callee)

    with compiling:
        finder._update_hash = after_its_key
        try:
            function.cache_key  # noqa: B018
        finally:
            finder._update_hash = merge
    return function
