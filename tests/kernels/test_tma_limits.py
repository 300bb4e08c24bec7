"""Tensors that the kernels of whole sequences on Hopper cannot load or store."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from splitkv.core.device import GPUS
from splitkv.core.kv import Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.hopper.primitives.tma_limits import unfit
from splitkv.planner.registry import make_plan

BF16 = {"dtype": torch.bfloat16}
ROOM = torch.empty(40, 8, 192, **BF16)
STARTS = torch.tensor([0, 40], dtype=torch.int32)
CONTIGUOUS, GAPS_BETWEEN_HEADS = torch.empty(40, 8, 128, **BF16), ROOM[..., :128]
GAPS_BETWEEN_TOKENS = torch.empty(40, 16, 128, **BF16)[:, :8]
EVERY_OTHER_TOKEN = torch.empty(80, 8, 128, **BF16)[::2]
FIRST_ROWS, ONE_TOKEN = torch.empty(60, 8, 128, **BF16)[:40], ROOM.view(-1)[:1024].view(1, 8, 128)


def operands(out: torch.Tensor | None, starts: torch.Tensor | None = STARTS) -> Operands:
    q, k, v = (torch.empty(40, heads, 128, **BF16) for heads in (8, 2, 2))
    return Operands(q, k, v, out, cu_seqlens_q=starts, cu_seqlens_k=starts)


@pytest.mark.parametrize("out", [None, CONTIGUOUS, FIRST_ROWS, ONE_TOKEN])
def test_packed_results_in_one_piece(out: torch.Tensor | None) -> None:
    assert unfit(operands(out)) == []


@pytest.mark.parametrize("out", [GAPS_BETWEEN_HEADS, GAPS_BETWEEN_TOKENS, EVERY_OTHER_TOKEN])
def test_packed_results_with_gaps(out: torch.Tensor) -> None:
    """A tile in which a sequence ends is stored as if rows lay one behind the other: another kernel
    runs, and the plan says why."""
    (reason,) = unfit(operands(out))
    strides = list(out.stride())
    assert reason == f"out: expected packed rows without gaps between, got strides {strides}"
    problem = Problem("varlen", 1, 8, 2, 128, 128, 40, 40, place=Ragged(), lengths="device")
    plan = make_plan(
        replace(problem, mask=Mask(causal=True)),
        GPUS["h200"],
        unfit=lambda kernel: kernel.unfit(operands(out)),
    )
    assert plan.kernel == "prefill"
    assert reason in dict(plan.rejected)["hopper_prefill"]


def test_dense_results_with_gaps() -> None:
    """TMA stores all of their tiles."""
    assert unfit(operands(GAPS_BETWEEN_HEADS.view(1, 40, 8, 128), None)) == []
