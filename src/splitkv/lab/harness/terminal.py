"""Common parts of commands: the terminal, errors in a line, who knows the lengths."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import typer
from rich.console import Console

from splitkv.core.device import current
from splitkv.core.errors import expect, expect_one_of

console = Console()


def say(console: Console, text: str) -> None:
    """A line as it is, however wide."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def expect_here(device: str) -> None:
    """cpu, or cuda where there is a GPU."""
    expect_one_of("device", device, ("cpu", "cuda"))
    here = current()
    expect(device in ("cpu", here.kind), "device", "a CUDA GPU for cuda", here.name)


class Lengths(str, Enum):
    """Who knows the sequence lengths."""

    host = "host"
    device = "device"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A malformed question, or a file that cannot be read or written, is one line on stderr and
    exit status 2, not a traceback."""
    try:
        yield
    except ValueError as error:
        said = str(error)
    except OSError as error:
        if error.filename is None:
            raise
        said = f"{error.filename}: expected a path to read or write, got {error.strerror}"
    else:
        return
    print(f"splitkv: {said}", file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Within it a signal to terminate is an interruption, so that what is to be written at the end
    is written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
