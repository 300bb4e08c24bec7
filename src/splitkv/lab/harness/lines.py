"""Files of JSON lines that a run appends to, and takes up again after it was cut short."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from splitkv.core.errors import expect

Record = dict[str, Any]


class Row(Record):
    """A JSON object of a file, which may be of another program: a key that is asked for and is not
    there is a malformed file."""

    def __missing__(self, key: str) -> Any:
        expect(False, "results", f"records of splitkv with {key!r}", ", ".join(map(repr, self)))


class Lines:
    """A file of JSON lines. Entered, it takes more, each on disk before `add` returns.

    `records` are those already there. A last line that was cut short, as by a full disk, is cut off
    before more are added. None in the place of a path: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.file: TextIO | None = None
        self.records = read(path) if path is not None and path.exists() else []

    def __enter__(self) -> Lines:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a+")
            self.file.seek(0)
            text = self.file.read()
            self.file.truncate(len(text[: text.rfind("\n") + 1].encode()))
        return self

    def __exit__(self, *_: Any) -> None:
        if self.file:
            self.file.close()

    def add(self, record: Record) -> None:
        """Appends a record. One that the file does not take, as on a full disk, goes to stderr
        first."""
        if not self.file:
            return
        try:
            print(json.dumps(record), file=self.file, flush=True)
        except OSError as error:
            print(json.dumps(record), file=sys.stderr, flush=True)
            with suppress(OSError):  # there is no room for what it still holds
                self.file.close()
            self.file = None
            raise ValueError(
                f"results: expected {self.path} to take another line, got {error.strerror}; the "
                "line is above"
            ) from None


def read(path: Path) -> list[Record]:
    """The records of a file; a last line without an end is none."""
    expect(path.is_file(), "results", "a file of JSON lines", str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected JSON lines, got bytes that are no text") from None
    records = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line, object_hook=Row)
        except (ValueError, RecursionError):
            record = None
        expect(isinstance(record, Row), f"{path}:{number}", "a JSON object", line[:40])
        records.append(record)
    return records
