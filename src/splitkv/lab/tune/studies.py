"""Timing many plans of many problems: what `tune`, `regret` and the boundary sweep have in common.

A study is of one problem. Its candidates (`space.candidates`) and what the policies choose are all
captured and checked; a few rounds tell the fastest; those, the policies' plans and a few more
numbers of splits near the fastest are then timed over more rounds, all in turns in one run. The
best plan is the fastest of that second part.

Kernels compile ahead in other processes, problems are taken in the order in which they are ready,
and each study is a line of JSON as soon as it is done. Run again with the same file, a study of the
same problem, GPU, sources and plans of the policies is not repeated.
"""

from __future__ import annotations

import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from splitkv.core.device import Device
from splitkv.core.errors import expect
from splitkv.core.plan import Choice, Config, Plan
from splitkv.core.problem import Problem
from splitkv.lab.harness import space
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.compiler import Compiler, in_order_of_readiness
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.records import FA3
from splitkv.lab.harness.space import Key
from splitkv.lab.harness.terminal import say
from splitkv.lab.harness.timing import Replay, Session, Timing, one_line, protocol_for
from splitkv.lab.harness.variants import our_variant
from splitkv.lab.report.markdown import number
from splitkv.lab.report.studies import plan_cells, regret, shape_of
from splitkv.lab.tune.problems import mix_of
from splitkv.planner.policies import Policy
from splitkv.planner.policies.tuned_tables import dims
from splitkv.planner.registry import make_plan

FIRST_ROUNDS, FINALISTS = 3, 3


@dataclass(frozen=True)
class Effort:
    """How many plans of a problem are captured at first, and rounds of the second part."""

    candidates: int = 16
    rounds: int = 9


class Contest:
    """Plans of a case, captured once each and timed against each other."""

    def __init__(self, case: Case, device: Device, rounds: int) -> None:
        self.problem, self.device = case.problem, device
        self.session = Session(case, protocol_for(case, device, rounds))
        self.replays: dict[Key, Replay] = {}
        self.reasons: list[str] = []
        self.times: dict[Key, Timing] = {}

    def enter(self, choices: Iterable[Choice]) -> None:
        """Capture and check; what cannot run is left out, with its reason."""
        for choice in choices:
            key = choice.kernel, choice.config
            if key in self.replays:
                continue
            plan = space.plan_of(self.problem, self.device, choice)
            try:
                self.replays[key] = self.session.capture(our_variant(label(key), plan=plan))[0]
            except Exception as error:  # whatever it raises is why it has no time
                self.reasons.append(f"{label(key)}: {one_line(error)}")
                torch.cuda.synchronize()

    def time(self, keys: Iterable[Key], rounds: int) -> dict[Key, Timing]:
        replays = {key: self.replays[key] for key in dict.fromkeys(keys) if key in self.replays}
        names = {label(key): key for key in replays}
        times, reasons = self.session.time(
            {label(key): r for key, r in replays.items()}, rounds=rounds
        )
        for name, reason in reasons.items():
            self.reasons.append(f"{name}: {reason}")
            self.times.pop(names[name], None)
            self.replays.pop(names[name])
        self.times |= {names[name]: timing for name, timing in times.items()}
        return {names[name]: timing for name, timing in times.items()}


class Rival(typing.Protocol):
    """The interface of a `Contest` that a study and a sweep use."""

    replays: dict[Key, Any]
    reasons: list[str]
    times: dict[Key, Timing]

    def enter(self, choices: Iterable[Choice]) -> None: ...

    def time(self, keys: Iterable[Key], rounds: int) -> dict[Key, Timing]: ...


def label(key: Key) -> str:
    """`decode_split 8 x 64, 4 warps, 2 stages, 16 rows`, and what else is not usual."""
    kernel, c = key
    if kernel == FA3:
        return f"{kernel} {shape_of(numbers(key))}"
    text = f"{kernel} {c.num_splits} x {c.tile_n}, {c.num_warps} warps, {c.num_stages} stages"
    text += f", {c.tile_m} rows"
    usual = Config(c.num_splits, c.tile_m, c.tile_n, c.num_warps, c.num_stages)
    more = {n: x for n, x in asdict(c).items() if getattr(c, n) != getattr(usual, n)}
    more |= more.pop("variant", {})
    return ", ".join([text, *(f"{name} {value}" for name, value in more.items())])


def numbers(key: Key) -> dict[str, Any]:
    """A config as it is written: all of ours, of FlashAttention-3 what it was asked for."""
    kernel, config = key
    return {"num_splits": config.num_splits} if kernel == FA3 else asdict(config)


class Entries(NamedTuple):
    """Who takes part in a study: the candidates, and what each policy chooses."""

    candidates: list[Choice]
    chosen: dict[str, Choice]


def chosen(problem: Problem, device: Device, policies: Mapping[str, Policy]) -> dict[str, Choice]:
    """The choice that a call would be run with under each policy."""
    plans = {name: make_plan(problem, device, policy=choose) for name, choose in policies.items()}
    return {name: Choice(plan.kernel, plan.config, plan.why) for name, plan in plans.items()}


@dataclass(frozen=True)
class Library:
    """Whose plans are timed.

    candidates(problem, device, count)   -> about so many plans, tried first
    chosen(problem, device, policies)    -> the plan that each policy's decision comes to
    contest(case, device, rounds)        -> times them in turns
    compiled                             whether plans are compiled ahead
    """

    candidates: Callable[[Problem, Device, int], list[Choice]]
    chosen: Callable[[Problem, Device, Mapping[str, Policy]], dict[str, Choice]]
    contest: Callable[[Case, Device, int], Rival]
    compiled: bool = True


OURS = Library(space.candidates, chosen, Contest)


def entries(
    case: Case,
    device: Device,
    policies: Mapping[str, Policy],
    count: int,
    library: Library = OURS,
) -> Entries:
    """About `count` candidates beside the policies' choices; of lengths that are said, as of mixes,
    schedules of the step too."""
    p = case.problem
    found = library.candidates(p, device, count)
    if case.lengths is not None and library.compiled:
        found += space.scheduled(p, device)
    return Entries(found, library.chosen(p, device, policies))


def foreseen(case: Case, device: Device, who: Entries) -> list[Plan]:
    """The plans of a study that can be told before it."""
    listed = [*who.candidates, *who.chosen.values()]
    for choice in who.candidates:
        listed += space.neighbours(case.problem, (choice.kernel, choice.config))
    return [space.plan_of(case.problem, device, choice) for choice in listed]


def study(case: Case, device: Device, who: Entries, rounds: int, library: Library = OURS) -> Record:
    """The fastest plan of a case and what the policies choose, timed in one run.

    An error that leaves the GPU unusable is raised.
    """
    start = time.monotonic()
    best = None
    try:
        contest = library.contest(case, device, rounds)
    except Exception as error:  # mostly too little memory
        torch.cuda.synchronize()
        reasons = [one_line(error)]
    else:
        contest.enter([*who.candidates, *who.chosen.values()])
        first = contest.time(contest.replays, FIRST_ROUNDS)
        reasons = contest.reasons
        if first:
            fastest = sorted(first, key=lambda key: first[key].us)[:FINALISTS]
            near = space.neighbours(case.problem, fastest[0], first)
            contest.enter(near)
            finalists = [*fastest, *((c.kernel, c.config) for c in [*near, *who.chosen.values()])]
            final = contest.time(finalists, rounds)
            best = min(final, key=lambda key: final[key].us, default=None)
    tried = contest.times if best else {}
    return {
        "suite": "study",
        "case": case.name,
        "problem": dims(case.problem),
        "mix": mix_of(case),
        "kv_bytes": case.kv_bytes,
        "best": None if best is None else timed(best, tried),
        "chosen": {
            name: {**timed((c.kernel, c.config), tried), "why": c.why}
            for name, c in who.chosen.items()
        },
        "tried": [{**timed(key, tried), "final": key in final} for key in tried],
        "reasons": reasons,
        "seconds": round(time.monotonic() - start, 3),
    }


def was_timed(record: Record, policy: str, choice: Choice) -> bool:
    """Whether the study has this very plan of the policy."""
    plan = record["chosen"].get(policy, {})
    return (plan.get("kernel"), plan.get("config")) == (
        choice.kernel,
        numbers((choice.kernel, choice.config)),
    )


def timed(key: Key, times: Mapping[Key, Timing]) -> Record:
    """A kernel and config with the time that was last taken, None where there is none."""
    timing = times.get(key)
    us, spread = (timing.us, timing.spread_us) if timing else (None, None)
    return {"kernel": key[0], "config": numbers(key), "us": us, "spread_us": spread}


def run_studies(
    cases: Sequence[Case],
    device: Device,
    policies: Mapping[str, Policy],
    *,
    effort: Effort,
    jobs: int,
    json_path: Path | None,
    time_limit: float | None,
    console: Console,
    library: Library = OURS,
) -> tuple[list[Record], bool]:
    """(the studies of the cases, in their order; whether the GPU was lost on the way).

    None is started past the time limit.
    """
    expect(device.kind == "cuda", "device", "a CUDA GPU", device.name)
    start, machine = time.monotonic(), facts()
    named = {case.name: case for case in cases}
    found: dict[str, Record] = {}
    taking_part: dict[str, Entries] = {}
    with Lines(json_path) as lines, Compiler(jobs) as compiler:
        for r in lines.records:
            same = {"suite": "study", **{name: machine[name] for name in ("gpu", "commit")}}
            if r.get("case") in named and all(r.get(name) == x for name, x in same.items()):
                now = library.chosen(named[r["case"]].problem, device, policies)
                if all(was_timed(r, name, choice) for name, choice in now.items()):
                    found[r["case"]] = r
        if found:
            say(console, f"{len(found)} of {len(cases)} cases were already measured: {json_path}")

        def compiled(case: Case) -> list[Future[None]]:
            who = entries(case, device, policies, effort.candidates, library)
            taking_part[case.name] = who
            return compiler.submit(foreseen(case, device, who) if library.compiled else ())

        left, lost = [case for case in cases if case.name not in found], False
        for case in in_order_of_readiness(left, compiled):
            if time_limit is not None and time.monotonic() - start > time_limit:
                over = len(cases) - len(found)
                say(console, f"time limit of {time_limit:g} s: {over} cases left out")
                break
            try:
                record = study(case, device, taking_part.pop(case.name), effort.rounds, library)
            except RuntimeError as error:  # the GPU does not recover from this in one process
                say(console, f"{case.name}: stopped: {one_line(error)}")
                lost = True
                break
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")
            found[case.name] = {**record, **machine, "date": date}
            lines.add(found[case.name])
            say(console, f"{len(found)}/{len(cases)} {line(record)}")
            torch.cuda.empty_cache()
        compiler.say_failures(console)
    return [found[case.name] for case in cases if case.name in found], lost


def line(record: Record) -> str:
    """A study in a line."""
    best = record["best"]
    if best is None:
        return f"{record['case']}  {'; '.join(record['reasons'])}"
    text = f"{record['case']}  {number(best['us'])} us  {plan_cells(best)[0]}"
    for policy in record["chosen"]:
        share = regret(record, policy)
        text += f"  {policy} " + ("-" if share is None else f"{share:+.1%}")
    return text
