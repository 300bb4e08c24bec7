"""The functions that users call: tensors -> Problem -> Plan -> launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
from torch import Tensor

from splitkv.autograd import NAMES, attention_op
from splitkv.decoding import decode
from splitkv.device import Device, current
from splitkv.errors import (
    expect,
    expect_at_least,
    expect_int,
    expect_number,
    expect_one_of,
    expect_tensor,
)
from splitkv.explanation import Explanation
from splitkv.explanation import explain as explain_problem
from splitkv.launch import describe, device_of, handle_of, is_plain, needs_grad
from splitkv.plans import Plan
from splitkv.policies import DEFAULT, Policy
from splitkv.problem import Kind, Problem, expect_heads, expect_window
from splitkv.reference import merge_states
from splitkv.registry import make_plan
from splitkv.scales import DTYPE_BYTES
from splitkv.sequences import run_attention

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from splitkv.arguments import AttentionOptions, VarlenOptions

__all__ = ["attention", "attention_varlen", "decode", "explain", "merge_states", "plan"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    sink_tokens: int = 0,
    attention_chunk: int = 0,
    sink_logits: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    products: str | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over dense batches, differentiable.

    q              [batch, seqlen_q, num_heads, head_dim], bf16, fp16, fp32 or fp64
    k, v           [batch, seqlen_k, num_kv_heads, head_dim (v: head_dim_v)], same type, or int8 or
                   float8_e4m3fn with scales; num_heads is a multiple of num_kv_heads, and head h
                   reads KV head h // (num_heads // num_kv_heads)
    causal         query i sees keys up to seqlen_k - seqlen_q + i (bottom-right alignment)
    window_size    (left, right) keys around that position, inclusive; -1: unbounded
    sink_tokens    the first keys stay visible whatever the window's left edge says (StreamingLLM)
    attention_chunk  above 0: positions go in chunks of this many keys, and a query sees keys of its
                   own chunk only, and sink tokens (Llama 4)
    sink_logits    [num_heads], a logit a head that joins the softmax denominator and adds nothing
                   to the output (gpt-oss); differentiable
    softmax_scale  default head_dim ** -0.5
    softcap        above 0: scores become softcap * tanh(score / softcap) before the mask
    alibi_slopes   [num_heads] or [batch, num_heads] fp32: bias
                   -slope * |i + seqlen_k - seqlen_q - j|
    k_scale        scales of quantised keys, fp32: one, [num_kv_heads], [batch, num_kv_heads], or as
                   k without its last dimension; v_scale likewise, of the same granularity
    q_scale        scales of a q that is quantised as the keys are, by its own heads; out is bf16
    products       with quantised keys, what may be multiplied in 8 bits: "widened": nothing;
                   "half": q . k, for which q is rounded to the type of k with a scale a token and
                   head; "full": p . v too, for which p is. None: "half" with int8, "widened" with
                   float8_e4m3fn. A kernel without such units computes more exactly
    dropout_p      probability of dropping an attention weight
    deterministic  backward gives the same bits every time
    plan           a Plan of `splitkv.plan` for this problem, to skip deciding

    Returns out [batch, seqlen_q, num_heads, head_dim_v], and with `return_lse` the natural log of
    the softmax denominator without the sink, [batch, num_heads, seqlen_q] fp32. A row that sees no
    key gives 0 and -inf.

    Raises ValueError for malformed arguments, UnsupportedProblem where no kernel can.

    Equivalent PyTorch, for one sequence and one head of each::

        s = softmax_scale * q @ k.T
        s = softcap * tanh(s / softcap)                  # with softcap
        s = s - slope * (pos[:, None] - key).abs()       # with ALiBi
        s = s.masked_fill(~visible, -inf)
        lse = s.logsumexp(-1)
        out = (s - logaddexp(lse, sink_logit)[:, None]).exp() @ v
    """
    return _attention(
        q,
        k,
        v,
        plan,
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
    )


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenOptions],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    return_lse: bool,
    **options: Unpack[VarlenOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    page_table: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    sink_tokens: int = 0,
    attention_chunk: int = 0,
    sink_logits: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    products: str | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences of different lengths laid end to end, differentiable.

    q                          [total_q, num_heads, head_dim]
    k, v                       [total_k, num_kv_heads, head_dim (v: head_dim_v)], or with a page
                               table [num_pages, page_size, num_kv_heads, ..], any page size
    cu_seqlens_q, cu_seqlens_k [batch + 1] int32 on the device: sequence b is rows
                               cu_seqlens[b] : cu_seqlens[b + 1]; never read by the host.
                               cu_seqlens_k: None with a page table
    max_seqlen_q, max_seqlen_k upper bounds of the lengths
    page_table                 [batch, max_pages] int32 on the device: the keys and values are in a
                               cache, as those of `decode`. For prompts in chunks and batches in
                               which some sequences have a chunk and others one new token. Entries
                               past a length may hold anything
    cache_seqlens              [batch] int32 on the device, with a page table: keys of each
                               sequence, those of q included; never read by the host

    Everything else as `attention`; the mask of each sequence is aligned by its own lengths; scales
    of packed tensors are not a sequence's: one, one a head, or one a token and head; those of pages
    may be, [batch, num_kv_heads]. Pages and quantised keys beside which a gradient is needed are
    served by plain torch; on a GPU a warning says so. Returns out [total_q, num_heads, head_dim_v],
    and with `return_lse` lse [num_heads, total_q] fp32.
    Equivalent PyTorch: `attention` on each sequence, the results concatenated. Raises as that.
    """
    expect_tensor("cu_seqlens_q", cu_seqlens_q)
    if page_table is None:
        expect_tensor("cu_seqlens_k", cu_seqlens_k)
    return _attention(
        q,
        k,
        v,
        plan,
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
    )


def _attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, **given: Any
) -> Tensor | tuple[Tensor, Tensor]:
    if isinstance(given["window_size"], list):
        given["window_size"] = tuple(given["window_size"])
    scales = (given[name] for name in ("q_scale", "k_scale", "v_scale"))
    leaves = q, k, v, given["sink_logits"], given["alibi_slopes"]
    if is_plain(*leaves, *scales):
        out, lse = run_attention(q, k, v, plan, **given)
    else:
        expect_window(given["window_size"])
        expect_number("dropout_p", given["dropout_p"])
        given["window_left"], given["window_right"] = given.pop("window_size")
        given["needs_grad"] = needs_grad(*leaves)  # inside an operator nothing seems to need one
        if given["dropout_p"] > 0:
            given["seed"] = torch.randint(0, 2**62, (), dtype=torch.int64)
        optional = (given.get(name) for name in NAMES[3:-1])
        out, lse = attention_op(q, k, v, *optional, handle_of(plan))
    return (out, lse) if given["return_lse"] else out


def plan(
    problem: Problem | Tensor,
    *tensors: Any,
    device: Device | None = None,
    policy: str | Policy = DEFAULT,
    num_splits: int = 0,
    **arguments: Any,
) -> Plan:
    """The decision for a problem, without running it.

    problem     a Problem, for any Device (`Device.named("h200")`; default: the one here); or q,
                and then the arguments of `decode` (q, k_cache, v_cache, cache_seqlens=...), of
                `attention_varlen` where cu_seqlens are given, or of `attention` with `dense=True`
    policy      a name (`splitkv explain --help` lists them) or a function (problem, device,
                kernels)
    num_splits  above 0 forces the number of splits

    The plan can be printed, compared, stored, and passed back as `plan=`, which skips deciding.
    Raises UnsupportedProblem where no kernel can run the problem.
    """
    if not isinstance(problem, Problem):
        expect_tensor("problem", problem)
        device = device or device_of(problem)
        problem = describe(problem, *tensors, **arguments)
    else:
        _expect_problem(problem)
        _expect_nothing_beside(problem, tensors, arguments)
    return make_plan(problem, device or current(), policy=policy, num_splits=num_splits)


def explain(
    problem: Problem | Plan | Tensor,
    *tensors: Any,
    device: Device | None = None,
    policies: Sequence[str] = (DEFAULT,),
    num_splits: int = 0,
    **arguments: Any,
) -> Explanation:
    """Why a call runs as it does; print it. Takes a Problem, a Plan, or the arguments of a call.

    policies   names of policies to show side by side

    Shows the problem, every kernel with the reasons against it, each policy's plan with its grid,
    waves, share of SMs busy, bytes, and the time that the bytes take at full bandwidth.
    """
    if not isinstance(problem, Problem | Plan):
        expect_tensor("problem", problem)
        device = device or device_of(problem)
        problem = describe(problem, *tensors, **arguments)
    else:
        if isinstance(problem, Problem):
            _expect_problem(problem)
        _expect_nothing_beside(problem, tensors, arguments)
    expect(device is None or isinstance(device, Device), "device", "a splitkv.Device", device)
    names = isinstance(policies, Sequence) and not isinstance(policies, str) and len(policies) > 0
    expect(names, "policies", "names of policies", policies)
    if isinstance(problem, Plan):
        expect(device is None, "device", "nothing beside a Plan", device)
        expect(tuple(policies) == (DEFAULT,), "policies", "nothing beside a Plan", policies)
        expect(num_splits == 0, "num_splits", "nothing beside a Plan", num_splits)
    return explain_problem(problem, device, policies, num_splits)


def _expect_problem(problem: Problem) -> None:
    """What `describe` says of a call, of a Problem that no call has."""
    sizes = "batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v"
    for name in (*sizes, "seqlen_q", "seqlen_k", "seqlen_new"):
        expect_int(name, getattr(problem, name))
        expect_at_least(name, getattr(problem, name), 0)
    expect_heads(*(getattr(problem, name) for name in sizes[1:]))
    expect_one_of("kind", problem.kind, get_args(Kind))
    expect_one_of("dtype", problem.dtype, DTYPE_BYTES)


def _expect_nothing_beside(
    problem: Problem | Plan, tensors: Sequence[Any], arguments: Mapping[str, Any]
) -> None:
    """A Problem and a Plan say it all: what is given beside them would be ignored."""
    kind = type(problem).__name__
    expect(not tensors, "tensors", f"none beside a {kind}", len(tensors))
    for name, value in arguments.items():
        expect(False, name, f"nothing beside a {kind}", value)
