"""Claims of the lesson that ports vLLM's paged attention v2 to Triton (figures of an L4)."""

from __future__ import annotations

from collections.abc import Iterator

from splitkv.lab.harness.records import OURS
from splitkv.lab.harness.suites import CASES
from splitkv.lab.reproduce.claims.verdict import Claim, Verdict, judge, missing, not_run
from splitkv.lab.reproduce.results import Results, ratio, times
from splitkv.lab.reproduce.works import MQA_16, contiguous, picks
from splitkv.planner.policies.paged_attention_v2 import CONSERVATIVE, PERMISSIVE, Rule

GAPS = {"one pass": 645.0, "partitions": 344.0}  # % over SDPA; section 7
NAMED = {  # shapes of section 6 -> (way that is faster there, the source's ratio of the two ways)
    "llama70b-B4-ctx2k": ("one pass", 0.196 / 0.165),
    "llama7b-B1-ctx1k": ("one pass", 0.196 / 0.142),
    "mqa-B16-ctx4k": ("partitions", 0.331 / 0.196),
}
PARTITIONS = Claim("16 x 32/1 x 4096: partitions over one pass", "paged", "7", ">=", 1.68)
PAGE_SIZES = Claim(
    "16 x 32/1 x 4096: the best page size in one pass over partitions on pages of 16",
    *("paged", "1 and 9", ">=", 1.0),
    figure="0.203 ms over 0.197 ms: no page size closes the gap",
)
PICKS = Claim(
    "share of its shapes on which the conservative rule picks the faster",
    *("paged", "6", ">=", 0.9),
    figure="9 of 10",
)
TOO_PERMISSIVE = Claim(
    "shapes on which the conservative rule is right less those of the first one",
    *("paged", "6", ">=", 0),
    figure="the first one is too permissive",
)


def case_named(shape: str) -> str:
    """The case of a shape of the source."""
    return f"seed003_{shape}_page16"


def gaps(results: Results, backend: str) -> Iterator[Verdict]:
    """How much longer than SDPA on a contiguous cache the paged kernel takes."""
    sdpa = results.fastest("sdpa", "torch", contiguous(CASES[MQA_16]).name)
    for way, bound in GAPS.items():
        text = f"16 x 32/1 x 4096: {way} over SDPA, gap in %"
        claim = Claim(text, "paged", "7", "<=", bound, figure=f"+{bound:g} %")
        us = results.us("ten shapes", backend, MQA_16, way)
        if us is None or sdpa is None:
            why = f"needs the steps `sdpa` and `ten shapes` on {backend}"
            yield judge(claim, backend, None, why)
        else:
            why = f"{us:.1f} us beside {sdpa:.1f} us"
            yield judge(claim, backend, 100 * (us / sdpa - 1), why)


def ways_of_shapes(results: Results, backend: str) -> Iterator[Verdict]:
    """One pass against partitions on the shapes that the source names."""
    records = {r["case"]: r for r in results.of("ten shapes", backend)}
    value = ratio(records[MQA_16], "one pass", "partitions") if MQA_16 in records else None
    shown = missing("ten shapes", backend)
    if value is not None:
        us = times(records[MQA_16])
        shown = f"{us['one pass']:.1f} us in one pass, {us['partitions']:.1f} us in partitions"
    yield judge(PARTITIONS, backend, value, shown)
    for shape, (faster, figure) in NAMED.items():
        slower = "partitions" if faster == "one pass" else "one pass"
        text = f"{shape}: {slower} over {faster}"
        claim = Claim(text, "paged", "6", ">=", 1.0, figure=f"{figure:.2f}")
        r = records.get(case_named(shape))
        value = None if r is None else ratio(r, slower, faster)
        why = missing("ten shapes", backend)
        if r is not None and value is not None:
            us = times(r)
            why = f"{us['one pass']:.1f} us in one pass, {us['partitions']:.1f} us in partitions"
        yield judge(claim, backend, value, why)


def rules(results: Results) -> Iterator[Verdict]:
    """Both rules that choose between the ways, on our kernels."""
    of_both = {rule.name: right_of(results, rule) for rule in (CONSERVATIVE, PERMISSIVE)}
    right = of_both[CONSERVATIVE.name]
    if not right:
        yield from not_run((PICKS, TOO_PERMISSIVE), OURS, missing("ten shapes", OURS))
        return
    wrong = [name for name, ok in right.items() if not ok]
    why = f"wrong on {', '.join(wrong) or 'none'} of {len(right)}"
    yield judge(PICKS, OURS, 1 - len(wrong) / len(right), why)
    counts = {name: sum(found.values()) for name, found in of_both.items()}
    why = ", ".join(f"{name} right on {n} of {len(right)}" for name, n in counts.items())
    more = counts[CONSERVATIVE.name] - counts[PERMISSIVE.name]
    yield judge(TOO_PERMISSIVE, OURS, float(more), why)


def right_of(results: Results, rule: Rule) -> dict[str, bool]:
    """case -> whether the rule picks the faster way, where both have a time."""
    found = {}
    for r in results.of("ten shapes", OURS):
        us = {way: t for way, t in times(r).items() if way != "default"}
        if len(us) == 2:
            pick = picks(rule, CASES[r["case"]].problem, results.num_sms)
            found[r["case"]] = pick == min(us, key=lambda way: us[way])
    return found


def page_sizes(results: Results, backend: str) -> Iterator[Verdict]:
    """One pass on pages of 8 to 128 keys, beside partitions."""
    one_pass = {
        r["problem"]["place"]: times(r)["one pass"]
        for r in results.of("page sizes", backend)
        if "one pass" in times(r)
    }
    partitions = results.us("ten shapes", backend, MQA_16, "partitions")
    if not one_pass or partitions is None:
        why = f"needs the steps `page sizes` and `ten shapes` on {backend}"
        yield judge(PAGE_SIZES, backend, None, why)
        return
    best = min(one_pass, key=lambda place: one_pass[place])
    why = f"{one_pass[best]:.1f} us on {best}, of {len(one_pass)}; {partitions:.1f} in partitions"
    yield judge(PAGE_SIZES, backend, one_pass[best] / partitions, why)
