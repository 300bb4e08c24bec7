"""Sweeps of FlashAttention-3 without it: a backend whose times are a curve."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from results import MACHINE
from rich.console import Console
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core.device import GPUS
from splitkv.core.plan import Config
from splitkv.kernels import records
from splitkv.lab.harness import backends
from splitkv.lab.harness.lines import Record, read
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.work import Work
from splitkv.lab.overview import report
from splitkv.lab.tune import fa3, studies, sweep
from splitkv.planner import registry
from splitkv.planner.policies import fixed, waves

CASE = CASES["mqa8_b1_512"]
POLICIES = {"waves": waves.choose, "three": fixed.with_splits(3)}
BEST, OWN = 6, 9.0  # splits, microseconds where it decides itself


def us_of(splits: int) -> float:
    return 5.0 + abs(splits - BEST) / 4 if splits else OWN


class Curve:
    """A backend that notes what it was asked for."""

    name = "fa3"

    def __init__(self, broken: int | None = None, missing: str = "") -> None:
        self.broken, self.missing = broken, missing
        self.asked: list[tuple[int, ...]] = []
        self.stopped = False

    def absent(self) -> list[str]:
        return [self.missing] if self.missing else []

    def measure(self, work: Work, rounds: int) -> list[Record]:
        self.asked.append(tuple(way.splits for way in work.ways))
        assert all(way.packed is None and way.margin == 0 for way in work.ways)
        found: list[Record] = []
        for way in work.ways:
            lost = way.splits == self.broken
            us, reasons = (None, ["too many"]) if lost else (us_of(way.splits), [])
            found.append({"kernel": way.name, "us": us, "spread_us": 0.1, "reasons": reasons})
        return found

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", (records.DECODE_SPLIT,))
    for module in (studies, sweep):
        monkeypatch.setattr(module, "facts", lambda: MACHINE)
    monkeypatch.setattr(sweep, "current", lambda: GPUS["h200"])


def swept(backend: Curve, path: Path | None = None, **options: Any) -> tuple[list[Record], str]:
    screen = io.StringIO()
    given: dict[str, Any] = {
        **{"policies": POLICIES, "num_splits": 8, "kernels": [], "all_tiles": False, "jobs": 0},
        **{"json_path": path, "time_limit": None, "console": Console(file=screen, width=200)},
    }
    records, lost = sweep.sweep(CASE, library=fa3.of(backend), **{**given, **options})
    assert not lost
    return records, screen.getvalue()


def test_the_policies_splits_are_injected() -> None:
    backend = Curve()
    records, text = swept(backend)
    curve = {r["config"]["num_splits"]: r["us"] for r in records if not r["policy"]}
    assert curve == {n: us_of(n) for n in range(1, 9)}
    by_policy = {r["policy"]: r for r in records if r["policy"]}
    plan = registry.make_plan(CASE.problem, GPUS["h200"], policy=waves.choose)
    assert by_policy["waves"]["config"] == {"num_splits": plan.config.num_splits}
    assert by_policy["three"]["us"] == us_of(3) and by_policy["its own"]["us"] == OWN
    assert {r["kernel"] for r in records} == {"fa3"}
    assert backend.asked == [tuple(range(1, 9)), (plan.config.num_splits, 3, 0)]
    assert "| best of fa3" in text and f"fa3 {BEST} splits" in text
    assert "| its own on fa3" in text and "fa3 its own splits" in text
    assert "| three on fa3" in report(records)


def test_a_point_is_not_timed_again(tmp_path: Path) -> None:
    path, again = tmp_path / "sweep.jsonl", Curve()
    first, _ = swept(Curve(), path)
    assert len(swept(again, path)[0]) == len(first) == len(read(path))
    assert again.asked == []
    swept(again, path, num_splits=9)
    assert again.asked == [(9,)]


def test_splits_that_do_not_run_are_a_reason() -> None:
    records, text = swept(Curve(broken=4))
    splits = [r["config"]["num_splits"] for r in records if not r["policy"]]
    assert splits == [1, 2, 3, 5, 6, 7, 8]
    assert "fa3 s=4: too many" in text


def test_many_splits_take_turns_in_batches() -> None:
    backend = Curve()
    swept(backend, num_splits=sweep.AT_ONCE + 2, policies={})
    assert backend.asked[1:] == [(sweep.AT_ONCE + 1, sweep.AT_ONCE + 2), (0,)]
    backend = Curve()
    swept(backend, num_splits=0, policies={})
    assert backend.asked[0] == tuple(range(1, 512 // fa3.TILE + 1))


def test_the_boundary_is_studied_at_each_number_of_keys(tmp_path: Path) -> None:
    backend, screen = Curve(), io.StringIO()
    options: dict[str, Any] = {
        **{"jobs": 0, "json_path": tmp_path / "keys.jsonl", "time_limit": None},
        **{"console": Console(file=screen, width=200), "library": fa3.of(backend)},
    }
    records, _ = sweep.boundary(CASE, [256, 512], policies=POLICIES, **options)
    assert [r["case"] for r in records] == ["mqa8_b1_512_fa3@256", "mqa8_b1_512_fa3@512"]
    short, long = (r["best"] for r in records)
    assert (short["config"], short["us"]) == ({"num_splits": 4}, us_of(4))
    assert (long["config"], long["kernel"]) == ({"num_splits": BEST}, "fa3")
    assert records[0]["chosen"]["three"]["us"] == us_of(3)
    assert "(own)" in screen.getvalue() and "its own" in screen.getvalue()
    count = len(backend.asked)
    sweep.boundary(CASE, [256, 512], policies=POLICIES, **options)
    assert len(backend.asked) == count and "2 of 2 cases were already" in screen.getvalue()


def test_candidates_spread_over_the_splits_that_have_keys() -> None:
    long = CASES["mqa8_b1_8192"].problem
    splits = [c.config.num_splits for c in fa3.candidates(long, GPUS["h200"], 16)]
    assert splits[0] == 1 and splits[-1] == fa3.MOST and len(splits) > 10
    few = [c.config.num_splits for c in fa3.candidates(CASE.problem, GPUS["h200"], 16)]
    assert few == list(range(1, 9))
    assert [c.config for c in fa3.candidates(CASE.problem, GPUS["h200"], 1)] == [Config(1)]


def test_a_process_that_ends_within_a_study_leaves_reasons() -> None:
    class Dying(Curve):
        def measure(self, work: Work, rounds: int) -> list[Record]:
            if not self.asked:
                return super().measure(work, rounds)
            absent = {"us": None, "spread_us": None, "reasons": ["its process ended"]}
            return [{"kernel": way.name, **absent} for way in work.ways]

    library = fa3.of(Dying())
    who = studies.entries(CASE, GPUS["h200"], POLICIES, 8, library)
    record = studies.study(CASE, GPUS["h200"], who, 9, library)
    assert record["best"] is None and "fa3 s=6: its process ended" in record["reasons"]


def test_ours_and_theirs_are_one_picture(tmp_path: Path) -> None:
    plots = pytest.importorskip("splitkv.lab.report.plots")
    records, _ = swept(Curve())
    shape = {"tile_n": 64, "num_warps": 4, "num_stages": 2, "num_splits": 2}
    ours = [
        {**r, "kernel": "decode_split", "config": shape} for r in records if r["policy"] is None
    ]
    (axes,) = plots.splits([*records, *ours]).axes
    labels = set(axes.get_legend_handles_labels()[1])
    assert labels == {"fa3", "decode_split", "waves on fa3", "three on fa3", "its own on fa3"}


def test_the_command_ends_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = Curve()
    monkeypatch.setattr(fa3, "FlashAttention3", lambda: backend)
    path = tmp_path / "sweep.jsonl"
    given = ["sweep", "--backend", "fa3", "--policy", "waves", "--json", str(path)]
    done = CliRunner().invoke(app, [*given, "--num-splits", "4", "--jobs", "0"])
    assert done.exit_code == 0, done.output
    assert backend.stopped and len(read(path)) == 6
    done = CliRunner().invoke(app, [*given, "--seqlens", "128,256", "--jobs", "0"])
    assert done.exit_code == 0 and len(read(path)) == 8


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--backend", "fa4"], "backend: expected 'splitkv' or 'fa3', got 'fa4'"),
        (["--backend", "fa3", "--all-tiles"], "all_tiles: expected None with the backend fa3"),
        (["--backend", "fa3", "--kernel", "x"], "kernel: expected None with the backend fa3"),
        (["--backend", "fa3"], "backend: expected FlashAttention-3 installed, got 'not here'"),
    ],
)
def test_what_cannot_be_swept(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa3, "FlashAttention3", lambda: Curve(missing="not here"))
    done = CliRunner().invoke(app, ["sweep", *args])
    assert done.exit_code == 2 and done.stderr.startswith(f"splitkv: {message}"), done.stderr


def test_the_real_backend_says_whether_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.peers, "importable", lambda module: False)
    with pytest.raises(ValueError, match="^backend: expected FlashAttention-3 installed, got "):
        fa3.library().__enter__()
