"""decode and combine over the ranks of a group, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import pairs
from rank_tasks import cache, called, merged
from ranks import Raised, Ranks
from torch import Tensor

import splitkv
from splitkv.reference import apply_sink_logits
from splitkv.testing import assert_close, assert_lse_close

BATCH, KV_HEADS, DIM, CAPACITY = 3, 2, 16, 12
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (5, -1)},
    "sinks": {"window_size": (5, -1), "sink_tokens": 3},
    "ahead": {"causal": False, "window_size": (4, 1)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": True},
}
AXES: dict[str, tuple[Any, ...]] = {
    "mask": tuple(MASKS),
    "rows": (1, 3),
    "place": ("ranges", "paged_ranges", "pages"),
    "heads": ("all", "own"),
    "sinks": (False, True),
    "size": (2, 4),
}


def valid(values: dict[str, Any]) -> bool:
    far = values.get("place") == "pages" or values.get("rows") == 3
    return not (values.get("mask") == "alibi" and far)


CASES = pairs(AXES, valid)


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def parts_of(x: Tensor, case: dict[str, Any], order: Tensor) -> list[Tensor]:
    """The caches of the ranks, of keys [batch, total, heads, dim]."""
    size = case["size"]
    if case["place"] == "ranges":
        return list(x.chunk(size, 1))
    paged = x.unflatten(1, (-1, 3))  # [batch, pages, page_size, ..]
    if case["place"] == "pages":
        ranks = [paged[:, rank::size] for rank in range(size)]
    else:
        ranks = list(paged.chunk(size, 1))
    caches = [torch.full_like(part.flatten(0, 1), float("nan")) for part in ranks]
    for found, part in zip(caches, ranks, strict=True):
        found[order] = part.flatten(0, 1)
    return caches


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_decode_is_that_of_one_process(case: dict[str, Any], ranks: Ranks) -> None:
    size, rows, options = case["size"], case["rows"], dict(MASKS[case["mask"]])
    total, num_heads = size * CAPACITY, 4
    q = torch.randn(BATCH, rows, num_heads, DIM)
    k, v = (torch.randn(BATCH, total, KV_HEADS, DIM) for _ in "kv")
    lengths = torch.tensor([total, rows, 17], dtype=torch.int32)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(num_heads) + 0.05
    if case["sinks"]:
        options["sink_logits"] = torch.randn(num_heads)
    order = torch.randperm(BATCH * CAPACITY // 3)
    placed: dict[str, Any] = {}
    if case["place"] != "ranges":
        placed["page_table"] = order.view(BATCH, -1).int()
    shared = {"q": q, "cache_seqlens": lengths, "return_lse": True, **placed, **options}
    caches = zip(parts_of(k, case, order), parts_of(v, case, order), strict=True)
    calls = [{"k_cache": kc.clone(), "v_cache": vc.clone(), **shared} for kc, vc in caches]
    way = {"keys": "pages" if case["place"] == "pages" else "ranges", "heads": case["heads"]}
    found = ranks.run(cache, size, way, calls)

    def one(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        given = dict(options, cache_seqlens=lengths, return_lse=True)
        if case["sinks"]:
            given["sink_logits"] = given["sink_logits"].to(dtype)
        return splitkv.decode(q.to(dtype), k.to(dtype), v.to(dtype), **given)

    (ref, ref_lse), (pt, _) = one(torch.float64), one(torch.float32)
    if case["heads"] == "own":
        found = [(torch.cat([x[0] for x in found], 2), torch.cat([x[1] for x in found], 1))]
    for out, lse in found:
        assert_close(out, ref, pt)
        assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", ["all", "own"])
def test_combine_merges_by_lse(heads: Any, packed: bool, dtype: torch.dtype, ranks: Ranks) -> None:
    rows = (6,) if packed else (2, 3)
    outs = [torch.randn(*rows, 4, DIM).to(dtype) for _ in range(4)]
    lses = [3 * torch.randn(*rows, 4) for _ in range(4)]
    lses[2][0] = float("-inf")
    for lse in lses:
        lse[..., 1, 0] = float("-inf")  # a row of which nobody sees a key
    outs[2][0] = float("nan")  # anything, where no key was seen
    lses = [x.movedim(-1, -2) if not packed else x.T for x in lses]
    sinks = torch.randn(4)
    found = ranks.run(
        merged, 4, list(zip(outs, [x.contiguous() for x in lses], strict=True)), heads, sinks
    )
    clean = [torch.where(x.isnan(), 0.0, x.float()) for x in outs]
    out, lse = clean[0].double(), lses[0].double()
    for other, of in zip(clean[1:], lses[1:], strict=True):
        out, lse = splitkv.merge_states(out, lse, other.double(), of.double())
    ref = apply_sink_logits(out, lse, sinks)
    if heads == "all":
        for other in found[1:]:
            assert torch.equal(other[0], found[0][0]), "expected the same bits on every rank"
    else:
        dim = 0 if packed else 1
        found = [(torch.cat([x[0] for x in found], -2), torch.cat([x[1] for x in found], dim))]
    assert_close(found[0][0], ref, ref.to(dtype))
    assert_lse_close(found[0][1], lse)


def test_a_malformed_cache(ranks: Ranks) -> None:
    call: dict[str, Any] = {
        "q": torch.randn(2, 1, 4, DIM),
        "k_cache": torch.randn(2, 8, KV_HEADS, DIM),
        "v_cache": torch.randn(2, 8, KV_HEADS, DIM),
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
    }
    for change, message in (
        ({"keys": "pages"}, "page_table: expected a value with keys='pages', got None"),
        ({"keys": "striped"}, "keys: expected 'ranges' or 'pages', got 'striped'"),
        ({"num_splits": 2}, "argument of decode: expected 'page_table'"),
        ({"q": torch.randn(2, 1, 3, DIM), "heads": "own"}, "num_heads: expected a multiple of "),
        ({"cache_seqlens": torch.tensor([3, 4])}, "cache_seqlens: expected dtype int32, got int64"),
    ):
        found = ranks.each(called, 2, "decode", [call | change] * 2)
        assert all(isinstance(x, Raised) and x.kind == "ValueError" for x in found), found
        assert {x.message for x in found} == {found[0].message}
        assert found[0].message.startswith(message), found[0].message
