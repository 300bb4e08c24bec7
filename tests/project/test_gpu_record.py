"""The record of GPU tests: `tests/gpu/last_run.json` says what has run, and no more."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONFTEST = Path(__file__).parents[1] / "gpu" / "conftest.py"
HERE = {"torch": "2.11.0", "device": "NVIDIA H200"}


def record() -> Any:
    """The plugin of tests/gpu, which looks for no GPU before tests are collected."""
    spec = importlib.util.spec_from_file_location("gpu_conftest", CONFTEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def session_of(alone: int, shared: int | None) -> Any:
    """A session of so many tests, or one whose tests processes share out."""
    plugin = (
        None if shared is None else SimpleNamespace(sched=SimpleNamespace(collection=[0] * shared))
    )
    plugins = SimpleNamespace(get_plugin={"dsession": plugin}.get)
    return SimpleNamespace(items=[0] * alone, config=SimpleNamespace(pluginmanager=plugins))


def test_tests_that_processes_share_out_are_counted_by_what_they_collected() -> None:
    assert record().number_of_tests(session_of(7, None)) == 7
    assert record().number_of_tests(session_of(0, 1545)) == 1545


def test_a_record_is_whole_when_every_shard_has_run() -> None:
    added, counts = record().added, {"passed": 3, "failed": 1, "skipped": 0}
    made: dict[str, Any] = {"source_sha256": "before"}
    parts = [f"{k}/2 {which}" for k in (1, 2) for which in ("alone", "not alone")]
    for n, part in enumerate(parts):
        made = added(made, "now", part, counts, HERE)
        assert made["whole"] == (n == 3)
    assert made["parts"] == sorted(parts) and (made["passed"], made["failed"]) == (12, 4)
    assert added(made, "later", parts[0], counts, HERE)["parts"] == parts[:1]
    assert added(made, "now", parts[0], counts, HERE)["passed"] == 3
