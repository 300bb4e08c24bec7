"""Claims of our own: right and repeatable results, and ours against theirs."""

from __future__ import annotations

from collections.abc import Iterator

from splitkv.lab.harness.records import FA3, OURS
from splitkv.lab.reproduce.claims.verdict import Claim, Verdict, judge, missing
from splitkv.lab.reproduce.model import LLAMA, PARTS, step_us
from splitkv.lab.reproduce.results import Results, mean, ratio
from splitkv.lab.reproduce.works import mqa

WITHIN = Claim("every result is within the tolerance of fp32", "ours", "numerics", "<=", 0)
SAME_BITS = Claim("a second replay gives the same bits", "ours", "numerics", "<=", 0)
OVER_PATCHED = Claim(
    "default policy over the patched rule on our kernels, mean over the matrix",
    *("ours", "policies", ">=", 1.0),
)
PER_TOKEN = Claim(
    f"time per output token, {LLAMA.name}, 512 keys: FlashAttention-3's rule over ours",
    *("ours", "reproduce", ">=", 1.0),
)


def right_and_repeatable(results: Results, backend: str) -> Iterator[Verdict]:
    """Every plan that was timed on a backend."""
    rows = [(r, row) for r, row in results.everything() if r["backend"] == backend]
    ran = [(r, row) for r, row in rows if row["us"] is not None]
    wrong = [
        f"{r['case']} {row['kernel']}: {row['reasons'][0]}"
        for r, row in rows
        if any("AssertionError" in reason for reason in row["reasons"])
    ]
    unsteady = [f"{r['case']} {row['kernel']}" for r, row in ran if not row["repeats"]]
    for claim, bad in ((WITHIN, wrong), (SAME_BITS, unsteady)):
        if not rows:
            yield judge(claim, backend, None, f"no results on {backend}")
        else:
            why = f"{len(rows)} plans on {backend}" + (f"; first {bad[0]}" if bad else "")
            yield judge(claim, backend, float(len(bad)), why)


def ours_against_the_rules(results: Results) -> Iterator[Verdict]:
    """The default policy over the matrix of the sequence-aware heuristic's source."""
    listed = results.of("matrix", OURS)
    pairs = [(x, r) for r in listed if (x := ratio(r, "patched", "default")) is not None]
    if not pairs:
        yield judge(OVER_PATCHED, OURS, None, missing("matrix", OURS))
        return
    least, worst = min(pairs, key=lambda pair: pair[0])
    why = f"over {len(pairs)} configurations; least {least:.3f} at {worst['case']}"
    yield judge(OVER_PATCHED, OURS, mean(x for x, _ in pairs), why)


def decode_step(results: Results) -> Iterator[Verdict]:
    """Time per output token at 512 keys: ours by default against FlashAttention-3 by its rule."""
    parts, name = results.parts_of("decode step"), mqa(512).name
    theirs = results.us("table 1", FA3, name, "standard")
    ours = results.us("table 1", OURS, name, "default")
    if theirs is None or ours is None or not set(PARTS) <= parts.keys():
        why = "needs the steps `table 1` on fa3 and splitkv and `decode step`"
        yield judge(PER_TOKEN, "both", None, why)
        return
    rest = [parts[part] for part in PARTS]
    us = [step_us(LLAMA, attention, *rest) for attention in (theirs, ours)]
    why = f"{us[0] / 1e3:.3f} and {us[1] / 1e3:.3f} ms; attention {theirs:.2f} and {ours:.2f} us"
    yield judge(PER_TOKEN, "both", us[0] / us[1], why)
