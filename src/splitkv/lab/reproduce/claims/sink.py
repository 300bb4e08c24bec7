"""Claims of the sink attention kernel's architecture notes."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import FA3, OURS
from splitkv.lab.reproduce.claims.verdict import Claim, Verdict, judge, missing, not_run
from splitkv.lab.reproduce.results import Results, times
from splitkv.lab.reproduce.works import CHUNK, CHUNKED_KEYS

CROSSING = {"forward": 12288, "training": 16384}  # tokens; "Performance Crossover vs FA2"
LINEAR_TOKENS = (32768, 131072)
SLACK = 0.1  # of an exponent: what the window's first, shorter rows and launches may add to 1
SINK_GRADIENT = Claim(
    "backward: what the gradient of sink logits adds, share of the whole, the most",
    *("sink", "s_aux Backward Overhead", "<=", 0.01),
    figure="< 1 %",
)
OVER_FA2 = Claim(
    "backward, causal: rate over FlashAttention-2's, the least",
    *("sink", "Backward Efficiency, Estimated total gap", ">=", 0.5),
    figure="0.5 to 0.7",
)
UNIFIED = (
    Claim(
        f"1 query token: keys from which chunks of {CHUNK} in programs of their own are faster",
        *("sink", "What Would a Unified Triton Kernel Look Like", "<=", 512),
        figure="below 512 one program is",
    ),
    Claim(
        "1 query token, 512 keys: microseconds that merging the chunks adds",
        *("sink", "What Would a Unified Triton Kernel Look Like", "<=", 20.0),
        figure="0.02 ms",
    ),
)
TRAINING = Claim(
    "loss curve in bf16 with sinks: distance from fp32 over that of eager attention",
    *("sink", "Core Semantics", "<=", 2.0),
    figure="the same semantics, no figure",
)


def sink_gradient(results: Results) -> Iterator[Verdict]:
    """Backward of gpt-oss layers with sink logits beside without."""
    found = []
    for case, r in results.whole("backward", OURS).items():
        without = results.rate("backward", f"{case}_nosink", OURS)
        if case.startswith("gpt_oss") and without is not None:
            found.append((r["us"] / without["us"] - 1, case))
    if not found:
        yield judge(SINK_GRADIENT, OURS, None, "no results of backward with and without sinks")
        return
    most, where = max(found)
    yield judge(SINK_GRADIENT, OURS, most, f"at {where}, of {len(found)} shapes")


def over_flash_attention_2(results: Results) -> Iterator[Verdict]:
    """Backward of equal work: all keys, causal."""
    found = []
    for case, r in results.whole("backward", OURS).items():
        theirs = results.rate("backward", case, "fa2")
        if case.endswith("_causal") and theirs is not None:
            found.append((theirs["us"] / r["us"], case))
    if not found:
        yield judge(OVER_FA2, OURS, None, "no results of backward beside FlashAttention-2")
        return
    least, where = min(found)
    yield judge(OVER_FA2, OURS, least, f"at {where}, of {len(found)} shapes")


def linear(results: Results) -> Iterator[Verdict]:
    """Time and memory of a window with sink tokens, as an exponent of the number of tokens."""
    few, many = LINEAR_TOKENS
    for direction in ("forward", "backward"):
        ends = [
            results.rate(direction, f"gqa32x8_b1_{tokens}_window4096_sink_tokens4", OURS)
            for tokens in LINEAR_TOKENS
        ]
        for what, field in (("time", "us"), ("memory", "peak_bytes")):
            text = f"{direction}, window and sink tokens: exponent of {what} over tokens"
            where = "Performance Crossover vs FA2"
            claim = Claim(text, "sink", where, "<=", 1 + SLACK, figure="O(N x W)")
            value, why = exponent(ends, field, many / few)
            yield judge(claim, OURS, value, why or f"from {few} to {many} tokens")


def exponent(ends: list[Record | None], field: str, factor: float) -> tuple[float | None, str]:
    """(x where so many times the tokens take factor ** x times as much; why there is none)."""
    found = [r[field] for r in ends if r is not None and r.get(field)]
    if len(found) < 2:
        return None, f"no results of windows at {' and '.join(map(str, LINEAR_TOKENS))} tokens"
    return log2(found[1] / found[0]) / log2(factor), ""


def crossover(results: Results) -> Iterator[Verdict]:
    """From how many tokens a window of 4096 with 4 sink tokens is faster than FlashAttention-2 over
    all keys."""
    for what, directions in (("forward", ["forward"]), ("training", ["forward", "backward"])):
        text = f"{what}: tokens from which the window is faster than FlashAttention-2's full"
        claim = Claim(text, "sink", "Performance Crossover vs FA2", "<=", CROSSING[what])
        faster: dict[int, bool] = {}
        for tokens in (1024, 2048, 4096, 8192, 16384):
            name = f"gqa32x8_b1_{tokens}"
            window = f"{name}_window4096_sink_tokens4"
            ours = [results.rate(d, window, OURS) for d in directions]
            full = [results.rate(d, f"{name}_causal", "fa2") for d in directions]
            if all(ours) and all(full):
                faster[tokens] = sum(r["us"] for r in ours if r) < sum(r["us"] for r in full if r)
        slower = [tokens for tokens, yes in faster.items() if not yes]
        after = [tokens for tokens in faster if tokens > max(slower, default=0)]
        why = f"faster at {', '.join(map(str, after)) or 'none'} of {', '.join(map(str, faster))}"
        value = float(min(after)) if after else float("inf")
        if not faster:
            why = "no results of windows beside FlashAttention-2"
        yield judge(claim, OURS, value if faster else None, why)


def unified(results: Results) -> Iterator[Verdict]:
    """One program that walks all keys beside chunks of them, at one query token."""
    for backend in (OURS, FA3):
        us = {r["problem"]["seqlen_k"]: times(r) for r in results.of("one launch", backend)}
        both = {keys: t for keys, t in us.items() if {"one program", "chunks"} <= t.keys()}
        if not {512, max(CHUNKED_KEYS)} <= both.keys():
            yield from not_run(UNIFIED, backend, missing("one launch", backend))
            continue
        slower = [k for k, t in both.items() if t["chunks"] >= t["one program"] and k >= 2 * CHUNK]
        after = [k for k in sorted(both) if k > max(slower, default=CHUNK)]
        at = ", ".join(map(str, after)) or "none"
        value = float(after[0]) if after else float("inf")
        yield judge(UNIFIED[0], backend, value, f"faster at {at} of {sorted(both)} keys")
        t = both[512]
        why = f"{t['one program']:.2f} us in one program, {t['chunks']:.2f} in 2 chunks"
        yield judge(UNIFIED[1], backend, t["chunks"] - t["one program"], why)


def training(results: Results) -> Iterator[Verdict]:
    """The loss curves of a small model in the shape of gpt-oss."""
    rows = {row["kernel"]: row for row in results.rows("training")}
    if not {"eager", "splitkv"} <= rows.keys():
        yield judge(TRAINING, OURS, None, "no results of the step `training`, of a full run")
        return
    eager, ours = (rows[name]["distance"] for name in ("eager", "splitkv"))
    last = ", ".join(f"{name} {row['loss']:.4f}" for name, row in rows.items())
    yield judge(TRAINING, OURS, ours / eager, f"losses at the end: {last}")
