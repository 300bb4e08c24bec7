"""The named cases of decode: what they are, and what each stands beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitkv.core.kv import Contiguous, Paged
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import CASES, SUITES, select


def test_the_records_are_two_places_of_seventeen_problems() -> None:
    cases = {case.name: case for case in SUITES["records"]}
    assert len(cases) == 34
    for case in cases.values():
        twin = cases.get(f"{case.name}_page16")
        assert case.problem.place == (Paged(16) if case.name.endswith("_page16") else Contiguous())
        assert (twin is not None) == (case.place == "contiguous")
        assert case.problem.lengths == "device"
    assert cases["mqa8_b1_512"].kv_bytes == 262144
    largest = cases["gqa32x8_b8_32768_page16"].problem
    assert (largest.num_heads, largest.num_kv_heads, largest.head_dim) == (32, 8, 128)
    assert largest.kv_bytes == 1073741824 == max(c.kv_bytes for c in cases.values())


def test_a_name_is_one_problem_and_what_it_stands_beside_is_in_its_suite() -> None:
    problems: dict[str, tuple[Any, ...]] = {}
    for cases in SUITES.values():
        names = {case.name for case in cases}
        assert len(names) == len(cases)
        for case in cases:
            what = case.problem, case.lengths
            assert problems.setdefault(case.name, what) == what
            assert case.beside is None or case.beside in names - {case.name}
    assert CASES.keys() == problems.keys()


def besides(suite: str) -> list[tuple[Case, Case]]:
    return [(case, CASES[case.beside]) for case in SUITES[suite] if case.beside]


def test_pages_stand_beside_the_contiguous_cache() -> None:
    sizes = [case.problem.place.page_size for case, _ in besides("pages")]
    assert sizes == [1, 16, 64, 128, 256] * 5
    for case, contiguous in besides("pages"):
        assert replace(case.problem, place=Contiguous()) == contiguous.problem
        assert case.kv_bytes >= 134e6


def test_mixed_lengths_stand_beside_as_many_bytes_in_equal_lengths() -> None:
    pairs = besides("mixed")
    assert {(mixed.place, mixed.problem.num_kv_heads) for mixed, _ in pairs} == {
        *(("contiguous", 1), ("contiguous", 8), ("page16", 1), ("page16", 8))
    }
    for mixed, equal in pairs:
        assert mixed.kv_bytes == equal.kv_bytes and equal.lengths is None
        assert mixed.lengths is not None and len(mixed.lengths) == mixed.problem.batch == 64
        assert max(mixed.lengths) == mixed.problem.seqlen_k == 131072
        assert sorted(mixed.lengths)[-2] < 32768
        assert 1900 < sorted(mixed.lengths)[31] < 2200


def test_query_tokens_and_sinks_stand_beside_the_same_without() -> None:
    for case, one in besides("tokens"):
        assert replace(case.problem, seqlen_q=1) == one.problem
        assert case.problem.seqlen_q in (4, 16) and case.kv_bytes >= 67e6
    masks = set()
    for sink, without in besides("gpt_oss"):
        assert sink.problem.sink_logits
        assert replace(sink.problem, sink_logits=False) == without.problem
        masks.add(sink.problem.visible_keys == 128)
    assert masks == {True, False}


def test_the_tables_of_the_seeds_are_cases() -> None:
    shapes = {(c.problem.seqlen_k, c.problem.num_kv_heads) for c in SUITES["seed000"]}
    assert shapes == {(k, h) for k in (128, 256, 384, 512, 2048, 4096) for h in (1, 2, 8)}
    ten = CASES["seed003_mqa-B16-ctx4k_page16"].problem
    assert (ten.batch, ten.num_heads, ten.num_kv_heads, ten.seqlen_k) == (16, 32, 1, 4096)
    assert (ten.dtype, ten.place, len(SUITES["seed003"])) == ("float16", Paged(16), 10)
    packing = [case.problem for case in SUITES["seed004"]]
    assert {(p.num_heads, p.num_kv_heads, p.seqlen_q, p.kv_bytes) for p in packing} == {
        (16, 1, 3, 1 << 27)
    }
    assert [p.seqlen_k for p in packing] == [1024 << i for i in range(8)]


def test_select_takes_globs_with_and_without_the_place() -> None:
    assert [c.name for c in select(["mqa8_b1_512"])] == ["mqa8_b1_512", "mqa8_b1_512_page16"]
    assert [c.name for c in select(["*_512_page16"])] == [
        "mqa8_b1_512_page16",
        "gqa32x8_b1_512_page16",
    ]
    assert {c.place for c in select([], "page16")} == {"page16"}
    assert len(select([])) == 34
    assert [c.name for c in select(["*_b64_mixed"], "page16", "mixed")] == [
        "mqa8_b64_mixed_page16",
        "gqa32x8_b64_mixed_page16",
    ]
    with pytest.raises(ValueError, match=r"^suite: expected 'records', .*'seed004_int8', got 'x'$"):
        select([], suite="x")
