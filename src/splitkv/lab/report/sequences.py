"""Tables of whole sequences: rates, times and memory of each direction."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import OURS, by_case, latest, provenance, title
from splitkv.lab.report.decode import besides
from splitkv.lab.report.markdown import ABSENT, cell, number, percent, reasons_list, table


def rates_report(records: Sequence[Record]) -> str:
    """Whole sequences: where and when, each direction's tables, what did not run and why."""
    parts = []
    for where in dict.fromkeys(map(provenance, records)):
        here = [r for r in records if provenance(r) == where]
        parts += [where, *rates_tables(here)]
    return "\n\n".join(parts)


def rates_tables(records: Sequence[Record]) -> list[str]:
    """For each direction the rates, the times, the memory, ours beside ours, and reasons."""
    parts = []
    for direction in dict.fromkeys(r["direction"] for r in records):
        here = latest(r for r in records if r["direction"] == direction)
        titles = list(dict.fromkeys(title(r) for r in here if r["us"] is not None))
        cases = by_case(here)
        times = [[case, *(cell(rows.get(t)) for t in titles)] for case, rows in cases.items()]
        parts += [rates_table(here), table([f"{direction}, us (spread)", *titles], times)]
        if any(r.get("peak_bytes") is not None for r in here):
            memory = [[c, *(megabytes(rows.get(t)) for t in titles)] for c, rows in cases.items()]
            parts.append(table([f"{direction}, MB allocated by a call", *titles], memory))
        parts += filter(None, [besides(here), reasons_list(here)])
    return parts


def megabytes(r: Record | None) -> str:
    """A cell with the megabytes that a call allocates."""
    allocated = None if r is None else r.get("peak_bytes")
    return ABSENT if allocated is None else f"{allocated / 1e6:.1f}"


def rates_table(records: Sequence[Record]) -> str:
    """TFLOP/s of one direction, a row a case: every library, the share of the peak that the fastest
    of ours reaches, and how many times as long the best peer takes; below it the means."""
    timed = [r for r in records if r["us"] is not None]
    titles = list(dict.fromkeys(map(title, timed)))
    titles.sort(key=lambda name: not name.startswith(OURS))
    rows, ratios = [], []
    for case, found in by_case(records).items():
        mine, theirs = (
            min(
                (r for t, r in found.items() if t.startswith(OURS) == own and r["us"] is not None),
                key=lambda r: r["us"],
                default=None,
            )
            for own in (True, False)
        )
        ratio = theirs["us"] / mine["us"] if mine and theirs else None
        ratios += [] if ratio is None else [ratio]
        rates = [found[t]["tflops"] if t in found else None for t in titles]
        rows.append(
            [
                *(case, *(ABSENT if rate is None else f"{rate:.0f}" for rate in rates)),
                percent(mine["peak_fraction"] if mine else None),
                *(title(theirs) if theirs else ABSENT, number(ratio)),
            ]
        )
    header = [f"{records[0]['direction']}, TFLOP/s", *titles, "of peak", "best peer", "ratio"]
    text = table(header, rows)
    if ratios:
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        text += (
            f"\n\nbest peer / ours over {len(ratios)} cases: geometric mean {mean:.2f}, "
            f"least {min(ratios):.2f}, most {max(ratios):.2f}"
        )
    peaks = [r["peak_tflops"] for r in timed if r["peak_tflops"] is not None]
    if peaks:
        text += f"\n\nmatrix peak in the same rounds {min(peaks):.0f} to {max(peaks):.0f} TFLOP/s"
    clocks = [r["clocks"]["sm_mhz"] for r in timed if r["clocks"]]
    if clocks:
        text += f"\n\nSM clock of the timed calls {min(clocks)} to {max(clocks)} MHz"
    return text
