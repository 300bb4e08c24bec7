"""What the sources say, and what we say, checked against the results of a run.

A claim is a value, a bound and a relation. It is `NOT RUN` where results are missing, with what is
missing; else `PASS` or `FAIL`, with the figures that decide. The bounds are the sources' own
figures, taken on their GPUs (H100, H200, L4): a FAIL says that they do not hold here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.suites import CASES
from splitkv.lab.reproduce.model import LLAMA, PARTS, step_us
from splitkv.lab.reproduce.results import FA3, OURS, Results, mean, ratio, splits_of, times
from splitkv.lab.reproduce.works import BLOCK, MQA_16, mqa, picks, works
from splitkv.planner.policies import paged_attention_v2

SOURCES = {
    "heuristic": "Llopart Font et al., Sequence-Aware Split Heuristic, arXiv 2604.00028",
    "paged": "vLLM's Paged Attention V2 in Triton, lesson 12, 2026",
    "int8": "Optimizing AI Inference at Character.AI (Part Deux), 2024",
    "sink": "sink attention kernel, architecture notes, 2026",
    "ours": "splitkv",
}
CROSSING = {"forward": 12288, "training": 16384}  # tokens
PREFILL_H100 = {  # TFLOP/s in bf16, full and causal, by tokens
    "full": {1024: 602, 2048: 647, 4096: 662, 8192: 644, 16384: 642, 32768: 632},
    "causal": {1024: 460, 2048: 562, 4096: 622, 8192: 653, 16384: 641, 32768: 634},
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim and what the results say of it; `relation` is `>=` or `<=`."""

    claim: str
    source: str
    backend: str
    value: float | None
    relation: str
    bound: float
    verdict: str
    why: str


def judge(
    claim: str,
    source: str,
    backend: str,
    value: float | None,
    relation: str,
    bound: float,
    why: str,
) -> Verdict:
    """PASS where the value is on the right side of the bound; NOT RUN without a value."""
    if value is None:
        word = "NOT RUN"
    else:
        holds = value >= bound if relation == ">=" else value <= bound
        word = "PASS" if holds else "FAIL"
        rounded = f"{value:.4g}"
        why = f"{rounded} {'is' if holds else 'is not'} {relation} {bound:g}: {why}"
    return Verdict(
        f"{claim} ({backend})", SOURCES[source], backend, value, relation, bound, word, why
    )


def check(records: Iterable[Record]) -> list[Verdict]:
    """Every claim."""
    results = Results(records)
    found: list[Verdict] = []
    for backend in (OURS, FA3):
        for claim in OF_A_BACKEND:
            found += claim(results, backend)
    for of_all in OF_ALL:
        found += of_all(results)
    return found


def missing(step: str, backend: str) -> str:
    return f"no results of the step `{step}` on {backend}"


def speed_up_at_512(results: Results, backend: str) -> Iterator[Verdict]:
    for kv_heads, bound in ((1, 1.21), (2, 1.24)):
        us = {
            way: results.us("table 1", backend, mqa(512, kv_heads).name, way)
            for way in ("standard", "patched")
        }
        claim = f"512 keys, {kv_heads} KV head{'s' * (kv_heads > 1)}: patched over standard"
        slow, fast = us["standard"], us["patched"]
        if slow is None or fast is None:
            yield judge(claim, "heuristic", backend, None, ">=", bound, missing("table 1", backend))
        else:
            why = f"{slow:.2f} us in 1 split, {fast:.2f} us in 3"
            yield judge(claim, "heuristic", backend, slow / fast, ">=", bound, why)


def no_regression(results: Results, backend: str) -> Iterator[Verdict]:
    claim = "patched is nowhere slower than standard, over the matrix"
    pairs = [
        (found, r)
        for r in results.of("matrix", backend)
        if (found := ratio(r, "standard", "patched")) is not None
    ]
    if not pairs:
        yield judge(claim, "heuristic", backend, None, ">=", 0.99, missing("matrix", backend))
        return
    differ = [p for p in pairs if splits_of(p[1], "standard") != splits_of(p[1], "patched")]
    least, worst = min(pairs, key=lambda pair: pair[0])
    same = splits_of(worst, "standard") == splits_of(worst, "patched")
    why = (
        f"the least of {len(pairs)} of 160 configurations, at {worst['case']}, "
        f"{'where both rules run the same plan' if same else 'where the rules differ'}; "
        f"they differ on {len(differ)}"
    )
    yield judge(claim, "heuristic", backend, least, ">=", 0.99, why)


def plateau(results: Results, backend: str) -> Iterator[Verdict]:
    claims = (
        ("1 split over 3, split sweep at 512 keys", ">=", 1.2),
        ("3 splits over the best of the sweep", "<=", 1.02),
    )
    (us,) = [times(r) for r in results.of("splits", backend)] or [{}]
    swept = {way: t for way, t in us.items() if way.startswith("s=")}
    if not {"s=1", "s=3"} <= swept.keys():
        for claim, relation, bound in claims:
            why = missing("splits", backend)
            yield judge(claim, "heuristic", backend, None, relation, bound, why)
        return
    best = min(swept, key=lambda way: swept[way])
    one, three = swept["s=1"], swept["s=3"]
    shown = f"{one:.2f} us in 1, {three:.2f} in 3, best {swept[best]:.2f} with {best}"
    for (claim, relation, bound), value in zip(
        claims, (one / three, three / swept[best]), strict=True
    ):
        yield judge(claim, "heuristic", backend, value, relation, bound, shown)


def right_and_repeatable(results: Results, backend: str) -> Iterator[Verdict]:
    rows = [(r, row) for r, row in results.everything() if r["backend"] == backend]
    ran = [(r, row) for r, row in rows if row["us"] is not None]
    wrong = [
        f"{r['case']} {row['kernel']}: {row['reasons'][0]}"
        for r, row in rows
        if any("AssertionError" in reason for reason in row["reasons"])
    ]
    unsteady = [f"{r['case']} {row['kernel']}" for r, row in ran if not row["repeats"]]
    for claim, bad in (
        ("every result is within the tolerance of fp32", wrong),
        ("a second replay gives the same bits", unsteady),
    ):
        if not rows:
            yield judge(claim, "ours", backend, None, "<=", 0, f"no results on {backend}")
        else:
            why = f"{len(rows)} plans on {backend}" + (f"; first {bad[0]}" if bad else "")
            yield judge(claim, "ours", backend, float(len(bad)), "<=", 0, why)


def unchanged_elsewhere(results: Results) -> Iterator[Verdict]:
    """A claim about the rules themselves: it needs no time."""
    claim = "keys besides 385 to 512 at which patched splits otherwise"
    found = [w for w in works(False, 132) if w.step == "boundary"]
    other = [
        w.case.problem.seqlen_k
        for w in found
        if w.ways[0].splits != w.ways[1].splits and not 3 * BLOCK < w.case.problem.seqlen_k <= 512
    ]
    why = f"of {len(found)} lengths" + (f", first {other[0]}" if other else "")
    yield judge(claim, "heuristic", "rules", float(len(other)), "<=", 0, why)


def ours_against_the_rules(results: Results) -> Iterator[Verdict]:
    claim = "default policy over the patched rule on our kernels, mean over the matrix"
    listed = results.of("matrix", OURS)
    pairs = [(x, r) for r in listed if (x := ratio(r, "patched", "default")) is not None]
    if not pairs:
        yield judge(claim, "ours", OURS, None, ">=", 1.0, missing("matrix", OURS))
        return
    least, worst = min(pairs, key=lambda pair: pair[0])
    why = f"over {len(pairs)} configurations; least {least:.3f} at {worst['case']}"
    yield judge(claim, "ours", OURS, mean(x for x, _ in pairs), ">=", 1.0, why)


def decode_step(results: Results) -> Iterator[Verdict]:
    """Time per output token at 512 keys: ours by default against FlashAttention-3 by its rule."""
    claim = f"time per output token, {LLAMA.name}, 512 keys: FlashAttention-3's rule over ours"
    parts, name = results.parts_of_step(), mqa(512).name
    theirs = results.us("table 1", FA3, name, "standard")
    ours = results.us("table 1", OURS, name, "default")
    if theirs is None or ours is None or not set(PARTS) <= parts.keys():
        why = "needs the steps `table 1` on fa3 and splitkv and `decode step`"
        yield judge(claim, "ours", "both", None, ">=", 1.0, why)
        return
    rest = [parts[part] for part in PARTS]
    us = [step_us(LLAMA, attention, *rest) for attention in (theirs, ours)]
    why = f"{us[0] / 1e3:.3f} and {us[1] / 1e3:.3f} ms; attention {theirs:.2f} and {ours:.2f} us"
    yield judge(claim, "ours", "both", us[0] / us[1], ">=", 1.0, why)


def ten_shapes(results: Results) -> Iterator[Verdict]:
    records = {r["case"]: r for r in results.of("ten shapes", OURS)}
    claim = "16 x 32/1 x 4096: partitions over one pass"
    value = ratio(records[MQA_16], "one pass", "partitions") if MQA_16 in records else None
    shown = missing("ten shapes", OURS)
    if value is not None:
        us = times(records[MQA_16])
        shown = f"{us['one pass']:.1f} us in one pass, {us['partitions']:.1f} us in partitions"
    yield judge(claim, "paged", OURS, value, ">=", 1.68, shown)
    claim, right = "share of its shapes on which the conservative rule picks the faster", []
    for name, r in records.items():
        us = {way: t for way, t in times(r).items() if way != "default"}
        if len(us) == 2:
            pick = picks(paged_attention_v2.CONSERVATIVE, CASES[name].problem, results.num_sms)
            right.append((pick == min(us, key=lambda way: us[way]), name))
    wrong = [name for ok, name in right if not ok]
    why = f"wrong on {', '.join(wrong) or 'none'} of {len(right)}"
    share = 1 - len(wrong) / len(right) if right else None
    why = why if right else missing("ten shapes", OURS)
    yield judge(claim, "paged", OURS, share, ">=", 0.9, why)


def packing(results: Results, backend: str) -> Iterator[Verdict]:
    claims = (
        ("packing, with splitting: the least speed-up", ">=", 6.4),
        ("packing and splitting: slowest over fastest shape of one size", "<=", 1.5),
    )
    records = [r for r in results.of("packing", backend) if "both" in times(r)]
    ratios = [(x, r["case"]) for r in records if (x := ratio(r, "split", "both")) is not None]
    if not ratios:
        for claim, relation, bound in claims:
            why = missing("packing", backend)
            yield judge(claim, "int8", backend, None, relation, bound, why)
        return
    least, where = min(ratios)
    why = f"at {where}, bf16 keys; most {max(ratios)[0]:.1f}"
    yield judge(claims[0][0], "int8", backend, least, ">=", claims[0][2], why)
    both = [times(r)["both"] for r in records]
    why = f"{min(both):.1f} to {max(both):.1f} us over {len(both)} shapes, bf16 keys"
    yield judge(claims[1][0], "int8", backend, max(both) / min(both), "<=", claims[1][2], why)


def prefill_rates(results: Results) -> Iterator[Verdict]:
    for library in (OURS, "fa3x"):
        for mask, rates in PREFILL_H100.items():
            found = []
            for tokens, theirs in rates.items():
                case = f"mqa16_b{32768 // tokens}_{tokens}_{mask}"
                record = results.rate("forward", case, library)
                found += [] if record is None else [(record["tflops"] / theirs, tokens)]
            claim = f"prefill in bf16, {mask}: rate over the source's on an H100, mean"
            why = f"no results of prefill on {library}"
            if found:
                why = f"over {len(found)} of {len(rates)} lengths, least {min(found)[0]:.3f} at "
                why += f"{min(found)[1]} tokens"
            value = mean(x for x, _ in found) if found else None
            yield judge(claim, "int8", library, value, ">=", 1.0, why)


def crossover(results: Results) -> Iterator[Verdict]:
    """From how many tokens a window of 4096 with 4 sink tokens is faster than FlashAttention-2 over
    all keys."""
    for what, directions in (("forward", ["forward"]), ("training", ["forward", "backward"])):
        claim = f"{what}: tokens from which the window is faster than FlashAttention-2's full"
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
        yield judge(claim, "sink", OURS, value if faster else None, "<=", CROSSING[what], why)


OF_A_BACKEND: tuple[Callable[[Results, str], Iterator[Verdict]], ...] = (
    speed_up_at_512,
    no_regression,
    plateau,
    right_and_repeatable,
    packing,
)
OF_ALL: tuple[Callable[[Results], Iterator[Verdict]], ...] = (
    unchanged_elsewhere,
    ours_against_the_rules,
    decode_step,
    ten_shapes,
    prefill_rates,
    crossover,
)
