"""The policy `batch_invariant` run as Python: a sequence has the same bits in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.planner.policies import batch_invariant
from splitkv.testing import bind

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
A100, PAGE, PAGES, LONGEST = GPUS["a100"], 16, 40, 192
HEADS, KV_HEADS, DIM = 4, 2, 32


def planned(kernel: Any, problem: Problem) -> Plan:
    """By the policy, with parts so small that a few keys are several."""
    with mock.patch.object(batch_invariant, "LEAST_KEYS", 64):
        choice = batch_invariant.choose(problem, A100, [kernel])
    return Plan(problem, A100, "batch_invariant", choice.kernel, choice.config, choice.why)


def cache(codec: Codec) -> dict[str, Tensor]:
    pages = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM, dtype=torch.float16)
    made = {"k": pages[0], "v": pages[1]}
    if codec.name == "fp8":
        made = {name: x.to(torch.float8_e4m3fn) for name, x in made.items()}
        made |= {"k_scale": torch.tensor([0.7]), "v_scale": torch.tensor([1.3])}
    return made


@pytest.mark.parametrize("codec", [Codec(), Codec("fp8", "tensor")], ids=str)
@pytest.mark.parametrize("mask", [Mask(True), Mask(True, 70)], ids=str)
def test_decode(codec: Codec, mask: Mask) -> None:
    """Alone, beside others, and at another place among them."""
    held = cache(codec)
    lengths = LONGEST, 1, 130, 64
    q = torch.randn(4, 1, HEADS, DIM, dtype=torch.float16)
    table = torch.randint(0, PAGES, (4, LONGEST // PAGE)).int()
    problem = Problem("decode", 1, HEADS, KV_HEADS, DIM, DIM, 1, LONGEST, "float16", mask=mask)
    problem = replace(problem, place=Paged(PAGE), codec=codec, lengths="device", return_lse=True)

    def run(which: list[int]) -> tuple[Tensor, Tensor]:
        call: dict[str, Any] = {
            "softmax_scale": None,
            "q": q[which],
            "k_cache": held["k"],
            "v_cache": held["v"],
            "cache_seqlens": torch.tensor([lengths[n] for n in which], dtype=torch.int32),
            "page_table": table[which],
        }
        call |= {name: x for name, x in held.items() if name.endswith("scale")}
        own = replace(problem, batch=len(which))
        plan = planned(records.DECODE_SPLIT, own)
        assert plan.config.num_splits > 1 and plan.config.schedule == "fixed"
        out, lse = records.DECODE_SPLIT.launch(bind(own, call), plan)
        return out, lse

    alone = [run([n]) for n in range(4)]
    for which in ([0, 1, 2, 3], [3, 2], [2, 2, 0, 1, 3, 3]):
        out, lse = run(which)
        for place, n in enumerate(which):
            assert torch.equal(out[place], alone[n][0][0])
            assert torch.equal(lse[place], alone[n][1][0])


@pytest.mark.parametrize("mask", [Mask(True), Mask(True, 40)], ids=str)
def test_chunks_of_prompts(mask: Mask) -> None:
    """A prompt, its second part and its last token, alone and beside others at every place."""
    held, length = cache(Codec()), 50
    q = torch.randn(length, HEADS, DIM, dtype=torch.float16)
    table = torch.randperm(PAGES)[: LONGEST // PAGE].int()
    other = torch.randint(0, PAGES, (LONGEST // PAGE,)).int()
    problem = Problem("varlen", 1, HEADS, KV_HEADS, DIM, DIM, 64, LONGEST, "float16", mask=mask)
    problem = replace(problem, place=Paged(PAGE), lengths="device", return_lse=True)

    def run(chunks: list[tuple[int, int, bool]]) -> list[Tensor]:
        """Of chunks (first, past the last, whether it is of the prompt and not beside it)."""
        counts = torch.tensor([0] + [end - start for start, end, _ in chunks])
        call: dict[str, Any] = {
            "softmax_scale": None,
            "q": torch.cat([q[start:end] for start, end, _ in chunks]),
            "k": held["k"],
            "v": held["v"],
            "cu_seqlens_q": counts.cumsum(0).int(),
            "cu_seqlens_k": None,
            "page_table": torch.stack([table if own else other for *_, own in chunks]),
            "cache_seqlens": torch.tensor([end for _, end, _ in chunks], dtype=torch.int32),
        }
        own = replace(problem, batch=len(chunks))
        call |= {"max_seqlen_q": 64, "max_seqlen_k": LONGEST}
        out, _ = records.PREFILL.launch(bind(own, call), planned(records.PREFILL, own))
        return list(out.split(counts[1:].tolist()))

    chunks = [(0, length, True), (33, length, True), (length - 1, length, True)]
    alone = [run([chunk])[0] for chunk in chunks]
    others = (3, 20, False), (0, 7, False), (49, 50, False)
    for chunk, wanted in zip(chunks, alone, strict=True):
        for place in range(4):
            batch = [*others[:place], chunk, *others[place:]]
            assert torch.equal(run(batch)[place], wanted)
