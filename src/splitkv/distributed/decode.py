"""Decode against a cache whose keys several ranks hold, and the merge of their partial results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

import splitkv.api as splitkv
from splitkv.core.errors import (
    expect,
    expect_bool,
    expect_device,
    expect_divides,
    expect_dtype,
    expect_given_with,
    expect_int,
    expect_one_of,
    expect_shape,
    expect_tensor,
)
from splitkv.core.masks import expect_window
from splitkv.distributed.collectives import AllGather, AllToAll, start
from splitkv.distributed.groups import agree, group_of, ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

Heads = Literal["all", "own"]
KeyLayout = Literal["ranges", "pages"]

DEFAULTS: dict[str, Any] = {
    "page_table": None,
    "causal": True,
    "window_size": (-1, -1),
    "sink_tokens": 0,
    "sink_logits": None,
    "softmax_scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "k_scale": None,
    "v_scale": None,
    "products": None,
    "return_lse": False,
}


class CacheOptions(TypedDict, total=False):
    """Arguments of `decode` that say what the scores are, as those of `splitkv.decode`."""

    page_table: Tensor | None
    causal: bool
    window_size: tuple[int, int]
    sink_tokens: int
    sink_logits: Tensor | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    products: str | None
    return_lse: bool


def combine(
    out: Tensor,
    lse: Tensor,
    group: ProcessGroup | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    heads: Heads = "all",
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all ranks, from that over each rank's own: one collective.

    out          [batch, seqlen_q, num_heads, head_dim_v] or [total, num_heads, head_dim_v], of the
                 same queries and all heads on every rank; fp32, bf16 or fp16
    lse          [batch, num_heads, seqlen_q] or [num_heads, total] fp32, natural, without sinks;
                 -inf where a rank has no key that the row sees
    heads        "all": every rank gets every head, by an all-gather of (out, lse). "own": rank r
                 gets heads r * n to (r + 1) * n of the ranks' n each, as of a tensor-parallel
                 output projection, by an all-to-all of (out, lse): the bytes of a reduce-scatter of
                 out, and the LSE with it
    sink_logits  [num_heads], all of them: joins the denominator once, after the merge

    Returns (out, lse) of all or of the rank's heads, out in its dtype and contiguous; sums in fp32
    and in the order of the ranks, so that every rank has the same bits. A row that no rank sees a
    key of gives 0 and -inf. May be captured in a CUDA graph once a call of its kind has run; not
    differentiable in what it exchanges.

    Raises ValueError, the same on every rank, for malformed arguments, and where ranks differ in
    them in the first call of a kind.

    Equivalent PyTorch: `splitkv.merge_states` over the ranks, then
    `splitkv.reference.apply_sink_logits`.
    """
    group = group_of(group, device_mesh)
    facts = {
        "heads": heads,
        "out": _seen(out),
        "lse": _seen(lse),
        "sink_logits": _seen(sink_logits),
    }

    def check() -> None:
        expect_one_of("heads", heads, ("all", "own"))
        _expect_partial(out, lse, sink_logits)
        if heads == "own":
            expect_divides("num_heads", out.shape[-2], ranks=dist.get_world_size(group))

    agree(group, facts | {"door": "combine"}, check, out)
    with torch.no_grad():
        if sink_logits is not None and heads == "own":
            rank, size = ranks_of(group)
            sink_logits = sink_logits.chunk(size)[rank]
        return splitkv.merge_states(*_states(out, lse, group, heads), sink_logits=sink_logits)


def _seen(x: Any) -> Any:
    return (tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else x


def _expect_partial(out: Any, lse: Any, sink_logits: Any) -> None:
    expect_tensor("out", out)
    packed = out.dim() == 3
    names = ("total", "num_heads") if packed else ("batch", "seqlen_q", "num_heads")
    shape = expect_shape("out", out, **dict.fromkeys(names), head_dim_v=None)
    sizes = dict(zip(names, shape, strict=False))
    order = ("num_heads", "total") if packed else ("batch", "num_heads", "seqlen_q")
    expect_shape("lse", lse, **{name: sizes[name] for name in order})
    expect_dtype("out", out, "float32", "bfloat16", "float16")
    expect_dtype("lse", lse, "float32")
    expect_device("lse", lse, out.device)
    if sink_logits is not None:
        expect_shape("sink_logits", sink_logits, num_heads=sizes["num_heads"])
        expect_device("sink_logits", sink_logits, out.device)


def _states(out: Tensor, lse: Tensor, group: ProcessGroup, heads: Heads) -> list[Tensor]:
    """out, lse of every rank in turn, of all or of this rank's heads, by one collective: rows of
    [head_dim_v] and as many elements as have the bytes of an LSE."""
    dim = out.shape[-1]
    of_rows = lse.transpose(-1, -2).contiguous()  # [.., num_heads]
    rows = torch.cat([out, of_rows[..., None].view(out.dtype)], -1)  # [.., num_heads, columns]
    if heads == "all":
        parts = start(rows, AllGather(group)).wait()
    else:
        by_head = rows.movedim(-2, 0).contiguous()
        parts = start(by_head, AllToAll(group)).wait()
    size = dist.get_world_size(group)
    parts = parts.unflatten(0, (size, parts.shape[0] // size))
    if heads == "own":
        parts = parts.movedim(1, -2)
    lses = parts[..., dim:].contiguous().view(torch.float32)[..., 0].transpose(-1, -2)
    found = [x for part in zip(parts[..., :dim], lses, strict=True) for x in part]
    if len(found) == 2:  # one rank: nothing to merge with
        found += [out, torch.full_like(lses[0], float("-inf"))]
    return found


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    group: ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    keys: KeyLayout = "ranges",
    heads: Heads = "all",
    **options: Unpack[CacheOptions],
) -> Any:
    """`splitkv.decode` against a cache whose keys are spread over the ranks of a group.

    q              [batch, seqlen_q, num_heads, head_dim], the same on every rank, all heads
    k_cache        [batch, capacity, num_kv_heads, head_dim], or with a page table
                   [num_pages, page_size, num_kv_heads, head_dim]: this rank's keys, of one shape on
                   every rank; v_cache likewise
    cache_seqlens  [batch] int32 on the device: keys of each sequence on all ranks together, those
                   of q included; never read by the host
    keys           "ranges": rank r holds keys r * capacity to (r + 1) * capacity of each sequence,
                   with a page table capacity = max_pages * page_size. "pages": page p of a sequence
                   is page p // ranks of rank p % ranks; needs a page table
    heads          "all" or "own", as that of `combine`
    options        page_table [batch, max_pages] int32, of this rank's pages; causal, window_size,
                   sink_tokens (one number), sink_logits, softmax_scale, softcap, alibi_slopes,
                   k_scale, v_scale, products and return_lse as those of `splitkv.decode`

    Each rank attends to its own keys, and `combine` merges. Without a window and for one query a
    sequence nothing else runs. Where a window, or causality between several queries, hides some
    keys of a rank, each query becomes a sequence of its own that reads the keys that it sees
    through a table of pages of one key: right at every length, at the price of small pages, and of
    keys that are read once a query. ALiBi needs "ranges", one query a sequence and no window.

    Returns out [batch, seqlen_q, num_heads, head_dim_v], or the rank's heads of it, and with
    `return_lse` the LSE of all keys. Nothing is read by the host; may be captured in a CUDA graph
    once a call of its kind has run. Not differentiable. Raises as `combine`, and UnsupportedProblem
    where no kernel can.

    Equivalent PyTorch: `splitkv.decode` against the keys of all ranks in their order.
    """
    for name in options:
        expect_one_of("argument of decode", name, tuple(DEFAULTS))
    group = group_of(group, device_mesh)
    given: dict[str, Any] = {**DEFAULTS, **options}
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    facts = {n: _seen(x) for n, x in {**tensors, **given, "keys": keys, "heads": heads}.items()}
    rank, size = ranks_of(group)

    def check() -> None:
        expect_one_of("keys", keys, ("ranges", "pages"))
        expect_one_of("heads", heads, ("all", "own"))
        _expect_cache(tensors, given, keys)
        if heads == "own":
            expect_divides("num_heads", q.shape[2], ranks=size)

    agree(group, facts | {"door": "decode"}, check, q)
    place = Place(rank, size, keys, _capacity(k_cache, given), int(k_cache.shape[1]))
    sinks, return_lse = given.pop("sink_logits"), given.pop("return_lse")
    with torch.no_grad():
        run = (
            _part if q.shape[1] == 1 and tuple(given["window_size"]) == (-1, -1) else _part_of_rows
        )
        out, lse = run(_Cache(q, k_cache, v_cache, cache_seqlens), given, place)
    out, lse = combine(out, lse, group, heads=heads, sink_logits=sinks)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class Place:
    """Which keys of a sequence this rank holds.

    capacity    how many at most
    page_size   consecutive keys of one page; with "ranges" the capacity
    """

    rank: int
    size: int
    keys: KeyLayout
    capacity: int
    page_size: int

    def held(self, count: Tensor) -> Tensor:
        """How many of the first `count` keys of a sequence are here, as `count`."""
        if self.keys == "ranges":
            return (count - self.rank * self.capacity).clamp(0, self.capacity)
        turn = self.size * self.page_size
        rest = (count % turn - self.rank * self.page_size).clamp(0, self.page_size)
        return (count // turn * self.page_size + rest).clamp(0, self.capacity)


class _Cache(NamedTuple):
    """The queries and this rank's keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache_seqlens: Tensor


def _part(cache: _Cache, given: dict[str, Any], place: Place) -> tuple[Tensor, Tensor]:
    """(out, lse) of one query a sequence over this rank's keys, all of which it sees."""
    held = place.held(cache.cache_seqlens)
    options = {**given, "causal": False, "window_size": (-1, -1), "sink_tokens": 0}
    out, lse = splitkv.decode(
        cache.q, cache.k, cache.v, cache_seqlens=held, return_lse=True, **options
    )
    slopes = given["alibi_slopes"]
    if slopes is not None:  # the query stands further on than this rank's last key
        beyond = cache.cache_seqlens - held - place.rank * place.capacity
        lse = lse - slopes.expand(lse.shape[:2])[..., None] * beyond[:, None, None].to(lse.dtype)
        lse = torch.where((held > 0)[:, None, None], lse, float("-inf"))
    return out, lse


def _part_of_rows(cache: _Cache, given: dict[str, Any], place: Place) -> tuple[Tensor, Tensor]:
    """(out, lse) of each query as a sequence of its own, over the keys that it sees."""
    q = cache.q
    batch, rows = q.shape[:2]
    left, right = given["window_size"]
    right = 0 if given["causal"] else right
    length = cache.cache_seqlens.long()[:, None]
    pos = length - rows + torch.arange(rows, device=q.device)  # [batch, rows]
    ends = length.expand(-1, rows) if right == -1 else torch.minimum(length, pos + right + 1)
    ends = ends.clamp(min=0)
    begins = torch.zeros_like(ends) if left == -1 else (pos - left).clamp(min=0)
    begins = torch.minimum(begins, ends)
    sinks = 0 if left == -1 else given["sink_tokens"]
    last, first = place.held(ends).flatten(), place.held(begins).flatten()
    far = torch.minimum(
        place.held(torch.minimum(begins, torch.full_like(begins, sinks))).flatten(), first
    )
    near = place.capacity if left == -1 else min(place.capacity, left + 1 + max(right, rows - 1, 0))
    most = min(place.capacity, near + min(sinks, place.capacity))
    # The keys that a row sees: sink tokens first, then its window.
    slot = torch.arange(most, device=q.device)
    key = torch.where(slot < far[:, None], slot, first[:, None] + slot - far[:, None])
    key = key.clamp(max=place.capacity - 1)
    table = _keys_as_pages(cache.k, given["page_table"], key, rows)
    options = {**given, "causal": False, "window_size": (-1, -1), "sink_tokens": 0}
    options |= {"page_table": table.int(), "max_seqlen_k": most}
    for name in ("k_scale", "v_scale"):
        options[name] = _scale_of_rows(given[name], batch, rows)
    out, lse = splitkv.decode(
        q.flatten(0, 1)[:, None],
        _single_keys(cache.k),
        _single_keys(cache.v),
        cache_seqlens=(far + last - first).int(),
        return_lse=True,
        **options,
    )
    return out.view(batch, rows, *out.shape[2:]), lse.view(batch, rows, -1).transpose(1, 2)


def _single_keys(cache: Tensor) -> Tensor:
    """A cache [rows, keys, heads, dim] as pages of one key."""
    return cache.flatten(0, 1)[:, None]


def _keys_as_pages(cache: Tensor, page_table: Tensor | None, key: Tensor, rows: int) -> Tensor:
    """The page of one key of each key [batch * rows, most] that this rank holds of a sequence."""
    per_row = cache.shape[1]
    if page_table is None:
        sequence = torch.arange(key.shape[0], device=key.device) // rows
        return sequence[:, None] * per_row + key
    pages = page_table.long().repeat_interleave(rows, 0).gather(1, key // per_row)
    return pages * per_row + key % per_row


def _scale_of_rows(scale: Tensor | None, batch: int, rows: int) -> Tensor | None:
    if scale is None or scale.dim() < 2:
        return scale
    if scale.dim() == 2:  # a sequence and KV head
        return scale.repeat_interleave(rows, 0)
    return scale.flatten(0, 1)[:, None]


def _capacity(k_cache: Tensor, given: dict[str, Any]) -> int:
    table = given["page_table"]
    pages = 1 if table is None else table.shape[1]
    return int(pages * k_cache.shape[1])


def _expect_cache(tensors: dict[str, Any], given: dict[str, Any], keys: Any) -> None:
    q, k_cache, table = tensors["q"], tensors["k_cache"], given["page_table"]
    sizes = {"batch": None, "seqlen_q": None, "num_heads": None, "head_dim": None}
    batch, rows = expect_shape("q", q, **sizes)[:2]
    rest = {"num_kv_heads": None, "head_dim": q.shape[-1]}
    if table is None:
        expect_shape("k_cache", k_cache, batch=batch, capacity=None, **rest)
        if keys == "pages":
            expect_given_with("page_table", table, "keys='pages'")
    else:
        expect_shape("k_cache", k_cache, num_pages=None, page_size=None, **rest)
        expect_shape("page_table", table, batch=batch, max_pages=None)
        expect_dtype("page_table", table, "int32")
    expect_shape("cache_seqlens", tensors["cache_seqlens"], batch=batch)
    expect_dtype("cache_seqlens", tensors["cache_seqlens"], "int32")
    expect_window(given["window_size"])
    expect_int("sink_tokens", given["sink_tokens"])
    expect_bool("causal", given["causal"])
    expect_bool("return_lse", given["return_lse"])
    expect_dtype("q", q, "float32", "bfloat16", "float16")
    if given["alibi_slopes"] is not None:
        beside = "alibi_slopes"
        expect(keys == "ranges", "keys", f"'ranges' with {beside}", keys)
        expect(rows == 1, "q", f"one query a sequence with {beside}", rows)
        window = tuple(given["window_size"])
        expect(window == (-1, -1), "window_size", f"(-1, -1) with {beside}", window)
