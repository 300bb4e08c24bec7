"""Keys of Triton's cache on disk: the same in every process, whatever was launched before."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator

import pytest
from triton.runtime.jit import JITFunction

import splitkv.kernels
from splitkv.kernels.host.cache_keys import settle_key


def functions() -> dict[str, JITFunction]:
    """Every function of Triton and Gluon in the package, by its name."""
    found = {}
    for info in pkgutil.walk_packages(splitkv.kernels.__path__, "splitkv.kernels."):
        for x in vars(importlib.import_module(info.name)).values():
            if isinstance(x, JITFunction):
                found[f"{x.module}.{x.fn.__qualname__}"] = x
    return found


@pytest.fixture
def unkeyed() -> Iterator[dict[str, JITFunction]]:
    """All functions as in a process that has launched nothing; then as they were."""
    every = functions()
    kept = {name: (f.hash, f.used_global_vals) for name, f in every.items()}
    forget(every)
    yield every
    for name, (key, values) in kept.items():
        every[name].hash, every[name].used_global_vals = key, values


def forget(every: dict[str, JITFunction]) -> None:
    for f in every.values():
        f.hash, f.used_global_vals = None, {}


def test_keys_are_those_of_any_order(unkeyed: dict[str, JITFunction]) -> None:
    assert len(unkeyed) > 300
    keys = []
    for seed in range(3):
        order = sorted(unkeyed)
        random.Random(seed).shuffle(order)
        forget(unkeyed)
        for name in order:
            assert settle_key(unkeyed[name]) is unkeyed[name]
        keys.append({name: f.hash for name, f in unkeyed.items()})
    assert keys[0] == keys[1] == keys[2] and None not in keys[0].values()


def test_what_has_no_key_is_left_alone() -> None:
    assert settle_key(7) == 7 and settle_key("even") == "even"
