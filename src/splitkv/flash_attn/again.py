"""A call of flash_attn_with_kvcache like an earlier one, whose checks need not be made again.

What is checked are types, shapes, strides, devices and options. The check that guards torch's
compiled graphs recognises all of them at once. So a step of a model that appends and attends on a
GPU, in one launch or with a `combine`, is recognised by its arguments as they come. Everything else
goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
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
_tensors_of, _scalars_of, _absent_of = (itemgetter(*x) for x in (TENSORS, SCALARS, ABSENT))
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
    q, k_cache, v_cache, k, v, before, rows, table, table_too, *rest = _tensors_of(given)
    cos, sin, start, slopes, cu_seqlens_new = rest
    rotary = None
    if cos is not None:
        rotary = Rotary(cos, sin, start, given["rotary_interleaved"], step.q_step)
    new = Append(k, v, k_cache, v_cache, before, cu_seqlens_new=cu_seqlens_new, rotary=rotary)
    table = table_too if table is None else table
    table = rows if table is None else table
    of_decode = q, k_cache, v_cache, None, before, table, None, slopes, None, None, None
    done = step.launcher.repeat(*of_decode, step.softmax_scale, given["softcap"], new)
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
    if is_dynamo_compiling() or _dispatch_modes():
        return None, []
    absent, scalars, values = _absent_of(given), _scalars_of(given), _tensors_of(given)
    rows, tables = values[6], values[7:9]
    known = (
        absent.count(None) == len(absent)
        and values[3] is not None  # k
        and given["return_softmax_lse"] is False
        and (rows is None or tables == (None, None))
        and type(given["window_size"]) is tuple
    )
    if not known:
        return None, []
    metadata = given["scheduler_metadata"]
    plan = None if metadata is None else id(metadata)
    tensors = [x for x in values if x is not None]
    return (scalars, plan, *[x is None for x in values]), tensors
