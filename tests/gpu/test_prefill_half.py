"""8-bit keys on `hopper_prefill_half` against the reference: sequences, caches, pages, parts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, HERE, same_bits
from torch import Tensor
from training import QUANTISED_AXES, called, has_units, paged, plan_on, problem_of

import splitkv
from splitkv.core.kv import Codec
from splitkv.kernels.records import HOPPER_PREFILL_HALF as KERNEL
from splitkv.testing import (
    Call,
    Contiguous,
    Mask,
    Paged,
    Problem,
    Ragged,
    assert_close,
    bind,
    captured,
    check,
    expected,
    make_operands,
)

AXES: cases.Axes = {
    **QUANTISED_AXES,
    "kind": ("dense", "varlen", "decode"),
    "codec": tuple(value for value in cases.CODECS_ALIKE if isinstance(value, cases.Alike)),
    "products": ("half", "full"),
    "group": (1, 6, 16),
    "batch": (1, 3, 9),
    "seqlens": ((513, 700), (200, 333), (3, 700), (300, 120)),
    "page_size": (0, 16, 48, 256),
    "mask": (Mask(True), Mask(), Mask(True, 60, -1, 5), Mask(True, 130)),
    "parts": ((1, "combine"), (3, "combine"), (2, "last")),
    "tile_m": (64, 128, 192),
}


def valid(values: cases.Values) -> bool:
    pages = bool(values.get("page_size")) and values.get("kind") == "dense"
    no_lse = values.get("codec", Codec()).name == "fp8" and values.get("return_lse", False)
    return has_units(values) and not pages and not no_lse


PAIRS = cases.pairs(AXES, valid)
plan_of = partial(plan_on, KERNEL)


def run(
    problem: Problem, call: Call, plan: splitkv.Plan | None = None
) -> tuple[Tensor, Tensor | None]:
    return called(problem, call, plan=plan or plan_of(problem))


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs(number: int) -> None:
    """Three times the same bits: through Triton, and by addresses."""
    values = dict(PAIRS[number])
    page_size, tile_m = values.pop("page_size"), values.pop("tile_m")
    parts, merge = values.pop("parts")
    given = problem_of(values)
    asked, packed = given, given.kind == "varlen"
    if given.kind != "dense":
        place = Paged(page_size) if page_size else given.place
        asked = replace(given, place=place, lengths="device")
    plan = plan_of(asked)
    if plan.kernel == KERNEL.name:
        shapes = (c for c in KERNEL.configs(asked, HERE) if c.tile_m == tile_m)
        config = replace(next(shapes, plan.config), num_splits=parts)
        plan = replace(plan, config=replace(config, merge=merge if parts > 1 else "combine"))

    def thrice(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        if packed and page_size:
            problem, call = paged(problem, call, page_size)
        first = run(problem, call, plan)
        assert all(same_bits(run(problem, call, plan), first) for _ in range(2))
        return first

    asked = given if packed else asked
    zero_length = given.kind != "dense" and given.batch > 1
    check(asked, device=DEVICE, run=thrice, zero_length=zero_length)


PROMPTS = Problem("dense", 2, 16, 1, 128, 128, 2048, 2048, mask=Mask(True))
CHUNKS = Problem("decode", 1, 32, 4, 128, 128, 2048, 8192, mask=Mask(True), lengths="device")
SMALL = replace(PROMPTS, seqlen_q=300, codec=Codec("int8", "head"), products="half")
SERVED = {
    "int8": replace(PROMPTS, codec=Codec("int8", "head"), products="half", q_granularity="token"),
    "e4m3": replace(PROMPTS, codec=Codec("fp8", "head"), products="full"),
    "chunk": replace(CHUNKS, codec=Codec("fp8", "head"), place=Paged(16), products="half"),
}
SERVED = {name: p for name, p in SERVED.items() if not KERNEL.unsupported(p, HERE)}


@pytest.mark.parametrize("problem", SERVED.values(), ids=SERVED)
def test_many_rows_are_served_here(problem: Problem) -> None:
    """Without being asked."""
    plan = splitkv.plan(problem)
    assert plan.kernel == KERNEL.name
    check(problem, device=DEVICE, run=partial(run, plan=plan))


@pytest.mark.parametrize("page_size", [0, 16])
def test_lengths_that_change_between_replays(page_size: int) -> None:
    """Values are those that sequences hold when the graph runs."""
    problem = Problem("decode", 3, 8, 2, 128, 128, 64, 1000, mask=Mask(True), lengths="device")
    place = Paged(page_size) if page_size else Contiguous()
    problem = replace(problem, place=place, codec=Codec("int8", "head"), products="half")
    call = make_operands(problem, lengths=(1000, 1000, 1000), device=DEVICE)  # keys for any lengths
    plan = plan_of(problem)
    replay, (out, _) = captured(lambda: run(problem, call, plan))
    for lengths in ((1000, 3, 517), (0, 999, 64)):
        call["cache_seqlens"].copy_(torch.tensor(lengths))
        replay()
        assert out.isfinite().all()
        assert same_bits((out, None), run(problem, call, plan))


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_not_finite_in_a_row_stays_in_it(codec: Any, dtype: str) -> None:
    """A row of q with NaN or infinity has an output of NaN, others are as they were."""
    problem = Problem("dense", 1, 4, 2, 128, 128, 256, 300, dtype=dtype, mask=Mask(True))
    problem = replace(problem, codec=Codec(codec, "head"), products="half")
    call = make_operands(problem, device=DEVICE)
    clean, _ = run(problem, call)
    call["q"][0, 5, 1, 17], call["q"][0, 130, 3, 2] = math.nan, -math.inf
    out, _ = run(problem, call)
    if splitkv.plan(problem).kernel.startswith("hopper"):
        assert out[0, 5, 1].isnan().all() and out[0, 130, 3].isnan().all()
    for token, head in ((5, 1), (130, 3)):
        out[0, token, head] = clean[0, token, head]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_outliers(codec: Any) -> None:
    """Keys and values of which a few channels, and a few tokens, are a hundred times the others."""
    problem = replace(PROMPTS, seqlen_q=300, seqlen_k=700)
    call = make_operands(problem, device=DEVICE)
    for x in (call["k"], call["v"]):
        x[..., 5] *= 30
        x[:, 77] *= 100
    stored = splitkv.quantize_kv(call["k"], call["v"], codec, "head")
    call |= stored._asdict() | {"products": "half"}
    del call["k_mean"]
    problem = replace(problem, codec=Codec(codec, "head"), products="half")
    out, _ = run(problem, call)
    working = expected(problem, call, upcast=False)[0]
    assert_close(out, expected(problem, call)[0], working)


@pytest.mark.skipif(bool(KERNEL.unsupported(SMALL, HERE)), reason="runs on Hopper")
def test_addresses_that_tma_cannot_take() -> None:
    """The same layout and launcher, one call 8 bytes further: another kernel, and a warning."""
    call = make_operands(SMALL, device=DEVICE)
    launcher = KERNEL.bind(plan_of(SMALL), bind(SMALL, call))
    launcher(bind(SMALL, call))
    odd = torch.empty(call["k"].numel() + 8, dtype=torch.int8, device=DEVICE)[8:]
    moved = call | {"k": odd.view(call["k"].shape).copy_(call["k"])}
    with pytest.warns(UserWarning, match="this call runs on prefill: k: expected strides"):
        out, _ = launcher(bind(SMALL, moved))
    assert_close(out, expected(SMALL, call)[0], expected(SMALL, call, upcast=False)[0])


def test_packed_keys_keep_their_bounds() -> None:
    """cu_seqlens_k is the caller's: sequences of any length, and tokens after the last."""
    problem: Any = Problem("varlen", 3, 8, 2, 128, 128, 300, 700, mask=Mask(True), lengths="device")
    problem = replace(problem, place=Ragged(), codec=Codec("fp8", "head"), products="half")
    check(problem, device=DEVICE, run=run, zero_length=True)


@pytest.mark.parametrize("products", ["half", "full"])
def test_sequences_in_pages_have_scales_of_their_own(products: Any) -> None:
    """[batch, num_kv_heads] of packed queries, by each kernel that reads keys as they are."""
    problem = Problem("varlen", 3, 8, 2, 128, 128, 100, 300, mask=Mask(True), lengths="device")
    problem = replace(problem, place=Ragged(), codec=Codec("int8", "head"), products=products)
    there, call = paged(problem, make_operands(problem, device=DEVICE), 16)
    by = torch.tensor([1.0, 0.5, 2.0], device=DEVICE)[:, None]
    scales = {name: call[name] * by for name in ("k_scale", "v_scale")}
    names = (KERNEL.name, "hopper_prefill_quantised", "prefill")
    kernels = [splitkv.planner.registry.kernel_named(name) for name in names]
    outs = [
        called(there, call | scales, plan=plan_on(kernel, there))[0]
        for kernel in kernels
        if not kernel.unsupported(there, HERE)
    ]
    for out in outs[:-1]:
        assert (out - outs[-1]).norm() < 0.02 * outs[-1].norm()
