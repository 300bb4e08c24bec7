"""`splitkv regret` without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from studying import CASE, H200, POLICY, console

from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.lab.harness.cases import Case
from splitkv.lab.overview import report
from splitkv.lab.report.studies import regret_table
from splitkv.lab.tune import problems, regret, studies
from splitkv.lab.tune.problems import Draw
from splitkv.lab.tune.studies import Effort


def one(case: Case = CASE) -> dict[str, Any]:
    who = studies.entries(case, H200, POLICY, 12)
    return studies.study(case, H200, who, 9)


def regret_of(draw: Draw, **options: Any) -> tuple[int, str]:
    out, screen = console()
    given: dict[str, Any] = {
        "with_matrix": False,
        "lengths": "device",
        "codec": "as_is",
        "policies": POLICY,
        "effort": Effort(8, 3),
        "jobs": 0,
        "json_path": None,
        "time_limit": None,
        "console": out,
    }
    return regret.measure_regret(draw, **{**given, **options}), screen.getvalue()


@pytest.mark.usefixtures("h200")
def test_regret_goes_over_the_matrix_and_problems_at_random(tmp_path: Path) -> None:
    path = tmp_path / "regret.jsonl"
    status, text = regret_of(Draw(2, 1, 1e9), with_matrix=True, json_path=path)
    assert status == 0 and "162/162" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| one ")]
    assert rows[0][1].strip() == "162"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 162 and all(r["chosen"].keys() == POLICY.keys() for r in lines)
    assert "median" in report(lines) and report(lines).startswith("NVIDIA H200, driver 580")


@pytest.mark.usefixtures("h200")
def test_regret_in_shares_is_that_of_the_whole(tmp_path: Path) -> None:
    found = []
    for k in (1, 2, 3):
        path = tmp_path / f"{k}.jsonl"
        regret_of(Draw(7, 1, 1e9, (k, 3)), json_path=path)
        found += [json.loads(line)["case"] for line in path.read_text().splitlines()]
    assert sorted(found) == sorted(case.name for case in problems.drawn(7, 1, 1e9))


@pytest.mark.usefixtures("h200")
def test_regret_where_the_host_knows_the_lengths(tmp_path: Path) -> None:
    path = tmp_path / "regret.jsonl"
    regret_of(Draw(1, 1, 1e9), lengths="host", json_path=path)
    assert json.loads(path.read_text())["case"].endswith("_host")
    with pytest.raises(ValueError, match="^random: expected some, without the matrix, got 0$"):
        regret_of(Draw(0, 1, 1e9))


@pytest.mark.usefixtures("h200")
def test_regret_of_keys_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same draw, named apart, and with the mix in its place."""
    seen: list[Case] = []
    study = studies.study

    def watched(case: Case, *rest: Any) -> dict[str, Any]:
        seen.append(case)
        return study(case, *rest)

    monkeypatch.setattr(studies, "study", watched)
    for codec in ("as_is", "fp8", "int8"):
        path = tmp_path / f"{codec}.jsonl"
        regret_of(Draw(2, 1, 1e9, mixes=2), json_path=path, codec=codec)
    plain, fp8, int8 = seen[:4], seen[4:8], seen[8:]
    for names, codec in ((fp8, "fp8"), (int8, "int8")):
        assert {c.name.replace(f"_{codec}", "") for c in names} == {c.name for c in plain}
        assert all(c.problem.codec.name == codec and f"_{codec}" in c.name for c in names)
        shared = {c.problem.codec.granularity for c in names}
        assert shared <= {"head", "tensor"}
    assert [problems.mix_of(c) for c in fp8] == [problems.mix_of(c) for c in plain]


def test_the_regret_table_counts_from_the_best() -> None:
    def record(case: str, us: float | None) -> dict[str, Any]:
        config = {"num_splits": 4, "tile_n": 64, "num_warps": 4, "num_stages": 2}
        plan = {"kernel": "k", "config": config}
        chosen = {"waves": {**plan, "us": us}}
        return {"case": case, "best": {**plan, "us": 10.0}, "chosen": chosen}

    records = [record(f"c{i}", 10.0 + i / 10) for i in range(11)] + [record("none", None)]
    lines = regret_table(records, worst=2).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["waves", "11", "1", "5.0%", "9.0%", "10.0%"]
    plan = "k 4 x 64 keys, 4 warps, 2 stages"
    assert cells[6] == ["waves", "10.0%", "c10", plan, "11.00", plan, "10.00"]
    assert len(cells) == 8


def plan(splits: int = 4, tile_n: int = 64, problem: Problem = CASE.problem) -> Plan:
    return Plan(problem, H200, "test", "decode_split", Config(splits, 16, tile_n, 4, 2), "")


@pytest.mark.usefixtures("h200")
def test_regret_has_mixes_of_lengths_in_its_draw(tmp_path: Path) -> None:
    """One distribution of each problem, in turns; schedules of the step are among the plans."""
    path = tmp_path / "regret.jsonl"
    status, text = regret_of(Draw(0, 1, 1e9, mixes=5), json_path=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == 0 and "5/5" in text
    distributions = problems.MIXES[1:]
    assert sorted(r["mix"] for r in lines) == sorted([*distributions, distributions[0]])
    tried = [{t["config"]["schedule"] for t in r["tried"]} for r in lines]
    assert all({"even", "ranges", "head_ranges", "proportional"} <= found for found in tried)
    with pytest.raises(ValueError, match="^random: expected some"):
        regret_of(Draw(0, 1, 1e9, mixes=0))
