"""Megatron's core attention on this package, over context-parallel ranks too.

    from splitkv.integrations.megatron import CoreAttention

    spec = get_gpt_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.submodules.core_attention = CoreAttention

It stands where TEDotProductAttention does, and is made and called as that is: `CoreAttention` reads
Megatron's configuration, and is TransformerEngine's call shape for the rest. Tokens over ranks lie
as Megatron cuts them, in zigzag. Each context-parallel rank's part of the gradient of a learnable
softmax offset is left to Megatron, which sums it with those of all parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from splitkv.core.errors import expect
from splitkv.integrations.transformer_engine import DotProductAttention

PACKED = (
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("max_seqlen_q", "max_seqlen_kv"),
)
"""What of PackedSeqParams says lengths."""


@dataclass
class Groups:
    """Process groups of a layer: tensor-parallel and context-parallel ranks."""

    tp: Any
    cp: Any


class CoreAttention(DotProductAttention):
    """Core attention of a layer of Megatron.

    config, layer_number, attn_mask_type, attention_type
                   as Megatron gives them to TEDotProductAttention
    options        attention_dropout, softmax_scale, k_channels, v_channels, cp_comm_type and
                   pg_collection, as there; without pg_collection the groups of
                   `megatron.core.parallel_state`

    Raises ValueError for what of the configuration there is no answer for.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        **options: Any,
    ) -> None:
        given = {**_OPTIONS, **options}
        unknown = given.keys() - _OPTIONS.keys()
        expect(not unknown, "argument of CoreAttention", ", ".join(_OPTIONS), sorted(unknown))
        scaled = getattr(config, "apply_query_key_layer_scaling", False)
        expect(not scaled, "apply_query_key_layer_scaling", "False", scaled)
        groups = given["pg_collection"] or _groups()
        dropout, channels = given["attention_dropout"], config.kv_channels
        dropout = config.attention_dropout if dropout is None else dropout
        super().__init__(
            config.num_attention_heads,
            (given["k_channels"] or channels, given["v_channels"] or channels),
            num_gqa_groups=config.num_query_groups,
            attention_dropout=dropout,
            softmax_scale=given["softmax_scale"],
            softmax_type=getattr(config, "softmax_type", "vanilla"),
            attn_mask_type=attn_mask_type.name,
            window_size=window_of(config, layer_number),
            tp_group=groups.tp,
            cp_group=groups.cp,
            cp_comm_type=given["cp_comm_type"] or "p2p",
            get_rng_state_tracker=_random_tracker() if dropout else None,
        )

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attention of query, key and value [tokens, batch, heads, head_dim], or packed
        [tokens, heads, head_dim] with `packed_seq_params`; returns [tokens, (batch,) heads *
        head_dim_v]."""
        expect(attention_bias is None, "attention_bias", "None", attention_bias)
        name = self.options["attn_mask_type"] if attn_mask_type is None else attn_mask_type.name
        packed: dict[str, Any] = {}
        if packed_seq_params is not None:
            packed = {field: getattr(packed_seq_params, field, None) for field in PACKED}
            packed["qkv_format"] = packed_seq_params.qkv_format
            if packed["qkv_format"] == "thd":  # Megatron's mask is that of each sequence
                name = {"no_mask": "padding", "causal": "padding_causal"}.get(name, name)
        return super().forward(query, key, value, attention_mask, attn_mask_type=name, **packed)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """The softmax offset for Megatron's checkpoints, a part on each tensor-parallel rank."""
        utils: Any = import_module("megatron.core.transformer.utils")
        state = self.state_dict(prefix="", keep_vars=True)
        heads = {"softmax_offset": 0}
        return utils.make_sharded_tensors_for_checkpoint(state, prefix, heads, sharded_offsets)


_OPTIONS: dict[str, Any] = dict.fromkeys(("attention_dropout", "softmax_scale", "k_channels"))
_OPTIONS |= dict.fromkeys(("v_channels", "cp_comm_type", "pg_collection"))


def window_of(config: Any, layer_number: int) -> Any:
    """The window of a layer, counted from 1; None: it sees all."""
    window, skipped = config.window_size, getattr(config, "window_attn_skip_freq", None)
    if window is None or skipped is None:
        return window
    if isinstance(skipped, int):
        return window if layer_number % skipped else None
    return window if skipped[layer_number - 1] else None


def _groups() -> Groups:
    """Megatron's own groups."""
    state: Any = import_module("megatron.core.parallel_state")
    return Groups(state.get_tensor_model_parallel_group(), state.get_context_parallel_group())


def _random_tracker() -> Any:
    """Where Megatron keeps the generators of tensor-parallel ranks."""
    tracker: Any = import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker
    return tracker
