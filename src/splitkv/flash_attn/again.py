"""A call of flash_attn_with_kvcache like an earlier one, whose checks need not be made again.

What is checked are types, shapes, strides, devices and options. The check that guards torch's
compiled graphs recognises all of them at once. So a step of a model that appends and attends on a
GPU, in one launch or with a `combine`, is recognised by its arguments as they come. Everything else
goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.append_decode import Known
from splitkv.kernels.append_call import Append, Rotary
from splitkv.launch import check_of
from splitkv.plans import Plan


class Step(NamedTuple):
    """A bound launcher and what it needs besides tensors."""

    fits: Callable[..., bool]
    launcher: Any
    device: int | None
    softmax_scale: float
    q_step: int
    metadata: Plan | None  # stays alive here, so that its id stays its own


# Of the arguments: tensors that a step may have, in this order; what else it depends on; and what
# it has not.
TENSORS = (
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "cache_batch_idx", "block_table"),
    *("page_table", "rotary_cos", "rotary_sin", "rotary_seqlens", "alibi_slopes"),
    "cu_seqlens_k_new",
)
SCALARS = (
    *("softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved", "num_splits"),
    *("attention_chunk", "pack_gqa", "sm_margin"),
)
ABSENT = (
    *("cache_leftpad", "leftpad_k", "qv", "cu_seqlens_q", "max_seqlen_q", "q_descale", "k_descale"),
    *("v_descale", "s_aux", "learnable_sink"),
)
MAX_KINDS, MAX_RECENT = 4096, 8
_steps: dict[Any, tuple[Step, ...]] = {}
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)


def again(given: Mapping[str, Any]) -> Tensor | None:
    """out of a call with these arguments, if it is known."""
    kind, tensors = _kind_of(given)
    if kind is None:
        return None
    try:
        steps = _steps.get(kind, ())
    except TypeError:  # some option is not what it should be: the checks say which
        return None
    for step in steps:
        if step.fits(*tensors) and step.device == _current_device():
            break
    else:
        return None
    x, rotary = given, None
    if x["rotary_cos"] is not None:
        turn = x["rotary_cos"], x["rotary_sin"], x["rotary_seqlens"]
        rotary = Rotary(*turn, x["rotary_interleaved"], step.q_step)
    before, caches = x["cache_seqlens"], (x["k_cache"], x["v_cache"])
    new = Append(x["k"], x["v"], *caches, before, rotary=rotary)
    new = new._replace(cu_seqlens_new=x["cu_seqlens_k_new"])
    table = x["block_table"] if x["page_table"] is None else x["page_table"]
    table = x["cache_batch_idx"] if table is None else table
    of_decode = x["q"], *caches, None, before, table, None, x["alibi_slopes"], None, None, None
    done = step.launcher.repeat(*of_decode, step.softmax_scale, x["softcap"], new)
    return None if done is None else done[0]


def remember(given: Mapping[str, Any], call: Append, q: Tensor, known: Known | None) -> None:
    """That a call with these arguments was this call of `append` and of decode with this q, and how
    it was done."""
    if known is None or getattr(known.launcher, "repeat", None) is None:
        return
    kind, tensors = _kind_of(given)
    as_it_comes = call.k is given["k"] and call.v is given["v"] and q is given["q"]
    if kind is None or call.k_scale is not None or not as_it_comes:
        return
    fits = check_of(tensors)
    if fits is None:
        return
    if len(_steps) >= MAX_KINDS:
        _steps.clear()
    q_step = 1 if call.rotary is None else call.rotary.q_step
    scale, metadata = known.softmax_scale, given["scheduler_metadata"]
    step = Step(fits, known.launcher, known.device, scale, q_step, metadata)
    _steps[kind] = (step, *_steps.get(kind, ())[: MAX_RECENT - 1])


def _kind_of(given: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """(what a known step has to equal, its tensors); None for what never is one."""
    tensors: list[Any] = []
    for name in ABSENT:
        if given[name] is not None:
            return None, tensors
    several_rows = given["cache_batch_idx"] is not None and (
        given["page_table"] is not None or given["block_table"] is not None
    )
    if several_rows or given["return_softmax_lse"] or given["k"] is None:
        return None, tensors
    if type(given["window_size"]) is not tuple:
        return None, tensors
    if is_dynamo_compiling() or _dispatch_modes():
        return None, tensors
    bits = 0
    for name in TENSORS:
        bits += bits
        x = given[name]
        if x is not None:
            tensors.append(x)
            bits += 1
    metadata = given["scheduler_metadata"]
    plan = None if metadata is None else id(metadata)
    return (bits, plan, *(given[name] for name in SCALARS)), tensors
