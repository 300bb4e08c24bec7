"""What a run of `splitkv reproduce` does, in which order, and how long it is to take."""

from __future__ import annotations

from itertools import groupby

from reproducing import H200

from splitkv.lab.reproduce import agenda, works


def test_what_claims_hang_on_comes_first_on_every_library() -> None:
    items = list(agenda.agenda(False, H200))
    parts = [part for part, _ in groupby(items, key=lambda item: item.part)]
    tier = ["torch", "fa3", "splitkv", "prefill", "backward"]
    assert parts == ["beside", *tier, *tier, "beside"]
    quick = list(agenda.agenda(True, H200))
    assert items[: len(quick)] == quick, "a quick run is the beginning of a whole one"
    first = {(item.part, item.step, item.name) for item in quick}
    for kv_heads in (1, 2):
        for part in ("fa3", "splitkv"):
            assert (part, "table 1", works.mqa(512, kv_heads).name) in first
    assert [item.step for item in items if item.part == "beside"] == [*agenda.BESIDE]


def test_every_work_and_case_is_once_in_it() -> None:
    items = list(agenda.agenda(False, H200))
    names = [(item.part, item.step, item.name) for item in items]
    assert len(set(names)) == len(names)
    for part in ("splitkv", "fa3", "torch"):
        wanted = [w for w in works.works(False, 132) if works.takes(part, w.step)]
        assert sorted(map(repr, wanted)) == sorted(
            repr(item.what) for item in items if item.part == part
        )
    for command, count in (("prefill", 48), ("backward", 16)):
        cases = [item for item in items if item.part == command]
        assert len(cases) == count
        assert all(agenda.sequence_case(command, item.name) == item.what for item in cases)
    alone = {item.part for item in agenda.agenda(False, H200, backends=["fa3"], sequences=False)}
    assert alone == {"fa3"}


def test_the_estimate_counts_launches_and_bytes() -> None:
    few, many = (
        agenda.of_work(works.by_rules("x", works.mqa(keys, 32, 8), 132, ["standard"]), H200)
        for keys in (128, 8192)
    )
    assert few < many
    sweep = agenda.of_work(works.split_sweep(), H200)
    assert sweep > 20 * agenda.OF_A_GRAPH + few
    short, long = (
        agenda.of_sequence("prefill", agenda.sequence_case("prefill", f"mqa16_b{b}_{t}_full"))
        for b, t in ((32, 1024), (1, 32768))
    )
    assert short < long < 60
    assert 60 < agenda.total(agenda.agenda(False, H200)) < 400
