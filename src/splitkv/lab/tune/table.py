"""`splitkv tune` and `splitkv regret`: the table of the policy `tuned`, and how good policies are.

Both time plans of problems as `studies` does. `tune` draws problems, adds those that the
benchmarks name and the 160 configurations of the sequence-aware split heuristic's regression test,
and writes the fastest plans of each into a table, in the user's cache, where `tuned` finds it;
`regret` takes those 160 and problems drawn with another seed, and says how much longer than the
best plan the policies' own plans took.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Literal, TypeVar

from rich.console import Console

from splitkv.core.device import current
from splitkv.core.errors import expect, expect_at_least, expect_in_range
from splitkv.core.kv import Paged
from splitkv.core.plan import Config
from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.suites import SUITES
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.tables import regret_table
from splitkv.lab.tune.studies import Effort, run_studies
from splitkv.planner.policies import Policy, tuned, waves

T = TypeVar("T")

BATCH, KEYS = (1, 256), (128, 1 << 19)  # drawn evenly on a logarithmic scale
KV_HEADS, RATIOS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)
HEAD_DIMS, PAGE_SIZES = (64, 128, 256), (None, 1, 16, 64)
QUERY_TOKENS = (1, 1, 1, 1, 1, 1, 1, 1, 4, 16)
PLANS_KEPT = 8  # of each problem, in the table
MATRIX = ((1, 2, 4, 8), (128, 256, 384, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 32))


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

    axes = axis(KV_HEADS), axis(RATIOS), axis(HEAD_DIMS), axis(QUERY_TOKENS), axis(PAGE_SIZES)
    for i, (keys_share, batch_share, *rest) in enumerate(
        zip(shares(), shares(), *axes, strict=True)
    ):
        kv_heads, ratio, head_dim, seqlen_q, page_size = rest
        dims = (kv_heads * ratio, kv_heads, head_dim, seqlen_q)
        keys = _between(*KEYS, keys_share, i % 2 == 0)
        one = tuned.tuned_problem(1, *dims, keys, page_size)
        q_bytes = one.num_heads * seqlen_q * head_dim * one.element_bytes
        most = min(BATCH[1], int(max_bytes // (one.kv_bytes + 2 * q_bytes)))
        if most:
            batch = _between(BATCH[0], most, batch_share, i // 2 % 2 == 0)
            yield case_of(replace(one, batch=batch))


def _between(low: int, high: int, share: float, power: bool) -> int:
    """So far from low to high on a logarithmic scale; or the power of two below."""
    x = round(low * (high / low) ** share)
    return 1 << x.bit_length() - 1 if power else x


def matrix() -> list[Case]:
    """The 160 configurations of the source of `policies.sequence_aware`, section 5.3."""
    return [
        case_of(tuned.tuned_problem(batch, 8 * kv_heads, kv_heads, 128, 1, keys, None))
        for batch, keys, kv_heads in product(*MATRIX)
    ]


def tuning(
    problems: int, seed: int, max_bytes: float, with_known: bool, share: tuple[int, int]
) -> list[Case]:
    """What `tune` measures: `problems` drawn ones, and known ones; of them share k of n."""
    known = [case_of(case.problem) for case in SUITES["records"]] + matrix()
    return of_share(drawn(problems, seed, max_bytes) + (known if with_known else []), share)


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


def tune(
    *,
    problems: int,
    seed: int,
    max_bytes: float,
    with_known: bool,
    share: tuple[int, int],
    effort: Effort,
    table_path: Path | None,
    command: str,
    jobs: int,
    json_path: Path | None,
    time_limit: float | None,
    console: Console,
) -> int:
    """Measure the problems and write the table; what was timed, to go on from, stands beside it or
    in `json_path`. 0, or 1 where nothing could be measured."""
    device, cases = current(), tuning(problems, seed, max_bytes, with_known, share)
    path = table_path or tuned.user_tables() / tuned.file_name(device.name)
    json_path = json_path or path.with_suffix(".jsonl")
    policies: dict[str, Policy] = {"waves": waves.choose, "tuned": tuned.choose}
    records, lost = run_studies(
        *(cases, device, policies),
        effort=effort,
        jobs=jobs,
        json_path=json_path,
        time_limit=time_limit,
        console=console,
    )
    table = table_from(records, command)
    if table is None:
        say(console, "no plan was timed: no table")
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")  # so that nobody reads half a table
    unfinished.write_text(tuned.dump(table))
    unfinished.replace(path)
    tuned.table_of.cache_clear()
    say(console, f"{path}: {len(table.measured)} problems")
    say(console, "\n" + regret_table(records))
    return 1 if lost else 0


def table_from(records: Sequence[Record], command: str) -> tuned.Table | None:
    """The fastest plans of each study that cut every sequence alike; None where none was timed."""
    measured = []
    for r in records:
        plans = [
            tuned.Timed(t["kernel"], Config(**t["config"]), t["us"])
            for t in r["tried"]
            if t["config"]["schedule"] != "batch"
        ]
        fastest = sorted(plans, key=lambda timed: timed.us)[:PLANS_KEPT]
        if fastest:
            measured.append(tuned.Measured(tuned.tuned_problem(**r["problem"]), tuple(fastest)))
    if not measured:
        return None
    last = records[-1]
    made = {name: last[name] for name in ("driver", "versions", "commit", "date")}
    return tuned.Table(last["gpu"], {**made, "command": command}, tuple(measured))


def measure_regret(
    *,
    with_matrix: bool,
    random_problems: int,
    seed: int,
    max_bytes: float,
    lengths: Literal["host", "device"],
    share: tuple[int, int],
    policies: Mapping[str, Policy],
    effort: Effort,
    jobs: int,
    json_path: Path | None,
    time_limit: float | None,
    console: Console,
) -> int:
    """Time the policies' plans beside the best. 0, or 1 where the GPU was lost."""
    expect(with_matrix or random_problems, "random", "some, without the matrix", random_problems)
    cases = matrix() if with_matrix else []
    if random_problems:
        cases += drawn(random_problems, seed, max_bytes)
    cases = [case_of(replace(case.problem, lengths=lengths)) for case in cases]
    records, lost = run_studies(
        *(of_share(cases, share), current(), policies),
        effort=effort,
        jobs=jobs,
        json_path=json_path,
        time_limit=time_limit,
        console=console,
    )
    if records:
        say(console, "\n" + regret_table(records))
    return 1 if lost else 0
