"""`splitkv evolve` and `splitkv distil`: the search from end to end, and what comes out of it.

Beside the files of the search the folder gets `report.md`, `lineage.svg`, and of `distil`
`distilled.py` and `table.json`, a table for the policy `tuned`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from splitkv.core.errors import expect, expect_one_of
from splitkv.lab.evolve import guided, sandbox
from splitkv.lab.evolve.candidate import Option, our_option
from splitkv.lab.evolve.distil import distil as simplest
from splitkv.lab.evolve.evaluate import Evaluator
from splitkv.lab.evolve.grammar import Slots
from splitkv.lab.evolve.search import Found, Search, Settings, write
from splitkv.lab.evolve.setup import Setup, opened
from splitkv.lab.evolve.timers import Ours
from splitkv.lab.evolve.workload import Workload
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.screen import Screen
from splitkv.lab.harness.terminal import say
from splitkv.lab.harness.timing import one_line
from splitkv.lab.harness.work import Way
from splitkv.lab.report.markdown import ABSENT, table
from splitkv.lab.reproduce.model import Rest
from splitkv.lab.reproduce.results import mean
from splitkv.lab.reproduce.works import splits_by
from splitkv.planner.policies import tuned_tables
from splitkv.planner.registry import make_plan

PROPOSERS = ("offline", "openevolve")
SHOWN = ("candidate", "island", "from", "time", "held out", "")
CONFIRM = 3  # times the rounds, for the figures of the report


@dataclass(frozen=True)
class Proposer:
    """Who makes candidates: `offline`, or `openevolve` with the model of an endpoint."""

    name: str = "offline"
    model: str | None = None
    api_base: str | None = None

    def __post_init__(self) -> None:
        expect_one_of("proposer", self.name, PROPOSERS)
        if self.name == "openevolve":
            expect(self.model, "model", "a name with the proposer openevolve", self.model)
            expect(self.api_base, "api_base", "a URL with the proposer openevolve", self.api_base)


def evolve(
    folder: Path,
    setup: Setup,
    settings: Settings,
    *,
    generations: int,
    time_limit: float | None,
    starts: Sequence[Path],
    proposer: Proposer,
    jobs: int,
    console: Console,
) -> int:
    """Search, then confirm the best with more rounds. 0, or 1 where nothing was found or the GPU
    was lost."""
    files = [(path.name, read_start(path)) for path in starts]
    start = time.monotonic()
    end = None if time_limit is None else start + time_limit
    lost = False
    with opened(folder, setup, jobs) as (evaluator, slots):
        with Screen(console, generations, SHOWN, shown) as screen:
            search = Search(folder, evaluator, slots, settings, screen.add)
            try:
                if proposer.name == "offline":
                    found = search.run(generations, end, files)
                else:
                    found = run_guided(folder, setup, proposer, evaluator, slots, generations)
            except RuntimeError as error:  # the GPU does not recover from this in one process
                screen.say(f"stopped: {one_line(error)}")
                found, lost = search.found, True
        if not lost:
            conclude(folder, evaluator, found, console)
    say(console, f"{time.monotonic() - start:.0f} s; see {folder}")
    return 1 if lost or found.best is None else 0


def run_guided(
    folder: Path,
    setup: Setup,
    proposer: Proposer,
    evaluator: Evaluator,
    slots: Slots,
    iterations: int,
) -> Found:
    """The search by a language model. ValueError: OpenEvolve is not installed."""
    about = {"folder": str(folder), "setup": asdict(setup)}
    try:
        return guided.run(
            folder,
            evaluator,
            slots,
            iterations,
            model=str(proposer.model),
            api_base=str(proposer.api_base),
            about=about,
        )
    except ModuleNotFoundError as error:
        raise ValueError(
            f"proposer: expected splitkv[evolve] installed, got no {error.name}"
        ) from None


def read_start(path: Path) -> str:
    """A candidate to begin with."""
    expect(path.is_file(), "start", "a Python file", str(path))
    source = path.read_text()
    against = sandbox.objections(source)
    expect(not against, "start", "a policy", "; ".join(against))
    return source


def shown(r: Record) -> list[str]:
    """A candidate under `SHOWN`."""
    parents = f"{r['how'][:40]}" + (
        f" of {', '.join(map(str, r['parents']))}" if r["parents"] else ""
    )
    ratio, worst = (ABSENT if r[name] is None else f"{r[name]:.3f}" for name in ("ratio", "worst"))
    return [f"{r['number']}", f"{r['island']}", parents, ratio, worst, (r["reason"] or "")[:90]]


# --- what comes out ---------------------------------------------------------------------------


def conclude(folder: Path, evaluator: Evaluator, found: Found, console: Console) -> None:
    """The best timed again beside the rules that are known, as a table, and the lineage."""
    rows = compare(evaluator, None if found.best is None else found.best["source"])
    text = table(["policy", "counted", "held out, mean", "worst", "at"], rows)
    rejected: dict[str, int] = {}
    for r in found.candidates:
        if r["reason"]:
            kind = r["reason"].split(":")[0]
            rejected[kind] = rejected.get(kind, 0) + 1
    reasons = ", ".join(f"{n} {kind}" for kind, n in rejected.items()) or "none"
    workload = evaluator.workload
    kept = evaluator.kept
    parts = [
        f"# {workload.name} on {kept.timer.device.name}, {kept.timer.name}",
        what_counts(evaluator.rest),
        f"{len(found.candidates)} candidates in {found.generation} generations; {kept.taken} "
        f"timings in this run; rejected: {reasons}.",
        "Time over the default's, of the same turns: the geometric mean over "
        f"{len(workload.counted)} problems that count and {len(workload.held_out)} held out. Timed "
        "again for this table, with more rounds than in the search.",
        text,
    ]
    other = nearest(evaluator, found)
    if found.best is None and other is not None:
        parts.append(
            f"The fastest that decides otherwise than the default where it counts, candidate "
            f"{other['number']}, took {other['ratio']:.3f} of its time."
        )
    if found.best is not None:
        parts += [f"Candidate {found.best['number']}:", f"```python\n{found.best['source']}```"]
    parts.append("Its line:\n\n" + lineage(found))
    write(folder / "report.md", "\n\n".join(parts) + "\n")
    draw(found, folder / "lineage.svg", console)
    say(console, text)


def what_counts(rest: Rest | None) -> str:
    """The fitness in a sentence."""
    if rest is None:
        return "Candidates are compared by the time of attention."
    return (
        f"Candidates are compared by the time per output token of {rest.share.name}: "
        f"{rest.share.layers} layers of {rest.layer_us:.1f} us besides attention, and "
        f"{rest.vocabulary_us:.1f} us of vocabulary. The times of the table are of attention alone."
    )


def nearest(evaluator: Evaluator, found: Found) -> Record | None:
    """The fastest candidate that does not do as the default where it counts."""
    counted = evaluator.workload.counted
    default = [evaluator.kept.default(case).label for case in counted]
    others = [
        r
        for r in found.candidates
        if r["ratio"] is not None and list(r["behaviour"][: len(counted)]) != default
    ]
    return min(others, key=lambda r: r["ratio"], default=None)


def compare(evaluator: Evaluator, best: str | None) -> list[list[str]]:
    """A row for the best and for each rule that is known: times over the default's."""
    rows = []
    rounds = CONFIRM * evaluator.rounds
    for name, options in rivals(evaluator, best):
        ratios = []
        for case, option in zip(evaluator.cases, options, strict=True):
            told = evaluator.kept.ratios(case, [option], rounds)[option.label]
            ratios.append(None if isinstance(told, str) else told)
        rows.append([name, *summary(ratios, evaluator.workload)])
    return rows


def rivals(evaluator: Evaluator, best: str | None) -> Iterator[tuple[str, list[Option]]]:
    """(name, an option for every problem)."""
    timer = evaluator.kept.timer
    if best is not None:
        yield "the best candidate", evaluator.options(best)[0]
    problems = [case.problem for case in evaluator.cases]
    if isinstance(timer, Ours):
        for name in ("waves", "flash_attention_3", "sequence_aware"):
            plans = [make_plan(p, timer.device, policy=name) for p in problems]
            yield name, [our_option(plan) for plan in plans]
    else:
        for rule in ("standard", "patched"):
            splits = [splits_by(rule, p, timer.device.num_sms) for p in problems]
            ways = [Way(f"s={n} pack=True margin=0", n, True) for n in splits]
            yield rule, [Option(way.name, way=way) for way in ways]


def summary(ratios: Sequence[float | None], workload: Workload) -> list[str]:
    """The cells of a row of `compare`."""
    first = len(workload.counted)
    names = [case.name for case in (*workload.counted, *workload.held_out)]
    counted, held = ratios[:first], ratios[first:]
    cells = [
        ABSENT if None in part or not part else f"{mean(x for x in part if x):.3f}"
        for part in (counted, held)
    ]
    known = [(x, name) for x, name in zip(held, names[first:], strict=True) if x is not None]
    worst, where = max(known, default=(None, ABSENT))
    return [*cells, ABSENT if worst is None else f"{worst:.3f}", where]


def lineage(found: Found) -> str:
    """The best candidate's ancestors, the newest first."""
    if found.best is None:
        return "No candidate was faster than the default and passed on what is held out."
    rows, left, seen = [], [found.best["number"]], set()
    while left:
        number = max(left)
        left.remove(number)
        if number in seen:
            continue
        seen.add(number)
        r = found.candidates[number]
        ratio = ABSENT if r["ratio"] is None else f"{r['ratio']:.3f}"
        parents = ", ".join(map(str, r["parents"])) or ABSENT
        rows.append([str(number), str(r["generation"]), r["how"], parents, ratio])
        left += r["parents"]
    return table(["candidate", "generation", "how", "parents", "time"], rows)


def draw(found: Found, path: Path, console: Console) -> None:
    try:
        from splitkv.lab.report.plots import draw_lineage
    except ModuleNotFoundError as error:
        say(console, f"no picture without {error.name}")
        return
    best = None if found.best is None else found.best["number"]
    draw_lineage(found.candidates, best, path)


def distil(folder: Path, setup: Setup, time_limit: float | None, console: Console) -> int:
    """The simplest rule within a hundredth of the best, as a file and as a table."""
    end = math.inf if time_limit is None else time.monotonic() + time_limit
    path = folder / "best.py"
    expect(path.is_file(), "folder", "one in which `splitkv evolve` found something", str(folder))
    best = path.read_text()
    with opened(folder, setup) as (evaluator, slots):
        timer = evaluator.kept.timer
        about = (
            f"Distilled by `splitkv distil`, workload {evaluator.workload.name}.\n\n"
            f"{timer.name} on {timer.device.name}, {datetime.now(timezone.utc):%Y-%m-%d}.\n"
        )
        source, found = simplest(best, evaluator, slots, about, end)
        write(folder / "distilled.py", source)
        say(console, source)
        assert found.ratio is not None and found.worst is not None
        say(
            console,
            f"{found.ratio:.3f} of the default's time, on what is held out at most "
            f"{found.worst:.3f} ({found.case}); see {folder / 'distilled.py'}",
        )
        if isinstance(evaluator.kept.timer, Ours) and not setup.simulate:
            made = table_of(folder, source, evaluator)
            write(folder / "table.json", tuned_tables.dump(made))
            say(console, f"{folder / 'table.json'}: {len(made.measured)} problems")
    return 0


def table_of(folder: Path, source: str, evaluator: Evaluator) -> tuned_tables.Table:
    """The rule's plans of the problems that count, timed, for the policy `tuned`."""
    options = evaluator.options(source)[0]
    first = len(evaluator.workload.counted)
    measured = []
    for case, option in zip(evaluator.workload.counted, options[:first], strict=True):
        assert option.plan is not None
        us = evaluator.kept.timer.times(case, [option], CONFIRM * evaluator.rounds)[option.label]
        if isinstance(us, float):
            timed = tuned_tables.Timed(option.plan.kernel, option.plan.config, us)
            measured.append(tuned_tables.Measured(case.problem, (timed,)))
    machine = facts()
    made = {name: machine[name] for name in ("driver", "versions", "commit")}
    made |= {"date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    return tuned_tables.Table(
        machine["gpu"], {**made, "command": f"splitkv distil {folder}"}, tuple(measured)
    )
