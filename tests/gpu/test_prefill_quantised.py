"""8-bit keys on `hopper_prefill_quantised` against the reference: sequences, caches, few rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import pytest
import torch
from running import DEVICE, HERE, each_shape, label, plan_of_config, said, same_bits
from torch import Tensor
from training import FUNCTION, QUANTISED_AXES, called, has_units, paged, plan_on, problem_of

import splitkv
from splitkv.core.kv import Codec
from splitkv.core.plan import Config
from splitkv.core.scores import Score
from splitkv.core.variants import Plain
from splitkv.kernels.records import HOPPER_PREFILL_QUANTISED as KERNEL
from splitkv.planner.policies.shared import clusters, shapes
from splitkv.testing import (
    Call,
    Contiguous,
    Mask,
    Paged,
    Problem,
    Ragged,
    assert_close,
    assert_lse_close,
    bind,
    check,
    expected,
    make_operands,
)

INT8 = Problem("dense", 2, 16, 2, 128, 128, 513, 700, mask=Mask(True), codec=Codec("int8", "head"))
INT8 = replace(INT8, products="half", return_lse=True)
PAIRS = cases.pairs(QUANTISED_AXES, has_units)
plan_of = partial(plan_on, KERNEL)


def run(
    problem: Problem, call: Call, plan: splitkv.Plan | None = None
) -> tuple[Tensor, Tensor | None]:
    return called(problem, call, plan=plan or plan_of(problem))


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs(number: int) -> None:
    problem = problem_of(PAIRS[number])
    zero_length = problem.kind == "varlen" and problem.batch > 1 and number % 2 == 0
    check(problem, device=DEVICE, run=run, zero_length=zero_length)


CACHE_AXES: cases.Axes = {
    **QUANTISED_AXES,
    "kind": ("varlen", "decode"),
    "q_granularity": ("none",),
    "group": (1, 6, 16),
    "batch": (1, 3, 9),
    "seqlens": ((3, 700), (1, 2100), (4, 1000), (40, 3000), (100, 60)),
    "page_size": (0, 16, 48, 64, 256),
    "parts": (1, 3, 8),
}
CACHES = cases.pairs(CACHE_AXES, has_units)


@pytest.mark.parametrize("number", range(len(CACHES)))
def test_caches(number: int) -> None:
    """Few rows, pages, parts of the keys, lengths of the device; twice the same bits."""
    values = dict(CACHES[number])
    page_size, parts = values.pop("page_size"), values.pop("parts")
    packed = values["kind"] == "varlen"
    place = Paged(page_size) if page_size else Ragged() if packed else Contiguous()
    asked = replace(problem_of(values), place=place, lengths="device")
    plan = plan_of(asked)
    if plan.kernel == KERNEL.name:
        plan = replace(
            plan, config=replace(plan.config, variant=Plain(), num_splits=parts, merge="combine")
        )

    def twice(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        if packed and page_size:
            problem, call = paged(problem, call, page_size)
        first = run(problem, call, plan)
        assert same_bits(run(problem, call, plan), first)
        return first

    given = replace(asked, place=Ragged()) if packed else asked
    check(given, device=DEVICE, run=twice, zero_length=given.batch > 1)


FEW_ROWS = Problem("decode", 3, 16, 1, 128, 128, seqlen_q=3, seqlen_k=2000, mask=Mask(True))
FEW_ROWS = replace(FEW_ROWS, lengths="device")
UNITS = [(name, products) for name in ("int8", "fp8") for products in ("widened", "half", "full")]
OF_FEW_ROWS: cases.Axes = {
    "head_dim": (64, 128),
    "unit": UNITS,
    "granularity": ("head", "token"),
    "place": (Contiguous(), Paged(16), Paged(64)),
}


def of_few_rows(values: cases.Values) -> Problem:
    values = dict(values)
    name, products = values.pop("unit")
    codec = Codec(name, values.pop("granularity"))
    problem = replace(FEW_ROWS, head_dim_v=values["head_dim"], **values)
    return replace(problem, codec=codec, products=products)


@pytest.mark.parametrize(
    ("values", "kernel", "configs"), each_shape(OF_FEW_ROWS, of_few_rows, KERNEL, in_turns=True)
)
def test_every_config_of_few_rows(values: cases.Values, kernel: str, configs: list[Config]) -> None:
    """Parts merged in the launch that makes them, by a cluster if they are one, and of pages by
    another."""
    problem = of_few_rows(values)
    merge = "combine" if isinstance(problem.place, Paged) else "last"
    for config in configs:
        if config.merge != "cluster":
            config = replace(config, num_splits=5, merge=merge)
        with said(label(config)):
            made = plan_of_config(problem, kernel, config)
            check(problem, device=DEVICE, run=partial(run, plan=made), zero_length=True)


PLACED = {
    "int8": {},
    "lse": {"return_lse": True},
    "sink_window": {"mask": Mask(True, 300, -1, 4), "sink_logits": True},
    "softcap": {"score": Score(True, False)},
    "heads_12_2": {"num_heads": 12, "num_kv_heads": 2},
    "heads_32_4": {"num_heads": 32, "num_kv_heads": 4, "seqlen_q": 2},
    "64_rows": {"seqlen_q": 4},
    "long": {"seqlen_k": 30000},
    "q_int8": {"q_granularity": "token"},
    "pages_256": {"place": Paged(256)},
    "many": {"batch": 300, "seqlen_k": 700},
}
PARTS: tuple[int | str, ...] = ("cluster", 1, 5)


@pytest.mark.parametrize("changes", PLACED.values(), ids=PLACED)
@pytest.mark.parametrize("parts", PARTS)
def test_programs_by_their_place(parts: int | str, changes: Mapping[str, Any]) -> None:
    """One item each: two parts as a cluster, one part, and several that another launch merges;
    three times the same bits. Tiles take turns."""
    problem = replace(FEW_ROWS, codec=Codec("int8", "head"), products="half", **changes)
    if KERNEL.unsupported(problem, HERE):
        found = [plan_of(problem).config]
    elif parts == "cluster":
        found = clusters(KERNEL, problem, HERE)
    else:
        found = [c for c in shapes(KERNEL, problem, HERE) if c.tile_m == 64 and c.pack_gqa]
        found = [replace(config, num_splits=parts) for config in found if config.programs]
    number = list(PLACED.values()).index(changes) + PARTS.index(parts)
    config = found[number % len(found)]
    made = replace(plan_of(problem), config=config)

    def thrice(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        first = run(problem, call, made)
        assert all(same_bits(run(problem, call, made), first) for _ in range(2))
        return first

    with said(label(config)):
        check(problem, device=DEVICE, run=thrice, zero_length=True)


@pytest.mark.parametrize(("name", "products"), UNITS)
def test_first_keys_in_tiles_that_ask_no_mask(name: str, products: str) -> None:
    """The first row sees nothing of the tiles at the edge of the mask, which are visited first."""
    problem = Problem("dense", 1, 4, 4, 128, 128, 100, 227, mask=Mask(True), sink_logits=True)
    problem = replace(problem, codec=Codec(name, "head"), products=products)
    check(problem, device=DEVICE, run=run)


def served(problems: Mapping[str, Problem]) -> list[Any]:
    """`pytest.param`s of those that this kernel can run here."""
    able = {name: p for name, p in problems.items() if not KERNEL.unsupported(p, HERE)}
    return [pytest.param(problem, id=name) for name, problem in able.items()]


LARGE = replace(FEW_ROWS, batch=8, seqlen_k=16384)
LARGE_CACHES = {
    f"{name}-{tokens}": replace(
        LARGE, seqlen_q=tokens, codec=Codec(name, "head"), products=products
    )
    for name, products in (("int8", "half"), ("fp8", "widened"))
    for tokens in (3, 4)
}
# Of e4m3 those in pages smaller than a tile; others are wide tiles of the decode kernel.
LARGE_CACHES |= {
    name: replace(problem, place=Paged(16))
    for name, problem in LARGE_CACHES.items()
    if problem.codec.name == "fp8"
}


@pytest.mark.parametrize("problem", served(LARGE_CACHES))
def test_48_and_64_rows_are_served_here(problem: Problem) -> None:
    """Without being asked: from a few tens of megabytes on."""
    plan = splitkv.plan(problem)
    assert plan.kernel == KERNEL.name and plan.config.num_splits > 1
    check(problem, device=DEVICE, run=partial(run, plan=plan), zero_length=True)


WITHOUT_LSE = replace(INT8, return_lse=False)
OF_SEQUENCES: cases.Axes = {"head_dim": (64, 128), "unit": UNITS}


def of_sequences(values: cases.Values) -> Problem:
    name, products = values["unit"]
    dim = values["head_dim"]
    problem = replace(WITHOUT_LSE, head_dim=dim, head_dim_v=dim, products=products)
    return replace(problem, codec=Codec(name, "token"))


@pytest.mark.parametrize(
    ("values", "kernel", "configs"), each_shape(OF_SEQUENCES, of_sequences, KERNEL)
)
def test_every_config(values: cases.Values, kernel: str, configs: list[Config]) -> None:
    problem = of_sequences(values)
    for config in configs:
        with said(label(config)):
            made = plan_of_config(problem, kernel, config)
            check(problem, device=DEVICE, run=partial(run, plan=made))


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_without_a_key_there_is_no_scale(kind: Any, codec: Any) -> None:
    """Whatever serves it: keys, values and their scales have no memory."""
    problem = replace(INT8, kind=kind, codec=Codec(codec, "token"), products="full", seqlen_k=0)
    if kind == "varlen":
        problem = replace(problem, place=Ragged(), lengths="device")
    call = make_operands(problem, device=DEVICE)
    assert call["k_scale"].numel() == 0
    out, lse = FUNCTION[kind](**call)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("products", ["half", "full"])
@pytest.mark.parametrize("granularity", ["head", "token"])
def test_outliers(granularity: Any, products: Any) -> None:
    """Keys and values of which a few channels, and a few tokens, are a hundred times the others."""
    problem = replace(INT8, codec=Codec("int8", granularity), products=products)
    plain = replace(problem, codec=Codec(), products="widened", return_lse=False)
    call = make_operands(plain, device=DEVICE)
    for x in (call["k"], call["v"]):
        x[..., 5] *= 30
        x[:, 77] *= 100
    stored = splitkv.quantize_kv(call["k"], call["v"], "int8", granularity)
    call |= stored._asdict() | {"products": products, "return_lse": True}
    del call["k_mean"]
    out, _ = run(problem, call)
    working = expected(problem, call, upcast=False)[0]
    assert_close(out, expected(problem, call)[0], working)


@pytest.mark.parametrize("products", ["half", "full"])
@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_lse_of_queries_that_8_bits_hold(granularity: Any, products: Any) -> None:
    """Rounding them changes nothing, so the lse is that of the keys as they are stored."""
    problem = replace(INT8, codec=Codec("int8", granularity), products=products)
    call = make_operands(problem, device=DEVICE)
    q = (24 * call["q"]).round().clamp(-127, 127)
    q[..., 3] = 127
    call["q"] = q * 2.0**-5
    out, lse = run(problem, call)
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert lse is not None and ref_lse is not None
    assert_lse_close(lse, ref_lse)


@pytest.mark.parametrize("problem", served({"int8": INT8}))
def test_addresses_that_tma_cannot_take(problem: Problem) -> None:
    """The same layout and launcher, one call 8 bytes further: another kernel, and a warning."""
    call = make_operands(problem, device=DEVICE)
    launcher = KERNEL.bind(plan_of(problem), bind(problem, call))
    launcher(bind(problem, call))
    odd = torch.empty(call["k"].numel() + 8, dtype=torch.int8, device=DEVICE)[8:]
    moved = call | {"k": odd.view(call["k"].shape).copy_(call["k"])}
    with pytest.warns(UserWarning, match="this call runs on prefill: k: expected strides"):
        out, _ = launcher(bind(problem, moved))
    assert_close(out, expected(problem, call)[0], expected(problem, call, upcast=False)[0])


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_the_same_bits_every_time(kind: Any) -> None:
    problem = replace(INT8, kind=kind, sink_logits=True)
    if kind == "varlen":
        problem = replace(problem, place=Ragged(), lengths="device")
    call = make_operands(problem, device=DEVICE)
    first = run(problem, call)
    assert all(same_bits(run(problem, call), first) for _ in range(100))
