"""Claims about whole models: what 8-bit caches and caches of bounded size cost."""

from __future__ import annotations

from collections.abc import Iterator

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import OURS
from splitkv.lab.reproduce.claims.verdict import Claim, Verdict, judge, not_run
from splitkv.lab.reproduce.results import Results

MODELS = ("demo", "smollm2")
WIDER = {"int8": 1.01, "fp8": 1.03}  # cache -> perplexity over that of bf16, at most
LOST = 0.05  # of the needles, by a cache in 8 bits
NEEDLES = Claim("smollm2: share of needles with bf16 caches", "ours", "quality", ">=", 0.9)
SINKS, ALONE = "sinks and window", "window alone"


def claims_of(model: str) -> dict[str, Claim]:
    """Claims on a model; the demo's is too small for needles."""
    where = ("ours", "quality")
    found = {"needles bf16": NEEDLES} if model == "smollm2" else {}
    for dtype, bound in WIDER.items():
        text = f"{model}: perplexity with {dtype} caches over bf16's"
        found[f"perplexity {dtype}"] = Claim(text, *where, "<=", bound)
        if model == "smollm2":
            text = f"{model}: share of needles with {dtype} caches less bf16's"
            found[f"needles {dtype}"] = Claim(text, *where, ">=", -LOST)
    text = f"{model}: perplexity of a window without the first tokens over one with them"
    found["sinks"] = Claim(text, *where, ">=", 1.0)
    text = f"{model}: perplexity of the first tokens and a window over all keys"
    found["window"] = Claim(text, *where, "<=", 1.5)
    return found


def quality(results: Results) -> Iterator[Verdict]:
    """Every claim on every model."""
    for model in MODELS:
        claims = claims_of(model)
        record = results.quality.get(model)
        if record is None:
            why = f"no results of the step `quality` on {model}: see `splitkv quality`"
            yield from not_run(tuple(claims.values()), OURS, why)
        else:
            yield from of_model(claims, record)


def of_model(claims: dict[str, Claim], record: Record) -> Iterator[Verdict]:
    """The claims on a model that was read."""
    rows = {row["kernel"]: row for row in record["rows"]}
    exact = rows["bf16"]
    on = f"on {record['gpu']}"
    if "needles bf16" in claims:
        yield judge(claims["needles bf16"], OURS, exact["found"], f"of {exact['needles']}, {on}")
    for dtype in WIDER:
        row = rows[dtype]
        why = f"{row['perplexity']:.3f} and {exact['perplexity']:.3f}, {row['tokens']} tokens, {on}"
        value = row["perplexity"] / exact["perplexity"]
        yield judge(claims[f"perplexity {dtype}"], OURS, value, why)
        if f"needles {dtype}" in claims:
            why = f"{row['found']:.0%} and {exact['found']:.0%} of {row['needles']}, {on}"
            yield judge(claims[f"needles {dtype}"], OURS, row["found"] - exact["found"], why)
    kept, alone = rows[SINKS], rows[ALONE]
    why = f"{alone['perplexity']:.3f} and {kept['perplexity']:.3f}, {on}"
    yield judge(claims["sinks"], OURS, alone["perplexity"] / kept["perplexity"], why)
    why = f"{kept['perplexity']:.3f} and {exact['perplexity']:.3f}, {on}"
    yield judge(claims["window"], OURS, kept["perplexity"] / exact["perplexity"], why)
