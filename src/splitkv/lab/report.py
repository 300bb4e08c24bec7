"""Tables from results: records, as they stand in JSON lines, to Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitkv.errors import expect

Record = dict[str, Any]
OURS = "splitkv"
ABSENT = "-"


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of files of JSON lines."""
    records = []
    for path in paths:
        expect(path.is_file(), "results", "a file of JSON lines", str(path))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                records.append(json.loads(line))
            except ValueError:  # the line that was being written when the disk was full
                expect(False, f"{path}:{number}", "a JSON object", line[:40])
    return records


def latest(records: Iterable[Record]) -> list[Record]:
    """Of each case and library's kernel the last record, in the order of the first."""
    found = {}
    for record in records:
        names = ("case", "mode", "cache", "gpu")
        key = (title(record), *(record[name] for name in names))
        found[key] = record
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Standing:
    """How one of our variants stands in a case, beside the fastest peer that ran."""

    case: str
    kv_bytes: int
    floor_us: float | None
    ours: Record
    best: Record | None

    @property
    def over_floor(self) -> float | None:
        us = self.ours["us"]
        return None if us is None or self.floor_us is None else us - self.floor_us

    @property
    def ratio(self) -> float | None:
        """How many times as long the best peer takes."""
        us = self.ours["us"]
        return None if us is None or self.best is None else self.best["us"] / us


def standings(records: Iterable[Record]) -> list[Standing]:
    """A standing for each of our records."""
    by_case: dict[Any, list[Record]] = {}
    for r in latest(records):
        by_case.setdefault((r["case"], r["mode"], r["cache"], r["gpu"]), []).append(r)
    found = []
    for (case, *_), rows in by_case.items():
        peers = [r for r in rows if not r["library"].startswith(OURS) and r["us"] is not None]
        best = min(peers, key=lambda r: r["us"], default=None)
        found += [
            Standing(case, r["kv_bytes"], r["floor_us"], r, best)
            for r in rows
            if r["library"].startswith(OURS)
        ]
    return found


def summary(records: Sequence[Record]) -> str:
    """One Markdown table: floor, ours, the best peer; below it the geometric mean of the ratios."""
    header = [
        "case",
        "KV MB",
        "floor us",
        "ours us",
        "over floor",
        "TB/s",
        "best peer",
        "us",
        "ratio",
    ]
    several = {s.ours["library"] for s in standings(records)} != {OURS}
    rows = [
        [
            f"{s.case} {s.ours['library']}" if several else s.case,
            f"{s.kv_bytes / 1e6:.1f}",
            number(s.floor_us),
            number(s.ours["us"]),
            number(s.over_floor),
            number(s.ours["tbs"]),
            title(s.best) if s.best else ABSENT,
            number(s.best["us"] if s.best else None),
            number(s.ratio),
        ]
        for s in standings(records)
    ]
    text = table(header, rows)
    ratios = [s.ratio for s in standings(records) if s.ratio is not None]
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        text += (
            f"\n\nbest peer / ours over {len(ratios)} cases: geometric mean {mean:.2f}, "
            f"least {min(ratios):.2f}, most {max(ratios):.2f}"
        )
    return text


def report(records: Sequence[Record]) -> str:
    """Markdown: where and when, the summary, every library's time, and what did not run and why."""
    parts = []
    for where in dict.fromkeys(map(provenance, records)):
        here = latest(r for r in records if provenance(r) == where)
        titles = list(dict.fromkeys(title(r) for r in here if r["us"] is not None))
        times: dict[str, dict[str, Record]] = {}
        reasons: dict[tuple[str, str], list[str]] = {}
        for r in here:
            times.setdefault(r["case"], {})[title(r)] = r
            for reason in r["reasons"]:
                reasons.setdefault((title(r), reason), []).append(r["case"])
        rows = [
            [case, *(cell(found.get(name)) for name in titles)] for case, found in times.items()
        ]
        parts += [where, summary(here), table(["us (spread)", *titles], rows)]
        if reasons:
            parts.append(
                "\n".join(
                    f"* {name} on {len(cases)} of {len(times)} cases: {reason}"
                    for (name, reason), cases in reasons.items()
                )
            )
    return "\n\n".join(parts)


def provenance(record: Record) -> str:
    """The line over a table: GPU, software, protocol, sources, day."""
    versions = record["versions"]
    software = ", ".join(f"{n} {versions[n]}" for n in ("torch", "triton"))
    return (
        f"{record['gpu']}, driver {record['driver']}, {software}; {record['dtype']}, "
        f"{record['mode']}, {record['cache']}; {record['commit']}, {record['date'][:10]}"
    )


def title(record: Record) -> str:
    return (
        record["library"]
        if OURS in record["library"]
        else f"{record['library']} {record['kernel']}"
    )


def cell(record: Record | None) -> str:
    if record is None or record["us"] is None:
        return ABSENT
    return f"{record['us']:.2f} ({record['spread_us']:.2f})"


def number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up as text too."""
    widths = [max(3, *(len(line[i]) for line in (header, *rows))) for i in range(len(header))]
    cells = [
        [
            x.ljust(w) if i == 0 else x.rjust(w)
            for i, (x, w) in enumerate(zip(line, widths, strict=True))
        ]
        for line in (header, *rows)
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))
