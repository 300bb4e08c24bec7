"""Pictures of the tables that measurements/ keeps."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="the lab extra is not installed")

from splitkv.lab.report import kept_tables  # noqa: E402
from splitkv.lab.report.bench_plots import times  # noqa: E402

MEASUREMENTS = Path(__file__).parents[3] / "measurements"
BENCHMARKS = (MEASUREMENTS / "benchmarks.md").read_text()
PREFILL = (MEASUREMENTS / "prefill.md").read_text()
LARGEST = 120_000  # bytes of a picture in the README


def test_every_row_of_decode_is_drawn() -> None:
    records = kept_tables.decode_times(BENCHMARKS)
    assert len(records) == 2 * 34
    assert all(record["us"] > record["floor_us"] > 0 for record in records)
    first = [r["us"] for r in records if r["case"] == "mqa8_b1_512_page16"]
    assert first == [4.12, 7.68]
    panels = {axes.get_title(): axes for axes in times(records).axes}
    assert panels.keys() == {"contiguous", "paged(16)"}
    for axes in panels.values():
        ours, others, floor = axes.lines
        assert len(ours.get_xdata()) == len(others.get_xdata()) == 17  # type: ignore[arg-type]
        assert str(floor.get_label()) == "only reading K and V"


def test_rates_of_prefill_are_drawn_as_times() -> None:
    records = kept_tables.prefill_times(PREFILL)
    assert len(records) == 4 * 16
    for r in records:
        assert r["floor_us"] == pytest.approx(r["flops"] / 788e6)
    case = [r for r in records if r["case"] == "32 x 1024, 16/1 causal"]
    assert case[0]["flops"] == 2 * 32 * 16 * 1024**2 * 128
    assert case[0]["us"] == pytest.approx(case[0]["flops"] / 574e6)
    assert [a.get_title() for a in times(records).axes] == ["forward, full", "forward, causal"]


def test_a_page_without_provenance_is_refused() -> None:
    with pytest.raises(ValueError, match="a line of GPU, versions, commit and day, got"):
        kept_tables.decode_times("| case | us |\n|---|---|")


def test_the_pictures_are_those_of_the_tables(tmp_path: Path) -> None:
    """Their texts and sizes, as what matplotlib makes of the rest depends on its version."""
    for page in ("benchmarks.md", "prefill.md"):
        (tmp_path / page).write_text((MEASUREMENTS / page).read_text())
    kept_tables.main([str(tmp_path)])
    for drawn in sorted((tmp_path / "plots").iterdir()):
        kept = MEASUREMENTS / "plots" / drawn.name
        assert words(kept) == words(drawn) and kept.stat().st_size < LARGEST


def words(path: Path) -> list[str]:
    return " ".join(ElementTree.parse(path).getroot().itertext()).split()
