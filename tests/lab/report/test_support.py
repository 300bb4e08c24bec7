"""The page of what runs where is what the kernels say."""

from __future__ import annotations

from pathlib import Path

from splitkv.lab.report.support import tables

PAGE = Path(__file__).parents[3] / "docs" / "support.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text().splitlines() == list(tables()), "python -m splitkv.lab.report.support"
