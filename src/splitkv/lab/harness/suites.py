"""The named cases of `splitkv bench decode`, in suites that each answer one question.

Names say the situation: `mqa8_b1_512` is one KV head under 8 query heads (Llama-3.1-70B on 8 GPUs),
`gqa32x8_b8_4096` 8 KV heads under 32 query heads (Llama-3.1-8B), then batch and keys a sequence.
`_page16` is the same with keys in pages of 16, scattered over the pool. Two suites may share a
case; it then is the same problem.

records   the shapes of the tables in measurements/benchmarks.md, contiguous and in pages of 16
pages     134 MB of keys and values and more, in pages of 1 to 256, beside contiguous
mixes     batches whose lengths differ as an engine's do, beside as many bytes in equal lengths, in
          bf16 and e4m3: see `mixes`
mixed     64 sequences of log-normal lengths and one of 128K, beside as many bytes in equal lengths
tokens    4 and 16 query tokens beside one, at 67, 134 and 268 MB
gpt_oss   64 query heads on 8 KV heads of 64, with sink logits beside without, full and windowed
quant     the shapes of `records` with e4m3 and scales of each head, and with int8 and scales of
          each head and of each key and head, for what these cost
rows48    3 query tokens of 16 heads on one KV head beside one token, 67 MB of int8 and of e4m3 and
          134 MB of bf16
seed000   table 1 of the sequence-aware split heuristic; seed003  the ten shapes of paged attention
          v2 on an L4: see `policies`; seed004  three query tokens of 16 heads on one KV head, of
          Character.AI's table of packing and splitting; seed004_int8  as it is there, in int8
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import product
from statistics import NormalDist
from typing import Any

from splitkv.core.errors import expect, expect_one_of
from splitkv.core.kv import Codec, Contiguous, Granularity, Paged, Place
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.scales import DEFAULT_PRODUCTS
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.mixes import drawn_with, mixes
from splitkv.planner.policies.paged_attention_v2 import TEN_SHAPES

SITUATIONS = {"mqa8": (8, 1), "gqa32x8": (32, 8)}  # heads, KV heads
PLACES: dict[str, Place] = {"contiguous": Contiguous(), "page16": Paged(16)}
RECORDS = {  # (batch, keys a sequence)
    "mqa8": [
        *((1, 512), (1, 2048), (1, 8192), (1, 32768), (1, 131072)),
        *((8, 4096), (64, 4096), (128, 8192)),
    ],
    "gqa32x8": [
        *((1, 512), (1, 1024), (1, 4096), (1, 16384), (1, 32768)),
        *((8, 1024), (8, 4096), (8, 32768), (32, 4096)),
    ],
}
LARGE = {
    "mqa8": [(64, 4096), (128, 8192)],
    "gqa32x8": [(8, 4096), (32, 4096), (8, 32768)],
}
TOKENS = {
    "mqa8": [(1, 131072), (64, 4096), (64, 8192)],
    "gqa32x8": [(1, 16384), (8, 4096), (8, 8192)],
}
PAGE_SIZES = (1, 16, 64, 128, 256)
MIXED_BATCH, MEDIAN, LONGEST = 64, 2048, 131072
GPT_OSS = ((1, 4096), (8, 8192), (64, 4096))  # (batch, keys a sequence)
PACKING = [(1024 << i, 256 >> i) for i in range(8)]  # keys, batch
INT8: dict[str, Any] = {"codec": Codec("int8", "head"), "products": "half"}
WINDOW = 128  # keys that a query of gpt-oss sees in every other layer, itself among them


def problem(
    batch: int, heads: int, kv_heads: int, keys: int, *, head_dim: int = 128, **more: Any
) -> Problem:
    """A decode call as a server makes it: causal, the lengths known to the device alone."""
    options = {"seqlen_q": 1, "mask": Mask(causal=True), "lengths": "device", **more}
    return Problem("decode", batch, heads, kv_heads, head_dim, head_dim, seqlen_k=keys, **options)


def _placed(name: str, place: Place) -> str:
    """The name of a case with its place."""
    return f"{name}_page{place.page_size}" if isinstance(place, Paged) else name


def records() -> Iterator[Case]:
    for situation, shapes in RECORDS.items():
        for batch, keys in shapes:
            for place in PLACES.values():
                yield Case(
                    _placed(f"{situation}_b{batch}_{keys}", place),
                    problem(batch, *SITUATIONS[situation], keys, place=place),
                )


def pages() -> Iterator[Case]:
    for situation, shapes in LARGE.items():
        for batch, keys in shapes:
            name = f"{situation}_b{batch}_{keys}"
            yield Case(name, problem(batch, *SITUATIONS[situation], keys))
            for place in map(Paged, PAGE_SIZES):
                yield Case(
                    _placed(name, place),
                    problem(batch, *SITUATIONS[situation], keys, place=place),
                    beside=name,
                )


def mixed_lengths() -> tuple[int, ...]:
    """Quantiles of a log-normal distribution (median 2K, sigma 1) and one sequence of 128K.

    In an order drawn with a seed, and together a multiple of the batch.
    """
    normal, count = NormalDist(math.log(MEDIAN), 1.0), MIXED_BATCH - 1
    lengths = [round(math.exp(normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
    lengths[-1] -= (sum(lengths) + LONGEST) % MIXED_BATCH
    lengths.append(LONGEST)
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


def mixed() -> Iterator[Case]:
    lengths = mixed_lengths()
    each = sum(lengths) // MIXED_BATCH
    for situation, heads in SITUATIONS.items():
        for place in PLACES.values():
            equal = _placed(f"{situation}_b{MIXED_BATCH}_{each}", place)
            yield Case(equal, problem(MIXED_BATCH, *heads, each, place=place))
            yield Case(
                _placed(f"{situation}_b{MIXED_BATCH}_mixed", place),
                problem(MIXED_BATCH, *heads, LONGEST, place=place),
                lengths,
                beside=equal,
            )


def tokens() -> Iterator[Case]:
    for situation, shapes in TOKENS.items():
        for batch, keys in shapes:
            for place in PLACES.values():
                name, heads = f"{situation}_b{batch}_{keys}", SITUATIONS[situation]
                one = _placed(name, place)
                yield Case(one, problem(batch, *heads, keys, place=place))
                for seqlen_q in (4, 16):
                    yield Case(
                        _placed(f"{name}_q{seqlen_q}", place),
                        problem(batch, *heads, keys, place=place, seqlen_q=seqlen_q),
                        beside=one,
                    )


def gpt_oss() -> Iterator[Case]:
    masks = {"": Mask(causal=True), f"_window{WINDOW}": Mask(True, window_left=WINDOW - 1)}
    for batch, keys in GPT_OSS:
        for layer, mask in masks.items():
            for place in PLACES.values():
                name = f"gpt_oss_b{batch}_{keys}{layer}"
                without = _placed(f"{name}_nosink", place)
                options: dict[str, Any] = {"head_dim": 64, "mask": mask, "place": place}
                yield Case(without, problem(batch, 64, 8, keys, **options))
                yield Case(
                    _placed(name, place),
                    problem(batch, 64, 8, keys, sink_logits=True, **options),
                    beside=without,
                )


def quant() -> Iterator[Case]:
    for situation, shapes in RECORDS.items():
        heads = SITUATIONS[situation]
        # the scale of the only head is one of the whole tensor
        shared: Granularity = "head" if heads[1] > 1 else "tensor"
        for (batch, keys), place in product(shapes, PLACES.values()):
            each = Codec("int8", "token")
            codecs = {
                f"int8_{shared}": Codec("int8", shared),
                "int8": each,
                "fp8": Codec("fp8", shared),
            }
            beside = _placed(f"{situation}_b{batch}_{keys}_int8_{shared}", place)
            for name, codec in codecs.items():
                options: dict[str, Any] = {"codec": codec}
                options["products"] = DEFAULT_PRODUCTS[codec.name]
                yield Case(
                    _placed(f"{situation}_b{batch}_{keys}_{name}", place),
                    problem(batch, *heads, keys, place=place, **options),
                    beside=beside if codec == each else None,
                )


def seed000() -> Iterator[Case]:
    for keys in (128, 256, 384, 512, 2048, 4096):
        for kv_heads in (1, 2, 8):
            for place in PLACES.values():
                yield Case(
                    _placed(f"seed000_kv{kv_heads}_{keys}", place),
                    problem(1, 8 * kv_heads, kv_heads, keys, place=place),
                )


def seed003() -> Iterator[Case]:
    for shape in TEN_SHAPES:
        heads = shape.num_heads, shape.num_kv_heads
        options: dict[str, Any] = {"place": Paged(16), "dtype": "float16"}
        yield Case(
            _placed(f"seed003_{shape.name}", Paged(16)),
            problem(shape.batch, *heads, shape.seqlen_k, **options),
        )


def seed004() -> Iterator[Case]:
    for keys, batch in PACKING:
        yield Case(f"packing_b{batch}_{keys}", problem(batch, 16, 1, keys, seqlen_q=3))


def seed004_int8() -> Iterator[Case]:
    for keys, batch in PACKING:
        asked = problem(batch, 16, 1, keys, seqlen_q=3, **INT8)
        yield Case(f"packing_b{batch}_{keys}_int8", asked)


def rows48() -> Iterator[Case]:
    codecs = {"bf16": {}, "int8": INT8, "fp8": {"codec": Codec("fp8", "head")}}
    for (batch, keys), place in product(((64, 4096), (8, 32768), (2, 131072)), PLACES.values()):
        for name, options in codecs.items():
            case = f"rows48_b{batch}_{keys}_{name}"
            one = _placed(f"{case}_q1", place)
            options = {**options, "place": place}
            yield Case(one, problem(batch, 16, 1, keys, **options))
            yield Case(
                _placed(case, place), problem(batch, 16, 1, keys, seqlen_q=3, **options), beside=one
            )


SUITES: dict[str, tuple[Case, ...]] = {
    suite.__name__: tuple(suite())
    for suite in (
        *(records, pages, mixed, mixes, tokens, gpt_oss, quant, rows48),
        *(seed000, seed003, seed004, seed004_int8),
    )
}
CASES: dict[str, Case] = {case.name: case for suite in SUITES.values() for case in suite}


def case_named(name: str) -> Case:
    """The case with this name, also one of `mixes` that is drawn with another seed."""
    seed = drawn_with(name)
    if name in CASES or seed is None:
        return CASES[name]
    return next(case for case in mixes(seed) if case.name == name)


def select(
    globs: Sequence[str], place: str = "all", suite: str = "records", seed: int | None = None
) -> list[Case]:
    """The cases of a suite whose name matches one of the globs (none: every case), in one place or
    `all`.

    A glob may leave the suffix of the place out. `seed` is that of the cases of `mixes` which are
    drawn, None: 0.
    """
    expect_one_of("suite", suite, SUITES)
    if seed is not None:
        expect(suite == "mixes", "seed", "None with a suite of which nothing is drawn", seed)
    cases = SUITES[suite] if not seed else tuple(mixes(seed))
    expect_one_of("place", place, ("all", *dict.fromkeys(case.place for case in cases)))
    found = [
        case
        for case in cases
        if place in ("all", case.place)
        and (not globs or any(fnmatchcase(name, g) for name in _names(case) for g in globs))
    ]
    names = ", ".join(case.name for case in cases)
    expect(found, "case", f"a glob that matches one of {names}", " ".join(globs))
    return found


def _names(case: Case) -> tuple[str, str]:
    return case.name, case.name.removesuffix(f"_{case.place}")
