"""What may end a run of the lab: Ctrl-C, a reader that has gone, a full disk."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitkv.lab.harness import lines

ENDINGS: dict[str, type[BaseException]] = {
    "ctrl-c": KeyboardInterrupt,
    "pipe": SystemExit,
    "disk": ValueError,
}


class ClosedPipe(io.StringIO):
    """What a reader leaves that wanted one result and no more."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def write(self, text: str) -> int:
        if self.word in self.getvalue():
            raise BrokenPipeError
        return super().write(text)


@dataclass
class Ending:
    """A run that ends when it has one result, or writes or prints it.

    path    of its JSON lines
    taken   what it measured
    """

    kind: str
    path: Path
    console: Console
    taken: list[str] = field(default_factory=list)

    def take(self, name: str) -> None:
        """To be called before something is measured."""
        if self.taken and self.kind == "ctrl-c":
            raise KeyboardInterrupt
        self.taken.append(name)

    def raised(self) -> Any:
        return pytest.raises(ENDINGS[self.kind])

    def kept(self, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
        """What is on disk, and what went to stderr in its place."""
        text = self.path.read_text() + capsys.readouterr().err
        return [json.loads(line) for line in text.splitlines()]


def ending(kind: str, path: Path, word: str, monkeypatch: pytest.MonkeyPatch) -> Ending:
    """A run to be ended this way; `word` is in what it prints of a result."""
    add = lines.Lines.add

    def on_a_full_disk(self: lines.Lines, record: dict[str, Any]) -> None:
        if self.path == path and path.stat().st_size and self.file:
            self.file.close()
            self.file = Path("/dev/full").open("w")  # noqa: SIM115
        add(self, record)

    if kind == "disk":
        monkeypatch.setattr(lines.Lines, "add", on_a_full_disk)
    monkeypatch.setattr(Console, "on_broken_pipe", lambda self: sys.exit(1))
    screen = ClosedPipe(word) if kind == "pipe" else io.StringIO()
    return Ending(kind, path, Console(file=screen, width=200))
