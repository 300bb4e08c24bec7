"""`splitkv bench prefill | backward | varlen`: whole sequences, ours and the peers, case by case.

Each case's results are written to the JSON file as soon as they are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import splitkv
from splitkv.core.device import Device, current
from splitkv.core.errors import expect
from splitkv.core.plan import Plan
from splitkv.core.problem import Problem
from splitkv.lab.bench.decode import SHAPE, Lost, run_cases, status_of
from splitkv.lab.bench.sequences.peers import PEERS, There
from splitkv.lab.bench.sequences.timing import (
    PEAK,
    PEAK_SIZE,
    Here,
    Measured,
    Pace,
    Peak,
    Prepared,
    Sample,
    Station,
    measure,
)
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.records import OURS, title
from splitkv.lab.harness.screen import Screen
from splitkv.lab.harness.sequence_cases import Inputs, direction, flops
from splitkv.lab.harness.terminal import say
from splitkv.lab.harness.timing import Variant
from splitkv.lab.report.markdown import cell, number, percent
from splitkv.lab.report.sequences import rates_tables
from splitkv.planner.policies import DEFAULT, POLICIES
from splitkv.planner.registry import kernel_named, make_plan

SHOWN = ("case", "library", "us (spread)", "TFLOP/s", "of peak", "MHz", "error")
PEAK_FLOPS = 2 * PEAK_SIZE**3


def our_variants(kernels: Sequence[str] = ()) -> list[Variant]:
    """The public call without options, or under plans for kernels with these names."""
    for name in kernels:
        kernel_named(name)
    return [forced_variant(name) for name in kernels] or [Variant(OURS, "attention", default)]


def default(inputs: Inputs) -> Prepared:
    return Prepared(inputs.attend, splitkv.__version__, inputs.plan().as_dict())


def forced_variant(kernel: str) -> Variant:
    """Ours under a plan for this kernel, the policy deciding all else."""

    def prepare(inputs: Inputs) -> Prepared:
        plan = forced(kernel, inputs.problem, current())
        return Prepared(partial(inputs.attend, plan), splitkv.__version__, plan.as_dict())

    def unsupported(case: Case) -> list[str]:
        return kernel_named(kernel).unsupported(case.problem, current())

    label = f"{OURS} ({kernel})"
    return Variant(label, kernel, prepare, unsupported, {"kernel": kernel})


def forced(kernel: str, problem: Problem, device: Device) -> Plan:
    """A plan for the kernel with this name."""
    choice = POLICIES[DEFAULT](problem, device, [kernel_named(kernel)])
    why = f"{choice.why}; the kernel as asked"
    return Plan(problem, device, DEFAULT, choice.kernel, choice.config, why)


def plans(case: Case, ours: Sequence[Variant], device: Device) -> list[Plan]:
    """Whose kernels there are to compile."""
    found = []
    for variant in ours:
        kernel = variant.decision.get("kernel")
        if kernel is None:
            found.append(make_plan(case.problem, device))
        elif not kernel_named(kernel).unsupported(case.problem, device):
            found.append(forced(kernel, case.problem, device))
    return [plan for plan in found if not plan.kernel.startswith("torch_")]


def records(
    command: str, case: Case, measured: Measured, pace: Pace, machine: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of a case as they are written: what was measured, on what, when."""
    p, peak = case.problem, measured.peak
    peak_tflops = None if peak is None else PEAK_FLOPS / peak.us / 1e6
    floor = None
    if peak is not None:
        share = flops(case) / PEAK_FLOPS
        times = {"us": peak.us * share, "spread_us": peak.spread_us * share}
        floor = {**times, "by": PEAK, "sm_mhz": measured.peak_mhz}
    shape = {name: getattr(p, name) for name in SHAPE}
    more = {"place": str(p.place), "mask": str(p.mask), "lengths": case.lengths}
    found = []
    for row in measured.rows:
        us = row["us"]
        tflops = flops(case) / us / 1e6 if us else None
        found.append(
            {
                "suite": command,
                "case": case.name,
                "beside": case.beside,
                "direction": direction(case),
                "library": row["library"],
                "kernel": row["plan"]["kernel"] if row["plan"] else row["kernel"],
                "shape": {**shape, **more},
                "dtype": p.dtype,
                "kv_bytes": case.kv_bytes,
                "flops": flops(case),
                "us": us,
                "spread_us": row["spread_us"],
                "floor_us": floor["us"] if floor else None,
                "floor": floor,
                "tbs": case.kv_bytes / us / 1e6 if us else None,
                "tflops": tflops,
                "peak_tflops": peak_tflops,
                "peak_fraction": tflops / peak_tflops if tflops and peak_tflops else None,
                "err": row["err"],
                "errors": row.get("errors"),
                "peak_bytes": row.get("peak_bytes"),
                "reasons": row["reasons"],
                "plan": row["plan"],
                "launched": row.get("launched"),
                "mode": "queued",
                "cache": "warm",
                "pace": {**asdict(pace), "calls": row.get("calls")},
                "clocks": row["clocks"],
                **machine,
                "versions": {**machine["versions"], "library": row["version"]},
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
        )
    return found


def shown(r: dict[str, Any]) -> list[str]:
    """A record under `SHOWN`."""
    error = "" if r["err"] is None else f"{r['err']:.1e}"
    rates = [number(r["tflops"]), percent(r["peak_fraction"])]
    mhz = str(r["clocks"]["sm_mhz"]) if r["clocks"] else ""
    said = "; ".join(r["reasons"]) or error
    return [f"{r['case']} {r['direction']}", title(r), cell(r), *rates, mhz, said]


def compile_ahead(
    cases: Sequence[Case], ours: Sequence[Variant], device: Device, jobs: int, console: Console
) -> None:
    """Compile our kernels in so many processes, all before any is timed."""
    with Compiler(jobs) as compiler:
        ahead = [compiler.submit(plans(case, ours, device)) for case in cases]
        wait([future for futures in ahead for future in futures])
        compiler.say_failures(console)


@contextmanager
def stations(
    ours: Sequence[Variant], peers: Sequence[str], pace: Pace, cases: Sequence[Case]
) -> Iterator[list[Station]]:
    """Who runs the cases: this process, and one for each peer that needs its own, which begins at
    once and stays to the end."""
    with ExitStack() as stack:
        theirs = [There(name, pace) for name in peers if PEERS[name].own_process]
        for there in theirs:
            stack.callback(there.stop)
            there.warm_up(cases)
        mine = [v for name in peers if not PEERS[name].own_process for v in PEERS[name].variants]
        yield [Here([*ours, *mine], pace), *theirs]


def records_of(
    command: str,
    case: Case,
    who: Sequence[Station],
    peak: Callable[[], Sample],
    pace: Pace,
    machine: Record,
) -> Iterator[Record]:
    """The records of a case, measured; `Lost` after them where the GPU is."""
    measured = measure(case, who, peak, pace.rounds)
    yield from records(command, case, measured, pace, machine)
    if measured.lost:
        raise Lost(measured.lost)


def bench_sequences(
    command: str,
    cases: Sequence[Case],
    *,
    ours: Sequence[Variant],
    peers: Sequence[str],
    pace: Pace,
    json_path: Path | None = None,
    time_limit: float | None = None,
    jobs: int = 0,
    console: Console | None = None,
) -> tuple[list[Record], int]:
    """Measure the cases, none started past the limit.

    Returns the results, and 0, or 1 where one of ours has no time.

    `jobs` processes compile our kernels ahead.
    """
    device = current()
    expect(device.kind == "cuda", "device", "a CUDA GPU", device.name)
    start, console = time.monotonic(), console or Console()
    with ExitStack() as stack:
        lines = stack.enter_context(Lines(json_path))
        who = stack.enter_context(stations(ours, peers, pace, cases))
        compile_ahead(cases, ours, device, jobs, console)
        machine, peak = facts(), Peak(pace)
        screen = stack.enter_context(Screen(console, len(cases), SHOWN, shown))

        def of_case(case: Case) -> Iterator[Record]:
            return records_of(command, case, who, peak, pace, machine)

        written, lost = run_cases(cases, of_case, lines, screen, start, time_limit)
    if written:
        text = "\n" + "\n\n".join(rates_tables(written))
        say(console, text)
    return written, status_of(written, lost)
