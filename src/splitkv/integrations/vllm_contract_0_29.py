"""Where releases of vLLM differ, as 0.29 to 0.33 have it: vLLM makes caches itself, by a layer's
specification and by one layout of all layers.

`splitkv.integrations.vllm` imports it where vLLM's `AttentionBackend` has no `get_kv_cache_shape`,
and `vllm_contract_0_26`, which has the same names, elsewhere.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend as CachesOfBackend
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

__all__ = ["CachesOfBackend", "cp_lse_ag_out_rs", "dcp_a2a_lse_reduce", "heads_first"]

HEADS, KEYS = 1, 2  # dimensions of a layer's cache, [blocks, heads, keys, 2 * head_dim]


def heads_first(vllm_config: Any) -> bool:
    """Whether a head's keys lie together in a block, by the layout that vLLM has chosen."""
    order = vllm_config.cache_config.get_resolved_kv_cache_layout().layer_view_order
    return bool(order.index(HEADS) < order.index(KEYS))
