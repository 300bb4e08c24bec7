"""The timing of the lab on the GPU."""

from __future__ import annotations

import gc

import torch

import splitkv
from splitkv.lab.harness.cases import Inputs
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Prepared, Protocol, Variant, measure
from splitkv.lab.harness.variants import our_variants
from splitkv.planner import registry

PROTOCOL = Protocol("back-to-back", rounds=5, calls=8, flush=True)


def test_a_graph_reads_what_was_made_ahead_of_it_to_the_end() -> None:
    """As the schedule of a library: nobody else holds it once the graph is captured."""
    others: list[torch.Tensor] = []

    def ahead(inputs: Inputs) -> Prepared:
        made = splitkv.decode(**inputs.arguments(0))
        return Prepared(lambda i: made + 0)

    def other(inputs: Inputs) -> Prepared:
        gc.collect()
        others.extend(torch.full_like(inputs.x, float("nan")) for _ in range(64))
        return Prepared(lambda i: splitkv.decode(**inputs.arguments(i)))

    variants = [Variant("ahead", "made", ahead), Variant("other", "decode", other)]
    rows = list(measure(CASES["mqa8_b1_512"], variants, PROTOCOL))
    assert [row["reasons"] for row in rows] == [[], []]


def test_ours_has_a_time_and_says_with_which_plan() -> None:
    (row,) = measure(CASES["mqa8_b1_512_page16"], our_variants(), PROTOCOL)
    assert not row["reasons"] and row["repeats"] and row["us"] > 0
    assert row["plan"]["kernel"] in [kernel.name for kernel in registry.KERNELS]
