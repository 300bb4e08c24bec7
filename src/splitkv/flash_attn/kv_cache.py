"""flash_attn_with_kvcache: append, rotate and attend to a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from splitkv.api import attention_varlen, decode
from splitkv.core.errors import (
    dtype_name,
    expect,
    expect_at_least,
    expect_bool,
    expect_device,
    expect_dtype,
    expect_given_with,
    expect_in_range,
    expect_int,
    expect_last_dim_contiguous,
    expect_none_with,
    expect_shape,
    expect_size,
    expect_tensor,
)
from splitkv.core.masks import expect_window
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.flash_attn.cached_call import keep, relaunched
from splitkv.flash_attn.descales import QUANTISED, joined, scales_of
from splitkv.flash_attn.options import Options, bound_of, named, rows_contiguous
from splitkv.flash_attn.pages import Cache, pages_of
from splitkv.flash_attn.scheduler import fitted, fitted_schedule
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.runtime.append import append
from splitkv.runtime.append_decode import append_and_decode, appending, bound_call_of, step_of
from splitkv.runtime.autocast import without_autocast
from splitkv.runtime.call_cache import BoundCall, CallCache, with_types
from splitkv.runtime.dispatch import describe, device_of, fit_plan
from splitkv.runtime.schedule import Schedule

problems: CallCache[Problem] = CallCache()  # of calls whose arguments were checked

# Arguments that say where things are; as q, k and v, they are copied where their last dimension is
# not contiguous.
PLACES = (
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "cache_seqlens", "cache_batch_idx"),
    *("cache_leftpad", "leftpad_k", "block_table", "page_table", "cu_seqlens_q"),
    "cu_seqlens_k_new",
)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Queries of different numbers, packed: cu_seqlens_q [batch + 1] and an upper bound."""

    cu_seqlens_q: Tensor
    max_seqlen_q: int


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Plan | Schedule | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Any:
    """Attention of new tokens against a cache, to which their keys and values are first appended.

    q                 [batch, seqlen_q, num_heads, head_dim], or with cu_seqlens_q [batch + 1] and
                      max_seqlen_q, from 0 to less than 2**30, packed,
                      [total_q, num_heads, head_dim]
    k_cache           [batch_cache, seqlen_cache, num_kv_heads, head_dim], or with a table
                      [num_pages, page_size, num_kv_heads, head_dim]; v_cache likewise
    block_table       [batch, max_pages] int32, pages of any size; page_table is another name
    k, v              [batch, seqlen_new, num_kv_heads, ..], or with cu_seqlens_k_new packed:
                      written in place at cache_seqlens and after; what has no room is not written
    cache_seqlens     int, or [batch] int32 on the device: keys before the new ones, the padding
                      included; None, without k and v: all of the cache
    cache_batch_idx   [batch] int32: the row of the cache (or table) of each sequence; distinct
    cache_leftpad     [batch] int32: where each sequence begins (leftpad_k is another name)
    rotary_cos, _sin  [seqlen_ro, rotary_dim / 2], of q's type or fp32, with k and v: rotate k at
                      cache_seqlens (or rotary_seqlens [batch] int32) and after, and q at the same
                      positions if causal or windowed, else all of q at the first one
    rotary_seqlens    without rotary_cos it says nothing
    rotary_interleaved  pairs are neighbours; otherwise the halves of rotary_dim
    num_splits        above 0: parts of the keys of each sequence; packed queries of several tokens
                      leave it to the policy
    scheduler_metadata  a Plan or Schedule of get_scheduler_metadata for as many queries, which
                      settled num_splits, pack_gqa and sm_margin; a Schedule is for as many new
                      tokens, too. Of packed queries of several tokens nothing is settled, and it
                      is not looked at
    q_descale, k_descale, v_descale
                      scales of an int8 or e4m3 cache (and q), fp32 [batch, num_kv_heads] or one;
                      None: 1. New k and v are divided by them as they are written, or written as
                      they are if they come in the type of the cache. An e4m3 q lets kernels round
                      the weights to e4m3 too; with rotary_cos it goes on in bf16

    The other arguments are those of flash_attn_func. Not differentiable, as there. Nothing is read
    by the host; a call can be captured in a graph. Every argument is checked before the cache is
    written.

    Returns out, as q with head_dim_v, and with return_softmax_lse softmax_lse [batch, num_heads,
    seqlen_q], packed [num_heads, total_q]: -inf for a row that sees no key; the sink included.
    """
    given = {  # and not locals(), at which torch.compile stops
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_seqlens": cache_seqlens,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "rotary_interleaved": rotary_interleaved,
        "alibi_slopes": alibi_slopes,
        "num_splits": num_splits,
        "return_softmax_lse": return_softmax_lse,
        "page_table": page_table,
        "leftpad_k": leftpad_k,
        "qv": qv,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k_new": cu_seqlens_k_new,
        "max_seqlen_q": max_seqlen_q,
        "rotary_seqlens": rotary_seqlens,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "attention_chunk": attention_chunk,
        "scheduler_metadata": scheduler_metadata,
        "pack_gqa": pack_gqa,
        "sm_margin": sm_margin,
        "s_aux": s_aux,
        "learnable_sink": learnable_sink,
    }
    out = relaunched(given)
    if out is not None:
        return out
    options = Options.of(given)
    expect_tensor("q", q)
    options.check(q)
    for name, x in (("k", k), ("v", v)):
        if x is not None:
            expect_tensor(name, x)
    q, k, v = map(rows_contiguous, (q, k, v))
    given |= {name: rows_contiguous(given[name]) for name in PLACES}
    cu_seqlens_q, cu_seqlens_k_new = given["cu_seqlens_q"], given["cu_seqlens_k_new"]
    ragged = _expect_queries(q, cu_seqlens_q, bound_of(max_seqlen_q))
    batch = q.shape[0] if ragged is None else ragged.cu_seqlens_q.shape[0] - 1
    table, table_name = _either(given, "block_table", "page_table")
    leftpad, leftpad_name = _either(given, "cache_leftpad", "leftpad_k")
    names = {"page_table": table_name, "cache_leftpad": leftpad_name}
    with named(names):
        cache = _expect_cache(q, k_cache, v_cache, table, given["cache_batch_idx"], leftpad, batch)
        seqlens = _expect_seqlens(given["cache_seqlens"], cache, q)
    turn = given["rotary_cos"], given["rotary_sin"], given["rotary_seqlens"]
    rotary = _expect_rotary(q, k, *turn, cache, options)
    if rotary is not None:
        rotary = rotary._replace(interleaved=_bool("rotary_interleaved", rotary_interleaved))
    scales = scales_of(options.descales, q, cache.k, cache.batch)
    call = _expect_new(q, k, v, cu_seqlens_k_new, cu_seqlens_q, seqlens, rotary, cache, options)
    if call is not None and call.q is not None and "q_scale" in scales:
        q, scales = call.q, joined(scales)
    names |= options.names | {"plan": "scheduler_metadata", "k": "k_cache", "v": "v_cache"}
    metadata = scheduler_metadata
    known = metadata is None or isinstance(metadata, Plan | Schedule)
    expect(known, "scheduler_metadata", "a Plan or a Schedule", metadata)
    with torch.no_grad(), named(names), without_autocast(q):
        if call is None:
            lengths = seqlens
            if seqlens is not None and cache.leftpad is not None:
                lengths = seqlens - cache.leftpad
            attend = _attend(q, cache, lengths, ragged, options, scales, metadata)
        else:
            attend = _attend(q, cache, seqlens, ragged, options, scales, metadata, call)
        result = attend(call)
        if call is not None and attend.ragged is None:
            keep(given, call, attend.q, attend.bound_call(call))
        return options.finish(result)


# Checks


def _either(given: Mapping[str, Any], name: str, other: str) -> tuple[Any, str]:
    """Returns the value of an argument that has two names, and the name it came by."""
    x, y = given[name], given[other]
    if y is None:
        return x, name
    expect_none_with(name, x, f"{other}, another name for it")
    return y, other


def _bool(name: str, value: bool) -> bool:
    expect_bool(name, value)
    return value


def _expect_index(name: str, x: Any, q: Tensor, **dims: int | None) -> None:
    expect_shape(name, x, **dims)
    expect_dtype(name, x, "int32")
    expect_device(name, x, q.device)
    expect_last_dim_contiguous(name, x)


def _expect_queries(
    q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None
) -> Ragged | None:
    if cu_seqlens_q is None:
        expect_none_with("max_seqlen_q", max_seqlen_q, "no cu_seqlens_q")
        expect_shape("q", q, batch=None, seqlen_q=None, num_heads=None, head_dim=None)
        return None
    expect_shape("q", q, total_q=None, num_heads=None, head_dim=None)
    _expect_index("cu_seqlens_q", cu_seqlens_q, q, **{"batch + 1": None})
    expect_at_least("cu_seqlens_q.shape[0] (batch + 1)", cu_seqlens_q.shape[0], 1)
    expect_given_with("max_seqlen_q", max_seqlen_q, "cu_seqlens_q")
    expect_size("max_seqlen_q", max_seqlen_q, empty=True)
    assert max_seqlen_q is not None
    return Ragged(cu_seqlens_q, int(max_seqlen_q))


def _expect_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    rows: Tensor | None,
    leftpad: Tensor | None,
    batch: int,
) -> Cache:
    slabs = ("batch_cache", "seqlen_cache") if page_table is None else ("num_pages", "page_size")
    free: dict[str, int | None] = dict.fromkeys(slabs)
    shape = expect_shape("k_cache", k_cache, **free, num_kv_heads=None, head_dim=q.shape[-1])
    sizes = dict(zip(slabs, shape, strict=False))
    expect_shape("v_cache", v_cache, **sizes, num_kv_heads=shape[2], head_dim_v=None)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect_device(name, x, q.device)
        expect_last_dim_contiguous(name, x)
    if k_cache.dtype not in QUANTISED:
        expect_dtype("k_cache", k_cache, dtype_name(q))
    expect_dtype("v_cache", v_cache, dtype_name(k_cache))
    if rows is not None:
        _expect_index("cache_batch_idx", rows, q, batch=batch)
    if leftpad is not None:
        _expect_index("cache_leftpad", leftpad, q, batch=batch)
    if page_table is None:
        if rows is None and shape[0] < batch:
            expect(False, "k_cache", f"at least {batch} sequences", shape[0])
        return Cache(k_cache, v_cache, None, rows, leftpad, batch, shape[1])
    expect_at_least("k_cache.shape[1] (page_size)", shape[1], 1)
    _expect_index(
        "page_table", page_table, q, batch=None if rows is not None else batch, pages=None
    )
    capacity = page_table.shape[1] * shape[1]
    return Cache(k_cache, v_cache, page_table, rows, leftpad, batch, capacity)


def _expect_seqlens(cache_seqlens: Any, cache: Cache, q: Tensor) -> Tensor | None:
    """Returns the lengths [batch] int32; None stands for the whole cache."""
    if cache_seqlens is None or isinstance(cache_seqlens, Tensor):
        if cache_seqlens is not None:
            _expect_index("cache_seqlens", cache_seqlens, q, batch=cache.batch)
        elif cache.leftpad is not None:
            return torch.full_like(cache.leftpad, cache.capacity)
        return cache_seqlens
    expect_int("cache_seqlens", cache_seqlens)
    expect_in_range("cache_seqlens", cache_seqlens, 0, cache.capacity)
    return torch.full((cache.batch,), cache_seqlens, dtype=torch.int32, device=q.device)


def _expect_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    seqlens: Tensor | None,
    cache: Cache,
    options: Options,
) -> Rotary | None:
    if seqlens is not None:
        _expect_index("rotary_seqlens", seqlens, q, batch=cache.batch)
    if cos is None:
        expect_none_with("rotary_sin", sin, "no rotary_cos")
        return None
    expect_given_with("k", k, "rotary_cos")
    expect_given_with("rotary_sin", sin, "rotary_cos")
    rows, half = expect_shape("rotary_cos", cos, seqlen_ro=None, **{"rotary_dim / 2": None})
    expect_shape("rotary_sin", sin, seqlen_ro=rows, **{"rotary_dim / 2": half})
    assert sin is not None
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        expect_dtype(name, x, dtype_name(q), "float32")
        expect_device(name, x, q.device)
        expect_last_dim_contiguous(name, x)
    expect_in_range("rotary_cos.shape[1] (rotary_dim / 2)", half, 1, q.shape[-1] // 2)
    if seqlens is None:
        expect_at_least("rotary_cos.shape[0] (seqlen_ro)", rows, cache.capacity)
    expect_bool("causal", options.causal)
    expect_window(options.window_size)
    expect_int("attention_chunk", options.attention_chunk)
    whole = tuple(options.window_size) == (-1, -1) and not options.attention_chunk
    stays = not options.causal and whole
    if cos.dtype in QUANTISED:
        cos, sin = cos.float(), sin.float()
    return Rotary(cos, sin, seqlens, q_step=0 if stays else 1)


def _expect_new(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_new: Tensor | None,
    cu_seqlens_q: Tensor | None,
    seqlens: Tensor | None,
    rotary: Rotary | None,
    cache: Cache,
    options: Options,
) -> Append | None:
    """Makes the call that writes k and v; None where there is nothing to do.

    Rotated, what comes in 8 bits goes on in bf16, q too.
    """
    if k is None or v is None:
        expect_none_with("v", v, "no k")
        expect_none_with("k", k, "no v")
        expect_none_with("cu_seqlens_k_new", cu_seqlens_new, "no k")
        return None
    expect_given_with("cache_seqlens", seqlens, "k")
    lead: dict[str, int | None] = {"batch": cache.batch, "seqlen_new": None}
    if cu_seqlens_new is not None:
        _expect_index("cu_seqlens_k_new", cu_seqlens_new, q, **{"batch + 1": cache.batch + 1})
        lead = {"total_new": None}
    heads, head_dim = cache.k.shape[2:]
    shape = expect_shape("k", k, **lead, num_kv_heads=heads, head_dim=head_dim)
    lead = dict(zip(lead, shape[: len(lead)], strict=True))
    expect_shape("v", v, **lead, num_kv_heads=heads, head_dim_v=cache.v.shape[3])
    types = [dtype_name(cache.k)]
    if cache.k.dtype in QUANTISED and q.dtype not in QUANTISED:
        types = [dtype_name(q)]
    elif cache.k.dtype in QUANTISED:
        types += ["bfloat16"] if rotary is not None else ["bfloat16", "float16", "float32"]
    for name, x in (("k", k), ("v", v)):
        expect_dtype(name, x, *types)
        expect_device(name, x, q.device)
        types = [dtype_name(k)]
    if cu_seqlens_new is None:
        expect_in_range("k.shape[1] (seqlen_new)", k.shape[1], 0, cache.capacity)
    if k.shape[-3] == 0 and rotary is None:
        return None
    caches: tuple[Tensor, Tensor] = cache.k, cache.v
    scales: dict[str, Any] = {}
    if k.dtype in QUANTISED and rotary is None:
        k, v, *caches = (x.view(torch.uint8) for x in (k, v, *caches))  # type: ignore[assignment]
    elif cache.k.dtype in QUANTISED:
        descales = options.descales | {"q_descale": None}
        if k.dtype in QUANTISED:
            k, v, descales = k.bfloat16(), v.bfloat16(), dict.fromkeys(descales)
        q = q.bfloat16() if q.dtype in QUANTISED else q
        scales = scales_of(descales, q, cache.k, cache.batch)
    return Append(
        k,
        v,
        *caches,
        before=seqlens,
        rows=cache.rows,
        leftpad=cache.leftpad,
        page_table=cache.page_table,
        cu_seqlens_new=cu_seqlens_new,
        q=None if rotary is None else q,
        cu_seqlens_q=cu_seqlens_q,
        k_scale=scales.get("k_scale"),
        v_scale=scales.get("v_scale"),
        rotary=rotary,
    )


# The attention


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """A call of `decode` or `attention_varlen`, ready but for what is appended before it.

    It is itself alone: torch.compile hashes what can be called, also before it has its fields.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cache_seqlens: Tensor | None
    arguments: dict[str, Any]
    ragged: Ragged | None
    shape: tuple[int, ...]

    def run(self, call: Append | None) -> Any:
        """Appends what is to be appended, and returns out, or (out, lse)."""
        tensors, arguments = (self.q, self.k, self.v), self.arguments
        if self.ragged is None and call is not None:
            result = append_and_decode(call, *tensors, **arguments)
            return result if arguments["return_lse"] else result[0]
        lengths = self.cache_seqlens
        if self.ragged is None:
            return decode(*tensors, cache_seqlens=lengths, **arguments)
        if call is not None:
            rotated, lengths = append(call)
            q = self.q if rotated is None else rotated.view(self.q.shape)
            tensors = (q, self.k, self.v)
        of_q = self.ragged.cu_seqlens_q, None, self.ragged.max_seqlen_q
        return attention_varlen(*tensors, *of_q, cache_seqlens=lengths, **arguments)

    def bound_call(self, call: Append) -> BoundCall | None:
        """Finds what a call whose queries are dense is launched by."""
        return bound_call_of(step_of(call, self.q, self.k, self.v, **self.arguments))

    def __call__(self, call: Append | None) -> Any:
        result = self.run(call)
        out: Any
        out, lse = result if self.arguments["return_lse"] else (result, None)
        if lse is not None and len(self.shape) < self.q.dim():  # packed single tokens
            lse = lse[..., 0].transpose(0, 1)
        out = out.view(*self.shape[:-1], out.shape[-1])
        return out if lse is None else (out, lse)


def _attend(
    q: Tensor,
    cache: Cache,
    seqlens: Tensor | None,
    ragged: Ragged | None,
    options: Options,
    scales: dict[str, Any],
    metadata: Plan | Schedule | None,
    call: Append | None = None,
) -> Attend:
    """Makes what will be called, checked as a whole."""
    shape, batch = tuple(q.shape), cache.batch
    if ragged is not None and ragged.max_seqlen_q == 1 and q.shape[0] == batch:
        ragged, q = None, q[:, None]
    k, v, table = pages_of(cache, ragged is not None)
    arguments = options.for_decode() | {"page_table": table, "max_seqlen_k": cache.capacity}
    if ragged is not None:
        if seqlens is None:
            seqlens = torch.full((batch,), cache.capacity, dtype=torch.int32, device=q.device)
        lengths = (ragged.cu_seqlens_q, None, ragged.max_seqlen_q)
        _problem(q, k, v, *lengths, cache_seqlens=seqlens, **arguments, **scales)
        return Attend(q, k, v, seqlens, arguments | scales, ragged, shape)
    made = metadata.plan if isinstance(metadata, Schedule) else metadata
    if made is not None:
        arguments["max_seqlen_k"] = min(cache.capacity, made.problem.seqlen_k)
    problem = _problem(q, k, v, cache_seqlens=seqlens, **arguments, **scales)
    if metadata is None:
        arguments["num_splits"] = options.num_splits
    else:
        problem = problem if call is None else appending(problem, call)
        if isinstance(metadata, Schedule):
            packed_new = call is not None and call.cu_seqlens_new is not None
            schedule = fitted_schedule(metadata, problem, packed_new)
            arguments |= {"plan": schedule.plan, "schedule": schedule}
        else:
            arguments["plan"] = fitted(metadata, problem)
        fit_plan(arguments["plan"], problem, device_of(q))
    return Attend(q, k, v, seqlens, arguments | scales, None, shape)


def _problem(*tensors: Any, **arguments: Any) -> Problem:
    """Describes the call that will follow, every argument checked: once for each kind."""
    if is_dynamo_compiling():  # the cache would be guarded, and compiled again for as it grows
        return describe(*tensors, **arguments)
    everything = (*tensors, *arguments.values())
    given = [x for x in everything if isinstance(x, Tensor)]
    others = tuple(Tensor if isinstance(x, Tensor) else x for x in everything)
    try:
        window = with_types(tuple(arguments["window_size"]))
    except TypeError:  # describing says what it should be
        return describe(*tensors, **arguments)
    options = with_types(others), window, *arguments
    problem = problems.match(options, given)
    if problem is None:
        new = partial(describe, *tensors, **arguments)
        problem = problems.get_or_bind(options, given, new)
    return problem
