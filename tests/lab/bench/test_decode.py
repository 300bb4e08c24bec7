"""`splitkv bench decode` without a GPU: what records say, what ends a run, the command."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from ending import ENDINGS, ending
from results import FLOOR, MACHINE
from results import decode_records as records
from rich.console import Console
from typer.testing import CliRunner

import splitkv
from splitkv.cli import app
from splitkv.core.device import GPUS
from splitkv.lab.bench import decode as bench
from splitkv.lab.harness import machine, peers, suites
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import CASES, SUITES, select
from splitkv.lab.harness.timing import Protocol, Variant
from splitkv.lab.harness.variants import our_variants


def command(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "decode", *args])


def reasons(name: str, case: str) -> list[list[str]]:
    return [variant.unsupported(CASES[case]) for variant in peers.PEERS[name].variants]


def test_a_record_says_what_where_and_when() -> None:
    r = records()[0]
    assert {
        *(
            "case",
            "library",
            "kernel",
            "shape",
            "dtype",
            "us",
            "spread_us",
            "floor_us",
            "tbs",
            "err",
        ),
        *(
            "plan",
            "mode",
            "gpu",
            "driver",
            "versions",
            "commit",
            "date",
            "reasons",
            "cache",
            "clocks",
        ),
    } <= r.keys()
    assert r["tbs"] == pytest.approx(262144 / 4e-6 / 1e12)
    assert r["flops"] == 4 * 8 * 512 * 128 and r["tflops"] == r["flops"] / 4.0 / 1e6
    assert r["floor_us"] == 2.0 and r["floor"]["by"] == "tma 64x12x1"
    assert r["shape"]["place"] == "contiguous" and r["shape"]["seqlen_k"] == 512
    assert r["versions"] == {**MACHINE["versions"], "library": "1"}
    assert json.loads(json.dumps(r)) == r


def test_the_commit_or_the_hash_of_the_sources_is_named() -> None:
    assert machine.commit()


def test_changed_sources_are_not_named_as_others_of_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study goes on with the results of the commit that it is of."""
    source = tmp_path / "__init__.py"
    monkeypatch.setattr(splitkv, "__file__", str(source))

    def named(text: str) -> str:
        source.write_text(text)
        return machine.commit()

    def git(*arguments: str) -> None:
        given = ("-c", "user.name=a", "-c", "user.email=a@b", *arguments)
        subprocess.run(("git", "-C", str(tmp_path), *given), check=True, capture_output=True)

    alone = named("a = 1")
    assert alone.startswith("sha256:") and named("a = 2") != alone
    git("init")
    git("add", ".")
    git("commit", "--message", "a")
    kept = named("a = 2")
    changed = [named(f"a = {i}") for i in (3, 4)]
    assert kept.isalnum() and all(name.startswith(f"{kept}-dirty:") for name in changed)
    assert changed[0] != changed[1]
    assert named("a = 3") == changed[0] and named("a = 2") == kept


def test_a_record_names_what_is_special_about_a_case() -> None:
    case = next(case for case in SUITES["mixed"] if case.beside)
    row = our_variants()[0].row(us=50.0, spread_us=0.1, err=0.0)
    r = bench.record(case, row, FLOOR, Protocol(), MACHINE)
    assert r["kv_bytes"] == case.kv_bytes and r["tbs"] == case.kv_bytes / 50.0 / 1e6
    assert r["flops"] / r["kv_bytes"] == case.problem.num_heads / case.problem.num_kv_heads
    assert tuple(r["shape"]["lengths"]) == suites.mixed_lengths()
    windowed = bench.record(CASES["gpt_oss_b1_4096_window128"], row, FLOOR, Protocol(), MACHINE)
    assert windowed["shape"]["mask"] == "causal window(127, -1)"
    assert windowed["flops"] == 4 * 64 * 128 * 64
    assert windowed["shape"]["sink_logits"] is True


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "current", lambda: GPUS["h200"])
    monkeypatch.setattr(bench, "facts", lambda: MACHINE)
    monkeypatch.setattr(bench.Floors, "__call__", lambda self, num_bytes: FLOOR)


@pytest.mark.usefixtures("h200")
def test_results_are_on_disk_before_a_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case, variants: list[Variant], protocol: Protocol) -> Any:
        yield variants[0].row(us=5.0, spread_us=0.1, err=0.0)
        if "2048" in case.name:
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(bench, "measure", broken)
    path, screen = tmp_path / "new" / "results.jsonl", io.StringIO()
    found, status = bench.bench_decode(
        select(["mqa8_b1_*"], "contiguous"),
        ours=our_variants(),
        peers=[],
        protocol=Protocol(),
        json_path=path,
        console=Console(file=screen, width=80),
    )
    assert status == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["case"] for r in lines] == ["mqa8_b1_512", "mqa8_b1_2048"]
    assert json.loads(json.dumps(found)) == lines
    assert "mqa8_b1_2048: stopped: RuntimeError: CUDA error" in screen.getvalue()
    assert "| mqa8_b1_2048" in screen.getvalue()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("kind", ENDINGS)
def test_whatever_ends_a_run_loses_no_result(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ending(kind, tmp_path / "results.jsonl", "mqa8", monkeypatch)

    def measured(case: Case, variants: list[Variant], protocol: Protocol) -> Any:
        run.take(case.name)
        yield variants[0].row(us=5.0, spread_us=0.1, err=0.0)

    monkeypatch.setattr(bench, "measure", measured)
    with run.raised() as ended:
        bench.bench_decode(
            select(["mqa8_b1_*"], "contiguous"),
            ours=our_variants(),
            peers=[],
            protocol=Protocol(),
            json_path=run.path,
            console=run.console,
        )
    assert [r["case"] for r in run.kept(capsys)] == run.taken
    if kind == "disk":
        said = f"results: expected {run.path} to take another line, got No"
        assert str(ended.value).startswith(said) and len(run.taken) == 2


@pytest.mark.usefixtures("h200")
def test_past_the_time_limit_no_case_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 5.0, 11.0])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    row = our_variants()[0].row(us=1.0, spread_us=0.0)
    monkeypatch.setattr(bench, "measure", lambda *_: iter([row]))
    screen = io.StringIO()
    _, status = bench.bench_decode(
        select([]),
        ours=our_variants(),
        peers=[],
        protocol=Protocol(),
        time_limit=10,
        console=Console(file=screen),
    )
    assert status == 0
    assert "time limit of 10 s: 32 cases left out" in screen.getvalue()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "device: expected a CUDA GPU, got 'CPU'"),
        (["--case", "nobody"], "case: expected a glob that matches one of"),
        (["--place", "page8"], "place: expected 'all', 'contiguous' or 'page16', got 'page8'"),
        (["--suite", "best"], "suite: expected 'records', 'pages', 'mixed', "),
        (["--suite", "mixed", "--case", "mqa8_b1_512"], "case: expected a glob that matches one"),
        (["--peers", "fa4"], "peers: expected all, none or some of"),
        (["--mode", "hot"], "mode: expected 'isolated' or 'back-to-back', got 'hot'"),
        (["--policy", "best"], "policy: expected "),
        (["--num-splits", "-1"], "num_splits: expected at least 0, got -1"),
        (["--num-splits", "2", "--policy", "waves"], "num_splits: expected 0 with a policy, got 2"),
        (["--time-limit", "0"], "time_limit: expected more than 0, got 0"),
        (["--jobs", "-1"], "jobs: expected at least 0, got -1"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"splitkv: {message}")
    assert result.stderr.count("\n") == 1 and result.stdout == ""
