"""Claims on what caches cost whole models, and results of them from another machine."""

from __future__ import annotations

from typing import Any

import pytest
from reproducing import doctored, read, verdicts
from results import MACHINE

from splitkv.lab.reproduce import tables
from splitkv.lab.reproduce.check import check


def of_cpu(model: str) -> dict[str, Any]:
    """A record as `splitkv quality` adds it to the results of a GPU."""
    own = {"suite": "reproduce", "step": "quality", "backend": "torch", "case": model, "ways": []}
    return {**own, "rows": read(3), **MACHINE, "gpu": "a CPU", "date": "2026-11-24T00:00:00"}


def test_another_machine_may_have_read_a_model(records: list[dict[str, Any]]) -> None:
    found = verdicts([*records, of_cpu("smollm2")])
    of_model = [v for v in found.values() if v.text.startswith("smollm2")]
    assert [v.verdict for v in of_model] == ["PASS"] * 7
    int8 = found["smollm2: perplexity with int8 caches over bf16's (splitkv)"]
    assert int8.why == "1.005 is <= 1.01: 10.050 and 10.000, 2048 tokens, on a CPU"
    # and its record does not make the rest those of another machine
    assert found["512 keys, 1 KV head: patched over standard (splitkv)"].verdict == "PASS"
    decode = [r for r in records if r["suite"] == "reproduce"]
    report = tables.report([*decode, of_cpu("smollm2")], [])
    assert report.startswith("# Reproduction\n\nNVIDIA H200")
    assert "## What caches cost a model: smollm2\n\na CPU, driver" in report
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in report.splitlines()]
    assert ["fp8", "10.200", "+2.00%", "100%"] in lines


@pytest.mark.parametrize(
    ("way", "change", "text"),
    [
        ("int8", {"perplexity": 10.2}, "perplexity with int8 caches over bf16's"),
        ("fp8", {"found": 0.5}, "share of needles with fp8 caches less bf16's"),
        ("window alone", {"perplexity": 11.0}, "perplexity of a window without the first tokens"),
        ("sinks and window", {"perplexity": 16.0}, "perplexity of the first tokens and a window"),
    ],
)
def test_what_a_cache_costs_fails_where_it_is_too_much(
    records: list[dict[str, Any]], way: str, change: Any, text: str
) -> None:
    bad = check(doctored([*records, of_cpu("smollm2")], "quality", "torch", way, **change))
    failed = [v.text for v in bad if v.verdict == "FAIL"]
    assert f"smollm2: {text}" in " ".join(failed)
    assert all("window" in name or text in name for name in failed)


def test_the_demo_has_no_needles(records: list[dict[str, Any]]) -> None:
    of_demo = [v.text for v in verdicts(records).values() if v.text.startswith("demo: ")]
    assert len(of_demo) == 4 and not any("needles" in text for text in of_demo)
