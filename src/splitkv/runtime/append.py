"""`append`: from a call to the kernel that writes new tokens into a cache.

A call is bound once for each layout of its tensors and kept in a `CallCache`. Under torch.compile,
torch.export, FakeTensorMode and for tensor subclasses the same function runs as the operator
`splitkv::append`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.core.options import names_of
from splitkv.kernels.host.append_call import Append, Result, Rotary, append_in_torch
from splitkv.runtime.call_cache import CallCache, device_to_enter, launch_on
from splitkv.runtime.dispatch import device_of, is_plain

calls: CallCache[Callable[[Append, list[Tensor]], Result]] = CallCache()


def append(call: Append, check: Callable[[Append], None] | None = None) -> Result:
    """Appends; returns (q_out, after): the rotated queries and how many keys there are now.

    q_out is None without q, after is None with slots. Writes into the caches. One launch, no wait
    for the device, nothing read by the host. Records no gradient.

    check   raises where a call is malformed; not called for a call like an earlier one
    """
    if is_dynamo_compiling():
        if check is not None:
            check(call)
        return _through_operator(call)
    tensors, given = [], 0
    for x in call.tensors:
        given += given
        if x is not None:
            tensors.append(x)
            given += 1
    options = given, *(() if call.rotary is None else call.rotary[3:])
    bound = calls.match(options, tensors)
    if bound is not None:
        return bound(call, tensors)
    if check is not None:
        check(call)
    if not is_plain(*tensors):
        return _through_operator(call)
    return _run(call, tensors, options)


def _run(call: Append, tensors: list[Tensor], options: Any) -> Result:
    if not call.k_cache.is_cuda:
        return append_in_torch(call)
    return calls.get_or_bind(options, tensors, partial(_bind, call))(call, tensors)


def _bind(call: Append) -> Callable[[Append, list[Tensor]], Result]:
    from splitkv.kernels.append import AppendLauncher

    early = device_of(call.k_cache).capability >= (9, 0)
    return partial(launch_on, device_to_enter(call.k_cache), AppendLauncher(call, early))


def _through_operator(call: Append) -> Result:
    """Runs the call as `splitkv::append`, for what traces it or looks into it."""
    tensors = (x if x is None else x.detach() for x in call.tensors)
    how = (False, 0) if call.rotary is None else call.rotary[3:]
    q_out, after = append_op(*tensors, *how)
    return None if call.q is None else q_out, None if call.before is None else after


_SCHEMA = (
    *("Tensor k", "Tensor v", "Tensor(a!) k_cache", "Tensor(b!) v_cache", "Tensor? before"),
    *("Tensor? rows", "Tensor? leftpad", "Tensor? page_table", "Tensor? slots"),
    *("Tensor? cu_seqlens_new", "Tensor? q", "Tensor? cu_seqlens_q", "Tensor(c!)? k_scale"),
    *("Tensor(d!)? v_scale", "Tensor? k_mean", "Tensor? cos", "Tensor? sin", "Tensor? start"),
    *("bool interleaved", "SymInt q_step"),
)
_NAMES = names_of(_SCHEMA)


@torch.library.custom_op(
    "splitkv::append",
    mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"),
    schema=f"({', '.join(_SCHEMA)}) -> (Tensor, Tensor)",
)
def append_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    given = dict(zip(_NAMES, arguments, strict=True))
    rotary = Rotary(*(given.pop(name) for name in Rotary._fields))
    call = Append(**given, rotary=None if rotary.cos is None else rotary)
    absent = tuple(x is None for x in call.tensors)
    q_out, after = _run(call, call.given, (absent, rotary.interleaved, rotary.q_step))
    k = call.k
    return (
        k.new_empty(0) if q_out is None else q_out,
        k.new_empty(0, dtype=torch.int32) if after is None else after,
    )


@append_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    k, before, q = (arguments[_NAMES.index(name)] for name in ("k", "before", "q"))
    return (
        k.new_empty(0) if q is None else q.new_empty(q.shape),
        k.new_empty(0, dtype=torch.int32) if before is None else before.new_empty(before.shape),
    )
