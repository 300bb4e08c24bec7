"""Calls of `decode` whose last tokens are not in the cache yet: what kernels that append are given.

The definition is `append` and then decode without it; both are made from one problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cases
import torch
from torch import Tensor

from splitkv.core.problem import Operands, Problem
from splitkv.kernels.host.append_call import Append, Rotary
from splitkv.testing import Call, bind, make_operands

ROTARY_ROWS = 400
AXES: cases.Axes = {
    "new": ("each", "several", "none", "packed", "many"),
    "rotary": (None, "interleaved", "halves"),
    "rotary_dim": (16, 32),
    "start": (False, True),
    "q_step": (1, 0),
    "leftpad": (False, True),
    "table": ("float32", "same"),
}


def valid(values: cases.Values) -> bool:
    """Padding moves where the rotation starts, which is then said."""
    rotary = values.get("rotary", "")
    if rotary is None and (values.get("start") or values.get("q_step") == 0):
        return False
    return not (values.get("leftpad") and rotary and values.get("start") is False)


class Step(NamedTuple):
    """A call with the lengths before, what is appended, and the same in two launches."""

    problem: Problem
    call: Call
    new: Append

    def operands(self) -> Operands:
        """For a kernel that appends; it writes into the caches of the call."""
        return replace(bind(self.problem, self.call), new=self.new)


def new_counts(values: cases.Values, keys: Sequence[int]) -> list[int]:
    """New tokens of each sequence of so many keys in the end."""
    kind, longest = values["new"], min(keys)
    if kind == "packed":
        return [min(n, count) for n, count in zip(keys, (3, 0, 9, 1, 5) * len(keys), strict=False)]
    return [min({"each": 1, "several": 6, "none": 0, "many": 40}[kind], longest)] * len(keys)


def step(problem: Problem, values: cases.Values, *, device: str = "cpu", **options: Any) -> Step:
    """A Step of a decode problem with lengths on the device; of the values of `AXES`."""
    call = make_operands(problem, device=device, **options)
    g = torch.Generator().manual_seed(5)
    keys = call["cache_seqlens"].tolist()
    counts = new_counts(values, keys)
    packed = values["new"] == "packed"
    lead = (sum(counts),) if packed else (problem.batch, counts[0])
    dtype = getattr(torch, problem.dtype)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(dtype).to(device)

    def index(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    before = [n - count for n, count in zip(keys, counts, strict=True)]
    padding = [(3 * b) % 5 for b in range(problem.batch)]
    named: dict[str, Any] = {}
    if packed:
        named["cu_seqlens_new"] = torch.tensor((0, *counts)).cumsum(0).int().to(device)
    if values["rotary"] is not None:
        angles = 6 * torch.rand(ROTARY_ROWS, values["rotary_dim"] // 2, generator=g)
        to = {"float32": torch.float32, "same": dtype}[values["table"]]
        cos, sin = (x.to(to).to(device) for x in (angles.cos(), angles.sin()))
        start = index([7 * b + 2 for b in range(problem.batch)]) if values["start"] else None
        interleaved = values["rotary"] == "interleaved"
        named["rotary"] = Rotary(cos, sin, start, interleaved, values["q_step"])
        named["q"] = call["q"]
    if call["k_scale"] is not None:
        named |= {n: call[n] * 1.0 for n in ("k_scale", "v_scale")}
    if values["leftpad"]:
        named["leftpad"] = index(padding)
        before = [n + pad for n, pad in zip(before, padding, strict=True)]
    k, v = (
        random(*lead, problem.num_kv_heads, dim) for dim in (problem.head_dim, problem.head_dim_v)
    )
    caches = call["k_cache"], call["v_cache"]
    new = Append(k, v, *caches, before=index(before), page_table=call["page_table"], **named)
    rotary = values["rotary"] is not None
    appending = replace(problem, seqlen_new=new.tokens_a_sequence, rotary=rotary)
    return Step(appending, call | {"cache_seqlens": new.before}, new)


def separately(step: Step) -> tuple[Append, Call, Problem]:
    """The call of `append`, with caches of its own and without padding, which moves nothing in
    terms of keys; and the call that follows it, but for q and the lengths."""
    own = {name: step.call[name].clone() for name in ("k_cache", "v_cache")}
    new = step.new._replace(**own)
    if new.leftpad is not None:
        new = new._replace(before=new.before - new.leftpad, leftpad=None)
    return new, step.call | own, replace(step.problem, seqlen_new=0, rotary=False)


def model_step(
    heads: tuple[int, int], page_size: int, device: str | torch.device, **changes: Any
) -> dict[str, Any]:
    """Arguments of flash_attn_with_kvcache in a served model: append, rotate and attend, a batch in
    pages; heads of q and of the cache."""
    (num_heads, kv_heads), batch, dim, pages = heads, 4, 128, 64
    angles = 6 * torch.rand(pages * page_size, dim // 2, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    return {
        "q": random(batch, 1, num_heads, dim),
        "k_cache": random(batch * pages, page_size, kv_heads, dim),
        "v_cache": random(batch * pages, page_size, kv_heads, dim),
        "k": random(batch, 1, kv_heads, dim),
        "v": random(batch, 1, kv_heads, dim),
        "rotary_cos": angles.cos().bfloat16(),
        "rotary_sin": angles.sin().bfloat16(),
        "cache_seqlens": torch.tensor([700, 3, 0, 1023], dtype=torch.int32, device=device),
        "page_table": torch.randperm(batch * pages, device=device).view(batch, pages).int(),
        "causal": True,
        **changes,
    }
