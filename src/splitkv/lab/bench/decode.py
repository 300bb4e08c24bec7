"""`splitkv bench decode`: our decode, the read floor and the peers, case by case.

Each result is written to the JSON file as soon as it is there: whatever ends a run loses none.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.live import Live
from rich.table import Table

import splitkv
from splitkv.core.device import Device, current
from splitkv.core.errors import expect, expect_one_of
from splitkv.core.plan import Plan
from splitkv.lab.harness.cases import Case, Inputs, flops
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.floor import Floor, Floors
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.peers import PEERS, Worker
from splitkv.lab.harness.terminal import say
from splitkv.lab.harness.timing import Prepared, Protocol, Variant, measure, nvidia_smi, one_line
from splitkv.lab.report.tables import OURS, besides, cell, number, summary, title
from splitkv.planner.policies.short_queries import asked_for
from splitkv.planner.registry import POLICIES, make_plan

SHAPE = ("batch", "num_heads", "num_kv_heads", "head_dim", "seqlen_q", "seqlen_k", "sink_logits")
MANY = 4  # cases: for fewer, starting processes that compile ahead takes longer than compiling
SHOWN = ("case", "library", "us (spread)", "floor", "TB/s", "error")


def our_variants(policies: Sequence[str] = (), num_splits: int = 0) -> list[Variant]:
    """`splitkv.decode` without options, or under plans of policies or with a number of splits."""
    expect(not (policies and num_splits), "num_splits", "0 with a policy", num_splits)
    for name in policies:
        expect_one_of("policy", name, POLICIES)
    if num_splits:
        return [our_variant(f"{OURS} ({num_splits} splits)", num_splits=num_splits)]
    return [our_variant(f"{OURS} ({name})", policy=name) for name in policies] or [
        our_variant(OURS)
    ]


def columns() -> list[Variant]:
    """Those of the suites `seed004` and `seed004_int8`: keys in one part or in several, heads
    packed or apart."""
    return [
        our_variant(
            f"{OURS} ({'parts' if parts else 'one part'}, heads {'packed' if packed else 'apart'})",
            policy=asked_for(parts=parts, packed=packed),
        )
        for packed in (False, True)
        for parts in (False, True)
    ]


def our_variant(label: str, **decision: Any) -> Variant:
    """`decision`: a `plan`, or the arguments of `splitkv.plan`; none: `decode` decides."""

    def prepare(inputs: Inputs) -> Prepared:
        given = inputs.arguments(0)
        q, k, v = (given.pop(name) for name in ("q", "k_cache", "v_cache"))
        plan = decision.get("plan") or splitkv.plan(q, k, v, **decision, **given)
        chosen = {"plan": plan} if decision else {}
        calls = [inputs.arguments(i) | chosen for i in range(inputs.buffers)]
        return Prepared(lambda i: splitkv.decode(**calls[i]), splitkv.__version__, plan.as_dict())

    return Variant(label, "decode", prepare, decision=decision)


def facts() -> dict[str, Any]:
    """What every record of a run says of the machine and the sources."""
    driver = nvidia_smi("driver_version")
    return {
        "gpu": current().name,
        "driver": driver[0] if driver else "unknown",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "commit": commit(),
    }


def commit() -> str:
    """The commit of the sources, or their sha256 where there is no repository."""
    sources = Path(splitkv.__file__).parent
    git = [
        "git",
        "-C",
        str(sources),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        digest = hashlib.sha256()
        for path in sorted(sources.rglob("*.py")):
            digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
        return f"sha256:{digest.hexdigest()[:12]}"


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
        "floor": {**asdict(floor.timing), "by": floor.by} if floor else None,
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


class Screen:
    """Results as they come: the last ones as a live table on a terminal, else a line each.

    row    of a record, the cells under the header
    """

    def __init__(
        self,
        console: Console,
        total: int,
        header: Sequence[str] = SHOWN,
        row: Callable[[dict[str, Any]], list[str]] = shown,
    ) -> None:
        self.console, self.total, self.done = console, total, 0
        self.header, self.row = header, row
        self.rows: deque[list[str]] = deque(maxlen=max(4, console.height - 8))
        self.live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.live.stop()

    def add(self, r: dict[str, Any]) -> None:
        self.rows.append(self.row(r))
        if self.live:
            table = Table(*self.header, caption=f"{self.done} of {self.total} cases done")
            for cells in self.rows:
                table.add_row(*cells)
            self.live.update(table)
        else:
            self.say("  ".join(filter(None, self.rows[-1])))

    def say(self, text: str) -> None:
        say(self.console, text)


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
        screen = stack.enter_context(Screen(console, len(cases)))
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
        text = "\n\n".join(filter(None, ["\n" + summary(records), besides(records)]))
        say(console, text)
    return records, status_of(records, lost)


class Lost(Exception):
    """What left the GPU unusable for this process."""


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
