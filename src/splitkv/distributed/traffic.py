"""The bytes that a call of attention over ranks moves, by counting what its plan sends.

    shape = HeadShape(num_heads=32, num_kv_heads=8, head_dim=128, head_dim_v=128, element_bytes=2)
    moved(spread_of("keys", 131072, 8, Mask(causal=True)), shape)

Nothing runs: the counts are of the same functions that plan the exchange. What a rank keeps is not
counted, nor are the few bytes of sink logits, the LSE, and sink tokens of packed sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from splitkv.core.masks import Mask
from splitkv.distributed.heads import repeats_of
from splitkv.distributed.keys import wanted_by
from splitkv.distributed.layout import Layout
from splitkv.distributed.ring import moved_pieces
from splitkv.distributed.spread import Exchange, Spread


@dataclass(frozen=True)
class HeadShape:
    """The shape of a token: heads, their dimensions, and bytes of an element."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    element_bytes: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return self.num_kv_heads * (self.head_dim + self.head_dim_v) * self.element_bytes


class Moved(NamedTuple):
    """Bytes that the rank with the most of them receives."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def spread_of(
    exchange: Exchange, total: int, size: int, mask: Mask, layout: Layout | None = None
) -> Spread:
    """The Spread of one sequence of `total` tokens over `size` ranks, as rank 0 sees it."""
    if layout is None:
        layout = "zigzag" if exchange == "ring" else "contiguous"
    within = mask.within(total, total)
    return Spread(exchange, layout, 0, size, total // size, total, within, False, False)


def moved(spread: Spread, shape: HeadShape) -> Moved:
    """Bytes that the rank which receives most gets in a forward and a backward."""
    if spread.exchange == "heads":
        repeats = repeats_of(shape.num_heads, shape.num_kv_heads, spread.size)
        columns = shape.num_heads * (shape.head_dim + shape.head_dim_v) * shape.element_bytes
        columns += repeats * shape.kv_bytes
        away = spread.tokens * (spread.size - 1) // spread.size
        return Moved(away * columns, away * columns)
    ranks = range(spread.size)
    if spread.in_rounds:
        got = [_tokens_of_rounds(spread, rank) for rank in ranks]
        home = [_tokens_home(spread, rank) for rank in ranks]
        both = max(a + b for a, b in zip(got, home, strict=True))
        return Moved(max(got) * shape.kv_bytes, both * shape.kv_bytes)
    got = [_tokens_wanted(spread, rank) for rank in ranks]
    home = [_tokens_given(spread, rank) for rank in ranks]
    return Moved(max(got) * shape.kv_bytes, max(home) * shape.kv_bytes)


def _tokens_of_rounds(spread: Spread, reader: int) -> int:
    """Tokens whose keys a rank gets in all rounds."""
    piece = len(spread.pieces[0][0])
    others = (rank for rank in range(spread.size) if rank != reader)
    return sum(piece * len(moved_pieces(spread, reader, owner)) for owner in others)


def _tokens_home(spread: Spread, owner: int) -> int:
    """Tokens whose gradients come home to a rank, as often as they come."""
    piece = len(spread.pieces[0][0])
    others = (rank for rank in range(spread.size) if rank != owner)
    return sum(piece * len(moved_pieces(spread, reader, owner)) for reader in others)


def _tokens_wanted(spread: Spread, rank: int) -> int:
    """Tokens of other ranks whose keys a rank gets."""
    return sum(map(len, wanted_by(spread, rank))) - _both(spread, rank, rank)


def _tokens_given(spread: Spread, owner: int) -> int:
    """Tokens of a rank whose keys others get, once each."""
    others = (rank for rank in range(spread.size) if rank != owner)
    return sum(_both(spread, rank, owner) for rank in others)


def _both(spread: Spread, reader: int, owner: int) -> int:
    """Tokens of the owner that the reader wants."""
    wanted = wanted_by(spread, reader)
    return sum(
        max(0, min(piece.stop, interval.stop) - max(piece.start, interval.start))
        for piece in spread.pieces[owner]
        for interval in wanted
    )
