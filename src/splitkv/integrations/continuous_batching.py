"""Continuous batching of Hugging Face transformers 5 with splitkv.

    from splitkv.integrations import transformers as splitkv_transformers
    from splitkv.integrations.continuous_batching import continuous_batching

    splitkv_transformers.register()
    model.set_attn_implementation("splitkv")
    with continuous_batching(model):
        outputs = model.generate_batch(prompts, generation_config=generation_config)

The manager of transformers keeps the paged cache and packs the requests of a step, prompts and
single tokens alike; every layer is one call of `splitkv.attention_varlen`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from splitkv.core.errors import expect
from splitkv.integrations.transformers import NAME, attention_forward
from splitkv.integrations.visibility import Visibility, recognise, unsupported

INERT = ("block_table", "logits_indices", "logits_processor_args", "read_index", "write_index")


class PagedName(str):
    """An implementation's name that says "flash" is in it, where it is not.

    By that the manager tells who takes packed requests instead of a mask matrix; but a name that
    really contains the word is loaded as a package.
    """

    def __contains__(self, part: object) -> bool:
        return part == "flash" or (isinstance(part, str) and super().__contains__(part))


PAGED = PagedName(f"{NAME}_paged")


@contextmanager
def continuous_batching(model: Any) -> Iterator[Any]:
    """Inside, `generate_batch` and the managers of a model run on splitkv; ordinary forward passes
    raise. Afterwards the model is as it was."""
    update = getattr(_paged_cache(), "update", None)
    known = update is not None and "kwargs" in inspect.signature(update).parameters
    expect(known, "transformers", "one whose paged cache has update(.., kwargs), 5.23", _version())
    AttentionInterface.register(PAGED, paged_attention)
    AttentionMaskInterface.register(PAGED, no_mask)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for _, name in before:
        expect(name == NAME, "model", f"attn_implementation {NAME!r}", name)
    for config, _ in before:
        config._attn_implementation = PAGED
    try:
        yield model
    finally:
        for config, name in before:
            config._attn_implementation = name


def no_mask(
    *, mask_function: Any = causal_mask_function, attention_mask: Any = None, **_: Any
) -> None:
    """The lengths of a step say what is visible; a mask that says something else raises.

    From 5.24 on transformers asks for no mask beside a paged cache, and the layers say that they
    are causal.
    """
    pattern = recognise(mask_function)
    beyond = not pattern.causal or pattern.right != -1 or pattern.chunk
    if attention_mask is not None or beyond:
        raise unsupported("attention_mask: expected causal layers without padding, got another")


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer to the requests of a step, `[1, heads, tokens, dim]`.

    The cache takes the new keys and values, and gives those of all requests end to end: here where
    the layer hands the cache on, and from transformers 5.24 on in the layer, before this call.
    """
    managed = cache is not None or kwargs.get("write_index") is not None
    expect(managed, "cache", "that of continuous batching", cache)
    expect(attention_mask is None, "attention_mask", "None", attention_mask)
    table = kwargs.get("block_table")
    expect(table is None, "block_table", "None: max_blocks_per_request 0", table)
    if not getattr(module, "is_causal", True):
        raise unsupported("is_causal: expected causal layers, got one that sees every key")
    if cache is not None:
        layer = module.layer_idx
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs
        )
    for name in INERT:
        kwargs.pop(name, None)
    window, keys = kwargs.get("sliding_window"), key.shape[2]
    left = -1 if window is None else window - 1
    seen = Visibility((query.shape[0], 1, query.shape[2], keys), True, (left, -1), keys)
    return attention_forward(module, query, key, value, seen, **kwargs)


def _paged_cache() -> Any:
    from transformers.generation import continuous_batching as package

    return getattr(package, "PagedAttentionCache", None)


def _version() -> str:
    from transformers import __version__

    return str(__version__)
