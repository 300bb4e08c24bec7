"""Tables of attention over ranks beside one rank's."""

from __future__ import annotations

from collections.abc import Sequence

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import machine
from splitkv.lab.report.markdown import cell, number, percent, table

TITLES = ("us (spread)", "one rank", "of its time", "its rate", "MB moved", "off by")


def ranks_report(records: Sequence[Record]) -> str:
    """Where and when, the tables, what did not run and why."""
    parts = []
    for where in dict.fromkeys(map(_where, records)):
        parts += [where, *ranks_tables([r for r in records if _where(r) == where])]
    return "\n\n".join(parts)


def ranks_tables(records: Sequence[Record]) -> list[str]:
    """For each kind the last time of each case and way, and the reasons of those without one."""
    last = list({(r["case"], r["way"], r["ranks"]): r for r in records}.values())
    parts = []
    for kind in dict.fromkeys(r["kind"] for r in last):
        timed = [r for r in last if r["kind"] == kind and r["us"] is not None]
        if timed:
            header = [kind, "way", "ranks", *TITLES]
            parts.append(table(header, list(map(_row, timed)), words=(0, 1)))
    reasons = [f"* {r['case']} {r['way']}: {'; '.join(r['reasons'])}" for r in last if r["reasons"]]
    return [*parts, *(["\n".join(reasons)] if reasons else [])]


def _row(r: Record) -> list[str]:
    alone = cell({"us": r["alone_us"], "spread_us": r["alone_spread_us"]})
    share, rate = r["us"] / r["alone_us"], r["alone_us"] / r["us"]
    moved = f"{r['moved_bytes'] / 1e6:.2f}"
    times = [cell(r), alone, percent(share), number(rate), moved, f"{r['err']:.1e}"]
    return [r["case"], r["way"], str(r["ranks"]), *times]


def _where(record: Record) -> str:
    return machine(record, record["dtype"], record["backend"])
