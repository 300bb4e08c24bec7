"""From a call to a running kernel: described, planned, bound, and from then on only launched.

The launchers of calls are kept in a `CallCache`, which says what a call is known by. The public
function `decode` looks there itself, as a call of another function would show in the time.

Plain tensors run the launcher directly. Under torch.compile, torch.export, FakeTensorMode and for
tensor subclasses the same function runs as the operator `splitkv::decode` (in `runtime/decode.py`)
or `splitkv::attention` (in `runtime/autograd.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from splitkv.core.device import Device, cpu, current
from splitkv.core.errors import (
    expect,
    expect_device,
    expect_in_range,
    expect_one_of,
    expect_tensor,
)
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.masks import FAR, NUMBERS, expect_window
from splitkv.core.options import Function, defaults_of, required_of, tensors_of
from splitkv.core.plan import Config, Kernel, Plan, plan_at, shares_of
from splitkv.core.problem import (
    Operands,
    Problem,
    describe_attention,
    describe_decode,
)
from splitkv.kernels.host.stand_in import StandIn
from splitkv.planner.legality import expect_backward, expect_config
from splitkv.planner.policies.shared import MAX_SPLITS
from splitkv.planner.registry import completed, in_bucket, kernel_named, make_plan, rounded_up
from splitkv.runtime import call_cache, growing_caches
from splitkv.runtime.autocast import as_autocast, autocast_dtype, without_autocast
from splitkv.runtime.call_cache import BoundCall, CallCache, Launcher, Result
from splitkv.runtime.growing_caches import GROWS

calls: CallCache[BoundCall] = CallCache()  # of decode, attention and attention_varlen
_warned: set[tuple[str, ...]] = set()
_PLAIN = (Tensor, type(None), torch.nn.Parameter, StandIn)

_DECODE_TENSORS = tensors_of("decode")


def device_of(tensor: Tensor) -> Device:
    """The Device that a tensor lives on."""
    if isinstance(tensor, StandIn):
        return tensor.gpu
    return current(tensor.device.index) if tensor.is_cuda else cpu()


def on_a_gpu(x: Any) -> bool:
    """Whether it is a tensor that lives on a GPU."""
    return isinstance(x, Tensor) and device_of(x).kind == "cuda"


def torch_device(device: Any) -> torch.device:
    """A device that torch can make tensors on, given as torch takes one: by itself, its name or its
    number."""
    try:
        return torch.empty(0, device=device).device
    except (TypeError, RuntimeError, AssertionError) as error:  # the last: a torch without CUDA
        said = str(error).partition("\n")[0]
        message = f"device: expected a device that torch has here, got {device!r}; torch: {said}"
        raise ValueError(message) from None


def is_plain(*arguments: Any) -> bool:
    """Whether no tensor is a subclass and nothing is tracing: the operators may be skipped. Raises
    NotImplementedError where one has a tangent, which would be lost."""
    if torch.compiler.is_compiling():
        return False
    if forward_ad._current_level >= 0:
        _expect_no_tangents(arguments)
    if call_cache.dispatch_modes():
        return False
    for x in arguments:  # noqa: SIM110, as a generator takes longer, on every call
        if type(x) not in _PLAIN and isinstance(x, Tensor):
            return False
    return True


def _expect_no_tangents(arguments: tuple[Any, ...]) -> None:
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "tensors: expected none with a tangent, as no kernel has derivatives in forward mode; "
            "take gradients in reverse mode, or splitkv.reference"
        )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked of what is computed from these."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def bind(problem: Problem, operands: Operands, plan: Plan | None, num_splits: int = 0) -> Launcher:
    """A launcher for a described call, under the caller's plan or a new one."""
    plan = plan_for(problem, operands, plan, num_splits)
    return kernel_named(plan.kernel).bind(plan, operands)


def bind_in_bucket(problem: Problem, operands: Operands, num_splits: int) -> Launcher:
    """A launcher for a described call under the plan of the longest caches of its bucket, which
    does not change with every key; of the call's own length by kernels that take no other."""
    plan = plan_for(in_bucket(problem), operands, None, num_splits)
    if plan.kernel not in GROWS:
        plan = plan_for(problem, operands, None, num_splits)
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
    if operands.q.is_cuda:
        plan = kernel_named(plan.kernel).refit(plan, operands)
    if operands.q.numel() == 0:  # no query: nothing to launch
        plan = replace(plan, kernel="torch_math", config=Config(), backward=None)
    return plan


def _unfit(operands: Operands, kernel: Kernel) -> list[str]:
    return kernel.unfit(operands) if operands.q.is_cuda else []


def fit_plan(plan: Plan, problem: Problem, device: Device) -> Plan:
    """The plan for this call: one made for the same problem with at least as many keys."""
    expect(isinstance(plan, Plan), "plan", "a splitkv.Plan", plan)
    made_for = plan.problem
    longest = replace(problem, seqlen_k=made_for.seqlen_k, needs_grad=made_for.needs_grad)
    if made_for.mask.within(problem.seqlen_q, problem.seqlen_k) == problem.mask:
        own = made_for if problem.mask.num_bands < 2 else problem  # which it may not matter of
        of_sequences = own.sequence_sink_tokens
        longest = replace(longest, mask=made_for.mask, sequence_sink_tokens=of_sequences)
    if longest != made_for or problem.seqlen_k > made_for.seqlen_k:
        raise ValueError(f"plan: expected one for ({problem}), got one for ({made_for})")
    expect(plan.device.arch == device.arch, "plan", f"one for {device.arch}", plan.device.arch)
    kernel = kernel_named(plan.kernel)
    against = kernel.unsupported(problem, device)
    expect(not against, "plan", f"a kernel without {'; '.join(against)}", plan.kernel)
    config = expect_config(kernel, problem, device, plan.config)
    gradients = plan.backward if problem == made_for else None
    plan = replace(plan, problem=problem, config=config, backward=gradients)
    expect_backward(kernel, plan)
    return completed(plan)


def _warn_of_fall_back(plan: Plan) -> None:
    """Say once for each reason that a GPU reads a cache, quantised keys, or from its memory what is
    visible, by kernels that are not made for it."""
    kind, device = plan.problem.kind, plan.device.kind
    of_cache = kind == "decode" or isinstance(plan.problem.place, Paged)
    quantised = plan.problem.codec != AS_IS
    fell_back = device == "cuda" and plan.kernel in ("torch_math", "torch_sdpa")
    on_device = plan.problem.bidirectional_ranges or plan.problem.sequence_sink_tokens
    if not fell_back or not (of_cache or quantised or on_device):
        return
    name = {"decode": "decode", "dense": "attention", "varlen": "attention_varlen"}[kind]
    against = dict(plan.rejected).get("prefill", ())
    if against and against not in _warned:
        _warned.add(against)
        warnings.warn(f"{name} runs on {plan.kernel}: {'; '.join(against)}", stacklevel=8)


def handle_of(plan: Plan | None) -> str:
    """The string by which an operator is given a plan."""
    expect(plan is None or isinstance(plan, Plan), "plan", "a splitkv.Plan", plan)
    if plan is None:
        return ""
    return _handle_at(id(plan))  # a traced graph is for this plan alone


def _handle_at(identity: int) -> str:
    """Found while a graph is traced, not traced itself."""
    return plan_at(identity).handle


# as torch.compiler.assume_constant_result does, which loads all of the compiler for it
_handle_at._dynamo_marked_constant = True  # type: ignore[attr-defined]


def apart(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a public function as what describes and runs a call takes them: sink tokens
    that are a tensor, one number a sequence, have a name of their own."""
    sink_tokens = arguments["sink_tokens"]
    if not isinstance(sink_tokens, Tensor):
        return {**arguments, "sequence_sink_tokens": None}
    return {**arguments, "sink_tokens": 0, "sequence_sink_tokens": sink_tokens}


def together(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `apart` was given."""
    given = dict(arguments)
    of_sequences = given.pop("sequence_sink_tokens")
    return given if of_sequences is None else given | {"sink_tokens": of_sequences}


def within_64_bits(
    arguments: dict[str, Any], num_splits: int, describe: Callable[[], Any]
) -> dict[str, Any]:
    """Makes the arguments ones that an operator can take, which has 64 bits for an integer.

    arguments   of `describe_decode` or `describe_attention`, by name
    describe    raises what is said of a malformed integer outside of an operator; those that it
                lets through are edges of the mask, past all keys, and are returned as `FAR`

    Costs nothing but a look where every integer has 64 bits.
    """
    expect_window(arguments["window_size"])
    left, right = arguments["window_size"]
    integers = {"left": left, "right": right, "num_splits": num_splits, **arguments}
    if all(type(x) is not int or -(1 << 63) <= x < 1 << 63 for x in integers.values()):
        return arguments
    describe()
    expect_in_range("num_splits", num_splits, 0, MAX_SPLITS)
    numbers = *NUMBERS, "max_sink_tokens"
    edges = {n: min(arguments[n], FAR) for n in numbers if arguments.get(n) is not None}
    return arguments | edges | {"window_size": (min(left, FAR), min(right, FAR))}


def expect_unrecorded(out: Any) -> None:
    """Refuses an `out` that requires a gradient: what is written into it is no part of a graph."""
    recorded = torch.is_grad_enabled() and getattr(out, "requires_grad", False)
    hint = "pass out.detach(), or call within torch.no_grad()"
    expect(not recorded, "out", "a tensor without a gradient", "one that requires it", hint)


def describe(q: Any, *tensors: Any, dense: bool = False, **arguments: Any) -> Problem:
    """The Problem of a call of `decode`, `attention_varlen` (cu_seqlens) or `attention` (dense)."""
    varlen = "cu_seqlens_q" in arguments or len(tensors) > 2
    name: Function = "attention_varlen" if varlen else "attention" if dense else "decode"
    positional, signature = required_of(name), defaults_of(name)
    enough = 2 <= len(tensors) <= 2 + len(positional)
    expected = ", ".join(("q, keys and values by position", *positional))
    expect(enough, name, expected, 1 + len(tensors))
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
    described = describe_decode if name == "decode" else describe_attention
    q, k, v = as_autocast(q, *tensors[:2])
    return described(q, k, v, needs_grad=grad, **apart(given))[0]


class Decision(NamedTuple):
    """The arguments of a call of decode about its plan: forced splits, or 0; a plan; where programs
    start by a schedule of the step; or None."""

    num_splits: int
    plan: Plan | None
    starts: Tensor | None


def run_decode(
    tensors: list[Tensor],
    arguments: dict[str, Any],
    made: Decision,
    options: tuple[Any, ...],
    in_operator: bool,
) -> Result | None:
    """A call of decode that is not relaunched: described, planned and bound on the first of a kind.
    None where it has to go through the operator.

    tensors    q, k_cache, v_cache, and of the optional ones those that are given
    arguments  all but q, k_cache, v_cache and what is in `made`
    options    what the cache knows it by beside the layouts of the tensors; where that is not
               hashable, some option is not what it should be
    """
    bound = calls.match(options, tensors)
    if bound is None:
        if not in_operator and not is_plain(*tensors):
            return None
        q = tensors[0]
        if autocast_dtype(q) is not None:
            tensors = [*as_autocast(*tensors[:3]), *tensors[3:]]
            with without_autocast(q):
                return run_decode(tensors, arguments, made, options, in_operator)
        expect_unrecorded(arguments["out"])
        if made.plan is None and arguments["max_seqlen_k"] is not None:
            alike = _of_any_max_seqlen_k(tensors, arguments, options)
            if alike is not None:
                return run_decode(alike.tensors, alike.arguments, made, alike.options, in_operator)
        new = partial(_bind_decode, tensors, arguments, made)
        bound = _growing(tensors, arguments, made, options)
        if bound is None:
            bound = calls.get_or_bind(options, tensors, new)
    q, k_cache, v_cache = tensors[:3]
    operands = Operands(q, k_cache, v_cache, softmax_scale=bound.softmax_scale)
    for name in _DECODE_TENSORS:
        setattr(operands, name, arguments[name])
    operands.softcap = float(arguments["softcap"])
    operands.starts = made.starts
    return bound(operands)


class Alike(NamedTuple):
    """A call of decode, as `run_decode` takes it, that has the result of another."""

    tensors: list[Tensor]
    arguments: dict[str, Any]
    options: tuple[Any, ...]


def _of_any_max_seqlen_k(
    tensors: list[Tensor], arguments: dict[str, Any], options: tuple[Any, ...]
) -> Alike | None:
    """The call that is made in the place of one like others but for `max_seqlen_k`; None: itself,
    as the first time.

    With lengths on the device the bound is that of the bucket; else contiguous caches are cut to
    the keys that there are, and grow.
    """
    longest, page_table = arguments["max_seqlen_k"], arguments["page_table"]
    if not on_a_gpu(tensors[0]):
        return None
    capacity = growing_caches.capacity_of(tensors[1], page_table)
    if type(longest) is not int or not 0 < longest < capacity:  # describing says what is not right
        return None
    on_host = arguments["cache_seqlens"] is None
    if (on_host and page_table is not None) or not calls.is_another(options, tensors):
        return None
    if not on_host:
        bound = min(rounded_up(longest), capacity)
        if bound == longest:
            return None
        return Alike(tensors, arguments | {"max_seqlen_k": bound}, (bound, *options[1:]))
    k_scale, v_scale = arguments["k_scale"], arguments["v_scale"]
    cut = {id(x): x[:, :longest] for x in tensors[1:3]}
    if k_scale is not None and k_scale.shape == tensors[1].shape[:3]:  # of each token
        cut |= {id(x): x[:, :longest] for x in (k_scale, v_scale)}
    arguments = {name: cut.get(id(x), x) for name, x in arguments.items()}
    tensors = [cut.get(id(x), x) for x in tensors]
    options = None, type(None), *options[2:]
    return Alike(tensors, arguments | {"max_seqlen_k": None}, options)


def _growing(
    tensors: list[Tensor], arguments: dict[str, Any], made: Decision, options: tuple[Any, ...]
) -> BoundCall | None:
    """Finds what serves contiguous caches of every length; None where they are none, the first time
    that they come and where no kernel takes every length."""
    unknown = "page_table", "max_seqlen_k", "out_scale", "sequence_sink_tokens"
    absent = made.plan, *(arguments[n] for n in unknown)
    if any(x is not None for x in absent) or needs_grad(*tensors):
        return None
    pattern = growing_caches.pattern_of_caches(tensors)
    if pattern is None or not on_a_gpu(tensors[0]):
        return None
    new = partial(_bind_growing, tensors, arguments, made)
    check = growing_caches.check_of_caches
    return calls.get_or_bind_alike(options, tensors, pattern, check, new)


def _bind_growing(
    tensors: list[Tensor], arguments: dict[str, Any], made: Decision
) -> BoundCall | None:
    problem, operands = describe_decode(*tensors[:3], needs_grad=False, **arguments)

    def plan(problem: Problem, operands: Operands) -> Plan:
        return plan_for(problem, operands, None, made.num_splits)

    if plan(in_bucket(problem), operands).kernel not in GROWS:
        return None
    call = growing_caches.GrowingCaches(problem, operands, made.num_splits, plan)
    return BoundCall.of(call, operands, None)


def _bind_decode(tensors: list[Tensor], arguments: dict[str, Any], made: Decision) -> BoundCall:
    q, k_cache, v_cache = tensors[:3]
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        expect_tensor(name, x)
    grad = needs_grad(q, k_cache, v_cache, arguments["sink_logits"], arguments["alibi_slopes"])
    problem, operands = describe_decode(q, k_cache, v_cache, needs_grad=grad, **arguments)
    operands.starts = made.starts
    if made.starts is not None:
        expect_device("schedule", made.starts, q.device)
    if made.plan is None and device_of(operands.q).kind == "cuda":
        launcher = bind_in_bucket(problem, operands, made.num_splits)
    else:
        launcher = bind(problem, operands, made.plan, made.num_splits)
    if made.starts is not None and made.plan is not None:
        expect_same_shares(made.plan, getattr(launcher, "plan", made.plan))
    return BoundCall.of(launcher, operands, made.plan)


def expect_same_shares(made_for: Plan, plan: Plan) -> None:
    """The plan of a launcher, which may be another for the memory layout, cuts what a schedule was
    made for."""
    ours, theirs = (shares_of(x.config) for x in (plan, made_for))
    expect(ours == theirs, "schedule", f"one for {ours}", theirs)


def working_dtype(q: Tensor) -> torch.dtype:
    """The type of an output without a scale: q's own, bfloat16 where q is quantised."""
    return q.dtype if q.is_floating_point() and q.dtype.itemsize > 1 else torch.bfloat16


def result_dtype(q: Tensor, out_scale: Tensor | None) -> torch.dtype:
    """The type of the output: e4m3 with a scale, else the working type."""
    return working_dtype(q) if out_scale is None else torch.float8_e4m3fn


def operator_outputs(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The results of an operator: always two tensors, in the strides that its fake promises."""
    absent = out.new_empty(0, dtype=torch.float32)
    return out.contiguous(), absent if lse is None else lse.contiguous()
