"""FlashAttention's functions, by their names and arguments, on splitkv's kernels.

    from splitkv.flash_attn import flash_attn_func, flash_attn_with_kvcache

Switching from flash-attn 2.8 or FlashAttention-3 is a change of the import. Positional arguments
are in the order of FlashAttention 2; what only FlashAttention-3 has is given by name. Every
argument works or raises ValueError or UnsupportedProblem with its name; docs/flash-attn.md has the
table.
"""

from __future__ import annotations

from splitkv.flash_attn.attention import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from splitkv.flash_attn.combine import flash_attn_combine
from splitkv.flash_attn.kv_cache import flash_attn_with_kvcache
from splitkv.flash_attn.scheduler import get_scheduler_metadata

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
