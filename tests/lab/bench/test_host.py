"""`splitkv bench host` on a CPU: what is checked and timed, records, tables, what does not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the lab extra is not installed")

from rich.console import Console  # noqa: E402

from splitkv.lab.bench import host as lab  # noqa: E402
from splitkv.lab.bench.host import CASES, LIBRARIES, Library, Made, select  # noqa: E402
from splitkv.lab.harness.lines import Lines  # noqa: E402
from splitkv.lab.overview import report  # noqa: E402

QUICK: dict[str, Any] = {"rounds": 1, "batches": 1, "calls": 2}


def test_libraries_in_turns(tmp_path: Path) -> None:
    """Ours and torch's, each in a process of its own; one of them has no cache."""
    path = tmp_path / "host.jsonl"
    cases = select(["decode, new lengths", "training, dense: one thread"])
    records, status = lab.bench_host(
        cases, ["sdpa", "fa3x"], console=Console(quiet=True), json_path=path, **QUICK
    )
    assert status == 0 and Lines(path).records == records
    decode, training = records
    assert set(decode["us"]) == {"splitkv"} and decode["us"]["splitkv"] > 0
    assert decode["reasons"]["sdpa"] == "decode: expected another kind of call"
    assert set(training["us"]) == {"splitkv", "sdpa"} and min(training["us"].values()) > 0
    assert training["reasons"] == {"fa3x": "expected importable, got none"}
    text = report(records)
    assert "| call " in text and "* decode, new lengths, sdpa: decode: expected" in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_checked(case: lab.HostCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference itself passes, and the same with one number changed does not."""
    monkeypatch.setattr(lab, "TOKENS", 48)
    monkeypatch.setattr(lab, "FIRST_LENGTH", 40)
    monkeypatch.setattr(lab, "LENGTHS", 3)
    ours = LIBRARIES["splitkv"]()
    Made(ours, case, torch.device("cpu")).check()

    def spoil(run: Any) -> Any:
        def spoiled(*given: Any) -> Any:
            return run(*given) + 1.0

        return spoiled

    wrong = Library(*(spoil(run) for run in (ours.decode, ours.sequences, ours.packed)))
    with pytest.raises(AssertionError):
        Made(wrong, case, torch.device("cpu")).check()


def test_cases_by_name() -> None:
    assert {case.grads for case in select(["training, packed*"])} == {
        "forward",
        "step",
        "one thread",
    }
    with pytest.raises(ValueError, match="case: expected one of decode"):
        select(["nothing"])
