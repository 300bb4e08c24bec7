"""Where releases of vLLM differ, as 0.26 to 0.28 have it: a backend says how its caches lie.

`splitkv.integrations.vllm` imports it where vLLM's `AttentionBackend` has `get_kv_cache_shape`, and
`vllm_contract_0_29`, which has the same names, elsewhere.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.utils import get_kv_cache_layout
from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

from splitkv.integrations.vllm_caches import SCALE_BYTES, SCALED_BY_TOKEN

__all__ = ["CachesOfBackend", "cp_lse_ag_out_rs", "dcp_a2a_lse_reduce", "heads_first"]


class CachesOfBackend(AttentionBackend):
    """The shape and the order of caches, which vLLM asks a backend."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        scale = SCALE_BYTES if cache_dtype_str in SCALED_BY_TOKEN else 0
        shape = num_blocks, num_kv_heads, block_size, 2 * (head_size + scale)
        return shape

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        keys_first = get_kv_cache_layout() == "NHD"
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if keys_first else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if keys_first else (0, 1, 2, 3)


def heads_first(vllm_config: Any) -> bool:
    """Whether a head's keys lie together in a block, by the layout that vLLM has chosen."""
    return bool(get_kv_cache_layout() == "HND")
