"""Problems to tune on: drawn with a seed, those of the benchmarks, the 160 of the source."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from splitkv.core.errors import expect, expect_at_least, expect_in_range
from splitkv.core.kv import AS_IS, Codec, CodecName, Granularity, Paged
from splitkv.core.problem import Problem
from splitkv.core.scales import DEFAULT_PRODUCTS
from splitkv.lab.harness import mixes
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import SUITES
from splitkv.planner.policies import tuned_tables
from splitkv.planner.policies.tuned_tables import EQUAL

T = TypeVar("T")

BATCH, KEYS = (1, 256), (128, 1 << 19)  # drawn evenly on a logarithmic scale
KV_HEADS, RATIOS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)
HEAD_DIMS, PAGE_SIZES = (64, 128, 256), (None, 1, 16, 64)
MIXES = (EQUAL, *mixes.DISTRIBUTIONS)
QUERY_TOKENS = (1, 1, 1, 1, 1, 1, 1, 1, 4, 16)
MATRIX = ((1, 2, 4, 8), (128, 256, 384, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 32))


@dataclass(frozen=True)
class Draw:
    """Which problems are measured.

    count      how many are drawn
    max_bytes  of keys and values of a problem, at most
    share      (k, n): every n-th of all from the k-th
    mixes      problems whose lengths differ, drawn besides
    """

    count: int
    seed: int
    max_bytes: float
    share: tuple[int, int] = (1, 1)
    mixes: int = 0


def case_of(problem: Problem) -> Case:
    """A case named by what tells tuned problems apart: `b8_h32x8_d128_q1_k4096_page16`."""
    p = problem
    page = f"_page{p.place.page_size}" if isinstance(p.place, Paged) else ""
    lengths = "_host" if p.lengths == "host" else ""
    dims = f"b{p.batch}_h{p.num_heads}x{p.num_kv_heads}_d{p.head_dim}"
    return Case(f"{dims}_q{p.seqlen_q}_k{p.seqlen_k}{page}{lengths}", p)


def drawn(count: int, seed: int, max_bytes: float) -> list[Case]:
    """Different problems that move at most `max_bytes`, drawn with a seed.

    A Latin hypercube: `count` draws share every axis out evenly, each in an order of its own. Keys
    and batch are even on a logarithmic scale, every other one a power of two; the batch goes up to
    what fits in `max_bytes`. Where not even one sequence fits the draw is left out, and another
    hypercube is drawn until there are enough.
    """
    expect_in_range("problems", count, 1, 10_000)
    expect_at_least("max_bytes", max_bytes, 1e7)
    rng, found = random.Random(seed), dict[str, Case]()
    while len(found) < count:
        for case in _hypercube(count, rng, max_bytes):
            if len(found) < count:
                found[case.name] = case
    return list(found.values())


def _hypercube(count: int, rng: random.Random, max_bytes: float) -> Iterator[Case]:
    def shares() -> list[float]:
        return rng.sample([(i + rng.random()) / count for i in range(count)], count)

    def axis(values: Sequence[T]) -> list[T]:
        return [values[int(share * len(values))] for share in shares()]

    # One order of each axis, drawn before any problem is made of them.
    kv_heads, ratios, head_dims = axis(KV_HEADS), axis(RATIOS), axis(HEAD_DIMS)
    tokens, page_sizes = axis(QUERY_TOKENS), axis(PAGE_SIZES)
    keys_shares, batch_shares = shares(), shares()
    for i in range(count):
        dims = (kv_heads[i] * ratios[i], kv_heads[i], head_dims[i], tokens[i])
        keys = _between(*KEYS, keys_shares[i], i % 2 == 0)
        one = tuned_tables.tuned_problem(1, *dims, keys, page_sizes[i])
        q_bytes = one.num_heads * one.seqlen_q * one.head_dim * one.element_bytes
        most = min(BATCH[1], int(max_bytes // (one.kv_bytes + 2 * q_bytes)))
        if most:
            batch = _between(BATCH[0], most, batch_shares[i], i // 2 % 2 == 0)
            yield case_of(replace(one, batch=batch))


def _between(low: int, high: int, share: float, power: bool) -> int:
    """So far from low to high on a logarithmic scale; or the power of two below."""
    x = round(low * (high / low) ** share)
    return 1 << x.bit_length() - 1 if power else x


def mixed(draw: Draw) -> Iterator[list[Case]]:
    """The cases of each of `draw.mixes` problems of several sequences: all as long as the longest,
    and in each of the distributions of `harness/mixes.py`.

    What is drawn is `drawn` by another seed, so that no two problems are of one draw; the memory
    that they take is that of the longest.
    """
    if not draw.mixes:
        return
    found, seed = list[Case](), -1 - draw.seed
    while len(found) < draw.mixes:
        several = (c for c in drawn(2 * draw.mixes, seed, draw.max_bytes) if c.problem.batch > 1)
        known = {case.name for case in found}
        found += [case for case in several if case.name not in known]
        seed -= 1000
    for number, case in enumerate(found[: draw.mixes]):
        p = case.problem
        shape = mixes.Shape(p.batch, p.seqlen_k, p.num_heads, p.num_kv_heads, p.head_dim)
        cases = [Case(f"{case.name}_{EQUAL}", p, (p.seqlen_k,) * p.batch)]
        for name, distribution in mixes.DISTRIBUTIONS.items():
            lengths = mixes.lengths_of(shape, distribution, number)
            cases.append(Case(f"{case.name}_{name}", p, lengths))
        yield cases


def stored(case: Case, codec: CodecName) -> Case:
    """The case with keys and values in 8 bits, a scale a KV head, where the codec is one of these:
    `b8_h32x8_d128_q1_k4096_fp8_page16`."""
    if codec == AS_IS.name:
        return case
    p = case.problem
    keys = f"_k{p.seqlen_k}"
    granularity: Granularity = "head" if p.num_kv_heads > 1 else "tensor"
    as_stored = replace(p, codec=Codec(codec, granularity), products=DEFAULT_PRODUCTS[codec])
    return replace(case, name=case.name.replace(keys, f"{keys}_{codec}"), problem=as_stored)


def mix_of(case: Case) -> str:
    """The distribution of the lengths of a case of `mixed`, or `EQUAL`; of others none."""
    ending = next((name for name in MIXES if case.name.endswith(f"_{name}")), "")
    return ending if case.lengths is not None else ""


def matrix() -> list[Case]:
    """The 160 configurations of the source of `policies.sequence_aware`, section 5.3."""
    return [
        case_of(tuned_tables.tuned_problem(batch, 8 * kv_heads, kv_heads, 128, 1, keys, None))
        for batch, keys, kv_heads in product(*MATRIX)
    ]


def tuning(draw: Draw, with_known: bool) -> list[Case]:
    """The problems that `tune` measures: drawn ones and known ones; of them the share."""
    known = [case_of(case.problem) for case in SUITES["records"]] + matrix()
    cases = drawn(draw.count, draw.seed, draw.max_bytes)
    cases += [case for cases in mixed(draw) for case in cases]
    return of_share(cases + (known if with_known else []), draw.share)


def of_share(cases: Sequence[Case], share: tuple[int, int]) -> list[Case]:
    """Every n-th of the different cases from the k-th, for share k of n."""
    part, parts = share
    return list({case.name: case for case in cases}.values())[part - 1 :: parts]


def share_of(text: str) -> tuple[int, int]:
    """(2, 4) of "2/4"."""
    numbers = text.split("/")
    ok = len(numbers) == 2 and all(number.isdigit() for number in numbers)
    ok = ok and 1 <= int(numbers[0]) <= int(numbers[1])
    expect(ok, "share", "k/n with k from 1 to n", text)
    return int(numbers[0]), int(numbers[1])
