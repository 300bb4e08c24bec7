"""From a call of `attention` or `attention_varlen` to a running kernel, as `launch` for decode.

A call is described, planned and bound once for each memory layout and set of options. Later calls
of the same kind are recognised by the check that guards torch's compiled graphs, or where torch has
none or a tensor is given twice, by a key of layouts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitkv import launch
from splitkv.errors import expect_tensor
from splitkv.launch import Known, Result
from splitkv.plans import Plan
from splitkv.problem import Operands, describe_attention


def run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    causal: bool,
    window_size: tuple[int, int],
    sink_tokens: int,
    attention_chunk: int,
    sink_logits: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    products: str | None,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
) -> Result:
    """Describe, plan and bind on the first call of a kind; then only launch. Differentiable where
    the kernel is."""
    tensors, given = [q, k, v], 0  # a bit for each of the optional ones
    optional = (
        *(cu_seqlens_q, cu_seqlens_k, page_table, cache_seqlens, sink_logits, alibi_slopes),
        *(q_scale, k_scale, v_scale),
    )
    bit = 1
    for x in optional:
        if x is not None:
            tensors.append(x)
            given |= bit
        bit <<= 1
    options = (
        "attention",
        max_seqlen_q,
        max_seqlen_k,
        causal,
        window_size,
        sink_tokens,
        attention_chunk,
        softmax_scale,
        softcap,
        products,
        dropout_p,
        deterministic,
        return_lse,
        id(plan),
        given,
    )
    try:
        recent = launch._calls.get(options, ())
    except TypeError:  # some option is not what it should be: describing says which
        recent = ()
    known: Known | None
    for known in recent:
        assert known.fits is not None
        if known.fits(*tensors) and known.grad_mode in (None, torch.is_grad_enabled()):
            break
    else:
        grad = launch.needs_grad(q, k, v, sink_logits, alibi_slopes)
        try:
            key: Any = options, grad, tuple(launch.layout(x) for x in tensors)
            known = launch._calls.get(key)
        except (AttributeError, TypeError):  # describing says what is wrong
            key = known = None
        if known is None:
            for name, x in (("q", q), ("k", k), ("v", v)):
                expect_tensor(name, x)
            problem, operands = describe_attention(
                *(q, k, v),
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_k=max_seqlen_k,
                page_table=page_table,
                cache_seqlens=cache_seqlens,
                causal=causal,
                window_size=window_size,
                sink_tokens=sink_tokens,
                attention_chunk=attention_chunk,
                sink_logits=sink_logits,
                softmax_scale=softmax_scale,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                products=products,
                dropout_p=dropout_p,
                deterministic=deterministic,
                return_lse=return_lse,
                needs_grad=grad,
            )
            launcher = launch.bind(problem, operands, plan)
            device = q.device.index if q.is_cuda else None
            scale = operands.softmax_scale
            known = Known(None, None, launcher, False, device, scale, plan)
        if key is not None:
            known = launch.remember(options, key, tensors, known)
    operands = Operands(
        q,
        k,
        v,
        None,
        cache_seqlens,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k,
        sink_logits,
        alibi_slopes,
        q_scale,
        k_scale,
        v_scale,
        known.softmax_scale,
        float(softcap),
        float(dropout_p),
    )
    if known.device is not None and known.device != launch._current_device():
        with torch.cuda.device(known.device):
            return known.launcher(operands)
    return known.launcher(operands)
