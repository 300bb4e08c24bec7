"""Calls of flash_attn_with_kvcache that were checked before, known by the arguments as they come.

A step of a model that appends and attends on a GPU, in one launch or after `append`, is looked up
in a `CallCache` before its arguments are checked: their types, shapes, strides, devices and options
are those of an earlier call, so the checks would find the same. Every other call is checked. A
Schedule is known by its plan, and where programs start is an argument like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.core.plan import Plan
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.runtime import call_cache
from splitkv.runtime.call_cache import BoundCall, CallCache, Relaunch, with_types
from splitkv.runtime.schedule import Schedule


class CachedStep(NamedTuple):
    """A bound call of append and decode, and what the arguments of FlashAttention say beside it."""

    bound: BoundCall
    q_step: int
    plan: Plan | None  # of the metadata; stays alive here, so that its id stays its own


# Of the arguments: the tensors that such a step may have, in this order; its other options, beside
# the window; and what it does not have.
TENSORS = (
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "cache_batch_idx", "block_table"),
    *("page_table", "rotary_cos", "rotary_sin", "rotary_seqlens", "alibi_slopes"),
    "cu_seqlens_k_new",
)
SCALARS = (
    *("softmax_scale", "causal", "softcap", "rotary_interleaved", "num_splits"),
    *("attention_chunk", "pack_gqa", "sm_margin"),
)
ABSENT = (
    *("cache_leftpad", "leftpad_k", "qv", "cu_seqlens_q", "max_seqlen_q", "q_descale", "k_descale"),
    *("v_descale", "s_aux", "learnable_sink"),
)
_tensors_of, _scalars_of, _absent_of = (itemgetter(*x) for x in (TENSORS, SCALARS, ABSENT))
calls: CallCache[CachedStep] = CallCache()


def relaunched(given: Mapping[str, Any]) -> Tensor | None:
    """Launches a call as an earlier one like it, and returns out; None: nothing is done."""
    options, tensors = _options_of(given)
    if options is None:
        return None
    step = calls.match(options, tensors)
    if step is None:
        return None
    bound = step.bound
    if bound.device is not None and bound.device != call_cache.current_device():
        return None
    k_cache, v_cache, lengths = given["k_cache"], given["v_cache"], given["cache_seqlens"]
    cos, rotary, new_ends = given["rotary_cos"], None, given["cu_seqlens_k_new"]
    if cos is not None:
        turn = given["rotary_sin"], given["rotary_seqlens"], given["rotary_interleaved"]
        rotary = Rotary(cos, *turn, step.q_step)
    table, rows = given["block_table"], given["cache_batch_idx"]
    if table is None:
        table = given["page_table"]
    q, k, v = given["q"], given["k"], given["v"]
    new = Append(
        k,
        v,
        k_cache,
        v_cache,
        lengths,
        rows,
        page_table=table,
        cu_seqlens_new=new_ends,
        q=None if cos is None else q,
        rotary=rotary,
    )
    if table is None:
        table = rows
    starts = getattr(given["scheduler_metadata"], "starts", None)
    more = {} if starts is None else {"starts": starts}
    repeat: Relaunch = bound.launcher.repeat  # type: ignore[attr-defined]
    done = repeat(
        q,
        k_cache,
        v_cache,
        None,
        lengths,
        table,
        None,
        given["alibi_slopes"],
        None,
        None,
        None,
        bound.softmax_scale,
        given["softcap"],
        new,
        **more,
    )
    return None if done is None else done[0]


def keep(given: Mapping[str, Any], call: Append, q: Tensor, bound: BoundCall | None) -> None:
    """Keeps how a call with these arguments was launched.

    call, q   what it appended, and the queries that it then attended with
    """
    if bound is None or getattr(bound.launcher, "repeat", None) is None:
        return
    options, tensors = _options_of(given)
    as_it_comes = call.k is given["k"] and call.v is given["v"] and q is given["q"]
    if options is None or call.k_scale is not None or not as_it_comes:
        return
    if not all(isinstance(x, Tensor) for x in tensors):  # cache_seqlens may be a number
        return
    q_step = 1 if call.rotary is None else call.rotary.q_step
    metadata = given["scheduler_metadata"]
    plan = metadata.plan if isinstance(metadata, Schedule) else metadata
    calls.add(options, tensors, CachedStep(bound, q_step, plan))


def _options_of(given: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Returns (options, tensors) of a call; options None where it is none that is cached."""
    if is_dynamo_compiling():
        return None, []
    absent, values = _absent_of(given), _tensors_of(given)
    rows, tables = values[6], values[7:9]
    try:
        cached = (
            absent.count(None) == len(absent)
            and values[3] is not None  # k
            and given["return_softmax_lse"] is False
            and (rows is None or tables == (None, None))
            and type(given["window_size"]) is tuple
        )
    except ValueError:  # an array of NumPy's, which compares with None in each element
        cached = False
    if not cached:
        return None, []
    plan = metadata = given["scheduler_metadata"]
    window = given["window_size"]
    if len(window) != 2:
        return None, []
    tensors = [x for x in values if x is not None]
    scheduled = isinstance(metadata, Schedule)
    if scheduled:
        plan = metadata.plan
        tensors.append(metadata.starts)
    options = with_types(window + _scalars_of(given))
    made = None if plan is None else id(plan), scheduled
    return (options, made, *[x is None for x in values]), tensors
