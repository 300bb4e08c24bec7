"""The cost in accuracy of int8 and e4m3 keys and values: `splitkv accuracy`.

Queries see `keys` keys of one sequence, drawn in one of three ways, and attention by what
`quantize_kv` stores of them is compared with attention by the bf16 values that were stored, in
fp64. The error is |out - ref| / |ref| over all queries and heads. The line "bf16" is the same
attention without quantisation, in the working precision.

    gaussian   everything from a normal distribution
    outliers   keys of which some channels of each head are far from zero in every token, and a few
               large, as those of language models are; values with a few large channels
    topics     keys around 64 centres; a query is near one of them, so that it sees a few hundreds
               of keys, all over the context

Needles: of each head 64 keys are looked for, by queries in their direction, among the others; it is
found if the output is nearest to its value, of those of all needles.

Computed by the reference, which rounds what a kernel may round, or by the kernels of this GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from splitkv import api, reference
from splitkv.cache.quantize import GRANULARITIES, QuantizedKV, quantize_kv
from splitkv.core.device import current
from splitkv.core.kv import Codec, Products
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.markdown import table
from splitkv.planner.registry import make_plan

HEADS, KV_HEADS, DIM, QUERIES = 8, 2, 128, 64
INPUTS = ("gaussian", "outliers", "topics")
TOPICS = 64
PRODUCTS = get_args(Products)
THROUGH = ("reference", "kernels")


class How(NamedTuple):
    """A way to store keys and values; the dtype bf16 has no other fields."""

    dtype: str
    granularity: str = ""
    smooth_k: bool = False


BF16 = How("bf16")


def ways() -> Iterator[How]:
    """All of them, bf16 first."""
    yield BF16
    for dtype in ("int8", "fp8"):
        for granularity in GRANULARITIES:
            for smooth_k in (False, True):
                yield How(dtype, granularity, smooth_k)


def draw(name: str, keys: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in bf16 of one sequence; the values depend on the seed alone."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    q = normal(1, QUERIES, HEADS, DIM)
    k, v = normal(1, keys, KV_HEADS, DIM), normal(1, keys, KV_HEADS, DIM)
    if name == "outliers":
        offset, size = outlier_channels(g, normal)
        k = k * size + offset
        v = v * (1 + 7 * (torch.rand(KV_HEADS, DIM, generator=g) < 0.03))
    elif name == "topics":
        centres = normal(TOPICS, KV_HEADS, DIM)
        k = 0.6 * k + centres[torch.randint(TOPICS, (keys,), generator=g)]
        near = centres[torch.randint(TOPICS, (QUERIES,), generator=g)]
        q = 0.5 * q + near.repeat_interleave(HEADS // KV_HEADS, 1)
    return tuple(x.to(device, torch.bfloat16) for x in (q, k, v))


def outlier_channels(g: torch.Generator, normal: Any) -> tuple[Tensor, Tensor]:
    """Offsets and factors of keys, [KV_HEADS, DIM]: 4 channels of 128 are
    12 or so from zero, 2 are 6 times as large."""
    order = torch.rand(KV_HEADS, DIM, generator=g).argsort(-1)
    offset = torch.where(order < 4, 12 + 4 * normal(KV_HEADS, DIM), 0.0)
    sign = torch.where(torch.rand(KV_HEADS, DIM, generator=g) < 0.5, -1.0, 1.0)
    return offset * sign, torch.where((order >= 4) & (order < 6), 6.0, 1.0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, stored: QuantizedKV | None, products: str, through: str
) -> Tensor:
    """The output, in the working precision, by the reference or by this device's kernels."""
    given: dict[str, Any] = {}
    if stored is not None:
        k, v = stored.k, stored.v
        given = {"k_scale": stored.k_scale, "v_scale": stored.v_scale, "products": products}
    if through == "kernels":
        result = api.attention(q, k, v, causal=True, **given)
        assert isinstance(result, Tensor)
        return result
    return reference.attention(
        q, k, v, mask=Mask(True), upcast=torch.bfloat16, return_lse=False, **given
    )[0]


def measure(keys: int, seed: int, device: str, through: str) -> Iterator[dict[str, Any]]:
    """A record for each way, input and product, and of needles."""
    for name in INPUTS:
        q, k, v = draw(name, keys, seed, device)
        exact = reference.attention(
            *(x.double() for x in (q, k, v)), mask=Mask(True), upcast=False, return_lse=False
        )[0]
        for how in ways():
            stored = stored_by(how, k, v)
            for products in PRODUCTS if stored is not None else PRODUCTS[:1]:
                out = attend(q, k, v, stored, products, through).double()
                error = ((out - exact).norm() / exact.norm()).item()
                yield {"input": name, **how._asdict(), "products": products, "error": error}
    for how, products, found in needles(keys, seed, device, through):
        yield {"input": "needles", **how._asdict(), "products": products, "found": found}


def stored_by(how: How, k: Tensor, v: Tensor) -> QuantizedKV | None:
    """Keys and values as they are stored; None: in bf16."""
    if how == BF16:
        return None
    return quantize_kv(k, v, how.dtype, how.granularity, smooth_k=how.smooth_k)


def needles(keys: int, seed: int, device: str, through: str) -> Iterator[tuple[How, str, float]]:
    """The share of needles that is found, with keys as in `outliers`."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    k, v = normal(1, keys, KV_HEADS, DIM), normal(1, keys, KV_HEADS, DIM)
    at = torch.randperm(keys - QUERIES, generator=g)[:QUERIES]
    q = k[:, at].repeat_interleave(HEADS // KV_HEADS, 2)
    offset = outlier_channels(g, normal)[0]
    q, k, v = (x.to(device, torch.bfloat16) for x in (q, k + offset, v))
    values = v[0, at].double().repeat_interleave(HEADS // KV_HEADS, 1)  # [QUERIES, HEADS, DIM]
    for how in ways():
        stored = stored_by(how, k, v)
        for products in PRODUCTS if stored is not None else PRODUCTS[:1]:
            out = attend(q, k, v, stored, products, through)[0].double()
            nearest = torch.cdist(out.transpose(0, 1), values.transpose(0, 1)).argmin(-1)
            right = torch.arange(QUERIES, device=out.device)
            yield how, products, (nearest == right).double().mean().item()


def markdown(records: list[dict[str, Any]]) -> str:
    """One table: a row a way to store, a column an input, in each cell a number a kind of products:
    errors in percent, and of needles the share that is found, in percent."""
    inputs = (*INPUTS, "needles")
    first = f"{INPUTS[0]}: {' / '.join(PRODUCTS)}"
    header = ["stored", "scales", "mean key off", first, *inputs[1:]]
    rows = []
    for how in ways():
        mine = [r for r in records if How(*(r[f] for f in How._fields)) == how]
        cells = (" / ".join(shown(r) for r in mine if r["input"] == name) for name in inputs)
        rows.append([how.dtype, how.granularity, "yes" if how.smooth_k else "", *cells])
    return table(header, rows)


def shown(record: dict[str, Any]) -> str:
    """A number of the table."""
    return f"{100 * record['error']:.2f}" if "error" in record else f"{100 * record['found']:.0f}"


def compile_ahead(keys: int, jobs: int, console: Any) -> None:
    """Have the kernels compiled that `measure` will call, in so many processes."""
    device = current()
    bf16 = Problem("dense", 1, HEADS, KV_HEADS, DIM, DIM, QUERIES, keys, mask=Mask(True))
    asked = [bf16]
    how: Any
    for how in ways():
        if how != BF16:
            codec = Codec(how.dtype, how.granularity)
            asked += [replace(bf16, codec=codec, products=products) for products in PRODUCTS]
    with Compiler(jobs) as compiler:
        wait(compiler.submit([make_plan(problem, device) for problem in asked]))
        compiler.say_failures(console)


def accuracy(
    *, keys: int, seed: int, device: str, through: str, json_lines: bool, jobs: int, console: Any
) -> None:
    """Measure, and print a Markdown table or JSON lines."""
    if device == "cuda" and through == "kernels":
        compile_ahead(keys, jobs, console)
    records = []
    for record in measure(keys, seed, device, through):
        records.append({**record, "keys": keys, "seed": seed, "through": through})
        if json_lines:
            print(json.dumps(records[-1]), flush=True)
    if not json_lines:
        say(console, markdown(records))
