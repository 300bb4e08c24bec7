"""Tests that need an NVIDIA GPU, and the record of their last run: `tests/gpu/last_run.json`.

The record carries a hash of the sources that were tested, so that a stale one can be told. A run of
only some of the tests leaves it as it is.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from splitkv.cli import versions

HERE = Path(__file__).parent
RECORD = HERE / "last_run.json"
SOURCES = HERE.parents[1] / "src"


def source_hash() -> str:
    """sha256 over the path and content of every source file, in order of path."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def pytest_collection_modifyitems() -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu: expected a CUDA device, got none; try make test")


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    whole = all(Path(arg).resolve() == HERE for arg in config.args)
    if hasattr(config, "workerinput") or not whole or config.option.keyword:
        return
    if config.option.markexpr or config.option.collectonly or not session.testscollected:
        return
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    counts = {outcome: len(stats.get(outcome, ())) for outcome in ("passed", "failed", "skipped")}
    counts["failed"] += len(stats.get("error", ()))
    record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source_sha256": source_hash(),
        **counts,
        **versions(),
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
