"""`splitkv regret`: how much longer than the best plan the plans of policies take.

Problems are the 160 configurations of the sequence-aware split heuristic's regression test, and
others drawn with another seed than those that `tune` measures; with them some whose lengths differ,
each in one of the distributions of the suite `mixes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from splitkv.core.device import current
from splitkv.core.errors import expect
from splitkv.core.kv import CodecName
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.studies import regret_table
from splitkv.lab.tune.problems import Draw, case_of, drawn, matrix, mixed, of_share, stored
from splitkv.lab.tune.studies import Effort, run_studies
from splitkv.planner.policies import Policy


def measure_regret(
    draw: Draw,
    *,
    with_matrix: bool,
    lengths: Literal["host", "device"],
    codec: CodecName,
    policies: Mapping[str, Policy],
    effort: Effort,
    jobs: int,
    json_path: Path | None,
    time_limit: float | None,
    console: Console,
) -> int:
    """Time the policies' plans beside the best, of keys and values that are stored by a codec. 0,
    or 1 where the GPU was lost."""
    some = with_matrix or draw.count or draw.mixes
    expect(some, "random", "some, without the matrix", draw.count)
    cases = matrix() if with_matrix else []
    if draw.count:
        cases += drawn(draw.count, draw.seed, draw.max_bytes)
    cases = [case_of(replace(case.problem, lengths=lengths)) for case in cases]
    if lengths == "device":
        cases += [of[1 + n % (len(of) - 1)] for n, of in enumerate(mixed(draw))]
    cases = [stored(case, codec) for case in cases]
    records, lost = run_studies(
        *(of_share(cases, draw.share), current(), policies),
        effort=effort,
        jobs=jobs,
        json_path=json_path,
        time_limit=time_limit,
        console=console,
    )
    if records:
        say(console, "\n" + regret_table(records))
    return 1 if lost else 0
