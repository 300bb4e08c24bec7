"""ALiBi between a piece of queries and a piece of keys that do not end together.

A kernel takes distances from the last query and key of a sequence, as if they stood at one place.
Rows without meaning after the queries move all queries before the first key. Then a distance is the
number of the key less the position of the query, as it is between pieces of which one follows the
other, where it differs from the true one by a constant: that moves the LSE, and nothing else. Where
the keys come first both are reversed, so that near keys have small distances there, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from splitkv.distributed.keys import sequence_at

TOKENS = -3  # the dimension of tokens


@dataclass(frozen=True, eq=False)
class Apart:
    """How a pair of different pieces is given to a kernel.

    backwards  whether queries and keys are reversed
    rows       queries, after which as many rows without meaning come
    beyond     the true distance less the kernel's
    bounds     cu_seqlens of queries and keys; None: not packed
    """

    backwards: bool
    rows: int
    beyond: Any
    bounds: tuple[Tensor, Tensor] | None

    def queries(self, x: Tensor, dim: int = TOKENS) -> Tensor:
        """A tensor of the queries with 0 in the rows without meaning."""
        turned = x.flip(dim) if self.backwards else x
        after = (0, 0) * (-dim - 1) + (0, self.rows)
        return F.pad(turned, after)

    def keys(self, x: Tensor) -> Tensor:
        """A tensor of the keys."""
        return x.flip(TOKENS) if self.backwards else x

    def back(self, x: Tensor, dim: int = TOKENS) -> Tensor:
        """The rows of the queries, of a result that the kernel has made for all rows."""
        own = x.narrow(dim, 0, self.rows)
        return own.flip(dim) if self.backwards else own

    def moved(self, slopes: Tensor) -> Tensor:
        """How far the LSE of the kernel is above the true one, [(batch,) num_heads, 1]."""
        distance: Tensor = slopes[..., None] * self.beyond
        return distance

    def arguments(self, slopes: Tensor) -> dict[str, Any]:
        """The arguments of attention that say so."""
        given: dict[str, Any] = {"causal": False, "alibi_slopes": slopes}
        if self.bounds is None:
            return given
        given |= {"cu_seqlens_q": self.bounds[0], "cu_seqlens_k": self.bounds[1]}
        return given | {"max_seqlen_q": 2 * self.rows, "max_seqlen_k": self.rows}


def apart(queries: range, keys: range, cu_seqlens: Tensor | None) -> Apart:
    """The Apart of a pair of different pieces of as many tokens."""
    n, gap = len(queries), abs(queries.start - keys.start)
    backwards = queries.start > keys.start
    if cu_seqlens is None:
        return Apart(backwards, n, gap - n, None)
    begin, end = sequence_at(cu_seqlens, max(queries.start, keys.start))
    if backwards:
        first = n - (end - queries.start).clamp(0, n)
        seen = n - (begin - keys.start).clamp(0, n)
    else:
        first, seen = (begin - queries.start).clamp(0, n), (end - keys.start).clamp(0, n)
    zero, most = torch.zeros_like(first), torch.full_like(first, n)
    of_q = torch.stack([zero, first, 2 * most, 2 * most]).int()
    of_k = torch.stack([zero, zero, seen, most]).int()
    return Apart(backwards, n, gap - 2 * n + seen, (of_q, of_k))
