"""The record of compile-time values that a kernel takes as one argument."""

from __future__ import annotations

import hashlib
from typing import Any

from splitkv.kernels.host.cache_keys import settle_key


class CompileTimeRecord(str):
    """Named values that are known when a kernel is compiled: numbers, names, types and functions.

        class Config(CompileTimeRecord):
            tile_n: int
            mainloop: Any  # a jit function

        CONFIG = Config(tile_n=64, mainloop=loop_over_tiles)   # in a kernel: CONFIG.tile_n

    Fields are given by name, each of them. The record is a string that identifies the values and
    the sources of the functions, for all that Triton does with a compile-time argument: it tells
    variants apart by it, in memory and on disk, and writes it as JSON for whoever watches what is
    compiled, which functions and types could not be.
    """

    def __new__(cls, **values: Any) -> CompileTimeRecord:
        key = cls, *values.items()
        kept = _made.get(key)
        if kept is not None:
            return kept
        names = list(cls.__annotations__)
        wrong = sorted({*names} ^ {*values})
        assert not wrong, f"{cls.__name__}: expected {', '.join(names)}, wrong are {wrong}"
        # a jit function's cache_key is a hash of its source and of what it calls
        parts = (f"{name}={key_of(values[name])}" for name in names)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
        record = super().__new__(cls, f"{cls.__name__}_{digest[:32]}")
        record.__dict__.update(values)
        _made[key] = record
        return record


_made: dict[Any, CompileTimeRecord] = {}  # of the same values the same, as making one takes long


def key_of(value: Any) -> Any:
    """A key that identifies a value of a record: of a function the hash of its source."""
    return getattr(settle_key(value), "cache_key", value)
