"""Which tokens of a sequence each rank holds.

contiguous   rank r of N holds the tokens from r * tokens on
zigzag       the tokens are cut into 2 * N pieces, and rank r holds pieces r and 2 * N - 1 - r:
             under a causal mask every rank then has as many pairs of a query and a key
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from splitkv.core.errors import expect, expect_divides, expect_in_range, expect_int, expect_tensor
from splitkv.distributed.collectives import AllGather, start
from splitkv.distributed.groups import agree, group_of, ranks_of

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = "contiguous", "zigzag"


def pieces(rank: int, size: int, tokens: int, layout: Layout) -> tuple[range, ...]:
    """Positions of a rank's tokens, in the order in which they lie in its tensors.

    tokens   how many each rank has; an even number with "zigzag"
    """
    if layout == "contiguous":
        return (range(rank * tokens, (rank + 1) * tokens),)
    n = tokens // 2
    return tuple(range(i * n, (i + 1) * n) for i in (rank, 2 * size - 1 - rank))


@lru_cache(maxsize=256)
def every_piece(size: int, tokens: int, layout: Layout) -> tuple[tuple[range, ...], ...]:
    """`pieces` of each rank."""
    return tuple(pieces(rank, size, tokens, layout) for rank in range(size))


def shard(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    device_mesh: Any = None,
    dim: int = 0,
    layout: Layout = "contiguous",
) -> Tensor:
    """This rank's tokens of a tensor that every rank has whole.

    x        [.., total, ..], the tokens in dimension `dim`: a multiple of the ranks, of twice as
             many with "zigzag"
    layout   "contiguous" or "zigzag", as the call of attention is told

    Returns [.., total / ranks, ..], contiguous; nothing moves between ranks. Raises ValueError
    where the tokens do not divide.

    Equivalent PyTorch for "contiguous": `x.chunk(ranks, dim)[rank]`.
    """
    group = group_of(group, device_mesh)
    rank, size = ranks_of(group)
    dim = _dim(x, dim)
    expect_layout(layout)
    total, parts = x.shape[dim], size if layout == "contiguous" else 2 * size
    expect_divides(f"x.shape[{dim}] (tokens)", total, **{"pieces of the ranks": parts})
    own = pieces(rank, size, total // size, layout)
    return torch.cat([x.narrow(dim, piece.start, len(piece)) for piece in own], dim)


def unshard(
    x: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    device_mesh: Any = None,
    dim: int = 0,
    layout: Layout = "contiguous",
) -> Tensor:
    """The tokens of every rank in their order: what `shard` was given, on every rank.

    x   [.., tokens, ..], this rank's, of one shape on every rank

    Returns [.., total, ..], contiguous. Differentiable: a rank's gradient is the sum of what every
    rank's result got of its tokens. Raises ValueError where the shapes differ.
    """
    group = group_of(group, device_mesh)
    dim = _dim(x, dim)
    expect_layout(layout)
    facts = {"x": (tuple(x.shape), x.dtype), "dim": dim, "layout": layout, "door": "unshard"}

    def check() -> None:
        even = layout == "contiguous" or x.shape[dim] % 2 == 0
        expect(even, "x", f"an even number of tokens in dimension {dim}", list(x.shape))

    agree(group, facts, check, x)
    size = ranks_of(group)[1]
    every = start(x.movedim(dim, 0).contiguous(), AllGather(group)).wait()
    return in_order(every, size, layout).movedim(0, dim).contiguous()


def in_order(x: Tensor, size: int, layout: Layout) -> Tensor:
    """The tokens [total, ..] of all ranks, one rank's after another's, in the sequence's order."""
    if layout == "contiguous":
        return x
    first, second = x.unflatten(0, (size, 2, -1)).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def by_rank(x: Tensor, size: int, layout: Layout) -> Tensor:
    """The tokens [total, ..] in the sequence's order, one rank's after another's."""
    if layout == "contiguous":
        return x
    first, second = x.unflatten(0, (2, size, -1)).unbind(0)
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)


def expect_layout(layout: Any) -> None:
    """One of LAYOUTS."""
    expect(layout in LAYOUTS, "layout", "'contiguous' or 'zigzag'", layout)


def _dim(x: Any, dim: Any) -> int:
    expect_tensor("x", x)
    expect_int("dim", dim)
    expect_in_range("dim", dim, -x.dim(), x.dim() - 1)
    return int(dim) % int(x.dim())
