"""Every claim of every source, and ours, against the results of a run.

A claim is a value, a bound and a relation. It is `NOT RUN` where results are missing, with what is
missing; else `PASS` or `FAIL`, with the figures that decide. The bounds are the sources' own
figures, taken on their GPUs (H100, L4): a FAIL says that they do not hold here, and what else was
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from splitkv.lab.harness.lines import Record
from splitkv.lab.harness.records import FA3, OURS
from splitkv.lab.reproduce.claims import dispatch, heuristic, int8, own, paged, quality, sink
from splitkv.lab.reproduce.claims.failures import explained
from splitkv.lab.reproduce.claims.verdict import Verdict
from splitkv.lab.reproduce.results import Results

OF_A_BACKEND: tuple[Callable[[Results, str], Iterator[Verdict]], ...] = (
    *(heuristic.speed_up_at_512, heuristic.no_regression, heuristic.plateau),
    *(paged.gaps, paged.ways_of_shapes, paged.page_sizes),
    int8.packing,
    own.right_and_repeatable,
)
OF_ALL: tuple[Callable[[Results], Iterator[Verdict]], ...] = (
    *(heuristic.unchanged_elsewhere, heuristic.without_metadata),
    *(sink.sink_gradient, sink.over_flash_attention_2, sink.linear, sink.crossover),
    *(sink.unified, sink.training),
    *(dispatch.rule_of_new_tokens, dispatch.traced, dispatch.combine),
    paged.rules,
    *(int8.prefill_rates, int8.halfway, int8.end_to_end),
    *(own.ours_against_the_rules, own.decode_step, quality.quality),
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
    return explained(found, results)
