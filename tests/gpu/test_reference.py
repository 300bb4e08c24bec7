"""The definition on the GPU, held to PyTorch's own attention and to itself on the CPU."""

from __future__ import annotations

from dataclasses import replace

import cases
import pytest
import torch
from running import DEVICE, SERVING
from torch.nn import functional as F

from splitkv import reference
from splitkv.core.masks import Mask
from splitkv.testing import Call, Problem, Ragged, assert_close, check, expected, make_operands


def sdpa(problem: Problem, call: Call, dtype: torch.dtype) -> torch.Tensor:
    """The same call by scaled_dot_product_attention, its mask written out."""
    q, k, v = (call[n].to(dtype).transpose(1, 2) for n in ("q", "k", "v"))
    rows = problem.mask.materialize(problem.seqlen_q, problem.seqlen_k)
    mask = torch.tensor(rows, device=q.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("mask", [Mask(), Mask(True), Mask(True, 30, -1, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_against_sdpa(head_dim: int, mask: Mask, dtype: str) -> None:
    problem = Problem("dense", 2, 8, 2, head_dim, head_dim, 150, 200, dtype, mask=mask)
    call = make_operands(problem, device=DEVICE)
    working = getattr(torch, dtype)
    ref, _ = expected(problem, call)
    pt, _ = expected(problem, call, upcast=False)
    assert_close(ref.to(working), sdpa(problem, call, torch.float64), pt)
    assert_close(sdpa(problem, call, working), ref, pt)


@pytest.mark.parametrize("case", [*cases.PAIRWISE[::8], *cases.QUANTIZED[::4]], ids=str)
def test_the_gpu_and_the_cpu_agree(case: cases.Case) -> None:
    on_cpu, on_gpu = (
        make_operands(case.problem, device=d, **case.options) for d in ("cpu", DEVICE)
    )
    results = []
    for call in (on_cpu, on_gpu):
        mask = case.problem.mask
        of_mask = {"mask", "sink_tokens", "upcast", "return_lse"}  # or of what is asked
        names = reference.decode.__kwdefaults__.keys() - of_mask
        given = {n: x for n, x in call.items() if n in {"q", "k_cache", "v_cache", *names}}
        results.append(reference.decode(**given, mask=mask, upcast=torch.float64))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {"mask": Mask(True)},
        {"mask": Mask(True, 40, -1, 4), "sink_logits": True},
        {"score": cases.Score(True, True), "return_lse": True, "mask": Mask(True)},
        {"deterministic": True, "mask": Mask(True)},
    ],
    ids=["plain", "causal", "window", "scores", "deterministic"],
)
def test_attention(features: cases.Values, dtype: str, kind: str) -> None:
    """What serves attention on the GPU, forward and backward."""
    problem = replace(
        SERVING,
        kind=kind,
        place=Ragged() if kind == "varlen" else SERVING.place,
        lengths="device" if kind == "varlen" else "host",
        seqlen_q=120,
        seqlen_k=190,
        dtype=dtype,
        **{"return_lse": False, "mask": Mask(), "needs_grad": True, **features},
    )
    check(problem, device=DEVICE, zero_length=kind == "varlen")
