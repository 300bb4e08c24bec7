"""Claims of the sequence-aware split heuristic's source, on every backend that takes its steps."""

from __future__ import annotations

from collections.abc import Iterator

from splitkv.lab.harness.records import FA3
from splitkv.lab.reproduce.claims.verdict import Claim, Verdict, judge, missing, not_run
from splitkv.lab.reproduce.results import Results, mean, ratio, splits_of, times
from splitkv.lab.reproduce.works import BLOCK, mqa, works

SPEED_UPS = {1: 1.21, 2: 1.24}  # KV heads -> speed-up at 512 keys
NO_REGRESSION = Claim(
    "patched is nowhere slower than standard, over the matrix", "heuristic", "5.3", ">=", 0.99
)
PLATEAU = (
    Claim(
        *("1 split over 3, split sweep at 512 keys", "heuristic", "5.2 and figure 3", ">=", 1.2),
        figure="13.72 us over 11.37 us",
    ),
    Claim("3 splits over the best of the sweep", "heuristic", "5.2 and figure 3", "<=", 1.02),
)
ELSEWHERE = Claim(
    *("keys besides 385 to 512 at which patched splits otherwise", "heuristic", "4.1", "<=", 0),
    figure="none",
)


def speed_up_at_512(results: Results, backend: str) -> Iterator[Verdict]:
    """Table 1, the rows in which the rules differ."""
    for kv_heads, bound in SPEED_UPS.items():
        text = f"512 keys, {kv_heads} KV head{'s' * (kv_heads > 1)}: patched over standard"
        claim = Claim(text, "heuristic", "table 1", ">=", bound)
        slow, fast = (
            results.us("table 1", backend, mqa(512, kv_heads).name, way)
            for way in ("standard", "patched")
        )
        if slow is None or fast is None:
            yield judge(claim, backend, None, missing("table 1", backend))
        else:
            why = f"{slow:.2f} us in 1 split, {fast:.2f} us in 3"
            yield judge(claim, backend, slow / fast, why)


def no_regression(results: Results, backend: str) -> Iterator[Verdict]:
    """The regression matrix."""
    pairs = [
        (found, r)
        for r in results.of("matrix", backend)
        if (found := ratio(r, "standard", "patched")) is not None
    ]
    if not pairs:
        yield judge(NO_REGRESSION, backend, None, missing("matrix", backend))
        return
    differ = [p for p in pairs if splits_of(p[1], "standard") != splits_of(p[1], "patched")]
    least, worst = min(pairs, key=lambda pair: pair[0])
    same = splits_of(worst, "standard") == splits_of(worst, "patched")
    alike = [x for x, r in pairs if (x, r) not in differ]
    chance = f", whose ratios are from {min(alike):.3f} to {max(alike):.3f}" if alike else ""
    why = (
        f"the least of {len(pairs)} of 160 configurations, at {worst['case']}, "
        f"{'where both rules run the same plan' if same else 'where the rules differ'}; "
        f"they differ on {len(differ)} and launch the same on {len(alike)}{chance}"
    )
    yield judge(NO_REGRESSION, backend, least, why)


def plateau(results: Results, backend: str) -> Iterator[Verdict]:
    """The split sweep of figure 3."""
    (us,) = [times(r) for r in results.of("splits", backend)] or [{}]
    swept = {way: t for way, t in us.items() if way.startswith("s=")}
    if not {"s=1", "s=3"} <= swept.keys():
        yield from not_run(PLATEAU, backend, missing("splits", backend))
        return
    best = min(swept, key=lambda way: swept[way])
    one, three = swept["s=1"], swept["s=3"]
    shown = f"{one:.2f} us in 1, {three:.2f} in 3, best {swept[best]:.2f} with {best}"
    for claim, value in zip(PLATEAU, (one / three, three / swept[best]), strict=True):
        yield judge(claim, backend, value, shown)


def unchanged_elsewhere(results: Results) -> Iterator[Verdict]:
    """A claim about the rules themselves: it needs no time."""
    found = [w for w in works(False, 132) if w.step == "boundary"]
    other = [
        w.case.problem.seqlen_k
        for w in found
        if w.ways[0].splits != w.ways[1].splits and not 3 * BLOCK < w.case.problem.seqlen_k <= 512
    ]
    why = f"of {len(found)} lengths" + (f", first {other[0]}" if other else "")
    yield judge(ELSEWHERE, "rules", float(len(other)), why)


def without_metadata(results: Results) -> Iterator[Verdict]:
    """FlashAttention-3 whose scheduler metadata is not made ahead, as 5.1 tells of it."""
    text = "512 keys without scheduler metadata ahead: patched over standard, mean"
    claims = (
        Claim(f"{text}, at least", "heuristic", "5.1", ">=", 0.99, figure="1.00 to 1.05"),
        Claim(f"{text}, at most", "heuristic", "5.1", "<=", 1.05, figure="1.00 to 1.05"),
    )
    found = [(ratio(r, "standard", "patched"), r) for r in results.of("no metadata", FA3)]
    pairs = [(x, times(r)) for x, r in found if x is not None]
    if not pairs:
        yield from not_run(claims, FA3, missing("no metadata", FA3))
        return
    shown = "; ".join(f"{us['standard']:.2f} and {us['patched']:.2f} us" for _, us in pairs)
    for claim in claims:
        yield judge(claim, FA3, mean(x for x, _ in pairs), shown)
