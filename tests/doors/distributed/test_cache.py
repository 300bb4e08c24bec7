"""decode and combine over the ranks of a group, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import pairs
from rank_cases import SMALL_CACHE, shared_cache
from rank_tasks import cache, called, merged
from ranks import Raised, Ranks

import splitkv
from splitkv.reference import apply_sink_logits
from splitkv.testing import assert_close, assert_lse_close

KV_HEADS, DIM = SMALL_CACHE.num_kv_heads, SMALL_CACHE.dim
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


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_decode_is_that_of_one_process(case: dict[str, Any], ranks: Ranks) -> None:
    shared = shared_cache(case, MASKS[case["mask"]])
    shared.compare(ranks.run(cache, case["size"], shared.way, shared.calls))


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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("heads", ["all", "own"])
def test_no_sequences_and_one_rank(heads: Any, size: int, ranks: Ranks) -> None:
    for batch in (0, 2):
        parts = [(torch.randn(batch, 1, 4, DIM), torch.randn(batch, 4, 1)) for _ in range(size)]
        found = ranks.run(merged, size, parts, heads, torch.zeros(4))
        own = 4 // size if heads == "own" else 4
        for out, lse in found:
            assert out.shape == (batch, 1, own, DIM) and lse.shape == (batch, own, 1)
        if size == 1:
            exact = apply_sink_logits(*parts[0], torch.zeros(4))
            torch.testing.assert_close(found[0], (exact, parts[0][1]))


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
        (
            {"sink_tokens": torch.tensor([3, 4], dtype=torch.int32), "window_size": (2, 0)},
            "sink_tokens: expected an integer, got a tensor",
        ),
    ):
        found = ranks.each(called, 2, "decode", [call | change] * 2)
        assert all(isinstance(x, Raised) and x.kind == "ValueError" for x in found), found
        assert {x.message for x in found} == {found[0].message}
        assert found[0].message.startswith(message), found[0].message
