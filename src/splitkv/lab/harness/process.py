"""A process of ours that answers lines with lines of JSON, as each peer with a CUDA runtime needs.

It is started when it is first asked and again after it ended. Whatever goes wrong is `Ended`, whose
text is a reason for the results.
"""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

MAX_STARTS = 3  # of a process that ends and ends again


class Ended(Exception):
    """Why there is no answer."""


class Process:
    """The process of a command; `starts` counts how often it was started."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command, self.starts = list(command), 0
        self.child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it where it does not run."""
        if self.child is not None:
            return
        if self.starts == MAX_STARTS:
            raise Ended(f"its process ended {self.starts} times before")
        self.starts += 1
        self.stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=self.stderr, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.child,), daemon=True).start()

    def _read(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        lines = self.lines
        with child.stdout:
            for line in child.stdout:
                lines.put(line)
        lines.put("")  # the end, which is no JSON

    def send(self, line: str) -> None:
        """Ask, starting it where it does not run."""
        self.start()
        assert self.child is not None and self.child.stdin is not None
        try:
            self.child.stdin.write(line + "\n")
            self.child.stdin.flush()
        except OSError:  # a closed pipe
            raise self._ended() from None

    def receive(self, seconds: float) -> Any:
        """The next line of its answer; after so many seconds without one it is stopped."""
        try:
            line = self.lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            raise Ended(f"its process took more than {seconds:g} s") from None
        try:
            return json.loads(line)
        except ValueError:  # no line where there should be one
            raise self._ended() from None

    def _ended(self) -> Ended:
        """Its status and the last line on stderr; what is left of it is stopped."""
        assert self.child is not None
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(timeout=20)
        status = self.child.poll()
        self.stderr.seek(0)
        said = self.stderr.read().strip().splitlines()
        self.stop()
        return Ended(
            f"its process ended: status {status}" + (f", {said[-1][:300]}" if said else "")
        )

    def stop(self) -> None:
        if self.child is None:
            return
        self.child.kill()
        self.child.wait()
        if self.child.stdin is not None:
            with suppress(OSError):  # what it did not read any more
                self.child.stdin.close()
        self.stderr.close()
        self.child = None
