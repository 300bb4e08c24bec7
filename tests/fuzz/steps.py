"""flash_attn_with_kvcache as servers call it: packed queries and new tokens, as many of each
sequence as it has, against caches in 8 bits too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.attend import Cache, bounds, leaves_of, page_size_of
from fuzz.draw import STORED, Draw, Drawn, bytes_of, modifiers, same_bits, shape, slopes_of
from fuzz.flash import eight, in_their_words, rotated, sink_of
from fuzz.judging import Leaves, Question, packed, stacked
from fuzz.oracle import LARGEST, Sequence, Wrong, over
from splitkv import flash_attn

TYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def step(d: Draw) -> Drawn:
    """Each sequence with its own number of queries, of new tokens and of padding before them."""
    v = d.variant
    page_size = page_size_of(d)
    kind, of_q = v.choice((None, None, "int8", "fp8")), v.random() < 0.4
    packed_q, appends, packed_new = (v.random() < p for p in (0.7, 0.7, 0.6))
    rotary, pairs = v.random() < 0.4 and appends, v.random() < 0.5
    with_rows, with_pad, with_starts = (v.random() < p for p in (0.3, 0.25, 0.4))
    come_in_8 = v.random() < 0.5
    of = shape(d, TYPES)
    if of.dim < 2:
        rotary = False
    batch = d.rng.randint(1, d.sizes.batch)
    most = max(1, min(20, d.sizes.rows // (of.heads * batch)))
    queries = [d.rng.choice((0, 1, 1, d.rng.randint(0, most))) for _ in range(batch)]
    capacity = max(1, d.length())
    if page_size is not None:
        capacity = -(-capacity // page_size) * page_size
    news = [d.rng.randint(0, min(9, capacity)) if appends else 0 for _ in range(batch)]
    if not packed_q:
        queries = [d.rng.randint(1, most)] * batch
    if not packed_new:
        news = [news[0]] * batch
    pads = [d.rng.randint(0, min(4, capacity - n)) if with_pad else 0 for n in news]
    before = [d.rng.randint(p, capacity - n) for p, n in zip(pads, news, strict=True)]
    extra = modifiers(d, of, batch)
    words, asked = in_their_words(extra.kwargs, d, extra.asked)

    kwargs: dict[str, Any] = dict(words)
    cache = Cache(d, of, before, capacity, page_size, None, "")
    table = None if page_size is None else [[*pages] for pages in cache.pages]
    rows = [*range(batch)]
    if with_rows:
        rows = d.rng.sample(range(batch + 2), batch)
        kwargs["cache_batch_idx"] = d.index_of(rows)
    if table is not None:
        listed = [table[0]] * (max(rows) + 1)
        for row, pages in zip(rows, table, strict=True):
            listed[row] = pages
        kwargs[d.rng.choice(("page_table", "block_table"))] = d.index_of(listed)
    of_k: dict[str, Tensor] = {}  # scales of q, k and v [batch, kv_heads]
    for name in ("q", "k", "v") if of_q else ("k", "v"):
        size = d.rng.choice(((batch, of.kv_heads), (batch, of.kv_heads), (1,), (0,)))
        scale = (d.rand(*size) + 0.5) / (3 if kind == "int8" else 1)  # as `eight` makes them larger
        if kind is not None and scale.numel():
            kwargs[f"{name}_descale"] = scale
        scale = scale if kind is not None and scale.numel() else torch.ones(1, device=d.device)
        of_k[name] = scale.expand(batch, of.kv_heads)
    dtype, in_8 = of.dtype, kind is not None and of_q
    for name, x in cache.tensors.items():
        if table is None and with_rows:
            larger = torch.full((batch + 2, *x.shape[1:]), float("nan"), dtype=x.dtype)
            larger = larger.to(x.device)
            larger[rows] = x
            x = larger
        if d.chance(0.3):  # slabs with room between them
            wide = torch.full_like(torch.cat([x, x], 1), float("nan"))
            wide[:, : x.shape[1]] = x
            x = wide[:, : x.shape[1]] if not with_pad else x
        kwargs[f"{name}_cache"] = x if kind is None else eight_of(x, STORED[kind])
    q = d.randn(sum(queries), of.heads, of.dim, dtype=of.dtype)
    if in_8:
        assert kind is not None
        q, dtype = eight(q, STORED[kind]), torch.bfloat16
    if kind is not None:
        products = "full" if of_q and kind == "fp8" else {"int8": "half", "fp8": "widened"}[kind]
        stays = of_q and not rotary
        asked = replace(asked, stored=STORED[kind], products=products, q_stored=stays)
    kwargs["q"] = q if packed_q else q.view(batch, -1, of.heads, of.dim)
    if packed_q:
        kwargs["cu_seqlens_q"] = d.index_of(bounds(queries))
        kwargs["max_seqlen_q"] = max(queries) + d.rng.choice((0, 0, 3))
    if with_pad:
        kwargs[d.rng.choice(("cache_leftpad", "leftpad_k"))] = d.index_of(pads)
    kwargs["cache_seqlens"] = d.index_of(before)
    for name, dim in (("k", of.dim), ("v", of.dim_v)) if appends else ():
        x = d.randn(sum(news), of.kv_heads, dim, dtype=of.dtype if not in_8 else torch.bfloat16)
        if in_8 and come_in_8:
            assert kind is not None
            x = eight(x, STORED[kind])
        kwargs[name] = x if packed_new else x.view(batch, -1, of.kv_heads, dim)
    if appends and packed_new:
        kwargs["cu_seqlens_k_new"] = d.index_of(bounds(news))
    starts = before
    if rotary:
        half = d.rng.randint(1, of.dim // 2)
        angles = 6 * d.rand(capacity + 40, half)
        to = d.rng.choice((torch.float32, of.dtype if not in_8 else torch.float32))
        kwargs |= {"rotary_cos": angles.cos().to(to), "rotary_sin": angles.sin().to(to)}
        kwargs["rotary_interleaved"] = pairs
        if with_starts:
            starts = [d.rng.randint(0, 20) for _ in before]
            kwargs["rotary_seqlens"] = d.index_of(starts)
    lse = d.chance(0.5)
    if lse:
        kwargs["return_softmax_lse"] = True
    if d.chance(0.2):
        kwargs["num_splits"] = d.rng.randint(1, 20)
    if d.chance(0.15):  # where things are, of memory that is not contiguous
        for name, given in kwargs.items():
            if isinstance(given, Tensor) and given.dtype == torch.int32:
                kwargs[name] = torch.stack([given, given + 1], -1)[..., 0]
    whole = asked.window == (-1, -1) and not asked.chunk and not asked.causal
    original = {n: kwargs[f"{n}_cache"].clone() for n in "kv"}
    first_q, first_new = bounds(queries), bounds(news)

    def at(b: int, i: int) -> tuple[int, int]:
        """The slab and the row of key i."""
        if table is not None:
            assert page_size is not None
            return table[b][i // page_size], i % page_size
        return rows[b], i

    def keys(b: int, name: str) -> Tensor:
        x, end = kwargs[f"{name}_cache"], before[b] + news[b]
        places = [at(b, i) for i in range(pads[b], end)]
        if not places:
            return x[:1, 0][:0].double()
        slab, row = (torch.tensor(n, device=x.device) for n in zip(*places, strict=True))
        held = bytes_of(x)[slab, row].view(x.dtype)
        if kind is None:
            return held
        return held.float().double() * of_k[name][b].double()[:, None]

    def turned(x: Tensor, first: int, by: int, to: torch.dtype) -> Tensor:
        given = kwargs["rotary_cos"], kwargs["rotary_sin"], [first], by, pairs
        return rotated(x, *given, dtype=to)

    def sequences(y: Leaves) -> list[Sequence]:
        made = []
        for b in range(batch):
            x = y["q"].reshape(-1, of.heads, of.dim)[first_q[b] : first_q[b + 1]]
            exact = x.dtype == torch.float64
            if in_8:
                x = x.float().double()
            if rotary:
                x = turned(x, starts[b], 0 if whole else 1, torch.float64)
                x = x if exact else x.to(dtype)
            if in_8:
                scale = of_k["q"][b].double().repeat_interleave(of.group)
                x = x.double() * scale[:, None]
            made.append(Sequence(x, keys(b, "k"), keys(b, "v"), slopes_of(y, b), sink_of(y)))
        return made

    def written(result: Any) -> None:
        """New keys and values lie where they belong, and nothing else has changed."""
        for name in "kv":
            expected, now = original[name].clone(), kwargs[f"{name}_cache"]
            for b in range(batch):
                given = kwargs[name].reshape(-1, *kwargs[name].shape[-2:])
                x = given[first_new[b] : first_new[b + 1]]
                as_it_is = x.dtype == now.dtype and not (rotary and name == "k")
                wide = x.float().double()
                if rotary and name == "k":
                    wide = turned(wide, starts[b], 1, torch.float64)
                if kind is not None and x.element_size() > 1:
                    wide = wide / of_k[name][b].double()[:, None]
                for i in range(news[b]):
                    slab, row = at(b, before[b] + i)
                    got = bytes_of(now)[slab, row].view(now.dtype)
                    if not as_it_is:
                        near(name, got, wide[i])
                    elif not same_bits(got, x[i]):
                        raise Wrong(f"{name}_cache: expected the new tokens as they came")
                    bytes_of(expected)[slab, row] = bytes_of(now)[slab, row]
            if not same_bits(bytes_of(expected), bytes_of(now)):
                raise Wrong(f"{name}_cache: expected nothing but new tokens to change")

    def near(name: str, got: Tensor, wanted: Tensor) -> None:
        """Rounded once to its type, or first to the type of the queries and then again."""
        most = LARGEST.get(got.dtype, float("inf"))
        wanted = wanted.clamp(-most, most)
        coarse = {torch.int8: 0.0, torch.float8_e4m3fn: 2.0**-4}
        unit = coarse.get(got.dtype, torch.finfo(of.dtype).eps)
        slack = 1.51 * unit * wanted.abs() + (0.51 if got.dtype == torch.int8 else 2.0**-9)
        slack = slack + over(wanted.abs(), 200.0) * (kind is not None and rotary)
        if ((got.float().double() - wanted).abs() > slack).any():
            raise Wrong(f"{name}_cache: expected new tokens, rotated and over their scales")

    assemble = packed(sum(queries), first_q[:-1]) if packed_q else stacked
    question = Question(
        asked,
        leaves_of(kwargs),
        sequences,
        assemble,
        dtype,
        return_lse=lse,
        with_sink=True,
        seed=d.index,
        checks=[written] if appends else [],
        rounds_q=rotary,
    )
    writes = ("k_cache", "v_cache") if appends else ()
    function = flash_attn.flash_attn_with_kvcache
    return Drawn(f"{function.__name__} of a step", function, kwargs, question.judge, writes)


def eight_of(x: Tensor, stored: torch.dtype) -> Tensor:
    """In 8 bits, where what nobody wrote is NaN or the largest number."""
    y = eight(x.nan_to_num(0.0), stored)
    bytes_of(y)[x.isnan()] = 0x7F
    return y
