"""Sequences over ranks, and what one process makes of them by definition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from rank_tasks import LEAVES, finite
from torch import Tensor

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
    leaves = {name: given[name].clone().requires_grad_() for name in LEAVES}
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
    """Hold what `sequence` gave on every rank to one process, by the tolerance rule."""
    ref = in_one_process(call, upcast=True)
    # the rule of splitkv.testing.check: of few rows one run is a poor measure of the precision
    runs = [in_one_process(call, upcast=False, draw=draw) for draw in range(DRAWS)]
    pt = {
        name: max((run[name] for run in runs), key=lambda x, r=x: (x.double() - r).abs().max())
        for name, x in ref.items()
    }
    assert_lse_close(whole([part["lse"] for part in parts], layout, -1), ref["lse"])
    for name in ("out", "dq", "dk", "dv"):
        found = whole([part[name] for part in parts], layout, -3)
        factor = 2.0 if name == "out" else 3.0
        assert_close(found, ref[name], pt[name], factor=factor, name=name)
    name = "dsink_logits"
    for part in parts:  # summed over the ranks
        assert_close(part[name], ref[name], pt[name], factor=3.0, name=name)
