"""Engines in processes of their own, and rows of results that are written as they are measured."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def tell(o: argparse.Namespace, row: dict[str, Any]) -> None:
    """Prints a row, and appends it to the file of --rows."""
    text = json.dumps(row)
    print(text, flush=True)
    if o.rows:
        with open(o.rows, "a") as file:
            file.write(text + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that this module reads."""
    parser.add_argument("--limit", type=float, default=600, help="seconds of one engine")
    parser.add_argument("--rows", default="", help="a file that rows are appended to")


def start(tool: str, o: argparse.Namespace, **changed: Any) -> int:
    """Runs the verb `engine` of a tool with these options, in a process of its own; its exit code,
    1 where it had no end after o.limit seconds.

    When it ends, or this process is told to end, the processes that it started end with it: they
    would keep the memory of the GPU.
    """
    given = {name: value for name, value in (vars(o) | changed).items() if name != "verb"}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    process = subprocess.Popen([sys.executable, tool, "engine", *arguments], start_new_session=True)
    try:
        return process.wait(timeout=o.limit)
    except subprocess.TimeoutExpired:
        print(f"no end after {o.limit} s", flush=True)
        return 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def saved_by(tool: str, o: argparse.Namespace, save: Path, **changed: Any) -> Any:
    """What an engine wrote into a file of JSON; None: it did not."""
    save.unlink(missing_ok=True)
    code = start(tool, o, save=str(save), **changed)
    return json.loads(save.read_text()) if code == 0 and save.exists() else None


def covered(spans: list[list[float]]) -> float:
    """How much of time these spans cover, each [begin, end], where several overlap once."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total
