"""Tables of decode: records, as they stand in JSON lines, to Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import FA3, OURS, by_case, latest, provenance, title
from splitkv.lab.report.markdown import ABSENT, cell, number, reasons_list, table

EQUALS, PAGED = ("_equal", "_equal_fp8"), "_page16"  # endings of the cases that mixes stand beside
MOST_OVER, MOST_OVER_SHORT, SHORT_US = 1.1, 1.15, 20.0  # bounds of mixes, over equal lengths


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


def beside_tables(records: Sequence[Record]) -> list[str]:
    """The tables of cases that stand beside another: of mixes, and of all else."""
    mixed = [r for r in records if (r.get("beside") or "").removesuffix(PAGED).endswith(EQUALS)]
    rest = [r for r in records if r not in mixed]
    return [mixes_table(records, mixed), besides(rest)] if mixed else [besides(records)]


def mixes_table(records: Sequence[Record], mixed: Sequence[Record]) -> str:
    """Batches whose lengths differ: floor, equal lengths of as many bytes, ours and
    FlashAttention-3's; below it how many are within the bounds."""
    found = by_case(latest(records))
    rows, within, slower, timed = [], 0, 0, 0
    for r in latest(mixed):
        if not r["library"].startswith(OURS):
            continue
        equal = found.get(r["beside"], {}).get(title(r), {}).get("us")
        theirs = [x["us"] for x in found[r["case"]].values() if x["library"] == FA3 and x["us"]]
        fa3, us = min(theirs, default=None), r["us"]
        over = us / equal if us and equal else None
        ahead = fa3 / us if us and fa3 else None
        timed += over is not None
        within += over is not None and over <= bound_of(float(equal or 0))
        slower += ahead is not None and ahead < 1
        floor = number(r["floor_us"])
        cells = [f"{r['kv_bytes'] / 1e6:.1f}", floor, number(equal), number(us), number(over)]
        name = r["case"] if r["library"] == OURS else f"{r['case']} {r['library']}"
        rows.append([name, *cells, number(fa3), number(ahead)])
    header = ["mix", "KV MB", "floor us", "equal us", "ours us", "over equal", "fa3 us", "fa3/ours"]
    return (
        table(header, rows)
        + f"\n\n{within} of {timed} within {MOST_OVER:g} of equal lengths "
        + f"({MOST_OVER_SHORT:g} below {SHORT_US:g} us); slower than FlashAttention-3 on {slower}"
    )


def bound_of(equal_us: float) -> float:
    """How many times as long as equal lengths a mix may take."""
    return MOST_OVER_SHORT if equal_us < SHORT_US else MOST_OVER


def besides(records: Sequence[Record]) -> str:
    """Ours on cases that stand beside another: how many times as long they take; or nothing."""
    ours = {(r["library"], r["case"]): r for r in latest(records) if r["library"].startswith(OURS)}
    found = []
    for (library, _), r in ours.items():
        other = ours.get((library, r.get("beside")))
        if other and None not in (r["us"], other["us"]):
            found.append((r["us"] / other["us"], r, other))
    if not found:
        return ""
    rows = [
        [title(r), r["case"], number(r["us"]), o["case"], number(o["us"]), f"{ratio:.3f}"]
        for ratio, r, o in found
    ]
    most, worst = max(found, key=lambda triple: triple[0])[:2]
    mean = math.exp(math.fsum(math.log(ratio) for ratio, *_ in found) / len(found))
    return (
        table(["library", "case", "us", "beside", "us", "ratio"], rows)
        + f"\n\nratio over {len(found)} cases: geometric mean {mean:.3f}, "
        + f"most {most:.3f} ({worst['case']})"
    )


def bench_report(records: Sequence[Record]) -> str:
    """Where and when, the summary, every library's time, and what did not run and why."""
    parts = []
    for where in dict.fromkeys(map(provenance, records)):
        here = latest(r for r in records if provenance(r) == where)
        titles = list(dict.fromkeys(title(r) for r in here if r["us"] is not None))
        rows = [
            [case, *(cell(found.get(name)) for name in titles)]
            for case, found in by_case(here).items()
        ]
        parts += [where, summary(here), table(["us (spread)", *titles], rows)]
        parts += filter(None, [*beside_tables(here), reasons_list(here)])
    return "\n\n".join(parts)
