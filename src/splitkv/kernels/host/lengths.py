"""A call of another length than the one that its kernel was bound to. Imports no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from splitkv.core.problem import Operands

if TYPE_CHECKING:
    from splitkv.kernels.host.sequence_repeat import Sequences

Layout = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of a tensor."""
CacheStrides = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]
"""The strides of keys and of values, and of scales of each token or None."""
CacheLayout = tuple[int, CacheStrides]
"""The length of contiguous caches and their strides. Plain tuples, as every call on a cache that
grows makes them."""


def relaunched(
    again: Sequences, operands: Operands, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of a call that is launched again, see `Sequences`; scale and softcap as in
    tile/score.py."""
    x = operands
    return again.call(
        x.q,
        x.k,
        x.v,
        x.out,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        x.cache_seqlens,
        x.page_table,
        x.sink_logits,
        x.alibi_slopes,
        x.q_scale,
        x.k_scale,
        x.v_scale,
        scale,
        softcap,
    )
