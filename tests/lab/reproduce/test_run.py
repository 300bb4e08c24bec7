"""`splitkv reproduce` without a GPU: resuming, what ends a run, the files that it writes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
from collections.abc import Callable
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
    measured,
    rates,
    rest,
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
from splitkv.lab.reproduce import run, works
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims.verdict import SOURCES


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path, todo = tmp_path / "results.jsonl", works.works(True, 132)
    ours = FakeBackend("splitkv")
    lost, text = measured(path, ours, FakeBackend("fa3", absent="no module"), todo=todo[:3])
    assert not lost and len(ours.asked) == 3 and "fa3: no module" in text
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("\n", 0, -1) + 20])  # cut short in its last record
    again = FakeBackend("splitkv")
    measured(path, again, todo=todo)
    assert len(again.asked) == len(taken("splitkv", todo)) - 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["case"] for r in lines if r["step"] == "decode step"] == ["llama3_70b_tp8"]
    assert len(lines) == len(taken("splitkv", todo)) + len(BESIDE)
    other = FakeBackend("splitkv")
    measured(path, other, todo=todo[:2], effort="quick")
    assert len(other.asked) == 2


def test_a_lost_gpu_loses_no_result(tmp_path: Path) -> None:
    def breaks(work: Work, way: Way) -> float:
        if work.case.name == todo[2].case.name:
            raise RuntimeError("CUDA error: an illegal memory access")
        return 1.0

    path, todo = tmp_path / "results.jsonl", works.works(True, 132)
    lost, text = measured(path, FakeBackend("splitkv", breaks), todo=todo)
    assert lost and "splitkv: stopped: RuntimeError: CUDA error" in text
    assert len(path.read_text().splitlines()) == len(BESIDE) + 2  # steps beside, and two shapes


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
    assert steps == ["decode step", "training", "table 1", "table 1"]
    monkeypatch.setitem(BESIDE, "trace", traced)
    measured(path, ours, todo=todo)
    assert json.loads(path.read_text().splitlines()[-1])["step"] == "trace"
    monkeypatch.setitem(BESIDE, "decode step", cannot)
    assert measured(tmp_path / "other.jsonl", ours, todo=todo)[0]


def test_past_its_time_a_backend_begins_nothing_and_the_next_one_does(tmp_path: Path) -> None:
    screen, ours, theirs = io.StringIO(), FakeBackend("splitkv"), FakeBackend("fa3")
    with Lines(tmp_path / "r.jsonl") as lines:
        options: Any = {"ends": {"fa3": 0.0}, "machine": MACHINE, "beside": BESIDE}
        options["console"] = Console(file=screen)
        todo = [w for w in works.works(True, 132) if w.step == "table 1"][:5]
        who: Any = [ours, theirs]
        run.run_works(todo, who, H200, "quick", lines, Compiler(0), **options)
    assert not theirs.asked and len(ours.asked) == 5
    assert "fa3: time limit: 5 shapes left out" in screen.getvalue()


def cut_short(monkeypatch: pytest.MonkeyPatch, folder: Path, ending: Callable[[], Any]) -> str:
    """`reproduce` on fakes, of which the 14th shape is not the end of the run, but `ending`."""

    def us(work: Work, way: Way) -> float | None:
        return ending() if len(ours.asked) == 14 else fast(work, way)

    ours, screen = FakeBackend("splitkv", us), io.StringIO()
    monkeypatch.setattr(run, "current", lambda: H200)
    monkeypatch.setattr(run, "facts", lambda: MACHINE)
    monkeypatch.setattr(run, "Ours", lambda: ours)
    monkeypatch.setattr(run, "beside_attention", lambda effort: {"decode step": rest})
    monkeypatch.setattr(run, "Torch", lambda: FakeBackend("torch", absent="left out"))
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
        assert len((folder / "results.jsonl").read_text().splitlines()) == 14  # and a decode step
        claims = {v["claim"]: v for v in json.loads((folder / "claims.json").read_text())}
        words = {v["verdict"] for v in claims.values()}
        assert words == {"PASS", "NOT RUN"} and all(v["why"] for v in claims.values())
        assert claims["512 keys, 1 KV head: patched over standard (splitkv)"]["verdict"] == "PASS"
        assert "see" in said.splitlines()[-1] and (folder / "report.md").is_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_whole_sequences_that_are_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def bench(command: str, cases: list[Case], **options: Any) -> tuple[list[Any], int]:
        asked.append((command, [case.name for case in cases]))
        return [], 0

    monkeypatch.setattr(run, "facts", lambda: MACHINE)
    monkeypatch.setattr(run.sequences, "bench_sequences", bench)
    monkeypatch.setattr(run.torch.cuda, "synchronize", lambda: None)
    path = tmp_path / "results.jsonl"
    quiet, ahead = Console(file=io.StringIO()), Compiler(0)
    assert not run.run_sequences(path, "quick", ahead, math.inf, quiet)
    assert [command for command, _ in asked] == ["prefill", "backward"]
    names = [name for _, listed in asked for name in listed]
    assert "mqa16_b8_4096_full" in names and not [n for n in names if "window128" in n]
    done = [
        {**rates("forward", name, "splitkv", 1.0), "suite": command}
        for command, listed in asked
        for name in listed
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in done))
    asked.clear()
    run.run_sequences(path, "quick", ahead, math.inf, quiet)
    assert asked == []
    path.unlink()
    run.run_sequences(path, "quick", ahead, 0.0, quiet)
    assert asked == [], "past the time limit"
    assert [len(names) for _, names in run.sequence_cases("full")] == [48, 16]


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
    assert re.search(r"\(1/4, \d+ s left\)", text) and "(4/4, 0 s left)" in text
    clock = iter([0.0, 10.0, 20.0])
    advance = Advance(Console(file=io.StringIO()), "x", 4, lambda: next(clock))
    assert [advance.step(), advance.step()] == ["1/4, 30 s left", "2/4, 20 s left"]
