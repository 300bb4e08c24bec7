"""`append` and then `decode` as one call: a launch less where the plan has it that the kernel of
decode writes the new tokens itself. Else `append` lets a kernel that asks for it be launched before
it has ended.

A call is described, planned and bound once for each layout of its tensors, in a `CallCache`.
Under torch.compile, torch.export, FakeTensorMode and for tensor subclasses the same runs as the
operator `splitkv::append_decode`; where sequences are padded on the left, as `splitkv::append` and
`splitkv::decode`.
"""

from __future__ import annotations

from collections.abc import Callable
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
from splitkv.core.variants import Plain
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.planner.registry import kernel_named
from splitkv.runtime.append import append
from splitkv.runtime.call_cache import BoundCall, CallCache, Launcher, Result, with_types
from splitkv.runtime.decode import decode
from splitkv.runtime.dispatch import (
    bind,
    expect_same_shares,
    handle_of,
    is_plain,
    operator_outputs,
    plan_for,
    within_64_bits,
    working_dtype,
)
from splitkv.runtime.schedule import Schedule, plan_of


class Step(NamedTuple):
    """A call of `append_and_decode`.

    starts  where programs start by a schedule of the step, or None
    given   every argument of decode that is no field here, by name
    """

    append: Append
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    num_splits: int
    plan: Plan | None
    starts: Tensor | None
    given: dict[str, Any]


_TENSORS = tensors_of("append_and_decode")
_scalars_of = itemgetter(*(n for n in scalars_of("append_and_decode") if n != "window_size"))
_DEFAULTS = defaults_of("decode")
LENGTHS = 4  # the place of cache_seqlens among the arguments of a `Relaunch`
_UNROTATED = Rotary(*(None,) * 2)
calls: CallCache[BoundCall] = CallCache()


def appending(problem: Problem, call: Append) -> Problem:
    """Adds to the problem of a call of decode what is appended before it."""
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
    schedule: Schedule | None = None,
    **arguments: Any,
) -> Step:
    """Makes a Step of the arguments of `append_and_decode`."""
    assert call.before is not None and call.slots is None and call.k_mean is None
    starts = None
    if schedule is not None:
        plan, starts = plan_of(schedule, plan), schedule.starts
    return Step(call, q, k_cache, v_cache, num_splits, plan, starts, _DEFAULTS | arguments)


def append_and_decode(
    call: Append, q: Tensor, k_cache: Tensor, v_cache: Tensor, **arguments: Any
) -> Result:
    """Appends, and returns (out, lse or None) of `decode`; who makes `call` has checked it.

    call       its lengths are those before it; its scales, if any, not one a token
    q          [batch, seqlen_q, num_heads, head_dim], not rotated yet
    k_cache    as decode reads it: a sequence begins at its first key; v_cache likewise
    arguments  others of decode: no `out`, no `early_kv`, no `cache_seqlens`; a plan is for the
               problem as `appending` says it, and a schedule for the lengths after the call
    """
    step = step_of(call, q, k_cache, v_cache, **arguments)
    bound = bound_call_of(step)
    if bound is not None:
        return _run(bound, step)
    if call.leftpad is None:
        return _through_operator(step)
    arguments = step.given | {"num_splits": step.num_splits}
    if step.plan is not None:
        arguments |= _decided(_without_new_tokens(step.plan), step.starts)
    return _in_turn(call, q, k_cache, v_cache, arguments)


def _run(bound: BoundCall, step: Step) -> Result:
    call, given = step.append, step.given
    operands = Operands(step.q, step.k_cache, step.v_cache, cache_seqlens=call.before, new=call)
    for name in _TENSORS:
        setattr(operands, name, given[name])
    operands.softmax_scale, operands.softcap = bound.softmax_scale, float(given["softcap"])
    operands.starts = step.starts
    return bound(operands)


def bound_call_of(step: Step, *, in_operator: bool = False) -> BoundCall | None:
    """Finds or binds what launches the call.

    Returns None where the call is traced or looked into, unless `in_operator`: the operator itself
    asks.
    """
    if not in_operator and is_dynamo_compiling():
        return None
    call, given, plan = step.append, step.given, step.plan
    rotary = _UNROTATED if call.rotary is None else call.rotary
    of_append = call.cu_seqlens_new, call.leftpad, call.k_scale, call.v_scale, *rotary[:3]
    assert call.before is not None
    tensors, present = [step.q, step.k_cache, step.v_cache, call.before, call.k, call.v], 0
    for t in (*(given[name] for name in _TENSORS), *of_append, step.starts):
        present += present
        if t is not None:
            tensors.append(t)
            present += 1
    left, right = given["window_size"]
    scalars = with_types((left, right, step.num_splits, *_scalars_of(given)))
    options = scalars, present, plan and id(plan), *rotary[3:]
    bound = calls.match(options, tensors)
    if bound is not None:
        return bound
    if not in_operator and not is_plain(*tensors):
        return None
    return calls.get_or_bind(options, tensors, partial(_bind, step))


def _bind(step: Step) -> BoundCall:
    """Binds the kernel that appends too, or `append` and decode under the same decision."""
    call, plan = step.append, step.plan
    problem, operands = _described(step)
    operands.starts = step.starts
    made = plan_for(appending(problem, call), operands, plan, step.num_splits)
    launcher: Launcher
    if made.config.appends:
        operands.new = call
        launcher = kernel_named(made.kernel).bind(made, operands)
    else:
        if call.q is not None:  # the rotated q is contiguous
            operands.q = operands.q.new_empty(operands.q.shape)
        launcher = AppendThenDecode(bind(problem, operands, _without_new_tokens(made)))
    if step.starts is not None and plan is not None:
        expect_same_shares(plan, getattr(launcher, "plan", made))
    return BoundCall.of(launcher, operands, plan)


def _described(step: Step) -> tuple[Problem, Operands]:
    """Describes the call of decode; what is appended is no part of it."""
    lengths = {"cache_seqlens": step.append.before}
    arguments = step.given | lengths
    return describe_decode(step.q, step.k_cache, step.v_cache, needs_grad=False, **arguments)


def _without_new_tokens(plan: Plan) -> Plan:
    """The plan of decode after `append`."""
    problem, config = replace(plan.problem, seqlen_new=0, rotary=False), plan.config
    if config.appends:
        config = replace(config, appends=False, variant=Plain())
    return replace(plan, problem=problem, config=config)


class AppendThenDecode:
    """`append`, and a launcher of decode for the lengths after it, by a plan whose kernel writes no
    new tokens."""

    def __init__(self, decode: Any) -> None:
        self.decode = decode
        self.plan = getattr(decode, "plan", None)

    def __call__(self, operands: Operands) -> Result:
        rotated, after = append(operands.new)
        if rotated is not None:
            operands.q = rotated.view(operands.q.shape)
        operands.cache_seqlens, operands.new = after, None
        result: Result = self.decode(operands)
        return result

    @property
    def repeat(self) -> Callable[..., Result | None] | None:
        """A `Relaunch` that is given what is appended, with q and the places of tokens; None where
        decode has none yet. If decode has to go through its launcher, the new tokens are written by
        then, and will be once more."""
        again = getattr(self.decode, "repeat", None)
        return None if again is None else partial(self._repeat, again)

    @staticmethod
    def _repeat(again: Any, *given: Any, **more: Any) -> Result | None:
        arguments = [*given]
        rotated, after = append(arguments.pop())
        if rotated is not None:
            arguments[0] = rotated.view(given[0].shape)
        arguments[LENGTHS] = after
        result: Result | None = again(*arguments, **more)
        return result


def _decided(plan: Plan, starts: Tensor | None) -> dict[str, Any]:
    """The arguments of decode that say what it runs under."""
    return {"plan": plan, "schedule": None if starts is None else Schedule(plan, starts)}


def _in_turn(
    call: Append, q: Tensor, k_cache: Tensor, v_cache: Tensor, arguments: dict[str, Any]
) -> Result:
    """Runs `append`, and then `decode` with these arguments."""
    rotated, after = append(call)
    if rotated is not None:
        q = rotated.view(q.shape)
    result: Any = decode(q, k_cache, v_cache, **arguments | {"cache_seqlens": after})
    return result if arguments["return_lse"] else (result, None)


def _through_operator(step: Step) -> Result:
    """Runs the call as `splitkv::append_decode`, for what traces it or looks into it."""
    given = within_64_bits(step.given, step.num_splits, partial(_described, step))
    left, right = given["window_size"]
    rotary = _UNROTATED if step.append.rotary is None else step.append.rotary
    given |= {"q": step.q, "k_cache": step.k_cache, "v_cache": step.v_cache, **rotary._asdict()}
    new = ("before", "k", "v", "cu_seqlens_new")
    given |= {name: getattr(step.append, name) for name in new}
    given |= {"k_divisor": step.append.k_scale, "v_divisor": step.append.v_scale}
    given |= {"window_left": left, "window_right": right}
    given |= {"num_splits": step.num_splits, "plan": handle_of(step.plan)}
    given["schedule"] = step.starts
    arguments = (given[name] for name in _NAMES)
    out, lse = append_decode_op(*(x.detach() if isinstance(x, Tensor) else x for x in arguments))
    return out, lse if step.given["return_lse"] else None


_OF_DECODE = schema_of("append_and_decode")
_TENSOR_SCHEMA = tuple(argument for argument in _OF_DECODE if argument.startswith("Tensor"))
_SCHEMA = (
    *("Tensor q", "Tensor(a!) k_cache", "Tensor(b!) v_cache", "Tensor before", "Tensor k"),
    *("Tensor v", "Tensor? cu_seqlens_new", "Tensor? k_divisor", "Tensor? v_divisor"),
    *("Tensor? cos", "Tensor? sin", "Tensor? start", *_TENSOR_SCHEMA),
    *("bool interleaved", "SymInt q_step"),
    *(argument for argument in _OF_DECODE if argument not in _TENSOR_SCHEMA),
)
_NAMES = names_of(_SCHEMA)


@torch.library.custom_op(
    "splitkv::append_decode",
    mutates_args=("k_cache", "v_cache"),
    schema=f"({', '.join(_SCHEMA)}) -> (Tensor, Tensor)",
)
def append_decode_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Pages are where decode reads them, so `append` needs no rows of a cache or table."""
    given = dict(zip(_NAMES, arguments, strict=True))
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    handle, starts = given.pop("plan"), given.pop("schedule")
    rotary = Rotary(*(given.pop(name) for name in Rotary._fields))
    q, k_cache, v_cache = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
    k, caches = given.pop("k"), (k_cache, v_cache)
    if k.dtype == torch.uint8 != k_cache.dtype:  # written as they come
        caches = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    call = Append(
        k,
        given.pop("v"),
        *caches,
        before=given.pop("before"),
        page_table=given["page_table"],
        cu_seqlens_new=given.pop("cu_seqlens_new"),
        q=None if rotary.cos is None else q,
        k_scale=given.pop("k_divisor"),
        v_scale=given.pop("v_divisor"),
        rotary=None if rotary.cos is None else rotary,
    )
    plan = plan_with_handle(handle) if handle else None
    schedule = None if starts is None or plan is None else Schedule(plan, starts)
    step = step_of(call, q, k_cache, v_cache, plan=plan, schedule=schedule, **given)
    bound = bound_call_of(step, in_operator=True)
    assert bound is not None
    return operator_outputs(*_run(bound, step))


@append_decode_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, v_cache, return_lse = (arguments[_NAMES.index(x)] for x in ("q", "v_cache", "return_lse"))
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]), dtype=working_dtype(q))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)
