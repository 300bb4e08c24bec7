"""Tables of decode, from records of times that nobody took."""

from __future__ import annotations

import json
from pathlib import Path

from results import FLOOR, MACHINE
from results import decode_records as records
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.lab.bench import decode as bench
from splitkv.lab.harness.suites import SUITES
from splitkv.lab.harness.timing import Protocol
from splitkv.lab.harness.variants import our_variants
from splitkv.lab.overview import report
from splitkv.lab.report.decode import besides as standing_beside
from splitkv.lab.report.decode import summary


def test_summary_sets_ours_against_floor_and_best_peer() -> None:
    lines = summary(records()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert cells[0] == [
        *("mqa8_b1_512", "0.3", "2.00", "4.00", "2.00", "0.07", "cudnn sdpa", "6.00", "1.50")
    ]
    assert cells[1][6:] == ["fa3 metadata ahead", "9.00", "1.12"]
    assert lines[-1].endswith("geometric mean 1.30, least 1.12, most 1.50")
    assert len({len(line) for line in lines[:4]}) == 1


def test_report_takes_the_last_of_each_and_lists_what_did_not_run(tmp_path: Path) -> None:
    first = records()[0]
    again = {**first, "us": 3.0}
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in [*records(), again]))
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 0
    assert result.stdout.startswith("NVIDIA H200, driver 580, torch 2.11, triton 3.6; bfloat16, ")
    assert "3.00 (0.10)" in result.stdout and "4.00 (0.10)" not in result.stdout
    assert "* cudnn sdpa on 1 of 2 cases: too old\n" in result.stdout


def test_ours_is_set_beside_ours_on_the_case_that_is_compared() -> None:
    ours, protocol = our_variants()[0], Protocol()
    found = []
    for name, us in (("mqa8_b64_4096", 40.0), ("mqa8_b64_4096_page16", 41.0)):
        case = next(case for case in SUITES["pages"] if case.name == name)
        row = ours.row(us=us, spread_us=0.1, err=0.0)
        found.append(bench.record(case, row, FLOOR, protocol, MACHINE))
    assert [r["beside"] for r in found] == [None, "mqa8_b64_4096"]
    text = standing_beside(found)
    cells = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert cells == [
        *("splitkv", "mqa8_b64_4096_page16", "41.00", "mqa8_b64_4096", "40.00", "1.025")
    ]
    assert text.endswith("geometric mean 1.025, most 1.025 (mqa8_b64_4096_page16)")
    assert text in report(found)
    assert standing_beside(found[:1]) == standing_beside(found[1:]) == ""
    assert standing_beside(records()) == ""
