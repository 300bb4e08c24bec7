"""Results on the terminal while they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from splitkv.lab.harness.terminal import say


class Screen:
    """Results as they come: the last ones as a live table on a terminal, else a line each.

    row    of a record, the cells under the header
    """

    def __init__(
        self,
        console: Console,
        total: int,
        header: Sequence[str],
        row: Callable[[dict[str, Any]], list[str]],
    ) -> None:
        self.console, self.total, self.done = console, total, 0
        self.header, self.row = header, row
        self.rows: deque[list[str]] = deque(maxlen=max(4, console.height - 8))
        self.live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Screen:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.live:
            self.live.stop()

    def add(self, r: dict[str, Any]) -> None:
        self.rows.append(self.row(r))
        if self.live:
            table = Table(*self.header, caption=f"{self.done} of {self.total} cases done")
            for cells in self.rows:
                table.add_row(*cells)
            self.live.update(table)
        else:
            self.say("  ".join(filter(None, self.rows[-1])))

    def say(self, text: str) -> None:
        say(self.console, text)
