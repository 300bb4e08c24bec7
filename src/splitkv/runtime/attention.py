"""attention and attention_varlen: described, planned and bound on the first call of a kind.

Under torch.compile, torch.export, FakeTensorMode and for tensor subclasses the same functions run
as the operator `splitkv::attention`.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.core.errors import MAX_SIZE, dtype_name, expect_number, expect_tensor
from splitkv.core.masks import NUMBERS, Mask
from splitkv.core.options import scalars_of, tensors_of
from splitkv.core.plan import Plan
from splitkv.core.problem import (
    Operands,
    Problem,
    describe_attention,
    expect_no_grad_with_out,
    expect_out,
)
from splitkv.runtime import dispatch, growing_sequences
from splitkv.runtime.autocast import as_autocast, autocast_dtype, without_autocast
from splitkv.runtime.autograd import NAMES, attention_op
from splitkv.runtime.call_cache import BoundCall, Result, current_device, with_types
from splitkv.runtime.dispatch import handle_of, is_plain, needs_grad, within_64_bits
from splitkv.runtime.growing_caches import capacity_of
from splitkv.runtime.growing_gradients import GrowingGradients
from splitkv.runtime.growing_sequences import NO_OPTIONAL, GrowingSequences

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from splitkv.runtime.arguments import AttentionOptions, VarlenOptions

_TENSORS = tuple(
    field.name for field in fields(Operands) if field.name in tensors_of("attention_varlen")
)
_SCALARS = tuple(name for name in scalars_of("attention_varlen") if name != "window_size")
_SOFTCAP, _RETURN_LSE, _DROPOUT = map(_SCALARS.index, ("softcap", "return_lse", "dropout_p"))
_TABLE, _STARTS, _LENGTHS = _TENSORS.index("page_table"), _TENSORS.index("cu_seqlens_q"), 2
"""The arguments but q, k, v, the window and the plan, as tuples have them: tensors in the order of
Operands, and others, the greatest lengths first."""


class _Call(NamedTuple):
    """A call but for q, k and v.

    optional   tensors or Nones, in the order of _TENSORS
    scalars    in the order of _SCALARS
    """

    optional: tuple[Any, ...]
    scalars: tuple[Any, ...]
    window_size: Any
    plan: Plan | None

    def by_name(self) -> dict[str, Any]:
        """All but the plan, as what is behind `attention_varlen` takes them."""
        named = dict(zip(_TENSORS, self.optional, strict=True))
        return named | dict(zip(_SCALARS, self.scalars, strict=True), window_size=self.window_size)


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
    sink_tokens: int | Tensor = 0,
    max_sink_tokens: int | None = None,
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
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over dense batches, differentiable.

    q              [batch, seqlen_q, num_heads, head_dim], bf16, fp16, fp32 or fp64
    k, v           [batch, seqlen_k, num_kv_heads, head_dim (v: head_dim_v)], same type, or int8,
                   float8_e4m3fn or float8_e5m2 with scales; num_heads is a multiple of
                   num_kv_heads, and head h reads KV head h // (num_heads // num_kv_heads)
    causal         query i sees keys up to seqlen_k - seqlen_q + i (bottom-right alignment)
    window_size    (left, right) keys around that position, inclusive; -1: unbounded. 2**30 or more
                   of these, of sink_tokens and of attention_chunk are as good as all
    sink_tokens    the first keys stay visible whatever the window's left edge says (StreamingLLM);
                   its right edge, and causality, hide them as any others. Or the number of each
                   sequence, [batch] int32 on the device, never read by the host; below 0 as 0
    max_sink_tokens  beside a tensor of sink_tokens an upper bound of them, which the plan is made
                   for; greater ones are undefined. None: there may be as many as keys
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
                   floats. A kernel without such units computes more exactly
    dropout_p      probability of dropping an attention weight
    deterministic  backward gives the same bits every time
    out            where to write the result, of its shape and type; any strides but the last, each
                   element in memory of its own. Only where no gradient is recorded
    out_scale      one fp32 number, [1] or [], on the device: the result is divided by it and stored
                   in float8_e4m3fn, nearest, what is past the largest number as that. Only where no
                   gradient is recorded
    plan           a Plan of `splitkv.plan` for this problem, to skip deciding

    Returns out [batch, seqlen_q, num_heads, head_dim_v], and with `return_lse` the natural log of
    the softmax denominator without the sink, [batch, num_heads, seqlen_q] fp32. A row that sees no
    key gives 0 and -inf. Both are contiguous.

    Under torch.autocast q, k and v of 16 and 32 bits are cast to its type first, and out has it, as
    with torch's scaled_dot_product_attention; tensors of 8 and 64 bits stay.

    Raises ValueError for malformed arguments, UnsupportedProblem where no kernel can.

    Equivalent PyTorch, for one sequence and one head of each::

        s = softmax_scale * q @ k.T
        s = softcap * tanh(s / softcap)                  # with softcap
        s = s - slope * (pos[:, None] - key).abs()       # with ALiBi
        s = s.masked_fill(~visible, -inf)
        lse = s.logsumexp(-1)
        out = (s - logaddexp(lse, sink_logit)[:, None]).exp() @ v
    """
    sequence_sink_tokens = None
    if isinstance(sink_tokens, Tensor):  # as `apart`
        sequence_sink_tokens, sink_tokens = sink_tokens, 0
    if (
        out is sequence_sink_tokens is sink_logits is alibi_slopes is None
        and q_scale is k_scale is v_scale is out_scale is None
    ):
        optional = NO_OPTIONAL
    else:
        optional = (
            *(out, None, None, None, None, None, sequence_sink_tokens),
            *(sink_logits, alibi_slopes, q_scale, k_scale, v_scale, out_scale),
        )
    scalars = (
        None,
        None,
        causal,
        sink_tokens,
        max_sink_tokens,
        attention_chunk,
        softmax_scale,
        softcap,
        return_lse,
        products,
        dropout_p,
        deterministic,
    )  # one tuple written out takes a third of one of others
    return _attention(q, k, v, _Call(optional, scalars, window_size, plan))


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
    sink_tokens: int | Tensor = 0,
    max_sink_tokens: int | None = None,
    attention_chunk: int = 0,
    bidirectional_ranges: Tensor | None = None,
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
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
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
    max_seqlen_q, max_seqlen_k upper bounds of the lengths, from 0 to less than 2**30
    page_table                 [batch, max_pages] int32 on the device: the keys and values are in a
                               cache, as those of `decode`. For prompts in chunks and batches in
                               which some sequences have a chunk and others one new token. Entries
                               past a length may hold anything
    cache_seqlens              [batch] int32 on the device, with a page table: keys of each
                               sequence, those of q included; never read by the host
    bidirectional_ranges       [batch, ranges, 2] int32 on the device, contiguous: (first, end) key
                               positions of ranges of a sequence. A query that stands in one sees
                               all its keys, whatever causality, window and chunk say: images among
                               tokens, or with (0, prefix_len) a prefix. (0, 2**30) makes one
                               sequence of a batch not causal; an empty range is none. Never read by
                               the host

    Everything else as `attention`; the mask of each sequence is aligned by its own lengths; scales
    of packed tensors are not a sequence's: one, one a head, or one a token and head; those of pages
    may be, [batch, num_kv_heads]. Pages, quantised keys, bidirectional ranges and sink tokens of
    each sequence beside which a gradient is needed are served by plain torch; on a GPU a warning
    says so. Returns out [total_q, num_heads, head_dim_v], and with `return_lse` lse
    [num_heads, total_q] fp32.
    Equivalent PyTorch: `attention` on each sequence, the results concatenated. Raises as that.
    """
    if not _is_plain_strided(cu_seqlens_q):
        expect_tensor("cu_seqlens_q", cu_seqlens_q)
    if page_table is None and not _is_plain_strided(cu_seqlens_k):
        expect_tensor("cu_seqlens_k", cu_seqlens_k)
    sequence_sink_tokens = None
    if isinstance(sink_tokens, Tensor):  # as `apart`
        sequence_sink_tokens, sink_tokens = sink_tokens, 0
    optional = (
        out,
        cache_seqlens,
        page_table,
        cu_seqlens_q,
        cu_seqlens_k,
        bidirectional_ranges,
        sequence_sink_tokens,
        sink_logits,
        alibi_slopes,
        q_scale,
        k_scale,
        v_scale,
        out_scale,
    )
    scalars = (
        max_seqlen_q,
        max_seqlen_k,
        causal,
        sink_tokens,
        max_sink_tokens,
        attention_chunk,
        softmax_scale,
        softcap,
        return_lse,
        products,
        dropout_p,
        deterministic,
    )
    return _attention(q, k, v, _Call(optional, scalars, window_size, plan))


def _is_plain_strided(x: Any) -> bool:
    """Whether there is nothing to look at more closely: what `expect_tensor` lets pass most often,
    in a fraction of the time."""
    return type(x) is Tensor and not x.is_nested and x.layout is torch.strided


def _attention(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor | tuple[Tensor, Tensor]:
    """A call like an earlier one is found first: what it is known by tells tensors of a subclass
    and whoever traces it from plain ones."""
    if not is_dynamo_compiling():
        bound, kind = _known(q, k, v, call)
        if bound is not None:
            out, lse = _launch(bound, q, k, v, call)
            return (out, lse) if call.scalars[_RETURN_LSE] else out
    given, plan = call.by_name(), call.plan
    scales = given["q_scale"], given["k_scale"], given["v_scale"], given["out_scale"]
    leaves, out = (q, k, v, given["sink_logits"], given["alibi_slopes"]), given["out"]
    if is_plain(*leaves, *scales, out):
        if autocast_dtype(q) is None:
            out, lse = _bind_and_launch(None, kind, call)
        else:
            q, k, v = as_autocast(q, k, v)
            with without_autocast(q):
                out, lse = _bind_and_launch(*_known(q, k, v, call), call)
    else:
        q, k, v = as_autocast(q, k, v)
        grad = needs_grad(*leaves, out)  # inside an operator nothing seems to need one
        new = partial(describe_attention, q, k, v, needs_grad=grad, **given)
        given = within_64_bits(given, 0, new)
        expect_number("dropout_p", given["dropout_p"])
        given["window_left"], given["window_right"] = given["window_size"]
        given["needs_grad"] = grad
        if given["dropout_p"] > 0:
            # on the host, whatever torch.set_default_device says
            given["seed"] = torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu")
        optional = (given.get(name) for name in NAMES[3:-1])
        made, lse = attention_op(q, k, v, *optional, handle_of(plan))
        if out is not None:
            expect_out(out, tuple(made.shape), dtype_name(made), made.device)
            expect_no_grad_with_out(given["needs_grad"])
        out = made if out is None else out.copy_(made)
    return (out, lse) if given["return_lse"] else out


_Kind = tuple[list[Tensor], tuple[Any, ...], tuple[Any, ...] | None]
"""What a call is known by: q, k, v and of the optional tensors those that are given; the options of
a call cache; those of packed calls that differ in lengths alone, or None."""


def _known(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[BoundCall | None, _Kind]:
    """Finds (the bound call that serves a kind of call or None, the kind)."""
    window = call.window_size
    tensors, present = [q, k, v], 0  # a bit for each of the optional ones
    optional = call.optional
    if optional is not NO_OPTIONAL:
        for x in optional:
            present += present
            if x is not None:
                tensors.append(x)
                present += 1
    options: tuple[Any, ...]
    try:
        left, right = window
        named = with_types(call.scalars + (left, right))  # sooner than with stars
        options = named, "attention", type(window), id(call.plan), present
    except (TypeError, ValueError):  # describing says which option is not right
        options = ([],)  # which no cache holds
    known = packed = None
    if optional is not NO_OPTIONAL and optional[_STARTS] is not None:
        packed = _options_of_any_length(k, call, options)
        if packed is not None:
            known = dispatch.calls.match(packed, tensors, any_first=True)
    if known is None:
        known = dispatch.calls.match(options, tensors)
    return known, (tensors, options, packed)


def _bind_and_launch(bound: BoundCall | None, kind: _Kind, call: _Call) -> Result:
    """Describes, plans and binds the first call of a kind, and launches it. Differentiable where
    the kernel is."""
    tensors, options, packed = kind
    q, k, v = tensors[:3]
    given, plan = call.by_name(), call.plan
    bound = bound or _growing(tensors, given, plan, packed, options)
    if bound is None:
        new = partial(_bind, q, k, v, plan, given)
        bound = dispatch.calls.get_or_bind(options, tensors, new)
    return _launch(bound, q, k, v, call)


def _launch(bound: BoundCall, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Result:
    """Launches a call that is bound."""
    optional, scalars = call.optional, call.scalars
    launcher, longest = bound.launcher, scalars[:_LENGTHS]
    scale, softcap = bound.softmax_scale, float(scalars[_SOFTCAP])
    device = bound.device  # None where there is but one; to ask for the current one needs a driver
    if type(launcher) is GrowingSequences and (device is None or device == current_device()):
        return launcher.launch(q, k, v, optional, longest, scale, softcap)
    operands = Operands(q, k, v, *optional)
    operands.seqlen_q, operands.seqlen_k = longest
    operands.softmax_scale, operands.softcap = scale, softcap
    operands.dropout_p = float(scalars[_DROPOUT])
    return bound(operands)


def _options_of_any_length(
    k: Tensor, call: _Call, options: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """Finds by what packed calls are known that differ in lengths alone; None: some length is not
    as it may be, or the call has a plan.

    options   by which it is known itself
    """
    if call.plan is not None or len(options) == 1:
        return None
    table, (longest_q, longest_k) = call.optional[_TABLE], call.scalars[:_LENGTHS]
    if not type(longest_q) is type(longest_k) is int:
        return None
    room = MAX_SIZE if table is None else capacity_of(k, table)
    if not (0 < longest_q <= MAX_SIZE and 0 < longest_k <= room):
        return None
    scalars = options[0]
    return ("of any length", scalars[_LENGTHS:]) + options[2:]


def _growing(
    tensors: list[Tensor],
    given: dict[str, Any],
    plan: Plan | None,
    packed: tuple[Any, ...] | None,
    options: tuple[Any, ...],
) -> BoundCall | None:
    """Finds what serves sequences of every length; None where they are none, the first time that
    they come and where no kernel takes every length.

    packed    what the call is known by without its lengths; None: it is not packed
    options   what it is known by
    """
    if plan is not None or not dispatch.on_a_gpu(tensors[0]):
        return None
    grad = needs_grad(*tensors)
    if grad and (given["page_table"] is not None or given["out"] is not None):
        return None
    is_packed = given["cu_seqlens_q"] is not None
    if (is_packed and packed is None) or given["dropout_p"]:
        return None
    if given["out_scale"] is not None or given["bidirectional_ranges"] is not None:
        return None
    if given["sequence_sink_tokens"] is not None:
        return None
    paged, out = given["page_table"] is not None, given["out"] is not None
    lengths = growing_sequences.lengths_of_tensors(is_packed, paged, out)
    rows: dict[int, int] = {}
    if is_packed and not grad:  # kernels of gradients are bound to a number of sequences
        rows = growing_sequences.rows_of_sequences(tensors, given)
    scales = given["q_scale"], given["k_scale"]
    pattern = growing_sequences.pattern_of_sequences(tensors, lengths, rows, scales)
    if pattern is None:
        return None
    check = partial(growing_sequences.check_of_sequences, lengths=lengths, rows=rows)
    new = partial(_bind_growing, tensors, given, grad)
    known = options if packed is None else packed
    return dispatch.calls.get_or_bind_alike(
        known, tensors, (pattern, grad), check, new, any_first=is_packed
    )


def _bind_growing(tensors: list[Tensor], given: dict[str, Any], grad: bool) -> BoundCall | None:
    problem, operands = describe_attention(*tensors[:3], needs_grad=grad, **given)

    def plan(problem: Problem, operands: Operands) -> Plan:
        return dispatch.plan_for(problem, operands, None)

    kernel = plan(problem, operands).kernel
    if kernel not in (*growing_sequences.SEQUENCES_GROW, *growing_sequences.SEQUENCES_STAY):
        return None
    numbers = {name: given[name] for name in NUMBERS}
    mask = Mask.of(given["causal"], given["window_size"], **numbers)
    kind = GrowingGradients if grad else GrowingSequences
    call = kind(problem, operands, mask, plan)
    return BoundCall.of(call, operands, None)


def _bind(q: Tensor, k: Tensor, v: Tensor, plan: Plan | None, given: dict[str, Any]) -> BoundCall:
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_tensor(name, x)
    grad = needs_grad(q, k, v, given["sink_logits"], given["alibi_slopes"], given["out"])
    problem, operands = describe_attention(q, k, v, needs_grad=grad, **given)
    return BoundCall.of(dispatch.bind(problem, operands, plan), operands, plan)
