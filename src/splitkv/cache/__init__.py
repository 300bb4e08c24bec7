"""KV caches that a user can hold.

    from splitkv.cache import PagedKVCache, SinkWindowCache

Both have fixed addresses on the device, so that a step can be captured in a CUDA graph, and both
append in one kernel, `kernels/append.py`.
"""

from __future__ import annotations

from splitkv.cache.paged import CacheFull, PagedKVCache
from splitkv.cache.quantize import QuantizedKV, quantize_kv
from splitkv.cache.sink_window import SinkWindowCache

__all__ = ["CacheFull", "PagedKVCache", "QuantizedKV", "SinkWindowCache", "quantize_kv"]
