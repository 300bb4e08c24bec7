"""The arithmetic of timing and what has no time, without a GPU."""

from __future__ import annotations

import functools
import itertools
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from results import FLOOR, MACHINE
from small_cases import small

import splitkv
from splitkv.core.device import DEFAULT_BANDWIDTH, GPUS
from splitkv.lab.bench import decode as bench
from splitkv.lab.harness import peers, timing
from splitkv.lab.harness.cases import Inputs
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Prepared, Protocol, Timing, Variant
from splitkv.lab.harness.variants import our_variants


def test_rotation_reads_twice_the_l2_between_two_reads_of_a_buffer() -> None:
    l2 = GPUS["h200"].l2_bytes
    for num_bytes in (1 << 18, 1 << 24, 2 * l2, 1 << 30):
        count = timing.rotation(num_bytes, l2)
        assert (count - 1) * num_bytes >= 2 * l2 > (count - 2) * num_bytes
        assert timing.rotation(num_bytes, l2, warm=True) == 1


def test_replays_take_turns_and_another_one_is_first_in_each_round() -> None:
    order: list[str] = []
    clock = iter(range(100))

    def replay(name: str) -> float:
        order.append(name)
        return float(next(clock))

    names = ("writer", "a", "b")
    samples = timing.interleave({n: functools.partial(replay, n) for n in names}, rounds=4)
    assert "".join(name[0] for name in order) == "wababwbwawab"
    assert samples == {"writer": [0, 5, 7, 9], "a": [1, 3, 8, 10], "b": [2, 4, 6, 11]}


def test_the_baseline_is_subtracted_round_by_round() -> None:
    drift = [0.0, 5.0, 1.0, 9.0, 3.0]
    plain = timing.summarize([10 + d for d in drift], [2 + d for d in drift])
    assert plain == Timing(8.0, 0.0)
    assert timing.summarize([1.0, 2.0, 3.0, 4.0, 50.0]).us == 3.0
    assert timing.summarize([1.0, 2.0, 3.0, 4.0, 5.0]).spread_us == 3.0


def test_repeats_have_a_median_each_and_the_time_is_the_median_of_these() -> None:
    samples = [1.0, 2.0, 9.0, 4.0, 5.0, 6.0, 30.0, 7.0, 8.0]
    found = timing.summarize(samples, repeats=3)
    assert found.repeats_us == (2.0, 5.0, 8.0) and found.us == 5.0
    assert timing.summarize(samples).repeats_us == ()
    assert found.as_row() == {"us": 5.0, "spread_us": 5.5, "repeats_us": [2.0, 5.0, 8.0]}


def test_a_flush_takes_the_place_of_buffers() -> None:
    l2 = GPUS["h200"].l2_bytes
    flushing, rotating = Protocol(calls=16, flush=True), Protocol(calls=16)
    assert (flushing.buffers(1 << 18, l2), rotating.buffers(1 << 18, l2)) == (16, 481)
    assert flushing.buffers(1 << 30, l2) == rotating.buffers(1 << 30, l2) == 2
    with pytest.raises(ValueError, match="^flush: expected False with warm, got True$"):
        Protocol(warm=True, flush=True)


def test_a_stopwatch_flushes_before_its_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    properties = SimpleNamespace(L2_cache_size=1 << 12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(timing, "Replay", lambda body, **options: made.append(options))
    x, q = torch.zeros(4), torch.zeros(2, 4)
    timing.Stopwatch(Protocol("back-to-back", calls=8, flush=True), x, q).capture(lambda i: None)
    timing.Stopwatch(Protocol("back-to-back"), x, q).capture(lambda i: None)
    flushing, rotating = made
    flushing.pop("before")()
    assert flushing == {"buffers": 2, "calls": 8}
    assert rotating == {"buffers": 2, "calls": timing.CALLS}


class FakeReplay:
    """Runs a body, and takes as many microseconds as it has been asked times."""

    def __init__(self, body: timing.Body, buffers: int, **options: Any) -> None:
        self.body, self.result, self.us = body, body(0), 0.0

    def __call__(self) -> float:
        self.result.copy_(self.body(0))
        self.us += 1.0
        return self.us


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(L2_cache_size=1 << 12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "Inputs", functools.partial(Inputs, device="cpu"))
    monkeypatch.setattr(timing, "Replay", FakeReplay)
    monkeypatch.setattr(timing, "clocks", lambda: {"sm_mhz": 1980, "memory_mhz": 3201})


@pytest.mark.usefixtures("fake_gpu")
def test_only_a_right_answer_is_timed() -> None:
    def wrong(inputs: Inputs) -> Prepared:
        return Prepared(lambda i: 1.1 * splitkv.decode(**inputs.arguments(i)))

    def absent(inputs: Inputs) -> Prepared:
        raise ImportError("no such module\nat all")

    def unsteady(inputs: Inputs) -> Prepared:
        last = itertools.count()

        def call(i: int) -> torch.Tensor:
            out = splitkv.decode(**inputs.arguments(i))
            out.view(-1)[out.abs().argmin()] = next(last) * 1e-4
            return out

        return Prepared(call)

    variants = [
        *our_variants(),
        *our_variants(["fixed"]),
        Variant("wrong", "x", wrong),
        Variant("unsteady", "x", unsteady),
        Variant("absent", "x", absent),
        Variant("never", "x", absent, lambda case: ["batch 3: expected 1"]),
    ]
    protocol = Protocol("back-to-back", rounds=5)
    rows = {row["library"]: row for row in timing.measure(small(), variants, protocol)}
    assert list(rows) == ["never", "wrong", "absent", "splitkv", "splitkv (fixed)", "unsteady"]
    assert (rows["splitkv"]["repeats"], rows["unsteady"]["repeats"]) == (True, False)
    assert rows["never"]["reasons"] == ["batch 3: expected 1"]
    assert rows["absent"]["reasons"] == ["ImportError: no such module"]
    assert rows["wrong"]["reasons"][0].startswith("AssertionError: out: expected an error of")
    for name in ("wrong", "absent", "never"):
        assert rows[name]["us"] is None
    ours = rows["splitkv"]
    assert ours["us"] == 4.0 and not ours["reasons"] and 0 < ours["err"] < 0.01
    assert (
        ours["plan"]["policy"] == "tuned" and rows["splitkv (fixed)"]["plan"]["policy"] == "fixed"
    )
    json.dumps(rows)


@pytest.mark.usefixtures("fake_gpu")
def test_a_graph_that_stops_computing_has_no_time() -> None:
    """As one whose memory was given to others, so that its kernels find nothing to do."""

    def stops(inputs: Inputs) -> Prepared:
        turns = itertools.count()

        def call(i: int) -> torch.Tensor:
            out = splitkv.decode(**inputs.arguments(i))
            return out if next(turns) < 4 else torch.full_like(out, float("nan"))

        return Prepared(call)

    variants = [*our_variants(), Variant("stops", "x", stops)]
    rows = list(timing.measure(small(), variants, Protocol("back-to-back", rounds=5)))
    assert [row["us"] for row in rows] == [4.0, None]
    assert rows[1]["err"] < 0.01, "it was right before its rounds"
    assert rows[1]["reasons"][0].startswith("after its rounds: AssertionError: out: ")


@pytest.mark.usefixtures("fake_gpu")
def test_variants_that_launch_the_same_share_a_graph_and_take_turns_of_their_own() -> None:
    prepared: list[str] = []

    def variant(name: str, alike: str | None) -> Variant:
        def prepare(inputs: Inputs) -> Prepared:
            prepared.append(name)
            return Prepared(lambda i: splitkv.decode(**inputs.arguments(i)))

        return Variant("x", name, prepare, alike=alike)

    variants = [variant(*pair) for pair in (("a", "1"), ("b", "1"), ("c", "2"), ("d", None))]
    protocol = Protocol("back-to-back", rounds=2, repeats=3)
    rows = list(timing.measure(small(), variants, protocol))
    assert prepared == ["a", "c", "d"] and [row["kernel"] for row in rows] == [*"abcd"]
    a, b, c, d = rows
    # the graph of a and b was replayed twice as often, in turns
    assert (a["us"], b["us"]) == (7.0, 8.0) and c["us"] == d["us"] == 4.5
    assert all(len(row["repeats_us"]) == 3 and row["repeats"] for row in rows)
    json.dumps(rows)


@pytest.mark.usefixtures("fake_gpu")
def test_a_time_below_that_of_the_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(GPUS["h200"], bandwidth=1e9)  # 18 us for the bytes of `small`
    monkeypatch.setattr(timing, "current", lambda: slow)
    (row,) = timing.measure(small(), our_variants(), Protocol("back-to-back", rounds=5))
    assert row["us"] is None
    assert row["reasons"] == [
        "time: expected at least 18.43 us for 18432 bytes at 1 GB/s, got 4.00"
    ]
    case, h200 = CASES["seed003_llama7b-B1-ctx4k_page16"], GPUS["h200"]
    said = timing.too_fast(case, 3.27, Protocol(), h200)
    assert said == "time: expected at least 13.98 us for 67108864 bytes at 4800 GB/s, got 3.27"
    assert timing.too_fast(case, 14.0, Protocol(), h200) is None
    assert timing.too_fast(case, 3.27, Protocol(warm=True), h200) is None
    unknown = replace(h200, bandwidth=DEFAULT_BANDWIDTH)
    assert timing.too_fast(case, 3.27, Protocol(), unknown) is None


def test_a_replay_holds_what_its_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = MagicMock()
    monkeypatch.setattr(timing.torch, "cuda", fakes)
    memory = torch.zeros(1)
    held = weakref.ref(memory)
    replay = timing.Replay(functools.partial(torch.add, memory), buffers=2, calls=4)
    del memory
    assert held() is not None and replay.calls == 4
    fakes.reset_mock()
    del replay
    assert held() is None


@pytest.mark.usefixtures("fake_gpu")
def test_without_memory_every_variant_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any) -> Inputs:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(timing, "Inputs", too_much)
    (row,) = timing.measure(small(), our_variants(), Protocol())
    assert row["reasons"] == ["OutOfMemoryError: tried to allocate"]


def reasons(name: str, case: str) -> list[list[str]]:
    return [variant.unsupported(CASES[case]) for variant in peers.PEERS[name].variants]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "current", lambda: GPUS["h200"])
    monkeypatch.setattr(bench, "facts", lambda: MACHINE)
    monkeypatch.setattr(bench.Floors, "__call__", lambda self, num_bytes: FLOOR)
