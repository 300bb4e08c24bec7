"""splitkv under `torch.nn.functional.scaled_dot_product_attention`, where the user asks for it.

    from splitkv.integrations import torch_sdpa
    from torch.nn.attention import activate_flash_attention_impl

    torch_sdpa.register()                      # the name "splitkv"; nothing changes
    activate_flash_attention_impl("splitkv")   # from here on

Activation replaces the CUDA kernels of torch's FlashAttention operators and puts that backend first
in torch's order, where newer GPUs have cuDNN. What torch offers to FlashAttention then runs here,
forward and backward, nested tensors and `torch.nn.attention.varlen` too. What this package refuses
goes on to the kernel that was replaced. What torch itself does not offer (a mask, fp32, causal with
different lengths) runs where torch sends it. Both say so once for each reason.
`restore_flash_attention_impl()` undoes all of it; not between a forward with dropout and its
backward, which must draw the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from splitkv.core.errors import expect
from splitkv.core.options import defaults_of
from splitkv.core.plan import Kernel
from splitkv.core.problem import Operands, describe_attention
from splitkv.kernels.gradients import backward_for, backward_of
from splitkv.kernels.host.sequences import SequenceLauncher
from splitkv.planner.registry import kernel_named, make_plan
from splitkv.runtime.call_cache import CallCache
from splitkv.runtime.dispatch import device_of

NAME = "splitkv"
FLASH = 1  # torch's number of the FlashAttention backend
REPLACED = "Overriding a previously registered kernel"  # what torch says of it, once a process
_said: set[str] = set()


def register() -> None:
    """Offer "splitkv" to `torch.nn.attention.activate_flash_attention_impl`; activates nothing."""
    registry = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    known = registry is not None and hasattr(torch.library, "get_kernel")
    expect(known, "torch", "one with register_flash_attention_impl, 2.11", torch.__version__)
    assert registry is not None
    registry(NAME, register_fn=activate)


@dataclass
class Active:
    """The registration that `restore_flash_attention_impl` undoes."""

    library: Any
    order: list[int]
    order_before: list[int]

    def remove(self) -> None:
        """Puts the replaced kernels back, and the order of backends if nobody has set another."""
        if self.library is None:
            return
        self.library._destroy()
        self.library = None
        if torch._C._get_sdp_priority_order() == self.order:
            torch._C._set_sdp_priority_order(self.order_before)


def activate(dispatch_key: str = "CUDA") -> Active:
    """Replace torch's kernels; what `activate_flash_attention_impl` calls."""
    if dispatch_key == "CUDA" and not torch.backends.cuda.is_built():
        raise RuntimeError(
            "torch: expected one that is built with CUDA, whose FlashAttention is replaced, got "
            f"{torch.__version__}; splitkv.attention runs on a CPU"
        )
    if torch.cuda.is_available():  # torch sets its own order the first time that it asks for it
        tiny = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
        torch._fused_sdp_choice(tiny, tiny, tiny)
    before = torch._C._get_sdp_priority_order()
    order = [FLASH, *(backend for backend in before if backend != FLASH)]
    library = Library("aten", "IMPL", dispatch_key)
    for operator, run in OPERATORS.items():
        replaced = torch.library.get_kernel(f"aten::{operator}", dispatch_key)
        _replace(library, operator, _or_else(run, replaced), dispatch_key)
    for operator in OTHERS:
        kernel = torch.library.get_kernel(f"aten::{operator}", dispatch_key)
        _replace(library, operator, _announced(operator, kernel), dispatch_key)
    torch._C._set_sdp_priority_order(order)
    return Active(library, order, before)


def _replace(library: Any, operator: str, run: Callable[..., Any], dispatch_key: str) -> None:
    """Replaces a kernel, of which torch warns once a process, as for any other implementation.

    Filters of warnings belong to all threads and stay as they are. Where they make the warning an
    error it is raised when the kernel is in place.
    """
    try:
        library.impl(operator, run, dispatch_key, with_keyset=True)
    except UserWarning as warning:
        if REPLACED not in str(warning):
            raise


class Refused(Exception):
    """Why a call goes on to torch's own kernel."""


def _or_else(run: Callable[..., Any], replaced: Any) -> Callable[..., Any]:
    """Makes a kernel of `run` and, where that refuses, of the one that it replaces."""

    def implementation(keys: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Refused as refused:
            _say(f"splitkv leaves a call to torch's own FlashAttention: {refused}")
        return replaced.call_boxed(keys, *args, **kwargs)

    return implementation


def _announced(operator: str, kernel: Any) -> Callable[..., Any]:
    """Wraps another backend's kernel so that it says why FlashAttention was not offered a call."""

    def implementation(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._get_flash_sdp_enabled():
            why = _not_offered(*args, **kwargs)
            if why:
                _say(f"scaled_dot_product_attention runs on {OTHERS[operator]}, not splitkv: {why}")
        return kernel.call_boxed(keys, *args, **kwargs)

    return implementation


def _say(what: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(what, stacklevel=3)


def _not_offered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    **__: Any,
) -> str:
    """Says what keeps torch from offering a call to FlashAttention; "": nothing that is known."""
    dims = [x.shape[-1] for x in (query, key, value)]
    limits = (
        (attn_bias is not None, f"attn_mask: expected None, got {_shape(attn_bias)}"),
        (
            query.dtype not in (torch.float16, torch.bfloat16),
            f"query: expected float16 or bfloat16, got {str(query.dtype).removeprefix('torch.')}",
        ),
        (len({*dims}) > 1, f"query, key, value: expected one head_dim, got {dims}"),
        (max(dims) > 256, f"head_dim: expected at most 256, got {max(dims)}"),
        (
            is_causal and query.shape[-2] != key.shape[-2],
            f"is_causal: expected as many queries as keys, got {query.shape[-2]} and "
            f"{key.shape[-2]}",
        ),
    )
    return "; ".join(reason for hit, reason in limits if hit)


def _shape(x: Tensor | None) -> Any:
    return None if x is None else list(x.shape)


# A call in this package's terms


class Call(NamedTuple):
    """q, k, v as `splitkv.attention` takes them, or packed with bounds, and what it asks for."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    causal: bool
    window_size: tuple[int, int]
    scale: float | None


OPERANDS = Call._fields[:6]


class Bound(NamedTuple):
    """A launcher for all calls of a layout, and operands to put their tensors into; or why not."""

    launcher: SequenceLauncher | None
    operands: Operands
    against: str


calls: CallCache[Bound] = CallCache()


def _bind(call: Call) -> tuple[SequenceLauncher, Operands]:
    """Returns the launcher of a call's layout and the call's operands. Raises Refused.

    Forward and backward ask alike, so that both are run by the same side.
    """
    tensors = [x for x in call[:6] if x is not None]
    deterministic = torch.are_deterministic_algorithms_enabled()
    aligned = tuple(x.data_ptr() % 16 == 0 for x in call[:3])
    given = call.out is None, call.cu_seqlens_q is None
    options = call[6:], aligned, given, deterministic
    bound = calls.match(options, tensors)
    if bound is None:
        bound = calls.get_or_bind(options, tensors, partial(_bind_anew, call, deterministic))
    if bound.launcher is None:
        raise Refused(bound.against)
    of_call: dict[str, Any] = {name: getattr(call, name) for name in OPERANDS}
    return bound.launcher, replace(bound.operands, **of_call)


def _bind_anew(call: Call, deterministic: bool) -> Bound:
    q, k, v = call[:3]
    given = defaults_of("attention") | {
        "causal": call.causal,
        "window_size": call.window_size,
        "softmax_scale": call.scale,
        "dropout_p": call.dropout_p,
        "deterministic": deterministic,
        "return_lse": True,
    }
    if call.cu_seqlens_q is not None:
        given |= {
            "cu_seqlens_q": call.cu_seqlens_q,
            "cu_seqlens_k": call.cu_seqlens_k,
            "max_seqlen_q": int(call.max_seqlen_q),
            "max_seqlen_k": int(call.max_seqlen_k),
        }
    problem, operands = describe_attention(q, k, v, needs_grad=True, **given)
    operands = replace(operands, out=call.out)

    def unfit(kernel: Kernel) -> list[str]:
        return kernel.unfit(operands)

    plan = make_plan(problem, device_of(q), unfit=unfit)
    launcher = kernel_named(plan.kernel).bind(plan, operands)
    if not isinstance(launcher, SequenceLauncher):
        against = dict(plan.rejected).get("prefill") or (f"the plan is {plan.kernel}",)
        return Bound(None, operands, "; ".join(against))
    without: dict[str, Any] = dict.fromkeys(OPERANDS)  # tensors of this call are not kept alive
    return Bound(launcher, replace(operands, **without), "")


def _on_device(q: Tensor) -> Any:
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()


class Forward(NamedTuple):
    """The results of aten::_flash_attention_forward."""

    output: Tensor
    softmax_logsumexp: Tensor
    rng_state: Tensor  # here the seed of dropout
    unused: Tensor
    debug_attn_mask: Tensor


class SdpaForward(NamedTuple):
    """The results of aten::_scaled_dot_product_flash_attention."""

    output: Tensor
    logsumexp: Tensor
    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    rng_state: Tensor
    unused: Tensor
    debug_attn_mask: Tensor


def _forward(call: Call) -> Forward:
    launcher, operands = _bind(call)
    q = call.q
    seeds = torch.empty(2, dtype=torch.int64, device=q.device)
    if call.dropout_p > 0:  # drawn as for `splitkv.attention`; kept where torch keeps Philox's
        torch.randint(0, 1 << 62, (2,), dtype=torch.int64, out=seeds)
    with _on_device(q):
        out, lse = launcher.forward(operands, seeds[0] if call.dropout_p > 0 else None)
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return Forward(out, lse, seeds.view(torch.uint64), unused, q.new_empty(0))


def _backward(
    call: Call, grad_out: Tensor, out: Tensor, lse: Tensor, seeds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    launcher, operands = _bind(call._replace(out=None))
    run = backward_of(launcher, operands, backward_for)
    seed = seeds.view(torch.int64)[0] if call.dropout_p > 0 else None
    # a ring's are parts of longer ones; the kernels take those of a forward
    out, lse = out.contiguous(), lse.contiguous()
    with _on_device(call.q):
        grads = run(operands, seed, out, lse, grad_out, None, False)
    return grads[0], grads[1], grads[2]


# The operators


def _heads_second(*tensors: Tensor) -> list[Tensor]:
    """Views [batch, heads, tokens, dim] of torch as [batch, tokens, heads, dim], or back."""
    return [x.transpose(1, 2) for x in tensors]


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> SdpaForward:
    """Stands for aten::_scaled_dot_product_flash_attention."""
    _refuse_debug_mask(return_debug_mask)
    out = torch.empty_like(query)
    call = _dense(query, key, value, out, dropout_p, is_causal, scale)
    made = _forward(call)
    return SdpaForward(out, made[1], None, None, query.shape[2], key.shape[2], *made[2:])


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Stands for aten::_scaled_dot_product_flash_attention_backward."""
    call = _dense(query, key, value, out, dropout_p, is_causal, scale)
    grad, made = _heads_second(grad_out, out)
    return tuple(_heads_second(*_backward(call, grad, made, logsumexp, philox_seed)))


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Call:
    tensors = _heads_second(query, key, value, out)
    return Call._make((*tensors, None, None, 0, 0, dropout_p, is_causal, (-1, -1), scale))


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> Forward:
    """Stands for aten::_flash_attention_forward, whose tensors are laid out as here."""
    _refuse_debug_mask(return_debug_mask)
    _refuse(**others)
    window = _window(window_size_left, window_size_right)
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    call = Call(query, key, value, None, *lengths, dropout_p, is_causal, window, scale)
    return _forward(_expect_both(call))


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    """Stands for aten::_flash_attention_backward."""
    _refuse(**others)
    window = _window(window_size_left, window_size_right)
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    call = Call(query, key, value, None, *lengths, dropout_p, is_causal, window, scale)
    return _backward(_expect_both(call), grad_out, out, logsumexp, rng_state)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return -1 if left is None else left, -1 if right is None else right


def _expect_both(call: Call) -> Call:
    """Refuses all but bounds of queries and keys, or neither: the rest is for torch's kernel."""
    if call.cu_seqlens_q is None:
        _refuse(cum_seq_k=call.cu_seqlens_k)
        return call._replace(max_seqlen_q=0, max_seqlen_k=0)
    if call.cu_seqlens_k is None:
        raise Refused("cum_seq_k: expected bounds with cum_seq_q, got None")
    return call


def _refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise Refused("return_debug_mask: expected False, got True")


def _refuse(**given: Any) -> None:
    """Refuses arguments of torch's operators that only its own kernels know."""
    for name, value in given.items():
        if value is not None:
            shown = _shape(value) if isinstance(value, Tensor) else value
            raise Refused(f"{name}: expected None, got {shown}")


OPERATORS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash_backward,
}
OTHERS = {
    "_scaled_dot_product_efficient_attention": "torch's memory-efficient attention",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
}
