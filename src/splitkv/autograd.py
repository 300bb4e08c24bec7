"""`splitkv::attention` and its backward as operators, tied together for autograd.

The kernels that serve `attention` today are written in torch operations, so eager calls are
differentiated by autograd itself and do not come here. A traced graph holds the operator instead,
and its backward computes the forward once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from splitkv.launch import operator_outputs, run_attention
from splitkv.plans import plan_with_handle

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool causal, SymInt window_left, "
    "SymInt window_right, SymInt sink_tokens, Tensor? sink_logits, float? softmax_scale, "
    "float softcap, Tensor? alibi_slopes, float dropout_p, bool deterministic, bool return_lse, "
    "Tensor? seed, str plan"
)
_NUM_ARGUMENTS = 20
_DIFFERENTIABLE = (0, 1, 2, 11, 14)  # q, k, v, sink_logits, alibi_slopes


def _run(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    (*head, window_left, window_right, sink_tokens, sink_logits, scale, softcap, slopes) = (
        arguments[:15]
    )
    dropout_p, deterministic, return_lse, seed, plan = arguments[15:]
    q = head[0]
    seeded = nullcontext()
    if seed is not None:  # backward has to drop the same entries
        seeded = torch.random.fork_rng([q.device] if q.is_cuda else [])
    with seeded:
        if seed is not None:
            torch.manual_seed(int(seed))
        rest = sink_tokens, sink_logits, scale, softcap, slopes, dropout_p, deterministic
        found = plan_with_handle(plan) if plan else None
        call: tuple[Any, ...] = (*head, (window_left, window_right), *rest, return_lse, found)
        out, lse = run_attention(*call)
    return operator_outputs(out, lse)


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd inside an operator, where the dispatcher leaves it out."""
    key = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(key.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(key.AutogradOther, False),
    ):
        yield


@torch.library.custom_op(
    "splitkv::attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def attention_op(*arguments):
    return _run(arguments)


@attention_op.register_fake
def _(*arguments):
    q, v, cu_seqlens_q, return_lse = arguments[0], arguments[2], arguments[3], arguments[17]
    lse_shape: tuple[int, ...] = (0,)
    if return_lse and cu_seqlens_q is None:
        lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    elif return_lse:
        lse_shape = (q.shape[1], q.shape[0])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.custom_op(
    "splitkv::attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor grad_lse, {_ARGUMENTS}) -> Tensor[]",
)
def attention_backward_op(grad_out, grad_lse, *arguments):
    leaves = list(arguments)
    for i in _DIFFERENTIABLE:
        if leaves[i] is not None:
            leaves[i] = leaves[i].detach().requires_grad_(leaves[i].is_floating_point())
    wanted = [leaves[i] for i in _DIFFERENTIABLE if leaves[i] is not None]
    with torch.enable_grad(), _recording():
        out, lse = _run(tuple(leaves))
        outputs, grads = ([out, lse], [grad_out, grad_lse]) if lse.numel() else ([out], [grad_out])
        found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return [_gradient(x, g) for x, g in zip(wanted, found, strict=True)]


def _gradient(x: Tensor, grad: Tensor | None) -> Tensor:
    """The gradient of x, zero where there is none, in the strides that the fake promises."""
    if grad is None:
        return torch.zeros_like(x)
    promised = torch.empty_like(x)
    return grad if grad.stride() == promised.stride() else promised.copy_(grad)


@attention_backward_op.register_fake
def _(grad_out, grad_lse, *arguments):
    return [torch.empty_like(arguments[i]) for i in _DIFFERENTIABLE if arguments[i] is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.save_for_backward(*(inputs[i] for i in tensors))
    ctx.tensors = tensors
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    arguments = list(ctx.others)
    for i, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
        arguments[i] = x
    found = iter(attention_backward_op(grad_out, grad_lse, *arguments))
    given = {i: next(found) for i in _DIFFERENTIABLE if arguments[i] is not None}
    return tuple(given.get(i) for i in range(_NUM_ARGUMENTS))


attention_op.register_autograd(_backward, setup_context=_setup_context)
