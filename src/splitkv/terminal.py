"""What every command has: the terminal, errors in a line, who knows the lengths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import typer
from rich.console import Console

console = Console()


class Lengths(str, Enum):
    """Who knows the sequence lengths."""

    host = "host"
    device = "device"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A malformed question is one line on stderr and exit status 2, not a traceback."""
    try:
        yield
    except ValueError as error:
        print(f"splitkv: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
