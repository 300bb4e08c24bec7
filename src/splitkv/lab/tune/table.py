"""`splitkv tune`: the table of the policy `tuned`.

Problems are drawn, those that the benchmarks name are added and the 160 configurations of the
sequence-aware split heuristic's regression test. The fastest plans of each, timed as `studies`
does, are written into a table in the user's cache, where `tuned` finds it. Of a GPU that is much
like another the problems may be those of the other's table, and the plans those that were fastest
there: a table in a fraction of the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from splitkv.core.device import Device, current
from splitkv.core.plan import SCHEDULED, Choice, Config
from splitkv.core.problem import Problem
from splitkv.lab.harness import space
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.studies import regret_table
from splitkv.lab.tune.problems import Draw, case_of, of_share, tuning
from splitkv.lab.tune.studies import OURS, Effort, run_studies
from splitkv.planner.policies import Policy, tuned, tuned_tables, waves
from splitkv.planner.policies.shared import shapes

PLANS_KEPT = 8  # of each problem, in the table
SHARED = ("batch", *SCHEDULED)  # the values of Config.schedule by which sequences are not cut alike


def tune(
    draw: Draw,
    *,
    with_known: bool,
    effort: Effort,
    table_path: Path | None,
    command: str,
    jobs: int,
    json_path: Path | None,
    time_limit: float | None,
    console: Console,
    like: tuned_tables.Table | None = None,
) -> int:
    """Measure the problems and write the table; what was timed, to go on from, stands beside it or
    in `json_path`. 0, or 1 where nothing could be measured.

    like   the problems are drawn from this table, and what is timed are its plans
    """
    device, library = current(), OURS
    if like is None:
        cases = tuning(draw, with_known)
    else:
        cases, library = drawn_from(like, draw), replace(OURS, candidates=plans_of(like))
    path = table_path or tuned_tables.user_tables() / tuned_tables.file_name(device.name)
    json_path = json_path or path.with_suffix(".jsonl")
    policies: dict[str, Policy] = {"waves": waves.choose, "tuned": tuned.choose}
    records, lost = run_studies(
        *(cases, device, policies),
        effort=effort,
        jobs=jobs,
        json_path=json_path,
        time_limit=time_limit,
        console=console,
        library=library,
    )
    table = table_from(records, command)
    if table is None:
        say(console, "no plan was timed: no table")
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")  # so that nobody reads half a table
    unfinished.write_text(tuned_tables.dump(table))
    unfinished.replace(path)
    tuned_tables.table_of.cache_clear()
    mixed = f", {len(table.mixes)} mixes of lengths" * (len(table.mixes) > 0)
    say(console, f"{path}: {len(table.measured)} problems{mixed}")
    say(console, "\n" + regret_table(records))
    return 1 if lost else 0


def drawn_from(table: tuned_tables.Table, draw: Draw) -> list[Case]:
    """So many problems of a table that move at most `draw.max_bytes`, in a drawn order; of them the
    share."""
    cases = [case_of(measured.problem) for measured in table.measured]
    fitting = [case for case in cases if case.kv_bytes <= draw.max_bytes]
    random.Random(draw.seed).shuffle(fitting)
    return of_share(fitting[: draw.count], draw.share)


def plans_of(table: tuned_tables.Table) -> Callable[[Problem, Device, int], list[Choice]]:
    """The candidates of a problem that the table has: its plans that are legal on the device."""
    known = {tuple(tuned_tables.dims(m.problem).values()): m.plans for m in table.measured}

    def candidates(problem: Problem, device: Device, count: int) -> list[Choice]:
        legal = {k.name: shapes(k, problem, device) for k in space.splitting(problem, device)}
        plans = known[tuple(tuned_tables.dims(problem).values())]
        able = [plan for plan in plans if plan.config.shape in legal.get(plan.kernel, ())]
        return [Choice(x.kernel, x.config, f"as on {table.gpu}") for x in able[:count]]

    return candidates


def table_from(records: Sequence[Record], command: str) -> tuned_tables.Table | None:
    """The fastest plans of each study that cut every sequence alike, of mixes of lengths all those
    that the device shares out, too; None where none was timed."""
    measured: list[tuned_tables.Measured] = []
    mixes: list[tuned_tables.Measured] = []
    for r in records:
        plans = [
            tuned_tables.Timed(t["kernel"], Config(**t["config"]), t["us"])
            for t in sorted(r["tried"], key=lambda t: t["us"])
        ]
        alike = [plan for plan in plans if plan.config.schedule not in SHARED]
        mix = r.get("mix", "")
        kept = [x for x in plans if x not in alike[PLANS_KEPT:]] if mix else alike[:PLANS_KEPT]
        if kept:
            problem = tuned_tables.tuned_problem(**r["problem"])
            (mixes if mix else measured).append(tuned_tables.Measured(problem, tuple(kept), mix))
    if not measured and not mixes:
        return None
    last = records[-1]
    made = {name: last[name] for name in ("driver", "versions", "commit", "date")}
    made["command"] = command
    return tuned_tables.Table(last["gpu"], made, tuple(measured), mixes=tuple(mixes))
