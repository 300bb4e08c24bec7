"""From a call to a running kernel: the cache of bound launchers.

A call is described, planned and bound once for each memory layout and set of options; later calls
of the same kind go straight to the launcher. `decode` finds it in two steps. Its options alone lead
to the last few layouts they came with, each with a check of all tensors in C++, the one that guards
torch's compiled graphs: Python and element types, shapes, strides, devices and gradients. The
public function takes this step itself, as a call of another would show in the time. Where none of
those fits, or torch has no such check, a key of shapes, strides, types and devices decides. Lengths
and page tables live on the device and are in no key.

Plain tensors run the launcher directly. Under torch.compile, torch.export, FakeTensorMode and for
tensor subclasses the same function runs as the operator `splitkv::decode` (in `decoding.py`) or
`splitkv::attention` (in `autograd.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitkv.device import Device, cpu, current
from splitkv.errors import expect, expect_one_of, expect_tensor
from splitkv.kv import AS_IS, Paged
from splitkv.legality import expect_config
from splitkv.plans import Config, Kernel, Plan
from splitkv.problem import (
    Operands,
    Problem,
    describe_attention,
    describe_decode,
)
from splitkv.registry import kernel_named, make_plan

Result = tuple[Tensor, Tensor | None]
Launcher = Callable[[Operands], Result]
"""What Kernel.bind gives. It may have an attribute `repeat`, None or a function of q, k, v, out,
cache_seqlens, page_table, sink_logits, alibi_slopes, q_scale, k_scale, v_scale, softmax_scale and
softcap, which does the same sooner, or nothing and gives None."""


class Known(NamedTuple):
    """A bound launcher, and which calls it is for.

    fits       check(*tensors): whether all tensors are of the kind and layout that it was bound to;
               None where torch has no such check
    grad_mode  what torch.is_grad_enabled() has to be, where a tensor requires a gradient; else None
    repeats    the launcher may have a `repeat`
    device     the index that has to be current; None on a CPU and where no other GPU is
    plan       stays alive here, so that its id stays its own
    """

    fits: Callable[..., bool] | None
    grad_mode: bool | None
    launcher: Launcher
    repeats: bool
    device: int | None
    softmax_scale: float
    plan: Plan | None


MAX_CALLS = 8192  # entries kept; past it the cache starts afresh
MAX_RECENT = 8  # layouts tried for the same options
_calls: dict[Any, Any] = {}  # options -> the last few Known; options and layouts -> Known
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)  # int: no CUDA
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
_warned: set[tuple[str, ...]] = set()

_MASK_AND_SCORE: dict[str, Any] = {
    "window_size": (-1, -1),
    "sink_tokens": 0,
    "attention_chunk": 0,
    "sink_logits": None,
    "softmax_scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "return_lse": False,
}
_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_SCALES = {"q_scale": None, "k_scale": None, "v_scale": None, "products": None}
ATTENTION_DEFAULTS: dict[str, Any] = {
    "causal": False,
    **_MASK_AND_SCORE,
    **_SCALES,
    "dropout_p": 0.0,
    "deterministic": False,
}
_PAGES = {"page_table": None, "cache_seqlens": None}
_OF_OPERANDS = (
    *("out", "cache_seqlens", "page_table", "sink_logits", "alibi_slopes"),
    *("q_scale", "k_scale", "v_scale"),
)
DECODE_DEFAULTS: dict[str, Any] = {
    "cache_seqlens": None,
    "page_table": None,
    "max_seqlen_k": None,
    "causal": True,
    **_MASK_AND_SCORE,
    **_SCALES,
    "out": None,
    "early_kv": False,
}


def device_of(tensor: Tensor) -> Device:
    """The Device that a tensor lives on."""
    return current(tensor.device.index) if tensor.is_cuda else cpu()


def layout(x: Tensor | None) -> Any:
    """What a launcher is bound to of a tensor: everything but its address and contents."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def is_plain(*arguments: Any) -> bool:
    """Whether no tensor is a subclass and nothing is tracing: the operators may be skipped."""
    if torch.compiler.is_compiling() or dispatch_modes():
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
    plan = plan_for(problem, operands, plan, num_splits)
    return kernel_named(plan.kernel).bind(plan, operands)


def plan_for(problem: Problem, operands: Operands, plan: Plan | None, num_splits: int = 0) -> Plan:
    """The caller's plan fitted to a described call, or a new one."""
    if plan is None:
        device = device_of(operands.q)
        unfit = partial(_unfit, operands)
        plan = make_plan(problem, device, num_splits=num_splits, unfit=unfit)
        _warn_of_fall_back(plan)
    else:
        expect(num_splits == 0, "num_splits", "0 with a plan", num_splits)
        plan = fit_plan(plan, problem, device_of(operands.q))
        against = _unfit(operands, kernel_named(plan.kernel))
        expect(not against, "plan", f"a kernel without {'; '.join(against)}", plan.kernel)
    if operands.q.numel() == 0:  # no query: nothing to launch
        plan = replace(plan, kernel="torch_math", config=Config())
    return plan


def _unfit(operands: Operands, kernel: Kernel) -> list[str]:
    return kernel.unfit(operands) if operands.q.is_cuda else []


def fit_plan(plan: Plan, problem: Problem, device: Device) -> Plan:
    """The plan for this call: one made for the same problem with at least as many keys."""
    expect(isinstance(plan, Plan), "plan", "a splitkv.Plan", plan)
    made_for = plan.problem
    longest = replace(problem, seqlen_k=made_for.seqlen_k, needs_grad=made_for.needs_grad)
    if made_for.mask.within(problem.seqlen_q, problem.seqlen_k) == problem.mask:
        longest = replace(longest, mask=made_for.mask)
    if longest != made_for or problem.seqlen_k > made_for.seqlen_k:
        raise ValueError(f"plan: expected one for ({problem}), got one for ({made_for})")
    expect(plan.device.arch == device.arch, "plan", f"one for {device.arch}", plan.device.arch)
    kernel = kernel_named(plan.kernel)
    against = kernel.unsupported(problem, device)
    expect(not against, "plan", f"a kernel without {'; '.join(against)}", plan.kernel)
    expect_config(kernel, problem, device, plan.config)
    return replace(plan, problem=problem)


def _warn_of_fall_back(plan: Plan) -> None:
    """Say once for each reason that a GPU reads a cache, or quantised keys, by kernels that are not
    made for it."""
    kind, device = plan.problem.kind, plan.device.kind
    of_cache = kind == "decode" or isinstance(plan.problem.place, Paged)
    quantised = plan.problem.codec != AS_IS
    fell_back = device == "cuda" and plan.kernel in ("torch_math", "torch_sdpa")
    if not fell_back or not (of_cache or quantised):
        return
    name = {"decode": "decode", "dense": "attention", "varlen": "attention_varlen"}[kind]
    against = dict(plan.rejected).get("prefill", ())
    if against and against not in _warned:
        _warned.add(against)
        warnings.warn(f"{name} runs on {plan.kernel}: {'; '.join(against)}", stacklevel=6)


def check_of(tensors: list[Tensor]) -> Callable[..., bool] | None:
    """A check for tensors just like these; None where torch has none, or one is given twice."""
    if _TensorGuards is None:
        return None
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    check: Callable[..., bool] = guards.check
    return check if check(*tensors) else None  # it refuses a tensor that is given twice


def remember(options: Any, key: Any, tensors: list[Tensor], known: Known) -> Known:
    """Keep it by its key, and where there is a check, as the latest of its options."""
    if known.fits is None or not known.fits(*tensors):
        recording = torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None
        known = known._replace(fits=check_of(tensors), grad_mode=recording)
    if len(_calls) >= MAX_CALLS - 1:
        _calls.clear()
    _calls[key] = known
    if known.fits is not None:
        _calls[options] = (known, *_calls.get(options, ())[: MAX_RECENT - 1])
    return known


def handle_of(plan: Plan | None) -> str:
    """What an operator is given of a plan."""
    expect(plan is None or isinstance(plan, Plan), "plan", "a splitkv.Plan", plan)
    return "" if plan is None else plan.handle


def describe(q: Any, *tensors: Any, dense: bool = False, **arguments: Any) -> Problem:
    """The Problem of a call of `decode`, `attention_varlen` (cu_seqlens) or `attention` (dense)."""
    varlen = "cu_seqlens_q" in arguments or len(tensors) > 2
    name, signature = "decode", DECODE_DEFAULTS
    positional: tuple[str, ...] = ()
    if varlen or dense:
        name = "attention_varlen" if varlen else "attention"
        signature = {**_PAGES, **ATTENTION_DEFAULTS} if varlen else ATTENTION_DEFAULTS
        positional = _VARLEN if varlen else ()
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
    indices: tuple[str, ...] = ("cu_seqlens_q",) if varlen else ()
    if varlen and given["page_table"] is None:
        indices += ("cu_seqlens_k",)
    tensors_given = (q, *tensors[:2], *(given[i] for i in indices))
    for argument, x in zip(("q", "k", "v", *indices), tensors_given, strict=True):
        expect_tensor(argument, x)
    grad = needs_grad(q, *tensors[:2], given["sink_logits"], given["alibi_slopes"])
    described = describe_attention if varlen or dense else describe_decode
    return described(q, *tensors[:2], needs_grad=grad, **given)[0]


def run_decode(
    tensors: list[Tensor],
    arguments: dict[str, Any],
    num_splits: int,
    plan: Plan | None,
    options: tuple[Any, ...],
    in_operator: bool,
) -> Result | None:
    """A call of decode that is not repeated: described, planned and bound on the first of a kind.
    None where it has to go through the operator.

    tensors    q, k_cache, v_cache, and of the optional ones those that are given
    arguments  all but q, k_cache, v_cache, num_splits and plan
    options    what it is known by beside the layouts of the tensors; the window comes first
    """
    if isinstance(arguments["window_size"], list):
        arguments["window_size"] = tuple(arguments["window_size"])
        options = arguments["window_size"], *options[1:]
    known = _recent(options, tensors)
    if known is None:
        if not in_operator and not is_plain(*tensors):
            return None
        known = _known(options, tensors, arguments, num_splits, plan)
    q, k_cache, v_cache = tensors[:3]
    operands = Operands(q, k_cache, v_cache, softmax_scale=known.softmax_scale)
    for name in _OF_OPERANDS:
        setattr(operands, name, arguments[name])
    operands.softcap = float(arguments["softcap"])
    if known.device is not None and known.device != _current_device():
        with torch.cuda.device(known.device):
            return known.launcher(operands)
    return known.launcher(operands)


def _recent(options: Any, tensors: list[Tensor]) -> Known | None:
    """The one of the latest with these options that the tensors fit."""
    try:
        recent: tuple[Known, ...] = () if dispatch_modes() else _calls.get(options, ())
    except TypeError:  # some option is not what it should be: describing says which
        return None
    for known in recent:
        recorded = known.grad_mode is None or known.grad_mode is torch.is_grad_enabled()
        if known.fits is not None and known.fits(*tensors) and recorded:
            return known
    return None


def _known(
    options: Any,
    tensors: list[Tensor],
    arguments: dict[str, Any],
    num_splits: int,
    plan: Plan | None,
) -> Known:
    """The launcher of a call that none of the latest was like: an earlier one's, or a new one."""
    q, k_cache, v_cache = tensors[:3]
    grad = needs_grad(q, k_cache, v_cache, arguments["sink_logits"], arguments["alibi_slopes"])
    try:
        key: Any = options, grad, tuple(layout(x) for x in tensors)
        known: Known | None = _calls.get(key)
    except (AttributeError, TypeError):  # describing says what is wrong
        key = known = None
    if known is None:
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            expect_tensor(name, x)
        problem, operands = describe_decode(q, k_cache, v_cache, needs_grad=grad, **arguments)
        launcher = bind(problem, operands, plan, num_splits)
        known = Known(
            fits=None,
            grad_mode=None,
            launcher=launcher,
            repeats=hasattr(launcher, "repeat"),
            device=q.device.index if q.is_cuda and torch.cuda.device_count() > 1 else None,
            softmax_scale=operands.softmax_scale,
            plan=plan,
        )
    elif _TensorGuards is None:
        return known
    return known if key is None else remember(options, key, tensors, known)


def working_dtype(q: Tensor) -> torch.dtype:
    """Of the output: q's own type, bfloat16 where q is quantised."""
    return q.dtype if q.is_floating_point() and q.dtype.itemsize > 1 else torch.bfloat16


def operator_outputs(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """What an operator returns: always two tensors, in the strides that its fake promises."""
    absent = out.new_empty(0, dtype=torch.float32)
    return out.contiguous(), absent if lse is None else lse.contiguous()
