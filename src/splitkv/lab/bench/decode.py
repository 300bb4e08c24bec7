"""`splitkv bench decode`: our decode, the read floor and the peers, case by case.

Each result is written to the JSON file as soon as it is there: whatever ends a run loses none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from splitkv.core.device import Device, current
from splitkv.core.errors import expect
from splitkv.core.plan import Plan
from splitkv.lab.harness.cases import Case, flops
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.floor import Floor, Floors
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.peers import PEERS, Worker
from splitkv.lab.harness.records import OURS, title
from splitkv.lab.harness.screen import Screen
from splitkv.lab.harness.terminal import say
from splitkv.lab.harness.timing import Protocol, Variant, measure, one_line
from splitkv.lab.report.decode import beside_tables, summary
from splitkv.lab.report.markdown import cell, number
from splitkv.planner.registry import make_plan

SHAPE = ("batch", "num_heads", "num_kv_heads", "head_dim", "seqlen_q", "seqlen_k", "sink_logits")
MANY = 4  # cases: for fewer, starting processes that compile ahead takes longer than compiling
SHOWN = ("case", "library", "us (spread)", "floor", "TB/s", "error")


def record(
    case: Case,
    row: dict[str, Any],
    floor: Floor | None,
    protocol: Protocol,
    machine: dict[str, Any],
) -> dict[str, Any]:
    """A row as it is written: what was measured, on what, when."""
    p, us = case.problem, row["us"]
    versions = {**machine["versions"], "library": row["version"]}
    kernel = row["plan"]["kernel"] if row["plan"] else row["kernel"]
    return {
        "suite": "decode",
        "case": case.name,
        "beside": case.beside,
        "library": row["library"],
        "kernel": kernel,
        "shape": {
            **{name: getattr(p, name) for name in SHAPE},
            "place": str(p.place),
            "mask": str(p.mask),
            "lengths": case.lengths,
        },
        "dtype": p.dtype,
        "kv_bytes": case.kv_bytes,
        "flops": flops(case),
        "us": us,
        "spread_us": row["spread_us"],
        "floor_us": floor.timing.us if floor else None,
        "floor": floor.as_record() if floor else None,
        "tbs": case.kv_bytes / us / 1e6 if us else None,
        "tflops": flops(case) / us / 1e6 if us else None,
        "err": row["err"],
        "repeats": row["repeats"],
        "reasons": row["reasons"],
        "plan": row["plan"],
        "mode": protocol.mode,
        "cache": "warm" if protocol.warm else "cold",
        "clocks": row["clocks"],
        **machine,
        "versions": versions,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def shown(r: dict[str, Any]) -> list[str]:
    """A record under `SHOWN`."""
    error = "" if r["err"] is None else f"{r['err']:.1e}"
    row = [r["case"], title(r), cell(r), number(r["floor_us"]), number(r["tbs"])]
    return [*row, "; ".join(r["reasons"]) or error]


def bench_decode(
    cases: Sequence[Case],
    *,
    ours: Sequence[Variant],
    peers: Sequence[str],
    protocol: Protocol,
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
    here = [
        *ours,
        *(v for name in peers if not PEERS[name].own_process for v in PEERS[name].variants),
    ]
    floors, machine = Floors(protocol), facts()
    with ExitStack() as stack:
        lines = stack.enter_context(Lines(json_path))
        compiler = stack.enter_context(Compiler(jobs if len(cases) >= MANY else 0))
        ahead = {case: compiler.submit(_our_plans(case, ours, device)) for case in cases}
        screen = stack.enter_context(Screen(console, len(cases), SHOWN, shown))
        workers = [Worker(name, protocol) for name in peers if PEERS[name].own_process]
        for worker in workers:
            stack.callback(worker.stop)
        sources: list[Callable[[Case], Iterator[dict[str, Any]]]]
        sources = [lambda case: measure(case, here, protocol), *(w.measure for w in workers)]

        def of_case(case: Case) -> Iterator[Record]:
            wait(ahead[case])
            floor = _floor(floors, case, screen)
            try:
                for row in _rows(case, sources):
                    yield record(case, row, floor, protocol, machine)
            except RuntimeError as error:
                raise Lost(one_line(error)) from error

        records, lost = run_cases(cases, of_case, lines, screen, start, time_limit)
        compiler.say_failures(console)
    if records:
        text = "\n\n".join(filter(None, ["\n" + summary(records), *beside_tables(records)]))
        say(console, text)
    return records, status_of(records, lost)


class Lost(Exception):
    """The GPU has become unusable for this process."""


def run_cases(
    cases: Sequence[Case],
    of_case: Callable[[Case], Iterator[Record]],
    lines: Lines,
    screen: Screen,
    start: float,
    time_limit: float | None,
) -> tuple[list[Record], bool]:
    """(records of the cases, each written and then shown as it comes; whether the GPU was lost).

    No case is begun past the limit.
    """
    records: list[Record] = []
    for case in cases:
        if time_limit is not None and time.monotonic() - start > time_limit:
            left = len(cases) - screen.done
            screen.say(f"time limit of {time_limit:g} s: {left} cases left out")
            break
        try:
            for found in of_case(case):
                records.append(found)
                lines.add(found)
                screen.add(found)
        except Lost as error:
            screen.say(f"{case.name}: stopped: {error}")
            return records, True
        screen.done += 1
    return records, False


def status_of(records: Sequence[Record], lost: bool) -> int:
    """1 where the GPU was lost or one of ours has no time."""
    failed = any(r["library"].startswith(OURS) and r["us"] is None for r in records)
    return 1 if failed or lost else 0


def _our_plans(case: Case, ours: Sequence[Variant], device: Device) -> list[Plan]:
    return [make_plan(case.problem, device, **variant.decision) for variant in ours]


def _rows(
    case: Case, sources: Sequence[Callable[[Case], Iterator[dict[str, Any]]]]
) -> Iterator[dict[str, Any]]:
    """One source after the other, each with the memory of the GPU to itself."""
    for source in sources:
        yield from source(case)
        torch.cuda.empty_cache()


def _floor(floors: Floors, case: Case, screen: Screen) -> Floor | None:
    try:
        return floors(case.kv_bytes)
    except RuntimeError as error:  # too little memory, or no reader
        screen.say(f"{case.name}: no floor: {one_line(error)}")
        return None
