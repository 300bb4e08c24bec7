"""Results as the benchmarks write them, of times that nobody took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from splitkv.lab.bench import decode as bench
from splitkv.lab.bench.sequences import peers as their
from splitkv.lab.bench.sequences import run as sequences
from splitkv.lab.bench.sequences.suites import CASES as SEQUENCES
from splitkv.lab.bench.sequences.timing import Measured, Pace
from splitkv.lab.harness import floor, peers
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Protocol, Timing
from splitkv.lab.harness.variants import our_variants

MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": "580",
    "versions": {"python": "3.12", "torch": "2.11", "triton": "3.6"},
    "commit": "abc",
}
FLOOR = floor.Floor(Timing(2.0, 0.1), "tma 64x12x1")
TWO = ("gqa32x8_b4_8192_full", "gqa32x8_b1_16384_full")
PEAK = Timing(1500.0, 15.0)


def decode_records() -> list[dict[str, Any]]:
    ours = our_variants()[0]
    fa3, cudnn = (peers.PEERS[name].variants[0] for name in ("fa3", "cudnn"))
    found = []
    for name, times in (("mqa8_b1_512", (4.0, 8.0, 6.0)), ("mqa8_b8_4096", (8.0, 9.0, None))):
        for variant, us in zip((ours, fa3, cudnn), times, strict=True):
            measured = {"us": us, "spread_us": 0.1, "err": 1e-3, "version": "1"}
            row = variant.row(**measured) if us else variant.row(reasons=["too old"])
            found.append(bench.record(CASES[name], row, FLOOR, Protocol(), MACHINE))
    return found


def measured(case: Case, times: Sequence[float | None]) -> Measured:
    """Ours, FlashAttention-3 and cuDNN, in so many milliseconds."""
    ours = sequences.our_variants()[0]
    fa3x, cudnn = (their.PEERS[name].variants[0] for name in ("fa3x", "cudnn"))
    rows = []
    for variant, ms in zip((ours, fa3x, cudnn), times, strict=True):
        found = {"us": 1e3 * ms, "spread_us": 5.0} if ms else {"reasons": ["too old"]}
        rows.append(variant.row(err=1e-3 if ms else None, version="1", **found))
        rows[-1] |= {"errors": {"out": 1e-3}, "launched": ["prefill"], "calls": 5}
        rows[-1]["clocks"] = {"sm_mhz": 1500} if ms else None
        rows[-1]["peak_bytes"] = 33_554_432 if ms else None
    return Measured(rows, PEAK, 1490)


def rate_records(way: str = "forward", suite: str = "prefill") -> list[dict[str, Any]]:
    found = []
    for name, times in zip(TWO, ((8.0, 4.0, 6.0), (10.0, None, 20.0)), strict=True):
        case = SEQUENCES["forward", name]
        if way == "backward":
            case = replace(case, problem=replace(case.problem, needs_grad=True))
        found += sequences.records(suite, case, measured(case, times), Pace(), MACHINE)
    return found
