"""A claim that fails says what was looked at: the source's GPU, and what else the results tell."""

from __future__ import annotations

from typing import Any

import pytest
from reproducing import doctored, verdicts

from splitkv.lab.reproduce import tables
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims import failures
from splitkv.lab.reproduce.claims.verdict import FAIL, SOURCES
from splitkv.lab.reproduce.results import Results


def test_what_holds_was_not_looked_at(records: list[dict[str, Any]]) -> None:
    assert {v.checked for v in check(records)} == {""}


@pytest.mark.parametrize(
    ("step", "way", "change", "claim", "said"),
    [
        (
            *("table 1", "patched", {"us": 13.0}, "512 keys, 1 KV head: patched over standard"),
            [
                "the source's figure is of an H100, this of NVIDIA H200",
                "there 13.72 us in 1 split and 11.37 in 3",
                "of all 32 numbers of splits 8 gains the most, 1.400",
            ],
        ),
        (
            *("splits", "s=3", {"us": 11.0}, "3 splits over the best of the sweep"),
            ["us by splits 2: 10.01, 3: 11.00, 4: 10.00, 8: 10.00, 16: 10.01"],
        ),
        (
            *("matrix", "patched", {"us": 12.0}),
            "patched is nowhere slower than standard, over the matrix",
            [
                "one graph in turns of its own differs from itself by 0.833 to 1.167",
                "where the rules differ the least is 1.167",
            ],
        ),
    ],
)
def test_a_failure_says_what_was_looked_at(
    records: list[dict[str, Any]], step: str, way: str, change: Any, claim: str, said: list[str]
) -> None:
    found = verdicts(doctored(records, step, "fa3", way, **change))[f"{claim} (fa3)"]
    assert found.verdict == FAIL
    for clause in said:
        assert clause in found.checked.split("; ")


def test_a_flag_that_changes_nothing_is_called_so(records: list[dict[str, Any]]) -> None:
    claim = "packing, bf16 keys, with splitting: the least speed-up (fa3)"
    slow = doctored(records, "packing", "fa3", "both", us=340.0)
    assert "unpacked over packed" in verdicts(slow)[claim].checked
    assert "changes nothing" not in verdicts(slow)[claim].checked
    for step in ("packing", "packing fp8"):
        for way, us in (("neither", 70.0), ("packed", 70.7), ("split", 45.9), ("both", 45.6)):
            slow = doctored(slow, step, "fa3", way, us=us)
    inert = verdicts(slow)[claim].checked
    assert "unpacked over packed 0.990 to 1.007 in 32 pairs" in inert
    assert inert.endswith("so the flag changes nothing in this build: it packs either way")


def test_every_way_to_look_is_of_a_claim(records: list[dict[str, Any]]) -> None:
    texts = {v.text for v in check(records)}
    for begins in failures.LOOKS:
        assert any(text.startswith(begins) for text in texts), begins
    assert {*failures.GPUS, "ours"} == set(SOURCES)


def test_without_metadata_is_a_column_and_beside_a_failure(records: list[dict[str, Any]]) -> None:
    table = tables.rules_table(Results(records), "fa3", "table 1")
    lines = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[0][-1] == "speed-up without metadata"
    shown = {(line[0], line[1]): line[-1] for line in lines[2:]}
    assert shown["512", "1"] == "1.02" and shown["512", "8"] == tables.ABSENT
    fails = doctored(records, "no metadata", "fa3", "standard", us=14.0)
    (found,) = (v for v in check(fails) if v.verdict == FAIL)
    assert "with metadata ahead and 1 KV heads 1.399" in found.checked
    assert found.checked in tables.source_table([found]).replace("\\|", "|")
