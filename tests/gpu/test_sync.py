"""No call waits for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, SERVING, fixed_plan, kernels

import splitkv
from splitkv.testing import Codec, Mask, Paged, Ragged, Score, make_operands

Guard = Callable[[], AbstractContextManager[None]]

PROBLEMS = {
    "plain": SERVING,
    "host_lengths": replace(SERVING, lengths="host"),
    "float32": replace(SERVING, dtype="float32"),
    "page_size_1": replace(SERVING, place=Paged(1)),
    "paged": replace(SERVING, place=Paged(16), return_lse=False),
    "everything": replace(
        SERVING, mask=Mask(True, 100, -1, 4), score=Score(True, True), sink_logits=True
    ),
    "int8": replace(SERVING, codec=Codec("int8", "token"), seqlen_k=300),
    "fp8_paged": replace(SERVING, codec=Codec("fp8", "head"), place=Paged(16), seqlen_k=300),
    "many_queries": replace(SERVING, seqlen_q=32, seqlen_k=300),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_decode(name: str, no_host_sync: Guard) -> None:
    call = make_operands(PROBLEMS[name], device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        splitkv.decode(**call)
        with no_host_sync():
            splitkv.decode(**call)
            splitkv.decode(**call | {"softmax_scale": 0.2})  # described, planned and bound anew


@pytest.mark.parametrize("kernel", kernels(SERVING))
def test_decode_with_plan_and_out(kernel: str, no_host_sync: Guard) -> None:
    call = make_operands(SERVING, device=DEVICE)
    out = torch.empty_like(call["q"])
    plan = fixed_plan(SERVING, 256, kernel)
    splitkv.decode(**call, plan=plan, out=out)
    with no_host_sync():
        splitkv.decode(**call, plan=plan, out=out)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
@pytest.mark.parametrize(
    "features",
    [{}, {"sink_logits": True}, {"return_lse": True, "mask": Mask(True, 9, -1, 2)}],
    ids=str,
)
def test_attention_and_its_backward(
    features: dict[str, Any], kind: Any, no_host_sync: Guard
) -> None:
    problem = replace(
        SERVING,
        kind=kind,
        place=Ragged() if kind == "varlen" else SERVING.place,
        lengths="device" if kind == "varlen" else "host",
        seqlen_q=60,
        seqlen_k=80,
        **{"return_lse": False, "needs_grad": True, **features},
    )
    call = make_operands(problem, device=DEVICE)
    function = splitkv.attention if kind == "dense" else splitkv.attention_varlen

    def step() -> None:
        result = function(**call)
        out = result[0] if problem.return_lse else result
        out.backward(torch.ones_like(out))

    step()
    with no_host_sync():
        step()
