"""Runs the agenda of `splitkv reproduce`; what the file of results has is not run again.

In the folder of results: `results.jsonl`, a line a shape and backend; `claims.json`; `report.md`;
`report.html`, a page of claims, tables and pictures; `splits.svg`, figure 3 of the sequence-aware
heuristic's source. They are written anew after every run, also after one that was cut short.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from rich.console import Console

from splitkv.core.device import Device, current
from splitkv.core.errors import expect, expect_one_of
from splitkv.core.plan import Plan
from splitkv.lab.bench.decode import Lost
from splitkv.lab.bench.sequences import run as sequences
from splitkv.lab.bench.sequences.peers import PEERS
from splitkv.lab.bench.sequences.timing import Peak, Station
from splitkv.lab.harness.backends import Backend, FlashAttention3, Ours, Torch, our_plans
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.compiler import Compiler, in_order_of_readiness
from splitkv.lab.harness.lines import Lines, Record, read
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.screen import Advance
from splitkv.lab.harness.terminal import say, terminated_as_interrupted
from splitkv.lab.harness.timing import one_line
from splitkv.lab.harness.work import Work
from splitkv.lab.reproduce import agenda
from splitkv.lab.reproduce.agenda import PACE, REPEATS, ROUNDS, Item, Measure
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims.verdict import Verdict
from splitkv.lab.reproduce.tables import counts, report

LIBRARIES = tuple(name for name in ("fa2", "fa3x", "fa3") if name in PEERS)  # whole sequences
CONCLUSION = 8.0  # seconds before a limit at which nothing is begun any more: tables and the page


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
        expect_one_of("backend", name, agenda.BACKENDS)
    device, start = current(), time.monotonic()
    expect(device.kind == "cuda", "device", "a CUDA GPU", device.name)
    end = math.inf if time_limit is None else start + time_limit - CONCLUSION
    made: dict[str, list[Backend]]
    made = {"splitkv": [Ours(), Torch()], "fa3": [FlashAttention3()]}
    listed = [backend for name in backends for backend in made[name]]
    items = list(agenda.agenda(quick, device, backends=backends, sequences=whole_sequences))
    lost = False
    try:
        with terminated_as_interrupted(), ExitStack() as stack:
            compiler = stack.enter_context(Compiler(jobs))
            lines = stack.enter_context(Lines(folder / "results.jsonl"))
            run = Run(device, lines, compiler, console, end=end, backends=listed)
            stack.callback(run.stop)
            lost = run.all(items)
            compiler.say_failures(console)
    finally:
        verdicts = conclude(folder, console)
    say(console, f"{time.monotonic() - start:.0f} s")
    return 1 if lost or any(v.verdict == "FAIL" for v in verdicts) else 0


class Run:
    """Who measures the items of an agenda, and where their records go.

    end       when the last item is to have begun
    machine   what records say of it, None: this one
    beside    step -> what measures it, of those that are of no attention kernel
    """

    def __init__(
        self,
        device: Device,
        lines: Lines,
        compiler: Compiler,
        console: Console,
        *,
        end: float = math.inf,
        backends: Sequence[Backend] = (),
        machine: Record | None = None,
        beside: Mapping[str, Measure] = agenda.BESIDE,
    ) -> None:
        self.device, self.lines, self.compiler = device, lines, compiler
        self.console, self.end, self.beside = console, end, beside
        self.backends = {backend.name: backend for backend in backends}
        self.machine = machine or facts()
        self.ours = sequences.our_variants()
        self.stack = ExitStack()
        self.stations: list[Station] = []
        self.peak: Peak | None = None

    def all(self, items: Sequence[Item]) -> bool:
        """Measure the items that the results do not have; whether the GPU was lost."""
        left = agenda.left_of(self.able(items), self.lines.records, self.machine)
        seconds = agenda.total(left)
        done = f"{len(items) - len(left)} of {len(items)} done or not possible here"
        say(self.console, f"{len(left)} to measure, about {seconds:.0f} s; {done}")
        self.begin(left)
        with Advance(self.console, "reproduce", len(left), whole=seconds) as advance:
            try:
                for _, group in groupby(left, key=lambda item: item.part):
                    for item in self.within(in_order_of_readiness(list(group), self.compiled)):
                        self.one(item, advance)
            except (Lost, RuntimeError) as error:  # no recovery from this in one process
                say(self.console, f"stopped: {one_line(error)}")
                return True
        if over := len(left) - advance.done:
            say(self.console, f"time limit: {over} left out; the same command goes on with them")
        return False

    def able(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items that can be measured here; what cannot is said once."""
        absent = {name: backend.absent() for name, backend in self.backends.items()}
        for name, reasons in absent.items():
            if reasons:
                say(self.console, f"{name}: {'; '.join(reasons)}")
        able = {name for name, reasons in absent.items() if not reasons}
        able |= {"beside", *agenda.COMMANDS}
        yield from (item for item in items if item.part in able)

    def begin(self, left: Sequence[Item]) -> None:
        """Start processes and compile, in the order in which they are needed."""
        asked = {item.part for item in left}
        for name, backend in self.backends.items():
            if name in asked:
                backend.start()
        for item in left:
            self.compiled(item)
        if whole := [item for item in left if item.part in agenda.COMMANDS]:
            cases = [item.what for item in whole if isinstance(item.what, Case)]
            who = sequences.stations(self.ours, LIBRARIES, PACE, cases)
            self.stations = self.stack.enter_context(who)

    def compiled(self, item: Item) -> list[Future[None]]:
        """Done when the kernels of an item are compiled, those of ours."""
        found = item.what
        if not self.compiler.pool or found is None:
            return []
        if isinstance(found, Case):
            return self.compiler.submit(sequences.plans(found, self.ours, self.device))
        if item.part != "splitkv":
            return []
        made = our_plans(found, self.device).values()
        return self.compiler.submit(plan for plan in made if isinstance(plan, Plan))

    def within(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items that are begun in time."""
        return takewhile(lambda item: time.monotonic() <= self.end, items)

    def one(self, item: Item, advance: Advance) -> None:
        """Measure an item, and write its records as they come."""
        start, shown = time.monotonic(), list[str]()
        for record in self.records(item):
            record["seconds"] = round(time.monotonic() - start, 3)
            self.lines.records.append(record)
            self.lines.add(record)
            shown.append(line(record))
        say(self.console, "\n".join(shown) + f"  ({advance.step(item.seconds)})")

    def records(self, item: Item) -> Iterator[Record]:
        """Measures an item."""
        if isinstance(item.what, Case):
            self.peak = self.peak or Peak(PACE)
            own = self.stations, self.peak, PACE, self.machine
            yield from sequences.records_of(item.part, item.what, *own)
            return
        if isinstance(item.what, Work):
            rows = self.backends[item.part].measure(item.what, ROUNDS, REPEATS)
            more: Record = {"problem": shape(item.what), "kv_bytes": item.what.case.kv_bytes}
        else:
            rows, more = self.rows_beside(item.step), {}
        if rows:
            who = agenda.identity(item, self.machine)
            date = datetime.now(timezone.utc).isoformat(timespec="seconds")
            found = {**who, **more, "rows": rows, "num_sms": self.device.num_sms}
            yield {**found, **self.machine, "date": date}

    def rows_beside(self, step: str) -> list[Record]:
        """The rows of a step that is of no attention kernel; what torch cannot do here is said, and
        leaves none. Without the parts of a decode step the GPU is lost."""
        try:
            return self.beside[step](ROUNDS)
        except RuntimeError as error:
            if step == "decode step":
                raise
            say(self.console, f"{step}: {one_line(error)}")
            return []

    def stop(self) -> None:
        """End the processes of the libraries."""
        for backend in self.backends.values():
            backend.stop()
        self.stack.close()


def shape(work: Work) -> Record:
    """The shape as records hold it."""
    p = work.case.problem
    fields = ("batch", "num_heads", "num_kv_heads", "head_dim", "seqlen_q", "seqlen_k", "dtype")
    return {**{name: getattr(p, name) for name in fields}, "place": str(p.place)}


def line(record: Record) -> str:
    """A record in a line."""
    if record["suite"] != "reproduce":
        return "  ".join(filter(None, sequences.shown(record)))
    times = [
        f"{r['kernel']} {r['us']:.2f}" if r["us"] is not None else f"{r['kernel']} -"
        for r in record["rows"]
    ]
    shown = times if len(times) <= 6 else [*times[:5], f"... {len(times)} ways"]
    reasons = [r["reasons"][0] for r in record["rows"] if r["us"] is None and r["reasons"]]
    said = f"  ({reasons[0]})" if reasons else ""
    head = f"{record['backend']}  {record['step']}  {record['case']}"
    return f"{head}  {'  '.join(times and shown)}{said}"


def conclude(folder: Path, console: Console) -> list[Verdict]:
    """Tables, claims, the page and the picture from the results that there are; needs no GPU."""
    path = folder / "results.jsonl"
    records = read(path) if path.exists() else []
    verdicts = check(records)
    folder.mkdir(parents=True, exist_ok=True)
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
