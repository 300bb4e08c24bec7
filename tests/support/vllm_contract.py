"""What the adapter for vLLM imports of it: vLLM's own where it is installed, else a stand-in.

The stand-in has the members that `splitkv.integrations.vllm` touches, with the meaning that they
have in vLLM 0.26.0, and nothing else. `make test-vllm` runs the same tests against the real ones,
of the newest release with VLLM=newest.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor

REAL = find_spec("vllm") is not None
ADAPTER = "splitkv.integrations.vllm"
T = TypeVar("T")


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend:
    supported_dtypes: Any = []
    supported_kv_cache_dtypes: Any = []

    @staticmethod
    def get_kv_cache_shape(*given: Any) -> tuple[int, ...]:
        raise NotImplementedError

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int) -> bool:
        sizes = cls.get_supported_kernel_block_sizes()  # type: ignore[attr-defined]
        return any(block_size % size.base == 0 for size in sizes)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def is_mla(cls) -> bool:
        return False


class AttentionImpl(Generic[T]):
    def __new__(cls, *arguments: Any, **by_name: Any) -> Any:
        self = super().__new__(cls)
        self.dcp_world_size = GROUP[0].world_size
        return self


class AttentionMetadataBuilder(Generic[T]):
    reorder_batch_threshold: int | None = None

    def __init__(self, spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.vllm_config = spec, vllm_config

    def _init_reorder_batch_threshold(
        self, threshold: int = 1, supports_spec_as_decode: bool = False
    ) -> None:
        speculative = self.vllm_config.speculative_config
        drafted = 0 if speculative is None else speculative.num_speculative_tokens
        self.reorder_batch_threshold = threshold + (drafted if supports_spec_as_decode else 0)


class AttentionBackendEnum(Enum):
    CPU_ATTN = "cpu"
    CUSTOM = "custom"


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: Any = True
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None
    dcp_local_seq_lens: Any = None
    seq_lens_cpu_upper_bound: Any = None


GROUP = [SimpleNamespace(world_size=1, rank_in_group=0)]


def get_dcp_local_seq_lens(seq_lens: Tensor, size: int, rank: int, interleave: int) -> Tensor:
    """How many of the first tokens are a rank's, of whom each has `interleave` in turn."""
    rounds = seq_lens // (size * interleave)
    rest = seq_lens - rounds * size * interleave - rank * interleave
    return (rounds * interleave + rest.clamp(0, interleave)).int()


REGISTERED: dict[Any, str] = {}
FP8_STATIC = object()  # how a result is rounded to e4m3 by one scale, as vLLM names it


def stand_in() -> None:
    """Puts the stand-in where `import vllm` finds it."""
    envs = ModuleType("vllm.envs")
    envs.VLLM_BATCH_INVARIANT = False  # type: ignore[attr-defined]
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": envs, "__version__": "0.26.0"},
        "vllm.envs": vars(envs),
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionCGSupport": AttentionCGSupport,
            "AttentionImpl": AttentionImpl,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType,
            "CommonAttentionMetadata": CommonAttentionMetadata,
            "MultipleOf": MultipleOf,
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": REGISTERED.__setitem__,
        },
        "vllm.v1.attention.backends.utils": {
            "get_kv_cache_layout": lambda: "NHD",
            "get_dcp_local_seq_lens": get_dcp_local_seq_lens,
        },
        "vllm.v1.attention.ops": {},
        "vllm.v1.attention.ops.common": {"cp_lse_ag_out_rs": None},
        "vllm.v1.attention.ops.dcp_alltoall": {"dcp_a2a_lse_reduce": None},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.quantization": {},
        "vllm.model_executor.layers.quantization.utils": {},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "kFp8StaticTensorSym": FP8_STATIC,
        },
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_dcp_group": lambda: GROUP[0]},
    }
    for name, members in contents.items():
        module = envs if name == "vllm.envs" else ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


def imported() -> ModuleType:
    """The adapter, imported beside the stand-in where there is no vLLM; nothing else sees that."""
    if REAL:
        return import_module(ADAPTER)
    before = set(sys.modules)
    stand_in()
    try:
        return import_module(ADAPTER)
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "vllm":
                del sys.modules[name]


adapter = imported()
BY_SHAPE = adapter.contract.__name__.endswith("0_26")  # else vLLM makes caches by specifications

CHOSEN = SimpleNamespace(layout="NHD")
LAYOUTS = ("NHD", "HND")
"""The names by which vLLM is told how a block lies in memory."""
if not BY_SHAPE:
    LAYOUTS = (*LAYOUTS, "LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC")


def chosen_layout() -> Any:
    """The layout of CHOSEN as vLLM's settings name it."""
    known = import_module("vllm.v1.kv_cache_interface").KVCacheLayout
    return known[{"NHD": "LBNHC", "HND": "LBHNC"}.get(CHOSEN.layout, CHOSEN.layout)]


def use_layout(patch: pytest.MonkeyPatch, layout: str) -> None:
    """Has vLLM choose a layout."""
    patch.setattr(CHOSEN, "layout", layout)
    if BY_SHAPE:
        patch.setattr(adapter.contract, "get_kv_cache_layout", lambda: CHOSEN.layout)


def empty_cache(
    blocks: int, block_size: int, heads: int, head_dim: int, kv: str, dtype: torch.dtype
) -> Tensor:
    """The cache of a layer as vLLM makes it, [blocks, heads, keys, ..], filled with garbage."""
    backend = adapter.SplitKVBackend
    stored = {"auto": dtype, "int8_per_token_head": torch.int8}.get(kv, torch.uint8)
    if BY_SHAPE:
        shape = backend.get_kv_cache_shape(blocks, block_size, heads, head_dim, kv)
        order = backend.get_kv_cache_stride_order()
        made = torch.empty([shape[i] for i in order], dtype=stored)
        made = made.permute([order.index(i) for i in range(4)])
    else:
        made = cache_by_spec(blocks, block_size, heads, head_dim, kv, stored)
    return made.fill_(127 if stored.itemsize == 1 else torch.nan)


def cache_by_spec(
    blocks: int, block_size: int, heads: int, head_dim: int, kv: str, stored: torch.dtype
) -> Tensor:
    """The second of three layers' caches, by vLLM's own functions."""
    interface = import_module("vllm.v1.kv_cache_interface")
    spec = interface.FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_dim,
        dtype=stored,
        kv_quant_mode=interface.get_kv_quant_mode(kv),
    )
    spec, layers, layout = adapter.SplitKVBackend.customize_spec(spec), 3, chosen_layout()
    step, block, *_ = interface.compute_layout_strides(spec, blocks, layers, layout)
    names = [str(n) for n in range(layers)]
    size = layers * blocks * spec.page_size_bytes
    placed = interface.KVCacheTensor(size, names, layer_stride=step, block_stride=block)
    raw = torch.empty(size, dtype=torch.int8)
    made: Tensor = interface.create_kv_cache_views(raw, spec, blocks, layout, placed)[1]
    return made


def config(
    max_model_len: int = 256, max_tokens: int = 64, drafted: int = 0, **cached: int
) -> SimpleNamespace:
    """The settings that a builder reads."""
    speculative = SimpleNamespace(num_speculative_tokens=drafted, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=max_tokens,
            enable_chunked_prefill=cached.get("enable_chunked_prefill", False),
        ),
        cache_config=SimpleNamespace(
            enable_prefix_caching=cached.get("enable_prefix_caching", False),
            kv_sharing_fast_prefill=cached.get("kv_sharing_fast_prefill", False),
            get_resolved_kv_cache_layout=chosen_layout,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=cached.get("ranks", 1),
            cp_kv_cache_interleave_size=cached.get("interleave", 1),
        ),
        speculative_config=speculative if drafted else None,
    )


def layer(k_scale: float | list[float] = 1.0, v_scale: float | list[float] = 1.0) -> Any:
    """The scales of a layer, as vLLM keeps them: one number each, or one a head."""
    return SimpleNamespace(_k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale))
