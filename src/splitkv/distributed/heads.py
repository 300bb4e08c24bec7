"""Ulysses: every rank gets some of the heads of all tokens, and gives their output back.

The heads of a rank go in two halves where they can: while the first is attended to, the second is
on its way, and so is the first half's output while the second is attended to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from splitkv.api import attention, attention_varlen
from splitkv.distributed.collectives import AllToAll, Pending, start
from splitkv.distributed.layout import by_rank, in_order
from splitkv.distributed.spread import Call, Spread, of_heads, tokens_first, tokens_last

Result = tuple[Tensor, Tensor]


class _Heads(NamedTuple):
    """Heads of a rank and of a stage.

    stages   parts in which the heads of a rank go
    q, k     query and KV heads of a rank in a stage
    """

    stages: int
    q: int
    k: int


def repeats_of(num_heads: int, num_kv_heads: int, ranks: int) -> int:
    """How often KV heads are repeated so that the ranks get as many each, with their queries."""
    group = num_heads // num_kv_heads
    fitting = (n for n in range(1, group + 1) if group % n == 0 and num_kv_heads * n % ranks == 0)
    return next(fitting)


def attend_heads(call: Call, spread: Spread) -> Result:
    """(out, lse) of this rank's tokens, by an exchange of heads."""
    q, k, v = map(tokens_first, (call.q, call.k, call.v))
    size = spread.size
    repeats = repeats_of(q.shape[-2], k.shape[-2], size)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, -2) for x in (k, v))
    kv_heads = k.shape[-2] // size
    stages = 2 if kv_heads % 2 == 0 else 1
    heads = _Heads(stages, q.shape[-2] // size // stages, kv_heads // stages)
    inward = [_start_inward((q, k, v), call, spread, (stages, i)) for i in range(stages)]
    outward = []
    for stage, pending in enumerate(inward):
        x = in_order(pending.wait().flatten(0, 1), size, spread.layout)
        out, lse = _attend(x, heads, stage, call, spread)
        outward.append(_start_outward(tokens_first(out), call, spread))
        if call.options["return_lse"]:
            rows = lse.movedim(-1, 0)[..., None]  # [total, (batch,) heads, 1]
            outward.append(_start_outward(rows, call, spread))
    results = [pending.wait() for pending in outward]
    if not call.options["return_lse"]:
        return tokens_last(_every_head(results)).contiguous(), call.q.new_empty(0)
    out, lse = _every_head(results[::2]), _every_head(results[1::2])[..., 0]
    return tokens_last(out).contiguous(), lse.movedim(0, -1).contiguous()


def _start_inward(
    qkv: tuple[Tensor, Tensor, Tensor], call: Call, spread: Spread, stage: tuple[int, int]
) -> Pending:
    """[tokens, (batch,) heads, dim] of each, as [ranks, tokens, (batch,) columns] on their way."""
    stages, i = stage
    parts = [x.unflatten(-2, (spread.size, stages, -1)).select(-3, i).flatten(-2) for x in qkv]
    return start(torch.cat(parts, -1).movedim(-2, 0).contiguous(), AllToAll(call.group))


def _attend(x: Tensor, heads: _Heads, stage: int, call: Call, spread: Spread) -> Result:
    """Attention of all tokens x [total, (batch,) columns], the heads of one stage side by side."""
    dim, dim_v = call.q.shape[-1], call.v.shape[-1]
    sizes = [heads.q * dim, heads.k * dim, heads.k * dim_v]
    counts = (heads.q, dim), (heads.k, dim), (heads.k, dim_v)
    parts = zip(x.split(sizes, -1), counts, strict=True)
    q, k, v = (tokens_last(part.unflatten(-1, count)) for part, count in parts)
    parts_of_heads = spread.size, heads.stages
    options = of_heads(call.options, parts_of_heads, spread.rank, stage) | {"return_lse": True}
    if call.cu_seqlens is None:
        result: Result = attention(q, k, v, **options)
        return result
    cu_seqlens, longest = call.cu_seqlens, spread.max_seqlen
    result = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    return result


def _start_outward(x: Tensor, call: Call, spread: Spread) -> Pending:
    """[total, (batch,) heads, dim] of some heads, each rank's tokens on their way to it."""
    rows = by_rank(x, spread.size, spread.layout).contiguous()
    return start(rows.unflatten(0, (spread.size, -1)), AllToAll(call.group))


def _every_head(stages: list[Tensor]) -> Tensor:
    """[tokens, (batch,) num_heads, dim] of [ranks, tokens, (batch,) heads, dim] of each stage."""
    x = torch.stack(stages, 1)  # [ranks, stages, tokens, (batch,) heads, dim]
    return x.movedim((0, 1), (-4, -3)).flatten(-4, -2)
