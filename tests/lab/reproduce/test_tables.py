"""Tables and the page of a reproduction."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from splitkv.lab.reproduce import run, tables, works
from splitkv.lab.reproduce.check import check


def test_the_report_has_every_table(records: list[dict[str, Any]]) -> None:
    decode = [r for r in records if r["suite"] == "reproduce"]
    text = tables.report(decode, check(decode))
    for step, title in tables.TITLES.items():
        for backend in ("splitkv", "fa3", "torch"):
            times = int(works.takes(backend, step))
            assert text.count(f"## {title}, on {backend}\n") == times
    assert "## One token of Qwen2.5-7B, traced" in text and "## Loss curves" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["512", "1", "14.00 (1)", "10.01 (3)", "1.40", "10.01"] in rows
    configurations = text[text.index(f"## {tables.CONFIGURATIONS}, on splitkv") :]
    configurations = configurations[: configurations.index("\n## ")]
    assert configurations.count("\n| ") == 2 + 160
    cells = [[cell.strip() for cell in line.split("|")] for line in configurations.splitlines()]
    assert ["1", "512", "1", "14.00 (13.90 to 14.10)"] in [line[1:5] for line in cells]
    assert "80 layers of 50.0 us besides attention" in text
    assert tables.report([], []) == "# Reproduction\n\nNo results."


def test_the_page_without_results_has_every_claim_not_run(tmp_path: Path) -> None:
    run.conclude(tmp_path, Console(file=io.StringIO()))
    page = (tmp_path / "report.html").read_text()
    assert "no results" in page and page.count("NOT RUN") > 40

    from splitkv.lab.reproduce.page import sections

    for section in list(sections([], check([])))[1:]:
        rows = [line for line in section.markdown.splitlines() if line.startswith("| ")][2:]
        assert rows and all(any(w in row for w in ("PASS", "NOT RUN")) for row in rows)
