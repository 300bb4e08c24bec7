"""Tables of decode, from records of times that nobody took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from results import FLOOR, MACHINE
from results import decode_records as records
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.lab.bench import decode as bench
from splitkv.lab.harness import peers
from splitkv.lab.harness.suites import CASES, SUITES
from splitkv.lab.harness.timing import Protocol
from splitkv.lab.harness.variants import our_variants
from splitkv.lab.overview import report
from splitkv.lab.report.decode import besides as standing_beside
from splitkv.lab.report.decode import summary
from splitkv.lab.report.markdown import table


def test_summary_sets_ours_against_floor_and_best_peer() -> None:
    lines = summary(records()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert cells[0] == [
        *("mqa8_b1_512", "0.3", "2.00", "4.00", "2.00", "0.07", "cudnn sdpa", "6.00", "1.50")
    ]
    assert cells[1][6:] == ["fa3 metadata ahead", "9.00", "1.12"]
    assert lines[-1].endswith("geometric mean 1.30, least 1.12, most 1.50")
    assert len({len(line) for line in lines[:4]}) == 1


def test_columns_of_words_are_aligned_left() -> None:
    text = table(["a", "b", "c"], [["x", "long words", "1"], ["y", "few", "22"]], words=(0, 1))
    assert text.splitlines()[1] == "| --- | ---------- | --: |"
    assert text.splitlines()[3] == "| y   | few        |  22 |"


def test_mixes_stand_in_a_table_beside_equal_lengths_and_flash_attention_3() -> None:
    def timed(name: str, library: str, us: float | None) -> dict[str, Any]:
        variant = our_variants()[0] if library == "splitkv" else peers.PEERS["fa3"].variants[0]
        told = {"us": us, "spread_us": 0.1, "err": 0.0} if us else {"reasons": ["too old"]}
        return bench.record(CASES[name], variant.row(**told), FLOOR, Protocol(), MACHINE)

    first, second = "b16_4000_h32x8_d128_uniform", "b16_4000_h32x8_d128_one_long_fp8_page16"
    found = [
        *(timed("b16_4000_h32x8_d128_uniform_equal", "splitkv", 40.0), timed(first, "fa3", 50.0)),
        *(timed(first, "splitkv", 43.0), timed("mqa8_b1_512", "splitkv", 4.0)),
        timed("b16_4000_h32x8_d128_one_long_equal_fp8_page16", "splitkv", 10.0),
        *(timed(second, "splitkv", 11.6), timed(second, "fa3", 11.0)),
    ]
    text = report(found)
    rows = [[x.strip() for x in line.strip("|").split("|")] for line in text.splitlines()]
    by_name = {row[0]: row[2:] for row in rows if len(row) == 8}
    assert by_name[first] == ["2.00", "40.00", "43.00", "1.07", "50.00", "1.16"]
    assert by_name[second] == ["2.00", "10.00", "11.60", "1.16", "11.00", "0.95"]
    told = (
        "1 of 2 within 1.1 of equal lengths (1.15 below 20 us); slower than FlashAttention-3 on 1"
    )
    assert told in text
    assert "within 1.1" not in report(found[:1])


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
