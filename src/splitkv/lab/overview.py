"""The results of any command, as Markdown and as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from splitkv.lab.harness.lines import Record
from splitkv.lab.report.decode import bench_report
from splitkv.lab.report.host import host_report
from splitkv.lab.report.ranks import ranks_report
from splitkv.lab.report.sections import sections
from splitkv.lab.report.sequences import rates_report
from splitkv.lab.report.studies import studies_report, sweep_report
from splitkv.lab.reproduce import tables
from splitkv.lab.reproduce.check import check


def reproduce_report(records: Sequence[Record]) -> str:
    """The tables of the sources, and the claims checked again."""
    return tables.report(records, check(records))


SECTIONS: Mapping[str, Callable[[Sequence[Record]], str]] = {
    **{"decode": bench_report, "study": studies_report, "sweep": sweep_report},
    **dict.fromkeys(("prefill", "backward", "varlen"), rates_report),
    "ranks": ranks_report,
    "host": host_report,
    "reproduce": reproduce_report,
}
"""suite -> Markdown of its records."""


def report(records: Sequence[Record]) -> str:
    """Markdown for the results of any command."""
    return "\n\n".join(section(name, part) for name, part in sections(records).items())


def section(command: str, records: Sequence[Record]) -> str:
    """Markdown for the results of one command."""
    return SECTIONS[command](records)


def page(records: Sequence[Record]) -> str:
    """One HTML page: a section a command, its tables before its pictures. Takes matplotlib."""
    from splitkv.lab.report.page import Section, html
    from splitkv.lab.report.plots import pictures

    listed = sections(records).items()
    made = [Section(name, section(name, part), pictures(name, part)) for name, part in listed]
    return html("splitkv: results", made)
