"""Cells and tables of Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import by_case, title

ABSENT = "-"


def reasons_list(records: Sequence[Record]) -> str:
    """A list of what did not run, on how many cases and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in records:
        for reason in r["reasons"]:
            reasons.setdefault((title(r), reason), []).append(r["case"])
    cases = len(by_case(records))
    return "\n".join(
        f"* {name} on {len(on)} of {cases} cases: {reason}"
        for (name, reason), on in reasons.items()
    )


def cell(record: Record | None) -> str:
    if record is None or record["us"] is None:
        return ABSENT
    return f"{record['us']:.2f} ({record['spread_us']:.2f})"


def number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.0%}"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[int] = (0,)
) -> str:
    """A Markdown table whose columns line up as text too; `words`: those that are no numbers."""
    widths = [max(3, *(len(line[i]) for line in (header, *rows))) for i in range(len(header))]
    cells = [
        [
            x.ljust(w) if i in words else x.rjust(w)
            for i, (x, w) in enumerate(zip(line, widths, strict=True))
        ]
        for line in (header, *rows)
    ]
    rule = ["-" * w if i in words else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))


def cells(line: str) -> list[str]:
    """The cells of one line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def columns(lines: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a Markdown table, each by the header's names."""
    header, rows = cells(lines[0]), lines[2:]
    return [dict(zip(header, cells(row), strict=True)) for row in rows]
