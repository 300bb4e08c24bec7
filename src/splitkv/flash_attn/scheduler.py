"""The decision of a decode step made before it: FlashAttention-3's scheduler metadata."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from splitkv.core.device import Device
from splitkv.core.errors import (
    expect,
    expect_at_least,
    expect_bool,
    expect_device,
    expect_divides,
    expect_dtype,
    expect_int,
    expect_shape,
    expect_size,
)
from splitkv.core.kv import Contiguous, Paged
from splitkv.core.masks import Mask, expect_window
from splitkv.core.plan import SCHEDULED, Plan, shares_of
from splitkv.core.problem import Problem
from splitkv.core.scores import Score
from splitkv.core.variants import Plain
from splitkv.flash_attn.options import expect_hints, window_of
from splitkv.planner.legality import is_legal
from splitkv.planner.policies import DEFAULT, POLICIES, Policy, appending
from splitkv.planner.registry import kernel_named, make_plan
from splitkv.runtime.dispatch import device_of
from splitkv.runtime.schedule import Schedule, make_schedule

DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "bfloat16",
}


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    policy: str | Policy | None = None,
) -> Plan | Schedule:
    """The value that `flash_attn_with_kvcache(scheduler_metadata=...)` takes and then decides
    nothing: a Plan of the policy "balanced", for lengths that differ, or what a policy that is
    named makes: a Schedule where it has the programs follow one.

    max_seqlen_k   bound of the keys before the new ones; longer sequences are undefined
    cache_seqlens  [batch_size] int32, the keys before the new ones; for a Plan only its device is
                   looked at, as programs find their shares on the device in every call. So one
                   Plan serves all steps and layers of a shape, and graphs may be replayed with
                   other lengths. A Schedule is of these lengths: it serves all layers of one step
    max_seqlen_k_new  new tokens of every sequence, or with cu_seqlens_k_new their bound; 0: calls
                   append nothing. A Schedule is of the keys with these, for all of which the cache
                   has room, and serves calls that append as many
    sm_margin      SMs left to others: the plan is made for a device without them
    num_splits     above 0: parts of the keys of each sequence
    pack_gqa       checked; query heads of a KV head always share a program
    policy         of `splitkv.plan`, whose Schedule is made wherever it has one; None: the Plan of
                   "balanced". Calls without metadata are planned by the default policy, for equal
                   lengths

    Sizes and lengths are less than 2**30. Raises ValueError for what is malformed.
    """
    sizes = {
        "batch_size": batch_size,
        "max_seqlen_q": max_seqlen_q,
        "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv,
        "headdim": headdim,
        "headdim_v": headdim if headdim_v is None else headdim_v,
        "page_size": 1 if page_size is None else page_size,
    }
    for name, size in sizes.items():
        expect_size(name, size)
    for name, size in (("max_seqlen_k", max_seqlen_k), ("max_seqlen_k_new", max_seqlen_k_new)):
        expect_size(name, size, empty=True)
    expect_divides("num_heads_q", num_heads_q, num_heads_kv=num_heads_kv)
    _expect_index("cache_seqlens", cache_seqlens, cache_seqlens, batch=batch_size)
    if cache_leftpad is not None:
        _expect_index("cache_leftpad", cache_leftpad, cache_seqlens, batch=batch_size)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k_new", cu_seqlens_k_new)):
        if x is not None:
            _expect_index(name, x, cache_seqlens, **{"batch + 1": batch_size + 1})
    known = isinstance(qkv_dtype, torch.dtype) and qkv_dtype in DTYPES
    expect(known, "qkv_dtype", f"one of {[*DTYPES]}", qkv_dtype)
    for name, flag in (("causal", causal), ("has_softcap", has_softcap)):
        expect_bool(name, flag)
    window_size = window_of(window_size)
    expect_window(window_size)
    for side, keys in zip(("left", "right"), window_size, strict=True):
        expect_int(f"window_size {side}", keys)
        expect_at_least(f"window_size {side}", keys, -1)
    expect_int("attention_chunk", attention_chunk)
    expect_at_least("attention_chunk", attention_chunk, 0)
    expect_hints(num_splits, pack_gqa, sm_margin)
    named = policy is None or isinstance(policy, str) or callable(policy)
    expect(named, "policy", "a name, a function or None", policy)
    device = device_of(cache_seqlens)
    expect(sm_margin < device.num_sms, "sm_margin", f"less than {device.num_sms}", sm_margin)
    left, right = map(int, window_size)
    paged = page_size is not None or cache_leftpad is not None
    problem = Problem(
        kind="decode",
        batch=int(batch_size),
        num_heads=int(num_heads_q),
        num_kv_heads=int(num_heads_kv),
        head_dim=int(headdim),
        head_dim_v=int(sizes["headdim_v"]),
        seqlen_q=int(max_seqlen_q),
        seqlen_k=int(max_seqlen_k + max_seqlen_k_new),
        dtype=DTYPES[qkv_dtype],
        mask=Mask(causal, left, right, chunk=int(attention_chunk)).within_reach(),
        place=Paged(int(sizes["page_size"]) if cache_leftpad is None else 1)
        if paged
        else Contiguous(),
        score=Score(softcap=has_softcap),
        lengths="device",
        seqlen_new=int(max_seqlen_k_new),
    )
    for_device = replace(device, num_sms=device.num_sms - int(sm_margin))
    plan = _plan(problem, for_device, int(num_splits), "balanced" if policy is None else policy)
    if plan.config.schedule not in SCHEDULED or policy is None:
        return plan
    keys = cache_seqlens
    if cu_seqlens_k_new is not None:
        keys = keys + cu_seqlens_k_new.diff()
    elif max_seqlen_k_new:
        keys = keys + int(max_seqlen_k_new)
    if cache_leftpad is not None:
        keys = keys - cache_leftpad
    return make_schedule(plan, keys)


@lru_cache(maxsize=1024)
def _plan(problem: Problem, device: Device, num_splits: int, policy: str | Policy) -> Plan:
    """Makes one object a decision, so that the calls bound to it are found in their caches."""
    return make_plan(problem, device, policy=policy, num_splits=num_splits)


def fitted_schedule(schedule: Schedule, problem: Problem, packed_new: bool = False) -> Schedule:
    """The schedule under the plan that a call has, which cuts what it was made for.

    packed_new   the new tokens of the call are as many of each sequence as cu_seqlens_k_new says

    Raises ValueError where it was made for another number of new tokens, whose lengths are others,
    and for another kernel or tiles.
    """
    new, made_for = problem.seqlen_new, schedule.plan.problem.seqlen_new
    alike = new <= made_for and (new > 0) == (made_for > 0) if packed_new else new == made_for
    hint = "say max_seqlen_k_new to get_scheduler_metadata"
    said = f"one for {new} new keys of a sequence"
    expect(alike, "scheduler_metadata", said, f"one for {made_for}", hint)
    plan = _of_call(schedule.plan, problem)
    ours, theirs = (f"{x.kernel}, {shares_of(x.config)}" for x in (plan, schedule.plan))
    expect(ours == theirs, "scheduler_metadata", f"one for {ours}", theirs)
    return Schedule(plan, schedule.starts)


@lru_cache(maxsize=4096)
def fitted(plan: Plan, problem: Problem) -> Plan:
    """The plan of a call by metadata.

    It is made again, by a policy that has a name, where keys are stored otherwise than metadata can
    know: tiles depend on it.
    """
    stored_otherwise = problem.codec != plan.problem.codec
    again = stored_otherwise and plan.policy in POLICIES
    return _decided_again(plan, problem) if again else _of_call(plan, problem)


def _of_call(plan: Plan, problem: Problem) -> Plan:
    """The plan with what metadata cannot know of a call, or another where its kernel cannot run
    that, or not with the plan's config."""
    of_call = _with_details(plan.problem, problem)
    kernel = kernel_named(plan.kernel)
    config = appending.decide(of_call, kernel, plan.config)[0]
    if config.merge != plan.config.merge:  # another variant may be for it
        config = replace(config, variant=Plain())
    unsupported = kernel.unsupported(of_call, plan.device)
    if unsupported or not is_legal(kernel, of_call, plan.device, config):
        return _decided_again(plan, problem)
    return replace(plan, problem=of_call, config=config)


def _decided_again(plan: Plan, problem: Problem) -> Plan:
    """Makes another plan for a call, on the device of a plan and by its policy, or by the default
    where that has no name."""
    forced = plan.config.num_splits if plan.policy == "fixed" else 0
    policy = plan.policy if plan.policy in POLICIES else DEFAULT
    of_call = _with_details(plan.problem, problem)
    return make_plan(of_call, plan.device, policy=policy, num_splits=forced)


def _with_details(known: Problem, call: Problem) -> Problem:
    """The problem that metadata were made for with what only a call says."""
    return replace(
        known,
        place=call.place,
        codec=call.codec,
        products=call.products,
        q_granularity=call.q_granularity,
        score=Score(known.score.softcap, call.score.alibi),
        sink_logits=call.sink_logits,
        return_lse=call.return_lse,
        seqlen_new=call.seqlen_new,
        rotary=call.rotary,
    )


def _expect_index(name: str, x: Tensor, like: Tensor, **dims: int) -> None:
    expect_shape(name, x, **dims)
    expect_dtype(name, x, "int32")
    expect_device(name, x, like.device)
