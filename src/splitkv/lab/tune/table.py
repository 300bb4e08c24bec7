"""`splitkv tune`: the table of the policy `tuned`.

Problems are drawn, those that the benchmarks name are added and the 160 configurations of the
sequence-aware split heuristic's regression test. The fastest plans of each, timed as `studies`
does, are written into a table in the user's cache, where `tuned` finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from splitkv.core.device import current
from splitkv.core.plan import Config
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.terminal import say
from splitkv.lab.report.studies import regret_table
from splitkv.lab.tune.problems import Draw, tuning
from splitkv.lab.tune.studies import Effort, run_studies
from splitkv.planner.policies import Policy, tuned, waves

PLANS_KEPT = 8  # of each problem, in the table


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
) -> int:
    """Measure the problems and write the table; what was timed, to go on from, stands beside it or
    in `json_path`. 0, or 1 where nothing could be measured."""
    device, cases = current(), tuning(draw, with_known)
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
