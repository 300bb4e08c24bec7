"""Output in e4m3 by a scale: every kernel that stores it, relaunched and in a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING, kernels, plan_with, plans
from torch import Tensor

import splitkv
from splitkv.core.kv import Codec, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.testing import Call, captured, check, make_operands

IN_8_BITS = replace(SERVING, out_scale=True)
EVERY_PLAN = [(kernel, name) for kernel in kernels(IN_8_BITS) for name in plans(IN_8_BITS, kernel)]
DENSE = Problem(
    *("dense", 2, 8, 2, 128, 128, 300, 700), mask=Mask(True), return_lse=True, out_scale=True
)


def nothing(problem: Problem, like: Tensor) -> Tensor:
    """An `out` that is full of NaN."""
    shape = *like.shape[:-1], problem.head_dim_v
    made = torch.full(shape, 0x7F, dtype=torch.uint8, device=like.device)
    return made.view(torch.float8_e4m3fn)


def twice(plan: splitkv.Plan | None = None) -> Any:
    """`run=` of `check`: through Triton, and what that compiled launched again."""

    def run(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        function = {"decode": splitkv.decode, "dense": splitkv.attention}.get(problem.kind)
        function = function or splitkv.attention_varlen
        outs = []
        for _ in range(3):
            out = nothing(problem, call["q"])
            made = function(**call, out=out, plan=plan)
            result, lse = made if problem.return_lse else (made, None)
            assert result is out
            outs.append(out.view(torch.uint8))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        return out, lse

    return run


@pytest.mark.parametrize(("kernel", "name"), EVERY_PLAN)
def test_decode(kernel: str, name: str) -> None:
    check(IN_8_BITS, device=DEVICE, run=twice(plans(IN_8_BITS, kernel)[name]))


@pytest.mark.parametrize("codec", [Codec("fp8", "head"), Codec("int8", "token")], ids=str)
@pytest.mark.parametrize("kernel", kernels(IN_8_BITS))
def test_decode_of_8_bits(kernel: str, codec: Codec) -> None:
    problem = replace(IN_8_BITS, codec=codec, place=Paged(16), seqlen_q=4, sink_logits=True)
    check(problem, device=DEVICE, run=twice(plan_with(kernel, problem)), zero_length=True)


@pytest.mark.parametrize("kernel", kernels(IN_8_BITS))
def test_a_slice_of_the_caller(kernel: str) -> None:
    """The same bits, and nothing beside them."""
    problem = replace(IN_8_BITS, return_lse=False)
    call, plan = make_operands(problem, device=DEVICE), plan_with(kernel, problem)
    room = torch.full((4, 1, 9, 144), 0x55, dtype=torch.uint8, device=DEVICE)
    out = room.view(torch.float8_e4m3fn)[:, :, 1:, 16:]
    assert splitkv.decode(**call, out=out, plan=plan) is out
    wanted = splitkv.decode(**call, plan=plan).view(torch.uint8)
    assert torch.equal(room[:, :, 1:, 16:], wanted)
    assert (room[:, :, 0] == 0x55).all() and (room[..., :16] == 0x55).all()


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize("codec", [Codec(), Codec("fp8", "head")], ids=str)
def test_prefill(kind: Any, codec: Codec) -> None:
    of_kind = {"kind": kind}
    if kind == "varlen":
        of_kind |= {"place": Ragged(), "lengths": "device"}
    problem = replace(DENSE, codec=codec, **of_kind)
    call = make_operands(problem, device=DEVICE)
    positional = [call[n] for n in ("q", "k", "v")]
    rest = {n: x for n, x in call.items() if n not in ("q", "k", "v")}
    made = splitkv.plan(*positional, **rest, dense=kind == "dense")
    assert made.kernel == "prefill"
    check(problem, device=DEVICE, run=twice())


@pytest.mark.parametrize("kernel", kernels(IN_8_BITS))
def test_in_a_graph(kernel: str) -> None:
    """The scale is read on the device: another one at the next replay."""
    problem = replace(IN_8_BITS, return_lse=False)
    call, plan = make_operands(problem, device=DEVICE), plan_with(kernel, problem)
    replay, out = captured(lambda: splitkv.decode(**call, plan=plan))
    for scale in (0.0043, 0.02):
        call["out_scale"].fill_(scale)
        replay()
        wanted = splitkv.decode(**call, plan=plan)
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
