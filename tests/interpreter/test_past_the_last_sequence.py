"""Packed tokens after the last sequence, in Triton's interpreter: they see nothing, nothing sees
them, and what sequences have is not read for one more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cases
import pytest
import torch
from interpreting import accesses_within_tensors
from training import problem_of

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels import records
from splitkv.planner.registry import completed
from splitkv.testing import assert_close, assert_lse_close, bind, expected, make_operands

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def bounds_are_checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    accesses_within_tensors(monkeypatch)
    yield


def run(problem: Problem, operands: Operands, parts: int) -> Any:
    config = Config(tile_m=16, tile_n=16, num_splits=parts)
    plan = completed(Plan(problem, GPUS["a100"], "fixed", "prefill", config, "a test"))
    return records.PREFILL.launch(operands, plan)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("more", [(3, 0), (3, 5), (0, 5)], ids=str)
def test_slopes_of_sequences(more: tuple[int, int], parts: int) -> None:
    values: cases.Values = {
        **{"kind": "varlen", "head_dims": (32, 32), "group": 2, "num_kv_heads": 2, "batch": 2},
        **{"seqlens": (5, 40), "mask": Mask(True, 9, -1, 2), "alibi": True, "softcap": False},
        "sink_logits": True,
    }
    problem = problem_of(values, return_lse=True, needs_grad=True)
    call: dict[str, Any] = make_operands(problem)
    call["alibi_slopes"] = (torch.rand(2, 4) + 0.05).requires_grad_()
    for name, tokens in (("q", more[0]), ("k", more[1]), ("v", more[1])):
        x = call[name].detach()
        behind = torch.randn(tokens, *x.shape[1:]).to(x)
        call[name] = torch.cat((x, behind)).requires_grad_()
    out, lse = run(problem, bind(problem, call), parts)
    ref, ref_lse = expected(problem, call)
    pt, _ = expected(problem, call, upcast=False)
    assert_close(out, ref, pt)
    assert_lse_close(lse, ref_lse)
    names = ("q", "k", "v", "alibi_slopes", "sink_logits")
    leaves, cotangent = [call[name] for name in names], torch.randn(out.shape).to(out)
    grads = [torch.autograd.grad(x, leaves, cotangent.to(x)) for x in (out, ref, pt)]
    for name, actual, exact, rounded in zip(names, *grads, strict=True):
        assert_close(actual, exact, rounded, factor=3.0, name=f"d{name}")


@pytest.mark.parametrize("parts", [1, 3])
def test_scales_of_sequences(parts: int) -> None:
    """Behind which there is NaN, that would come out."""
    g = torch.Generator().manual_seed(0)
    batch, tokens, page_size = 2, 12, 16
    k, v = (
        (40 * torch.randn(batch, page_size, 1, 32, generator=g)).round().to(torch.int8)
        for _ in "kv"
    )
    scales = torch.full((batch + 1, 1), math.nan)
    scales[:batch] = 0.02
    problem = Problem(
        *("varlen", batch, 2, 1, 32, 32, 5, page_size, "bfloat16", Mask(True)),
        place=Paged(page_size),
        codec=Codec("int8", "head"),
        lengths="device",
        return_lse=True,
    )
    operands = Operands(
        torch.randn(tokens, 2, 32, generator=g).bfloat16(),
        *(k, v),
        page_table=torch.arange(batch, dtype=torch.int32)[:, None],
        cache_seqlens=torch.tensor([16, 12], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 5, 9], dtype=torch.int32),
        softmax_scale=0.2,
        k_scale=scales[:batch],
        v_scale=scales[:batch],
    )
    out, lse = run(problem, operands, parts)
    assert out[:9].isfinite().all() and lse[:, :9].isfinite().all()
    assert (out[9:] == 0).all() and (lse[:, 9:] == -math.inf).all()
