"""Records by their suite, which is the command that wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from splitkv.core.errors import expect_one_of
from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.lines import read as read_lines

SUITES = ("decode", "study", "sweep", "prefill", "backward", "varlen", "ranks", "host", "reproduce")


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of files of JSON lines."""
    return [record for path in paths for record in read_lines(path)]


def sections(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each command. A reproduction's are one: its claims are about all of them."""
    for r in records:
        expect_one_of("suite", r["suite"], SUITES)
    if any(r["suite"] == "reproduce" for r in records):
        return {"reproduce": list(records)}
    found: dict[str, list[Record]] = {}
    for r in records:
        found.setdefault(r["suite"], []).append(r)
    return found
