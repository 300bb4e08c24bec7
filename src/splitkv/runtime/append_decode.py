"""`append` and then `decode` as one call: a launch less where the plan has it that the kernel of
decode writes the new tokens itself.

A call is described, planned and bound once for each layout of its tensors, in a `CallCache`.
Under torch.compile, torch.export, FakeTensorMode and for tensor subclasses the same runs as the
operator `splitkv::append_decode`; where sequences are padded on the left, as `splitkv::append` and
`splitkv::decode`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.core.options import defaults_of, names_of, scalars_of, schema_of, tensors_of
from splitkv.core.plan import Plan, plan_with_handle
from splitkv.core.problem import Operands, Problem, describe_decode
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.planner.registry import kernel_named
from splitkv.runtime.append import append
from splitkv.runtime.call_cache import BoundCall, CallCache, Launcher, Result, with_types
from splitkv.runtime.decode import decode
from splitkv.runtime.dispatch import (
    handle_of,
    is_plain,
    operator_outputs,
    plan_for,
    working_dtype,
)


class Step(NamedTuple):
    """A call of `append_and_decode`; given: every argument of decode but these."""

    append: Append
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    num_splits: int
    plan: Plan | None
    given: dict[str, Any]


_TENSORS, _SCALARS = tensors_of("append_and_decode"), scalars_of("append_and_decode")
_scalars_of = itemgetter(*(name for name in _SCALARS if name != "window_size"))
_DEFAULTS = defaults_of("decode")
calls: CallCache[BoundCall] = CallCache()


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
    return Step(call, q, k_cache, v_cache, num_splits, plan, _DEFAULTS | arguments)


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
    bound = bound_call_of(step)
    if bound is not None:
        return _run(bound, step)
    if call.leftpad is None:
        return _through_operator(step)
    of_plan = {"num_splits": step.num_splits, "plan": step.plan}
    return _in_turn(call, q, k_cache, v_cache, step.given | of_plan)


def _run(bound: BoundCall, step: Step) -> Result:
    call, given = step.append, step.given
    operands = Operands(step.q, step.k_cache, step.v_cache, cache_seqlens=call.before, new=call)
    for name in _TENSORS:
        setattr(operands, name, given[name])
    operands.softmax_scale, operands.softcap = bound.softmax_scale, float(given["softcap"])
    return bound(operands)


def bound_call_of(step: Step, *, in_operator: bool = False) -> BoundCall | None:
    """What the call is launched by; None for what traces it or looks into it, unless the operator
    asks."""
    if not in_operator and is_dynamo_compiling():
        return None
    call, given, plan = step.append, step.given, step.plan
    cos, sin, start, *turn = (None, None, None) if call.rotary is None else call.rotary
    of_append = call.cu_seqlens_new, call.leftpad, call.k_scale, call.v_scale, cos, sin, start
    assert call.before is not None
    tensors, present = [step.q, step.k_cache, step.v_cache, call.before, call.k, call.v], 0
    for t in (*(given[name] for name in _TENSORS), *of_append):
        present += present
        if t is not None:
            tensors.append(t)
            present += 1
    left, right = given["window_size"]
    scalars = with_types((left, right, step.num_splits, *_scalars_of(given)))
    options = scalars, present, plan and id(plan), *turn
    bound = calls.match(options, tensors)
    if bound is not None:
        return bound
    if not in_operator and not is_plain(*tensors):
        return None
    return calls.get_or_bind(options, tensors, partial(_bind, step))


def _bind(step: Step) -> BoundCall:
    """A call of the kernel that appends too, or of `append` and decode under the same decision."""
    call, given, plan = step.append, step.given, step.plan
    lengths = {"cache_seqlens": call.before}
    problem, operands = describe_decode(
        step.q, step.k_cache, step.v_cache, needs_grad=False, **given | lengths
    )
    made = plan_for(appending(problem, call), operands, plan, step.num_splits)
    launcher: Launcher
    if made.config.appends:
        operands.new = call
        launcher = kernel_named(made.kernel).bind(made, operands)
    else:
        alone = replace(made, problem=replace(made.problem, seqlen_new=0, rotary=False))
        scalars = {name: given[name] for name in _SCALARS}
        launcher = partial(_append_then_decode, scalars | {"plan": alone})
    return BoundCall.of(launcher, operands, plan)


def _append_then_decode(scalars: dict[str, Any], operands: Operands) -> Result:
    """A launcher of two calls, for a plan whose kernel of decode writes no new tokens."""
    tensors = {name: getattr(operands, name) for name in _TENSORS}
    return _in_turn(operands.new, operands.q, operands.k, operands.v, scalars | tensors)


def _in_turn(
    call: Append, q: Tensor, k_cache: Tensor, v_cache: Tensor, arguments: dict[str, Any]
) -> Result:
    """`append`, and then `decode` with these arguments."""
    rotated, after = append(call)
    if rotated is not None:
        q = rotated.view(q.shape)
    result: Any = decode(q, k_cache, v_cache, **arguments | {"cache_seqlens": after})
    return result if arguments["return_lse"] else (result, None)


def _through_operator(step: Step) -> Result:
    """The call as `splitkv::append_decode`, for what traces it or looks into it."""
    call, q, k_cache, v_cache, num_splits, plan, given = step
    cos, sin, start, *turn = (None, None, None, False, 0) if call.rotary is None else call.rotary
    of_append = call.before, call.k, call.v, call.cu_seqlens_new, call.k_scale, call.v_scale
    of_decode = (given[name] for name in _TENSORS)
    tensors = q, k_cache, v_cache, *of_append, cos, sin, start, *of_decode
    detached = (t if t is None else t.detach() for t in tensors)
    left, right = given["window_size"]
    scalars = given | {"window_left": left, "window_right": right}
    scalars |= {"num_splits": num_splits, "plan": handle_of(plan)}
    out, lse = append_decode_op(*detached, *turn, *(scalars[name] for name in _OF_OPERATOR))
    return out, lse if given["return_lse"] else None


_SCHEMA = schema_of("append_and_decode")
_TENSOR_SCHEMA = tuple(argument for argument in _SCHEMA if argument.startswith("Tensor"))
_SCALAR_SCHEMA = tuple(argument for argument in _SCHEMA if argument not in _TENSOR_SCHEMA)
_OF_OPERATOR = names_of(_SCALAR_SCHEMA)


@torch.library.custom_op(
    "splitkv::append_decode",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor before, Tensor k, Tensor v, "
    "Tensor? cu_seqlens_new, Tensor? k_divisor, Tensor? v_divisor, Tensor? cos, Tensor? sin, "
    f"Tensor? start, {', '.join(_TENSOR_SCHEMA)}, bool interleaved, SymInt q_step, "
    f"{', '.join(_SCALAR_SCHEMA)}) -> (Tensor, Tensor)",
)
def append_decode_op(*given: Any) -> tuple[Tensor, Tensor]:
    """Pages are where decode reads them, so `append` needs no rows of a cache or table."""
    q, k_cache, v_cache, before, k, v, cu_seqlens_new, k_scale, v_scale, *rest = given
    cos, sin, start, *rest = rest
    of_decode, (interleaved, q_step, *scalars) = rest[: len(_TENSORS)], rest[len(_TENSORS) :]
    arguments = dict(zip((*_TENSORS, *_OF_OPERATOR), (*of_decode, *scalars), strict=True))
    arguments["window_size"] = arguments.pop("window_left"), arguments.pop("window_right")
    plan = arguments.pop("plan")
    caches = k_cache, v_cache
    if k.dtype == torch.uint8 != k_cache.dtype:  # written as they come
        caches = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
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
    step = step_of(call, q, k_cache, v_cache, plan=made, **arguments)
    bound = bound_call_of(step, in_operator=True)
    assert bound is not None
    return operator_outputs(*_run(bound, step))


@append_decode_op.register_fake
def _(*given: Any) -> tuple[Tensor, Tensor]:
    q, v_cache = given[0], given[2]
    return_lse = given[_OF_OPERATOR.index("return_lse") - len(_OF_OPERATOR)]
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]), dtype=working_dtype(q))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)
