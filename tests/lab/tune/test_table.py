"""`splitkv tune` without a GPU: the table that it writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from results import MACHINE
from studying import CASE, H200, FakeSession, console, us_of

from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.lab.harness import space
from splitkv.lab.harness.cases import Case
from splitkv.lab.tune import problems, studies, table
from splitkv.lab.tune.problems import Draw, case_of
from splitkv.lab.tune.studies import Effort
from splitkv.planner.policies import tuned, tuned_tables


def tuned_with(path: Path | None, count: int = 5, **options: Any) -> tuple[int, str]:
    out, screen = console()
    given: dict[str, Any] = {
        **{"effort": Effort(8, 3), "with_known": False},
        **{"table_path": path, "command": "splitkv tune", "jobs": 0, "json_path": None},
        **{"time_limit": None, "console": out},
    }
    return table.tune(Draw(count, 0, 1e9), **{**given, **options}), screen.getvalue()


@pytest.mark.usefixtures("h200")
def test_tune_writes_a_table_that_tuned_follows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200.json"
    status, text = tuned_with(path, 12)
    assert status == 0 and f"{path}: 12 problems" in text and "| waves " in text
    written = tuned_tables.load(path)
    assert written.gpu == "NVIDIA H200" and len(written.measured) == 12
    assert written.made["command"] == "splitkv tune" and written.made["commit"] == "abc"
    choose, kernels = tuned.with_table(written), space.splitting(CASE.problem, H200)
    for measured in written.measured:
        us = [plan.us for plan in measured.plans]
        assert us == sorted(us) and 2 <= len(us) <= table.PLANS_KEPT
        assert {plan.config.schedule for plan in measured.plans} == {"even"}
        chosen = choose(measured.problem, H200, kernels).config
        if chosen.schedule == "even":
            assert us_of(measured.problem, chosen) <= 1.02 * us[0]


@pytest.mark.usefixtures("h200")
def test_tune_writes_where_the_policy_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITKV_CACHE", str(tmp_path))
    status, text = tuned_with(None, 3)
    assert status == 0 and f"{tmp_path / 'h200.json'}: 3 problems" in text
    assert {path.name for path in tmp_path.iterdir()} == {"h200.json", "h200.jsonl"}
    found = tuned_tables.table_of("NVIDIA H200")
    monkeypatch.undo()
    tuned_tables.table_of.cache_clear()
    assert found is not None and found.note.startswith(", your table of 20")


@pytest.mark.usefixtures("h200")
def test_an_interrupted_tune_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told a file: what was timed stands beside the table."""
    path, taken, study = tmp_path / "h200.json", list[str](), studies.study

    def studied(case: Case, *args: Any) -> Any:
        taken.append(case.name)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return study(case, *args)

    monkeypatch.setattr(studies, "study", studied)
    with pytest.raises(KeyboardInterrupt):
        tuned_with(path, 4)
    assert not path.exists() and len(path.with_suffix(".jsonl").read_text().splitlines()) == 2
    status, text = tuned_with(path, 4)
    assert status == 0 and f"2 of 4 cases were already measured: {tmp_path}" in text
    assert len(taken) == 5 and len(tuned_tables.load(path).measured) == 4


@pytest.mark.usefixtures("h200")
def test_a_table_of_320_problems_is_small(tmp_path: Path) -> None:
    plans = tuple(
        tuned_tables.Timed("hopper_decode_split", Config(1000 + i, 64, 128, 8, i), 1234.56)
        for i in range(table.PLANS_KEPT)
    )
    measured = [
        tuned_tables.Measured(case.problem, plans) for case in problems.drawn(320, 0, 1.1e9)
    ]
    written = tuned_tables.Table("NVIDIA H200", MACHINE, tuple(measured))
    assert len(tuned_tables.dump(written)) < 100_000


@pytest.mark.usefixtures("h200")
def test_without_a_time_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "broken", staticmethod(lambda config: ValueError("no")))
    status, text = tuned_with(tmp_path / "h200.json")
    assert status == 1 and "no plan was timed: no table" in text
    assert not (tmp_path / "h200.json").exists()


def plan(splits: int = 4, tile_n: int = 64, problem: Problem = CASE.problem) -> Plan:
    return Plan(problem, H200, "test", "decode_split", Config(splits, 16, tile_n, 4, 2), "")


@pytest.mark.usefixtures("h200")
def test_tune_goes_by_another_table(tmp_path: Path) -> None:
    """Its problems that fit, in a drawn order, and of each the plans that it has."""
    other = tmp_path / "other.json"
    assert tuned_with(other, 12)[0] == 0
    like = tuned_tables.load(other)
    sizes = sorted(case_of(m.problem).kv_bytes for m in like.measured)
    draw = Draw(4, 3, sizes[-3])
    drawn = table.drawn_from(like, draw)
    assert len(drawn) == 4 and max(case.kv_bytes for case in drawn) <= sizes[-3]
    assert drawn == table.drawn_from(like, draw)
    assert drawn != table.drawn_from(like, replace(draw, seed=4))
    parts = [table.drawn_from(like, replace(draw, share=(part, 2))) for part in (1, 2)]
    assert sorted(c.name for part in parts for c in part) == sorted(c.name for c in drawn)

    FakeSession.entered.clear()
    path, (out, screen) = tmp_path / "h200.json", console()
    given: dict[str, Any] = {"effort": Effort(2, 3), "with_known": False, "jobs": 0}
    given |= {"table_path": path, "command": "splitkv tune", "json_path": None, "time_limit": None}
    assert table.tune(draw, **given, console=out, like=like) == 0, screen.getvalue()
    written = tuned_tables.load(path)
    assert [m.problem for m in written.measured] == [case.problem for case in drawn]
    theirs = {m.problem: m.plans for m in like.measured}
    for measured in written.measured:
        assert theirs[measured.problem][0].config in {plan.config for plan in measured.plans}

    foreign = replace(like, measured=[replace(m, plans=(FOREIGN, *m.plans)) for m in like.measured])
    listed = table.plans_of(foreign)(drawn[0].problem, H200, 9)
    assert listed and FOREIGN.config not in [choice.config for choice in listed]
    assert {choice.why for choice in listed} == {"as on NVIDIA H200"}


# a tile of no kernel
FOREIGN = tuned_tables.Timed("hopper_decode_split", Config(1, 16, 48, 4, 2), 1.0)


@pytest.mark.usefixtures("h200")
def test_tune_times_schedules_on_mixes(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    out, screen = console()
    given: dict[str, Any] = {"effort": Effort(8, 3), "with_known": False, "jobs": 0}
    given |= {"table_path": path, "command": "splitkv tune", "json_path": None, "time_limit": None}
    assert table.tune(Draw(2, 0, 1e9, mixes=2), **given, console=out) == 0
    assert "2 problems, 10 mixes of lengths" in screen.getvalue()
    written = tuned_tables.load(path)
    assert [x.mix for x in written.mixes] == [*problems.MIXES] * 2
    for measured in written.mixes:
        schedules = {plan.config.schedule for plan in measured.plans}
        assert {"even", "ranges", "head_ranges", "proportional"} <= schedules
    for measured in written.measured:
        assert {plan.config.schedule for plan in measured.plans} == {"even"}
