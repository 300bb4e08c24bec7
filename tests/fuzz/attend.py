"""`attention`, `attention_varlen` and `decode`, under plans of every kind."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import splitkv
from fuzz.draw import (
    GRANULARITIES,
    STORED,
    Draw,
    Drawn,
    Shape,
    Stored,
    bytes_of,
    modifiers,
    out_scale_of,
    poison,
    quantised,
    ranges_of,
    same_bits,
    shape,
    slopes_of,
    strided,
)
from fuzz.judging import E4M3, Leaves, Question, packed, stacked
from fuzz.oracle import Asked, Sequence, Wrong
from splitkv.core.errors import UnsupportedProblem
from splitkv.kernels import records
from splitkv.planner.legality import is_legal
from splitkv.planner.policies import POLICIES
from splitkv.planner.policies.fixed import with_split_size
from splitkv.planner.registry import KERNELS

PRODUCTS = ("widened", "half", "full")
DEFAULT_PRODUCTS = {"int8": "half", "fp8": "widened"}
IN_8_BITS, RANGED = 0.12, 0.15  # of calls: with an out_scale, with bidirectional ranges
TYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def codec(d: Draw, granularities: tuple[str, ...], chance: float) -> tuple[Any, str, str, str]:
    """("int8" or "fp8" or None, granularity, products, granularity of q or "")."""
    v = d.variant
    quantise, kind = v.random() < chance, v.choice(("int8", "fp8"))
    granularity, products = v.choice(granularities), v.choice((*PRODUCTS, None))
    of_q = v.choice(("", "", v.choice(granularities)))
    return (kind if quantise else None), granularity, products, of_q


def dense(d: Draw) -> Drawn:
    """attention."""
    grad_drawn, lse = d.variant.random() < 0.6, d.variant.random() < 0.5
    deterministic, in_8_bits = d.variant.random() < 0.15, d.variant.random() < IN_8_BITS
    kind, granularity, products, of_q = codec(d, GRANULARITIES, 0.2)
    of = shape(d, TYPES)
    batch = d.rng.choice((1, d.rng.randint(0 if d.chance(0.1) else 1, d.sizes.batch)))
    seqlen_k = d.length()
    most_q = min(d.sizes.seqlen_q, max(1, d.sizes.rows // (of.heads * max(batch, 1))))
    seqlen_q = d.rng.choice((d.length(most_q), min(seqlen_k, most_q)))
    extra = modifiers(d, of, batch, own_sinks=True)
    tensors: dict[str, Tensor] = {"q": d.randn(batch, seqlen_q, of.heads, of.dim, dtype=of.dtype)}
    stored: dict[str, Stored] = {}
    kwargs: dict[str, Any] = {}
    for name, dim in (("k", of.dim), ("v", of.dim_v)):
        x = d.randn(batch, seqlen_k, of.kv_heads, dim, dtype=of.dtype)
        if kind is not None:
            stored[name] = quantised(d, x, kind, granularity)
            x, kwargs[f"{name}_scale"] = stored[name].x, stored[name].scale
        tensors[name] = x
    asked, dtype = extra.asked, of.dtype
    if kind is not None:
        asked, dtype = with_codec(d, kind, products, of_q, tensors, stored, kwargs, asked, dtype)
    if d.chance(0.25):
        tensors = {name: strided(d, x, d.rng.choice((8, 8, 3))) for name, x in tensors.items()}
    kwargs |= tensors | extra.kwargs
    if lse:
        kwargs["return_lse"] = True
    if deterministic:
        kwargs["deterministic"] = True
    gradients: tuple[str, ...] = ()
    if in_8_bits:
        kwargs["out_scale"] = out_scale_of(d)
    elif grad_drawn and (kind is None or asked.products == "widened"):
        names = [n for n in ("q", "k", "v", "sink_logits") if n in kwargs]
        names = [n for n in names if kwargs[n].is_floating_point() and kwargs[n].itemsize > 1]
        if d.chance(0.2):
            names = d.rng.sample(names, d.rng.randint(0, len(names)))
        gradients = tuple(names)
        for name in names:
            kwargs[name].requires_grad_()

    def sequences(x: Leaves) -> list[Sequence]:
        return [
            Sequence(
                exact_of("q", x, stored)[b],
                exact_of("k", x, stored)[b],
                exact_of("v", x, stored)[b],
                slopes_of(x, b),
                x.get("sink_logits"),
                v_scale_of(stored, b),
                extra.sinks_of(b),
            )
            for b in range(batch)
        ]

    nothing = (
        torch.empty(0, seqlen_q, of.heads, of.dim_v, device=d.device),
        torch.empty(0, of.heads, seqlen_q, device=d.device),
    )
    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        stacked,
        dtype,
        return_lse=lse,
        out_scale=kwargs.get("out_scale"),
        gradients=gradients if batch else (),
        seed=d.index,
        empty=nothing,
    )
    return planned(d, Drawn("attention", splitkv.attention, kwargs, question.judge))


def leaves_of(kwargs: dict[str, Any]) -> Leaves:
    return {name: x for name, x in kwargs.items() if isinstance(x, Tensor)}


def exact_of(name: str, x: Leaves, stored: dict[str, Stored]) -> Tensor:
    return stored[name].exact if name in stored else x[name]


def v_scale_of(stored: dict[str, Stored], which: Any) -> Tensor | None:
    return stored["v"].each[which] if "v" in stored else None


def with_codec(
    d: Draw,
    kind: str,
    products: Any,
    of_q: str,
    tensors: dict[str, Tensor],
    stored: dict[str, Stored],
    kwargs: dict[str, Any],
    asked: Asked,
    dtype: torch.dtype,
) -> tuple[Asked, torch.dtype]:
    """What is rounded beside quantised keys; q may be quantised, too."""
    if products is not None:
        kwargs["products"] = products
    if of_q:
        stored["q"] = quantised(d, tensors["q"], kind, of_q)
        tensors["q"], kwargs["q_scale"] = stored["q"].x, stored["q"].scale
        dtype = torch.bfloat16
    products = products or DEFAULT_PRODUCTS[kind]
    return replace(asked, stored=STORED[kind], products=products, q_stored=bool(of_q)), dtype


# Packed sequences


def with_ranges(
    d: Draw, ranged: bool, keys: list[int], kwargs: dict[str, Any]
) -> list[tuple[tuple[int, int], ...]]:
    """The bidirectional ranges of each sequence, which the call is given, too."""
    if not ranged:
        return [()] * len(keys)
    ranges = ranges_of(d, keys)
    kwargs["bidirectional_ranges"] = d.index_of(ranges).view(len(keys), -1, 2)
    return ranges


def bounds(lengths: list[int]) -> list[int]:
    total = [0]
    for n in lengths:
        total.append(total[-1] + n)
    return total


def ragged(d: Draw) -> Drawn:
    """attention_varlen of packed keys."""
    v = d.variant
    grad_drawn, lse, deterministic = v.random() < 0.6, v.random() < 0.5, v.random() < 0.15
    in_8_bits, ranged = v.random() < IN_8_BITS, v.random() < RANGED
    granularities = ("tensor", "head", "token")
    kind, granularity, products, of_q = codec(d, granularities, 0.2)
    of = shape(d, TYPES)
    batch = d.rng.randint(1, d.sizes.batch)
    most_q = min(d.sizes.seqlen_q, max(1, d.sizes.rows // (of.heads * batch)))
    alike = d.chance(0.4)  # as many queries as keys
    keys = [d.length() for _ in range(batch)]
    queries = [min(n, most_q) if alike else d.length(most_q) for n in keys]
    starts_q, starts_k = bounds(queries), bounds(keys)
    spare = d.rng.choice((0, 0, 0, d.rng.randint(1, 5)))
    total_q, total_k = starts_q[-1] + spare, starts_k[-1] + spare
    extra = modifiers(d, of, batch, own_sinks=True)
    tensors = {"q": d.randn(total_q, of.heads, of.dim, dtype=of.dtype)}
    stored: dict[str, Stored] = {}
    kwargs: dict[str, Any] = {}
    for name, dim in (("k", of.dim), ("v", of.dim_v)):
        x = d.randn(total_k, of.kv_heads, dim, dtype=of.dtype)
        if kind is not None:
            stored[name] = quantised(d, x, kind, granularity)
            x, kwargs[f"{name}_scale"] = stored[name].x, stored[name].scale
        tensors[name] = x
    asked, dtype = extra.asked, of.dtype
    if kind is not None:
        asked, dtype = with_codec(d, kind, products, of_q, tensors, stored, kwargs, asked, dtype)
    if d.chance(0.25):
        tensors = {name: strided(d, x, d.rng.choice((8, 8, 3))) for name, x in tensors.items()}
    over = d.rng.choice((0, 0, d.rng.randint(1, 100)))
    kwargs |= tensors | extra.kwargs
    kwargs |= {
        "cu_seqlens_q": d.index_of(starts_q),
        "cu_seqlens_k": d.index_of(starts_k),
        "max_seqlen_q": max(queries) + over,
        "max_seqlen_k": max(keys) + over,
    }
    ranges = with_ranges(d, ranged, keys, kwargs)
    if lse:
        kwargs["return_lse"] = True
    if deterministic:
        kwargs["deterministic"] = True
    gradients: tuple[str, ...] = ()
    if in_8_bits:
        kwargs["out_scale"] = out_scale_of(d)
    elif grad_drawn and (kind is None or asked.products == "widened"):
        names = [n for n in ("q", "k", "v", "sink_logits") if n in kwargs]
        gradients = tuple(
            n for n in names if kwargs[n].is_floating_point() and kwargs[n].itemsize > 1
        )
        for name in gradients:
            kwargs[name].requires_grad_()

    def sequences(x: Leaves) -> list[Sequence]:
        q, k, v = (exact_of(name, x, stored) for name in "qkv")
        return [
            Sequence(
                q[starts_q[b] : starts_q[b + 1]],
                k[starts_k[b] : starts_k[b + 1]],
                v[starts_k[b] : starts_k[b + 1]],
                slopes_of(x, b),
                x.get("sink_logits"),
                v_scale_of(stored, slice(starts_k[b], starts_k[b + 1])),
                extra.sinks_of(b),
                ranges[b],
            )
            for b in range(batch)
        ]

    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        packed(total_q, starts_q[:-1]),
        dtype,
        return_lse=lse,
        out_scale=kwargs.get("out_scale"),
        gradients=gradients,
        seed=d.index,
    )
    return planned(d, Drawn("attention_varlen", splitkv.attention_varlen, kwargs, question.judge))


# Caches


class Cache:
    """k and v of sequences of these lengths, contiguous or in pages, NaN wherever no key is; scales
    beside them."""

    def __init__(
        self,
        d: Draw,
        of: Shape,
        lengths: list[int],
        capacity: int,
        page_size: int | None,
        kind: str | None,
        granularity: str,
        poisoned: bool = True,
    ) -> None:
        self.lengths, self.page_size, self.capacity = lengths, page_size, capacity
        batch = len(lengths)
        self.table: Tensor | None = None
        rows, keys = batch, capacity
        self.pages: list[list[int]] = [[b] for b in range(batch)]
        if page_size is not None:
            each = -(-capacity // page_size)
            rows, keys = batch * each + d.rng.randint(0, 3), page_size
            order = d.rng.sample(range(rows), batch * each)
            self.pages = [order[b * each : (b + 1) * each] for b in range(batch)]
            garbage = (-1, rows, 2**31 - 1, -(2**31), 0)
            listed = [
                [
                    p if i * page_size < n or not poisoned else d.rng.choice(garbage)
                    for i, p in enumerate(pages)
                ]
                for pages, n in zip(self.pages, lengths, strict=True)
            ]
            self.table = d.index_of(listed).view(batch, each)
        self.tensors: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.stored: dict[str, Stored] = {}
        self.each: dict[str, Tensor] = {}
        used = torch.zeros(rows, keys, dtype=torch.bool)
        for pages, n in zip(self.pages, lengths, strict=True):
            for i, page in enumerate(pages):
                used[page, : max(0, min(keys, n - i * keys))] = True
        unused = ~used.to(d.device)
        for name, dim in (("k", of.dim), ("v", of.dim_v)):
            x = d.randn(rows, keys, of.kv_heads, dim, dtype=of.dtype)
            if kind is not None:
                by = "head" if granularity == "sequence" else granularity
                made = quantised(d, x, kind, by)
                x, scale = made.x, made.scale
                if granularity == "sequence":  # of sequences, not of pages
                    scale = (d.rand(batch, of.kv_heads) + 0.5) * made.scale.mean()
                elif granularity == "token" and poisoned:
                    scale = scale.clone()
                    scale[unused] = float("nan")
                self.scales[f"{name}_scale"] = scale
                self.stored[name] = made
            if poisoned:
                bad = poison(torch.empty_like(x))
                bytes_of(x)[unused] = bytes_of(bad)[unused]
            self.tensors[name] = x
        self.granularity = granularity

    def lay(self, d: Draw) -> None:
        """Strides of slices."""
        gap = d.rng.choice((8, 16, 3))
        self.tensors = {name: strided(d, x, gap) for name, x in self.tensors.items()}

    def keys_of(self, name: str, x: Tensor, b: int) -> Tensor:
        """k or v [L_k, H_kv, D] of a sequence, times its scales."""
        keys = self.first_keys(x, b)
        if name not in self.stored:
            return keys
        return keys.float().double() * self.scale_of(name, b)[..., None]

    def first_keys(self, x: Tensor, b: int) -> Tensor:
        """Of pages [rows, keys, ...] those of a sequence, one after another."""
        pages = torch.tensor(self.pages[b], device=x.device)
        return bytes_of(x)[pages].view(x.dtype).flatten(0, 1)[: self.lengths[b]]

    def scale_of(self, name: str, b: int) -> Tensor:
        """[L_k, H_kv] float64."""
        scale, heads = self.scales[f"{name}_scale"].double(), self.tensors[name].shape[2]
        if self.granularity == "token":
            return self.first_keys(scale, b)
        scale = scale[b] if self.granularity == "sequence" else scale.reshape(-1)
        return scale.expand(self.lengths[b], heads)

    def v_scales(self, b: int) -> Tensor | None:
        return self.scale_of("v", b) if "v" in self.stored else None


PAGE_SIZES = (None, None, None, 1, 16, 16, 64, 0)  # 0: any


def page_size_of(d: Draw) -> int | None:
    size = d.variant.choice(PAGE_SIZES)
    other = d.variant.randint(2, 40 if d.where == "interpret" else 300)
    return other if size == 0 else size


def decode(d: Draw) -> Drawn:
    v = d.variant
    page_size = page_size_of(d)
    kind, granularity, products, of_q = codec(d, GRANULARITIES, 0.35)
    tokens_of = v.choice(((1,), (1,), (1, 2), (3, 4), (v.randint(1, 16),)))
    lse, host, with_out = v.random() < 0.5, v.random() < 0.25, v.random() < 0.25
    in_8_bits = v.random() < IN_8_BITS
    of = shape(d, TYPES)
    tokens = d.rng.choice(tokens_of)
    most = max(1, d.sizes.rows // (of.heads * tokens))
    batch = min(most, d.rng.choice((1, d.rng.randint(1, d.sizes.batch))))
    capacity = max(1, d.length())
    bound = capacity if d.chance(0.6) else d.rng.randint(0 if d.chance(0.2) else 1, capacity)
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size
    lengths = [bound] * batch if host else [d.length(bound) for _ in range(batch)]
    extra = modifiers(d, of, batch, own_sinks=True)
    cache = Cache(d, of, lengths, capacity, page_size, kind, granularity)
    if d.chance(0.2):
        cache.lay(d)
    tensors = {"q": d.randn(batch, tokens, of.heads, of.dim, dtype=of.dtype)}
    kwargs: dict[str, Any] = dict(cache.scales)
    asked, dtype = extra.asked, of.dtype
    of_queries: dict[str, Stored] = {}
    if kind is not None:
        asked, dtype = with_codec(
            d, kind, products, of_q, tensors, of_queries, kwargs, asked, dtype
        )
    q = tensors["q"]
    if d.chance(0.2):
        q = strided(d, q)
    kwargs |= {"q": q, "k_cache": cache.tensors["k"], "v_cache": cache.tensors["v"]}
    kwargs |= extra.kwargs
    if cache.table is not None:
        kwargs["page_table"] = cache.table
    if not host:
        kwargs["cache_seqlens"] = d.index_of(lengths)
    if bound != capacity or d.chance(0.2):
        kwargs["max_seqlen_k"] = bound
    if lse:
        kwargs["return_lse"] = True
    if d.chance(0.1):
        kwargs["early_kv"] = True
    if in_8_bits:
        kwargs["out_scale"] = out_scale_of(d)
    writes: tuple[str, ...] = ()
    checks = []
    if with_out:
        whole = torch.full((batch, tokens + 1, of.heads, of.dim_v + 8), 7.0, device=d.device)
        whole = whole.to(E4M3 if in_8_bits else dtype)
        kwargs["out"] = whole[:, :tokens, :, : of.dim_v]
        writes = ("out",)

        def beside(result: Any) -> None:
            out = result[0] if lse else result
            if out.data_ptr() != kwargs["out"].data_ptr() or not same_bits(out, kwargs["out"]):
                raise Wrong("out: expected the result in the tensor that was given")
            rest = whole.clone()
            rest[:, :tokens, :, : of.dim_v] = 7.0
            if not same_bits(rest, torch.full_like(rest, 7.0)):
                raise Wrong("out: something beside it was written")

        checks.append(beside)
    gradients: tuple[str, ...] = ()
    if d.chance(0.05) and not with_out and kind is None and not in_8_bits:
        gradients = ("q",)
        kwargs["q"].requires_grad_()

    def sequences(x: Leaves) -> list[Sequence]:
        return [
            Sequence(
                exact_of("q", x, of_queries)[b],
                cache.keys_of("k", x["k_cache"], b),
                cache.keys_of("v", x["v_cache"], b),
                slopes_of(x, b),
                x.get("sink_logits"),
                cache.v_scales(b),
                extra.sinks_of(b),
            )
            for b in range(batch)
        ]

    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        stacked,
        dtype,
        return_lse=lse,
        out_scale=kwargs.get("out_scale"),
        gradients=gradients,
        seed=d.index,
        checks=checks,
    )
    drawn = Drawn("decode", splitkv.decode, kwargs, question.judge, writes)
    return planned(d, drawn, splits=True)


def paged(d: Draw) -> Drawn:
    """attention_varlen of keys in pages."""
    v = d.variant
    page_size = page_size_of(d) or 16
    kind, granularity, products, of_q = codec(d, GRANULARITIES, 0.3)
    lse, grad_drawn = v.random() < 0.5, v.random() < 0.1
    in_8_bits, ranged = v.random() < IN_8_BITS, v.random() < RANGED
    of_q = of_q if of_q != "sequence" else "head"
    of = shape(d, TYPES)
    batch = d.rng.randint(1, d.sizes.batch)
    most_q = min(d.sizes.seqlen_q, max(1, d.sizes.rows // (of.heads * batch)))
    keys = [d.length() for _ in range(batch)]
    queries = [d.rng.choice((min(1, most_q), d.length(most_q))) for _ in keys]
    capacity = -(-max(1, *keys) // page_size) * page_size
    starts = bounds(queries)
    extra = modifiers(d, of, batch, own_sinks=True)
    cache = Cache(d, of, keys, capacity, page_size, kind, granularity)
    if d.chance(0.2):
        cache.lay(d)
    tensors = {"q": d.randn(starts[-1], of.heads, of.dim, dtype=of.dtype)}
    kwargs: dict[str, Any] = dict(cache.scales)
    asked, dtype = extra.asked, of.dtype
    of_queries: dict[str, Stored] = {}
    if kind is not None:
        asked, dtype = with_codec(
            d, kind, products, of_q, tensors, of_queries, kwargs, asked, dtype
        )
    kwargs |= {"q": tensors["q"], "k": cache.tensors["k"], "v": cache.tensors["v"]}
    kwargs |= extra.kwargs
    kwargs |= {
        "cu_seqlens_q": d.index_of(starts),
        "cu_seqlens_k": None,
        "max_seqlen_q": max(queries) + d.rng.choice((0, 3)),
        "max_seqlen_k": d.rng.choice((max(keys), capacity)),
        "page_table": cache.table,
        "cache_seqlens": d.index_of(keys),
    }
    ranges = with_ranges(d, ranged, keys, kwargs)
    if lse:
        kwargs["return_lse"] = True
    gradients: tuple[str, ...] = ()
    if in_8_bits:
        kwargs["out_scale"] = out_scale_of(d)
    elif grad_drawn and kind is None:
        gradients = ("q",)
        kwargs["q"].requires_grad_()

    def sequences(x: Leaves) -> list[Sequence]:
        return [
            Sequence(
                exact_of("q", x, of_queries)[starts[b] : starts[b + 1]],
                cache.keys_of("k", x["k"], b),
                cache.keys_of("v", x["v"], b),
                slopes_of(x, b),
                x.get("sink_logits"),
                cache.v_scales(b),
                extra.sinks_of(b),
                ranges[b],
            )
            for b in range(batch)
        ]

    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        packed(starts[-1], starts[:-1]),
        dtype,
        return_lse=lse,
        out_scale=kwargs.get("out_scale"),
        gradients=gradients,
        seed=d.index,
    )
    return planned(d, Drawn("attention_varlen", splitkv.attention_varlen, kwargs, question.judge))


# Plans


def planned(d: Draw, drawn: Drawn, splits: bool = False) -> Drawn:
    """The call as it is, with a number of splits, or under a plan: of a policy, of parts of a fixed
    size, or with a config changed by hand."""
    v = d.variant
    way = v.choice(("", "", "", "splits", "policy", "size", "config", "config"))
    policy, place, shape_of, how = v.choice([*POLICIES]), v.random(), v.random(), v.random()
    number = d.rng.choice((1, 2, 3, 5, d.rng.randint(1, 100)))
    if not way or (way == "splits" and not splits):
        return drawn
    if way == "splits":
        drawn.kwargs["num_splits"] = number
        return drawn
    function, made = drawn.function, []
    size = 16 * d.rng.randint(1, 40) if d.chance(0.5) else d.rng.randint(1, 600)
    hand = d.rng.getrandbits(60), place, shape_of, how

    def run(**kwargs: Any) -> Any:
        if not made:
            asked = {n: x for n, x in kwargs.items() if n not in ("q", "k", "v", "num_splits")}
            names = ("q", "k_cache", "v_cache") if splits else ("q", "k", "v")
            tensors = [kwargs[n] for n in names]
            asked = {n: x for n, x in asked.items() if n not in names}
            if drawn.name == "attention":
                asked["dense"] = True
            chosen = with_split_size(size) if way == "size" else policy
            try:
                plan = splitkv.plan(*tensors, policy=chosen, **asked)
            except ValueError as error:
                if way == "size" and str(error).startswith("split_size: expected at least"):
                    raise UnsupportedProblem(
                        "a plan", d.device, [("fixed", [str(error)])]
                    ) from None
                raise
            made.append(by_hand(plan, *hand) if way == "config" else plan)
            str(made[0])
        try:
            return function(**kwargs, plan=made[0])
        except ValueError as error:
            if str(error).startswith("plan: expected a kernel without"):
                raise UnsupportedProblem("a plan", d.device, [("plan", [str(error)])]) from None
            error.args = (f"{error}\n  under {made[0].kernel} {made[0].config}",)
            raise
        except UnsupportedProblem:
            raise
        except Exception as error:
            error.args = (f"{error}\n  under {made[0].kernel} {made[0].config}",)
            raise

    def judge(result: Any) -> None:
        try:
            drawn.judge(result)
        except Wrong as wrong:
            raise Wrong(f"{wrong}\n  under {made[0].kernel} {made[0].config}") from None

    return replace(drawn, name=f"{drawn.name} under a plan", function=run, judge=judge)


def by_hand(plan: Any, seed: int, place: float, shape_of: float, how: float) -> Any:
    """A legal plan of another kernel, or another shape of tile, schedule, merge or number of parts,
    for the same problem."""
    from random import Random

    rng, problem, device = Random(seed), plan.problem, plan.device
    able = [k for k in KERNELS if not k.unsupported(problem, device)]
    kernel = able[int(place * len(able))]
    configs = list(kernel.configs(problem, device))
    if kernel.name == records.TORCH_MATH.name or not configs:
        return copy.deepcopy(plan)
    config = configs[int(shape_of * len(configs))]
    schedule = kernel.schedules[int(how * len(kernel.schedules))]
    for _ in range(30):
        tried = replace(
            config,
            num_splits=rng.choice((1, 2, 3, 4, config.num_splits, rng.randint(1, 40))),
            schedule=schedule if rng.random() < 0.8 else config.schedule,
            merge=rng.choice((*kernel.merges, config.merge)),
            programs=rng.choice((config.programs, problem.batch, rng.randint(1, 300))),
            split_size=rng.choice((0, config.tile_n * rng.randint(1, 9))),
        )
        if is_legal(kernel, problem, device, tried):
            config = tried
            break
    try:
        return replace(plan, kernel=kernel.name, config=config, backward=None)
    except ValueError:  # a plan merges parts where there are some
        return plan
