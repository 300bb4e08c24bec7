"""Sequences and caches over ranks, and what one process makes of them by definition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from rank_tasks import LEAVES, finite
from torch import Tensor

import splitkv
from splitkv import reference
from splitkv.core.masks import Mask
from splitkv.distributed.layout import pieces
from splitkv.testing import DRAWS, assert_close, assert_lse_close


class Sizes(NamedTuple):
    """Tokens of all ranks, head dimensions, and how the tokens are packed: cu_seqlens has an empty
    sequence, and tokens come after the last."""

    total: int
    cu_seqlens: tuple[int, ...]
    dim: int
    dim_v: int

    @property
    def longest(self) -> int:
        return max(b - a for a, b in pairwise(self.cu_seqlens))


SMALL = Sizes(48, (0, 5, 5, 23, 40, 46), 16, 8)


def operands(
    options: dict[str, Any],
    heads: tuple[int, int],
    *,
    packed: bool,
    dtype: torch.dtype,
    sizes: Sizes = SMALL,
) -> dict[str, Any]:
    """The arguments of a call of all tokens, and the gradients of its results.

    options  of the call; `alibi_slopes` where it is True
    heads    of queries, and of keys
    """
    num_heads, num_kv_heads = heads
    outer = (sizes.total,) if packed else (2, sizes.total)

    def random(*shape: int) -> Tensor:
        return torch.randn(*outer, *shape).to(dtype)

    call: dict[str, Any] = {
        "q": random(num_heads, sizes.dim),
        "k": random(num_kv_heads, sizes.dim),
        "v": random(num_kv_heads, sizes.dim_v),
        "grad_out": random(num_heads, sizes.dim_v),
        "grad_lse": torch.randn(*outer[:-1], num_heads, sizes.total),
        "sink_logits": torch.randn(num_heads),
        **options,
    }
    if "alibi_slopes" in call:
        call["alibi_slopes"] = torch.rand(num_heads) + 0.05
    if packed:
        bounds = torch.tensor(sizes.cu_seqlens, dtype=torch.int32)
        call |= {"cu_seqlens": bounds, "max_seqlen": sizes.longest}
    return call


def in_one_process(call: dict[str, Any], *, upcast: bool, draw: int = 0) -> dict[str, Tensor]:
    """What `sequence` returns, of all tokens in one process, by definition.

    upcast   False: the run in the working precision
    draw     above 0: reorders the head dimension, for other rounding errors of the same result
    """
    given = dict(call)
    grads = given.pop("grad_out"), given.pop("grad_lse")
    left, right = given.pop("window_size", (-1, -1))
    numbers = given.pop("sink_tokens", 0), given.pop("attention_chunk", 0)
    given["mask"] = Mask(given.pop("causal", False), left, right, *numbers)
    wanted = (name for name in LEAVES if given[name] is not None)
    leaves = {name: given[name].clone().requires_grad_() for name in wanted}
    given |= leaves
    if draw:
        dim = call["q"].shape[-1]
        order = torch.randperm(dim, generator=torch.Generator().manual_seed(draw))
        given |= {name: leaves[name][..., order] for name in "qk"}
    if "cu_seqlens" in given:
        bounds = given.pop("cu_seqlens")
        del given["max_seqlen"]
        given |= {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        out, lse = reference.attention_varlen(**given, upcast=upcast)
    else:
        out, found_lse = reference.attention(**given, upcast=upcast)
        assert found_lse is not None
        lse = found_lse
    loss = (out * grads[0].to(out.dtype)).sum() + (finite(lse) * grads[1]).sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    named = {f"d{name}": grad for name, grad in zip(leaves, found, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def whole(parts: list[Tensor], layout: Any, dim: int) -> Tensor:
    """The tokens of all ranks in their order."""
    size, tokens = len(parts), parts[0].shape[dim]
    found = {}
    for rank, part in enumerate(parts):
        own = pieces(rank, size, tokens, layout)
        for piece, x in zip(own, part.chunk(len(own), dim), strict=True):
            found[piece.start] = x
    return torch.cat([found[start] for start in sorted(found)], dim)


def compare(call: dict[str, Any], layout: Any, parts: list[dict[str, Tensor]]) -> None:
    """Hold what `sequence` gave on every rank to one process, by the tolerance rule; the LSE where
    it is there."""
    ref = in_one_process(call, upcast=True)
    # the rule of splitkv.testing.check: of few rows one run is a poor measure of the precision
    runs = [in_one_process(call, upcast=False, draw=draw) for draw in range(DRAWS)]
    pt = {
        name: max((run[name] for run in runs), key=lambda x, r=x: (x.double() - r).abs().max())
        for name, x in ref.items()
    }
    if "lse" in parts[0]:
        assert_lse_close(whole([part["lse"] for part in parts], layout, -1), ref["lse"])
    for name in ("out", "dq", "dk", "dv"):
        found = whole([part[name] for part in parts], layout, -3)
        factor = 2.0 if name == "out" else 3.0
        assert_close(found, ref[name], pt[name], factor=factor, name=name)
    name = "dsink_logits"
    for part in parts if name in ref else ():  # summed over the ranks
        assert_close(part[name], ref[name], pt[name], factor=3.0, name=name)


class CacheSizes(NamedTuple):
    """Of a cache that ranks share; capacity is the keys of a sequence that a rank has room for."""

    num_heads: int
    num_kv_heads: int
    dim: int
    capacity: int
    page_size: int


SMALL_CACHE = CacheSizes(4, 2, 16, 12, 3)
CACHE_BATCH = 3


class SharedCache(NamedTuple):
    """A call of `decode` over ranks.

    way      `keys` and `heads`
    calls    the other arguments of each rank
    whole    those of one process that has all keys
    """

    way: dict[str, Any]
    calls: list[dict[str, Any]]
    whole: dict[str, Any]

    def compare(self, found: list[tuple[Tensor, Tensor]]) -> None:
        """Hold what the ranks made of it to one process, by the tolerance rule."""

        def one(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            floating = ("q", "k_cache", "v_cache", "sink_logits")
            cast = {name: x.to(dtype) for name, x in self.whole.items() if name in floating}
            return splitkv.decode(**{**self.whole, **cast})

        (ref, ref_lse), (pt, _) = one(torch.float64), one(self.whole["q"].dtype)
        if self.way["heads"] == "own":
            found = [(torch.cat([x[0] for x in found], 2), torch.cat([x[1] for x in found], 1))]
        for out, lse in found:
            assert_close(out, ref, pt)
            assert_lse_close(lse, ref_lse)


def shared_cache(
    case: dict[str, Any],
    options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    sizes: CacheSizes = SMALL_CACHE,
) -> SharedCache:
    """A cache of three sequences whose last keys are on the last, the first and some rank.

    case      `size` ranks, `rows` queries a sequence, `place` of the keys (ranges, paged_ranges or
              pages), `heads`, and whether there are `sinks`
    options   of `decode`; `alibi_slopes` where it is True
    """
    size, rows, options = case["size"], case["rows"], dict(options)
    total = size * sizes.capacity
    q = torch.randn(CACHE_BATCH, rows, sizes.num_heads, sizes.dim).to(dtype)
    of_kv = CACHE_BATCH, total, sizes.num_kv_heads, sizes.dim
    k, v = (torch.randn(of_kv).to(dtype) for _ in "kv")
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(sizes.num_heads) + 0.05
    if case["sinks"]:
        options["sink_logits"] = torch.randn(sizes.num_heads)
    order = torch.randperm(CACHE_BATCH * sizes.capacity // sizes.page_size)
    lengths = torch.tensor([total, rows, 17], dtype=torch.int32)
    shared = {"q": q, "cache_seqlens": lengths, "return_lse": True, **options}
    placed: dict[str, Any] = {}
    if case["place"] != "ranges":
        placed["page_table"] = order.view(CACHE_BATCH, -1).int()
    caches = zip(*(_parts(x, case, order, sizes.page_size) for x in (k, v)), strict=True)
    calls = [{**shared, **placed, "k_cache": own_k, "v_cache": own_v} for own_k, own_v in caches]
    way = {"keys": "pages" if case["place"] == "pages" else "ranges", "heads": case["heads"]}
    return SharedCache(way, calls, {**shared, "k_cache": k, "v_cache": v})


def _parts(x: Tensor, case: dict[str, Any], order: Tensor, page_size: int) -> list[Tensor]:
    """The caches of the ranks, of keys [batch, total, heads, dim]; NaN where no page is in use."""
    size = case["size"]
    if case["place"] == "ranges":
        return [part.clone() for part in x.chunk(size, 1)]
    paged = x.unflatten(1, (-1, page_size))  # [batch, pages, page_size, ..]
    if case["place"] == "pages":
        ranks = [paged[:, rank::size] for rank in range(size)]
    else:
        ranks = list(paged.chunk(size, 1))
    caches = [torch.full_like(part.flatten(0, 1), float("nan")) for part in ranks]
    for found, part in zip(caches, ranks, strict=True):
        found[order] = part.flatten(0, 1)
    return caches


CAUSAL: dict[str, Any] = {"causal": True}
PLAIN: dict[str, Any] = {"causal": True, "sink_logits": None}
BAND: dict[str, Any] = {"causal": True, "window_size": (200, 0), "sink_tokens": 5}
WINDOW: dict[str, Any] = {"causal": True, "window_size": (200, 0)}
SEQUENCES: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    # (exchange and layout, whether packed, options): few kinds of kernels, which take long to
    # compile, and with them each exchange, packed and not. Those of a ring know of no sinks
    "heads": ({"exchange": "heads", "layout": "contiguous"}, False, PLAIN),
    "heads packed": ({"exchange": "heads", "layout": "zigzag"}, True, BAND),
    "keys": ({"exchange": "keys", "layout": "zigzag"}, False, BAND),
    "keys packed": ({"exchange": "keys", "layout": "contiguous"}, True, PLAIN),
    "ring": ({"exchange": "ring", "layout": "zigzag"}, False, CAUSAL),
    "ring packed": ({"exchange": "ring", "layout": "zigzag"}, True, CAUSAL),
    "a window": ({"exchange": "keys", "layout": "contiguous"}, False, WINDOW),
    "a window packed": ({"exchange": "keys", "layout": "contiguous"}, True, WINDOW),
    "ring in a window": ({"exchange": "ring", "layout": "zigzag"}, True, BAND),
}
CACHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ranges": ({"place": "ranges", "rows": 1, "heads": "own", "sinks": True}, {}),
    "pages": ({"place": "pages", "rows": 1, "heads": "all", "sinks": True}, {}),
    "queries in a window": (
        {"place": "ranges", "rows": 2, "heads": "all", "sinks": False},
        {"window_size": (300, -1)},
    ),
}
"""What is run on a GPU, and through host memory on a CPU."""
