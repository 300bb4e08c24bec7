"""Batches whose lengths differ: what is drawn, and what each stands beside."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from splitkv.core.kv import AS_IS, Contiguous, Paged
from splitkv.lab.harness import mixes, peers, suites
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.mixes import DISTRIBUTIONS, SHAPES, Shape, lengths_of

CASES = {case.name: case for case in suites.SUITES["mixes"]}
MIXED = [case for case in CASES.values() if case.lengths is not None]


def test_every_shape_and_distribution_is_there_in_each_place_and_type() -> None:
    assert len(CASES) == 2 * len(MIXED) == 2 * 4 * (len(SHAPES) * len(DISTRIBUTIONS) + mixes.DRAWN)
    plain = [c for c in MIXED if c.place == "contiguous" and c.problem.codec == AS_IS]
    fixed = [c for c in plain if not c.name.startswith("mix")]
    told = {(c.problem.batch, c.problem.seqlen_k, c.name.split("_d", 1)[1]) for c in fixed}
    assert told == {
        (shape.batch, shape.longest, f"{shape.head_dim}_{name}")
        for shape, name in product(SHAPES, DISTRIBUTIONS)
    }
    for case in plain:
        for ending, place, codec in (("_page16", Paged(16), "none"), ("_fp8", Contiguous(), "fp8")):
            other = CASES[f"{case.name}{ending}"]
            assert other.lengths == case.lengths and other.problem.place == place
            assert (other.problem.codec.name == "fp8") == (codec == "fp8")
        assert CASES[f"{case.name}_fp8_page16"].kv_bytes < case.kv_bytes


def test_a_mix_stands_beside_as_many_bytes_in_equal_lengths() -> None:
    for case in MIXED:
        equal = CASES[str(case.beside)]
        assert equal.lengths is None and equal.kv_bytes == case.kv_bytes
        assert case.lengths is not None and len(case.lengths) == case.problem.batch
        assert max(case.lengths) == case.problem.seqlen_k and min(case.lengths) >= 1
        same = replace(case.problem, seqlen_k=equal.problem.seqlen_k)
        assert same == equal.problem


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_lengths_are_those_of_their_distribution(name: str) -> None:
    for shape in (SHAPES[0], SHAPES[3], Shape(2, 512, 8, 1, 64), Shape(7, 600, 8, 1, 64)):
        found = lengths_of(shape, DISTRIBUTIONS[name], 3)
        assert sum(found) % shape.batch == 0 and len(found) == shape.batch
        assert found == lengths_of(shape, DISTRIBUTIONS[name], 3)
        assert max(found) == shape.longest and min(found) >= 1
    found = sorted(lengths_of(SHAPES[0], DISTRIBUTIONS[name], 3))
    middle = found[len(found) // 2]
    low, high = {
        **{"lognormal": (600, 2400), "uniform": (5000, 11000)},
        **{"bimodal": (300, 430), "one_long": (400, 400)},
    }[name]
    assert low <= middle <= high
    if name == "bimodal":
        assert found.count(16000) == 7 and found[-8] > 15900  # a multiple of the batch in all


def test_another_seed_draws_other_batches_and_its_name_is_enough() -> None:
    of_seven = suites.select([], suite="mixes", seed=7)
    assert suites.select([], suite="mixes") == list(CASES.values())
    both = {case.name for case in of_seven} & CASES.keys()
    assert len(both) == 2 * 4 * len(SHAPES) * len(DISTRIBUTIONS)
    assert {case for case in of_seven if case.name in both} <= set(CASES.values())
    new = [case for case in of_seven if case.name not in both]
    assert len({case.problem.batch for case in new}) > 10
    assert suites.case_named(new[-1].name) == new[-1]
    assert suites.case_named("mqa8_b1_512").problem.seqlen_k == 512
    with pytest.raises(KeyError):
        suites.case_named("mqa8_b1_9")
    with pytest.raises(ValueError, match="^seed: expected None with a suite of which nothing is"):
        suites.select([], suite="records", seed=0)


def test_flash_attention_3_takes_every_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda module: True)
    (fa3,) = peers.PEERS["fa3"].variants
    assert fa3.kernel == "metadata ahead"
    assert all(fa3.unsupported(case) == [] for case in CASES.values())


def test_a_small_mix_is_a_call_of_decode() -> None:
    shape = Shape(3, 40, 4, 2, 16)
    lengths = lengths_of(shape, DISTRIBUTIONS["uniform"], 0)
    cases: list[Case] = []
    for place in mixes.PLACES:
        cases += mixes.pair("small", shape, lengths, place, AS_IS)
    for case in cases:
        given = Inputs(case, 1, device="cpu").arguments(0)
        assert given["cache_seqlens"].tolist() == list(case.lengths or [sum(lengths) // 3] * 3)
