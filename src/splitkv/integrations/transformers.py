"""splitkv as an attention implementation of Hugging Face transformers 5.

    from splitkv.integrations import transformers as splitkv_transformers

    splitkv_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="splitkv")

Two functions are registered under one name. `visible_keys` runs once a forward pass, in place of
the mask matrix: it recognises the mask that the model asked for, causal or not, and describes it in
O(batch) or O(batch * keys) numbers. `attention_forward` runs in every layer: cached queries go to
`splitkv.decode`, padded and packed batches to `splitkv.attention_varlen`, the rest to
`splitkv.attention`. What cannot be described raises; nothing is dropped and nothing falls back.

The meaning is that of eager attention, but for two things. Outputs at padding positions are 0 in
causal layers (eager attention leaves an average of unrelated values there). And sequences that
`position_ids` pack into a row are kept apart in every causal model, as by FlashAttention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, create_causal_mask

import splitkv
from splitkv.core.errors import (
    UnsupportedProblem,
    expect,
    expect_bool,
    expect_given_with,
    expect_int,
    expect_positive,
    expect_shape,
    renamed,
)
from splitkv.integrations.visibility import (
    Segments,
    UnsupportedLayer,
    Visibility,
    may_decode,
    shown,
    unsupported,
    visible_keys,
)

NAME = "splitkv"

# What models and `generate` call their cache: "cache" from transformers 5.24 on, which warns of the
# name that it had before.
_renamed = "cache" in inspect.signature(create_causal_mask).parameters
CACHE_ARGUMENT = "cache" if _renamed else "past_key_values"

# Arguments that a model hands down to its layers and that do not change attention's result.
INERT = {
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "return_dict",
    "seq_idx",
    "use_cache",
}


def register(name: str = NAME) -> None:
    """Make `attn_implementation=name` mean splitkv, for every model of this process."""
    # transformers reads "flash" in a name as FlashAttention, with its masks and its checks.
    expect("flash" not in name, "name", 'a name without "flash"', name)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, visible_keys)


NAMES = {  # what a layer calls the arguments of splitkv's functions
    **{"q": "query", "k": "key", "v": "value", "k_cache": "key", "v_cache": "value"},
    **{"softmax_scale": "scaling", "dropout_p": "dropout", "sink_logits": "s_aux"},
    **{f"cu_seqlens_{x}": f"cu_seq_lens_{x}" for x in "qk"},
    **{f"max_seqlen_{x}": f"max_length_{x}" for x in "qk"},
}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Computes one layer: query, key, value `[B, H, S, D]` to `([B, S, H, D], None)`.

    `attention_mask` is what `visible_keys` made, and says alone which keys are visible: `is_causal`
    and `sliding_window` beside it change nothing. Without it the layer attends to every key, as in
    eager attention, or, with `is_causal=True`, to those up to its own; where the attention
    functions of transformers differ on such a call, it raises.

    Under autocast float32 queries, keys and values are cast to autocast's type, and float32 queries
    of a model in fewer bits to the model's, as for FlashAttention.
    """
    try:
        given = LayerOptions.of(arguments)
        return _forward(module, query, key, value, attention_mask, given), None
    except ValueError as error:
        raise renamed(error, NAMES) from None
    except UnsupportedProblem as error:
        if isinstance(error, UnsupportedLayer):
            raise
        raise UnsupportedLayer(error.problem, error.device, error.reasons) from None


class LayerOptions(NamedTuple):
    """Options of a layer beside query, key, value and mask, by transformers' names."""

    scaling: float | None = None
    dropout: float = 0.0
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    is_causal: bool | None = None
    deterministic: bool | None = None
    position_ids: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | Tensor | None = None
    max_length_k: int | Tensor | None = None

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> LayerOptions:
        """Takes the arguments that a layer gave; raises for those that would change its result."""
        if not arguments.keys() <= _KNOWN:
            for name, given in arguments.items():
                if name not in _KNOWN and given is not None and given is not False:
                    raise unsupported(f"{name}: expected None, got {shown(given)}")
        return cls(*map(arguments.get, cls._fields, _DEFAULTS))

    @property
    def has_lengths(self) -> bool:
        """Whether the sequences of a batch without padding are said, or some of what says them."""
        offsets = self.cu_seq_lens_q is not None or self.cu_seq_lens_k is not None
        return offsets or self.max_length_q is not None or self.max_length_k is not None

    @property
    def lengths(self) -> dict[str, Any]:
        """The sequences of a batch without padding: all of these, or none."""
        names = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
        return {name: getattr(self, name) for name in names}


_DEFAULTS = LayerOptions()
_KNOWN = INERT.union(LayerOptions._fields)


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility | None,
    given: LayerOptions,
) -> Tensor:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if getattr(x, "ndim", 0) != 4:
            expect_shape(name, x, batch=None, num_heads=None, seqlen=None, head_dim=None)
    for name, flag in (("is_causal", given.is_causal), ("deterministic", given.deterministic)):
        if flag is not None:
            expect_bool(name, flag)
    if given.sliding_window is not None:
        expect_int("sliding_window", given.sliding_window)
        expect_positive("sliding_window", given.sliding_window)
    # [B, H, S, D] -> [B, S, H, D], a view
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if not (q.dtype is k.dtype is v.dtype) or q.dtype is torch.float32:
        q, k, v = _in_one_type(module, q, k, v)
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    seen = attention_mask
    if seen is None:
        sizes = batch, queries, keys
        seen = _without_a_mask(module, sizes, given.is_causal, given.sliding_window)
    elif not isinstance(seen, Visibility):
        raise unsupported(
            f"attention_mask: expected [batch, positions] at the model, got {shown(seen)}; "
            "masks that are not causal, windows, chunks or padding need another implementation"
        )
    if seen.shape != (batch, 1, queries, keys):
        expected = f"[{batch}, 1, {queries}, {keys}], as the queries and keys of the layer"
        expect(False, "attention_mask", expected, list(seen.shape))
    expect_no_ulysses()
    if given.has_lengths:
        seen = _with_lengths(seen, given.lengths)
    elif seen.packing is not None and getattr(given.position_ids, "ndim", 0) == 2:
        segments = seen.packing.segments(given.position_ids, batch)
        if segments is not None:
            seen = _packed(seen, segments)

    options: dict[str, Any] = {
        "causal": seen.causal,
        "window_size": seen.window_size,
        "attention_chunk": seen.chunk,
        "softmax_scale": given.scaling,
        "softcap": 0.0 if given.softcap is None else given.softcap,
        "sink_logits": given.s_aux,
    }
    sinks = given.s_aux
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (sinks is not None and sinks.requires_grad)
    )
    dropout = given.dropout
    decodes = may_decode(queries, keys) and not needs_grad and not dropout
    if seen.segments is None and (decodes or seen.cache_seqlens is not None):
        expect(not dropout, "dropout", "0.0 with a key-value cache", dropout)
        return _decode(q, k, v, seen, options)
    options |= {"dropout_p": dropout, "deterministic": bool(given.deterministic)}
    if seen.segments is not None:
        return _varlen(q, k, v, seen.segments, seen.length, options)
    if seen.length != keys:
        k, v = k[:, : seen.length], v[:, : seen.length]
    out: Any = splitkv.attention(q, k, v, **options)
    return out


def _in_one_type(module: torch.nn.Module, *tensors: Tensor) -> Iterable[Tensor]:
    """Casts queries, keys and values to the type in which FlashAttention would take them.

    Rotary embeddings under autocast, and layer norms kept in float32, leave some of them wider.
    """
    device, dtype = tensors[0].device.type, None
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif tensors[0].dtype is torch.float32:
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_is_quantized"):
            dtype = config.dtype
        else:
            linear = (m.weight.dtype for m in module.modules() if isinstance(m, torch.nn.Linear))
            dtype = next(linear, None)
    if dtype not in (torch.float16, torch.bfloat16):
        return tensors
    return [x.to(dtype) if x.dtype is torch.float32 else x for x in tensors]


def _without_a_mask(
    module: torch.nn.Module,
    sizes: tuple[int, int, int],
    is_causal: bool | None,
    sliding_window: int | None,
) -> Visibility:
    """The visibility of a layer whose model asked for no mask: batch, queries and keys are sizes.

    Eager attention then sees every key and asks for neither `is_causal` nor a window; the others
    ask the call and then the module, and take a layer that says nothing for a causal one.
    """
    batch, queries, keys = sizes
    if sliding_window is not None and sliding_window < keys:
        raise unsupported(
            f"sliding_window: expected a mask from the model beside it, got {sliding_window} and "
            "no mask, which eager attention reads as no window and FlashAttention as one"
        )
    said = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(said) and queries > 1
    if causal and is_causal is None:
        raise unsupported(
            "attention_mask: expected a mask from the model, or is_causal, got neither, which "
            "eager attention reads as full attention and sdpa as causal attention"
        )
    if causal and queries != keys:
        raise unsupported(
            f"attention_mask: expected a mask from the model for {queries} queries and {keys} keys "
            "with is_causal, got None, which sdpa aligns at the first key and others at the last"
        )
    return Visibility((batch, 1, queries, keys), causal, (-1, -1), keys)


def _packed(seen: Visibility, segments: Segments) -> Visibility:
    """Keeps sequences apart that only `position_ids` tell apart."""
    if seen.chunk:
        raise unsupported(
            f"position_ids: expected one sequence a row with chunks of {seen.chunk}, which count "
            "from the start of a row, got packed sequences"
        )
    return replace(seen, segments=segments)


def expect_no_ulysses() -> None:
    """Raise under verl's Ulysses: its ranks have parts of a sequence and exchange heads for them
    inside FlashAttention only."""
    if (size := ulysses_size()) > 1:
        raise unsupported(
            f"ulysses_sequence_parallel_size: expected 1, got {size}: verl exchanges heads and "
            "sequence in FlashAttention's place only; register splitkv.integrations.verl and set "
            'attn_implementation to "splitkv_ulysses"'
        )


def ulysses_size() -> int:
    """The ranks over which verl has spread a sequence; 1 without verl."""
    verl = sys.modules.get("verl.utils.ulysses")
    return 1 if verl is None else int(verl.get_ulysses_sequence_parallel_world_size())


def _with_lengths(seen: Visibility, lengths: dict[str, Any]) -> Visibility:
    """Keeps the sequences of a batch without padding apart, as its collator gave them."""
    for name, given in lengths.items():
        expect_given_with(name, given, ", ".join(n for n in lengths if n != name))
    padded = seen.cache_seqlens is not None or (seen.segments is not None and seen.segments.padded)
    expect(not padded, "attention_mask", "no padding beside cu_seq_lens_q", "padding")
    whole = seen.length == seen.shape[-1]
    expect(whole, "cu_seq_lens_k", "a cache without empty slots", seen.length)
    if seen.chunk and seen.segments is None:
        raise unsupported(
            f"cu_seq_lens_q: expected None with chunks of {seen.chunk}, which count from the "
            "start of a row"
        )
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        expect_shape(name, lengths[name], **{"batch + 1": None})
    for name in ("max_length_q", "max_length_k"):
        number = hasattr(lengths[name], "__int__") and not isinstance(lengths[name], float)
        expect(number, name, "an integer", lengths[name])
    segments = Segments(
        lengths["cu_seq_lens_q"].int(),
        lengths["cu_seq_lens_k"].int(),
        int(lengths["max_length_q"]),
        int(lengths["max_length_k"]),
    )
    return replace(seen, segments=segments)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, length: int, options: dict[str, Any]
) -> Tensor:
    out: Any = splitkv.attention_varlen(
        q.flatten(0, 1),
        k[:, :length].flatten(0, 1),
        v[:, :length].flatten(0, 1),
        segments.cu_seqlens_q.to(q.device),
        segments.cu_seqlens_k.to(q.device),
        segments.max_seqlen_q,
        segments.max_seqlen_k,
        **options,
    )
    return out.unflatten(0, q.shape[:2])


def _decode(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, options: dict[str, Any]) -> Tensor:
    if seen.cache_seqlens is None:
        return splitkv.decode(q, k, v, **options)
    cache_seqlens = seen.cache_seqlens.to(q.device)
    if seen.slots is None:
        return splitkv.decode(q, k, v, cache_seqlens=cache_seqlens, **options)
    # Each key is a page of one: the table says where the visible ones are, and no key moves.
    pitch = _pitch(k)
    if pitch is None or pitch != _pitch(v):
        k, v = k.contiguous(), v.contiguous()
        pitch = k.shape[1]
    first = torch.arange(k.shape[0], device=q.device, dtype=torch.int32)[:, None] * pitch
    return splitkv.decode(
        q,
        _pages(k, pitch),
        _pages(v, pitch),
        cache_seqlens=cache_seqlens,
        page_table=seen.slots.to(q.device) + first,
        max_seqlen_k=k.shape[1],
        **options,
    )


def _pitch(cache: Tensor) -> int | None:
    """Counts the keys from one sequence of `[B, S, H, D]` to the next; None: no whole number."""
    if cache.shape[0] == 1:
        return cache.shape[1]
    whole, rest = divmod(cache.stride(0), cache.stride(1))
    return None if rest else whole


def _pages(cache: Tensor, pitch: int) -> Tensor:
    """Views a cache `[B, S, H, D]` as pages of one key, `[pages, 1, H, D]`.

    Page `b * pitch + s` is key s of sequence b. Pages between the sequences belong to nobody.
    """
    batch, seqlen = cache.shape[:2]
    pages = (batch - 1) * pitch + seqlen
    strides = cache.stride(1), cache.stride(1), cache.stride(2), 1
    return cache.as_strided((pages, 1, *cache.shape[2:]), strides)
