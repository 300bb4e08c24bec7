"""The table of what calls take the host, beside other libraries."""

from __future__ import annotations

from collections.abc import Sequence

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import machine
from splitkv.lab.report.markdown import ABSENT, table


def host_report(records: Sequence[Record]) -> str:
    """Where and when, the tables, what was not timed and why."""
    parts = []
    for where in dict.fromkeys(map(_where, records)):
        last = {r["case"]: r for r in records if _where(r) == where}.values()
        names = list(dict.fromkeys(name for r in last for name in (*r["us"], *r["reasons"])))
        rows = [[r["case"], *(_cell(r, name) for name in names)] for r in last]
        reasons = [
            f"* {r['case']}, {name}: {why}" for r in last for name, why in r["reasons"].items()
        ]
        parts += [where, table(["call", *names], rows, words=(0,))]
        if reasons:
            parts.append("\n".join(reasons))
    return "\n\n".join(parts)


def _cell(record: Record, name: str) -> str:
    us = record["us"].get(name)
    return ABSENT if us is None else f"{us:.1f}"


def _where(record: Record) -> str:
    return machine(record, "microseconds of the host a call")
