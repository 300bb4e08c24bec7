"""splitkv as an attention implementation of Hugging Face transformers 5.

    from splitkv.integrations import transformers as splitkv_transformers

    splitkv_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="splitkv")

Two functions are registered under one name. `visible_keys` runs once a forward pass, in place of
the mask matrix: it recognises the mask that the model asked for and describes it in O(batch) or
O(batch * keys) numbers. `attention_forward` runs in every layer: cached queries go to
`splitkv.decode`, padded and packed batches to `splitkv.attention_varlen`, the rest to
`splitkv.attention`. What cannot be described raises; nothing is dropped and nothing falls back.

The meaning is that of eager attention, except for the outputs at padding positions, which are 0
in causal layers (eager attention leaves an average of unrelated values there).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import splitkv
from splitkv.errors import (
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
    Visibility,
    may_decode,
    shown,
    unsupported,
    visible_keys,
)

NAME = "splitkv"

# Arguments that a model hands down to its layers and that do not change attention's result.
INERT = {
    "cache_position",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
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
    """Attention of one layer: query, key, value `[B, H, S, D]` to `([B, S, H, D], None)`.

    `attention_mask` is what `visible_keys` made. Where it is None, causality comes from
    `is_causal` or the module, the window from `sliding_window`, as for FlashAttention.
    """
    try:
        return _forward(module, query, key, value, attention_mask, **arguments), None
    except ValueError as error:
        raise renamed(error, NAMES) from None


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    for name, given in kwargs.items():
        if name not in INERT and given is not None and given is not False:
            raise unsupported(f"{name}: expected None, got {shown(given)}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if getattr(x, "ndim", 0) != 4:
            expect_shape(name, x, batch=None, num_heads=None, seqlen=None, head_dim=None)
    for name, flag in (("is_causal", is_causal), ("deterministic", deterministic)):
        if flag is not None:
            expect_bool(name, flag)
    if sliding_window is not None:
        expect_int("sliding_window", sliding_window)
        expect_positive("sliding_window", sliding_window)
    # [B, H, S, D] -> [B, S, H, D], a view
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    seen = attention_mask
    if seen is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        left = -1 if sliding_window is None or k.shape[1] <= sliding_window else sliding_window - 1
        shape = (q.shape[0], 1, q.shape[1], k.shape[1])
        seen = Visibility(shape, causal, (left, -1 if causal else left), k.shape[1])
    elif not isinstance(seen, Visibility):
        raise unsupported(
            f"attention_mask: expected [batch, positions] at the model, got {shown(seen)}; "
            "masks that are not causal, windows, chunks or padding need another implementation"
        )
    expect(
        seen.shape == (q.shape[0], 1, q.shape[1], k.shape[1]),
        "attention_mask",
        f"[{q.shape[0]}, 1, {q.shape[1]}, {k.shape[1]}], as the queries and keys of the layer",
        list(seen.shape),
    )
    lengths = {
        "cu_seq_lens_q": cu_seq_lens_q,
        "cu_seq_lens_k": cu_seq_lens_k,
        "max_length_q": max_length_q,
        "max_length_k": max_length_k,
    }
    if any(given is not None for given in lengths.values()):
        seen = _with_lengths(seen, lengths)

    options: dict[str, Any] = {
        "causal": seen.causal,
        "window_size": seen.window_size,
        "attention_chunk": seen.chunk,
        "softmax_scale": scaling,
        "softcap": 0.0 if softcap is None else softcap,
        "sink_logits": s_aux,
    }
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, key, value, s_aux)
    )
    training: dict[str, Any] = {"dropout_p": dropout, "deterministic": bool(deterministic)}
    if seen.segments is not None:
        return _varlen(q, k, v, seen.segments, seen.length, {**options, **training})
    if seen.cache_seqlens is not None or (
        may_decode(q.shape[1], k.shape[1]) and not needs_grad and not dropout
    ):
        expect(not dropout, "dropout", "0.0 with a key-value cache", dropout)
        return _decode(q, k, v, seen, options)
    k, v = k[:, : seen.length], v[:, : seen.length]
    out: Any = splitkv.attention(q, k, v, **options, **training)
    return out


def _with_lengths(seen: Visibility, lengths: dict[str, Any]) -> Visibility:
    """The sequences of a batch without padding, as its collator gave them."""
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
    """Keys from one sequence of `[B, S, H, D]` to the next; None: no whole number of them."""
    if cache.shape[0] == 1:
        return cache.shape[1]
    whole, rest = divmod(cache.stride(0), cache.stride(1))
    return None if rest else whole


def _pages(cache: Tensor, pitch: int) -> Tensor:
    """A cache `[B, S, H, D]` as pages of one key, `[pages, 1, H, D]`: a view of the same memory.

    Page `b * pitch + s` is key s of sequence b. Pages between the sequences belong to nobody.
    """
    batch, seqlen, heads, dim = cache.shape
    _, key_stride, head_stride, _ = cache.stride()
    pages = (batch - 1) * pitch + seqlen
    return cache.as_strided((pages, 1, heads, dim), (key_stride, key_stride, head_stride, 1))
