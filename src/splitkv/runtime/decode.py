"""decode: a call like an earlier one is relaunched, others are described, planned and bound.

Under torch.compile, torch.export, FakeTensorMode and for tensor subclasses the same function runs
as the operator `splitkv::decode`.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from splitkv.core.errors import dtype_name
from splitkv.core.options import names_of, schema_of
from splitkv.core.plan import Plan, plan_with_handle
from splitkv.core.problem import describe_decode, expect_out
from splitkv.runtime import call_cache, dispatch
from splitkv.runtime.autocast import as_autocast
from splitkv.runtime.call_cache import Result
from splitkv.runtime.dispatch import (
    Decision,
    apart,
    expect_unrecorded,
    handle_of,
    operator_outputs,
    result_dtype,
    run_decode,
    together,
    within_64_bits,
)
from splitkv.runtime.schedule import Schedule, plan_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from splitkv.runtime.arguments import DecodeOptions

# Recognised by identity, which is the quickest comparison.
_ZERO, _UNBOUNDED = 0, (-1, -1)


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
    window_size: tuple[int, int] = _UNBOUNDED,
    sink_tokens: int | Tensor = _ZERO,
    max_sink_tokens: int | None = None,
    attention_chunk: int = _ZERO,
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
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    early_kv: bool = False,
    plan: Plan | None = None,
    schedule: Schedule | None = None,
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
    k_scale        scales of an int8, float8_e4m3fn or float8_e5m2 cache, fp32: one, [num_kv_heads],
                   [batch, num_kv_heads], or as the cache without its last dimension; v_scale
                   likewise, of the same granularity
    products       what may be multiplied in 8 bits, as in `attention`
    num_splits     parts that the keys of each sequence are cut into; 0: the policy decides
    out            where to write the result, of its shape and type; any strides but the last, each
                   element in memory of its own; not part of autograd's graph
    out_scale      the scale of a result in float8_e4m3fn, as in `attention`
    early_kv       a promise: the kernel before this one on the stream writes nothing of
                   cache_seqlens, page_table, sink_tokens and the keys and values of all but the
                   last seqlen_q tokens of each sequence (it may write q and those of the last
                   tokens). Then `hopper_decode_split` starts to read before that kernel has ended;
                   the other kernels have no use for it
    plan           a Plan of `splitkv.plan`, to skip deciding
    schedule       a Schedule of `splitkv.make_schedule` for these lengths, whose plan the call
                   runs under; without one, programs find their shares from the lengths; with new
                   tokens to append: `flash_attn.flash_attn_with_kvcache`

    The mask and score arguments are those of `attention`. Nothing synchronises with the host; a
    call can be captured in a CUDA graph. Not differentiable on a GPU kernel: tensors that need a
    gradient are served by plain torch, with a warning.

    Returns out [batch, seqlen_q, num_heads, head_dim_v], and with `return_lse` the natural LSE
    without the sink, [batch, num_heads, seqlen_q] fp32. Equivalent PyTorch: `attention` of each
    sequence of q against the first cache_seqlens[b] keys and values of its cache, times their
    scales. Under torch.autocast as `attention`: a cache of another type is cast whole, in every
    call. Raises as `attention`.
    """
    if schedule is not None:
        plan = plan_of(schedule, plan)
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
        if schedule is not None:
            tensors.append(schedule.starts)
            given |= 256
        if out_scale is not None:
            tensors.append(out_scale)
            given |= 512
        of_sequences = None
        made_with = None if plan is None else id(plan)
        try:
            # types: 1 and 1.0 equal True, but are not what it may be
            if (
                sink_tokens is attention_chunk is _ZERO
                and window_size is _UNBOUNDED
                and max_seqlen_k is None
                and max_sink_tokens is None
                and early_kv is False
            ):
                options: tuple[Any, ...] = (
                    causal,
                    type(causal),
                    softmax_scale,
                    type(softmax_scale),
                    softcap,
                    type(softcap),
                    products,
                    return_lse,
                    type(return_lse),
                    num_splits,
                    type(num_splits),
                    made_with,
                    given,
                )
            else:
                left, right = window_size
                of_all = sink_tokens
                if isinstance(sink_tokens, Tensor):
                    tensors.append(sink_tokens)
                    given |= 1024
                    of_sequences, of_all = sink_tokens, 0
                options = (  # max_seqlen_k first: see `with_longest`
                    max_seqlen_k,
                    type(max_seqlen_k),
                    type(window_size),
                    left,
                    type(left),
                    right,
                    type(right),
                    causal,
                    type(causal),
                    of_all,
                    type(of_all),
                    max_sink_tokens,
                    type(max_sink_tokens),
                    attention_chunk,
                    type(attention_chunk),
                    softmax_scale,
                    type(softmax_scale),
                    softcap,
                    type(softcap),
                    products,
                    return_lse,
                    type(return_lse),
                    early_kv,
                    type(early_kv),
                    num_splits,
                    type(num_splits),
                    made_with,
                    given,
                )
            seen = call_cache.dispatch_modes() or forward_ad._current_level >= 0
            recent = () if seen else dispatch.calls.recent[options, q.shape[0]]
        except KeyError:
            recent = ()
        except (ValueError, *call_cache.NO_TENSOR):  # describing says what is not right
            recent, options = (), ([],)  # which no cache holds
        for fits, grad_mode, bound in recent:
            if fits(*tensors) and (grad_mode is None or grad_mode is torch.is_grad_enabled()):
                device = bound.device
                repeat = bound.launcher.repeat if bound.relaunches else None  # type: ignore[attr-defined]
                if repeat is None or not (device is None or device == call_cache.current_device()):
                    break
                more = {} if schedule is None else {"starts": schedule.starts}
                if out_scale is not None:
                    more["out_scale"] = out_scale
                if of_sequences is not None:
                    more["sequence_sink_tokens"] = of_sequences
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
                    bound.softmax_scale,
                    softcap,
                    **more,
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
        "max_sink_tokens": max_sink_tokens,
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
        "out_scale": out_scale,
        "return_lse": return_lse,
        "early_kv": early_kv,
    }
    arguments = apart(arguments)
    result: Result | None = None
    if not is_dynamo_compiling():
        made = Decision(num_splits, plan, None if schedule is None else schedule.starts)
        result = run_decode(tensors, arguments, made, options, _inside.operator)
    if result is None:
        made_by = {"num_splits": num_splits, "plan": plan, "schedule": schedule}
        result = _through_operator(q, k_cache, v_cache, made_by, arguments)
    return result if return_lse else result[0]


class _Inside(threading.local):
    """Whether this thread runs the operator, so that a call does not go through it."""

    operator = False


_inside = _Inside()


def _through_operator(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    made_by: dict[str, Any],
    arguments: dict[str, Any],
) -> Result:
    """Runs the call as `splitkv::decode`, for what traces it or looks into it.

    made_by     num_splits, plan and schedule
    arguments   every other one of `decode`, by name
    """
    q, k_cache, v_cache = as_autocast(q, k_cache, v_cache)
    new = partial(describe_decode, q, k_cache, v_cache, needs_grad=False, **arguments)
    given = within_64_bits(arguments, made_by["num_splits"], new)
    given["window_left"], given["window_right"] = given["window_size"]
    given |= {"num_splits": made_by["num_splits"], "plan": handle_of(made_by["plan"])}
    schedule = made_by["schedule"]
    given["schedule"] = None if schedule is None else schedule.starts
    out = given["out"]
    result, lse = decode_op(q, k_cache, v_cache, *(given[name] for name in _NAMES))
    if out is not None:
        expect_out(out, tuple(result.shape), dtype_name(result), q.device)
        expect_unrecorded(out)
        result = out.copy_(result)
    return result, lse


_SCHEMA = schema_of("decode", without=["out"])
_NAMES = names_of(_SCHEMA)


@torch.library.custom_op(
    "splitkv::decode",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k_cache, Tensor v_cache, {', '.join(_SCHEMA)}) -> (Tensor, Tensor)",
)
def decode_op(q, k_cache, v_cache, *rest):
    given = together(dict(zip(_NAMES, rest, strict=True)))
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    handle, starts = given.pop("plan"), given.pop("schedule")
    plan = plan_with_handle(handle) if handle else None
    schedule = None if starts is None or plan is None else Schedule(plan, starts)
    _inside.operator = True
    try:
        result = decode(q, k_cache, v_cache, plan=plan, schedule=schedule, **given)
    finally:
        _inside.operator = False
    out, lse = result if given["return_lse"] else (result, None)
    return operator_outputs(out, lse)


@decode_op.register_fake
def _(q, k_cache, v_cache, *rest):
    return_lse = rest[_NAMES.index("return_lse")]
    dtype = result_dtype(q, rest[_NAMES.index("out_scale")])
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]), dtype=dtype)
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)
