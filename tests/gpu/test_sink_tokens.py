"""Sink tokens of each sequence: decode by every kernel and plan, whole sequences, in a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import DEVICE, EVERY_PLAN, HERE, SERVING, decode, plan_with, plans
from training import paged

import splitkv
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged, Ragged
from splitkv.core.masks import FAR, Mask
from splitkv.core.problem import Problem
from splitkv.planner.registry import kernel_named
from splitkv.testing import Call, captured, check, make_operands

WINDOW = Mask(True, 200, -1, FAR)
DECODE = replace(SERVING, batch=5, seqlen_k=2000, mask=WINDOW, sequence_sink_tokens=True)
VARLEN = Problem(
    *("varlen", 5, 8, 2, 128, 128, 300, 900),
    mask=Mask(True, 100, -1, FAR),
    place=Ragged(),
    lengths="device",
    return_lse=True,
    sequence_sink_tokens=True,
)
MASKS = (WINDOW, Mask(True, 64, -1, 100), Mask(window_left=90, window_right=3, sink_tokens=FAR))


def can(kernel: str, problem: Problem) -> bool:
    return not kernel_named(kernel).unsupported(problem, HERE)


PLANS = [x for x in EVERY_PLAN if can(x[0], DECODE) and not x[1].startswith("batch")]
# Of 32 and 64 packed rows, of pages that a producer warp copies and that threads gather.
SHAPES: dict[str, dict[str, Any]] = {
    "rows_32": {"num_heads": 32, "num_kv_heads": 1},
    "rows_64": {"num_heads": 32, "num_kv_heads": 1, "seqlen_q": 2},
    "small_pages": {"place": Paged(16)},
    "int8": {"place": Paged(16), "codec": Codec("int8", "token")},
    "fp8": {"place": Paged(32), "codec": Codec("fp8", "head"), "seqlen_q": 3},
    "lengths_on_the_host": {"lengths": "host"},
    "everything": {"sink_logits": True, "seqlen_q": 4, "head_dim_v": 64},
}


@pytest.mark.parametrize(("kernel", "name"), PLANS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_plan_of_decode(kernel: str, name: str, mask: Mask) -> None:
    problem = replace(DECODE, mask=mask)
    run = decode(plan=plans(problem, kernel)[name])
    check(problem, device=DEVICE, run=run, seed=len(name), zero_length=mask is not WINDOW)


@pytest.mark.parametrize("num_splits", [0, 1, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_decode(shape: str, num_splits: int) -> None:
    problem = replace(DECODE, **SHAPES[shape])
    kernels = [k for k in dict.fromkeys(kernel for kernel, _ in PLANS) if can(k, problem)]
    assert kernels
    for kernel in kernels:
        check(problem, device=DEVICE, run=decode(kernel, num_splits), seed=num_splits)


def test_chunks() -> None:
    """Which the kernel for Hopper does not have."""
    problem = replace(DECODE, mask=Mask(True, chunk=512, sink_tokens=FAR))
    check(problem, device=DEVICE, run=decode("decode_split", 5))


@pytest.mark.parametrize("kernel", dict.fromkeys(kernel for kernel, _ in PLANS))
def test_the_bits_of_a_sequence_are_those_of_its_number(kernel: str) -> None:
    plan, call = plan_with(kernel, DECODE, 5), make_operands(DECODE, device=DEVICE)
    numbers = torch.tensor([4, 0, 1500, 2**31 - 1, -7], dtype=torch.int32)
    call["sink_tokens"] = numbers.to(DEVICE)
    out, lse = splitkv.decode(**call, plan=plan)
    for b, number in enumerate(numbers.clamp(0, FAR).tolist()):
        mask = replace(WINDOW, sink_tokens=number)
        alike = replace(DECODE, mask=mask, sequence_sink_tokens=False)
        of_all = {"sink_tokens": number, "max_sink_tokens": None}
        one = splitkv.decode(**call | of_all, plan=replace(plan, problem=alike))
        assert torch.equal(out[b], one[0][b]) and torch.equal(lse[b], one[1][b])


@pytest.mark.parametrize("function", ["decode", "attention_varlen"])
def test_in_a_graph(function: str) -> None:
    """Other numbers, and lengths, at the next replay."""
    problem = replace(DECODE if function == "decode" else VARLEN, return_lse=False)
    call = make_operands(problem, device=DEVICE, poison=False)
    run = getattr(splitkv, function)
    replay, out = captured(lambda: run(**call))
    for seed in (1, 2):
        other = make_operands(problem, seed=seed)
        call["sink_tokens"].copy_(other["sink_tokens"])
        if function == "decode":
            call["cache_seqlens"].copy_(other["cache_seqlens"])
        replay()
        assert torch.equal(out, run(**call))


def test_an_address_of_no_multiple_of_16() -> None:
    """Which is another specialisation of the kernel, every time."""
    call = make_operands(DECODE, device=DEVICE)
    wanted, _ = splitkv.decode(**call)
    numbers = torch.zeros(DECODE.batch + 1, dtype=torch.int32, device=DEVICE)
    numbers[1:] = call["sink_tokens"]
    for _ in range(2):
        out, _ = splitkv.decode(**call | {"sink_tokens": numbers[1:]})
        assert torch.equal(out, wanted)
    again, _ = splitkv.decode(**call)
    assert torch.equal(again, wanted)


def whole(num_splits: int = 1, merge: Any = "combine") -> Any:
    """`run=` of `check` for whole sequences: `prefill`, the first that can, so often cut."""

    def launch(problem: Problem, call: Call) -> Any:
        function = splitkv.attention if problem.kind == "dense" else splitkv.attention_varlen
        made = splitkv.plan(problem, device=HERE)
        assert made.kernel == "prefill"
        config = replace(made.config, num_splits=num_splits, merge=merge)
        results = [function(**call, plan=replace(made, config=config)) for _ in range(2)]
        assert torch.equal(results[0][0], results[1][0])
        return results[1]

    return launch


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mask", [*MASKS, Mask(True, chunk=128, sink_tokens=FAR)], ids=str)
def test_packed_sequences(mask: Mask, seed: int) -> None:
    check(replace(VARLEN, mask=mask), device=DEVICE, run=whole(), seed=seed)


@pytest.mark.parametrize("merge", ["combine", "last"])
@pytest.mark.parametrize("codec", [AS_IS, Codec("int8", "token")], ids=str)
def test_few_queries_of_pages_by_splits(codec: Codec, merge: Any) -> None:
    problem = replace(VARLEN, seqlen_q=40, codec=codec)

    def of_pages(problem: Problem, call: Call) -> Any:
        problem, call = paged(problem, call, 16)
        made = splitkv.plan(problem, device=HERE)
        config = replace(made.config, num_splits=4, merge=merge)
        return splitkv.attention_varlen(**call, plan=replace(made, config=config))

    check(problem, device=DEVICE, run=of_pages)


def test_dense_batches() -> None:
    problem = replace(VARLEN, kind="dense", place=Contiguous(), lengths="host", seqlen_q=200)
    check(problem, device=DEVICE, run=whole())
    assert "sink_tokens: expected one number" in str(splitkv.explain(problem, device=HERE))


def test_gradients_are_those_of_torch() -> None:
    problem = replace(VARLEN, needs_grad=True, seqlen_q=60, seqlen_k=190, dtype="float32")
    with pytest.warns(UserWarning, match="attention_varlen runs on torch"):
        check(problem, device=DEVICE)
