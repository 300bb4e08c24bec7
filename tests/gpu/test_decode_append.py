"""Decode kernels that write the new tokens themselves: bit for bit `append` and then decode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import appending
import cases
import pytest
import torch
from appending import Step, separately, step
from doors import test_flash_attn_kv_cache as cached
from gpu.test_append import DEVICE
from running import SERVING, kernels, plans
from torch import Tensor

from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.core.variants import Plain
from splitkv.flash_attn import flash_attn_with_kvcache
from splitkv.planner.registry import completed, kernel_named
from splitkv.runtime.append import append
from splitkv.testing import assert_close, bind, captured, expected

AXES: cases.Axes = {
    **appending.AXES,
    "rotary_dim": (64, 32),
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((128, 128), (64, 64), (256, 256), (128, 64)),
    "heads": ((8, 1), (6, 2), (16, 1)),
    "batch": (1, 3, 8),
    "seqlen_q": (1, 2, 4),
    "seqlen_k": (90, 1030),
    "place": (Contiguous(), Paged(16), Paged(64), Paged(1)),
    "mask": (
        Mask(causal=True),
        Mask(),
        Mask(causal=True, window_left=3),
        Mask(causal=True, window_left=200, sink_tokens=5),
        Mask(causal=True, chunk=48),
    ),
    "codec": (None, Codec("int8", "tensor"), Codec("fp8", "head")),
}
SHAPE = ("dtype", "batch", "seqlen_q", "seqlen_k", "place", "mask")


def problem_of(values: cases.Values) -> Problem:
    heads, kv_heads = values["heads"]
    head_dim, head_dim_v = values["head_dims"]
    codec = {} if values["codec"] is None else {"codec": values["codec"]}
    return Problem(
        kind="decode",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        lengths="device",
        return_lse=True,
        **{name: values[name] for name in SHAPE},
        **codec,
    )


def writing(problem: Problem) -> list[str]:
    """The kernels that write new tokens themselves."""
    return [name for name in kernels(problem) if not kernel_named(name).apart(problem)]


CASES = cases.pairs(AXES, appending.valid)
RUNS = [
    pytest.param(values, kernel, id=f"{kernel}-{number}-{values['new']}")
    for number, values in enumerate(CASES)
    for kernel in writing(problem_of(values))
]


def bits(x: Tensor) -> Tensor:
    """NaN, and what a type has no comparison for, as the bits that they are."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def compare(made: Step, plan: Plan) -> None:
    """Twice, as the first call goes through Triton's dispatch."""
    alone, call, problem = separately(made)
    q, after = append(alone)
    call |= {"q": call["q"] if q is None else q, "cache_seqlens": after}
    kernel = kernel_named(plan.kernel)
    config = replace(plan.config, appends=False, variant=Plain())
    apart = completed(replace(plan, problem=problem, config=config))
    out, lse = kernel.launch(bind(problem, call), apart)
    fused = completed(replace(plan, problem=made.problem, config=replace(config, appends=True)))
    there = [made.call[name].clone() for name in ("k_cache", "v_cache")]
    launcher = kernel.bind(fused, made.operands())
    for _ in range(2):
        for name, x in zip(("k_cache", "v_cache"), there, strict=True):
            bits(made.call[name]).copy_(bits(x))
        own, own_lse = launcher(made.operands())
        for name in ("k_cache", "v_cache"):
            assert torch.equal(bits(made.call[name]), bits(call[name])), name
        assert torch.equal(own, out) and torch.equal(own_lse, lse)
    assert launcher.repeat is not None
    assert_close(out, expected(problem, call)[0], expected(problem, call, upcast=False)[0])


@pytest.mark.long
@pytest.mark.parametrize(("values", "kernel"), RUNS)
def test_the_bits_of_two_launches(values: cases.Values, kernel: str) -> None:
    problem, number = problem_of(values), CASES.index(values)
    made = step(problem, values, device=DEVICE, strided=number % 3 == 0)
    if kernel_named(kernel).unfit(made.operands()):  # TMA wants strides in steps of 16 bytes
        made = step(problem, values, device=DEVICE, strided=False)
    for at, plan in enumerate(plans(problem, kernel).values()):
        if (number + at) % 4 == 0:
            compare(made, plan)


EVERY = {name: options[0] for name, options in AXES.items()}


@pytest.mark.parametrize("kernel", writing(SERVING))
@pytest.mark.parametrize("new", ["many", "packed"])
def test_tokens_that_no_row_sees(kernel: str, new: str) -> None:
    values = EVERY | {"new": new, "mask": Mask(True, 2), "batch": 3, "seqlen_k": 300}
    problem = problem_of(values)
    for plan in plans(problem, kernel).values():
        compare(step(problem, values, device=DEVICE), plan)


def step_of_a_model(**changes: Any) -> dict[str, Any]:
    return appending.model_step((8, 2), 64, DEVICE, **changes)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_generation_in_a_graph(num_splits: int) -> None:
    """A key a step from none on, over the ends of tiles and pages: an eager call's bits."""
    call = step_of_a_model(num_splits=num_splits)
    other = {**call, "k_cache": call["k_cache"].clone(), "v_cache": call["v_cache"].clone()}
    other["cache_seqlens"] = call["cache_seqlens"].clone()
    replay, out = captured(lambda: flash_attn_with_kvcache(**call))
    for caches in ("k_cache", "v_cache"):
        other[caches].copy_(call[caches])
    for n in (call, other):
        n["cache_seqlens"].copy_(torch.tensor([0, 60, 127, 1000]))
    for _ in range(70):
        for name in ("q", "k", "v"):
            call[name].normal_()
        replay()
        assert torch.equal(out, flash_attn_with_kvcache(**other))
        for n in (call, other):
            n["cache_seqlens"] += 1
    for name in ("k_cache", "v_cache"):
        assert torch.equal(call[name], other[name])


def test_no_host_sync(no_host_sync: Callable[[], AbstractContextManager[None]]) -> None:
    call = step_of_a_model()
    flash_attn_with_kvcache(**call)
    with no_host_sync():
        flash_attn_with_kvcache(**call)


@pytest.mark.parametrize("features", [{}, {"rows": True}, {"leftpad": True}], ids=str)
@pytest.mark.parametrize("page_size", [None, 8])
def test_by_hand(features: dict[str, Any], page_size: int | None) -> None:
    """What FlashAttention's arguments say of a cache, in one launch."""
    values = cached.PLAIN | {"dtype": torch.bfloat16, "dims": (64, 64), "rotary": "halves"}
    example = cached.Example(values | {"page_size": page_size, "seqlens": (3, 3)} | features)
    ref, _, caches = example.by_hand()
    pt = example.by_hand(upcast=False)[0]
    call = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in example.call.items()}
    out, _ = flash_attn_with_kvcache(**call)
    for name, wanted in caches.items():
        close = {"rtol": 2**-7, "atol": 2**-7, "equal_nan": True}
        torch.testing.assert_close(call[name].cpu(), wanted, **close)
    assert_close(out.flatten(0, 1).cpu(), ref, pt, factor=3.0)
