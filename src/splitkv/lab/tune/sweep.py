"""`splitkv sweep`: one shape under every number of splits, and the policies' choices on that curve;
or one shape over many numbers of keys, where rules change their mind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from splitkv.core.device import Device, current
from splitkv.core.errors import expect, expect_divides, expect_one_of, expect_positive
from splitkv.core.plan import Choice, Config
from splitkv.lab.harness import space
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.harness.records import FA3
from splitkv.lab.harness.space import Key
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.terminal import say
from splitkv.lab.harness.timing import one_line
from splitkv.lab.report.studies import SWEPT_OVER_KEYS, boundary_table, sweep_table
from splitkv.lab.tune import fa3
from splitkv.lab.tune.problems import case_of
from splitkv.lab.tune.studies import OURS, Effort, Library, Rival, label, run_studies, timed
from splitkv.planner.policies import Policy
from splitkv.planner.policies.shared import shapes
from splitkv.planner.policies.tuned import most_splits
from splitkv.planner.policies.tuned_tables import tuned_problem

USUAL = {  # the boundary case of the sequence-aware heuristic
    **{"batch": 1, "num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
    **{"seqlen_q": 1, "seqlen_k": 512},
}
ROUNDS = 11
TILES = 3  # shapes of each kernel, unless all are asked for
AT_ONCE = 64  # graphs that take turns


def case_to_sweep(name: str | None, **dims: int | None) -> Case:
    """The case with this name, or one of these dimensions where they are given."""
    given = {dim: size for dim, size in dims.items() if size is not None}
    if name is not None:
        for dim, size in given.items():
            expect(False, dim, "nothing beside a case", size)
        expect(name in CASES, "case", "the name of a case of `splitkv bench decode`", name)
        return CASES[name]
    for dim, size in given.items():
        expect_positive(dim, size)
    p = {**USUAL, **given}
    expect_divides("heads", p["num_heads"], kv_heads=p["num_kv_heads"])
    page_size = p.pop("page_size", None)
    return case_of(tuned_problem(page_size=page_size, **p))


def sweep(
    case: Case,
    *,
    policies: Mapping[str, Policy],
    num_splits: int,
    kernels: Sequence[str],
    all_tiles: bool,
    jobs: int,
    json_path: Path | None,
    time_limit: float | None,
    console: Console,
    library: Library = OURS,
) -> tuple[list[Record], bool]:
    """Time 1 to `num_splits` splits (0: as many as there are tiles) in the tile shapes of the
    kernels (none: all that split), then what the policies choose. Of another library than ours the
    numbers of splits alone.

    Returns the points, and whether the GPU was lost. A point that the file has is not timed again.
    """
    device, start = current(), time.monotonic()
    expect(device.kind == "cuda", "device", "a CUDA GPU", device.name)
    if library.compiled:
        batches = list(_batches(case, device, kernels, num_splits, all_tiles))
    else:
        batches = list(_splits(num_splits or fa3.most_splits(case.problem)))
    choices = library.chosen(case.problem, device, policies)
    machine, lost = facts(), False
    with Lines(json_path) as lines, Compiler(jobs) as compiler:
        same = {"suite": "sweep", "case": case.name}
        same |= {name: machine[name] for name in ("gpu", "commit")}
        records = [
            r for r in lines.records if all(r.get(name) == value for name, value in same.items())
        ]
        done = {(r["policy"], label_of(r)) for r in records}

        def add(times: Mapping[Key, Record], policy: str | None = None) -> None:
            for r in times.values():
                date = datetime.now(timezone.utc).isoformat(timespec="seconds")
                records.append({**same, "policy": policy, **r, **machine, "date": date})
                lines.add(records[-1])

        plans = [space.plan_of(case.problem, device, c) for batch in batches for c in batch]
        ahead = compiler.submit(plans if library.compiled else ())
        try:
            contest = library.contest(case, device, ROUNDS)
            wait(ahead)
            for batch in batches:
                left = [c for c in batch if (None, label((c.kernel, c.config))) not in done]
                if time_limit is not None and time.monotonic() - start > time_limit:
                    say(console, f"time limit of {time_limit:g} s: not every number of splits")
                    break
                add(_time(contest, left))
                contest.replays.clear()
            listed = {
                n: c for n, c in choices.items() if (n, label((c.kernel, c.config))) not in done
            }
            times = _time(contest, list(listed.values()))
            for name, c in listed.items():
                key = c.kernel, c.config
                add({key: times[key]} if key in times else {}, name)
            for reason in contest.reasons:
                say(console, reason)
        except RuntimeError as error:  # too little memory, or a GPU that does not recover
            say(console, f"{case.name}: stopped: {one_line(error)}")
            lost = True
        finally:  # of a run that was interrupted, too
            if records:
                say(console, sweep_table(records))
    return records, lost


def label_of(record: Record) -> str:
    """The plan of a point."""
    return label((record["kernel"], Config(**record["config"])))


def _batches(
    case: Case, device: Device, kernels: Sequence[str], num_splits: int, all_tiles: bool
) -> Iterator[list[Choice]]:
    """Plans that take turns: of one kernel and tile shape, some numbers of splits."""
    found = {kernel.name: kernel for kernel in space.splitting(case.problem, device)}
    expect(found, "case", f"one that a kernel splits on {device}", str(case.problem))
    for name in kernels:
        expect_one_of("kernel", name, found)
    for name in kernels or found:
        kernel = found[name]
        listed = space.tile_shapes(case.problem, device, kernel)[:TILES]
        for shape in shapes(kernel, case.problem, device) if all_tiles else listed:
            most = most_splits(case.problem, shape)
            wanted = range(1, min(num_splits or most, most) + 1)
            for first in range(0, len(wanted), AT_ONCE):
                yield [
                    Choice(name, replace(shape, num_splits=splits), "swept")
                    for splits in wanted[first : first + AT_ONCE]
                ]


def _splits(most: int) -> Iterator[list[Choice]]:
    """1 to `most` splits of FlashAttention-3, in batches that take turns."""
    for first in range(1, most + 1, AT_ONCE):
        yield [fa3.choice(n, "swept") for n in range(first, min(first + AT_ONCE, most + 1))]


def _time(contest: Rival, choices: Sequence[Choice]) -> dict[Key, Record]:
    """Times what could be captured."""
    contest.enter(choices)
    keys = [(c.kernel, c.config) for c in choices]
    times = contest.time(keys, ROUNDS) if any(key in contest.replays for key in keys) else {}
    return {key: timed(key, times) for key in times}


def boundary(
    case: Case,
    seqlens: Sequence[int],
    *,
    policies: Mapping[str, Policy],
    jobs: int,
    json_path: Path | None,
    time_limit: float | None,
    console: Console,
    library: Library = OURS,
) -> tuple[list[Record], bool]:
    """A study of the shape at each number of keys, and whether the GPU was lost."""
    expect(case.lengths is None, "case", "sequences of equal length", case.name)
    name = case.name if library.compiled else f"{case.name}_{FA3}"
    cases = [
        Case(f"{name}{SWEPT_OVER_KEYS}{keys}", replace(case.problem, seqlen_k=keys))
        for keys in seqlens
    ]
    records, lost = run_studies(
        *(cases, current(), policies),
        effort=Effort(rounds=ROUNDS),
        jobs=jobs,
        json_path=json_path,
        time_limit=time_limit,
        console=console,
        library=library,
    )
    if records:
        say(console, "\n" + boundary_table(records))
    return records, lost


def parse_seqlens(text: str) -> list[int]:
    """`128:1024:64`, both ends included, or numbers with commas between."""
    try:
        numbers = [int(part) for part in text.replace(":", ",").split(",")]
    except ValueError:
        numbers = []
    if ":" in text and len(numbers) == 3 and numbers[2] > 0:
        numbers = list(range(numbers[0], numbers[1] + 1, numbers[2]))
    elif ":" in text:
        numbers = []
    valid = numbers and min(numbers) > 0
    expect(valid, "seqlens", "FIRST:LAST:STEP or numbers with commas, above 0", text)
    return list(dict.fromkeys(numbers))
