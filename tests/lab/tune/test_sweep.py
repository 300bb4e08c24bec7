"""`splitkv sweep` without a GPU: points, resuming, tables, pictures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from studying import CASE, FEW, H200, POLICY, FakeSession, console

from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.lab.harness import space
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import CASES, SUITES
from splitkv.lab.overview import report
from splitkv.lab.report.studies import boundary_table, sweep_table
from splitkv.lab.tune import studies, sweep
from splitkv.lab.tune.studies import Effort
from splitkv.planner.policies.shared import num_tiles, shapes


def run(cases: list[Case], path: Path | None = None, **options: Any) -> tuple[Any, Any, str]:
    out, screen = console()
    options = {"effort": Effort(), "jobs": 0, "time_limit": None, "console": out, **options}
    policies = options.pop("policies", POLICY)
    records, lost = studies.run_studies(cases, H200, policies, json_path=path, **options)
    return records, lost, screen.getvalue()


def one(case: Case = CASE) -> dict[str, Any]:
    who = studies.entries(case, H200, POLICY, 12)
    return studies.study(case, H200, who, 9)


def swept(case: Case = CASE, path: Path | None = None, **options: Any) -> tuple[Any, bool, str]:
    out, screen = console()
    given: dict[str, Any] = {
        **{"policies": POLICY, "num_splits": 64, "kernels": [], "all_tiles": False},
        **{"jobs": 0, "json_path": path, "time_limit": None, "console": out},
    }
    records, lost = sweep.sweep(case, **{**given, **options})
    return records, lost, screen.getvalue()


@pytest.mark.usefixtures("h200")
def test_a_sweep_times_every_number_of_splits(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    records, lost, text = swept(path=path)
    assert not lost
    curve = [r for r in records if not r["policy"]]
    tiles: dict[tuple[int, int, int], list[int]] = {}
    for r in curve:
        c = r["config"]
        shape = c["tile_n"], c["num_warps"], c["num_stages"]
        tiles.setdefault(shape, []).append(c["num_splits"])
    assert len(tiles) == sweep.TILES
    assert all(splits == list(range(1, 512 // n + 1)) for (n, *_), splits in tiles.items())
    assert {r["policy"] for r in records} - {None} == POLICY.keys()
    best = min(curve, key=lambda r: r["us"])
    row = next(line for line in text.splitlines() if line.startswith("| best of decode_split"))
    assert f"{best['us']:.2f}" in row
    assert report(records).startswith("mqa8_b1_512: NVIDIA H200")
    FakeSession.entered.clear()
    assert len(swept(path=path)[0]) == len(records)
    assert FakeSession.entered == []


@pytest.mark.usefixtures("h200")
def test_an_interrupted_sweep_has_its_points_on_disk_and_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (out, screen) = tmp_path / "sweep.jsonl", console()
    whole, *_ = swept()
    time, batches = sweep._time, iter(range(2))

    def interrupted(*args: Any) -> Any:
        if next(batches, None) is None:
            raise KeyboardInterrupt
        return time(*args)

    monkeypatch.setattr(sweep, "_time", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swept(path=path, console=out)
    monkeypatch.setattr(sweep, "_time", time)
    first = path.read_text().splitlines()
    assert 0 < len(first) < len(whole) and "| best of decode_split" in screen.getvalue()
    again, *_ = swept(path=path)
    assert len(again) == len(whole) and path.read_text().splitlines()[: len(first)] == first


@pytest.mark.usefixtures("h200")
def test_a_sweep_of_all_splits_and_all_tiles() -> None:
    case = CASES["mqa8_b1_8192"]
    records, *_ = swept(case, num_splits=0, policies={}, kernels=["decode_split"])
    assert max(r["config"]["num_splits"] for r in records) == max(
        num_tiles(case.problem, r["config"]["tile_n"]) for r in records
    )
    legal = shapes(space.splitting(case.problem, H200)[0], case.problem, H200)
    records, *_ = swept(case, num_splits=2, policies={}, all_tiles=True)
    assert len(records) == 2 * len(legal)
    with pytest.raises(ValueError, match="^kernel: expected 'decode_split'"):
        swept(kernels=["nobody"])


@pytest.mark.usefixtures("h200")
def test_a_sweep_stops_at_its_time_limit_but_times_the_policies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 1.0, 11.0])
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    records, _, text = swept(time_limit=10)
    assert "time limit of 10 s: not every number of splits" in text
    assert len({r["config"]["tile_n"] for r in records if not r["policy"]}) == 1
    assert {r["policy"] for r in records} - {None} == POLICY.keys()


@pytest.mark.usefixtures("h200")
def test_the_boundary_sweep_goes_over_lengths(tmp_path: Path) -> None:
    out, screen = console()
    options: dict[str, Any] = {"jobs": 0, "json_path": None, "time_limit": None, "console": out}
    records, lost = sweep.boundary(CASE, [384, 512, 640], policies=POLICY, **options)
    assert not lost and [r["problem"]["seqlen_k"] for r in records] == [384, 512, 640]
    assert [r["case"] for r in records] == [f"mqa8_b1_512@{keys}" for keys in (384, 512, 640)]
    assert boundary_table(records) in screen.getvalue()
    mixed = SUITES["mixed"][1]
    with pytest.raises(ValueError, match="^case: expected sequences of equal length"):
        sweep.boundary(mixed, [512], policies=POLICY, **options)


@pytest.mark.usefixtures("h200")
def test_pictures_of_sweeps_are_drawn(tmp_path: Path) -> None:
    plots = pytest.importorskip("splitkv.lab.report.plots")
    records, *_ = swept()
    plots.draw(records, tmp_path / "new" / "curve.svg")
    assert "decode_split" in (tmp_path / "new" / "curve.svg").read_text()
    studied, *_ = run(FEW)
    plots.draw(studied, tmp_path / "boundary.png")
    assert (tmp_path / "boundary.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="^plot: expected results of `splitkv sweep`, got 'none'$"):
        plots.draw([{"suite": "decode"}], tmp_path / "none.svg")


def test_the_sweep_table_has_a_row_for_each_kernel_and_policy() -> None:
    def point(kernel: str, splits: int, us: float | None, policy: str | None) -> dict[str, Any]:
        config = {"num_splits": splits, "tile_n": 64, "num_warps": 4, "num_stages": 2}
        return {"kernel": kernel, "config": config, "us": us, "policy": policy}

    records = [point("a", 1, 8.0, None), point("a", 2, 4.0, None), point("b", 1, 5.0, None)]
    records += [point("a", 1, 8.0, "waves"), point("b", 1, None, "fixed")]
    lines = sweep_table(records).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [(row[0], row[2], row[3]) for row in cells] == [
        ("best of a", "4.00", "+0.0%"),
        ("best of b", "5.00", "+25.0%"),
        ("waves", "8.00", "+100.0%"),
    ]


def test_a_shape_to_sweep_is_a_case_or_dimensions() -> None:
    assert sweep.case_to_sweep("mqa8_b1_512", batch=None) == CASE
    usual = sweep.case_to_sweep(None, batch=None, page_size=None)
    assert usual.name == "b1_h8x1_d128_q1_k512" and usual.problem == CASE.problem
    paged = sweep.case_to_sweep(None, num_heads=32, num_kv_heads=8, page_size=16)
    assert paged.name == "b1_h32x8_d128_q1_k512_page16"


@pytest.mark.parametrize(
    ("text", "seqlens"),
    [("128:512:128", [128, 256, 384, 512]), ("5,7,5", [5, 7]), ("64", [64])],
)
def test_seqlens_are_a_range_or_a_list(text: str, seqlens: list[int]) -> None:
    assert sweep.parse_seqlens(text) == seqlens


@pytest.mark.parametrize("text", ["", "1:2", "1:2:0", "9:1:1", "a", "0,5", "-1:5:1"])
def test_malformed_seqlens(text: str) -> None:
    with pytest.raises(ValueError, match="^seqlens: expected FIRST:LAST:STEP or numbers"):
        sweep.parse_seqlens(text)


def plan(splits: int = 4, tile_n: int = 64, problem: Problem = CASE.problem) -> Plan:
    return Plan(problem, H200, "test", "decode_split", Config(splits, 16, tile_n, 4, 2), "")
