"""Attention whose work is split, packed and scheduled so that the GPU is full.

    import splitkv

    out = splitkv.decode(q, k_cache, v_cache, cache_seqlens=lengths)
    print(splitkv.explain(q, k_cache, v_cache, cache_seqlens=lengths))

Names are imported when first used: `import splitkv` alone loads neither torch nor triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitkv import cache as cache
    from splitkv import distributed as distributed
    from splitkv import flash_attn as flash_attn
    from splitkv import integrations as integrations
    from splitkv import reference as reference
    from splitkv.api import (
        Schedule,
        append,
        attention,
        attention_varlen,
        decode,
        explain,
        make_schedule,
        merge_states,
        plan,
    )
    from splitkv.cache.quantize import quantize_kv
    from splitkv.core.device import Device
    from splitkv.core.errors import UnsupportedProblem
    from splitkv.core.plan import Plan
    from splitkv.core.problem import Problem
    from splitkv.runtime.warm_model import warmup_model
    from splitkv.runtime.warmup import warmup

__version__ = "0.1.0"

_HOMES = {
    "Device": "core.device",
    "Plan": "core.plan",
    "Problem": "core.problem",
    "Schedule": "api",
    "UnsupportedProblem": "core.errors",
    "append": "api",
    "attention": "api",
    "attention_varlen": "api",
    "decode": "api",
    "explain": "api",
    "make_schedule": "api",
    "merge_states": "api",
    "plan": "api",
    "quantize_kv": "cache.quantize",
    "warmup": "runtime.warmup",
    "warmup_model": "runtime.warm_model",
}

_MODULES = ("cache", "distributed", "flash_attn", "integrations", "reference")

__all__ = [
    "Device",
    "Plan",
    "Problem",
    "Schedule",
    "UnsupportedProblem",
    "append",
    "attention",
    "attention_varlen",
    "decode",
    "explain",
    "make_schedule",
    "merge_states",
    "plan",
    "quantize_kv",
    "warmup",
    "warmup_model",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"splitkv.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'splitkv' has no attribute {name!r}")
    value = getattr(import_module(f"splitkv.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
