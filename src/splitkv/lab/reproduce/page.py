"""`report.html` of a reproduction: what every source claims and what was found, then the tables.

Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import machine
from splitkv.lab.report.page import Section, html
from splitkv.lab.report.plots import pictures
from splitkv.lab.reproduce.claims.verdict import SOURCES, Verdict
from splitkv.lab.reproduce.results import newest
from splitkv.lab.reproduce.tables import counts, measured, source_table


def page(records: Sequence[Record], verdicts: Sequence[Verdict]) -> str:
    """The page; without results every claim says so."""
    return html("splitkv: the sources reproduced", sections(records, verdicts))


def sections(records: Sequence[Record], verdicts: Sequence[Verdict]) -> Iterator[Section]:
    """Where and how many, a section a source, then what was measured."""
    where = machine(newest(records)) if records else "no results"
    yield Section("All", f"{where}\n\n{counts(verdicts)}", {})
    for source in SOURCES.values():
        own = [v for v in verdicts if v.source == source]
        if own:
            yield Section(source, f"{counts(own)}\n\n{source_table(own)}", {})
    if records:
        text = "\n\n".join(measured(records))
        yield Section("Measured", text, pictures("reproduce", records))
