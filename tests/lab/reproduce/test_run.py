"""`splitkv reproduce` without a GPU: resuming, what ends a run, the files that it writes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import pytest
from reproducing import (
    BESIDE,
    H200,
    FakeBackend,
    doctored,
    fast,
    items_of,
    measured,
    rates,
    taken,
    traced,
)
from results import MACHINE
from rich.console import Console
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core import device
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.lines import Lines
from splitkv.lab.harness.screen import Advance
from splitkv.lab.harness.work import Way, Work
from splitkv.lab.reproduce import agenda, run, works
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims.verdict import SOURCES


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    items = items_of("splitkv")
    first = [i.what for i in items if i.part == "splitkv" and isinstance(i.what, Work)][:3]
    ours = FakeBackend("splitkv")
    lost, text = measured(path, ours, FakeBackend("fa3", absent="no module"), todo=first)
    assert not lost and len(ours.asked) == 3 and "fa3: no module" in text
    assert (ours.paces, ours.starts) == ({(agenda.ROUNDS, agenda.REPEATS)}, 1)
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("\n", 0, -1) + 20])  # cut short in its last record
    again = FakeBackend("splitkv")
    measured(path, again)
    count = sum(item.part == "splitkv" for item in items)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [r["step"] for r in lines]
    assert [steps.count(step) for step in BESIDE] == [1] * len(BESIDE)
    # what was cut short is the training, which is last
    assert len(again.asked) == count - 3 and len(lines) == count + len(BESIDE)
    more = FakeBackend("splitkv")
    _, text = measured(path, more)
    assert not more.asked and not more.starts and "0 to measure, about 0 s" in text


def test_another_pace_or_other_sources_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, todo = tmp_path / "r.jsonl", [w for w in works.works(True, 132) if w.step == "table 1"]
    measured(path, FakeBackend("splitkv"), todo=todo[:2])
    monkeypatch.setattr(agenda, "REPEATS", 1)
    again = FakeBackend("splitkv")
    measured(path, again, todo=todo[:2])
    assert len(again.asked) == 2
    records = [json.loads(line) for line in path.read_text().splitlines()]
    items = items_of("splitkv", todo=todo[:2])
    assert not agenda.left_of(items, records, MACHINE)
    assert len(agenda.left_of(items, records, {**MACHINE, "commit": "other"})) == len(items)


def test_a_lost_gpu_loses_no_result(tmp_path: Path) -> None:
    def breaks(work: Work, way: Way) -> float:
        if len(ours.asked) == 3:
            raise RuntimeError("CUDA error: an illegal memory access")
        return 1.0

    path, ours = tmp_path / "results.jsonl", FakeBackend("splitkv", breaks)
    lost, text = measured(path, ours)
    assert lost and "stopped: RuntimeError: CUDA error" in text
    assert len(path.read_text().splitlines()) == 2 + 2  # a step of each kind, and two shapes


def test_a_step_that_torch_cannot_do_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(rounds: int) -> Any:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setitem(BESIDE, "trace", cannot)
    todo = [w for w in works.works(True, 132) if w.step == "table 1"][:2]
    ours, path = FakeBackend("splitkv"), tmp_path / "r.jsonl"
    lost, text = measured(path, ours, todo=todo)
    assert not lost and "trace: RuntimeError: No available kernel" in text
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [*agenda.AT_FIRST, "table 1", "table 1", "quality", "training"]
    monkeypatch.setitem(BESIDE, "trace", traced)
    measured(path, ours, todo=todo)
    assert json.loads(path.read_text().splitlines()[-1])["step"] == "trace"
    monkeypatch.setitem(BESIDE, "decode step", cannot)
    assert measured(tmp_path / "other.jsonl", ours, todo=todo)[0]


def test_past_its_time_a_run_begins_nothing_and_says_what_is_left(tmp_path: Path) -> None:
    ours, theirs = FakeBackend("splitkv"), FakeBackend("fa3")
    todo = [w for w in works.works(True, 132) if w.step == "table 1"][:5]
    lost, text = measured(tmp_path / "r.jsonl", ours, theirs, todo=todo, end=0.0)
    assert not lost and not theirs.asked and not ours.asked
    assert "time limit: 15 left out; the same command goes on with them" in text
    measured(tmp_path / "r.jsonl", ours, theirs, todo=todo)
    assert len(theirs.asked) == len(ours.asked) == 5


def fakes(monkeypatch: pytest.MonkeyPatch, ours: FakeBackend) -> None:
    """`reproduce` on a GPU that is not there."""
    monkeypatch.setattr(run, "current", lambda: H200)
    monkeypatch.setattr(run, "facts", lambda: MACHINE)
    monkeypatch.setattr(run, "Ours", lambda: ours)
    monkeypatch.setattr(run, "FlashAttention3", lambda: FakeBackend("fa3", absent="left out"))
    monkeypatch.setattr(run, "Torch", lambda: FakeBackend("torch", absent="left out"))
    for step in BESIDE:
        monkeypatch.setitem(agenda.BESIDE, step, BESIDE[step])


def cut_short(monkeypatch: pytest.MonkeyPatch, folder: Path, ending: Callable[[], Any]) -> str:
    """`reproduce` on fakes, of which the 14th shape is not the end of the run, but `ending`."""

    def us(work: Work, way: Way) -> float | None:
        return ending() if len(ours.asked) == 14 else fast(work, way)

    ours, screen = FakeBackend("splitkv", us), io.StringIO()
    fakes(monkeypatch, ours)
    options: Any = {"backends": ["splitkv"], "whole_sequences": False, "jobs": 0}
    with pytest.raises(KeyboardInterrupt):
        run.reproduce(
            folder, quick=True, time_limit=None, console=Console(file=screen, width=300), **options
        )
    return screen.getvalue()


def test_an_interrupted_run_says_what_its_results_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def terminated() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    for name, ending in (("ctrl-c", interrupted), ("term", terminated)):
        folder = tmp_path / name
        said = cut_short(monkeypatch, folder, ending)
        assert (
            len((folder / "results.jsonl").read_text().splitlines()) == 15
        )  # and a step of each kind
        claims = {v["claim"]: v for v in json.loads((folder / "claims.json").read_text())}
        words = {v["verdict"] for v in claims.values()}
        assert words == {"PASS", "NOT RUN"} and all(v["why"] for v in claims.values())
        assert claims["512 keys, 1 KV head: patched over standard (splitkv)"]["verdict"] == "PASS"
        assert "see" in said.splitlines()[-1] and (folder / "report.md").is_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_time_limit_leaves_time_for_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, screen = FakeBackend("splitkv"), io.StringIO()
    fakes(monkeypatch, ours)
    options: Any = {"backends": ["splitkv"], "whole_sequences": False, "jobs": 0, "quick": False}
    options["console"] = Console(file=screen, width=300)
    assert run.reproduce(tmp_path, time_limit=run.CONCLUSION, **options) == 0
    assert not ours.asked and "left out; the same command goes on" in screen.getvalue()
    run.reproduce(tmp_path, time_limit=None, **options)
    assert len(ours.asked) == len(taken("splitkv", works.works(False, 132)))
    assert (tmp_path / "report.html").is_file()


def test_whole_sequences_are_measured_by_stations_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    opened: list[int] = []

    @contextmanager
    def stations(ours: Any, peers: Any, pace: Any, cases: list[Case]) -> Iterator[list[Any]]:
        opened.append(len(cases))
        yield []
        opened.append(-1)

    def records_of(command: str, case: Case, *who: Any) -> Iterator[dict[str, Any]]:
        asked.append((command, case.name))
        direction = agenda.sequence_direction(command)
        yield {**rates(direction, case.name, "splitkv", 1.0), "suite": command}

    monkeypatch.setattr(run.sequences, "stations", stations)
    monkeypatch.setattr(run.sequences, "records_of", records_of)
    monkeypatch.setattr(run.sequences, "shown", lambda r: [r["case"]])
    monkeypatch.setattr(run, "Peak", lambda pace: None)
    items = list(agenda.agenda(False, H200, backends=[], sequences=True))
    path = tmp_path / "results.jsonl"

    def go(end: float = math.inf) -> None:
        with Lines(path) as lines:
            quiet = Console(file=io.StringIO())
            found = run.Run(H200, lines, Compiler(0), quiet, machine=MACHINE, end=end)
            assert not found.all(items)
            found.stop()

    go(end=0.0)
    assert asked == [] and opened == [len(items), -1], "past the time limit"
    go()
    assert len(asked) == len(items) == len(set(asked)) and len(opened) == 4
    go()
    assert len(asked) == len(items) and len(opened) == 4, "nothing is left"


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "current", device.cpu)
    said = CliRunner().invoke(app, ["reproduce", "--quick"])
    assert said.exit_code == 2 and "device: expected a CUDA GPU, got 'CPU'" in said.output
    said = CliRunner().invoke(app, ["reproduce", "--backend", "fa9"])
    assert said.exit_code == 2 and "backend: expected 'splitkv' or 'fa3', got 'fa9'" in said.output


def test_a_run_ends_with_its_files(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    decode = [r for r in records if r["suite"] == "reproduce"]
    bad = doctored(decode, "table 1", "fa3", "patched", us=14.0)
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in bad))
    screen = io.StringIO()
    run.conclude(tmp_path, Console(file=screen, width=300))
    said = json.loads((tmp_path / "claims.json").read_text())
    (failed,) = (v for v in said if v["verdict"] == "FAIL" and "1 KV head:" in v["claim"])
    assert failed["value"] == 1.0 and failed["bound"] == 1.21 and failed["relation"] == ">="
    assert "FAIL    512 keys, 1 KV head: patched over standard (fa3): 1 is not" in screen.getvalue()
    assert "NOT RUN prefill in bf16" in screen.getvalue()
    assert (tmp_path / "report.md").read_text().startswith("# Reproduction\n\nNVIDIA H200")
    picture = (tmp_path / "splits.svg").read_text()
    assert "<svg" in picture
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h2>") == len(SOURCES) + 2 and "<svg" in page
    for v in check(bad):
        assert escape(v.text) in page and escape(v.figure) in page
    assert "NVIDIA H200" in page and "abc, 20" in page


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with Advance(console, "splitkv", 2) as advance:
        for _ in range(2):
            console.print("a line", advance.step())
    assert "splitkv" in screen.getvalue() and "2/2" in screen.getvalue()


def test_progress_is_told_with_an_estimate(tmp_path: Path) -> None:
    todo = [w for w in works.works(True, 132) if w.step == "table 1"][:4]
    text = measured(tmp_path / "r.jsonl", FakeBackend("splitkv"), todo=todo)[1]
    assert re.search(r"9 to measure, about \d+ s; 0 of 9 done", text)
    assert re.search(r"\(1/9, \d+ s left\)", text) and "(9/9, 0 s left)" in text
    clock = iter([0.0, 10.0, 20.0])
    advance = Advance(Console(file=io.StringIO()), "x", 4, lambda: next(clock))
    assert [advance.step(), advance.step()] == ["1/4, 30 s left", "2/4, 20 s left"]
    clock = iter([0.0, 10.0, 20.0])
    advance = Advance(Console(file=io.StringIO()), "x", 3, lambda: next(clock), whole=10.0)
    assert [advance.step(2.0), advance.step(6.0)] == ["1/3, 40 s left", "2/3, 5 s left"]
