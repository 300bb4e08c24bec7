"""A step of a serving engine: sequences with few new tokens, and others with a chunk of a prompt.

What the adapters of engines share, in terms of tensors alone:

    step = Step.of(cu_seqlens_q, seqlens, page_table, num_decodes=6, decode_len=1, ...)
    attend(q, pages, step, out, options)

`Step` is made once a step, by the host from what the host knows; `attend` is called by every layer
and makes one call for the sequences that decode and one for the others, or one for both where that
is balanced in itself. Neither reads a length from the device, and with the same numbers and
addresses a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from splitkv.api import attention_varlen, decode, merge_states, plan
from splitkv.core.plan import SCHEDULED, Plan
from splitkv.planner.policies import DEFAULT
from splitkv.reference import apply_sink_logits, scaled
from splitkv.runtime.call_cache import layout
from splitkv.runtime.growing import keep
from splitkv.runtime.schedule import Schedule, make_schedule

DECODE_POLICY = "SPLITKV_DECODE_POLICY"  # names an environment variable, as engines pass no options
MAX_DECODE_LEN = 16  # new tokens of a sequence that the kernels of decode take
LEAST_BOUND = 256
# New tokens of a step's prompts from which on one call for all sequences is considered: with fewer,
# two calls took less (measurements/prefill.md#steps-of-an-engine).
LEAST_PROMPT = 1024
MAX_PLANS = 1024  # kept of a layer and of layers alike; past it, the first are forgotten


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of a layer as kernels read them.

    k, v              [num_pages, page_size, num_kv_heads, head_dim], any strides but the last
    k_scale, v_scale  fp32, of caches in 8 bits: as `decode` takes them; else None
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """The scales by the names of arguments."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


@dataclass(frozen=True, slots=True)
class Rest:
    """The sequences of a step that do not decode, as `attention_varlen` takes them."""

    cu_seqlens_q: Tensor
    cache_seqlens: Tensor
    page_table: Tensor
    bidirectional_ranges: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Which tokens of a step are whose: first the sequences that decode, then the rest.

    num_decodes    sequences of `decode_len` new tokens each; 0: none
    num_tokens     new tokens of all sequences; rows of q past them are padding
    max_seqlen_q   upper bound of the new tokens of a sequence of the rest
    max_seqlen_k   upper bound of the keys of any sequence
    causal         whether a query sees no later key
    cache_seqlens  [num_decodes] int32; page_table [num_decodes, max_pages] int32
    rest           None: every sequence decodes
    every          all sequences, where some decode and others do not, and these have so many tokens
                   that one call for both may take less; else None
    schedules      those that layers have made, by the handles of their plans, and apart for a CUDA
                   graph: one made before its capture is not made again by a replay
    """

    num_decodes: int
    decode_len: int
    num_tokens: int
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    cache_seqlens: Tensor
    page_table: Tensor
    rest: Rest | None
    every: Rest | None = None
    schedules: dict[tuple[str, bool], Schedule] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(
        cls,
        cu_seqlens_q: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        *,
        num_decodes: int,
        decode_len: int,
        num_tokens: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = True,
    ) -> Step:
        """The step of sequences whose first `num_decodes` have `decode_len` new tokens each.

        cu_seqlens_q   [batch + 1] int32 on the device, of all sequences
        cache_seqlens  [batch] int32 on the device: keys, the new ones included
        page_table     [batch, max_pages] int32 on the device
        """
        decodes = decode_len * num_decodes
        rest = every = None
        if decodes < num_tokens:
            rest = Rest(*rest_of(cu_seqlens_q, cache_seqlens, page_table, num_decodes, decodes))
            if decodes and num_tokens - decodes >= LEAST_PROMPT:
                every = Rest(cu_seqlens_q, cache_seqlens, page_table)
        return cls(
            num_decodes=num_decodes,
            decode_len=decode_len,
            num_tokens=num_tokens,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            cache_seqlens=cache_seqlens[:num_decodes],
            page_table=page_table[:num_decodes],
            rest=rest,
            every=every,
        )

    @property
    def decode_tokens(self) -> int:
        """New tokens of the sequences that decode."""
        return self.num_decodes * self.decode_len

    def schedule_of(self, plan: Plan | None) -> Schedule | None:
        """The schedule of the sequences that decode, made by the first layer with such a plan; None
        where the plan has no schedule."""
        if plan is None or plan.config.schedule not in SCHEDULED:
            return None
        which = plan.handle, is_captured(self.cache_seqlens)
        made = self.schedules.get(which)
        if made is None:
            made = self.schedules[which] = make_schedule(plan, self.cache_seqlens)
        return made

    def with_ranges(self, ranges: Tensor) -> Step:
        """This step with keys that tokens see beside those of the mask, as `attention_varlen` takes
        `bidirectional_ranges`: ranges [batch, ranges, 2] int32 on the device.

        Only for sequences that decode one token each: that has no later key to see.
        """
        if self.rest is None:
            return self
        own = aligned(ranges[self.num_decodes :])
        return replace(self, rest=replace(self.rest, bidirectional_ranges=own), every=None)

    def with_pages(self, page_table: Tensor) -> Step:
        """This step over the pages of other layers: page_table [batch, max_pages]."""
        own, rest, every = page_table[: self.num_decodes], self.rest, self.every
        if rest is not None:
            rest = replace(rest, page_table=aligned(page_table[self.num_decodes :]))
        if every is not None:
            every = replace(every, page_table=page_table)
        return replace(self, page_table=own, rest=rest, every=every)


def rest_of(
    cu_seqlens_q: Tensor, cache_seqlens: Tensor, page_table: Tensor, decodes: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """cu_seqlens_q, cache_seqlens and page_table of the sequences after the first `decodes`, which
    have `tokens`; as they are, where these are none."""
    if not decodes:
        return cu_seqlens_q, cache_seqlens, page_table
    starts = cu_seqlens_q[decodes:] - tokens
    return starts, aligned(cache_seqlens[decodes:]), aligned(page_table[decodes:])


def is_captured(x: Tensor) -> bool:
    """Whether what is launched where x lies goes into a CUDA graph now: not in a process that only
    compiles, which may have no driver to ask."""
    cuda = torch.cuda
    return x.is_cuda and cuda.is_initialized() and cuda.is_current_stream_capturing()


def aligned(x: Tensor) -> Tensor:
    """x, copied where it does not begin at a multiple of 16 bytes, which is another specialisation
    of every Triton kernel."""
    return x.clone() if x.storage_offset() * x.element_size() % 16 else x


def bound_of(length: int, most: int) -> int:
    """An upper bound of `length` that changes seldom while sequences grow, at most `most`: calls
    are described and planned once for each."""
    step = max(LEAST_BOUND, 1 << max(length.bit_length() - 3, 0))
    return min(-(-length // step) * step, most)


def bound_of_new(tokens: int, most: int) -> int:
    """An upper bound of the new tokens of a sequence, at most `most`: a power of two, as chunks
    have any length and what is planned for them hardly depends on it."""
    return min(1 << max(tokens - 1, 0).bit_length(), most)


class Plans:
    """Plans of a policy by name, one for each kind of call of a layer.

    policy   "": the default policy, which needs none but for a schedule that layers share
    calls    the calls that it is for: "decode", and "rest"
    """

    def __init__(self, policy: str = "", calls: Collection[str] = ("decode", "rest")) -> None:
        self.policy, self.calls = policy, calls
        self._made: OrderedDict[Any, Plan | None] = OrderedDict()

    def policy_of(self, call: str) -> str:
        """The policy of one of `calls` by name; "": the default."""
        return self.policy if call in self.calls else ""

    def of(self, kind: tuple[Any, ...], *tensors: Any, **arguments: Any) -> Plan | None:
        """The plan for a call with these arguments.

        kind   the call, and what tells it from others
        """
        if kind[0] not in self.calls or not (self.policy or kind[0] == "decode"):
            return None
        if kind in self._made:
            return self._made[kind]
        made = plan_of_layers_alike(self.policy or DEFAULT, kind, tensors, arguments)
        needed = self.policy or made.config.schedule in SCHEDULED
        found = made if needed else None
        keep(self._made, kind, found, MAX_PLANS)
        return found


DEFAULT_PLANS = Plans(calls=())


def plans_of_engine(same_bits: bool) -> Plans:
    """The plans of an engine's layer: with `same_bits` those of `batch_invariant`, else for steps
    that decode of the policy that DECODE_POLICY names, or of `scheduled`."""
    if same_bits:
        return Plans("batch_invariant")
    return Plans(os.environ.get(DECODE_POLICY, "scheduled"), ["decode"])


def plan_of_layers_alike(
    policy: str, kind: tuple[Any, ...], tensors: tuple[Any, ...], arguments: dict[str, Any]
) -> Plan:
    """`splitkv.plan` for a call of a layer, asked once for all layers whose call is alike: whose
    tensors are laid out alike, and whose other arguments are equal."""
    values = *tensors, *arguments.values()
    key = policy, kind, *arguments, *(layout(x) if isinstance(x, Tensor) else x for x in values)
    made = _planned.get(key)
    if made is None:
        made = plan(*tensors, policy=policy, **arguments)
        keep(_planned, key, made, MAX_PLANS)
    return made


_planned: OrderedDict[Any, Plan] = OrderedDict()


def attend(
    q: Tensor,
    pages: Pages,
    step: Step,
    out: Tensor,
    options: dict[str, Any],
    plans: Plans = DEFAULT_PLANS,
) -> None:
    """Attention of a step's new tokens, whose keys and values are in their pages already.

    q        [tokens, num_heads, head_dim]; rows past step.num_tokens are padding
    out      [tokens, num_heads, head_dim_v], which is written, but for the padding
    options  arguments that `decode` and `attention_varlen` share, causal and the scales of q, keys
             and values not among them
    """
    options = {**options, **pages.scales, "causal": step.causal}
    n = step.decode_tokens
    if step.every is not None and not plans.policy_of("rest"):
        tokens, every = step.num_tokens, step.every
        tensors, by_name = of_sequences(every, q[:tokens], pages, step, options)
        if is_one_launch(step, every, tensors, by_name):
            attention_varlen(*tensors, **by_name, out=out[:tokens])
            return
    if step.num_decodes:
        shape = step.num_decodes, step.decode_len
        rows = q[:n].unflatten(0, shape)
        arguments: dict[str, Any] = {
            **options,
            "cache_seqlens": step.cache_seqlens,
            "page_table": step.page_table,
            "max_seqlen_k": step.max_seqlen_k,
        }
        kind = "decode", shape, step.causal, step.max_seqlen_k
        made = plans.of(kind, rows, pages.k, pages.v, **arguments)
        schedule = step.schedule_of(made)
        by = {"plan": made} if schedule is None else {"schedule": schedule}
        decode(rows, pages.k, pages.v, **arguments, out=out[:n].unflatten(0, shape), **by)
    if step.rest is not None:
        of_rest(q[n : step.num_tokens], pages, step, out[n : step.num_tokens], options, plans)


def of_rest(
    q: Tensor, pages: Pages, step: Step, out: Tensor, options: dict[str, Any], plans: Plans
) -> None:
    """The sequences of a step that do not decode: q and out are theirs."""
    rest = step.rest
    assert rest is not None
    tensors, arguments = of_sequences(rest, q, pages, step, options)
    ranged = rest.bidirectional_ranges is not None
    kind = "rest", q.shape[0], rest.cache_seqlens.shape[0], step.causal, ranged
    attention_varlen(*tensors, **arguments, out=out, plan=plans.of(kind, *tensors, **arguments))


def of_sequences(
    sequences: Rest, q: Tensor, pages: Pages, step: Step, options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `attention_varlen` for sequences of a step whose tokens are q: (those by
    place, those by name)."""
    arguments: dict[str, Any] = {
        **options,
        "page_table": sequences.page_table,
        "cache_seqlens": sequences.cache_seqlens,
        "bidirectional_ranges": sequences.bidirectional_ranges,
    }
    bounds = step.max_seqlen_q, step.max_seqlen_k
    return (q, pages.k, pages.v, sequences.cu_seqlens_q, None, *bounds), arguments


def is_one_launch(
    step: Step, every: Rest, tensors: tuple[Any, ...], arguments: dict[str, Any]
) -> bool:
    """Whether `attention_varlen` balances a whole step by a schedule of items: planned once for
    layers alike and about as many sequences."""
    q, k = tensors[:2]
    told = (x if isinstance(x, (int, float, tuple)) else x is None for x in arguments.values())
    batch = every.cache_seqlens.shape[0].bit_length()
    layer = q.shape[1:], q.dtype, k.shape[1:], k.dtype, q.device
    key = step.max_seqlen_q, step.max_seqlen_k, batch, *layer, *told
    found = _one_launch.get(key)
    if found is None:
        found = plan(*tensors, **arguments).config.schedule == "items"
        keep(_one_launch, key, found, MAX_PLANS)
    return found


_one_launch: OrderedDict[Any, bool] = OrderedDict()


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    out: Tensor,
    options: dict[str, Any],
    plans: Plans = DEFAULT_PLANS,
) -> None:
    """Attention of whole sequences, whose keys need not be in a cache, as of an encoder.

    q, k, v, out  [tokens, heads, dim], all tokens of sequences laid end to end
    cu_seqlens    [batch + 1] int32 on the device; max_seqlen: upper bound of their lengths
    options       arguments of `attention_varlen`
    """
    tensors = q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    kind = "rest", "packed", q.shape[0], cu_seqlens.shape[0], options["causal"], max_seqlen
    attention_varlen(*tensors, **options, out=out, plan=plans.of(kind, *tensors, **options))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A step all of whose sequences begin with the same keys, in the same pages.

    prefix_len      keys that they share, a multiple of the page size; seqlen [1] int32 on the
                    device: the same
    cu_seqlens_q    [2] int32 on the device: 0 and the tokens of the step
    page_table      [1, prefix pages] int32: those of the prefix
    suffix          the step without the prefix: its lengths and pages are of what follows
    """

    prefix_len: int
    seqlen: Tensor
    cu_seqlens_q: Tensor
    page_table: Tensor
    suffix: Step

    @classmethod
    def of(
        cls,
        cu_seqlens_q: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        prefix_len: int,
        page_size: int,
        **numbers: int,
    ) -> SharedPrefix:
        """Divides the sequences of a step, as `Step.of` takes them, into prefix and suffix.

        numbers   num_tokens, max_seqlen_q, max_seqlen_k: the latter with the prefix

        Allocates on the device and copies two numbers there: not inside a CUDA graph.
        """
        shared = prefix_len // page_size
        suffix = Step.of(
            cu_seqlens_q,
            cache_seqlens - prefix_len,
            aligned(page_table[:, shared:]),
            num_decodes=0,
            decode_len=1,
            num_tokens=numbers["num_tokens"],
            max_seqlen_q=numbers["max_seqlen_q"],
            max_seqlen_k=numbers["max_seqlen_k"] - prefix_len,
        )
        bounds = cu_seqlens_q.new_tensor([0, numbers["num_tokens"]])
        seqlen = cache_seqlens.new_tensor([prefix_len])
        return cls(prefix_len, seqlen, bounds, page_table[:1, :shared], suffix)


def attend_with_prefix(
    q: Tensor, pages: Pages, shared: SharedPrefix, out: Tensor, options: dict[str, Any]
) -> None:
    """`attend` of a step with a shared prefix, which is read once for all of its sequences.

    options   as of `attend`, without a window and ALiBi, which need positions; sink logits join
              when the two are merged
    """
    step, n = shared.suffix, shared.suffix.num_tokens
    given = {**options, **pages.scales, "return_lse": True}
    sink_logits, out_scale = given.pop("sink_logits", None), given.pop("out_scale", None)
    q, out = q[:n], out[:n]
    of_prefix = attention_varlen(
        q,
        pages.k,
        pages.v,
        shared.cu_seqlens_q,
        None,
        n,
        shared.prefix_len,
        page_table=shared.page_table,
        cache_seqlens=shared.seqlen,
        **given,
        causal=False,
    )
    rest = step.rest
    assert rest is not None
    of_suffix = attention_varlen(
        q,
        pages.k,
        pages.v,
        rest.cu_seqlens_q,
        None,
        step.max_seqlen_q,
        step.max_seqlen_k,
        page_table=rest.page_table,
        cache_seqlens=rest.cache_seqlens,
        **given,
        causal=True,
    )
    merge_into(out, (*of_prefix, *of_suffix), sink_logits, out_scale)


def merge_into(
    out: Tensor, states: tuple[Tensor, ...], sink_logits: Tensor | None, out_scale: Tensor | None
) -> None:
    """Merges states into `out`, which is of their type, or with a scale of 8 bits."""
    if out_scale is None:
        merge_states(*states, sink_logits=sink_logits, out=out)
    else:
        out.copy_(scaled(merge_states(*states, sink_logits=sink_logits)[0], out_scale))


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks with the same KV heads and query heads of their own, that share out every sequence's
    keys.

    gather    gather(q): of q [tokens, num_heads, head_dim] of each rank [tokens, ranks * num_heads,
              head_dim], the heads of the first rank first
    combine   combine(out, lse): of out [tokens, ranks * num_heads, head_dim_v] and lse
              [ranks * num_heads, tokens] over each rank's keys, this rank's heads of both over all
    """

    gather: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def attend_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    step: Step,
    causal: bool,
    out: Tensor,
    options: dict[str, Any],
    ranks: Ranks,
) -> None:
    """`attend` where the keys of a sequence are on several ranks, each token's on one.

    q, k, v   [tokens, num_heads or num_kv_heads, head_dim] of the step's tokens, on every rank with
              its own query heads; rows past step.num_tokens are padding
    pages     this rank's keys, those of the step among them
    step      not causal, with the keys on this rank: of sequences that decode, one new token each,
              all of them; of the rest those before the step
    causal    whether the rest's new tokens, which are taken from k and v, see no later one
    out       as of `attend`
    options   as of `attend`, without a window and ALiBi, which need positions

    Every rank has to call it for the same tokens. Sink logits, of this rank's heads, join last.
    """
    plain = dict(options)
    sink_logits, out_scale = plain.pop("sink_logits", None), plain.pop("out_scale", None)
    n, total, rest = step.decode_tokens, step.num_tokens, step.rest
    seen, lse = ranks.combine(*over_pages(ranks.gather(q[:total]), pages, step, plain))
    if n:
        result = seen[:n]
        if sink_logits is not None:
            result = apply_sink_logits(result, lse[:, :n], sink_logits)
        out[:n].copy_(result if out_scale is None else scaled(result, out_scale))
    if rest is None:
        return
    starts, most = rest.cu_seqlens_q, step.max_seqlen_q
    tensors = *(x[n:total] for x in (q, k, v)), starts, starts, most, most
    own = attention_varlen(*tensors, **plain, causal=causal, return_lse=True)
    states = *own, seen[n:], lse[:, n:]
    merge_into(out[n:total], states, sink_logits, out_scale)


def over_pages(
    q: Tensor, pages: Pages, step: Step, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(out [tokens, num_heads, head_dim_v], lse [num_heads, tokens]) of a step's tokens."""
    options = {**options, **pages.scales, "causal": step.causal, "return_lse": True}
    n, outs, lses = step.decode_tokens, [], []
    if n:
        made, lse = decode(
            q[:n].unflatten(0, (step.num_decodes, step.decode_len)),
            pages.k,
            pages.v,
            **options,
            cache_seqlens=step.cache_seqlens,
            page_table=step.page_table,
            max_seqlen_k=step.max_seqlen_k,
        )
        outs.append(made.flatten(0, 1))
        lses.append(lse.transpose(0, 1).flatten(1))
    if step.rest is not None:
        made, lse = attention_varlen(
            q[n:],
            pages.k,
            pages.v,
            step.rest.cu_seqlens_q,
            None,
            step.max_seqlen_q,
            step.max_seqlen_k,
            **options,
            page_table=step.rest.page_table,
            cache_seqlens=step.rest.cache_seqlens,
        )
        outs.append(made)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0], lses[0]
    return torch.cat(outs), torch.cat(lses, dim=1)
