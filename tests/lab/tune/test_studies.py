"""Studies of many plans without a GPU: rounds, reasons, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ending import ENDINGS, ending
from results import MACHINE
from studying import CASE, FEW, H200, POLICY, FakeSession, console, us_of

from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Protocol
from splitkv.lab.report.studies import regret as share_of_regret
from splitkv.lab.tune import studies, sweep
from splitkv.lab.tune.studies import Effort
from splitkv.planner.policies import POLICIES, fixed, tuned_tables


def run(cases: list[Case], path: Path | None = None, **options: Any) -> tuple[Any, Any, str]:
    out, screen = console()
    options = {"effort": Effort(), "jobs": 0, "time_limit": None, "console": out, **options}
    policies = options.pop("policies", POLICY)
    records, lost = studies.run_studies(cases, H200, policies, json_path=path, **options)
    return records, lost, screen.getvalue()


def one(case: Case = CASE) -> dict[str, Any]:
    who = studies.entries(case, H200, POLICY, 12)
    return studies.study(case, H200, who, 9)


@pytest.mark.usefixtures("h200")
def test_a_study_finds_the_fastest_and_times_the_policies_with_it() -> None:
    record = one()
    tried = {json.dumps(t["config"]): t["us"] for t in record["tried"]}
    best = record["best"]
    assert best["config"]["tile_n"] == 128
    assert best["us"] == min(tried.values()) == us_of(CASE.problem, Config(**best["config"]))
    assert record["chosen"]["one"]["config"]["num_splits"] == 1
    shares = {name: share_of_regret(record, name) for name in POLICY}
    assert shares["one"] > shares["waves"] > 0
    assert record["chosen"]["waves"]["why"].startswith("waves: ")
    assert not record["reasons"] and json.loads(json.dumps(record)) == record
    assert record["problem"] == tuned_tables.dims(CASE.problem)


@pytest.mark.usefixtures("h200")
def test_few_rounds_for_all_and_many_for_the_fastest() -> None:
    record = one()
    (few, everyone), (many, finalists) = FakeSession.last.rounds
    assert (few, many) == (studies.FIRST_ROUNDS, 9)
    assert finalists < everyone <= 12 + len(POLICY)
    assert sum(t["final"] for t in record["tried"]) == finalists
    for plan in (record["best"], *record["chosen"].values()):
        (same,) = (t for t in record["tried"] if t["config"] == plan["config"])
        assert same["final"]


@pytest.mark.usefixtures("h200")
def test_a_plan_that_cannot_run_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Config) -> Exception | None:
        return AssertionError("out: expected an error") if config.tile_n == 128 else None

    monkeypatch.setattr(FakeSession, "broken", staticmethod(broken))
    record = one()
    assert record["best"]["config"]["tile_n"] != 128
    assert record["reasons"] and "x 128, 4 warps" in record["reasons"][0]
    assert record["reasons"][0].endswith("AssertionError: out: expected an error")


@pytest.mark.usefixtures("h200")
def test_a_plan_that_is_wrong_after_its_rounds_is_not_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = sweep.label_of(one()["best"])
    monkeypatch.setattr(FakeSession, "stops", staticmethod(lambda name: name == best))
    record = one()
    assert record["reasons"] == [f"{best}: after its rounds: no"]
    assert best not in map(sweep.label_of, record["tried"])
    assert record["best"] in [{n: t[n] for n in record["best"]} for t in record["tried"]]


@pytest.mark.usefixtures("h200")
def test_where_nothing_can_run_the_reasons_are_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "broken", staticmethod(lambda config: ValueError("no")))
    record = one()
    assert record["best"] is None and record["tried"] == [] and len(record["reasons"]) > 5
    assert record["chosen"]["waves"]["us"] is None and share_of_regret(record, "waves") is None

    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(studies, "Session", too_much)
    assert one()["reasons"] == ["OutOfMemoryError: tried to allocate"]
    assert "tried to allocate" in studies.line(one())


def test_graphs_are_short_and_cold() -> None:
    small = studies.protocol_for(CASE, H200, 9)
    assert (small.calls, small.flush, small.rounds, small.mode) == (64, True, 9, "isolated")
    large = studies.protocol_for(CASES["gqa32x8_b8_32768"], H200, 9)
    assert large.calls == 8


@pytest.mark.usefixtures("h200")
def test_a_run_goes_on_where_another_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "studies.jsonl"
    first, *_ = run(FEW[:2], path)
    with path.open("a") as file:
        file.write('{"suite": "study", "case": "mqa8_b1_81')
    FakeSession.entered.clear()
    records, lost, text = run(FEW, path)
    assert not lost and [r["case"] for r in records] == [c.name for c in FEW]
    assert records[:2] == first
    assert "2 of 3 cases were already measured" in text and "3/3 mqa8_b1_8192  " in text
    assert len(path.read_text().splitlines()) == 3
    FakeSession.entered.clear()
    run(FEW, path)
    assert FakeSession.entered == []
    run(FEW[:1], path, policies={"waves": fixed.with_splits(2)})
    assert len([c for c in FakeSession.entered if c.num_splits == 2]) >= 1
    FakeSession.entered.clear()
    monkeypatch.setattr(studies, "facts", lambda: {**MACHINE, "commit": "def"})
    run(FEW[:1], path)
    assert FakeSession.entered


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("kind", ENDINGS)
def test_whatever_ends_a_run_loses_no_study(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, study = ending(kind, tmp_path / "studies.jsonl", "mqa8", monkeypatch), studies.study

    def studied(case: Case, *args: Any) -> Any:
        ended.take(case.name)
        return study(case, *args)

    monkeypatch.setattr(studies, "study", studied)
    with ended.raised():
        run(FEW, ended.path, console=ended.console)
    assert [r["case"] for r in ended.kept(capsys)] == ended.taken
    assert 0 < len(ended.taken) < len(FEW)


@pytest.mark.usefixtures("h200")
def test_past_the_time_limit_no_study_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.0, 1.0, 11.0])
    monkeypatch.setattr(studies, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    records, lost, text = run(FEW, time_limit=10)
    assert [r["case"] for r in records] == ["mqa8_b1_512"] and not lost
    assert "time limit of 10 s: 2 cases left out" in text


@pytest.mark.usefixtures("h200")
def test_studies_are_on_disk_before_the_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost_at_2048(case: Case, protocol: Protocol) -> FakeSession:
        if case == FEW[1]:
            raise RuntimeError("CUDA error: an illegal memory access")
        return FakeSession(case, protocol)

    def unusable() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(studies, "Session", lost_at_2048)
    monkeypatch.setattr(torch.cuda, "synchronize", unusable)
    path = tmp_path / "studies.jsonl"
    records, lost, text = run(FEW, path)
    assert lost and [r["case"] for r in records] == ["mqa8_b1_512"]
    assert len(path.read_text().splitlines()) == 1
    assert "mqa8_b1_2048: stopped: RuntimeError: CUDA error" in text


def plan(splits: int = 4, tile_n: int = 64, problem: Problem = CASE.problem) -> Plan:
    return Plan(problem, H200, "test", "decode_split", Config(splits, 16, tile_n, 4, 2), "")


def test_every_policy_may_be_studied() -> None:
    who = studies.entries(CASE, H200, POLICIES, 4)
    assert who.chosen.keys() == POLICIES.keys()
    assert {p.kernel for p in studies.foreseen(CASE, H200, who)} == {"decode_split"}
