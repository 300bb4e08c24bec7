"""The functions without a cache: dense, packed in one tensor, and of variable length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from splitkv.api import attention, attention_varlen
from splitkv.core.errors import expect, expect_int, expect_none_with, expect_shape, expect_tensor
from splitkv.flash_attn.descales import QUANTISED, scales_of
from splitkv.flash_attn.options import Options, bound_of, named, rows_contiguous
from splitkv.flash_attn.segments import Used, used_segments

HEAD_DIM_STEP = 8  # others are padded with zeros, as in FlashAttention


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over dense batches, differentiable.

    q                   [batch, seqlen_q, num_heads, head_dim], bf16, fp16, fp32 or e4m3
    k, v                [batch, seqlen_k, num_kv_heads, head_dim (v: head_dim_v)]
    dropout_p           probability of dropping a weight
    softmax_scale       default head_dim ** -0.5
    causal              aligned at the last query and key
    window_size         (left, right) keys around a query's position, inclusive; -1: unbounded
    softcap             above 0: scores become softcap * tanh(score / softcap)
    alibi_slopes        [num_heads] or [batch, num_heads] fp32: bias
                        -slope * |i + seqlen_k - seqlen_q - j|
    deterministic       backward gives the same bits every time
    return_attn_probs   return (out, softmax_lse, S_dmask), as FlashAttention 2: S_dmask is empty,
                        as it is there without dropout; with dropout this raises
    return_softmax_lse  return (out, softmax_lse), what FlashAttention-3 returns for
                        return_attn_probs
    s_aux               [num_heads], a logit a head that joins the softmax denominator;
                        learnable_sink is another name for it
    num_splits, pack_gqa, sm_margin
                        hints of FlashAttention-3; checked, and left to the policy
    q_descale, k_descale, v_descale
                        scales of inputs in e4m3 or int8, fp32 [batch, num_kv_heads] or one; None:
                        1. The output is bf16, nothing is differentiable, and with an e4m3 q kernels
                        may round the weights to e4m3, as there. q may also be of 16 bits
    qv raises UnsupportedProblem if given

    Returns out [batch, seqlen_q, num_heads, head_dim_v]; softmax_lse [batch, num_heads, seqlen_q]
    fp32 is the natural log of the denominator, the sink included. For a row that sees no key out is
    0, and softmax_lse the sink's logit; without sinks +inf in FlashAttention 2's triple and -inf in
    the pair. All are contiguous.

    Tensors whose last dimension is not contiguous are copied, as there.
    """
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_softmax_lse=return_softmax_lse,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    return _dense(q, k, v, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn_func` with keys and values in one tensor, kv [batch, seqlen_k, 2, num_kv_heads,
    head_dim]; its gradient is one tensor too."""
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_softmax_lse=return_softmax_lse,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    expect_shape("kv", kv, batch=None, seqlen_k=None, two=2, num_kv_heads=None, head_dim=None)
    k, v = rows_contiguous(kv).unbind(2)
    return _dense(q, k, v, options, {"k": "kv", "v": "kv"})


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    num_heads_q: int | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor, whose gradient is one tensor too.

    qkv          [batch, seqlen, 3, num_heads, head_dim], or with num_heads_q
                 [batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim]
    num_heads_q  query heads of a qkv of four dimensions
    """
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_softmax_lse=return_softmax_lse,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    if num_heads_q is None:
        expect_shape("qkv", qkv, batch=None, seqlen=None, three=3, num_heads=None, head_dim=None)
        q, k, v = rows_contiguous(qkv).unbind(2)
    else:
        q, k, v = _split_heads(qkv, num_heads_q)
    return _dense(q, k, v, options, dict.fromkeys("qkv", "qkv"))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn_func` over sequences of different lengths laid end to end, differentiable.

    q                     [total_q, num_heads, head_dim]
    k, v                  [total_k, num_kv_heads, ..], or with a table
                          [num_pages, page_size, num_kv_heads, ..], any page size
    cu_seqlens_q, _k      [batch + 1] int32 on the device. With a table cu_seqlens_k gives lengths
                          only, and may be None if seqused_k is given
    max_seqlen_q, _k      upper bounds of the lengths, from 0 to less than 2**30. A tensor of one
                          integer is read by the host
    block_table           [batch, max_pages] int32; page_table is another name for it
    seqused_q, seqused_k  [batch] int32: only the first so many tokens of each sequence are there.
                          Queries after them are rows that see no key, keys after them are not seen

    Returns out [total_q, num_heads, head_dim_v]; softmax_lse is [num_heads, total_q].
    """
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_softmax_lse=return_softmax_lse,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    if page_table is not None:
        expect_none_with("block_table", block_table, "page_table, another name for it")
    names = {"page_table": "page_table" if block_table is None else "block_table"}
    used = Used(seqused_q, seqused_k, page_table if block_table is None else block_table)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _varlen(q, k, v, lengths, used, options, names)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with kv [total_k, 2, num_kv_heads, head_dim]."""
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_softmax_lse=return_softmax_lse,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    expect_shape("kv", kv, total_k=None, two=2, num_kv_heads=None, head_dim=None)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = rows_contiguous(kv).unbind(1)
    return _varlen(q, k, v, lengths, Used(), options, {"k": "kv", "v": "kv"})


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_softmax_lse: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with qkv [total, 3, num_heads, head_dim]."""
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_softmax_lse=return_softmax_lse,
        s_aux=s_aux,
        learnable_sink=learnable_sink,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    expect_shape("qkv", qkv, total=None, three=3, num_heads=None, head_dim=None)
    names = dict.fromkeys("qkv", "qkv")
    names |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
    names |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    q, k, v = rows_contiguous(qkv).unbind(1)
    return _varlen(q, k, v, lengths, Used(), options, names)


def _split_heads(qkv: Tensor, num_heads_q: int) -> tuple[Tensor, ...]:
    """q, k and v of [batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim]."""
    heads = expect_shape("qkv", qkv, batch=None, seqlen=None, heads=None, head_dim=None)[2]
    expect_int("num_heads_q", num_heads_q)
    rest = heads - num_heads_q
    requirement = f"{heads} heads of qkv less an even number of KV heads"
    expect(num_heads_q > 0 and rest > 0 and rest % 2 == 0, "num_heads_q", requirement, num_heads_q)
    q, k, v = rows_contiguous(qkv).split([num_heads_q, rest // 2, rest // 2], 2)
    return q, k, v


def _dense(
    q: Tensor, k: Tensor, v: Tensor, options: Options, names: dict[str, str] | None = None
) -> Any:
    with named(options.names | (names or {})):
        q, k, v = _checked(q, k, v, options)
        batch = 0
        if k.dtype in QUANTISED:
            sizes = {"batch": None, "seqlen_k": None, "num_kv_heads": None, "head_dim": None}
            batch = expect_shape("k", k, **sizes)[0]
        scales = scales_of(options.descales, q, k, batch)
        return _attend(attention, (q, k, v), options, options.for_attention() | scales)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, Any, Any, Any],
    used: Used,
    options: Options,
    names: dict[str, str],
) -> Any:
    with named({"cache_seqlens": "seqused_k"} | options.names | names):
        q, k, v = _checked(q, k, v, options)
        cu_seqlens_q, cu_seqlens_k = map(rows_contiguous, lengths[:2])
        max_seqlen_q, max_seqlen_k = map(bound_of, lengths[2:])
        used = Used(*map(rows_contiguous, (used.q, used.k, used.page_table)))
        expect_shape("cu_seqlens_q", cu_seqlens_q, **{"batch + 1": None})
        packed = None if used.page_table is not None else cu_seqlens_k
        if k.dtype in QUANTISED and packed is not None:
            expect_shape("k", k, total_k=None, num_kv_heads=None, head_dim=None)
            expect_shape("cu_seqlens_k", packed, **{"batch + 1": len(cu_seqlens_q)})
        scales = scales_of(options.descales, q, k, len(cu_seqlens_q) - 1, packed)
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        call = used_segments(used, *lengths, options.for_attention() | scales)
        return _attend(attention_varlen, (q, k, v), options, call)


def _checked(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Any, ...]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, x)
        expect(len(x.shape) > 0, name, "a tensor of tokens, heads and numbers", x)
    options.check(q)
    return tuple(map(rows_contiguous, (q, k, v)))


def _attend(
    call: Callable[..., Any],
    tensors: tuple[Tensor, Tensor, Tensor],
    options: Options,
    arguments: dict[str, Any],
) -> Any:
    """`attention` or `attention_varlen`, on head dimensions that kernels have, without gradients of
    8-bit numbers, and what FlashAttention returns."""
    q, k, v = tensors
    if k.dtype in QUANTISED:
        with torch.no_grad():
            return options.finish(call(q, k, v, **arguments))
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    pads = (-head_dim % HEAD_DIM_STEP, -head_dim_v % HEAD_DIM_STEP)
    if pads == (0, 0) or head_dim != k.shape[-1]:
        return options.finish(call(q, k, v, **arguments))
    if arguments["softmax_scale"] is None:
        arguments["softmax_scale"] = head_dim**-0.5
    q, k, v = (F.pad(x, (0, pad)) for x, pad in ((q, pads[0]), (k, pads[0]), (v, pads[1])))
    result = call(q, k, v, **arguments)
    if not options.return_lse:
        return result[..., :head_dim_v].contiguous()
    return options.finish((result[0][..., :head_dim_v].contiguous(), result[1]))
