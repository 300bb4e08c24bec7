"""The functions without a cache: dense, packed in one tensor, and of variable length."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from splitkv.api import attention, attention_varlen
from splitkv.errors import expect, expect_int, expect_none_with, expect_shape, expect_tensor
from splitkv.flash_attn.options import Options, named, refuse_descales, rows_contiguous
from splitkv.flash_attn.segments import Used, used_segments

Descales = tuple[Tensor | None, Tensor | None, Tensor | None]


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

    q                   [batch, seqlen_q, num_heads, head_dim], bf16, fp16 or fp32
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
    qv raises UnsupportedProblem if given
    q_descale, k_descale, v_descale
                        belong to 8-bit inputs, which raise UnsupportedProblem here

    Returns out [batch, seqlen_q, num_heads, head_dim_v]; softmax_lse [batch, num_heads, seqlen_q]
    fp32 is the natural log of the denominator, the sink included. For a row that sees no key out is
    0, and softmax_lse is +inf in FlashAttention 2's triple and -inf in the pair.

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
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    descales = (q_descale, k_descale, v_descale)
    return _dense(q, k, v, options, descales)


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
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    descales = (q_descale, k_descale, v_descale)
    expect_shape("kv", kv, batch=None, seqlen_k=None, two=2, num_kv_heads=None, head_dim=None)
    k, v = rows_contiguous(kv).unbind(2)
    return _dense(q, k, v, options, descales, {"k": "kv", "v": "kv"})


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
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    descales = (q_descale, k_descale, v_descale)
    if num_heads_q is None:
        expect_shape("qkv", qkv, batch=None, seqlen=None, three=3, num_heads=None, head_dim=None)
        q, k, v = rows_contiguous(qkv).unbind(2)
    else:
        q, k, v = _split_heads(qkv, num_heads_q)
    return _dense(q, k, v, options, descales, dict.fromkeys("qkv", "qkv"))


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
    max_seqlen_q, _k      upper bounds of the lengths
    block_table           [batch, max_pages] int32; page_table is another name for it
    seqused_q, seqused_k  [batch] int32: only the first so many tokens of each sequence are there.
                          Queries after them give 0 (and -inf or +inf), keys after them are not seen

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
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    descales = (q_descale, k_descale, v_descale)
    if page_table is not None:
        expect_none_with("block_table", block_table, "page_table, another name for it")
    names = {"page_table": "page_table" if block_table is None else "block_table"}
    used = Used(seqused_q, seqused_k, page_table if block_table is None else block_table)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _varlen(q, k, v, lengths, used, options, descales, names)


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
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    descales = (q_descale, k_descale, v_descale)
    expect_shape("kv", kv, total_k=None, two=2, num_kv_heads=None, head_dim=None)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = rows_contiguous(kv).unbind(1)
    return _varlen(q, k, v, lengths, Used(), options, descales, {"k": "kv", "v": "kv"})


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
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
    )
    descales = (q_descale, k_descale, v_descale)
    expect_shape("qkv", qkv, total=None, three=3, num_heads=None, head_dim=None)
    names = dict.fromkeys("qkv", "qkv")
    names |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "cu_seqlens")
    names |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "max_seqlen")
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    q, k, v = rows_contiguous(qkv).unbind(1)
    return _varlen(q, k, v, lengths, Used(), options, descales, names)


def _split_heads(qkv: Tensor, num_heads_q: int) -> tuple[Tensor, ...]:
    """q, k and v of [batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim]."""
    heads = expect_shape("qkv", qkv, batch=None, seqlen=None, heads=None, head_dim=None)[2]
    expect_int("num_heads_q", num_heads_q)
    rest = heads - num_heads_q
    requirement = f"{heads} heads of qkv less an even number of KV heads"
    expect(num_heads_q > 0 and rest > 0 and rest % 2 == 0, "num_heads_q", requirement, num_heads_q)
    q, k, v = rows_contiguous(qkv).split([num_heads_q, rest // 2, rest // 2], 2)
    return q, k, v


def _checked(
    q: Tensor, k: Tensor, v: Tensor, options: Options, descales: Descales, names: dict[str, str]
) -> tuple[Any, ...]:
    with named(names):
        for name, x in (("q", q), ("k", k), ("v", v)):
            expect_tensor(name, x)
    options.check(q)
    q_descale, k_descale, v_descale = descales
    refuse_descales(q, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return tuple(map(rows_contiguous, (q, k, v)))


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    descales: Descales,
    names: dict[str, str] | None = None,
) -> Any:
    names = names or {}
    q, k, v = _checked(q, k, v, options, descales, names)
    with named(options.names | names):
        result = attention(q, k, v, **options.for_attention())
    return options.finish(result)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, Any, Any, Any],
    used: Used,
    options: Options,
    descales: Descales,
    names: dict[str, str],
) -> Any:
    q, k, v = _checked(q, k, v, options, descales, names)
    with named({"cache_seqlens": "seqused_k"} | options.names | names):
        call = used_segments(used, *lengths, options.for_attention())
        result = attention_varlen(q, k, v, **call)
    return options.finish(result)
