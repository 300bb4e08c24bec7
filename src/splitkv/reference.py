"""Attention in plain PyTorch: the definition that every kernel is tested against.

For head h, which reads KV head h // (H / H_kv), and query i of a sequence with L_q queries and L_k
keys, standing at key position pos = L_k - L_q + i:

    s[j] = softmax_scale * q[i, h] . k[j]
    s[j] = softcap * tanh(s[j] / softcap)            where softcap > 0
    s[j] = s[j] - alibi_slopes[h] * |pos - j|        where ALiBi slopes are given
    lse  = log sum_j exp(s[j])                       over the visible keys j
    out  = sum_j exp(s[j] - lse) v[j] / (1 + exp(sink_logits[h] - lse))

A row that sees no key has out = 0, lse = -inf and gradients of exactly 0. Everything is
differentiable, and nothing waits for the device: lengths and page tables are only indexed with.

`sink_tokens` [B], where given, are those of each sequence in the place of the mask's; below 0 they
are as 0. A query sees beside all these keys those of the `bidirectional_ranges` that it stands in.

With an `out_scale` of one element the output is out / out_scale in e4m3, nearest, and past the
largest number that: `scaled`.

`upcast` chooses the precision: True is the reference (float32 for 16-bit inputs, float64 for
float32), a dtype is that dtype, False is the working precision, the run that the tolerance rule
compares with. Softmax and LSE are computed in float32 or better whatever the precision.

Quantised tensors are multiplied by their scales first. `products` then rounds what a kernel may
multiply in 8 bits, as it may: "half" q, "full" q and the softmax's weights; and sums of products in
e4m3, of which the matrix units keep fewer bits than fp32 has.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from splitkv.core.errors import expect, expect_device, expect_dtype, expect_shape
from splitkv.core.masks import Mask
from splitkv.core.scales import DTYPE_BYTES
from splitkv.rounding import Rounding, dequantize, is_of_tokens, quantize

FULL, CAUSAL = Mask(), Mask(causal=True)
HALF = (torch.bfloat16, torch.float16)
WORKING = (*HALF, torch.float32, torch.float64)


def compute_dtype(dtype: torch.dtype, upcast: bool | torch.dtype) -> torch.dtype:
    """Returns the precision for inputs of `dtype`; quantised queries work in bfloat16."""
    if isinstance(upcast, torch.dtype):
        return upcast
    working = dtype if dtype in WORKING else torch.bfloat16
    if not upcast:
        return working
    return torch.float32 if working in HALF else torch.float64


class Scoring(NamedTuple):
    """How scores are made of products.

    softmax_scale   default head_dim ** -0.5
    softcap         above 0: softcap * tanh(score / softcap)
    slopes          ALiBi's, [B or 1, H, S_q or 1]
    distance        beside them, |pos - j| [B or 1, S_q, S_k]
    """

    softmax_scale: float | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    distance: Tensor | None = None


class Dropout(NamedTuple):
    """The probability of dropping a weight, and what draws; None: torch's own generator."""

    p: float = 0.0
    generator: torch.Generator | None = None


class Masking(NamedTuple):
    """The mask of all sequences, and what each has of its own: sink tokens [B], ranges of keys
    [B, ranges, 2]; None: nothing."""

    mask: Mask
    sink_tokens: Tensor | None = None
    bidirectional_ranges: Tensor | None = None


AS_THEY_ARE, NONE_DROPPED = Scoring(), Dropout()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = FULL,
    sink_tokens: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    products: str = "widened",
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    upcast: bool | torch.dtype = True,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes dense attention.

    q [B, S_q, H, D], k [B, S_k, H_kv, D], v [B, S_k, H_kv, D_v]; alibi_slopes [H] or [B, H];
    sink_logits [H]. For scales see `dequantize`.
    generator: what dropout draws from. Returns out [B, S_q, H, D_v] and lse [B, H, S_q],
    None unless `return_lse`.
    """
    dtype = compute_dtype(q.dtype, upcast)
    rounding = Rounding(products, k.dtype, v_scale if is_of_tokens(v_scale, v) else None)
    q = rounding.of_queries(q, dequantize(q, q_scale, dtype))
    k, v = dequantize(k, k_scale, dtype), dequantize(v, v_scale, dtype)
    key = torch.arange(k.shape[1], device=q.device)
    pos = k.shape[1] - q.shape[1] + torch.arange(q.shape[1], device=q.device)[:, None]
    visible = None if mask.is_full else mask.visible(pos, key, of_each(sink_tokens))
    return attend(
        q,
        k,
        v,
        visible if visible is None or visible.dim() == 3 else visible[None],
        scoring=Scoring(
            softmax_scale,
            softcap,
            slopes=None if alibi_slopes is None else alibi_slopes.view(-1, q.shape[2], 1),
            distance=None if alibi_slopes is None else (pos - key).abs()[None],
        ),
        sink_logits=sink_logits,
        dropout=Dropout(dropout_p, generator),
        products=rounding.of_products,
        weights=rounding.of_weights,
        return_lse=return_lse,
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    mask: Mask = FULL,
    sink_tokens: Tensor | None = None,
    bidirectional_ranges: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    products: str = "widened",
    dropout_p: float = 0.0,
    upcast: bool | torch.dtype = True,
) -> tuple[Tensor, Tensor]:
    """Computes packed sequences under one block-diagonal mask: quadratic in the total length.

    q [total_q, H, D], k, v [total_k, H_kv, D]; cu_seqlens [B + 1] on the device. Or k, v
    [num_pages, page_size, H_kv, D] with page_table [B, max_pages] and cache_seqlens [B]; entries of
    cache and table past a length may hold anything. Tokens after the last sequence see nothing.
    For scales see `dequantize`. Returns out [total_q, H, D_v] and lse [H, total_q].
    """
    dtype = compute_dtype(q.dtype, upcast)
    sequence_q, i = sequence_of_token(cu_seqlens_q, q.shape[0])
    if page_table is None:
        assert cu_seqlens_k is not None
        sequence_k, key = sequence_of_token(cu_seqlens_k, k.shape[0])
        seqlens_k = cu_seqlens_k.diff()
    else:
        assert cache_seqlens is not None
        seqlens_k = cache_seqlens
        keys = torch.arange(page_table.shape[1] * k.shape[1], device=q.device)
        used = (keys < seqlens_k[:, None]).flatten()

        def first_keys(x: Tensor) -> Tensor:
            return gather_pages(x, page_table, keys.numel()).flatten(0, 1)

        def scale_of_keys(scale: Tensor | None) -> Tensor | None:
            if is_of_tokens(scale, cache):
                assert scale is not None
                return first_keys(scale).masked_fill(~used[:, None], 1)
            if scale is not None and scale.dim() == 2 and scale.numel() > 1:  # of a sequence
                return scale.repeat_interleave(keys.numel(), 0)
            return scale

        cache = k
        k_scale, v_scale = scale_of_keys(k_scale), scale_of_keys(v_scale)
        k, v = (first_keys(x) for x in (k, v))
        key = keys.repeat(len(seqlens_k))
        sequence_k = torch.arange(len(seqlens_k), device=q.device).repeat_interleave(keys.numel())
        sequence_k = torch.where(used, sequence_k, len(seqlens_k))
    rounding = Rounding(products, k.dtype, v_scale if is_of_tokens(v_scale, v) else None)
    q = rounding.of_queries(q, dequantize(q, q_scale, dtype))
    k, v = dequantize(k, k_scale, dtype), dequantize(v, v_scale, dtype)
    if page_table is not None:
        k, v = (x.masked_fill(~used[:, None, None], 0) for x in (k, v))
    shift = seqlens_k - cu_seqlens_q.diff()
    last = shift.numel() - 1
    clamped = sequence_q.clamp(max=last)
    pos = (i + shift[clamped])[:, None]  # [total_q, 1]
    same = (sequence_q[:, None] == sequence_k) & (sequence_q <= last)[:, None]
    slopes = None
    if alibi_slopes is not None:
        per_token = alibi_slopes[clamped] if alibi_slopes.dim() == 2 else alibi_slopes[None]
        slopes = per_token.transpose(0, 1)[None]  # [1, H, total_q or 1]
    own = None if sink_tokens is None else sink_tokens[clamped][:, None]
    visible = mask.visible(pos, key, own)
    if bidirectional_ranges is not None:
        visible = visible | in_one_range(pos, key, bidirectional_ranges[clamped])
    out, lse = attend(
        q[None],
        k[None],
        v[None],
        (visible & same)[None],
        scoring=Scoring(
            softmax_scale,
            softcap,
            slopes,
            distance=None if slopes is None else (pos - key).abs()[None],
        ),
        sink_logits=sink_logits,
        dropout=Dropout(dropout_p),
        products=rounding.of_products,
        weights=rounding.of_weights,
    )
    assert lse is not None
    return out[0], lse[0]


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask = CAUSAL,
    sink_tokens: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    products: str = "widened",
    upcast: bool | torch.dtype = True,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes a few queries a sequence against a KV cache, of which they are the last keys.

    q [B, S_q, H, D]; caches [B, capacity, H_kv, D], or [num_pages, page_size, H_kv, D] with
    page_table [B, max_pages]; cache_seqlens [B]. Cache entries that no query sees are never used,
    whatever they hold, nor are page table entries past the length. For scales see `dequantize`.
    Returns out [B, S_q, H, D_v] and lse [B, H, S_q].
    """
    dtype = compute_dtype(q.dtype, upcast)
    if max_seqlen_k is None:
        page_size = 1 if page_table is None else k_cache.shape[1]
        max_seqlen_k = (k_cache if page_table is None else page_table).shape[1] * page_size
    k = load_cache(k_cache, k_scale, page_table, max_seqlen_k, dtype)
    v = load_cache(v_cache, v_scale, page_table, max_seqlen_k, dtype)
    scale = None
    if is_of_tokens(v_scale, v_cache):
        assert v_scale is not None
        scale = first_keys_of(v_scale, page_table, max_seqlen_k)
    rounding = Rounding(products, k_cache.dtype, scale)
    return attend_padded(
        rounding.of_queries(q, dequantize(q, q_scale, dtype)),
        k,
        v,
        seqlens_q=None,
        seqlens_k=cache_seqlens,
        masking=Masking(mask, sink_tokens),
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink_logits=sink_logits,
        products=rounding.of_products,
        weights=rounding.of_weights,
        return_lse=return_lse,
    )


def attend_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqlens_q: Tensor | None,
    seqlens_k: Tensor | None,
    masking: Masking,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs `attend` for sequences padded at their end; keys that no query sees may hold anything.

    options   softmax_scale and softcap, and those of `attend`
    """
    scale, softcap = options.pop("softmax_scale", None), options.pop("softcap", 0.0)
    pos, key, visible = padded_mask(q, k, seqlens_q, seqlens_k, masking)
    unread = ~visible.any(-2)[:, :, None, None]  # [B, S_k, 1, 1]
    return attend(
        q,
        k.masked_fill(unread, 0),
        v.masked_fill(unread, 0),
        visible,
        scoring=Scoring(
            scale,
            softcap,
            slopes=None if alibi_slopes is None else alibi_slopes.view(-1, q.shape[2], 1),
            distance=None if alibi_slopes is None else (pos - key).abs(),
        ),
        dropout=Dropout(dropout_p, generator),
        **options,
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    scoring: Scoring = AS_THEY_ARE,
    sink_logits: Tensor | None = None,
    dropout: Dropout = NONE_DROPPED,
    products: Callable[[Tensor, Tensor], Tensor] | None = None,
    weights: Callable[[Tensor], Tensor] | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes the definition, on `[B, S, H, D]` tensors of one dtype.

    visible   [B or 1, S_q, S_k] booleans; None: all keys
    products  rows [B, H_kv, R, D] times the transpose of keys [B, H_kv, S_k, D]; None: exactly
    weights   rounds the softmax's weights [B, H_kv, H / H_kv, S_q, S_k]; None: they stay
    """
    batch, seqlen_q, num_heads = q.shape[:3]
    if k.shape[1] == 0:  # one key that nobody sees
        k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        visible = q.new_zeros(1, seqlen_q, 1, dtype=torch.bool)
        scoring = scoring._replace(distance=q.new_zeros(1, seqlen_q, 1))
        weights = None  # with no scale of its own
    seqlen_k, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    stat = torch.promote_types(q.dtype, torch.float32)

    # The heads of a group are more rows against the same keys: K and V are not repeated.
    scale = q.shape[3] ** -0.5 if scoring.softmax_scale is None else scoring.softmax_scale
    rows = pack_heads(q * scale, num_kv_heads)
    s = (products or _matmul)(rows, k.transpose(1, 2)).to(stat)
    s = s.view(batch, num_kv_heads, group, seqlen_q, seqlen_k)
    if scoring.softcap > 0:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    if scoring.slopes is not None:
        assert scoring.distance is not None
        per_row = scoring.slopes.to(stat).unflatten(1, (num_kv_heads, group)).unsqueeze(-1)
        s = s - per_row * scoring.distance[:, None, None]

    sees_any = None
    if visible is not None:
        # Rows that see no key get scores of 0, finite in both directions, and are cleared below.
        visible = visible[:, None, None]
        sees_any = visible.any(-1, keepdim=True)
        s = torch.where(visible, s, torch.where(sees_any, float("-inf"), 0.0))
    lse = torch.logsumexp(s, -1, keepdim=True) if return_lse else None
    if sink_logits is not None:  # one more key, its value 0
        sink = sink_logits.to(stat).view(num_kv_heads, group, 1, 1)
        s = torch.cat([s, sink.expand(*s.shape[:-1], 1)], -1)
        v = F.pad(v, (0, 0, 0, 0, 0, 1))
    p = _dropped(torch.softmax(s, -1), dropout)
    if weights is not None:  # of keys, not of the sink, whose value is 0
        p = F.pad(weights(p[..., :seqlen_k]), (0, s.shape[-1] - seqlen_k))
    p = p.to(v.dtype)
    out = p.view(batch, num_kv_heads, group * seqlen_q, s.shape[-1]) @ v.permute(0, 2, 1, 3)
    out = out.view(batch, num_kv_heads, group, seqlen_q, v.shape[-1])
    if sees_any is not None:
        out = torch.where(sees_any, out, 0.0)
        lse = None if lse is None else torch.where(sees_any, lse, float("-inf"))
    out = out.permute(0, 3, 1, 2, 4).reshape(batch, seqlen_q, num_heads, v.shape[-1]).contiguous()
    return out, None if lse is None else lse.view(batch, num_heads, seqlen_q)


def _dropped(weights: Tensor, dropout: Dropout) -> Tensor:
    if dropout.generator is None or dropout.p == 0:
        return F.dropout(weights, dropout.p)
    keep = torch.empty_like(weights).bernoulli_(1 - dropout.p, generator=dropout.generator)
    return weights * keep / (1 - dropout.p) if dropout.p < 1 else weights * keep


def _matmul(rows: Tensor, keys: Tensor) -> Tensor:
    return rows @ keys.transpose(-1, -2)


def pack_heads(q: Tensor, num_kv_heads: int) -> Tensor:
    """Packs [B, S, H, D] to [B, H_kv, (H / H_kv) * S, D]: the query rows that read each KV head."""
    return q.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def in_one_range(pos: Tensor, key: Tensor, ranges: Tensor) -> Tensor:
    """Finds which queries and keys stand in one range: positions [.., S_q, 1], or [S_q, 1] with
    ranges of each, keys [S_k], ranges [.., ranges, 2] of (first, end)."""
    seen = torch.zeros_like(pos + key, dtype=torch.bool)
    for first, end in (x.unbind(-1) for x in ranges.unbind(-2)):
        least = first.long().clamp(min=0).view(-1, *[1] * (pos.dim() - 1))
        past = end.long().view(least.shape)
        seen = seen | ((pos >= least) & (pos < past) & (key >= least) & (key < past))
    return seen


def of_each(sink_tokens: Tensor | None) -> Tensor | None:
    """The sink tokens [B] beside positions [B, S_q, 1]; None: those of the mask."""
    return None if sink_tokens is None else sink_tokens[:, None, None]


def padded_mask(
    q: Tensor,
    k: Tensor,
    seqlens_q: Tensor | None,
    seqlens_k: Tensor | None,
    masking: Masking,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns positions of queries [B or 1, S_q, 1] and keys [S_k], and what is visible
    [B, S_q, S_k]."""
    batch, max_seqlen_q, max_seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    len_q = max_seqlen_q if seqlens_q is None else seqlens_q.long()[:, None, None]
    len_k = max_seqlen_k if seqlens_k is None else seqlens_k.long()[:, None, None]
    i = torch.arange(max_seqlen_q, device=q.device)[None, :, None]
    key = torch.arange(max_seqlen_k, device=q.device)
    pos = len_k - len_q + i
    visible = masking.mask.visible(pos, key, of_each(masking.sink_tokens))
    if masking.bidirectional_ranges is not None:
        visible = visible | in_one_range(pos, key, masking.bidirectional_ranges)
    visible = visible & (key < len_k) & (i < len_q)
    return pos, key, visible.expand(batch, -1, -1)


def sequence_of_token(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Finds each packed token's sequence and its index in it; past the last sequence: (B, any)."""
    token = torch.arange(total, device=cu_seqlens.device)
    ends = cu_seqlens[1:].long()
    sequence = torch.searchsorted(ends, token, right=True)
    return sequence, token - cu_seqlens.long()[sequence.clamp(max=max(ends.numel() - 1, 0))]


def pad_sequences(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Pads [total, ...] to [B, max_seqlen, ...], zeros after the end of each sequence."""
    start, length = cu_seqlens[:-1].long(), cu_seqlens.diff()
    i = torch.arange(max_seqlen, device=x.device)
    if x.shape[0] == 0:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))
    rows = x[(start[:, None] + i).clamp(max=x.shape[0] - 1)]
    used = (i < length[:, None]).view(len(length), max_seqlen, *[1] * (x.dim() - 1))
    return rows.masked_fill(~used, 0)


def pack_sequences(x: Tensor, cu_seqlens: Tensor, total: int, fill: float = 0.0) -> Tensor:
    """Packs [B, max_seqlen, ...] to [total, ...], `fill` after the last sequence."""
    if x.shape[0] * x.shape[1] == 0:  # a token that is used nowhere: the graph goes on through it
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, x.shape[1] == 0, 0, x.shape[0] == 0))
    sequence, i = sequence_of_token(cu_seqlens, total)
    used = (sequence < cu_seqlens.numel() - 1).view(total, *[1] * (x.dim() - 2))
    rows = x[sequence.clamp(max=x.shape[0] - 1), i.clamp(0, x.shape[1] - 1)]
    return rows.masked_fill(~used, fill)


def load_cache(
    cache: Tensor,
    scale: Tensor | None,
    page_table: Tensor | None,
    max_seqlen_k: int,
    dtype: torch.dtype,
) -> Tensor:
    """Gathers and dequantises the first keys of each sequence: [B, max_seqlen_k, H_kv, D]."""
    if is_of_tokens(scale, cache):
        assert scale is not None
        scale = first_keys_of(scale, page_table, max_seqlen_k)
    return dequantize(first_keys_of(cache, page_table, max_seqlen_k), scale, dtype)


def first_keys_of(x: Tensor, page_table: Tensor | None, max_seqlen_k: int) -> Tensor:
    """Gathers [B, max_seqlen_k, ...] of a cache or of what lies beside it."""
    if page_table is None:
        return x[:, :max_seqlen_k]
    return gather_pages(x, page_table, max_seqlen_k)


def gather_pages(cache: Tensor, page_table: Tensor, max_seqlen_k: int) -> Tensor:
    """Gathers [B, max_seqlen_k, ...] of [num_pages, page_size, ...]; never reads past the cache."""
    num_pages, page_size = cache.shape[:2]
    pages = page_table[:, : -(-max_seqlen_k // page_size)].long().clamp(0, num_pages - 1)
    return take(cache, pages).flatten(1, 2)[:, :max_seqlen_k]


def take(x: Tensor, *index: Any) -> Tensor:
    """Returns `x[index]`; 8-bit floats are moved as bytes, as not every device indexes them."""
    if x.element_size() > 1:
        return x[index]
    return x.view(torch.uint8)[index].view(x.dtype)


def scaled(out: Tensor, out_scale: Tensor) -> Tensor:
    """Divides a result by a scale of one element, and rounds it to the nearest e4m3; past the
    largest to that."""
    return quantize(out, out_scale.reshape(()), torch.float8_e4m3fn)


def apply_sink_logits(out: Tensor, lse: Tensor, sink_logits: Tensor) -> Tensor:
    """Puts the sink logits [H] into the denominator of out: once, after every merge.

    out [B, S, H, D] with lse [B, H, S], or out [total, H, D] with lse [H, total], which leaves the
    sinks out.
    """
    finite = lse.clamp(min=torch.finfo(lse.dtype).min).transpose(-1, -2)  # [..., S, H]
    # sigmoid(lse - sink), whose gradient is exact, too, where next to nothing goes to the sink
    share = torch.exp(-F.softplus(sink_logits.to(lse.dtype) - finite))
    return (out * share.unsqueeze(-1)).to(out.dtype).contiguous()


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *more: Tensor,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    out [B, S, H, D] with lse [B, H, S], or out [total, H, D] with lse [H, total]; no sink logits
    in any: `sink_logits` [H] join the denominator of the result, once. more: out_c, lse_c, and so
    on. Returns out in the dtype of `out_a` and the merged lse, which leaves the sinks out.

    Raises ValueError where shapes, dtypes or devices are not these: all on one device, floating.
    """
    states = expect_states(out_a, lse_a, out_b, lse_b, *more)
    wide = torch.promote_types(lse_a.dtype, torch.float32)
    lses = [lse.to(wide) for _, lse in states]
    m = lses[0]
    for x in lses[1:]:
        m = torch.maximum(m, x)
    m = torch.where(m == float("-inf"), 0.0, m.detach())
    weights = [torch.exp(x - m) for x in lses]
    total = sum(weights[1:], weights[0])
    sees_any = total > 0
    total = torch.where(sees_any, total, 1.0)
    lse = torch.where(sees_any, m + torch.log(total), float("-inf"))
    out: Any = 0
    for weight, x, (part, _) in zip(weights, lses, states, strict=True):
        seen = (x != float("-inf")).transpose(-1, -2).unsqueeze(-1)
        known = torch.where(seen, part.to(wide), 0.0)  # what no key has made may be anything
        out = out + (weight / total).transpose(-1, -2).unsqueeze(-1) * known
    if sink_logits is not None:
        expect_shape("sink_logits", sink_logits, num_heads=out_a.shape[-2])
        out = apply_sink_logits(out, lse, sink_logits)
    return out.to(out_a.dtype).contiguous(), lse.contiguous()


def expect_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *more: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The states of `merge_states`, checked, as pairs (out, lse)."""
    packed = getattr(out_a, "ndim", 4) == 3
    names = *(("total",) if packed else ("batch", "seqlen_q")), "num_heads", "head_dim_v"
    sizes = dict(zip(names, expect_shape("out_a", out_a, **dict.fromkeys(names)), strict=True))
    rows = {name: sizes[name] for name in (*names[:-3], names[-2], names[-3])}  # heads first
    expect(len(more) % 2 == 0, "states", "an out and an lse of each", 4 + len(more))
    given = out_a, lse_a, out_b, lse_b, *more
    states = list(zip(given[::2], given[1::2], strict=True))
    for i, (out, lse) in enumerate(states):
        letter = string.ascii_lowercase[i] if i < 26 else str(i)
        expect_shape(f"out_{letter}", out, **sizes)
        expect_shape(f"lse_{letter}", lse, **rows)
        for name, x in ((f"out_{letter}", out), (f"lse_{letter}", lse)):
            expect_dtype(name, x, *DTYPE_BYTES)
            expect_device(name, x, out_a.device)
    return states
