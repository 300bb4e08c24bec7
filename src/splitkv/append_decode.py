"""`append` and then `decode` as one call: a launch less where the plan has it that the kernel of
decode writes the new tokens itself.

A call is described, planned and bound once for each layout of its tensors, and found again by the
check that guards torch's compiled graphs, as in `launch.py`. Under torch.compile, torch.export,
FakeTensorMode and for tensor subclasses the same runs as the operator `splitkv::append_decode`;
where sequences are padded on the left, as `splitkv::append` and `splitkv::decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.api import decode
from splitkv.append import append
from splitkv.kernels.append_call import Append, Rotary
from splitkv.launch import (
    DECODE_DEFAULTS,
    Result,
    check_of,
    handle_of,
    is_plain,
    layout,
    operator_outputs,
    plan_for,
    working_dtype,
)
from splitkv.plans import Plan, plan_with_handle
from splitkv.problem import Operands, Problem, describe_decode
from splitkv.registry import kernel_named


class Step(NamedTuple):
    """A call of `append_and_decode`; given: every argument of decode but these."""

    append: Append
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    num_splits: int
    plan: Plan | None
    given: dict[str, Any]


class Known(NamedTuple):
    """How a call is done, and a check of the tensors that it is for.

    launcher   of the kernel that appends too; None: decode after `append`, under the plan `alone`
    plan       the caller's, which stays alive here, so that its id stays its own
    """

    fits: Callable[..., bool] | None
    launcher: Any
    device: int | None
    softmax_scale: float
    plan: Plan | None
    alone: Plan | None


MAX_CALLS = 4096  # kept; past it the table starts afresh
MAX_RECENT = 8  # layouts tried for the same options
SCALARS = (
    *("max_seqlen_k", "causal", "window_size", "sink_tokens", "attention_chunk", "softmax_scale"),
    *("softcap", "products", "return_lse"),
)
OF_DECODE = ("page_table", "sink_logits", "alibi_slopes", "q_scale", "k_scale", "v_scale")
_calls: dict[Any, Any] = {}  # options -> the last few Known; options and layouts -> Known
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)


def appending(problem: Problem, call: Append) -> Problem:
    """The problem of a call of decode, with what is appended before it."""
    rotary = call.rotary is not None
    return replace(problem, seqlen_new=call.tokens_a_sequence, rotary=rotary)


def step_of(
    call: Append,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_splits: int = 0,
    plan: Plan | None = None,
    **arguments: Any,
) -> Step:
    """By the arguments of `append_and_decode`."""
    assert call.before is not None and call.slots is None and call.k_mean is None
    given = DECODE_DEFAULTS | arguments
    if isinstance(given["window_size"], list):
        given["window_size"] = tuple(given["window_size"])
    return Step(call, q, k_cache, v_cache, num_splits, plan, given)


def append_and_decode(
    call: Append, q: Tensor, k_cache: Tensor, v_cache: Tensor, **arguments: Any
) -> Result:
    """(out, lse or None) of `decode` after a call of `append`, which is checked by who makes it.

    call       its lengths are those before it; its scales, if any, not one a token
    q          [batch, seqlen_q, num_heads, head_dim], not rotated yet
    k_cache    as decode reads it: a sequence begins at its first key; v_cache likewise
    arguments  others of decode: no `out`, no `early_kv`, no `cache_seqlens`; a plan is for the
               problem as `appending` says it
    """
    step = step_of(call, q, k_cache, v_cache, **arguments)
    known = how(step)
    if known is not None:
        return _as_known(known, step)
    return _through_operator(step) if call.leftpad is None else _apart(step)


def _as_known(known: Known, step: Step) -> Result:
    if known.launcher is None:
        return _apart(step._replace(num_splits=0, plan=known.alone))
    call, q, k_cache, v_cache, *_, given = step
    operands = Operands(q, k_cache, v_cache, cache_seqlens=call.before, new=call)
    for name in OF_DECODE:
        setattr(operands, name, given[name])
    operands.softmax_scale, operands.softcap = known.softmax_scale, float(given["softcap"])
    result: Result
    if known.device == _current_device():
        result = known.launcher(operands)
    else:
        with torch.cuda.device(known.device):
            result = known.launcher(operands)
    return result


def how(step: Step, *, in_operator: bool = False) -> Known | None:
    """How the call is done; None for what traces it or looks into it, unless the operator asks."""
    call, q, k_cache, v_cache, num_splits, plan, given = step
    cos, sin, start, *turn = (None, None, None) if call.rotary is None else call.rotary
    of_append = call.cu_seqlens_new, call.leftpad, call.k_scale, call.v_scale, cos, sin, start
    assert call.before is not None
    tensors, present = [q, k_cache, v_cache, call.before, call.k, call.v], 0
    for t in (*(given[name] for name in OF_DECODE), *of_append):
        present += present
        if t is not None:
            tensors.append(t)
            present += 1
    scalars = (given[name] for name in SCALARS)
    options = (present, *scalars, num_splits, plan and id(plan), *turn)
    if not in_operator and (is_dynamo_compiling() or _dispatch_modes()):
        return None
    known: Known
    for known in _calls.get(options, ()):
        if known.fits is not None and known.fits(*tensors):
            return known
    if not in_operator and not is_plain(*tensors):
        return None
    return _known(options, tensors, step)


def _apart(step: Step) -> Result:
    """The same as two calls."""
    call, q, k_cache, v_cache, num_splits, plan, given = step
    rotated, after = append(call)
    if rotated is not None:
        q = rotated.view(q.shape)
    arguments = given | {"cache_seqlens": after, "num_splits": num_splits, "plan": plan}
    result: Any = decode(q, k_cache, v_cache, **arguments)
    return result if given["return_lse"] else (result, None)


def _known(options: Any, tensors: list[Tensor], step: Step) -> Known:
    """Of a call that none of the latest was like: an earlier one's, or a new one."""
    call, *_, num_splits, plan, given = step
    key = options, *map(layout, tensors)
    known: Known | None = _calls.get(key)
    if known is None:
        lengths = {"cache_seqlens": call.before}
        problem, operands = describe_decode(*tensors[:3], needs_grad=False, **given | lengths)
        made = plan_for(appending(problem, call), operands, plan, num_splits)
        launcher = alone = None
        if made.config.appends:
            operands.new = call
            launcher = kernel_named(made.kernel).bind(made, operands)
        else:
            alone = replace(made, problem=replace(made.problem, seqlen_new=0, rotary=False))
        device = call.k.device.index
        known = Known(None, launcher, device, operands.softmax_scale, plan, alone)
    if len(_calls) >= MAX_CALLS - 1:
        _calls.clear()
    known = _calls[key] = known._replace(fits=check_of(tensors))
    if known.fits is not None:
        _calls[options] = (known, *_calls.get(options, ())[: MAX_RECENT - 1])
    return known


def _through_operator(step: Step) -> Result:
    """The call as `splitkv::append_decode`, for what traces it or looks into it."""
    call, q, k_cache, v_cache, num_splits, plan, given = step
    left, right = given["window_size"]
    cos, sin, start, *turn = (None, None, None, False, 0) if call.rotary is None else call.rotary
    of_append = call.before, call.k, call.v, call.cu_seqlens_new, call.k_scale, call.v_scale
    of_decode = (given[name] for name in OF_DECODE)
    tensors = q, k_cache, v_cache, *of_append, cos, sin, start, *of_decode
    detached = (t if t is None else t.detach() for t in tensors)
    scalars = (given[name] for name in SCALARS if name != "window_size")
    out, lse = append_decode_op(
        *detached, *turn, left, right, *scalars, num_splits, handle_of(plan)
    )
    return out, lse if given["return_lse"] else None


@torch.library.custom_op(
    "splitkv::append_decode",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor before, Tensor k, Tensor v, "
    "Tensor? cu_seqlens_new, Tensor? k_divisor, Tensor? v_divisor, Tensor? cos, Tensor? sin, "
    "Tensor? start, Tensor? page_table, Tensor? sink_logits, Tensor? alibi_slopes, "
    "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, bool interleaved, SymInt q_step, "
    "SymInt window_left, SymInt window_right, SymInt? max_seqlen_k, bool causal, "
    "SymInt sink_tokens, SymInt attention_chunk, float? softmax_scale, float softcap, "
    "str? products, bool return_lse, SymInt num_splits, str plan) -> (Tensor, Tensor)",
)
def append_decode_op(*given: Any) -> tuple[Tensor, Tensor]:
    """Pages are where decode reads them, so `append` needs no rows of a cache or table."""
    q, k_cache, v_cache, before, k, v, cu_seqlens_new, k_scale, v_scale, *rest = given
    cos, sin, start, *of_decode = rest[:9]
    interleaved, q_step, left, right, *scalars, num_splits, plan = rest[9:]
    caches = k_cache, v_cache
    if k.dtype == torch.uint8 != k_cache.dtype:  # written as they come
        caches = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    arguments = dict(zip(OF_DECODE, of_decode, strict=True)) | {"window_size": (left, right)}
    names = [name for name in SCALARS if name != "window_size"]
    arguments |= dict(zip(names, scalars, strict=True))
    turn = None if cos is None else Rotary(cos, sin, start, interleaved, q_step)
    call = Append(
        k,
        v,
        *caches,
        before=before,
        page_table=arguments["page_table"],
        cu_seqlens_new=cu_seqlens_new,
        q=None if turn is None else q,
        k_scale=k_scale,
        v_scale=v_scale,
        rotary=turn,
    )
    made = plan_with_handle(plan) if plan else None
    step = step_of(call, q, k_cache, v_cache, num_splits=num_splits, plan=made, **arguments)
    known = how(step, in_operator=True)
    assert known is not None
    return operator_outputs(*_as_known(known, step))


@append_decode_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    q, v_cache, return_lse = given[0], given[2], given[-3]
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]), dtype=working_dtype(q))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)
