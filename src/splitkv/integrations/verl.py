"""splitkv under verl's Ulysses, and under whatever else hooks transformers' FlashAttention.

    actor_rollout_ref.model.external_lib=splitkv.integrations.verl_external_lib
    +actor_rollout_ref.model.override_config.attn_implementation=splitkv_ulysses

verl spreads a sequence over ranks and exchanges heads for it in a function of its own, which it
puts in the place of `transformers.integrations.flash_attention._flash_attention_forward`. A layer
that does not come that way attends to its rank's tokens alone. `register` makes an implementation
that does: transformers' own forward of FlashAttention, with this package's functions where those of
the `flash_attn` package would be. So verl's code runs as it is, and needs no flash_attn.

The sink logits of a layer are all heads', and after the exchange a rank has its share of the heads
alone: it takes its share of the sinks, too. Every sink gets its gradient on the rank that has its
head, and none elsewhere, which FSDP reduces as it does the other parameters' gradients.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, modeling_flash_attention_utils
from transformers.integrations import flash_attention
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from splitkv.core.errors import expect, expect_divides
from splitkv.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from splitkv.integrations.transformers import ulysses_size
from splitkv.integrations.visibility import unsupported

NAME = "splitkv_ulysses"
_slots: Any = modeling_flash_attention_utils


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` mean transformers' FlashAttention, computed by splitkv, for
    every model of this process."""
    # transformers looks a name with "flash" in it up on its hub, or replaces it.
    expect("flash" not in name, "name", 'a name without "flash"', name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, flash_attention_mask)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer: query, key, value `[B, H, S, D]` to `([B, S, H, D], None)`.

    attention_mask   [batch, positions] where there is padding, else None
    arguments        as transformers' `flash_attention_forward` takes them

    Raises ValueError where the sinks are of neither all heads nor those of this rank, and
    UnsupportedLayer under an active Ulysses group where verl would exchange nothing: a layer would
    attend to its rank's tokens alone.
    """
    expect_exchange(module, arguments.get("position_ids"))
    config: Any = module.config
    fill_slots(config._attn_implementation)
    result: tuple[Tensor, None] = flash_attention.flash_attention_forward(
        module, query, key, value, attention_mask, **arguments
    )
    return result


def expect_exchange(module: torch.nn.Module, position_ids: Tensor | None) -> None:
    """Raise where verl has spread a sequence and its function will not exchange heads for it: it is
    not in FlashAttention's place, or has no position_ids, by which it knows a layer of text."""
    size = ulysses_size()
    if size == 1:
        return
    if flash_attention._flash_attention_forward is _slots._flash_attention_forward:
        raise unsupported(
            f"ulysses_sequence_parallel_size: expected 1 where nothing exchanges heads, got "
            f"{size}; call verl's apply_monkey_patch for this model before its first forward"
        )
    if getattr(module, "is_causal", True) and position_ids is None:
        raise unsupported(
            f"position_ids: expected those of this rank's tokens under Ulysses over {size} ranks, "
            "got None, for which verl exchanges no heads"
        )


def fill_slots(name: str) -> None:
    """Put this package's functions where transformers keeps those of flash_attn, as what `name`
    has loaded; a model that asks for another implementation loads that again."""
    if _slots._loaded_implementation == name:
        return
    _slots._flash_fn, _slots._flash_varlen_fn = _dense, _varlen
    _slots._flash_with_kvcache_fn = torch.compiler.disable(flash_attn_with_kvcache)
    _slots._pad_fn, _slots._unpad_fn = _slots._pad_input, _slots._unpad_input
    define = _slots._lazy_define_process_function
    _slots._process_flash_kwargs_fn = define(_varlen)
    _slots._process_with_kvcache_kwargs_fn = define(flash_attn_with_kvcache)
    _slots._loaded_implementation = name


def _slot(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with this rank's sinks, and with lengths that may be tensors of one number."""

    @functools.wraps(function)  # its signature says what it supports
    def call(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in ("s_aux", "learnable_sink"):
            if kwargs.get(name) is not None:
                kwargs[name] = sinks_of(kwargs[name], q.shape[-2])
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if name in kwargs:
                kwargs[name] = int(kwargs[name])
        return function(q, *args, **kwargs)

    return call


_dense, _varlen = _slot(flash_attn_func), _slot(flash_attn_varlen_func)


def sinks_of(sinks: Tensor, num_heads: int) -> Tensor:
    """Sink logits of the heads that this rank has, of those of all heads or of these alone."""
    if sinks.shape[0] == num_heads:
        return sinks
    expect_divides("s_aux.shape[0] (num_heads)", sinks.shape[0], num_heads=num_heads)
    verl, size = sys.modules.get("verl.utils.ulysses"), ulysses_size()
    requirement = f"{num_heads * size}, the heads of the {size} ranks of verl's Ulysses"
    expect(sinks.shape[0] == num_heads * size, "s_aux.shape[0]", requirement, sinks.shape[0])
    assert verl is not None
    first = verl.get_ulysses_sequence_parallel_rank() * num_heads
    return sinks[first : first + num_heads]
