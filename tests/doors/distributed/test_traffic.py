"""The page on paper, docs/distributed-on-paper.md, against the plans of the exchanges and against
what ranks send."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import SMALL
from rank_tasks import bytes_of_decode, packed_traffic
from ranks import Ranks

from splitkv.core.masks import Mask
from splitkv.distributed.heads import repeats_of
from splitkv.distributed.traffic import HeadShape, moved, spread_of

PAGE = (Path(__file__).parents[3] / "docs" / "distributed-on-paper.md").read_text()
T, H, K, D, WINDOW = 131072, 32, 8, 128, 4096
SHAPE = HeadShape(H, K, D, D, 2)
RANKS = (2, 4, 8, 16, 32, 64)


def formula(row: str) -> str:
    """The forward of a row of the table of formulas, as Python."""
    (found,) = re.findall(rf"^\| {re.escape(row)} \| `([^`]*)`", PAGE, re.M)
    return found.replace("rK", "r * K")


def value(text: str, ranks: int, **more: Any) -> float:
    repeats = repeats_of(H, K, ranks) if H % ranks == 0 else 0
    names = {"T": T, "N": ranks, "H": H, "K": K, "r": repeats, "D": D, "D_v": D, "e": 2}
    return float(eval(text, {"min": min}, {**names, "W": WINDOW, **more}))


@pytest.mark.parametrize("ranks", RANKS)
def test_formulas_without_a_window(ranks: int) -> None:
    causal = Mask(True)
    keys, ring = (moved(spread_of(x, T, ranks, causal), SHAPE) for x in ("keys", "ring"))
    assert keys.forward == keys.backward == value(formula("keys"), ranks)
    assert ring.forward == keys.forward
    assert 1.5 <= ring.backward / ring.forward < 2
    if H % ranks == 0:
        heads = moved(spread_of("heads", T, ranks, causal), SHAPE)
        assert heads.forward == heads.backward == value(formula("heads"), ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_formulas_of_a_window(ranks: int) -> None:
    """But for a query's own key, which is counted there: half as many keys in contiguous pieces."""
    text, own = formula("keys or ring, window W"), SHAPE.kv_bytes
    mask = Mask(True, WINDOW - 1)
    for layout, times in (("contiguous", 1), ("zigzag", 2)):
        found = moved(spread_of("keys", T, ranks, mask, layout), SHAPE)
        exact = times * (value(text, ranks) - own)
        if ranks > 2 or layout == "contiguous":
            assert found.forward == found.backward == exact, layout
        else:  # of two ranks the later piece of the first follows on the other's
            assert found.forward <= exact


def test_when_which_wins() -> None:
    """Keys move less than heads up to H/K + 1 ranks."""
    for ranks in (2, 4, 8, 16, 32):
        keys, heads = (
            moved(spread_of(x, T, ranks, Mask(True)), SHAPE).total for x in ("keys", "heads")
        )
        assert (keys < heads) == (ranks < H / K + 1)


def test_the_table_on_paper() -> None:
    """Its cells are MiB forward and backward together, by `moved`."""
    masks = {"causal": Mask(True), "window": Mask(True, WINDOW - 1)}
    rows = re.findall(r"^\| (causal|window) \| (\d+) \| (.*) \|$", PAGE, re.M)
    assert len(rows) == 12
    for name, ranks, cells in rows:
        for exchange, cell in zip(("heads", "keys", "ring"), cells.split(" | "), strict=True):
            if exchange == "heads" and H % int(ranks):
                assert cell == "-"
                continue
            spread = spread_of(exchange, T, int(ranks), masks[name])
            assert cell == f"{moved(spread, SHAPE).total / 2**20:.0f}", (name, ranks, exchange)


@pytest.mark.parametrize(
    ("exchange", "options", "layout"),
    [
        ("heads", {}, "contiguous"),
        ("keys", {"causal": True}, "contiguous"),
        ("keys", {"causal": True, "window_size": (5, 0)}, "contiguous"),
        ("keys", {"causal": True, "window_size": (5, 0)}, "zigzag"),
        ("ring", {"causal": True, "window_size": (5, 0)}, "zigzag"),
        ("ring", {"causal": True}, "zigzag"),
        ("ring", {}, "contiguous"),
    ],
)
def test_bytes_on_paper_are_those_that_move(
    exchange: Any, options: dict[str, Any], layout: Any, ranks: Ranks
) -> None:
    """Forward and backward, every kind of transfer counted."""
    way = {"exchange": exchange, "layout": layout}
    found = ranks.run(packed_traffic, 4, way, options)
    mask = Mask(options.get("causal", False), *options.get("window_size", (-1, -1)))
    shape = HeadShape(4, 4, SMALL.dim, SMALL.dim, 4)
    counted = moved(spread_of(exchange, SMALL.total, 4, mask, layout), shape)
    assert counted.forward == max(forward for forward, _ in found)
    both = max(backward for _, backward in found)
    assert counted.backward == both


@pytest.mark.parametrize(("heads", "share"), [("all", 1), ("own", 4)])
def test_bytes_of_a_decode_step(heads: str, share: int, ranks: Ranks) -> None:
    (text,) = re.findall(r"`(\(N-1\) \* B \* H [^`]*)`", PAGE)
    batch, num_heads, dim = 3, 4, 16
    call = {
        "q": torch.randn(batch, 1, num_heads, dim),
        "k_cache": torch.randn(batch, 8, 2, dim),
        "v_cache": torch.randn(batch, 8, 2, dim),
        "cache_seqlens": torch.tensor([32, 3, 17], dtype=torch.int32),
    }
    for found in ranks.run(bytes_of_decode, 4, call, heads):
        assert found == value(text, 4, B=batch, H=num_heads, D_v=dim, e=4) / share
