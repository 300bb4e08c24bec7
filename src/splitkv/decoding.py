"""decode: a call like an earlier one is launched again, others are described, planned and bound.

Under torch.compile, torch.export, FakeTensorMode and for tensor subclasses the same function runs
as the operator `splitkv::decode`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv import launch
from splitkv.errors import dtype_name
from splitkv.launch import (
    Result,
    dispatch_modes,
    handle_of,
    operator_outputs,
    run_decode,
    working_dtype,
)
from splitkv.plans import Plan, plan_with_handle
from splitkv.problem import expect_out, expect_window

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from splitkv.arguments import DecodeOptions


@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...
@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    sink_tokens: int = 0,
    attention_chunk: int = 0,
    sink_logits: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    products: str | None = None,
    num_splits: int = 0,
    out: Tensor | None = None,
    return_lse: bool = False,
    early_kv: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new tokens against a KV cache that already holds their keys and values.

    q              [batch, seqlen_q, num_heads, head_dim]; the queries are the last seqlen_q keys
    k_cache        [batch, capacity, num_kv_heads, head_dim], or with a page table
                   [num_pages, page_size, num_kv_heads, head_dim], any page size; v_cache likewise
    cache_seqlens  [batch] int32 on the device: keys of each sequence, those of q included; None:
                   all max_seqlen_k. Never read by the host: it may change between graph replays
    page_table     [batch, max_pages] int32 on the device; entries past a length may hold anything
    max_seqlen_k   upper bound of the lengths, default the capacity; longer ones are undefined
    q_scale        a scale of a quantised q: one, [num_heads], [batch, num_heads] or one a token
                   and head
    k_scale        scales of an int8 or float8_e4m3fn cache, fp32: one, [num_kv_heads],
                   [batch, num_kv_heads], or as the cache without its last dimension; v_scale
                   likewise, of the same granularity
    products       what may be multiplied in 8 bits, as in `attention`
    num_splits     parts that the keys of each sequence are cut into; 0: the policy decides
    out            where to write the result, of its shape and type; any strides but the last
    early_kv       a promise: the kernel before this one on the stream writes nothing of
                   cache_seqlens, page_table and the keys and values of all but the last seqlen_q
                   tokens of each sequence (it may write q and those of the last tokens). Then
                   `hopper_decode_split` starts to read before that kernel has ended; the other
                   kernels have no use for it
    plan           a Plan of `splitkv.plan`, to skip deciding

    The mask and score arguments are those of `attention`. Nothing synchronises with the host; a
    call can be captured in a CUDA graph. Not differentiable on a GPU kernel: tensors that need a
    gradient are served by plain torch, with a warning.

    Returns out [batch, seqlen_q, num_heads, head_dim_v], and with `return_lse` the natural LSE
    without the sink, [batch, num_heads, seqlen_q] fp32. Equivalent PyTorch: `attention` of each
    sequence of q against the first cache_seqlens[b] keys and values of its cache, times their
    scales. Raises as `attention`.
    """
    if not is_dynamo_compiling():
        tensors, given = [q, k_cache, v_cache], 0  # a bit for each of the optional ones
        if cache_seqlens is not None:
            tensors.append(cache_seqlens)
            given = 1
        if page_table is not None:
            tensors.append(page_table)
            given |= 2
        if sink_logits is not None:
            tensors.append(sink_logits)
            given |= 4
        if alibi_slopes is not None:
            tensors.append(alibi_slopes)
            given |= 8
        if q_scale is not None:
            tensors.append(q_scale)
            given |= 16
        if k_scale is not None:
            tensors.append(k_scale)
            given |= 32
        if v_scale is not None:
            tensors.append(v_scale)
            given |= 64
        if out is not None:
            tensors.append(out)
            given |= 128
        options = (
            window_size,
            max_seqlen_k,
            causal,
            sink_tokens,
            attention_chunk,
            softmax_scale,
            softcap,
            products,
            return_lse,
            early_kv,
            num_splits,
            None if plan is None else id(plan),
            given,
        )
        try:
            recent = () if dispatch_modes() else launch._calls[options]
        except (KeyError, TypeError):  # TypeError: describing says which option is not right
            recent = ()
        for fits, grad_mode, launcher, repeats, device, scale, _ in recent:
            if fits(*tensors) and (grad_mode is None or grad_mode is torch.is_grad_enabled()):
                repeat = launcher.repeat if repeats else None
                if repeat is None or not (device is None or device == launch._current_device()):
                    break
                done = repeat(
                    q,
                    k_cache,
                    v_cache,
                    out,
                    cache_seqlens,
                    page_table,
                    sink_logits,
                    alibi_slopes,
                    q_scale,
                    k_scale,
                    v_scale,
                    scale,
                    softcap,
                )
                if done is None:
                    break
                return done if return_lse else done[0]
    arguments: dict[str, Any] = {
        "cache_seqlens": cache_seqlens,
        "page_table": page_table,
        "max_seqlen_k": max_seqlen_k,
        "causal": causal,
        "window_size": window_size,
        "sink_tokens": sink_tokens,
        "attention_chunk": attention_chunk,
        "sink_logits": sink_logits,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "products": products,
        "out": out,
        "return_lse": return_lse,
        "early_kv": early_kv,
    }
    result: Result | None = None
    if not is_dynamo_compiling():
        result = run_decode(tensors, arguments, num_splits, plan, options, _inside.operator)
    if result is None:
        result = _through_operator(q, k_cache, v_cache, num_splits, plan, **arguments)
    return result if return_lse else result[0]


class _Inside(threading.local):
    """Whether this thread runs the operator, so that a call is not to go through it again."""

    operator = False


_inside = _Inside()


def _through_operator(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_splits: int,
    plan: Plan | None,
    *,
    window_size: tuple[int, int],
    out: Tensor | None,
    return_lse: bool,
    **arguments: Any,
) -> Result:
    """The call as `splitkv::decode`, for what traces it or looks into it."""
    expect_window(window_size)
    left, right = window_size
    result, lse = decode_op(
        q,
        k_cache,
        v_cache,
        window_left=left,
        window_right=right,
        return_lse=return_lse,
        num_splits=num_splits,
        plan=handle_of(plan),
        **arguments,
    )
    if out is not None:
        expect_out(out, tuple(result.shape), dtype_name(result), q.device)
        result = out.copy_(result)
    return result, lse


@torch.library.custom_op(
    "splitkv::decode",
    mutates_args=(),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? page_table, "
    "SymInt? max_seqlen_k, bool causal, SymInt window_left, SymInt window_right, "
    "SymInt sink_tokens, SymInt attention_chunk, Tensor? sink_logits, float? softmax_scale, "
    "float softcap, "
    "Tensor? alibi_slopes, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, str? products, "
    "bool return_lse, bool early_kv, SymInt num_splits, str plan) -> (Tensor, Tensor)",
)
def decode_op(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    page_table,
    max_seqlen_k,
    causal,
    window_left,
    window_right,
    sink_tokens,
    attention_chunk,
    sink_logits,
    softmax_scale,
    softcap,
    alibi_slopes,
    q_scale,
    k_scale,
    v_scale,
    products,
    return_lse,
    early_kv,
    num_splits,
    plan,
):
    _inside.operator = True
    try:
        result = decode(
            q,
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window_size=(window_left, window_right),
            sink_tokens=sink_tokens,
            attention_chunk=attention_chunk,
            sink_logits=sink_logits,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            products=products,
            num_splits=num_splits,
            return_lse=return_lse,
            early_kv=early_kv,
            plan=plan_with_handle(plan) if plan else None,
        )
    finally:
        _inside.operator = False
    out, lse = result if return_lse else (result, None)
    return operator_outputs(out, lse)


@decode_op.register_fake
def _(q, k_cache, v_cache, *rest):
    return_lse = rest[-4]
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]), dtype=working_dtype(q))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)
