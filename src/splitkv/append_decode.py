"""`append` and then `decode` as one call: a launch less where the plan has it that the kernel of
decode writes the new tokens itself.

A call is described, planned and bound once for each layout of its tensors, and found again by the
check that guards torch's compiled graphs, as in `launch.py`. Under torch.compile, torch.export,
FakeTensorMode and for tensor subclasses it is the operators `splitkv::append` and
`splitkv::decode`, one after the other.
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
from splitkv.kernels.append_call import Append
from splitkv.launch import DECODE_DEFAULTS, Result, check_of, is_plain, layout, plan_for
from splitkv.plans import Plan
from splitkv.problem import Operands, Problem, describe_decode
from splitkv.registry import kernel_named


class Known(NamedTuple):
    """How a call is done, and a check of the tensors that it is for.

    launcher   of the kernel that appends too; None: decode after `append`, under the plan `alone`
               where the caller gave one
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


def append_and_decode(
    call: Append,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_splits: int = 0,
    plan: Plan | None = None,
    **arguments: Any,
) -> Result:
    """(out, lse or None) of `decode` after a call of `append`, which is checked by who makes it.

    call       its lengths are those before it; its scales, if any, not one a token
    q          [batch, seqlen_q, num_heads, head_dim], not rotated yet
    k_cache    as decode reads it: a sequence begins at its first key; v_cache likewise
    plan       for the problem as `appending` says it
    arguments  others of decode: no `out`, no `early_kv`, no `cache_seqlens`
    """
    known = how(call, q, k_cache, v_cache, num_splits=num_splits, plan=plan, **arguments)
    if known is None or known.launcher is None:
        alone = plan if known is None else known.alone
        return _apart(call, q, k_cache, v_cache, num_splits, alone, arguments)
    x = DECODE_DEFAULTS | arguments
    operands = Operands(q, k_cache, v_cache, cache_seqlens=call.before, new=call)
    for name in OF_DECODE:
        setattr(operands, name, x[name])
    operands.softmax_scale, operands.softcap = known.softmax_scale, x["softcap"]
    result: Result
    if known.device == _current_device():
        result = known.launcher(operands)
    else:
        with torch.cuda.device(known.device):
            result = known.launcher(operands)
    return result


def how(
    call: Append,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_splits: int = 0,
    plan: Plan | None = None,
    **arguments: Any,
) -> Known | None:
    """How the call is done, by the arguments of `append_and_decode`; None for what traces it or
    looks into it."""
    x = DECODE_DEFAULTS | arguments
    if isinstance(x["window_size"], list):
        x["window_size"] = tuple(x["window_size"])
    cos, sin, start, *turn = (None, None, None) if call.rotary is None else call.rotary
    of_append = call.cu_seqlens_new, call.leftpad, call.k_scale, call.v_scale, cos, sin, start
    assert call.before is not None and call.slots is None and call.k_mean is None
    tensors, given = [q, k_cache, v_cache, call.before, call.k, call.v], 0
    for t in (*(x[name] for name in OF_DECODE), *of_append):
        given += given
        if t is not None:
            tensors.append(t)
            given += 1
    scalars = (x[name] for name in SCALARS)
    options = (given, *scalars, num_splits, plan and id(plan), *turn)
    if is_dynamo_compiling() or _dispatch_modes():
        return None
    known: Known
    for known in _calls.get(options, ()):
        if known.fits is not None and known.fits(*tensors):
            return known
    if not is_plain(*tensors):
        return None
    return _known(options, tensors, call, num_splits, plan, arguments)


def _apart(
    call: Append,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_splits: int,
    plan: Plan | None,
    arguments: dict[str, Any],
) -> Result:
    """The same as two calls."""
    rotated, after = append(call)
    if rotated is not None:
        q = rotated.view(q.shape)
    how = arguments | {"cache_seqlens": after, "num_splits": num_splits, "plan": plan}
    result: Any = decode(q, k_cache, v_cache, **how)
    return result if arguments.get("return_lse") else (result, None)


def _known(
    options: Any,
    tensors: list[Tensor],
    call: Append,
    num_splits: int,
    plan: Plan | None,
    arguments: dict[str, Any],
) -> Known:
    """Of a call that none of the latest was like: an earlier one's, or a new one."""
    key = options, *map(layout, tensors)
    known: Known | None = _calls.get(key)
    if known is None:
        given = DECODE_DEFAULTS | arguments | {"cache_seqlens": call.before}
        problem, operands = describe_decode(*tensors[:3], needs_grad=False, **given)
        made = plan_for(appending(problem, call), operands, plan, num_splits)
        launcher = alone = None
        if made.config.appends:
            operands.new = call
            launcher = kernel_named(made.kernel).bind(made, operands)
        elif plan is not None:
            alone = replace(plan, problem=replace(plan.problem, seqlen_new=0, rotary=False))
        device = call.k.device.index
        known = Known(None, launcher, device, operands.softmax_scale, plan, alone)
    if len(_calls) >= MAX_CALLS - 1:
        _calls.clear()
    known = _calls[key] = known._replace(fits=check_of(tensors))
    if known.fits is not None:
        _calls[options] = (known, *_calls.get(options, ())[: MAX_RECENT - 1])
    return known
