"""Claims of the sources: they hold on results like the sources', and fail on doctored ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from reproducing import doctored, verdicts

from splitkv.lab.reproduce import tracing, works
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims.verdict import SOURCES


def test_claims_hold_on_results_like_the_sources(records: list[dict[str, Any]]) -> None:
    found = verdicts(records)
    failed = {v.text: v.why for v in found.values() if v.verdict != "PASS"}
    not_read = "no results of the step `quality` on smollm2: see `splitkv quality`"
    assert set(failed.values()) == {not_read} and len(failed) == 7
    patched = found["512 keys, 1 KV head: patched over standard (splitkv)"]
    assert patched.why == "1.399 is >= 1.21: 14.00 us in 1 split, 10.01 us in 3"


@pytest.mark.parametrize(
    ("step", "way", "change", "claim", "why"),
    [
        (
            *("table 1", "patched", {"us": 13.0}, "512 keys, 2 KV heads: patched over standard"),
            "1.077 is not >= 1.24: 14.00 us in 1 split, 13.00 us in 3",
        ),
        (
            *("matrix", "patched", {"us": 20.0}),
            "patched is nowhere slower than standard, over the matrix",
            "0.5 is not >= 0.99: the least of 160 of 160 configurations",
        ),
        ("splits", "s=1", {"us": 10.5}, "1 split over 3, split sweep at 512 keys", "1.049 is not"),
        (
            "splits",
            "s=3",
            {"us": 11.0},
            "3 splits over the best of the sweep",
            "1.1 is not <= 1.02",
        ),
        (
            *("boundary", "patched", {"repeats": False}, "a second replay gives the same bits"),
            "14 is not <= 0",
        ),
        (
            "boundary",
            "patched",
            {"us": None, "reasons": ["AssertionError: out: expected an error of 0.1"]},
            "every result is within the tolerance of fp32",
            "14 is not <= 0",
        ),
        (
            "packing",
            "both",
            {"us": 100.0},
            "packing, bf16 keys, with splitting: the least speed-up",
            "3.236 is not",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["splitkv", "fa3"])
def test_doctored_results_fail_their_claim(
    records: list[dict[str, Any]],
    backend: str,
    step: str,
    way: str,
    change: dict[str, Any],
    claim: str,
    why: str,
) -> None:
    found = verdicts(doctored(records, step, backend, way, **change))
    failed = {name: v for name, v in found.items() if v.verdict == "FAIL"}
    assert f"{claim} ({backend})" in failed
    assert failed[f"{claim} ({backend})"].why.startswith(why)
    assert {v.backend for v in failed.values()} == {backend}, "another backend's claim failed"


@pytest.mark.parametrize(
    ("step", "way", "us", "claim"),
    [
        ("matrix", "default", 12.0, "default policy over the patched rule on our kernels"),
        ("table 1", "default", 15.0, "time per output token, llama3_70b_tp8, 512 keys"),
        ("ten shapes", "partitions", 30.0, "16 x 32/1 x 4096: partitions over one pass (splitkv)"),
        ("ten shapes", "partitions", 60.0, "16 x 32/1 x 4096: partitions over SDPA, gap in % (sp"),
        (
            "page sizes",
            "one pass",
            5.0,
            "16 x 32/1 x 4096: the best page size in one pass over "
            "partitions on pages of 16 (splitkv)",
        ),
        (
            "one launch",
            "chunks",
            99.0,
            "1 query token: keys from which chunks of 256 in programs of"
            " their own are faster (splitkv)",
        ),
        ("kernels", "triton", 11.0, "a decode step with int8 caches"),
        ("packing int8", "neither", 333.0, "int8 keys, neither split nor packed: time as"),
        ("packing int8", "packed", 36.0, "int8 keys, not split: keys from which unpacked"),
        ("kernels", "default", 60.0, "3 query tokens, int8 keys: bandwidth by default over"),
        ("ten shapes", "one pass", 99.0, "share of its shapes on which the conservative rule"),
    ],
)
def test_doctored_results_fail_claims_of_ours(
    records: list[dict[str, Any]], step: str, way: str, us: float, claim: str
) -> None:
    found = verdicts(doctored(records, step, "splitkv", way, us=us))
    assert [v.verdict for name, v in found.items() if name.startswith(claim)] == ["FAIL"]


def test_slow_sequences_fail_their_claims(records: list[dict[str, Any]]) -> None:
    slow = json.loads(json.dumps(records))
    for r in slow:
        if r.get("library") == "splitkv":
            r["us"] *= 100
            r["tflops"] /= 2
    found = verdicts(slow)
    failed = {name for name, v in found.items() if v.verdict == "FAIL"}
    assert failed == {
        *(
            f"prefill in {dtype}, {mask}: rate over the source's on an H100, mean (splitkv)"
            for dtype in ("bf16", "int8", "fp8")
            for mask in ("full", "causal")
        ),
        "backward, causal: rate over FlashAttention-2's, the least (splitkv)",
        "forward: tokens from which the window is faster than FlashAttention-2's full (splitkv)",
        "training: tokens from which the window is faster than FlashAttention-2's full (splitkv)",
    }


@pytest.mark.parametrize(
    ("case", "change", "claim"),
    [
        ("gpt_oss_b1_4096_causal", {"us": 102.0}, "backward: what the gradient of sink logits"),
        (
            *("gqa32x8_b1_131072_window4096_sink_tokens4", {"us": 9e5}),
            "backward, window and sink tokens: exponent of time",
        ),
        (
            *("gqa32x8_b1_131072_window4096_sink_tokens4", {"peak_bytes": 1 << 30}),
            "forward, window and sink tokens: exponent of memory",
        ),
        ("mqa16_b8_4096_full_int8", {"tflops": 100.0}, "prefill in int8: how far its rate"),
    ],
)
def test_doctored_sequences_fail_their_claim(
    records: list[dict[str, Any]], case: str, change: dict[str, Any], claim: str
) -> None:
    found = [
        {**r, **change} if r["case"] == case and r.get("library") == "splitkv" else r
        for r in records
    ]
    failed = [name for name, v in verdicts(found).items() if v.verdict == "FAIL"]
    assert any(name.startswith(claim) for name in failed), failed


@pytest.mark.parametrize(
    ("step", "kernel", "change", "claim"),
    [
        ("trace", "flash_fwd_kernel", {"kernel": "cudnn"}, "64 new tokens: kernels"),
        ("trace", tracing.COMBINE, {"kernel": "flash_fwd_kernel"}, "512 new tokens: kernels"),
        ("trace", tracing.COMBINE, {"grid": [28, 1, 1]}, "the combine's grid"),
        (
            *("trace", tracing.COMBINE, {"kernel": f"{tracing.COMBINE}<Traits<128>, 8, 2, true>"}),
            "the combine's rows a block",
        ),
        ("training", "splitkv", {"distance": 0.05}, "loss curve in bf16 with sinks"),
        ("prefill step", "triton", {"us": 110.0}, "a prefill of a model"),
    ],
)
def test_doctored_steps_beside_attention_fail_their_claim(
    records: list[dict[str, Any]], step: str, kernel: str, change: dict[str, Any], claim: str
) -> None:
    copy = json.loads(json.dumps(records))
    for r in copy:
        if r.get("step") == step:
            for row in r["rows"]:
                row.update(change if kernel in row["kernel"] else {})
    failed = [name for name, v in verdicts(copy).items() if v.verdict == "FAIL"]
    assert len(failed) == 1 and failed[0].startswith(claim), failed


def test_every_source_has_claims_with_a_place_and_a_figure() -> None:
    found = check([])
    assert {v.source for v in found} == set(SOURCES.values())
    assert len({v.claim for v in found}) == len(found)
    assert all(v.where and v.figure and v.why for v in found)


def test_without_results_no_claim_passes_but_that_of_the_rules() -> None:
    found = verdicts([])
    assert {v.verdict for name, v in found.items() if "(rules)" not in name} == {"NOT RUN"}
    assert all(v.why and v.value is None for n, v in found.items() if "(rules)" not in n)


def test_a_rule_that_splits_elsewhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(works.RULES, "patched", works.no_guard)  # type: ignore[arg-type]
    (found,) = (v for v in check([]) if v.text.startswith("keys besides 385"))
    assert found.verdict == "FAIL" and found.value == 4


def test_results_of_other_sources_do_not_count(records: list[dict[str, Any]]) -> None:
    old = [{**r, "commit": "old"} for r in doctored(records, "table 1", "fa3", "patched", us=99.0)]
    assert not [v for v in check(old + records) if v.verdict == "FAIL"]
