"""From a call to a running kernel: the cache of bound launchers, and the torch.library operators.

A call is described, planned and bound once for each memory layout and set of options; later calls
of the same kind look the launcher up by a key made of shapes, strides and types, and go straight to
it. Lengths and page tables live on the device and are in no key.

Plain tensors run the launcher directly. Under torch.compile, torch.export, FakeTensorMode and for
tensor subclasses the same function runs as the operator `splitkv::decode` or `splitkv::attention`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from splitkv.device import Device, cpu, current
from splitkv.errors import expect, expect_one_of, expect_tensor
from splitkv.plans import Config, Plan, plan_with_handle
from splitkv.problem import Operands, Problem, describe_attention, describe_decode
from splitkv.registry import kernel_named, make_plan

Launcher = Callable[[Operands], tuple[Tensor, Tensor | None]]

MAX_CALLS = 8192  # bound launchers kept; past it the cache starts afresh
_calls: dict[Any, tuple[Launcher, float, Plan | None]] = {}
_warned: set[tuple[str, ...]] = set()

_MASK_AND_SCORE: dict[str, Any] = {
    "window_size": (-1, -1),
    "sink_tokens": 0,
    "sink_logits": None,
    "softmax_scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_lse": False,
}
_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
ATTENTION_DEFAULTS: dict[str, Any] = {
    "causal": False,
    **_MASK_AND_SCORE,
    "dropout_p": 0.0,
    "deterministic": False,
}
DECODE_DEFAULTS: dict[str, Any] = {
    "cache_seqlens": None,
    "page_table": None,
    "max_seqlen_k": None,
    "causal": True,
    **_MASK_AND_SCORE,
    "q_scale": None,
    "k_scale": None,
    "v_scale": None,
    "out": None,
}


def device_of(tensor: Tensor) -> Device:
    """The Device that a tensor lives on."""
    return current(tensor.device.index) if tensor.is_cuda else cpu()


def layout(x: Tensor | None) -> Any:
    """What a launcher is bound to of a tensor: everything but its address and contents."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def is_plain(*arguments: Any) -> bool:
    """Whether no tensor is a subclass and nothing is tracing: the operators may be skipped."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    for x in arguments:
        kind = type(x)
        plain = kind is Tensor or x is None or kind is torch.nn.Parameter
        if not plain and isinstance(x, Tensor):
            return False
    return True


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked of what is computed from these."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def bind(problem: Problem, operands: Operands, plan: Plan | None, num_splits: int = 0) -> Launcher:
    """A launcher for a described call, under the caller's plan or a new one."""
    if plan is None:
        plan = make_plan(problem, device_of(operands.q), num_splits=num_splits)
        _warn_of_fall_back(plan)
    else:
        expect(num_splits == 0, "num_splits", "0 with a plan", num_splits)
        plan = fit_plan(plan, problem, device_of(operands.q))
    if operands.q.numel() == 0:  # no query: nothing to launch
        plan = replace(plan, kernel="torch_math", config=Config())
    return kernel_named(plan.kernel).bind(plan, operands)


def fit_plan(plan: Plan, problem: Problem, device: Device) -> Plan:
    """The plan for this call: one made for the same problem with at least as many keys."""
    expect(isinstance(plan, Plan), "plan", "a splitkv.Plan", plan)
    made_for = plan.problem
    longest = replace(problem, seqlen_k=made_for.seqlen_k, needs_grad=made_for.needs_grad)
    if longest != made_for or problem.seqlen_k > made_for.seqlen_k:
        raise ValueError(f"plan: expected one for ({problem}), got one for ({made_for})")
    expect(plan.device.arch == device.arch, "plan", f"one for {device.arch}", plan.device.arch)
    against = kernel_named(plan.kernel).unsupported(problem, device)
    expect(not against, "plan", f"a kernel without {'; '.join(against)}", plan.kernel)
    return replace(plan, problem=problem)


def _warn_of_fall_back(plan: Plan) -> None:
    """Say once for each reason that decode on a GPU runs on a slower kernel."""
    against = dict(plan.rejected).get("decode_split", ())
    falls_back = plan.problem.kind == "decode" and plan.device.kind == "cuda" and against
    if falls_back and against not in _warned:
        _warned.add(against)
        warnings.warn(f"decode runs on {plan.kernel}: {'; '.join(against)}", stacklevel=4)


def _remember(key: Any, launcher: Launcher, scale: float, plan: Plan | None) -> None:
    if len(_calls) >= MAX_CALLS:
        _calls.clear()
    _calls[key] = launcher, scale, plan  # the plan stays alive, so that its id stays its own


def describe(q: Any, *tensors: Any, dense: bool = False, **arguments: Any) -> Problem:
    """The Problem of a call of `decode`, `attention_varlen` (cu_seqlens) or `attention` (dense)."""
    varlen = "cu_seqlens_q" in arguments or len(tensors) > 2
    name, signature = "decode", DECODE_DEFAULTS
    positional: tuple[str, ...] = ()
    if varlen or dense:
        name = "attention_varlen" if varlen else "attention"
        signature, positional = ATTENTION_DEFAULTS, _VARLEN if varlen else ()
    known = 2 <= len(tensors) <= 2 + len(positional)
    expected = ", ".join(("q, keys and values by position", *positional))
    expect(known, name, expected, 1 + len(tensors))
    argument: str
    for argument, x in zip(positional, tensors[2:], strict=False):
        if argument in arguments:
            raise ValueError(f"{argument}: expected by position or by name, got both")
        arguments[argument] = x
    for argument in arguments:
        expect_one_of(f"argument of {name}", argument, (*positional, *signature))
    given = {**dict.fromkeys(positional), **signature, **arguments}
    indices = ("cu_seqlens_q", "cu_seqlens_k") if varlen else ()
    tensors_given = (q, *tensors[:2], *(given[i] for i in indices))
    for argument, x in zip(("q", "k", "v", *indices), tensors_given, strict=True):
        expect_tensor(argument, x)
    grad = needs_grad(q, *tensors[:2], given["sink_logits"], given["alibi_slopes"])
    described = describe_attention if varlen or dense else describe_decode
    return described(q, *tensors[:2], needs_grad=grad, **given)[0]


def run_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    max_seqlen_k: int | None,
    causal: bool,
    window_size: tuple[int, int],
    sink_tokens: int,
    sink_logits: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    num_splits: int,
    plan: Plan | None,
) -> tuple[Tensor, Tensor | None]:
    """Describe, plan and bind on the first call of a kind; then only launch."""
    try:
        device = q.device
        grad = torch.is_grad_enabled() and (
            q.requires_grad
            or k_cache.requires_grad
            or v_cache.requires_grad
            or needs_grad(sink_logits, alibi_slopes)
        )
        key: Any = (
            (q.shape, q.stride(), q.dtype, device),
            (k_cache.shape, k_cache.stride(), k_cache.dtype, k_cache.device),
            (v_cache.shape, v_cache.stride(), v_cache.dtype, v_cache.device),
            None if cache_seqlens is None else layout(cache_seqlens),
            None if page_table is None else layout(page_table),
            None if sink_logits is None else layout(sink_logits),
            None if alibi_slopes is None else layout(alibi_slopes),
            None if q_scale is None else layout(q_scale),
            None if k_scale is None else layout(k_scale),
            None if v_scale is None else layout(v_scale),
            None if out is None else layout(out),
            (max_seqlen_k, causal, window_size, sink_tokens, softmax_scale, softcap),
            (return_lse, num_splits, id(plan), grad),
        )
        known = _calls.get(key)
    except (AttributeError, TypeError):  # some argument is not what it should be: say which
        key = known = None
    if known is None:
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            expect_tensor(name, x)
        problem, operands = describe_decode(
            q,
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window_size=window_size,
            sink_tokens=sink_tokens,
            sink_logits=sink_logits,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            return_lse=return_lse,
            needs_grad=needs_grad(q, k_cache, v_cache, sink_logits, alibi_slopes),
        )
        known = bind(problem, operands, plan, num_splits), operands.softmax_scale, plan
        _remember(key, *known)
    launcher, scale, _ = known
    operands = Operands(
        q,
        k_cache,
        v_cache,
        out,
        cache_seqlens,
        page_table,
        None,
        None,
        sink_logits,
        alibi_slopes,
        q_scale,
        k_scale,
        v_scale,
        scale,
        softcap,
    )
    if device.index is not None and device.index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return launcher(operands)
    return launcher(operands)


def run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    causal: bool,
    window_size: tuple[int, int],
    sink_tokens: int,
    sink_logits: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    dropout_p: float,
    deterministic: bool,
    return_lse: bool,
    plan: Plan | None,
) -> tuple[Tensor, Tensor | None]:
    """Describe, plan, bind and launch; differentiable where the kernel is written in torch."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, x)
    problem, operands = describe_attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window_size=window_size,
        sink_tokens=sink_tokens,
        sink_logits=sink_logits,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
        needs_grad=needs_grad(q, k, v, sink_logits, alibi_slopes),
    )
    launcher = bind(problem, operands, plan)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        return launcher(operands)


def operator_outputs(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """What an operator returns: always two tensors, in the strides that its fake promises."""
    absent = out.new_empty(0, dtype=torch.float32)
    return out.contiguous(), absent if lse is None else lse.contiguous()


@torch.library.custom_op(
    "splitkv::decode",
    mutates_args=(),
    schema="(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? cache_seqlens, Tensor? page_table, "
    "SymInt? max_seqlen_k, bool causal, SymInt window_left, SymInt window_right, "
    "SymInt sink_tokens, Tensor? sink_logits, float? softmax_scale, float softcap, "
    "Tensor? alibi_slopes, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, bool return_lse, "
    "SymInt num_splits, str plan) -> (Tensor, Tensor)",
)
def decode_op(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    page_table,
    max_seqlen_k,
    causal,
    window_left,
    window_right,
    sink_tokens,
    sink_logits,
    softmax_scale,
    softcap,
    alibi_slopes,
    q_scale,
    k_scale,
    v_scale,
    return_lse,
    num_splits,
    plan,
):
    out, lse = run_decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        page_table,
        max_seqlen_k,
        causal,
        (window_left, window_right),
        sink_tokens,
        sink_logits,
        softmax_scale,
        softcap,
        alibi_slopes,
        q_scale,
        k_scale,
        v_scale,
        None,
        return_lse,
        num_splits,
        plan_with_handle(plan) if plan else None,
    )
    return operator_outputs(out, lse)


@decode_op.register_fake
def _(q, k_cache, v_cache, *rest):
    return_lse = rest[-3]
    dtype = q.dtype if q.is_floating_point() and q.dtype.itemsize > 1 else torch.bfloat16
    out = q.new_empty((*q.shape[:3], v_cache.shape[3]), dtype=dtype)
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return out, q.new_empty(lse_shape, dtype=torch.float32)
