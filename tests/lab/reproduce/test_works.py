"""What `splitkv reproduce` times."""

from __future__ import annotations

from splitkv.lab.harness.work import DEFAULT
from splitkv.lab.reproduce import tables, works


def test_the_rules_are_those_of_the_source() -> None:
    def splits(keys: int, kv_heads: int, batch: int = 1) -> list[int]:
        p = works.mqa(keys, kv_heads, batch).problem
        return [works.splits_by(rule, p, 132) for rule in works.RULES]

    assert splits(384, 1) == [1, 1, 3, 1, 3]
    assert splits(512, 1) == [1, 3, 4, 3, 3]
    assert splits(512, 2) == [1, 3, 4, 3, 3]
    assert splits(512, 8) == [1, 1, 4, 3, 1]
    assert splits(128, 1) == [1, 1, 1, 1, 1]
    assert len(set(splits(640, 1))) == len(set(splits(4096, 8))) == 1


def test_the_matrix_has_160_configurations_of_which_three_differ() -> None:
    matrix = [w for w in works.works(False, 132) if w.step == "matrix"]
    assert len(matrix) == 160
    differ = {w.case.name for w in matrix if w.ways[0].splits != w.ways[1].splits}
    assert differ == {works.mqa(512, h, b).name for h, b in ((1, 1), (2, 1), (1, 2))}
    quick = [w for w in works.works(True, 132) if w.step == "matrix"]
    assert differ < {w.case.name for w in quick} and len(quick) < 40
    assert all(DEFAULT in w.ways for w in matrix)


def test_every_step_has_works_and_names_are_once_in_a_step() -> None:
    for quick in (True, False):
        listed = [(w.step, w.case.name) for w in works.works(quick, 132)]
        assert len(set(listed)) == len(listed)
        assert {step for step, _ in listed} == set(tables.STEPS) == set(tables.TABLES)


def test_the_first_shapes_have_one_of_every_step_and_those_that_claims_need() -> None:
    for quick in (True, False):
        listed = works.works(quick, 132)
        turns = works.in_turns(listed)
        assert sorted(map(repr, turns)) == sorted(map(repr, listed))
        first = turns[: len(tables.STEPS)]
        assert {w.step for w in first} == set(tables.STEPS)
        assert works.MQA_16 in {w.case.name for w in first}
        early = {(w.step, w.case.name) for w in turns[: 2 * len(tables.STEPS)]}
        for kv_heads in (1, 2):
            assert ("table 1", works.mqa(512, kv_heads).name) in early
