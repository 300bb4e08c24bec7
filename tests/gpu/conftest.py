"""Tests that need an NVIDIA GPU, and the record of their last run: `tests/gpu/last_run.json`.

The record carries a hash of the sources that were tested, so that a stale one can be told. It is
made in two runs: first of all tests but those marked `alone`, which any number of processes may
share out, each on one of the GPUs; then of those. Where a GPU is to be had for minutes only,
`--shard k/n` takes every n-th test of either. What is run adds to the record of the same sources,
`parts` says what is in it, and `whole` whether that is all. Any other choice of tests leaves it as
it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from splitkv.cli import versions
from splitkv.lab.tune.problems import share_of

HERE = Path(__file__).parent
RECORD = HERE / "last_run.json"
SOURCES = HERE.parents[1] / "src"
OUTCOMES = ("passed", "failed", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="k/n: every n-th test from the k-th")


def shard(config: pytest.Config) -> tuple[int, int]:
    """(2, 3) of `--shard 2/3`."""
    return share_of(config.getoption("shard", "1/1"))


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the tests out take turns at the GPUs."""
    worker = getattr(config, "workerinput", {}).get("workerid", "")
    if worker:
        torch.cuda.set_device(int(worker.removeprefix("gw")) % torch.cuda.device_count())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that run alone are in few files: the others are not read for them."""
    if config.option.markexpr != "alone" or not collection_path.name.startswith("test_"):
        return None
    return True if "mark.alone" not in collection_path.read_text() else None


@pytest.fixture(autouse=True)
def memory_is_shared() -> Iterator[None]:
    """Gives memory that a large test took back to the processes beside this one."""
    yield
    if torch.cuda.memory_reserved() > 2 << 30:
        torch.cuda.empty_cache()


def source_hash() -> str:
    """sha256 over the path and content of every source file, in order of path."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@pytest.hookimpl(trylast=True)  # after -m has left tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu: expected a CUDA device, got none; try make test")
    # Mixed, as what shares kernels, which should be compiled once, is side by side in one file.
    items.sort(key=lambda item: (not item.get_closest_marker("long"), crc32(item.nodeid.encode())))
    part, parts = shard(config)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = dealt(items[part - 1 :: parts], workers)


def dealt(items: list[Any], workers: int) -> list[Any]:
    """In another order: of as many stretches as there are processes, which xdist gives one each,
    all begin with what was first. Stretches differ by one in length, the longer ones are last."""
    length, longer = divmod(len(items), workers)
    starts = [n * length + max(0, n - (workers - longer)) for n in range(workers)]
    stretches = pairwise([*starts, len(items)])
    places = sorted((at - start, at) for start, end in stretches for at in range(start, end))
    given = dict(zip((at for _, at in places), items, strict=True))
    return [given[at] for at in range(len(items))]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config, ended = session.config, (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    whole = all(Path(arg).resolve() == HERE for arg in config.args)
    if hasattr(config, "workerinput") or not whole or config.option.keyword:
        return
    if exitstatus not in ended:
        return
    marked = config.option.markexpr
    if marked not in ("alone", "not alone"):
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    counts = {outcome: len(reporter.stats.get(outcome, ())) for outcome in OUTCOMES}
    counts["failed"] += len(reporter.stats.get("error", ()))
    if config.option.collectonly or not sum(counts.values()):
        return
    if sum(counts.values()) < number_of_tests(session):
        return
    part, parts = shard(config)
    record = added(
        json.loads(RECORD.read_text()),
        source_hash(),
        f"{part}/{parts} {marked}",
        counts,
        versions(),
    )
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def number_of_tests(session: pytest.Session) -> int:
    """Tests that were to run. Fewer have run where a run was interrupted, of which the exit status
    of processes that share tests out need not tell."""
    shared = session.config.pluginmanager.get_plugin("dsession")
    return len(session.items if shared is None else shared.sched.collection)


def added(
    before: dict[str, Any], source: str, part: str, counts: dict[str, int], here: dict[str, str]
) -> dict[str, Any]:
    """A record with one more part; anew, where it is of other sources, has that part already or is
    in other shards. `here` is what the part ran with; devices of all parts are named.
    """
    shards = part.split()[0].split("/")[1]
    done = before.get("parts", [])
    alike = before["source_sha256"] == source and part not in done
    if not alike or any(known.split()[0].split("/")[1] != shards for known in done):
        before, done = {}, []
    done = sorted([*done, part])
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "source_sha256": source,
        "parts": done,
        "whole": len(done) == 2 * int(shards),
        **{outcome: counts[outcome] + before.get(outcome, 0) for outcome in OUTCOMES},
        **here,
        "device": "; ".join(
            sorted({here["device"], *before.get("device", here["device"]).split("; ")})
        ),
    }
