"""Records of results: whose they are, and which belong together."""

from __future__ import annotations

from collections.abc import Iterable

from splitkv.lab.harness.lines import Record

OURS = "splitkv"


FA3 = "fa3"  # the kernel of a plan of FlashAttention-3, of which a config has the splits alone


def latest(records: Iterable[Record]) -> list[Record]:
    """The last record of each case and library's kernel, in the order of the first."""
    found = {}
    for record in records:
        names = ("case", "mode", "cache", "gpu")
        key = (title(record), *(record[name] for name in names))
        found[key] = record
    return list(found.values())


def by_case(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """case -> title -> record."""
    found: dict[str, dict[str, Record]] = {}
    for r in records:
        found.setdefault(r["case"], {})[title(r)] = r
    return found


def provenance(record: Record) -> str:
    """The line over a table: GPU, software, protocol, sources, day."""
    protocol = f"{record['dtype']}, {record['mode']}, {record['cache']}"
    return machine(record, protocol)


def machine(record: Record, *more: str) -> str:
    """GPU, software, sources, day."""
    versions = record["versions"]
    software = ", ".join(f"{n} {versions[n]}" for n in ("torch", "triton"))
    where = f"{record['gpu']}, driver {record['driver']}, {software}"
    return "; ".join([where, *more, f"{record['commit']}, {record['date'][:10]}"])


def title(record: Record) -> str:
    return (
        record["library"]
        if OURS in record["library"]
        else f"{record['library']} {record['kernel']}"
    )
