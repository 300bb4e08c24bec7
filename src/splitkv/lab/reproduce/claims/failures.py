"""Checks made where a source's claim fails here: its GPU beside this one, and what else the results
tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from splitkv.lab.harness.suites import CASES
from splitkv.lab.reproduce.claims import heuristic, paged
from splitkv.lab.reproduce.claims.verdict import FAIL, SOURCES, Verdict
from splitkv.lab.reproduce.results import Results, ratio, splits_of, times
from splitkv.lab.reproduce.works import PACKED_AS, mqa
from splitkv.planner.policies.paged_attention_v2 import CONSERVATIVE

GPUS = {  # where each source's figures are from
    "heuristic": "an H100",
    "sink": "no GPU that it names",
    "dispatch": "no GPU that it names",
    "paged": "an L4 with 58 SMs",
    "int8": "an H100 SXM5 with CUDA 12.4",
}
TABLE_1_AT_512 = {1: (13.72, 11.37), 2: (13.52, 10.93)}  # KV heads -> us, standard and patched
SHOWN = (2, 3, 4, 8, 16, 64)  # splits
INERT = 0.03  # by which two times may differ where an option changes nothing


def explained(verdicts: list[Verdict], results: Results) -> list[Verdict]:
    """The verdicts, those that failed with what was looked at."""
    return [
        replace(v, checked="; ".join(checked(v, results))) if v.verdict == FAIL else v
        for v in verdicts
    ]


def checked(v: Verdict, results: Results) -> Iterator[str]:
    """Findings of the results beside a claim that failed, one clause each."""
    source = next(key for key, name in SOURCES.items() if name == v.source)
    if source in GPUS:
        yield f"the source's figure is of {GPUS[source]}, this of {results.where}"
    for begins, look in LOOKS.items():
        if v.text.startswith(begins):
            yield from look(v, results)


def times_at_512(v: Verdict, results: Results) -> Iterator[str]:
    """The source's own times, and the most that any number of splits gains here."""
    for kv_heads, own in TABLE_1_AT_512.items():
        if f" {kv_heads} KV head" in v.text:
            yield f"there {own[0]} us in 1 split and {own[1]} in 3"
            name = mqa(512, kv_heads).name
            default = results.us("table 1", v.backend, name, "default")
            if default is not None:
                yield f"by the library's own choice {default:.2f} us here"
    yield from sweep(v, results)


def sweep(v: Verdict, results: Results) -> Iterator[str]:
    """How the time goes on falling over the numbers of splits."""
    for r in results.of("splits", v.backend):
        us = {splits_of(r, way): t for way, t in times(r).items() if way != "default"}
        if 1 in us:
            best = min(us, key=lambda splits: us[splits])
            gain = us[1] / us[best]
            yield f"of all {len(us)} numbers of splits {best} gains the most, {gain:.3f}"
            shown = [f"{splits}: {us[splits]:.2f}" for splits in SHOWN if splits in us]
            yield f"us by splits {', '.join(shown)}"


def chance(v: Verdict, results: Results) -> Iterator[str]:
    """The difference between two rules that launch the same."""
    alike, differ = list[float](), list[float]()
    for r in results.of("matrix", v.backend):
        found = ratio(r, "standard", "patched")
        if found is not None:
            same = splits_of(r, "standard") == splits_of(r, "patched")
            (alike if same else differ).append(found)
    if alike:
        low, high = min(alike), max(alike)
        yield f"one graph in turns of its own differs from itself by {low:.3f} to {high:.3f}"
    if differ:
        yield f"where the rules differ the least is {min(differ):.3f}"


def packing_flag(v: Verdict, results: Results) -> Iterator[str]:
    """Whether the packing flag changes anything in the build that was timed."""
    found = list[float]()
    for step in PACKED_AS.values():
        for r in results.of(step, v.backend):
            us = times(r)
            for apart, packed in (("neither", "packed"), ("split", "both")):
                if apart in us and packed in us:
                    found.append(us[apart] / us[packed])
    if not found:
        return
    low, high = min(found), max(found)
    yield f"unpacked over packed {low:.3f} to {high:.3f} in {len(found)} pairs"
    if low >= 1 - INERT and high <= 1 + INERT:
        yield "so the flag changes nothing in this build: it packs either way"


def wrong_picks(v: Verdict, results: Results) -> Iterator[str]:
    """How far apart the two ways are where the rule picks the slower one."""
    right = paged.right_of(results, CONSERVATIVE)
    for r in results.of("ten shapes", v.backend):
        if right.get(r["case"]) is False:
            us = times(r)
            one, many = us["one pass"], us["partitions"]
            p = CASES[r["case"]].problem
            programs = p.batch * p.num_kv_heads
            yield f"{programs} programs of {results.num_sms} SMs: {one:.1f} and {many:.1f} us"


def programs(v: Verdict, results: Results) -> Iterator[str]:
    """How many programs one pass has, for as many SMs."""
    shape = v.text.split(":")[0]
    case = CASES.get(paged.case_named(shape))
    if case is not None:
        count = case.problem.batch * case.problem.num_kv_heads
        yield f"one pass has {count} programs, for 58 SMs there and {results.num_sms} here"


def without_and_with(v: Verdict, results: Results) -> Iterator[str]:
    """The difference between the rules with the metadata made ahead."""
    for kv_heads in heuristic.SPEED_UPS:
        r = results.works.get(("table 1", v.backend, mqa(512, kv_heads).name))
        found = None if r is None else ratio(r, "standard", "patched")
        if found is not None:
            yield f"with metadata ahead and {kv_heads} KV heads {found:.3f}"


def clocks_and_peak(v: Verdict, results: Results) -> Iterator[str]:
    """The matrix peak in the same rounds, and the clocks."""
    wanted = [r for r in results.whole("forward", v.backend).values() if r.get("peak_tflops")]
    if wanted:
        peaks = [r["peak_tflops"] for r in wanted]
        yield f"the matrix peak in the same rounds was {min(peaks):.0f} to {max(peaks):.0f} TFLOP/s"
    told = [r["clocks"]["sm_mhz"] for r in wanted if r.get("clocks")]
    if told:
        yield f"SM clock {min(told)} to {max(told)} MHz"


Look = Callable[[Verdict, Results], Iterator[str]]
LOOKS: Mapping[str, Look] = {  # how a claim's text begins -> what is looked at
    "512 keys, 1 KV head: patched": times_at_512,
    "512 keys, 2 KV heads: patched": times_at_512,
    "512 keys without scheduler metadata": without_and_with,
    "1 split over 3": sweep,
    "3 splits over the best": sweep,
    heuristic.NO_REGRESSION.text: chance,
    "packing, ": packing_flag,
    paged.PICKS.text: wrong_picks,
    **{f"{shape}: ": programs for shape in paged.NAMED},
    "prefill in ": clocks_and_peak,
}
