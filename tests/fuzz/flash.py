"""FlashAttention's functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.attend import Cache, bounds, leaves_of, page_size_of
from fuzz.draw import (
    STORED,
    Draw,
    Drawn,
    bytes_of,
    modifiers,
    same_bits,
    shape,
    slopes_of,
    strided,
)
from fuzz.judging import Leaves, Parts, Question, packed, stacked
from fuzz.oracle import Asked, Sequence, Wrong, expect_close
from splitkv import flash_attn

TYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def in_their_words(kwargs: dict[str, Any], d: Draw, asked: Asked) -> tuple[dict[str, Any], Asked]:
    """Without sink tokens; the sink by one of its names; causal beside any window."""
    words = dict(kwargs)
    words.pop("sink_tokens", None)
    if "sink_logits" in words:
        words[d.rng.choice(("s_aux", "learnable_sink"))] = words.pop("sink_logits")
    if d.chance(0.2):
        words |= {"pack_gqa": d.rng.choice((None, True, False)), "sm_margin": d.rng.randint(0, 9)}
    if d.chance(0.15):  # whatever the window says of the right
        words["causal"], asked = True, replace(asked, causal=True)
    return words, replace(asked, sink_tokens=0)


def sink_of(x: Leaves) -> Tensor | None:
    return x.get("s_aux", x.get("learnable_sink"))


def returned(d: Draw, words: dict[str, Any]) -> dict[str, Any]:
    """What of Question depends on how the LSE is asked for; of the variant."""
    how = d.variant.choice(("", "", "return_softmax_lse", "return_attn_probs"))
    if how:
        words[how] = True
    no_key = float("inf") if how == "return_attn_probs" else float("-inf")
    return {"return_lse": bool(how), "with_sink": True, "no_key": no_key}


def dense(d: Draw) -> Drawn:
    """flash_attn_func and its packed kin."""
    v = d.variant
    way, grad, kind = v.choice(("", "kvpacked", "qkvpacked", "heads")), v.random() < 0.6, ""
    if v.random() < 0.2 and not way:
        kind = v.choice(("int8", "fp8"))
    of_q = v.random() < 0.5
    of = shape(d, TYPES)
    if way:
        of = replace(of, dim_v=of.dim)
    if way == "qkvpacked":
        of = replace(of, group=1)
    batch = d.rng.randint(1, d.sizes.batch)
    seqlen_k = max(1, d.length())
    most_q = max(1, d.sizes.rows // (of.heads * batch))
    seqlen_q = min(seqlen_k, most_q) if "qkv" in way or way == "heads" else d.length(most_q)
    if "qkv" in way or way == "heads":
        seqlen_k = seqlen_q
    extra = modifiers(d, of, batch)
    words, asked = in_their_words(extra.kwargs, d, extra.asked)
    how = returned(d, words)
    q = d.randn(batch, seqlen_q, of.heads, of.dim, dtype=of.dtype)
    k = d.randn(batch, seqlen_k, of.kv_heads, of.dim, dtype=of.dtype)
    x = d.randn(batch, seqlen_k, of.kv_heads, of.dim_v, dtype=of.dtype)
    scales: dict[str, Tensor] = {}
    dtype = of.dtype
    if kind:
        grad = False
        names = ("q", "k", "v") if of_q else ("k", "v")
        for name in names:
            if d.chance(0.8):
                size = (batch, of.kv_heads) if d.chance(0.7) else (1,)
                scales[f"{name}_descale"] = d.rand(*size) + 0.5
        stored = STORED[kind]
        k, x = (eight(t, stored) for t in (k, x))
        if of_q:
            q, dtype = eight(q, stored), torch.bfloat16
        products = "full" if of_q and kind == "fp8" else {"int8": "half", "fp8": "widened"}[kind]
        asked = replace(asked, stored=stored, products=products, q_stored=of_q)
    tensors: dict[str, Tensor]
    function: Callable[..., Any]
    if way == "kvpacked":
        tensors, function = (
            {"q": q, "kv": torch.stack([k, x], 2)},
            flash_attn.flash_attn_kvpacked_func,
        )
    elif way == "qkvpacked":
        tensors = {"qkv": torch.stack([q, k, x], 2)}
        function = flash_attn.flash_attn_qkvpacked_func
    elif way == "heads":
        tensors, function = {"qkv": torch.cat([q, k, x], 2)}, flash_attn.flash_attn_qkvpacked_func
        words["num_heads_q"] = of.heads
    else:
        tensors, function = {"q": q, "k": k, "v": x}, flash_attn.flash_attn_func
    if not way and d.chance(0.2):
        tensors = {name: strided(d, t) for name, t in tensors.items()}
    elif d.chance(0.1):  # the last dimension is not contiguous
        tensors = {n: torch.stack([t, t], -1)[..., 0] for n, t in tensors.items()}
    kwargs = tensors | words | scales
    gradients = gradients_of(grad, kwargs, ("q", "k", "v", "kv", "qkv", "s_aux", "learnable_sink"))

    def sequences(y: Leaves) -> list[Sequence]:
        if way == "kvpacked":
            a, (b, c) = y["q"], y["kv"].unbind(2)
        elif way == "qkvpacked":
            a, b, c = y["qkv"].unbind(2)
        elif way == "heads":
            a, b, c = y["qkv"].split([of.heads, of.kv_heads, of.kv_heads], 2)
        else:
            a, b, c = (descaled(y, n, of.group) for n in "qkv")
        return [Sequence(a[i], b[i], c[i], slopes_of(y, i), sink_of(y)) for i in range(batch)]

    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        stacked,
        dtype,
        gradients=gradients,
        seed=d.index,
        **how,
    )
    return Drawn(function.__name__, function, kwargs, question.judge)


def gradients_of(grad: bool, kwargs: dict[str, Any], names: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(n for n in names if grad and n in kwargs)
    for name in found:
        kwargs[name] = kwargs[name].detach().requires_grad_()
    return found


def eight(x: Tensor, stored: torch.dtype) -> Tensor:
    if stored == torch.int8:
        return (x.float() * 3).round().clamp(-127, 127).to(stored)
    return x.float().to(stored)


def descaled(x: Leaves, name: str, group: int) -> Tensor:
    """q, k or v [B, S, H, D] times its scale of sequences and KV heads."""
    y, scale = x[name], x.get(f"{name}_descale")
    if y.element_size() > 1 and y.is_floating_point():
        return y
    y = y.float().double()
    if scale is None:
        return y
    scale = scale.double()
    if scale.numel() > 1:
        scale = scale.repeat_interleave(group if name == "q" else 1, 1)[:, None, :, None]
    return y * scale


def varlen(d: Draw) -> Drawn:
    """flash_attn_varlen_func and its packed kin, with used lengths and page tables."""
    v = d.variant
    way, grad = v.choice(("", "", "kvpacked", "qkvpacked", "pages")), v.random() < 0.6
    used_q, used_k = v.random() < 0.3, v.random() < 0.3
    page_size = page_size_of(d) or 16
    of = shape(d, TYPES)
    if way in ("kvpacked", "qkvpacked"):
        of = replace(of, dim_v=of.dim)
        used_q = used_k = False
    if way == "qkvpacked":
        of = replace(of, group=1)
    batch = d.rng.randint(1, d.sizes.batch)
    most_q = max(1, d.sizes.rows // (of.heads * batch))
    keys = [d.length(most_q if way == "qkvpacked" else None) for _ in range(batch)]
    queries = keys if way == "qkvpacked" else [d.length(most_q) for _ in keys]
    starts_q, starts_k = bounds(queries), bounds(keys)
    there_q = [d.rng.randint(0, n) for n in queries] if used_q else queries
    there_k = [d.rng.randint(0, n) for n in keys] if used_k else keys
    extra = modifiers(d, of, batch)
    words, asked = in_their_words(extra.kwargs, d, extra.asked)
    how = returned(d, words)
    total_q, total_k = starts_q[-1], starts_k[-1]
    q = d.randn(total_q, of.heads, of.dim, dtype=of.dtype)
    k = d.randn(total_k, of.kv_heads, of.dim, dtype=of.dtype)
    x = d.randn(total_k, of.kv_heads, of.dim_v, dtype=of.dtype)
    kwargs: dict[str, Any] = dict(words)
    lengths = {
        "cu_seqlens_q": d.index_of(starts_q),
        "cu_seqlens_k": d.index_of(starts_k),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
    }
    function: Callable[..., Any] = flash_attn.flash_attn_varlen_func
    cache: Cache | None = None
    if way == "kvpacked":
        kwargs |= {"q": q, "kv": torch.stack([k, x], 1), **lengths}
        function = flash_attn.flash_attn_varlen_kvpacked_func
    elif way == "qkvpacked":
        lengths = {"cu_seqlens": lengths["cu_seqlens_q"], "max_seqlen": max(queries)}
        kwargs |= {"qkv": torch.stack([q, k, x], 1), **lengths}
        function = flash_attn.flash_attn_varlen_qkvpacked_func
    elif way == "pages":
        grad = False
        capacity = -(-max(1, *keys) // page_size) * page_size
        cache = Cache(d, of, there_k, capacity, page_size, None, "")
        kwargs |= {"q": q, **cache.tensors, **lengths}
        kwargs[d.rng.choice(("page_table", "block_table"))] = cache.table
        if used_k and d.chance(0.5):
            kwargs["cu_seqlens_k"] = None
    else:
        kwargs |= {"q": q, "k": k, "v": x, **lengths}
    if used_q:
        kwargs["seqused_q"] = d.index_of(there_q)
    if used_k:
        kwargs["seqused_k"] = d.index_of(there_k)
    names = ("q", "k", "v", "kv", "qkv", "s_aux", "learnable_sink")
    gradients = gradients_of(grad, kwargs, names)

    def sequences(y: Leaves) -> list[Sequence]:
        if way == "kvpacked":
            a, (b, c) = y["q"], y["kv"].unbind(1)
        elif way == "qkvpacked":
            a, b, c = y["qkv"].unbind(1)
        else:
            a, b, c = y["q"], y["k"], y["v"]
        made = []
        for i in range(batch):
            of_k = slice(starts_k[i], starts_k[i] + there_k[i])
            keyed = [b[of_k], c[of_k]]
            if cache is not None:
                keyed = [cache.keys_of(n, y[n], i) for n in "kv"]
            rows = a[starts_q[i] : starts_q[i] + there_q[i]]
            made.append(Sequence(rows, *keyed, slopes_of(y, i), sink_of(y)))
        return made

    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        packed(total_q, starts_q[:-1]),
        of.dtype,
        gradients=gradients,
        seed=d.index,
        **how,
    )
    return Drawn(function.__name__, function, kwargs, question.judge)


# A cache that is written


def rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    first: list[int],
    step: int,
    pairs: bool,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """x [S, H, D] at positions first + step * i, computed in this type."""
    x, dim = x.to(dtype), 2 * cos.shape[1]
    at = torch.tensor([first[0] + step * i for i in range(x.shape[0])], device=x.device).long()
    c, s = (t.to(dtype)[at][:, None] for t in (cos, sin))
    turned = x[..., :dim]
    if pairs:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * c - b * s, a * s + b * c], -1)
    return torch.cat([turned, x[..., dim:]], -1)


def with_kvcache(d: Draw) -> Drawn:
    """flash_attn_with_kvcache: rows or pages, appending and rotating or neither."""
    v = d.variant
    page_size = page_size_of(d)
    appends, rotary, ragged = v.random() < 0.6, v.random() < 0.4, v.random() < 0.2
    tokens_of, pairs = v.choice(((1,), (1,), (2, 3), (v.randint(1, 16),))), v.random() < 0.5
    table_type, lse = v.choice((0, 1)), v.random() < 0.5
    with_rows, with_pad, planned = v.random() < 0.2, v.random() < 0.15, v.random() < 0.2
    policy = v.choice((None, "tuned", "balanced"))  # of what is planned before
    rotary = rotary and appends
    of = shape(d, TYPES)
    tokens = d.rng.choice(tokens_of)
    batch = d.rng.randint(1, max(1, min(d.sizes.batch, d.sizes.rows // (of.heads * tokens))))
    new = d.rng.choice((tokens, tokens, d.rng.randint(0, 5))) if appends else 0
    capacity = max(1, d.length())
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size
    new = min(new, capacity)
    pads = [d.rng.randint(0, min(3, capacity - new)) if with_pad else 0 for _ in range(batch)]
    before = [d.rng.randint(p, max(p, capacity - new)) for p in pads]
    if d.chance(0.3):
        before = [max(p, min(capacity - new, d.length(capacity - new))) for p in pads]
    after = [n + new for n in before]
    extra = modifiers(d, of, batch)
    words, asked = in_their_words(extra.kwargs, d, extra.asked)
    # positions from the first slot on; padded sequences are drawn as longer ones and cut in judging
    cache = Cache(d, of, before, capacity, page_size, None, "")
    if cache.table is not None:  # new keys need pages that are there
        cache.table = d.index_of(cache.pages).view(batch, -1)
    held = {f"{n}_cache": x for n, x in cache.tensors.items()}
    table, rows = cache.table, None
    if with_rows and page_size is None:
        rows = d.rng.sample(range(batch + 2), batch)
        for name, x in held.items():
            larger = torch.full(
                (batch + 2, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device
            )
            larger[rows] = x
            held[name] = larger
    lead = (batch, tokens)
    kwargs: dict[str, Any] = {**held, **words}
    kwargs["q"] = d.randn(*lead, of.heads, of.dim, dtype=of.dtype)
    if table is not None:
        kwargs[d.rng.choice(("page_table", "block_table"))] = table
    if rows is not None:
        kwargs["cache_batch_idx"] = d.index_of(rows)
    if with_pad:
        kwargs[d.rng.choice(("cache_leftpad", "leftpad_k"))] = d.index_of(pads)
    kwargs["cache_seqlens"] = d.index_of(before)
    if len(set(before)) == 1 and d.chance(0.3):
        kwargs["cache_seqlens"] = before[0]
    if appends:
        kwargs["k"] = d.randn(batch, new, of.kv_heads, of.dim, dtype=of.dtype)
        kwargs["v"] = d.randn(batch, new, of.kv_heads, of.dim_v, dtype=of.dtype)
    start = before
    if rotary and of.dim >= 2:
        half = d.rng.randint(1, of.dim // 2)
        angles = 6 * d.rand(capacity + 40, half)
        to = torch.float32 if table_type else of.dtype
        kwargs |= {"rotary_cos": angles.cos().to(to), "rotary_sin": angles.sin().to(to)}
        kwargs["rotary_interleaved"] = pairs
        if d.chance(0.3) or with_pad:
            start = [d.rng.randint(0, 20) for _ in before]
            kwargs["rotary_seqlens"] = d.index_of(start)
    if lse:
        kwargs["return_softmax_lse"] = True
    if d.chance(0.2):
        kwargs["num_splits"] = d.rng.randint(1, 20)
    whole = asked.window == (-1, -1) and not asked.chunk and not asked.causal
    if ragged:
        kwargs["q"] = kwargs["q"].flatten(0, 1)
        kwargs["cu_seqlens_q"] = d.index_of([tokens * i for i in range(batch + 1)])
        kwargs["max_seqlen_q"] = tokens
    if planned and not with_pad and isinstance(kwargs["cache_seqlens"], Tensor):
        kwargs.pop("num_splits", None)
        kwargs["scheduler_metadata"] = flash_attn.get_scheduler_metadata(
            batch,
            tokens,
            capacity,
            of.heads,
            of.kv_heads,
            of.dim,
            kwargs["cache_seqlens"],
            of.dtype,
            of.dim_v,
            page_size=page_size,
            max_seqlen_k_new=new,
            causal=asked.causal,
            window_size=asked.window,
            attention_chunk=asked.chunk,
            has_softcap=asked.softcap > 0,
            num_splits=0 if policy == "balanced" else d.rng.choice((0, 0, 3)),
            policy=policy,
        )
    original = {n: x.clone() for n, x in held.items()}

    def at(b: int, i: int) -> tuple[int, int]:
        """The slab and the row of key i."""
        if page_size is not None:
            return cache.pages[b][i // page_size], i % page_size
        return (b if rows is None else rows[b]), i

    def keys(b: int, name: str, first: int, end: int) -> Tensor:
        x = kwargs[f"{name}_cache"]
        slabs, rows_of = zip(*[at(b, i) for i in range(end)], strict=True) if end else ((), ())
        where = (torch.tensor(n[first:], device=x.device).long() for n in (slabs, rows_of))
        return x[tuple(where)]

    def sequences(y: Leaves) -> list[Sequence]:
        """The caches as they are now, which `written` has looked at."""
        made = []
        for b in range(batch):
            q = y["q"].view(batch, tokens, of.heads, of.dim)[b]
            if "rotary_cos" in kwargs:
                step = 0 if whole else 1
                turned = rotated(
                    q, kwargs["rotary_cos"], kwargs["rotary_sin"], [start[b]], step, pairs
                )
                q = turned if q.dtype == torch.float64 else turned.to(of.dtype)
            k, x = (keys(b, n, pads[b], after[b]) for n in "kv")
            made.append(Sequence(q, k, x, slopes_of(y, b), sink_of(y)))
        return made

    def written(result: Any) -> None:
        """New keys and values lie where they belong, rotated, and nothing else has changed."""
        expected = {n: x.clone() for n, x in original.items()}
        for b in range(batch):
            for i in range(new):
                slab, row = at(b, before[b] + i)
                for name in "kv":
                    x = kwargs[name][b, i]
                    if name == "k" and "rotary_cos" in kwargs:
                        cos, sin = kwargs["rotary_cos"], kwargs["rotary_sin"]
                        turn = x[None], cos, sin, [start[b] + i], 1, pairs
                        wanted = rotated(*turn)[0]
                        near = rotated(*turn, dtype=torch.float32)[0].to(x.dtype)
                        got = kwargs["k_cache"][slab, row]
                        expect_close("k_cache", got, wanted, [wanted.to(x.dtype), near])
                        expected["k_cache"][slab, row] = got
                    else:
                        expected[f"{name}_cache"][slab, row] = x
        for name, x in expected.items():
            if not same_bits(bytes_of(x), bytes_of(kwargs[name])):
                raise Wrong(
                    f"{name}: expected new tokens in their places, and nothing else changed"
                )

    checks = [written] if appends else []
    assemble: Callable[[Parts], tuple[Tensor, Tensor]] = stacked
    if ragged:
        assemble = packed(batch * tokens, [tokens * i for i in range(batch)])
    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        assemble,
        of.dtype,
        return_lse=lse,
        with_sink=True,
        seed=d.index,
        checks=checks,
        rounds_q="rotary_cos" in kwargs,
    )
    function = flash_attn.flash_attn_with_kvcache
    writes = ("k_cache", "v_cache") if appends else ()
    return Drawn(function.__name__, function, kwargs, question.judge, writes)


def combine(d: Draw) -> Drawn:
    """flash_attn_combine."""
    of = shape(d, TYPES)
    splits, batch = d.rng.randint(1, 9), d.rng.randint(1, 3)
    lead = (d.rng.randint(0, 9),) if d.chance(0.4) else (batch, d.rng.randint(0, 5))
    out = d.randn(splits, *lead, of.heads, of.dim, dtype=of.dtype)
    lse = d.randn(splits, *lead, of.heads) * 3
    gone = d.rand(*lse.shape) < 0.3
    lse = lse.masked_fill(gone, float("-inf"))
    out = out.masked_fill(gone[..., None], float("nan"))
    kwargs: dict[str, Any] = {"out_partial": out, "lse_partial": lse}
    dtype, writes = of.dtype, ()
    if d.chance(0.3):
        kwargs["out_dtype"] = dtype = d.rng.choice(TYPES)
    if d.chance(0.3):
        kwargs["out"] = torch.zeros(*lead, of.heads, of.dim, dtype=dtype, device=d.device)
        writes = ("out",)

    def judge(result: Any) -> None:
        wide = lse.double()
        total = wide.logsumexp(0)
        weight = torch.where(gone, 0.0, (wide - total.nan_to_num(neginf=0.0)).exp())
        parts = out.double().masked_fill(gone[..., None], 0.0)
        ref = (weight[..., None] * parts).sum(0)
        pt = (weight.float()[..., None] * parts.float()).sum(0).to(dtype)
        expect_close("out", result[0], ref, [pt])
        near = torch.where(result[1].double() == total, 0.0, result[1].double() - total).abs()
        if near.isnan().any() or (near.numel() and near.max() > 1e-4):
            raise Wrong("softmax_lse: expected the log of the sum of all parts")

    function = flash_attn.flash_attn_combine
    return Drawn("flash_attn_combine", function, kwargs, judge, writes)
