"""The named cases of `splitkv bench prefill`, `backward` and `varlen`, in suites.

Names say the situation: `gqa32x8_b4_8192_causal` is 8 KV heads under 32 query heads (Llama-3.1-8B),
a batch of 4 and 8192 tokens a sequence; `mqa16` one KV head under 16 query heads, `mha16` as many
KV heads as query heads; `_d64` a head dimension that is not 128, `_d192x128` one whose values have
another. `_full` lets every query see every key.

prefill, backward:
  records   the shapes of the tables in measurements/benchmarks.md
  dims      head dimensions of 64, 256 and 192 with values of 128
  windows   a window of 4096 keys with 4 sink tokens beside the causal mask, at lengths around the
            one from which it is faster; a window of 128 keys up to 128K tokens
  linear    the same window at 32K and 128K tokens: whether time and memory are linear in them
  gpt_oss   64 query heads on 8 KV heads of 64, with sink logits beside without, full and windowed
prefill alone:
  quant     the mqa16 shapes of `records` with keys and values in int8 (products half) and e4m3
            (full), a scale a head, beside bf16
backward alone:
  deterministic  `records` with gradients that have the same bits every time, beside those without
varlen:
  forward   64 sequences of log-normal lengths, packed, beside as many flops in equal lengths
  backward  the same with gradients
  varlen_mixed  steps of an engine, `step_2x1024of9216_62`: two chunks of 1024 queries of 9216 keys
            each and 62 sequences with one query of log-normal many keys, in pages of 16 and 64,
            beside the chunks alone; in bf16, and in e4m3 with a scale a tensor, widened as `_fp8`
            and with products of 8 bits as `_fp8_full`
  chunks    chunks of prompts behind a cache, `b4_2048of16384` 2048 queries of 16384 keys each: the
            keys in pages beside contiguous ones
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from statistics import NormalDist
from typing import Any

from splitkv.core.errors import expect, expect_one_of
from splitkv.core.kv import Codec, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.sequence_cases import direction

SITUATIONS = {"mqa16": (16, 1), "gqa32x8": (32, 8), "mha16": (16, 16)}  # heads, KV heads
MASKS = {"full": Mask(), "causal": Mask(causal=True)}
FORWARD = {  # (batch, tokens a sequence)
    "mqa16": [(32, 1024), (16, 2048), (8, 4096), (4, 8192), (2, 16384), (1, 32768)],
    "gqa32x8": [(4, 8192), (1, 16384)],
}
BACKWARD = {"gqa32x8": [(4, 4096), (1, 16384)], "mha16": [(2, 8192)]}
DIMS_SHAPE = (4, 8192)
DIMS = {  # (head dimension, that of values): situations
    **{(dim, dim): ("gqa32x8", "mha16") for dim in (64, 256)},
    (192, 128): ("mha16",),
}
CROSSING, WINDOW, SINK_TOKENS = (1024, 2048, 4096, 8192, 16384), 4096, 4
LINEAR = (32768, 131072)  # tokens of which a window leaves most unseen
NARROW, LENGTHS = 128, (8192, 16384, 32768, 65536, 131072)
GPT_OSS = (4096, 16384, 65536)
PACKED, ROOT_MEAN_SQUARE = (
    64,
    2048,
)  # sequences, and the length that has as many pairs as their mean
CHUNKS = ((1, 512, 16384), (1, 2048, 16384), (1, 4096, 65536), (4, 2048, 16384))
PAGES = (16, 64, 128, 256)
# (chunks, query tokens and keys of each, sequences with one query)
STEPS = ((1, 2048, 2048, 63), (2, 1024, 9216, 62), (4, 512, 16896, 124))
STEP_PAGES, STEP_MEDIAN, STEP_LONGEST = (16, 64), 2048, 16384
E4M3 = Codec("fp8", "tensor")
STEP_CACHES: dict[str, dict[str, Any]] = {
    "": {},
    "_fp8": {"codec": E4M3},
    "_fp8_full": {"codec": E4M3, "products": "full"},
}


def problem(
    batch: int, heads: int, kv_heads: int, tokens: int, *, head_dim: int = 128, **more: Any
) -> Problem:
    """A dense call, causal unless another mask is given."""
    options = {"mask": MASKS["causal"], **more}
    return Problem("dense", batch, heads, kv_heads, head_dim, head_dim, tokens, tokens, **options)


def window(keys: int, sink_tokens: int = 0) -> Mask:
    """So many keys that a query sees, itself among them."""
    return Mask(True, window_left=keys - 1, sink_tokens=sink_tokens)


def tables(shapes: dict[str, list[tuple[int, int]]]) -> Iterator[Case]:
    for situation, sizes in shapes.items():
        for name, mask in MASKS.items():
            for batch, tokens in sizes:
                what = problem(batch, *SITUATIONS[situation], tokens, mask=mask)
                yield Case(f"{situation}_b{batch}_{tokens}_{name}", what)


def dims() -> Iterator[Case]:
    batch, tokens = DIMS_SHAPE
    for (head_dim, head_dim_v), situations in DIMS.items():
        dim = f"d{head_dim}" if head_dim == head_dim_v else f"d{head_dim}x{head_dim_v}"
        for situation in situations:
            for name, mask in MASKS.items():
                heads = SITUATIONS[situation]
                what = problem(batch, *heads, tokens, head_dim=head_dim, mask=mask)
                what = replace(what, head_dim_v=head_dim_v)
                yield Case(f"{situation}_{dim}_b{batch}_{tokens}_{name}", what)


def windows() -> Iterator[Case]:
    heads, sinks = SITUATIONS["gqa32x8"], f"window{WINDOW}_sink_tokens{SINK_TOKENS}"
    for tokens in CROSSING:
        name = f"gqa32x8_b1_{tokens}"
        yield Case(f"{name}_causal", problem(1, *heads, tokens))
        what = problem(1, *heads, tokens, mask=window(WINDOW, SINK_TOKENS))
        yield Case(f"{name}_{sinks}", what, beside=f"{name}_causal")
    for tokens in LENGTHS:
        what = problem(1, *heads, tokens, mask=window(NARROW))
        yield Case(f"gqa32x8_b1_{tokens}_window{NARROW}", what)


def linear() -> Iterator[Case]:
    for tokens in LINEAR:
        what = problem(1, *SITUATIONS["gqa32x8"], tokens, mask=window(WINDOW, SINK_TOKENS))
        yield Case(f"gqa32x8_b1_{tokens}_window{WINDOW}_sink_tokens{SINK_TOKENS}", what)


def gpt_oss() -> Iterator[Case]:
    for tokens in GPT_OSS:
        for layer, mask in (("causal", MASKS["causal"]), (f"window{NARROW}", window(NARROW))):
            name = f"gpt_oss_b1_{tokens}_{layer}"
            without = problem(1, 64, 8, tokens, head_dim=64, mask=mask)
            yield Case(f"{name}_nosink", without)
            yield Case(name, replace(without, sink_logits=True), beside=f"{name}_nosink")


def quant() -> Iterator[Case]:
    for case in tables({"mqa16": FORWARD["mqa16"]}):
        yield case
        for dtype, products in (("int8", "half"), ("fp8", "full")):
            codec: Any = Codec(dtype, "head")  # type: ignore[arg-type]
            what = replace(case.problem, codec=codec, products=products)  # type: ignore[arg-type]
            yield Case(f"{case.name}_{dtype}", what, beside=case.name)


def log_normal() -> tuple[int, ...]:
    """Quantiles of a log-normal distribution, sigma 1, in an order drawn with a seed.

    Their root mean square is `ROOT_MEAN_SQUARE`.
    """
    normal = NormalDist(0.0, 1.0)
    shape = [math.exp(normal.inv_cdf((i + 0.5) / PACKED)) for i in range(PACKED)]
    median = ROOT_MEAN_SQUARE / math.sqrt(math.fsum(x * x for x in shape) / PACKED)
    lengths = [round(median * x) for x in shape]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def packed() -> Iterator[Case]:
    lengths = log_normal()
    for situation in ("gqa32x8", "mha16"):
        equal = problem(PACKED, *SITUATIONS[situation], ROOT_MEAN_SQUARE)
        name = f"{situation}_b{PACKED}"
        yield Case(f"{name}_{ROOT_MEAN_SQUARE}_causal", equal)
        longest: dict[str, Any] = {"seqlen_q": max(lengths), "seqlen_k": max(lengths)}
        what = replace(equal, kind="varlen", place=Ragged(), lengths="device", **longest)
        beside = f"{name}_{ROOT_MEAN_SQUARE}_causal"
        yield Case(f"{name}_log_normal_causal", what, lengths, beside)


def chunks() -> Iterator[Case]:
    for batch, tokens, keys in CHUNKS:
        name = f"gqa32x8_b{batch}_{tokens}of{keys}_causal"
        dense = replace(problem(batch, *SITUATIONS["gqa32x8"], keys), seqlen_q=tokens)
        yield Case(name, dense)
        for page_size in PAGES:
            what = replace(dense, kind="varlen", place=Paged(page_size), lengths="device")
            yield Case(f"{name}_page{page_size}", what, beside=name)


def single_keys(count: int) -> list[int]:
    """Keys of sequences that decode: quantiles of a log-normal distribution, sigma 1."""
    normal = NormalDist(math.log(STEP_MEDIAN), 1.0)
    drawn = [round(math.exp(normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
    return [min(STEP_LONGEST, keys) for keys in drawn]


def varlen_mixed() -> Iterator[Case]:
    heads = SITUATIONS["gqa32x8"]
    steps = product(STEPS, STEP_PAGES, STEP_CACHES.items())
    for (count, tokens, keys, singles), page_size, (cache, stored) in steps:
        whole = [(tokens, keys)] * count + [(1, own) for own in single_keys(singles)]
        random.Random(0).shuffle(whole)
        ending = f"_page{page_size}{cache}"
        name = f"step_{count}x{tokens}of{keys}"
        alone = f"{name}_0{ending}"
        for own, of_step in ((alone, [x for x in whole if x[0] > 1]), ("", whole)):
            queries, lengths = (tuple(x) for x in zip(*of_step, strict=True))
            longest: dict[str, Any] = {"seqlen_q": max(queries), "seqlen_k": max(lengths)}
            dense = problem(len(of_step), *heads, keys)
            what = replace(
                dense, kind="varlen", place=Paged(page_size), lengths="device", **longest, **stored
            )
            yield Case(
                own or f"{name}_{singles}{ending}", what, lengths, None if own else alone, queries
            )


def with_gradients(cases: Iterator[Case]) -> tuple[Case, ...]:
    return tuple(replace(case, problem=replace(case.problem, needs_grad=True)) for case in cases)


def deterministic() -> Iterator[Case]:
    for case in tables(BACKWARD):
        yield case
        what = replace(case.problem, deterministic=True)
        yield Case(f"{case.name}_deterministic", what, beside=case.name)


SUITES: dict[str, dict[str, tuple[Case, ...]]] = {
    "prefill": {
        "records": tuple(tables(FORWARD)),
        "dims": tuple(dims()),
        "windows": tuple(windows()),
        "linear": tuple(linear()),
        "gpt_oss": tuple(gpt_oss()),
        "quant": tuple(quant()),
    },
    "backward": {
        "records": with_gradients(tables(BACKWARD)),
        "dims": with_gradients(dims()),
        "windows": with_gradients(windows()),
        "linear": with_gradients(linear()),
        "gpt_oss": with_gradients(gpt_oss()),
        "deterministic": with_gradients(deterministic()),
    },
    "varlen": {
        "forward": tuple(packed()),
        "backward": with_gradients(packed()),
        "chunks": tuple(chunks()),
        "varlen_mixed": tuple(varlen_mixed()),
    },
}
CASES: dict[tuple[str, str], Case] = {
    (direction(case), case.name): case
    for suites in SUITES.values()
    for suite in suites.values()
    for case in suite
}


def select(command: str, suite: str | None, globs: Sequence[str]) -> list[Case]:
    """The cases of a suite of a command whose name matches one of the globs (none: every case).

    None in the place of a suite: the command's first.
    """
    suites = SUITES[command]
    name = next(iter(suites)) if suite is None else suite
    expect_one_of("suite", name, suites)
    cases = suites[name]
    found = [c for c in cases if not globs or any(fnmatchcase(c.name, g) for g in globs)]
    names = ", ".join(case.name for case in cases)
    expect(found, "case", f"a glob that matches one of {names}", " ".join(globs))
    return found
