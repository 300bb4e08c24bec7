"""What the adapter for SGLang imports of it: its own where it is installed, else a stand-in.

The stand-in has the meaning that the members have in SGLang 0.5.17, and beside that what 0.5.23 has
elsewhere; the pool and the runner, as far as a backend reads them, are always stand-ins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

REAL = find_spec("sglang") is not None
ADAPTER = "splitkv.integrations.sglang"
CHOICES: list[str] = ["triton"]
HOOKS: list[tuple[str, Any, str]] = []
DETERMINISTIC: list[str] = []
BACKENDS: dict[str, Any] = {}


class AttentionBackend:
    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass


class AttentionType(Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention(torch.nn.Module):
    pass


class ServerArgs:
    """As much of it as tells releases apart."""

    def _handle_model_specific_adjustments(self) -> None:
        pass


def attention_backends_of(arguments: Any) -> tuple[str, str]:
    """Those of prefill and of decode."""
    both = arguments.attention_backend
    return arguments.prefill_attention_backend or both, arguments.decode_attention_backend or both


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        HOOKS.append((target, hook, hook_type.value))


@dataclass
class KVWriteLoc:
    loc: Tensor
    swa_loc: Tensor | None = None

    def __post_init__(self) -> None:
        if self.swa_loc is not None:
            self.swa_loc = self.swa_loc[: self.loc.shape[0]]


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    def register(made: Any) -> Any:
        BACKENDS[name] = made
        return made

    return register


def stand_in() -> None:
    """Puts the stand-in where `import sglang` finds it."""
    layers = "sglang.srt.layers"
    contents: dict[str, dict[str, Any]] = {
        f"{layers}.attention.attention_registry": {
            "register_attention_backend": register_attention_backend
        },
        f"{layers}.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
        f"{layers}.radix_attention": {
            "AttentionType": AttentionType,
            "RadixAttention": RadixAttention,
        },
        "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.arg_groups.model_hook": {"attention_backends_of": attention_backends_of},
        "sglang.srt.arg_groups.overrides": {
            "model_config_of": lambda arguments: arguments.get_model_config(),
            "resolved_view": lambda arguments: arguments,
        },
        "sglang.srt.server_args": {
            "ServerArgs": ServerArgs,
            "ATTENTION_BACKEND_CHOICES": CHOICES,
            "add_attention_backend_choices": CHOICES.extend,
            "add_deterministic_attention_backend_choices": DETERMINISTIC.extend,
        },
    }
    for name in list(contents):
        parts = name.split(".")
        for n in range(1, len(parts)):
            contents.setdefault(".".join(parts[:n]), {})
    for name, members in contents.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(members)
        vars(module).setdefault("__path__", [])  # of a package


def imported() -> tuple[ModuleType, dict[str, Any]]:
    """The adapter, beside the stand-in where there is no SGLang, which nothing else sees; and the
    modules of where releases differ: those of all, but for a real SGLang its own alone."""
    if REAL:
        adapter = import_module(ADAPTER)
        return adapter, {adapter.CONTRACT: adapter.contract}
    before = set(sys.modules)
    stand_in()
    try:
        releases = {x: import_module(f"{ADAPTER}_contract_{x}") for x in ("0_5_17", "0_5_19")}
        return import_module(ADAPTER), releases
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "sglang":
                del sys.modules[name]


adapter, releases = imported()


class ForwardMode(IntEnum):
    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    IDLE = auto()
    TARGET_VERIFY = auto()

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self == ForwardMode.TARGET_VERIFY


class Pool:
    """Slots of keys and values, of which the first page is padding."""

    swa_layer_nums = 0
    use_hnd = False

    def __init__(self, size: int, page_size: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        shape = size + page_size, heads, dim
        self.k, self.v = (torch.zeros(shape, dtype=torch.bfloat16).to(dtype) for _ in range(2))

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def set_kv_buffer(
        self, layer: Any, where: Any, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any
    ) -> None:
        for buffer, new, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            stored = (new if scale is None else new / scale).to(self.dtype)
            if self.dtype.itemsize == 1:
                buffer.view(torch.uint8)[where.loc] = stored.view(torch.uint8)
            else:
                buffer[where.loc] = stored


class TwoPools:
    """Slots of layers without a window, and fewer of those with one, whose slots are others."""

    swa_layer_nums = 1

    def __init__(self, full: Pool, window: Pool, windowed: tuple[int, ...]) -> None:
        self.dtype, self.full, self.window, self.windowed = full.dtype, full, window, windowed
        self.layers_mapping = {n: (0, n in windowed) for n in range(2)}
        self.mapping = torch.zeros(full.k.shape[0], dtype=torch.int64)

    def translate_loc_from_full_to_swa(self, slots: Tensor) -> Tensor:
        return self.mapping[slots]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return (self.window if layer_id in self.windowed else self.full).get_kv_buffer(0)

    def set_kv_buffer(self, layer: Any, where: Any, *tensors: Any) -> None:
        if layer.layer_id in self.windowed:
            self.window.set_kv_buffer(layer, KVWriteLoc(where.swa_loc), *tensors)
        else:
            self.full.set_kv_buffer(layer, where, *tensors)


def runner(pool: Pool | TwoPools, requests: int, context: int, page_size: int, **more: Any) -> Any:
    """A model runner, as far as a backend reads it."""
    arguments = {
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "enable_unified_memory": False,
        "dcp_size": 1,
        "enable_deterministic_inference": False,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(bs=[1, 2, 4])),
        "tp_size": 1,
    }
    config = {"is_encoder_decoder": False, "context_len": context}
    known: dict[str, Any] = {"use_mla_backend": False}
    for name, value in more.items():
        of = next((x for x in (arguments, config) if name in x), known)
        of[name] = value
    table = torch.zeros(requests, context, dtype=torch.int32)
    return SimpleNamespace(
        server_args=SimpleNamespace(**arguments),
        model_config=SimpleNamespace(**config),
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=requests),
        device="cpu",
        page_size=page_size,
        **known,
    )


def layer(heads: int, kv_heads: int, dim: int, **more: Any) -> Any:
    """A RadixAttention, as far as a backend reads it."""
    known: dict[str, Any] = {
        "tp_q_head_num": heads,
        "tp_k_head_num": kv_heads,
        "qk_head_dim": dim,
        "v_head_dim": dim,
        "scaling": 0.3,
        "layer_id": 0,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "k_scale": None,
        "v_scale": None,
        "attn_type": adapter.AttentionType.DECODER,
    }
    return SimpleNamespace(**known | more)
