"""Processes that call, one that counts.

A worker says which case it begins, so that a crash, or a case that never ends, is known by its
number; the worker is then started again behind it. Cases are independent of each other and of the
number of workers: the seed and the number of a case are all that it is drawn from.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.environment import prepare

GROUP = {"cpu": 1, "interpret": 1, "cuda": 6}
LIMIT = {"cpu": 90.0, "interpret": 150.0, "cuda": 150.0}  # seconds of one case
BEHIND = 12.0  # seconds that the last cases get after the time is up
SHOWN = 3  # failures alike that are told in full
TESTS = Path(__file__).parents[1]
OUTCOMES = (
    *("equal", "refused", "rejected", "accepted"),
    *("wrong", "raw error", "no question", "crash", "hang"),
)
FAILURES = OUTCOMES[4:]


def group_of(options: Namespace, where: str) -> int:
    return int(options.group or GROUP[where])


# A worker


def work(options: Namespace) -> int:
    """Cases of every `step`-th group from `first`, a line of JSON for the beginning and the end of
    each; the time is up at `until`."""
    where = options.where[0]
    first, step, until = (float(x) for x in options.worker.split(":"))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no result
    prepare(where)
    from fuzz.calling import is_lost, outcome_of

    group = group_of(options, where)
    number = int(first)
    while True:
        for index in range(number * group, (number + 1) * group):
            if time.time() > until or (options.count and index >= options.first + options.count):
                return 0
            if index < options.first:
                continue
            out.write(json.dumps({"begin": index}) + "\n")
            begun = time.time()
            found = outcome_of(options.seed, index, where, group, options.kinds)
            line = {"end": index, "seconds": time.time() - begun, **found._asdict()}
            out.write(json.dumps(line) + "\n")
            if where == "cuda" and found.outcome in FAILURES and is_lost():
                return 3
        number += int(step)


def repeat(options: Namespace) -> int:
    """The cases that `--only` names, in this process."""
    where = options.where[0]
    prepare(where)
    from fuzz.calling import outcome_of

    first, _, last = options.only.partition("-")
    bad = 0
    for index in range(int(first), int(last or first) + 1):
        found = outcome_of(options.seed, index, where, group_of(options, where), options.kinds)
        bad += found.outcome in FAILURES
        print(f"{index} {found.name}: {found.outcome}\n{found.text}".rstrip())
    return 1 if bad else 0


# The process that counts


@dataclass
class Worker:
    """A process, the group that it goes on with if it is started again, and the case it is at."""

    where: str
    next_group: int
    step: int = 1
    process: Any = None
    at: int | None = None
    since: float = 0.0
    over: bool = False


@dataclass
class Counts:
    """Outcomes by (where, function), and the failures."""

    table: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refusals: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)  # by what they have in common
    first: dict[str, str] = field(default_factory=dict)  # a line that repeats one of them
    cases: Counter[str] = field(default_factory=Counter)
    groups: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))


def run(options: Namespace) -> int:
    """The exit status: 1 where anything failed."""
    begun = time.time()
    until = begun + max(options.seconds - BEHIND, 1.0)
    events: queue.Queue[tuple[Worker, dict[str, Any] | None]] = queue.Queue()
    workers = []
    for place in range(max(options.workers, len(options.where))):
        where = options.where[place % len(options.where)]
        alike = sum(worker.where == where for worker in workers)
        first = alike + options.first // group_of(options, where)
        workers.append(Worker(where, first))
    for worker in workers:
        worker.step = sum(other.where == worker.where for other in workers)
    for worker in workers:
        start(worker, options, until, events)
    counts = Counts()
    while not all(worker.over for worker in workers):
        try:
            worker, event = events.get(timeout=0.5)
        except queue.Empty:
            worker, event = None, {}
        if worker is not None and event is None:
            ended(worker, options, until, events, counts)
        elif worker is not None and event:
            noted(worker, event, options, counts)
        now = time.time()
        for each in workers:
            late = each.at is not None and now - each.since > LIMIT[each.where]
            if not each.over and late:
                each.process.kill()
                failed(
                    counts, options, each, "?", "hang", f"not over after {now - each.since:.0f} s"
                )
                each.at = None
            elif not each.over and now > until + BEHIND:
                each.process.kill()
                each.over = True
                if each.at is not None:
                    print(f"{each.where} {each.at}: cut off after {now - each.since:.0f} s")
    print(summary(counts, options, time.time() - begun))
    return 1 if counts.failures else 0


def start(worker: Worker, options: Namespace, until: float, events: Any) -> None:
    command = [sys.executable, "-m", "fuzz", "--where", worker.where, "--seed", str(options.seed)]
    command += ["--worker", f"{worker.next_group}:{worker.step}:{until}"]
    command += ["--kinds", options.kinds, "--group", str(group_of(options, worker.where))]
    command += ["--count", str(options.count), "--first", str(options.first)]
    environment = dict(os.environ)
    paths = [str(TESTS.parent / "src"), str(TESTS), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("OMP_NUM_THREADS", "1")
    if worker.where != "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    worker.process, worker.at = process, None
    said: list[str] = []
    process.said = said  # type: ignore[attr-defined]

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            events.put((worker, json.loads(line)))
        process.wait()
        heard.join(5)
        events.put((worker, None))

    def hear() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            del said[:-40]

    heard = threading.Thread(target=hear, daemon=True)
    heard.start()
    threading.Thread(target=listen, daemon=True).start()


def noted(worker: Worker, event: dict[str, Any], options: Namespace, counts: Counts) -> None:
    if "begin" in event:
        worker.at, worker.since = event["begin"], time.time()
        group = event["begin"] // group_of(options, worker.where)
        worker.next_group = group + worker.step
        counts.groups[worker.where].add(group)
        return
    worker.at = None
    name, outcome = event["name"], event["outcome"]
    counts.cases[worker.where] += 1
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps({"where": worker.where, **event}) + "\n")
    if options.verbose:
        print(
            f"{worker.where} {event['end']} {name} {outcome} {event['seconds']:.2f} s", flush=True
        )
    if outcome in FAILURES:
        failed(counts, options, worker, name, outcome, event["text"], event["end"])
        return
    counts.table[worker.where, name][outcome] += 1
    if outcome == "refused":
        counts.refusals[f"{name}: {event['text']}"] += 1


def failed(
    counts: Counts,
    options: Namespace,
    worker: Worker,
    name: str,
    outcome: str,
    text: str,
    index: int | None = None,
) -> None:
    counts.table[worker.where, name][outcome] += 1
    index = worker.at if index is None else index
    kinds = f" --kinds {options.kinds}" if options.kinds else ""
    group = f" --group {options.group}" if options.group else ""
    line = (
        f"PYTHONPATH=src:tests python -m fuzz --where {worker.where} --seed {options.seed} "
        f"--only {index}{kinds}{group}"
    )
    message = f"{outcome}: {name}\n{text.rstrip()}\n  {line}"
    alike = signature(name, outcome, text)
    counts.failures[alike] += 1
    counts.first.setdefault(alike, line)
    if counts.failures[alike] <= SHOWN:
        print(message, flush=True)
    else:
        print(f"{outcome}: {name}, as before\n  {line}", flush=True)


def signature(name: str, outcome: str, text: str) -> str:
    """What failures of one cause have in common: the innermost line of the package, and the kind of
    error; or what was wrong, without its numbers."""
    places = re.findall(r'File ".*?/splitkv/(.*?)", line \d+, in (\w+)', text)
    kinds = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception|Warning)): (.*)", text, re.M)
    if outcome == "raw error" and kinds:
        where = " ".join(places[-1]) if places else ""
        said = re.sub(r"[-\d.e+]*\d+", "N", kinds[-1][1])[:90]
        return f"{outcome}: {name}: {kinds[-1][0]} in {where}: {said}"
    first = text.strip().splitlines()[0] if text.strip() else ""
    how = first.split(": error")[0].split(", got")[0][:90]
    return f"{outcome}: {name}: {how}"


def ended(worker: Worker, options: Namespace, until: float, events: Any, counts: Counts) -> None:
    """A process is over: at its end, or for another reason, behind which it goes on."""
    if worker.over:
        return
    status = worker.process.returncode
    if worker.at is not None:
        said = "".join(worker.process.said[-15:])
        failed(counts, options, worker, "?", "crash", f"exit status {status}\n{said}")
    elif status not in (0, 3, -9):
        said = "".join(worker.process.said[-15:])
        print(f"a worker ended before its first case: exit status {status}\n{said}", flush=True)
        counts.failures["a worker that did not start"] += 1
        worker.over = True
        return
    if status == 0 or time.time() > until:
        worker.over = True
        return
    start(worker, options, until, events)


def summary(counts: Counts, options: Namespace, seconds: float) -> str:
    names = [outcome for outcome in OUTCOMES if any(c[outcome] for c in counts.table.values())]
    width = max((len(f"{where} {name}") for where, name in counts.table), default=8)
    lines = [" " * width + "".join(f"{name:>13}" for name in names)]
    total: Counter[str] = Counter()
    for (where, name), found in sorted(counts.table.items()):
        total.update(found)
        cells = "".join(f"{found[outcome] or '':>13}" for outcome in names)
        lines.append(f"{where + ' ' + name:<{width}}{cells}")
    lines.append(f"{'all':<{width}}" + "".join(f"{total[name]:>13}" for name in names))
    if counts.refusals:
        lines.append("refused, by reason:")
        lines += [f"  {n:>5} {text[:150]}" for text, n in counts.refusals.most_common(25)]
    shares = ", ".join(
        f"{where}: {n} cases of {len(counts.groups[where])} variants"
        for where, n in counts.cases.items()
    )
    if counts.failures:
        lines.append("failures, by what they have in common, with the first of each:")
    for alike, n in counts.failures.most_common():
        lines += [f"  {n:>5} {alike}", f"        {counts.first.get(alike, '')}"]
    n = sum(counts.failures.values())
    lines.append(f"seed {options.seed}, {seconds:.0f} s, {shares}; {n} failures")
    return "\n".join(lines)
