"""Results on the terminal while they come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
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


class Advance:
    """How far a run is and how long the rest will take: a bar on a terminal, words elsewhere.

    total    items of the run
    clock    seconds, from anywhere on
    whole    what all items weigh; None: each of them 1
    """

    def __init__(
        self,
        console: Console,
        title: str,
        total: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        whole: float | None = None,
    ) -> None:
        self.total, self.done, self.clock = total, 0, clock
        self.whole, self.weighed = float(total) if whole is None else whole, 0.0
        self.begun = clock()
        self.bar = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            self.bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self.task = self.bar.add_task(title, total=total)

    def __enter__(self) -> Advance:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar:
            self.bar.stop()

    def step(self, weight: float = 1.0) -> str:
        """One more is done: `12/61, 40 s left`, by what those that are took for their weight."""
        self.done += 1
        self.weighed += weight
        if self.bar:
            self.bar.advance(self.task)
        each = (self.clock() - self.begun) / self.weighed
        left = each * max(0.0, self.whole - self.weighed)
        return f"{self.done}/{self.total}, {left:.0f} s left"
