"""Results on which the claims of the sources hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reproducing import FakeBackend, measured, whole_sequences


@pytest.fixture
def records(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "results.jsonl"
    measured(path, FakeBackend("splitkv"), FakeBackend("fa3"), FakeBackend("torch"))
    return [json.loads(line) for line in path.read_text().splitlines()] + whole_sequences()
