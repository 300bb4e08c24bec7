"""Files of JSON lines, cut short or malformed."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.lab.harness import lines


def test_lines_go_on_where_a_file_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with lines.Lines(path) as first:
        assert first.records == []
        first.add({"a": 1})
        assert path.read_text() == '{"a": 1}\n'
    path.write_text('{"a": 1}\n{"b": "\u00e9"}\n{"c": ', encoding="utf-8")
    with lines.Lines(path) as again:
        assert again.records == [{"a": 1}, {"b": "\u00e9"}]
        again.add({"d": 4})
    assert lines.read(path) == [{"a": 1}, {"b": "\u00e9"}, {"d": 4}]
    with lines.Lines(None) as nowhere:
        nowhere.add({"a": 1})
        assert nowhere.records == []


def test_report_names_a_line_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("{}\n{\n")
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert result.stderr == f"splitkv: {path}:2: expected a JSON object, got '{{'\n"
