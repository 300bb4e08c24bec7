"""splitkv inside other libraries: one module each, imported only on request."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

_MODULES = (
    "continuous_batching",
    "serving",
    "sglang",
    "sink_window_cache",
    "torch_sdpa",
    "transformers",
    "verl",
    "verl_external_lib",
    "vllm",
)


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module 'splitkv.integrations' has no attribute {name!r}")
    return import_module(f"splitkv.integrations.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
