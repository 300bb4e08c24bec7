"""Runs the steps of `splitkv reproduce`; a work that the file of results has is not run again.

In the folder of results: `results.jsonl`, a line a work and backend; `claims.json`; `report.md`;
`report.html`, a page of claims, tables and pictures; `splits.svg`, figure 3 of the sequence-aware
heuristic's source. They are written anew after every run, also after one that was cut short.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from splitkv.core.device import Device, current
from splitkv.core.errors import expect, expect_one_of
from splitkv.core.plan import Plan
from splitkv.lab.bench.sequences import run as sequences
from splitkv.lab.bench.sequences.peers import PEERS
from splitkv.lab.bench.sequences.suites import CASES, SUITES
from splitkv.lab.bench.sequences.timing import QUICK, Pace
from splitkv.lab.harness.backends import Backend, FlashAttention3, Ours, Torch, our_plans
from splitkv.lab.harness.compiler import Compiler, in_order_of_readiness
from splitkv.lab.harness.lines import Lines, Record, read
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.screen import Advance
from splitkv.lab.harness.terminal import say, terminated_as_interrupted
from splitkv.lab.harness.timing import one_line
from splitkv.lab.harness.work import Work
from splitkv.lab.reproduce import model, tracing, training
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims.verdict import Verdict
from splitkv.lab.reproduce.tables import counts, report
from splitkv.lab.reproduce.works import in_turns, takes, works

ROUNDS = {"quick": 7, "full": 21}
BACKENDS = ("splitkv", "fa3")
Beside = Mapping[str, Callable[[int], list[Record]]]
# (command, globs of its cases, of quick ones): the prefill tables and the crossover
SEQUENCES = (
    ("prefill", "records", ("mqa16_",), ("mqa16_b8_4096", "mqa16_b2_16384")),
    ("prefill", "windows", ("gqa32x8_",), ("8192_causal", "8192_window4096", "16384_")),
    ("prefill", "quant", ("_int8", "_fp8"), ("b8_4096_full_", "b2_16384_full_")),
    ("prefill", "linear", ("gqa32x8_",), ("gqa32x8_",)),
    ("backward", "windows", ("gqa32x8_",), ("8192_causal", "8192_window4096", "16384_")),
    ("backward", "linear", ("gqa32x8_",), ("gqa32x8_",)),
    ("backward", "gpt_oss", ("4096_causal", "16384_causal"), ("4096_causal",)),
)
SECONDS = {"quick": 280.0, "full": 1740.0}  # of a run, where no limit is given
# by which share of them a part is to have begun its last shape; then the claims are checked
SHARES = {"fa3": 0.25, "torch": 0.28, "splitkv": 0.6, "sequences": 0.92}
CASE_OF = {"decode step": model.LLAMA.name, "trace": "qwen2.5_7b", "training": "demo"}
WIDE = "_window128"  # cases of the suite `windows` that no source has


def reproduce(
    folder: Path,
    *,
    quick: bool,
    backends: Sequence[str],
    whole_sequences: bool,
    jobs: int,
    time_limit: float | None,
    console: Console,
) -> int:
    """Run what is left, then check the claims, also where the run is interrupted. 0, or 1 where a
    claim failed or the GPU was lost."""
    for name in backends:
        expect_one_of("backend", name, BACKENDS)
    made: dict[str, Callable[[], Backend]] = {"splitkv": Ours, "fa3": FlashAttention3}
    device = current()
    expect(device.kind == "cuda", "device", "a CUDA GPU", device.name)
    effort, path = "quick" if quick else "full", folder / "results.jsonl"
    limit, start = time_limit or SECONDS[effort], time.monotonic()
    ends = {part: start + share * limit for part, share in SHARES.items()}
    if not whole_sequences:
        ends["splitkv"] = ends["sequences"]
    say(console, f"{effort}, {limit:.0f} s; results in {folder}")
    listed = [made[name]() for name in backends]
    if "splitkv" in backends:
        listed.append(Torch())
    try:
        with terminated_as_interrupted(), Compiler(jobs) as compiler:
            todo = in_turns(works(quick, device.num_sms))
            if "splitkv" in backends:
                compiler.submit(_plans(todo, device))
            if whole_sequences:
                compiler.submit(_sequence_plans(effort, device))
            with Lines(path) as lines:
                who = todo, listed, device, effort, lines, compiler
                lost = run_works(*who, ends=ends, console=console)
            if whole_sequences and not lost:
                lost = run_sequences(path, effort, compiler, ends["sequences"], console)
            compiler.say_failures(console)
    finally:
        verdicts = conclude(folder, console)
    say(console, f"{time.monotonic() - start:.0f} s")
    return 1 if lost or any(v.verdict == "FAIL" for v in verdicts) else 0


def identity(work: Work, backend: str, effort: str, machine: Record) -> Record:
    """The identity of a record: one with an equal identity need not be measured again."""
    return {
        "suite": "reproduce",
        "step": work.step,
        "backend": backend,
        "case": work.case.name,
        "ways": [list(way) for way in work.ways],
        "effort": effort,
        **{name: machine[name] for name in ("gpu", "commit")},
    }


def run_works(
    todo: Sequence[Work],
    backends: Sequence[Backend],
    device: Device,
    effort: str,
    lines: Lines,
    compiler: Compiler,
    *,
    ends: Mapping[str, float],
    console: Console,
    machine: Record | None = None,
    beside: Beside | None = None,
) -> bool:
    """Measure the works that `lines` does not have; whether the GPU was lost.

    ends      when a backend is to have begun its last work
    machine   what records say of it, None: this one
    beside    step -> what measures it with so many rounds, of those that are of no attention
              kernel; None: `beside_attention`
    """
    beside = beside_attention(effort) if beside is None else beside
    machine, rounds = machine or facts(), ROUNDS[effort]
    names = ("suite", "step", "backend", "case", "ways", "effort", "gpu", "commit")
    done = [{name: r.get(name) for name in names} for r in lines.records]

    def add(
        who: Record, work: Work | None, rows: list[Record], advance: Advance | None = None
    ) -> None:
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        shape = {} if work is None else {"problem": _shape(work), "kv_bytes": work.case.kv_bytes}
        record = {**who, **shape, "rows": rows, "num_sms": device.num_sms, **machine}
        record["date"] = date
        lines.records.append(record)
        lines.add(record)
        say(console, _line(record) + (f"  ({advance.step()})" if advance else ""))

    for backend in sorted(backends, key=lambda b: b.name == "splitkv"):  # ours are compiled then
        if absent := backend.absent():
            say(console, f"{backend.name}: {'; '.join(absent)}")
            continue
        asked = [work for work in todo if takes(backend.name, work.step)]
        named = {work: identity(work, backend.name, effort, machine) for work in asked}
        left = [work for work, who in named.items() if who not in done]
        say(console, f"{backend.name}: {len(left)} shapes, {len(asked) - len(left)} done")
        ours = backend.name == "splitkv"

        def compiled(work: Work, ours: bool = ours) -> list[Future[None]]:
            return compiler.submit(_plans([work], device) if ours and compiler.pool else ())

        end = ends.get(backend.name, math.inf)
        try:
            for step in beside if ours else ():
                who = _step_identity(step, effort, machine)
                if who in done or time.monotonic() > end:
                    continue
                if rows := rows_beside(step, beside[step], rounds, console):
                    add(who, None, rows)
            with Advance(console, backend.name, len(left)) as advance:
                for work in within(end, in_order_of_readiness(left, compiled)):
                    add(named[work], work, backend.measure(work, rounds), advance)
            if over := len(left) - advance.done:
                say(console, f"{backend.name}: time limit: {over} shapes left out")
        except RuntimeError as error:  # the GPU does not recover from this in one process
            say(console, f"{backend.name}: stopped: {one_line(error)}")
            return True
        finally:
            backend.stop()
    return False


def rows_beside(
    step: str, measure: Callable[[int], list[Record]], rounds: int, console: Console
) -> list[Record]:
    """The rows of a step that is of no attention kernel; what torch cannot do here is said, and
    leaves none. Without the parts of a decode step the GPU is lost."""
    try:
        return measure(rounds)
    except RuntimeError as error:
        if step == "decode step":
            raise
        say(console, f"{step}: {one_line(error)}")
        return []


def within(end: float, listed: Iterable[Work]) -> Iterator[Work]:
    """Yields the items that are begun in time."""
    return takewhile(lambda work: time.monotonic() <= end, listed)


def beside_attention(effort: str) -> Beside:
    """The functions that measure steps of no attention kernel; training takes a full run."""
    found: dict[str, Callable[[int], list[Record]]]
    found = {"decode step": model.measure, "trace": tracing.measure}
    return found if effort == "quick" else {**found, "training": training.measure}


def _step_identity(step: str, effort: str, machine: Record) -> Record:
    who: Record = {"suite": "reproduce", "step": step, "backend": "torch"}
    own: Record = {"case": CASE_OF[step], "ways": []}
    where = {name: machine[name] for name in ("gpu", "commit")}
    return {**who, **own, "effort": effort, **where}


def _plans(todo: Iterable[Work], device: Device) -> Iterator[Plan]:
    for work in todo:
        yield from (plan for plan in our_plans(work, device).values() if isinstance(plan, Plan))


def _sequence_plans(effort: str, device: Device) -> Iterator[Plan]:
    for command, names in sequence_cases(effort):
        for name in names:
            case = CASES[sequence_direction(command), name]
            yield from sequences.plans(case, sequences.our_variants(), device)


def _shape(work: Work) -> Record:
    p = work.case.problem
    fields = ("batch", "num_heads", "num_kv_heads", "head_dim", "seqlen_q", "seqlen_k", "dtype")
    return {**{name: getattr(p, name) for name in fields}, "place": str(p.place)}


def _line(record: Record) -> str:
    """A record in a line."""
    times = [
        f"{r['kernel']} {r['us']:.2f}" if r["us"] is not None else f"{r['kernel']} -"
        for r in record["rows"]
    ]
    shown = times if len(times) <= 6 else [*times[:5], f"... {len(times)} ways"]
    reasons = [r["reasons"][0] for r in record["rows"] if r["us"] is None and r["reasons"]]
    said = f"  ({reasons[0]})" if reasons else ""
    head = f"{record['backend']}  {record['step']}  {record['case']}"
    return f"{head}  {'  '.join(times and shown)}{said}"


def sequence_direction(command: str) -> str:
    return "backward" if command == "backward" else "forward"


def sequence_cases(effort: str) -> Iterator[tuple[str, list[str]]]:
    """(command, names of cases), each command once."""
    found: dict[str, list[str]] = {}
    for command, suite, globs, few in SEQUENCES:
        names = [c.name for c in SUITES[command][suite] if WIDE not in c.name]
        parts = few if effort == "quick" else globs
        wanted = [name for name in names if any(part in name for part in parts)]
        found[command] = [*found.get(command, []), *wanted]
    yield from found.items()


def run_sequences(
    path: Path, effort: str, compiler: Compiler, end: float, console: Console
) -> bool:
    """Time whole sequences beside FlashAttention-2 and 3; whether the GPU was lost."""
    machine = facts()
    have = {
        (r["suite"], r["case"])
        for r in (read(path) if path.exists() else [])
        if r["suite"] != "reproduce"
        and all(r[name] == machine[name] for name in ("gpu", "commit"))
        and (effort == "quick" or r["pace"]["rounds"] == Pace().rounds)
    }
    listed = list(sequence_cases(effort))
    for i, (command, names) in enumerate(listed):
        direction = sequence_direction(command)
        cases = [CASES[direction, name] for name in names if (command, name) not in have]
        left = (end - time.monotonic()) / (len(listed) - i)
        if not cases or left <= 0:
            say(console, f"{command}: {len(cases)} cases left out" if cases else f"{command}: done")
            continue
        ours = sequences.our_variants()
        plans = (plan for case in cases for plan in sequences.plans(case, ours, current()))
        begun = time.monotonic()
        wait(compiler.submit(plans), timeout=left / 2)
        sequences.bench_sequences(
            command,
            cases,
            ours=ours,
            peers=[name for name in ("fa2", "fa3x", "fa3") if name in PEERS],
            pace=QUICK if effort == "quick" else Pace(),
            json_path=path,
            time_limit=max(1.0, left - (time.monotonic() - begun)),
            console=console,
        )
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
    return False


def conclude(folder: Path, console: Console) -> list[Verdict]:
    """Tables, claims, the page and the picture from the results that there are."""
    path = folder / "results.jsonl"
    records = read(path) if path.exists() else []
    verdicts = check(records)
    (folder / "claims.json").write_text(
        json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n"
    )
    (folder / "report.md").write_text(report(records, verdicts) + "\n")
    draw(records, verdicts, folder, console)
    for v in verdicts:
        say(console, f"{v.verdict:<7} {v.claim}: {v.why}")
    say(console, f"{counts(verdicts)}; see {folder}")
    return verdicts


def draw(
    records: Sequence[Record], verdicts: Sequence[Verdict], folder: Path, console: Console
) -> None:
    """The page and figure 3, where matplotlib is installed."""
    try:
        from splitkv.lab.report.plots import save, split_curves
        from splitkv.lab.reproduce.page import page
    except ModuleNotFoundError as error:
        say(console, f"no page and no picture without {error.name}")
        return
    (folder / "report.html").write_text(page(records, verdicts), encoding="utf-8")
    swept: list[Any] = [r for r in records if r.get("step") == "splits"]
    if swept:
        save(split_curves(swept), folder / "splits.svg")
