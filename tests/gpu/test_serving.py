"""What engines call: buffers, append by slots, merged states, steps, the same bits in any batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE
from torch import Tensor

import splitkv
from splitkv import reference
from splitkv.core.kv import Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.integrations.serving import (
    Pages,
    Plans,
    SharedPrefix,
    Step,
    attend,
    attend_with_prefix,
)
from splitkv.kernels.host.append_call import Append, append_in_torch
from splitkv.testing import assert_close, expected, make_operands

HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 8, 2, 128, 16, 600
SCALE = DIM**-0.5
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_size": (200, -1)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sink_logits": torch.linspace(-2, 2, HEADS)},
}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}


def side_by_side(both: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, keys, heads, dim] of a cache of vLLM [blocks, heads, keys, 2 * dim],
    with the heads or the keys first in memory."""
    both = both if layout == "HND" else both.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = both.transpose(1, 2).split(DIM, dim=-1)
    return k, v


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_out(kind: Any) -> None:
    problem = Problem(kind, 3, 8, 2, 128, 128, 200, 300, mask=Mask(True), return_lse=True)
    if kind == "varlen":
        problem = replace(problem, lengths="device", place=Ragged())
    call = make_operands(problem, device=DEVICE)
    function = splitkv.attention if kind == "dense" else splitkv.attention_varlen
    wanted = function(**call)
    room = random(*wanted[0].shape[:-1], 192).fill_(math.nan)
    out = room[..., :128]
    refs = [expected(problem, call, upcast=up)[0] for up in (True, False)]
    for _ in range(2):
        out.fill_(math.nan)
        result, lse = function(**call, out=out)
        assert result is out
        assert_close(out, *refs)
        torch.testing.assert_close(lse, wanted[1], rtol=1e-5, atol=1e-5)
        if kind == "dense":  # packed rows with gaps between are stored by another kernel
            assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert room[..., 128:].isnan().all()


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("by", ["tensor", "token"])
def test_append(dtype: torch.dtype, layout: str, by: str) -> None:
    k, v = random(100, KV_HEADS, DIM), random(100, KV_HEADS, DIM)
    caches = side_by_side(
        torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * DIM, device=DEVICE).to(dtype), layout
    )
    slots = torch.randperm(BLOCKS * SIZE, device=DEVICE)[:100]
    slots[::7] = -1
    scales: dict[str, Tensor] = {}
    if dtype != torch.bfloat16:
        shape = (1,) if by == "tensor" else (BLOCKS, SIZE, KV_HEADS)
        scales = {name: torch.full(shape, 0.02, device=DEVICE) for name in ("k_scale", "v_scale")}
    other = [x.clone() for x in (*caches, *scales.values())]
    named = dict(zip(scales, other[2:], strict=True))
    append_in_torch(Append(k, v, *other[:2], slots=slots, **named))
    for _ in range(2):
        splitkv.append(k, v, *caches, slots, **scales)
    for x, y in zip((*caches, *scales.values()), other, strict=True):
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("number", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_merge_states(number: int, dtype: torch.dtype) -> None:
    sink = torch.randn(HEADS, device=DEVICE)
    states: list[Tensor] = []
    for _ in range(number):
        lse = 3 * torch.randn(HEADS, 333, device=DEVICE)
        states += random(333, HEADS, DIM, dtype=dtype), lse.masked_fill(lse > 4, -math.inf)
    wide = [x.double() for x in states]
    wanted, of_wanted = reference.merge_states(*wide, sink_logits=sink)
    low = reference.merge_states(*states, sink_logits=sink)[0]
    out, lse = torch.empty_like(states[0]), torch.empty_like(states[1])
    merged = splitkv.merge_states(*states, sink_logits=sink, out=out, lse=lse)
    assert merged[0] is out and merged[1] is lse
    assert_close(out, wanted, low)
    torch.testing.assert_close(lse.double(), of_wanted, rtol=1e-5, atol=1e-5)


class Batch:
    """Sequences in pages, of which each has some new tokens."""

    def __init__(
        self, lengths: list[int], new: list[int], shared: int = 0, layout: str = "NHD"
    ) -> None:
        torch.manual_seed(0)
        self.new = new
        self.pages = Pages(*side_by_side(random(BLOCKS, KV_HEADS, SIZE, 2 * DIM), layout))
        most = -(-max(lengths) // SIZE)
        self.table = torch.randperm(BLOCKS, device=DEVICE)[: len(lengths) * most].int()
        self.table = self.table.view(len(lengths), most)
        self.table[:, :shared] = self.table[0, :shared]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.starts = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
        self.q = random(sum(new) + 5, HEADS, DIM)
        self.numbers = {
            "num_tokens": sum(new),
            "max_seqlen_q": max(new),
            "max_seqlen_k": most * SIZE,
        }

    def compare(self, out: Tensor, options: dict[str, Any]) -> None:
        given = {name: x for name, x in options.items() if name not in ("window_size", "causal")}
        mask = Mask(True, *options.get("window_size", (-1, -1)))
        tensors = self.q[: sum(self.new)], self.pages.k, self.pages.v, self.starts, None
        table = {"page_table": self.table, "cache_seqlens": self.lengths, "mask": mask}
        wanted = [
            reference.attention_varlen(*tensors, **table, **given, upcast=up)[0]
            for up in (True, False)
        ]
        assert_close(out[: sum(self.new)], *wanted)


@pytest.mark.parametrize("policy", ["", "scheduled"])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps(options: str, policy: str) -> None:
    given = on_gpu(OPTIONS[options]) | {"softmax_scale": SCALE}
    batch = Batch([700, 1, 1024, 333, 900], [1, 1, 1, 40, 300])
    step = Step.of(
        batch.starts, batch.lengths, batch.table, num_decodes=3, decode_len=1, **batch.numbers
    )
    out = torch.full_like(batch.q, math.nan)
    plans = Plans(policy, ["decode"])
    for _ in range(2):  # two layers
        attend(batch.q, batch.pages, step, out, given, plans)
    assert len(step.schedules) == (policy == "scheduled")
    batch.compare(out, given)
    assert out[-5:].isnan().all()


@pytest.mark.parametrize("options", ["plain", "softcap", "sinks"])
def test_shared_prefix(options: str) -> None:
    given = on_gpu(OPTIONS[options]) | {"softmax_scale": SCALE}
    batch = Batch([700, 600, 1024, 640, 900], [1, 1, 1, 40, 300], shared=32)
    shared = SharedPrefix.of(
        batch.starts, batch.lengths, batch.table, 32 * SIZE, SIZE, **batch.numbers
    )
    out = torch.full_like(batch.q, math.nan)
    attend_with_prefix(batch.q, batch.pages, shared, out, given)
    batch.compare(out, given)


@pytest.mark.parametrize("policy", ["", "scheduled"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_step_in_a_graph(layout: str, policy: str) -> None:
    """Appended and attended to by two layers, which have run before, as engines do before they
    capture; other lengths, slots and tables at the next replay, and so another schedule."""
    batch = Batch([1024, 900, 3, 40], [1, 1, 1, 1], layout=layout)
    k, v = random(4, KV_HEADS, DIM), random(4, KV_HEADS, DIM)
    slots = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    step = Step.of(
        batch.starts, batch.lengths, batch.table, num_decodes=4, decode_len=1, **batch.numbers
    )
    outs = torch.empty(2, *batch.q.shape, dtype=batch.q.dtype, device=DEVICE)
    plans = Plans(policy, ["decode"])

    def run() -> None:
        splitkv.append(k, v, batch.pages.k, batch.pages.v, slots)
        for out in outs:
            attend(batch.q, batch.pages, step, out, {"softmax_scale": SCALE}, plans)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in ([1024, 900, 3, 40], [1, 1024, 500, 7], [2, 2, 2, 2], [700, 5, 0, 0]):
        batch.lengths.copy_(torch.tensor(lengths))
        k.normal_()
        v.normal_()
        batch.q.normal_()
        at = batch.lengths.long() - 1
        pages = batch.table.gather(1, (at.clamp(min=0) // SIZE)[:, None])[:, 0].long()
        slots.copy_(torch.where(at < 0, -1, pages * SIZE + at % SIZE))
        graph.replay()
        there = slots >= 0  # requests of a graph that nobody has sent have no keys
        assert torch.equal(batch.pages.k.flatten(0, 1)[slots[there]], k[there])
        assert torch.equal(*outs[:, : sum(batch.new)])  # the rest is padding
        batch.compare(outs[0], {"softmax_scale": SCALE})


@pytest.mark.parametrize("kind", ["decode", "varlen"])
@pytest.mark.parametrize("mask", [Mask(True), Mask(True, 300)], ids=str)
def test_bits_in_any_batch(kind: Any, mask: Mask) -> None:
    """By the policy `batch_invariant`: alone, and at any place beside others."""
    seqlen_q = 1 if kind == "decode" else 64
    lengths, most = [3000, 64, 2048, 777], 4096
    k, v = (random(BLOCKS, 64, KV_HEADS, DIM) for _ in range(2))
    table = torch.randint(0, BLOCKS, (4, most // 64), device=DEVICE).int()
    q = random(4, seqlen_q, HEADS, DIM)
    problem = Problem(kind, 1, HEADS, KV_HEADS, DIM, DIM, seqlen_q, most, mask=mask)
    problem = replace(problem, place=Paged(64), lengths="device")

    def run(which: list[int]) -> Tensor:
        own = replace(problem, batch=len(which))
        plan = splitkv.plan(own, policy="batch_invariant")
        given: dict[str, Any] = {
            "page_table": table[which].clone(),
            "cache_seqlens": torch.tensor([lengths[n] for n in which]).int().to(DEVICE),
            "causal": True,
            "window_size": (mask.window_left, -1),
            "plan": plan,
        }
        if kind == "decode":
            return splitkv.decode(q[which], k, v, max_seqlen_k=most, **given)
        starts = (torch.arange(len(which) + 1) * seqlen_q).int().to(DEVICE)
        packed = q[which].flatten(0, 1)
        out = splitkv.attention_varlen(packed, k, v, starts, None, seqlen_q, most, **given)
        return out.unflatten(0, (len(which), seqlen_q))

    alone = [run([n])[0] for n in range(4)]
    for which in ([0, 1, 2, 3], [3, 1], [2, 2, 0, 1, 3, 3] * 40):
        for place, n in enumerate(which[:6]):
            assert torch.equal(run(which)[place], alone[n])
