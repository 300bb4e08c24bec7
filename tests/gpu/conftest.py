"""Tests that need an NVIDIA GPU, and the record of their last run: `tests/gpu/last_run.json`.

The record carries a hash of the sources that were tested, so that a stale one can be told. It is
made in two runs: first of all tests but those marked `alone`, which any number of processes may
share out, each on one of the GPUs; then of those, added to the record of the same sources. Any
other choice of tests leaves it as it is.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from zlib import crc32

import pytest
import torch

from splitkv.cli import versions

HERE = Path(__file__).parent
RECORD = HERE / "last_run.json"
SOURCES = HERE.parents[1] / "src"
OUTCOMES = ("passed", "failed", "skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the tests out take turns at the GPUs."""
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    if worker:
        torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())


def source_hash() -> str:
    """sha256 over the path and content of every source file, in order of path."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu: expected a CUDA device, got none; try make test")
    # Every process begins with a stretch of these: mixed, as what compiles longest is in one file.
    items.sort(key=lambda item: crc32(item.nodeid.encode()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    whole = all(Path(arg).resolve() == HERE for arg in config.args)
    if hasattr(config, "workerinput") or not whole or config.option.keyword:
        return
    alone = config.option.markexpr == "alone"
    if not alone and config.option.markexpr != "not alone":
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    counts = {outcome: len(reporter.stats.get(outcome, ())) for outcome in OUTCOMES}
    counts["failed"] += len(reporter.stats.get("error", ()))
    if config.option.collectonly or not sum(counts.values()):
        return
    source = source_hash()
    if alone:
        first = json.loads(RECORD.read_text())
        if first["source_sha256"] != source or first["alone"]:
            return
        counts = {outcome: counts[outcome] + first[outcome] for outcome in OUTCOMES}
    record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source_sha256": source,
        "alone": alone,
        **counts,
        **versions(),
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
