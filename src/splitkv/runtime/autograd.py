"""`splitkv::attention` and its backward as operators, tied together for autograd.

Eager calls do not come here: kernels that promise a gradient are differentiated by autograd itself.
A traced graph holds the operator instead. On a GPU it keeps the output and the LSE, from which
`kernels.backward` makes the gradients; for kernels written in torch operations its backward
computes the forward once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from splitkv.core.options import names_of, schema_of
from splitkv.core.plan import plan_with_handle
from splitkv.core.problem import Operands, describe_attention
from splitkv.kernels.gradients import LEAVES, backward_for, has_backward
from splitkv.reference import WORKING
from splitkv.runtime.autocast import without_autocast
from splitkv.runtime.call_cache import Launcher
from splitkv.runtime.dispatch import bind, operator_outputs, result_dtype

_SCHEMA = (
    *("Tensor q", "Tensor k", "Tensor v"),
    *schema_of("attention", "attention_varlen", without=["out", "plan"]),
    *("bool needs_grad", "Tensor? seed", "str plan"),
)
_ARGUMENTS, NAMES = ", ".join(_SCHEMA), names_of(_SCHEMA)
_DIFFERENTIABLE = tuple(NAMES.index(name) for name in LEAVES)
_RETURN_LSE, _SEED = NAMES.index("return_lse"), NAMES.index("seed")
_OUT_SCALE = NAMES.index("out_scale")


def _bound(arguments: Sequence[Any]) -> tuple[Launcher, Operands]:
    """The launcher and the operands of the operator's arguments."""
    given = dict(zip(NAMES, arguments, strict=True))
    plan = given.pop("plan")
    del given["seed"]
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    given["out"] = None
    q, k, v = (given.pop(name) for name in ("q", "k", "v"))
    problem, operands = describe_attention(q, k, v, **given)
    return bind(problem, operands, plan_with_handle(plan) if plan else None), operands


def _on_device(q: Tensor) -> Any:
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()


def _on_gpu(q: Tensor) -> bool:
    """Whether the operator promises an LSE though nobody asked for one."""
    return q.is_cuda


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def _kernel_seed(q: Tensor, seed: Tensor | None) -> Tensor | None:
    """The seed, which a graph draws on the host, where kernels read it."""
    return None if seed is None else torch.full((), int(seed), dtype=torch.int64, device=q.device)


def _run(arguments: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The forward; of kernels written in torch operations, with a gradient if one is recorded."""
    q, seed = arguments[0], arguments[_SEED]
    launcher, operands = _bound(arguments)
    with _on_device(q), without_autocast(q):
        if has_backward(launcher):
            return launcher.forward(operands, _kernel_seed(q, seed))
        if seed is None:
            return launcher(operands)
        # of its own: backward has to drop the same entries, and nobody else draws from it
        generator = torch.Generator(q.device).manual_seed(int(seed))
        dropping: Any = launcher
        result: tuple[Tensor, Tensor | None] = dropping(operands, generator)
        return result


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
    q, return_lse = arguments[0], arguments[_RETURN_LSE]
    out, lse = _run(arguments)
    if lse is None and _on_gpu(q):
        lse = q.new_zeros(_lse_shape(q), dtype=torch.float32)
    return operator_outputs(out, lse if return_lse or _on_gpu(q) else None)


@attention_op.register_fake
def _(*arguments):
    q, v, return_lse = arguments[0], arguments[2], arguments[_RETURN_LSE]
    lse_shape = _lse_shape(q) if return_lse or _on_gpu(q) else (0,)
    dtype = result_dtype(q, arguments[_OUT_SCALE])
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.custom_op(
    "splitkv::attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor grad_lse, Tensor? out, Tensor? lse, "
    f"{_ARGUMENTS}, bool of_slopes) -> Tensor[]",
)
def attention_backward_op(grad_out, grad_lse, out, lse, *rest):
    *arguments, of_slopes = rest
    launcher, operands = _bound(arguments)
    given = [arguments[i] for i in _DIFFERENTIABLE]
    if has_backward(launcher):
        run = backward_for(launcher.plan, operands)
        seed = _kernel_seed(operands.q, arguments[_SEED])
        of_lse = grad_lse if arguments[_RETURN_LSE] else None
        with _on_device(operands.q):
            found = tuple(run(operands, seed, out, lse, grad_out, of_lse, of_slopes))
    else:
        found = _differentiated(arguments, grad_out, grad_lse)
    return [_gradient(x, g) for x, g in zip(given, found, strict=True) if x is not None]


def _differentiated(
    arguments: Sequence[Any], grad_out: Tensor, grad_lse: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients that autograd finds of a second forward, in the order of _DIFFERENTIABLE."""
    leaves = list(arguments)
    for i in _DIFFERENTIABLE:
        if leaves[i] is not None:
            leaves[i] = leaves[i].detach().requires_grad_(leaves[i].dtype in WORKING)
    wanted = [i for i in _DIFFERENTIABLE if leaves[i] is not None and leaves[i].requires_grad]
    with torch.enable_grad(), _recording():
        out, lse = _run(leaves)
        outputs, grads = ([out], [grad_out]) if lse is None else ([out, lse], [grad_out, grad_lse])
        found = torch.autograd.grad(outputs, [leaves[i] for i in wanted], grads, allow_unused=True)
    by_number = dict(zip(wanted, found, strict=True))
    return tuple(by_number.get(i) for i in _DIFFERENTIABLE)


def _gradient(x: Tensor, grad: Tensor | None) -> Tensor:
    """The gradient of x, zero where there is none, in the strides that the fake promises."""
    if grad is None:
        return torch.zeros_like(x)
    promised = torch.empty_like(x)
    return grad if grad.stride() == promised.stride() else promised.copy_(grad)


@attention_backward_op.register_fake
def _(grad_out, grad_lse, out, lse, *arguments):
    return [torch.empty_like(arguments[i]) for i in _DIFFERENTIABLE if arguments[i] is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    saved = (*inputs, *(output if _on_gpu(inputs[0]) else (None, None)))
    ctx.tensors = [i for i, x in enumerate(saved) if isinstance(x, Tensor)]
    ctx.save_for_backward(*(saved[i] for i in ctx.tensors))
    ctx.others = [None if isinstance(x, Tensor) else x for x in saved]


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    saved = list(ctx.others)
    for i, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
        saved[i] = x
    *arguments, out, lse = saved
    of_slopes = ctx.needs_input_grad[_DIFFERENTIABLE[-1]]
    found = iter(attention_backward_op(grad_out, grad_lse, out, lse, *arguments, of_slopes))
    given = {i: next(found) for i in _DIFFERENTIABLE if arguments[i] is not None}
    return tuple(given.get(i) for i in range(len(NAMES)))


attention_op.register_autograd(_backward, setup_context=_setup_context)
