"""`prefill` of keys and values in 8 bits in Triton's interpreter, against the reference.

On a device without e4m3 units it is widened from its bits, as the interpreter knows no other way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from torch import Tensor
from training import few_programs, paged, problem_of, rows_of_parts

from splitkv import reference, rounding, testing
from splitkv.core.device import GPUS
from splitkv.core.kv import Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Operands
from splitkv.kernels import prefill, records
from splitkv.kernels.limits import prefill as limits
from splitkv.planner.registry import completed
from splitkv.testing import (
    Call,
    Codec,
    Problem,
    assert_close,
    assert_lse_close,
    bind,
    check,
    expected,
    make_operands,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:(divide by zero|invalid value|overflow) encountered:RuntimeWarning"
    ),
]
AXES: cases.Axes = {
    "codec": cases.CODECS,
    "products": ("widened", "half", "full"),
    "q_granularity": ("none", "token", "head", "tensor"),
    "kind": ("dense", "varlen"),
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": ((32, 32), (64, 48), (16, 16)),
    "group": (1, 4),
    "num_kv_heads": (2,),
    "batch": (1, 3),
    "seqlens": ((1, 40), (37, 50), (33, 16), (20, 70)),
    "mask": (Mask(True), Mask(), Mask(True, 9, -1, 3)),
    "softcap": (False, True),
    "alibi": (False, True),
    "sink_logits": (False, True),
    "return_lse": (True,),
    "page_size": (0, 8, 16, 10),  # 0: none
    "parts": (1, 3),
    "tiles": ((16, 16), (32, 32), (16, 64)),
}


def valid(values: cases.Values) -> bool:
    """A quantised query works in bf16; only packed sequences are put into pages."""
    if values.get("q_granularity", "none") != "none" and values.get("dtype", "") != "bfloat16":
        return "dtype" not in values
    packed = values.get("kind", "varlen") == "varlen"
    return few_programs(values) and (packed or not values.get("page_size"))


def run(tile_m: int, tile_n: int, parts: int, page_size: int) -> Any:
    """`run=` of `check`, in tiles so small that a few rows and keys are several."""

    def launch(problem: Problem, call: Call) -> tuple[Tensor, Tensor | None]:
        if page_size:
            problem, call = paged(problem, call, page_size)
        gpu = GPUS["a100"]
        config = Config(tile_m=tile_m, tile_n=tile_n, num_splits=parts)
        assert limits.unsupported(problem, gpu) == []
        plan = completed(Plan(problem, gpu, "fixed", "prefill", config, "a test"))
        return records.PREFILL.launch(bind(problem, call), plan)

    return launch


PAIRS = cases.leading(cases.pairs(AXES, valid), 22, work=lambda v: 100 + rows_of_parts(v))[0]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_pairs(number: int) -> None:
    """Every value of every axis, and most pairs of two."""
    values = dict(PAIRS[number])
    tiles, parts, page_size = (values.pop(n) for n in ("tiles", "parts", "page_size"))
    problem = problem_of(values)
    zero_length = problem.kind == "varlen" and problem.batch > 1 and number % 2 == 0
    how = run(*tiles, parts, page_size)
    check(problem, run=how, strided=number % 3 == 0, zero_length=zero_length)


@pytest.mark.parametrize("kind", ["dense", "varlen"])
def test_without_a_key_there_is_no_scale(kind: Any) -> None:
    """Nothing lies where one would be read."""
    values = {"head_dims": (32, 32), "group": 2, "num_kv_heads": 1, "batch": 2, "alibi": False}
    values |= {"kind": kind, "seqlens": (5, 0), "mask": Mask(True, 9), "softcap": True}
    problem = problem_of(values, codec=Codec("fp8", "token"), q_granularity="tensor")
    check(replace(problem, products="full", return_lse=True), run=run(16, 16, 1, 0))


@pytest.mark.parametrize("products", ["widened", "half", "full"])
@pytest.mark.parametrize("zero_length", [False, True])
def test_the_scale_of_the_only_key_is_no_tensors(
    zero_length: bool, products: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a cache has room for one key which is not visible, its scale may be anything."""
    monkeypatch.setattr(testing, "SPARE_KEYS", 0)
    problem = Problem(
        *("decode", 1, 2, 1, 32, 32, 1, 1, "bfloat16", Mask(True)),
        codec=Codec("fp8", "token"),
        products=products,
        lengths="device",
        return_lse=True,
    )
    check(problem, run=run(16, 16, 1, 0), zero_length=zero_length)


@pytest.mark.parametrize("granularity", ["head", "token"])
@pytest.mark.parametrize(
    ("products", "units"), [("widened", "widened"), ("half", "half"), ("full", "full")]
)
def test_int8_is_multiplied_on_its_units(products: Any, units: str, granularity: Any) -> None:
    """With rows long enough for them; and e4m3 only where there are units for it."""
    codec = Codec("int8", granularity)
    problem = Problem("dense", 1, 4, 2, 64, 64, 8, 96, codec=codec, products=products)
    assert prefill.units_of(problem, GPUS["a100"], Config(tile_m=16, tile_n=32)) == units
    check(problem, run=run(16, 32, 1, 0))


@pytest.mark.parametrize("granularity", ["head", "token"])
@pytest.mark.parametrize("products", ["widened", "half", "full"])
def test_e5m2_is_widened(products: Any, granularity: Any) -> None:
    """Whatever may be multiplied in 8 bits: no unit multiplies it here."""
    codec = Codec("fp8_e5m2", granularity)
    problem = Problem("dense", 1, 4, 2, 64, 64, 8, 96, codec=codec, products=products)
    for gpu in ("a100", "h200"):
        assert prefill.units_of(problem, GPUS[gpu], Config(tile_m=16, tile_n=32)) == "widened"
    check(problem, run=run(16, 32, 1, 0))


@pytest.mark.parametrize("kind", ["decode", "varlen"])
def test_sequences_in_pages_have_their_own_scales(kind: Any) -> None:
    """As dense keys with the same scales, sequence by sequence."""
    g = torch.Generator().manual_seed(0)
    batch, queries, page_size, pages, keys = 3, 4, 8, 5, (40, 9, 33)
    q = torch.randn(batch, queries, 4, 32, generator=g).bfloat16()
    k, v = (
        (40 * torch.randn(batch * pages, page_size, 2, 32, generator=g)).round().to(torch.int8)
        for _ in "kv"
    )
    table = torch.randperm(batch * pages, generator=g).view(batch, pages).int()
    scales = {f"{n}_scale": (torch.rand(batch, 2, generator=g) + 0.5) / 40 for n in "kv"}
    lengths = torch.tensor(keys, dtype=torch.int32)
    problem = Problem(
        *(kind, batch, 4, 2, 32, 32, queries, pages * page_size, "bfloat16", Mask(True)),
        place=Paged(page_size),
        codec=Codec("int8", "head"),
        lengths="device",
    )
    bounds = torch.arange(batch + 1, dtype=torch.int32) * queries
    operands = Operands(
        q if kind == "decode" else q.flatten(0, 1),
        *(k, v),
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=None if kind == "decode" else bounds,
        softmax_scale=0.2,
        **scales,
    )
    kernel = records.DECODE_SPLIT if kind == "decode" else records.PREFILL
    gpu = GPUS["a100"]
    config = Config(tile_m=16, tile_n=16, num_splits=2)
    assert kernel.unsupported(problem, gpu) == []
    plan = completed(Plan(problem, gpu, "fixed", kernel.name, config, "a test"))
    out, _ = kernel.launch(operands, plan)
    call = {"cache_seqlens": lengths, "page_table": table, "softmax_scale": 0.2, **scales}
    ref, _ = reference.decode(q, k, v, **call)
    pt, _ = reference.decode(q, k, v, upcast=False, **call)
    assert_close(out.view(ref.shape), ref, pt, name="out")


@pytest.mark.parametrize("scale", [0.0, rounding.MIN_SCALE])
@pytest.mark.parametrize("q_granularity", ["none", "token"])
@pytest.mark.parametrize("products", ["widened", "half", "full"])
def test_scores_of_zeros_are_masked(products: Any, q_granularity: Any, scale: float) -> None:
    """Rows and a head of zeros, whose scales together come to 0: -inf times that is no score."""
    problem = Problem(
        *("dense", 1, 4, 2, 32, 32, 20, 20, "bfloat16", Mask(True)),
        codec=Codec("int8", "head"),
        products=products,
        q_granularity=q_granularity,
        return_lse=True,
    )
    call = make_operands(problem)
    call["q"][:, ::3] = 0
    call["k"][:, :, 0] = 0
    call["k_scale"][0] = scale
    if q_granularity == "token":
        call["q_scale"][:, ::3] = scale
    out, lse = run(16, 16, 1, 0)(problem, call)
    ref, ref_lse = expected(problem, call)
    assert_close(out, ref, expected(problem, call, upcast=False)[0])
    assert_lse_close(lse, ref_lse, rounded=expected(problem, call, products="half")[1])
