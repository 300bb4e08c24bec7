"""Pictures and the page of results, of records as the benchmarks write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result
from results import MACHINE
from results import decode_records as decode
from results import rate_records as sequences
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.lab import overview
from splitkv.lab.bench import decode as bench

pytest.importorskip("matplotlib", reason="the lab extra is not installed")

from splitkv.lab.report import bench_plots, page, plots  # noqa: E402

Records = list[dict[str, Any]]


def swept() -> Records:
    shape = {"tile_n": 64, "num_warps": 4, "num_stages": 2}
    where = {**MACHINE, "date": "2026-01-01", "suite": "sweep", "case": "c", "kernel": "k"}
    points = [(None, 1, 8.0), (None, 2, 5.0), ("waves", 2, 5.0)]
    return [
        {**where, "policy": policy, "config": {**shape, "num_splits": splits}, "us": us}
        for policy, splits, us in points
    ]


def written(tmp_path: Path, records: Records) -> Path:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def report(tmp_path: Path, records: Records, *options: str) -> Result:
    done = CliRunner().invoke(app, ["report", str(written(tmp_path, records)), *options])
    assert done.exit_code == 0, done.output
    return done


def words(path: Path) -> str:
    """The text of a picture."""
    return " ".join(ElementTree.parse(path).getroot().itertext())


def test_a_benchmark_gives_three_pictures(tmp_path: Path) -> None:
    assert list(plots.pictures("decode", decode())) == [
        *("decode-bars", "decode-speedups", "decode-times")
    ]
    alone = [r for r in decode() if r["library"] == "splitkv"]
    assert list(plots.pictures("decode", alone)) == ["decode-bars", "decode-times"]
    without_floor = [{**r, "floor_us": None} for r in alone]
    assert list(plots.pictures("decode", without_floor)) == ["decode-times"]
    assert plots.pictures("decode", [{**r, "us": None} for r in decode()]) == {}


def test_bars_are_the_floor_over_the_time() -> None:
    (axes,) = bench_plots.bars([r for r in decode() if r["us"]]).axes
    heights = sorted(round(bar.get_height(), 3) for bar in axes.patches)
    assert heights == sorted(round(2 / us, 3) for us in (4.0, 8.0, 6.0, 8.0, 9.0))
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == ["mqa8_b1_512", "mqa8_b8_4096"]


def test_many_cases_are_shared_out_over_rows() -> None:
    ours = [r for r in decode() if r["library"] == "splitkv"][:1]
    many = [{**ours[0], "case": f"c{i}"} for i in range(bench_plots.CASES_A_ROW + 1)]
    panels = bench_plots.bars(many).axes
    assert [len(axes.patches) for axes in panels] == [bench_plots.CASES_A_ROW, 1]


def test_the_heat_map_has_the_ratios_to_the_fastest_of_ours() -> None:
    records = [r for r in decode() if r["us"]]
    slower = [{**r, "library": "splitkv (waves)", "us": 99.0} for r in records if "plan" in r][:1]
    axes = bench_plots.speedups([*slower, *records]).axes[0]
    assert sorted(text.get_text() for text in axes.texts) == ["1.12", "1.50", "2.00"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["mqa8_b1_512", "mqa8_b8_4096"]


def test_time_over_bytes_stands_on_the_floor() -> None:
    records = [r for r in decode() if r["us"]]
    figure = bench_plots.times(records)
    assert [axes.get_title() for axes in figure.axes] == ["contiguous"]
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = {str(line.get_label()): line for line in axes.lines}
    xs, ys = lines["only reading K and V"].get_data()
    floor = {r["kv_bytes"] / 1e6: r["floor_us"] for r in records}
    assert dict(zip(xs, ys, strict=True)) == floor
    ours = dict(zip(*lines["splitkv"].get_data(), strict=True))
    assert ours == {r["kv_bytes"] / 1e6: r["us"] for r in records if r["library"] == "splitkv"}
    assert all(us >= floor[megabytes] for megabytes, us in ours.items())


def test_every_layout_has_a_panel() -> None:
    records = [r for r in decode() if r["us"]]
    paged = [{**r, "shape": {**r["shape"], "place": "paged(16)"}} for r in records]
    figure = bench_plots.times([*records, *paged])
    assert [axes.get_title() for axes in figure.axes] == ["contiguous", "paged(16)"]


def test_whole_sequences_stand_on_the_matrix_peak() -> None:
    found = plots.pictures("prefill", sequences())
    assert "prefill-forward-bars" in found
    labels = [str(line.get_label()) for line in found["prefill-times"].axes[0].lines]
    assert "the rate of one large matmul" in labels


def test_another_machine_has_pictures_of_its_own() -> None:
    other = [{**r, "gpu": "NVIDIA L4"} for r in decode()]
    found = plots.pictures("decode", [*decode(), *other])
    assert {"decode-bars", "decode-bars-2", "decode-times", "decode-times-2"} <= found.keys()


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    records = [*decode(), *swept()]
    report(tmp_path, records, "--plot", str(tmp_path / "new" / "pictures"))
    names = {path.name for path in (tmp_path / "new" / "pictures").iterdir()}
    assert names == {
        *("decode-bars.svg", "decode-speedups.svg", "decode-times.svg", "splits-c.svg")
    }
    told = words(tmp_path / "new" / "pictures" / "decode-bars.svg")
    assert "NVIDIA H200" in told and "fa3 metadata ahead" in told
    assert "waves" in words(tmp_path / "new" / "pictures" / "splits-c.svg")


@pytest.mark.parametrize("count", [200, plots.MANY_DOTS + 1])
def test_a_long_search_is_no_larger_a_picture(count: int, tmp_path: Path) -> None:
    """Every dot of a short one is in it, those of a long one are one image."""
    path = tmp_path / "lineage.svg"
    rest = {"worst": 1.0, "reason": None}
    searched: list[dict[str, Any]] = [
        {"number": n, "ratio": 1.1 - n / 10 / count, "parents": [n - 1], **rest}
        for n in range(count)
    ]
    searched[0]["parents"] = []
    plots.draw_lineage(searched, count - 1, path)
    text = path.read_text()
    assert len(text) < 200_000 and ("<image" in text) == (count > plots.MANY_DOTS)
    assert "best that passed" in words(path)


def test_the_same_results_draw_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        report(
            tmp_path, decode(), "--plot", str(tmp_path / name), "--html", str(tmp_path / name / "x")
        )
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


class Reader(HTMLParser):
    """Opens and closes elements, and notes what the page says and points at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.cells: list[str] = []
        self.points_at: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.points_at += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "li", "h2"):
            self.cells.append(data)


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    done = report(tmp_path, [*decode(), *sequences(), *swept()], "--html", str(path))
    read = Reader(path.read_text(encoding="utf-8"))
    assert read.open == [] and read.count["svg"] == len(list(all_pictures())) > 5
    assert all(target.startswith(("#", "data:")) for target in read.points_at)
    assert [c for c in read.cells if c in ("decode", "prefill", "sweep")] == [
        *("decode", "prefill", "sweep")
    ]
    for cell in ("mqa8_b1_512", "4.00 (0.10)", "cudnn sdpa on 1 of 2 cases: too old", "waves"):
        assert cell in read.cells
    tables = sum(line.startswith("| --") for line in done.stdout.splitlines())
    assert read.count["table"] == tables


def all_pictures() -> Iterator[str]:
    for name, part in (("decode", decode()), ("prefill", sequences()), ("sweep", swept())):
        yield from plots.pictures(name, part)


def test_what_libraries_say_is_no_markup(tmp_path: Path) -> None:
    records = decode()
    records[-1] = {**records[-1], "reasons": ["<script>alert(1)</script> & more"]}
    text = overview.page(records)
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


def test_headings_and_lists_are_elements() -> None:
    found = list(page.tags("# One\n\n## Two < 3\n\n* a\n* b\n\nplain\n\n"))
    assert found == [
        *("<h2>One</h2>", "<h3>Two &lt; 3</h3>", "<ul><li>a</li><li>b</li></ul>", "<p>plain</p>")
    ]


def test_a_reproduction_is_one_section(tmp_path: Path) -> None:
    where = {**MACHINE, "num_sms": 132, "date": "2026-01-01"}
    step = {"suite": "reproduce", "step": "splits", "backend": "splitkv", "case": "c"}
    rows = [{"kernel": f"s={n}", "us": 9.0 / n, "reasons": [], "repeats": True} for n in (1, 2)]
    record = {**step, **where, "effort": "full", "rows": rows, "ways": [["s=1", 1], ["s=2", 2]]}
    done = report(tmp_path, [record], "--html", str(tmp_path / "page.html"))
    assert done.stdout.startswith("# Reproduction")
    read = Reader((tmp_path / "page.html").read_text())
    assert read.count["svg"] == 1 and "reproduce" in read.cells


def test_bench_draws_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def measured(cases: Any, **options: Any) -> Any:
        seen.update(options, cases=cases)
        return decode(), 0

    monkeypatch.setattr(bench, "bench_decode", measured)
    folder = tmp_path / "pictures"
    done = CliRunner().invoke(app, ["bench", "paged", "--plot", str(folder)])
    assert done.exit_code == 0, done.output
    assert [case.place for case in seen["cases"][:3]] == ["contiguous", "page1", "page16"]
    assert len(list(folder.iterdir())) == 3
    assert CliRunner().invoke(app, ["bench", "quant"]).exit_code == 0
    assert {case.problem.codec.name for case in seen["cases"]} == {"int8", "fp8"}
    assert re.sub(r"\s", "", str(folder / "decode-bars.svg")) in re.sub(r"\s", "", done.output)
