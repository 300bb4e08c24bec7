"""Benchmarks of whole sequences without a GPU: cases, flops, what is checked, turns, peers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import CODECS
from compiling import AnyGPU
from torch import Tensor
from triton.runtime.driver import driver

import splitkv
from splitkv import reference
from splitkv.core.kv import AS_IS, Codec, Paged, Ragged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.lab.bench.sequences import check, peers, suites, timing
from splitkv.lab.bench.sequences import run as bench
from splitkv.lab.bench.sequences.suites import CASES, SUITES, select
from splitkv.lab.bench.sequences.timing import Burst, Here, Pace, Prepared, Sample, measure
from splitkv.lab.harness import peers as decode_peers
from splitkv.lab.harness import process
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.sequence_cases import Inputs, blank, direction, flops, pairs
from splitkv.lab.harness.timing import Variant
from splitkv.testing import STORED

SMALL = Problem("dense", 2, 4, 2, 16, 16, 40, 40, mask=Mask(causal=True))
MASKS = (Mask(), Mask(True), Mask(True, 9, -1, 3), Mask(False, 7, 4, 2), Mask(True, 5))
LENGTHS = (40, 7, 23)


def small(packed: bool = False, **more: Any) -> Case:
    problem = replace(SMALL, **more)
    if not packed:
        return Case("small", problem)
    problem = replace(problem, kind="varlen", batch=3, place=Ragged(), lengths="device")
    return Case("small", problem, LENGTHS)


def chunk(page_size: int) -> Case:
    more: dict[str, Any] = {"seqlen_q": 9, "lengths": "device", "place": Paged(page_size)}
    return Case("chunk", replace(SMALL, kind="varlen", **more))


# cases


def shapes(cases: tuple[Case, ...]) -> set[tuple[int, ...]]:
    found = [(c.problem.batch, c.problem.seqlen_k, c.problem.num_heads) for c in cases]
    return {(*f, c.problem.num_kv_heads) for f, c in zip(found, cases, strict=True)}


def test_the_records_are_the_shapes_of_the_tables() -> None:
    forward, backward = (SUITES[name]["records"] for name in ("prefill", "backward"))
    lengths = [(32 >> i, 1024 << i, 16, 1) for i in range(6)]
    assert shapes(forward) == {*lengths, (4, 8192, 32, 8), (1, 16384, 32, 8)}
    assert shapes(backward) == {(4, 4096, 32, 8), (1, 16384, 32, 8), (2, 8192, 16, 16)}
    assert (len(forward), len(backward)) == (16, 6)
    for case in (*forward, *backward):
        assert case.problem.head_dim == case.problem.head_dim_v == 128
        assert case.problem.mask == Mask(causal=case.name.endswith("_causal"))
        assert case.problem.needs_grad == (case in backward)


def test_a_name_is_one_problem_of_a_direction_and_beside_it_stands_one_of_its_suite() -> None:
    for by_name in SUITES.values():
        for cases in by_name.values():
            names = {case.name for case in cases}
            assert len(names) == len(cases)
            for case in cases:
                same = CASES[direction(case), case.name]
                assert (same.problem, same.lengths) == (case.problem, case.lengths)
                assert case.beside is None or case.beside in names - {case.name}
                p, suites = case.problem, SUITES["varlen"]
                of_chunk = cases in (suites["chunks"], suites["varlen_mixed"])
                assert p.seqlen_q == p.seqlen_k or of_chunk


def test_head_dimensions_and_windows() -> None:
    dims = SUITES["prefill"]["dims"]
    heads = {(c.problem.head_dim, c.problem.num_kv_heads, c.problem.mask.causal) for c in dims}
    assert len(heads) == len(dims) == 10
    both = {(c.problem.head_dim, c.problem.head_dim_v) for c in dims}
    assert both == {(64, 64), (256, 256), (192, 128)}
    assert shapes(dims) == {(4, 8192, 32, 8), (4, 8192, 16, 16)}
    windows = {case.name: case for case in SUITES["prefill"]["windows"]}
    long = windows["gqa32x8_b1_16384_window4096_sink_tokens4"]
    assert long.problem.mask == Mask(True, 4095, -1, 4)
    assert windows[str(long.beside)].problem == replace(long.problem, mask=Mask(True))
    narrow = [c for c in windows.values() if c.problem.mask.left == 127]
    assert [c.problem.seqlen_k for c in narrow] == [8192 << i for i in range(5)]
    each = [flops(c) / c.problem.seqlen_k for c in narrow]
    assert max(each) / min(each) < 1.01, "a window costs as many flops a token at any length"


def test_gpt_oss_stands_beside_itself_without_sink_logits() -> None:
    cases = {case.name: case for case in SUITES["backward"]["gpt_oss"]}
    sinks = [case for case in cases.values() if case.problem.sink_logits]
    assert len(sinks) == 6 and len(cases) == 12
    for case in sinks:
        without = cases[str(case.beside)]
        assert replace(without.problem, sink_logits=True) == case.problem
        p = case.problem
        assert (p.num_heads, p.num_kv_heads, p.head_dim, p.needs_grad) == (64, 8, 64, True)


def test_gradients_of_the_same_bits_stand_beside_those_without() -> None:
    cases = {case.name: case for case in SUITES["backward"]["deterministic"]}
    same_bits = [case for case in cases.values() if case.problem.deterministic]
    assert len(same_bits) == len(SUITES["backward"]["records"]) == len(cases) / 2
    for case in same_bits:
        assert replace(cases[str(case.beside)].problem, deterministic=True) == case.problem


def test_packed_sequences_stand_beside_as_many_flops_in_equal_lengths() -> None:
    lengths = suites.log_normal()
    assert len(lengths) == 64 and lengths != tuple(sorted(lengths))
    assert max(lengths) > 8192 and sorted(lengths)[31] < 1024
    for suite in (SUITES["varlen"][name] for name in ("forward", "backward")):
        packed = [case for case in suite if case.beside]
        assert [case.problem.num_kv_heads for case in packed] == [8, 16]
        for case in packed:
            equal = next(c for c in suite if c.name == case.beside)
            assert flops(case) == pytest.approx(flops(equal), rel=1e-3)
            assert case.problem.seqlen_q == max(lengths) and case.lengths == lengths


def test_chunks_in_pages_stand_beside_contiguous_keys() -> None:
    cases = {case.name: case for case in SUITES["varlen"]["chunks"]}
    paged = [case for case in cases.values() if case.beside]
    assert (len(paged), len(cases)) == (16, 20)
    for case in paged:
        dense = cases[str(case.beside)]
        assert flops(case) == flops(dense)
        assert case.problem.kind == "varlen" and case.problem.lengths == "device"
    assert {case.place for case in paged} == {"page16", "page64", "page128", "page256"}


def test_steps_of_an_engine_stand_beside_their_chunks_alone() -> None:
    cases = {case.name: case for case in SUITES["varlen"]["varlen_mixed"]}
    assert len(cases) == 36
    stored = [(case.problem.codec.name, case.problem.products) for case in cases.values()]
    assert {kind: stored.count(kind) for kind in stored} == {
        ("as_is", "widened"): 12,
        ("fp8", "widened"): 12,
        ("fp8", "full"): 12,
    }
    steps = [case for case in cases.values() if case.beside]
    assert {case.place for case in steps} == {"page16", "page64"}
    for case in steps:
        alone = cases[str(case.beside)]
        assert alone.problem.codec == case.problem.codec
        assert case.queries is not None and alone.queries is not None and case.lengths is not None
        assert sorted(case.queries)[-len(alone.queries) :] == sorted(alone.queries)
        singles = [keys for q, keys in zip(case.queries, case.lengths, strict=True) if q == 1]
        assert len(singles) == len(case.queries) - len(alone.queries) >= 62
        assert 1500 < sorted(singles)[len(singles) // 2] < 2600 and max(singles) <= 16384
        seen = flops(case) - flops(alone)
        assert seen == 4 * 32 * 128 * sum(singles), "every key is seen by a single token"
        assert case.problem.seqlen_q == max(case.queries)
        assert case.problem.seqlen_k == max(case.lengths)


def test_select_takes_globs_and_the_first_suite_of_a_command() -> None:
    assert select("prefill", None, []) == list(SUITES["prefill"]["records"])
    assert [c.name for c in select("backward", None, ["mha16*"])] == [
        "mha16_b2_8192_full",
        "mha16_b2_8192_causal",
    ]
    assert {direction(c) for c in select("varlen", "backward", [])} == {"backward"}


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_flops_are_those_of_visible_pairs(packed: bool, mask: Mask) -> None:
    case = small(packed, mask=mask)
    lengths = case.lengths or (40, 40)
    seen = sum(sum(map(sum, mask.materialize(n, n))) for n in lengths)
    assert pairs(case) == seen
    assert flops(case) == seen * 4 * (2 * 16 + 2 * 16)
    assert flops(small(packed, mask=mask, needs_grad=True)) == 2.5 * flops(case)


def test_a_causal_mask_is_half_the_flops() -> None:
    causal, full = (CASES["forward", f"mqa16_b1_32768_{m}"] for m in ("causal", "full"))
    assert flops(full) == 4 * 16 * 32768**2 * 128
    assert flops(causal) / flops(full) == pytest.approx(0.5, rel=1e-4)


# operands and what is checked

FEATURES: tuple[dict[str, Any], ...] = (
    *({"mask": mask} for mask in MASKS),
    {"mask": Mask(True, 9, -1, 3), "sink_logits": True},
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_inputs_are_the_public_call(
    features: dict[str, Any], needs_grad: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "STRIP", 16)
    case = small(packed, needs_grad=needs_grad, **features)
    inputs = Inputs(case, device="cpu")
    assert inputs.plan().problem == case.problem
    out = inputs.attend()
    grads = inputs.gradients(out) if needs_grad else ()
    errors = check.Reference(inputs, case).check(out, grads)
    sink = ["dsink_logits"] if case.problem.sink_logits else []
    assert list(errors) == (["out", "dq", "dk", "dv", *sink] if needs_grad else ["out"])
    assert all(0 < error < 0.1 for error in errors.values())


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chunks_are_the_public_call(page_size: int) -> None:
    case = chunk(page_size)
    inputs = Inputs(case, device="cpu")
    assert inputs.plan().problem == case.problem
    assert flops(case) == flops(small(seqlen_q=9))
    out = inputs.attend()
    assert 0 < check.Reference(inputs, case).check(out)["out"] < 0.1
    keys = next(inputs.sequences(inputs.k))
    assert keys.shape == (2, 40, 2, 16)
    assert inputs.table is not None
    last = inputs.k[inputs.table[1, 39 // page_size], 39 % page_size]
    torch.testing.assert_close(keys[1, 39], last)
    out[9, 0] += 1
    with pytest.raises(AssertionError, match="^out: expected an error of at most"):
        check.Reference(inputs, case).check(out)


@pytest.mark.parametrize("codec", [AS_IS, Codec("fp8", "tensor"), Codec("int8", "head")], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_mixed_step_is_the_public_call(page_size: int, codec: Codec) -> None:
    queries, lengths = (9, 1, 1), (40, 23, 5)
    p = replace(chunk(page_size).problem, batch=3)
    p = replace(p, codec=codec, products="widened" if codec == AS_IS else "full")
    case = Case("step", p, lengths, queries=queries)
    inputs = Inputs(case, device="cpu")
    assert inputs.plan().problem == p and inputs.q.shape == (11, 4, 16)
    assert inputs.lengths is not None and inputs.lengths.tolist() == list(lengths)
    out = inputs.attend()
    assert 0 < check.Reference(inputs, case).check(out)["out"] < 0.1
    assert [x.shape[1] for x in inputs.sequences(inputs.k)] == list(lengths)
    assert [x.shape[1] for x in inputs.sequences(inputs.q)] == list(queries)
    out[10, 0] += 1
    with pytest.raises(AssertionError, match="^out: expected an error of at most"):
        check.Reference(inputs, case).check(out)
    with pytest.raises(ValueError, match="^queries: expected None without pages"):
        Inputs(replace(small(packed=True), queries=(1, 1, 1)), device="cpu")
    with pytest.raises(ValueError, match="^lengths: expected as packed keys have, got None"):
        Inputs(replace(case, lengths=None), device="cpu")


def test_inputs_refuse_what_they_do_not_make() -> None:
    with pytest.raises(ValueError, match="^problem: expected dense or varlen without"):
        Inputs(small(return_lse=True), device="cpu")
    with pytest.raises(ValueError, match=r"^lengths: expected as packed keys have, got \(4,\)$"):
        Inputs(replace(small(), lengths=(4,)), device="cpu")
    case = chunk(16)
    case = replace(case, problem=replace(case.problem, needs_grad=True))
    with pytest.raises(ValueError, match="^problem: expected pages without scales of tokens or"):
        Inputs(case, device="cpu")


def test_blank_inputs_are_as_long_as_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = partial(Inputs, device="cpu")
    monkeypatch.setattr("splitkv.lab.harness.sequence_cases.Inputs", on_cpu)
    packed = blank(small(packed=True).problem)
    assert packed.cu_seqlens is not None and packed.cu_seqlens.tolist() == [0, 40, 41, 42]
    assert blank(SMALL).q.shape == (2, 40, 4, 16)
    assert blank(chunk(16).problem).k.shape == (6, 16, 2, 16)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_blank_inputs_are_not_quantised(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(codec=codec, products="half")
    filled = Inputs(case, device="cpu").arguments()[1]
    for name in ("torch.randn", "splitkv.lab.harness.sequence_cases.quantize"):
        monkeypatch.setattr(name, None)
    found = Inputs(case, device="cpu", blank=True)
    assert found.k.dtype == found.v.dtype == STORED[codec.name]
    for name in ("k_scale", "v_scale"):
        assert found.arguments()[1][name].shape == filled[name].shape


def whole(inputs: Inputs) -> tuple[Tensor, ...]:
    """Output and gradients in fp32, of everything at once."""
    p = inputs.problem
    leaves = [x.detach().float().requires_grad_() for x in inputs.leaves.values()]
    sink = leaves[3] if p.sink_logits else None
    options: dict[str, Any] = {"mask": p.mask, "sink_logits": sink, "upcast": False}
    if inputs.cu_seqlens is None:
        out = reference.attention(*leaves[:3], **options)[0]
    else:
        cu = inputs.cu_seqlens
        out = reference.attention_varlen(*leaves[:3], cu, cu, **options)[0]
    assert inputs.grad is not None
    return out.detach(), *torch.autograd.grad(out, leaves, inputs.grad.float())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_the_reference_in_strips_is_the_reference(
    features: dict[str, Any], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"STRIP": 16, "SCORES": 1 << 11, "ROWS": (3, 5), "PAIRS": 1}.items():
        monkeypatch.setattr(check, name, value)
    case = small(packed, needs_grad=True, num_kv_heads=4, **features)
    inputs = Inputs(case, device="cpu")
    found = check.Reference(inputs, case)
    assert found.heads == [0, 3]
    assert all(len(rows) <= 5 for rows in found.rows)
    out, *grads = whole(inputs)
    names = [f"d{name}" for name in inputs.leaves]
    wanted = found.looked_at(out, dict(zip(names, grads, strict=True)))
    assert wanted.keys() == found.exact.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found.exact[name], x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", range(4))
def test_every_answer_has_to_be_right(wrong: int) -> None:
    case = small(needs_grad=True)
    inputs = Inputs(case, device="cpu")
    out = inputs.attend()
    answers = [out.detach(), *inputs.gradients(out)]
    found = check.Reference(inputs, case)
    found.check(answers[0], answers[1:])
    answers[wrong] = answers[wrong].clone()
    answers[wrong][1, -1, -1] += 0.5
    name = ("out", "dq", "dk", "dv")[wrong]
    with pytest.raises(AssertionError, match=f"^{name}: expected an error of at most"):
        found.check(answers[0], answers[1:])


def test_rows_and_heads_are_drawn_from_end_to_end() -> None:
    rows = check.drawn_rows(1000, 9).tolist()
    assert rows == sorted(set(rows)) and len(rows) == 9 and (rows[0], rows[-1]) == (0, 999)
    assert check.drawn_rows(4, 9).tolist() == [0, 1, 2, 3]
    assert check.drawn_heads(8, check.PAIRS) == [0, 7]
    assert check.drawn_heads(8, check.PAIRS // 5) == [0, 1, 3, 5, 7]
    assert check.drawn_heads(8, 1) == list(range(8)) and check.drawn_heads(1, 1) == [0]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_keys_seen_are_those_that_some_row_of_a_strip_sees(mask: Mask) -> None:
    seen = mask.materialize(20, 24)
    for first in range(20):
        for last in range(first, 20):
            keys = {
                j for a, b in check.keys_seen(mask, first + 4, last + 4, 24) for j in range(a, b)
            }
            assert keys == {j for row in seen[first : last + 1] for j in range(24) if row[j]}


# timing


def test_the_clock_is_what_an_sm_counted_over_the_time_that_passed() -> None:
    before = [[0, 1000, 500], [1, 7000, 600], [2, 10, 10], [3, 5, 5]]
    after = [[0, 3000, 1500], [1, 9200, 1600], [2, 5, 20], [4, 1, 1]]
    assert timing.mean_mhz(before, after) == 2100.0
    assert timing.mean_mhz(before, []) is None


class Event:
    """A CUDA event of a clock that goes on by two milliseconds a look."""

    times = count(0.0, 2.0)

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(self.times)

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return Event.late.pop(0) if Event.late else False

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at

    late: list[bool] = []


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of torch.cuda what a burst asks of it; spins are noted."""
    seen = SimpleNamespace(spins=[])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", seen.spins.append)
    monkeypatch.setattr(Event, "late", [])
    return seen


class Steady:
    """A clock that stays as it is."""

    def stamp(self, i: int) -> None:
        assert i in (0, 1)

    def mhz(self) -> float:
        return 1700.0


def test_a_burst_that_was_not_queued_in_time_is_taken_again(fake_cuda: SimpleNamespace) -> None:
    calls: list[int] = []
    burst = Burst(lambda: calls.append(1), 10_000.0, Steady())  # type: ignore[arg-type]
    assert burst.calls == 5, "two milliseconds each"
    calls.clear()
    Event.late = [True, True, False]
    assert burst() == Sample(400.0, 1700.0)
    assert len(calls) == 3 * 5
    first, second, third = fake_cuda.spins
    assert second == pytest.approx(2 * first, abs=2) and third == pytest.approx(4 * first, abs=4)
    assert first >= timing.MIN_LEAD * timing.SPIN_HZ


def test_calls_that_wait_for_the_gpu_have_no_time(fake_cuda: SimpleNamespace) -> None:
    burst = Burst(lambda: None, 1.0, Steady())  # type: ignore[arg-type]
    Event.late = [True] * 9
    with pytest.raises(RuntimeError, match="^1 calls: expected queued in .* s, got a wait$"):
        burst()


class FakeStation:
    """Rows as given; the first of them takes 10, 20, ... us, the others fail after a while."""

    def __init__(self, *rows: dict[str, Any], broken: str = "") -> None:
        self.given, self.broken, self.us = rows, broken, count(10.0, 10.0)
        self.ended = False

    def begin(self, case: Case) -> None:
        self.case = case

    def rows(self) -> Iterator[dict[str, Any]]:
        yield from self.given
        if self.broken:
            raise RuntimeError(self.broken)

    def sample(self, key: str) -> Sample:
        us = next(self.us)
        if key != timing.key_of(self.given[0]) and us > 40:
            raise process.Ended("its process ended")
        return Sample(us, 1000 + us)

    def end(self) -> None:
        self.ended = True


def row(library: str, **more: Any) -> dict[str, Any]:
    return Variant(library, "k", lambda inputs: None).row(**more)


def test_libraries_and_the_peak_take_turns() -> None:
    ours = FakeStation(row("splitkv", err=0.1), row("fa2", reasons=["no"]))
    theirs = FakeStation(row("a"), row("b"))
    us = count(1.0)
    measured = measure(small(), [ours, theirs], lambda: Sample(next(us), 1500.0), rounds=5)
    rows = {r["library"]: r for r in measured.rows}
    assert (rows["splitkv"]["us"], rows["splitkv"]["clocks"]) == (30.0, {"sm_mhz": 1030})
    assert rows["fa2"]["us"] is None and rows["fa2"]["reasons"] == ["no"]
    assert rows["a"]["us"] is not None and rows["a"]["reasons"] == []
    assert rows["b"]["us"] is None and rows["b"]["reasons"] == ["its process ended"]
    assert measured.peak == timing.Timing(3.0, 3.0) and measured.peak_mhz == 1500
    assert measured.lost is None and ours.ended and theirs.ended


def test_where_nothing_can_run_nothing_is_timed() -> None:
    measured = measure(small(), [FakeStation(row("a", reasons=["no"]))], lambda: Sample(1.0), 3)
    assert measured == timing.Measured(measured.rows)


def test_rows_survive_what_leaves_the_gpu_unusable() -> None:
    stations = [FakeStation(row("splitkv")), FakeStation(row("a"), broken="illegal access")]
    measured = measure(small(), stations, lambda: Sample(1.0), 3)
    assert measured.lost == "RuntimeError: illegal access"
    assert [r["reasons"] for r in measured.rows] == [["RuntimeError: illegal access"]] * 2


class FakeBurst:
    def __init__(self, body: Any, burst_us: float, clock: Any) -> None:
        body()
        self.calls = 1

    def __call__(self) -> Sample:
        return Sample(7.0, 1700.0)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, fake_cuda: SimpleNamespace) -> None:
    monkeypatch.setattr(timing, "Inputs", partial(Inputs, device="cpu"))
    monkeypatch.setattr(timing, "Burst", FakeBurst)
    monkeypatch.setattr(timing, "Clock", Steady)
    monkeypatch.setattr(timing, "peak_bytes", lambda body: 4096)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_only_right_answers_are_timed(packed: bool, needs_grad: bool) -> None:
    def wrong(inputs: Inputs) -> Prepared:
        return Prepared(lambda: 1.1 * inputs.attend())

    def absent(inputs: Inputs) -> Prepared:
        raise ImportError("no such module\nat all")

    variants = [
        *bench.our_variants(),
        *bench.our_variants(["torch_math"]),
        Variant("wrong", "x", wrong),
        Variant("absent", "x", absent),
        Variant("never", "x", absent, lambda case: ["batch 2: expected 1"]),
    ]
    here = Here(variants, Pace())
    here.begin(small(packed, needs_grad=needs_grad))
    rows = {r["library"]: r for r in here.rows()}
    assert rows["never"]["reasons"] == ["batch 2: expected 1"]
    assert rows["absent"]["reasons"] == ["ImportError: no such module"]
    assert rows["wrong"]["reasons"][0].startswith("AssertionError: out: expected an error of")
    ours, forced = rows["splitkv"], rows["splitkv (torch_math)"]
    assert ours["reasons"] == forced["reasons"] == []
    assert (ours["plan"]["kernel"], forced["plan"]["kernel"]) == ("torch_sdpa", "torch_math")
    assert list(ours["errors"]) == (["out", "dq", "dk", "dv"] if needs_grad else ["out"])
    assert ours["err"] == max(ours["errors"].values()) > 0 and ours["launched"] == []
    assert ours["peak_bytes"] == 4096
    assert here.sample("splitkv attention") == Sample(7.0, 1700.0)
    here.end()
    with pytest.raises(KeyError):
        here.sample("splitkv attention")


def test_what_a_call_allocates_is_beyond_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = 1000, 5000

    def reset() -> None:
        nonlocal most
        most = held

    def body() -> None:
        nonlocal most
        most = max(most, held + 300)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    assert timing.peak_bytes(body) == 300


def test_the_names_of_launched_kernels_are_noted() -> None:
    with timing.Launches() as names:
        for name in ("prefill", "backward_rows", "prefill"):
            timing.knobs.runtime.launch_enter_hook(SimpleNamespace(get=lambda n=name: {"name": n}))
    timing.knobs.runtime.launch_enter_hook(SimpleNamespace(get=lambda: {"name": "later"}))
    assert names == ["prefill", "backward_rows"]


def test_the_clock_reader_compiles() -> None:
    before = driver._active
    driver.set_active(AnyGPU(90))
    try:
        out = torch.zeros(8, 3, dtype=torch.int64)
        ptx = timing.read_clocks.warmup(out, num_warps=1, grid=(8,)).asm["ptx"]
    finally:
        driver._active = before
    assert ptx.index("%smid") < ptx.index("%clock64") < ptx.index("%globaltimer")


# peers


def reasons(name: str, case: str, way: str = "forward") -> list[str]:
    (variant,) = peers.PEERS[name].variants
    return variant.unsupported(CASES[way, case])


def test_peers_say_which_features_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_peers, "importable", lambda module: True)
    plain, packed = "gqa32x8_b4_8192_causal", "gqa32x8_b64_log_normal_causal"
    for name in peers.PEERS:
        assert reasons(name, plain) == []
        assert bool(reasons(name, packed)) == (name not in ("fa3", "fa3x"))
    assert reasons("fa2", packed) == ["kind varlen: expected dense"]
    assert reasons("fa3", packed, "backward") == ["direction backward: expected forward"]
    assert reasons("fa3x", packed, "backward") == []
    same_bits = "gqa32x8_b4_4096_causal_deterministic"
    assert reasons("fa3x", same_bits, "backward") == []
    assert reasons("fa2", same_bits, "backward") == ["deterministic True: expected False"]
    window, sinks = "gqa32x8_b1_16384_window128", "gqa32x8_b1_16384_window4096_sink_tokens4"
    assert reasons("cudnn", window) == ["mask causal window(127, -1): expected causal or full"]
    assert reasons("fa3", sinks) == reasons("fa3x", sinks) == ["sink tokens 4: expected 0"]
    assert reasons("flex", sinks, "backward") == []
    assert reasons("fa3", "gpt_oss_b1_4096_window128") == []
    assert reasons("fa3x", "gpt_oss_b1_4096_causal", "backward") == ["sink logits: expected none"]


@pytest.mark.parametrize("codec", [AS_IS, Codec("fp8", "head")], ids=str)
def test_fa3_has_dense_sequences_packed(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fwd(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
        bounds = [options.pop(f"cu_seqlens_{name}") for name in "qk"]
        longest = [options.pop(f"max_seqlen_{name}") for name in "qk"]
        for n, name in enumerate(("q_descale", "k_descale", "v_descale")):
            if name in options:
                scale = options.pop(name)
                x = tensors[n]
                each = scale.repeat_interleave(len(x) // len(scale), 0)
                each = each.repeat_interleave(x.shape[1] // scale.shape[1], 1)
                x = (x.float() * each[..., None]).bfloat16()
                tensors = (*tensors[:n], x, *tensors[n + 1 :])
        out = splitkv.attention_varlen(*tensors, *bounds, *longest, **options)
        assert isinstance(out, torch.Tensor)
        return (out,)

    monkeypatch.setattr(peers, "import_module", lambda name: SimpleNamespace(fwd=fwd))
    problem = replace(SMALL, dtype="bfloat16", seqlen_q=24, mask=Mask(), codec=codec)
    inputs = Inputs(Case("dense", problem), device="cpu")
    out, expected = peers.fa3(inputs).call(), inputs.attend()
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)


def test_a_causal_mask_of_fewer_queries_is_not_the_same_for_torch() -> None:
    case = Case("fewer", replace(SMALL, seqlen_q=8))
    (fa2,) = peers.PEERS["fa2"].variants
    reason = "queries 8: expected as many as keys under a causal mask"
    assert fa2.unsupported(case) == [reason]
    assert fa2.unsupported(Case("full", replace(SMALL, seqlen_q=8, mask=Mask()))) == []


def test_peers_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_peers, "importable", lambda module: False)
    missing = "module peers.fa3x: expected importable, got none"
    assert reasons("fa3x", "gqa32x8_b1_16384_full", "backward") == [missing]
    assert decode_peers.parse("fa3x, fa2", peers.PEERS) == ["fa3x", "fa2"]
    with pytest.raises(ValueError, match="none or some of fa2,cudnn,fa3x,fa3,flex, got 'xqa'$"):
        decode_peers.parse("xqa", peers.PEERS)


SERVE = """
import sys
sys.path[:0] = {path!r}
import torch
from functools import partial
from splitkv.lab.bench.sequences import peers, timing
from test_sequences import FakeBurst, Steady, small
for way in (False, True):
    case = small(needs_grad=way, num_kv_heads=4)
    peers.CASES["backward" if way else "forward", "small"] = case
on_cpu = partial(timing.Inputs, device="cpu")
timing.Inputs = lambda case: on_cpu(case, seed=print("what libraries print is no answer") or 0)
timing.Burst, timing.Clock = FakeBurst, Steady
timing.peak_bytes = lambda body: 4096
torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
peers.serve("fa2", "100")
"""


def test_a_process_answers_cases_and_samples() -> None:
    path = [p for p in sys.path if p.endswith(("src", "tests", "support"))]
    path.append(str(__file__).rpartition("/")[0])
    there = peers.There("fa2", Pace(), [sys.executable, "-c", SERVE.format(path=path)])
    try:
        for needs_grad in (False, True):
            there.begin(small(needs_grad=needs_grad, num_kv_heads=4))
            (found,) = there.rows()
            assert found["reasons"] == [] and found["library"] == "fa2"
            assert ("dk" in found["errors"]) == needs_grad
            assert there.sample("fa2 sdpa") == Sample(7.0, 1700.0)
            with pytest.raises(process.Ended, match="^KeyError"):
                there.sample("nobody")
            there.end()
        assert there.process.starts == 1
    finally:
        there.stop()


def test_a_process_that_ends_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_peers, "importable", lambda module: True)
    command = [sys.executable, "-c", "import sys; input(); sys.exit('it broke')"]
    there = peers.There("fa3x", Pace(), command)
    there.begin(small())
    (found,) = there.rows()
    assert found["reasons"] == ["its process ended: status 1, it broke"]
    there.end()
    there.begin(small(sink_logits=True))
    (found,) = there.rows()
    assert found["reasons"] == ["sink logits: expected none"] and there.process.starts == 1


def test_peers_of_torch_are_right() -> None:
    """On a CPU torch has one of them, with as many KV heads as heads."""
    case = small(needs_grad=True, num_kv_heads=4)
    inputs = Inputs(case, device="cpu")
    out = peers.PEERS["fa2"].variants[0].prepare(inputs).call()
    errors = check.Reference(inputs, case).check(out, inputs.gradients(out))
    assert max(errors.values()) < 0.1


@pytest.mark.parametrize(("dtype", "products"), [("int8", "half"), ("fp8", "full")])
@pytest.mark.parametrize("granularity", ["head", "token"])
def test_stored_keys_are_checked_as_stored(dtype: Any, products: Any, granularity: Any) -> None:
    """A call passes; with another scale it does not."""
    problem = Problem("dense", 1, 4, 2, 64, 64, 90, 90, mask=Mask(True), products=products)
    case = Case("stored", replace(problem, codec=Codec(dtype, granularity)))
    inputs = Inputs(case, device="cpu")
    assert inputs.k_scale is not None
    looked_at = check.Reference(inputs, case)
    out = inputs.attend()
    looked_at.check(out)
    assert (looked_at.working["out"] - looked_at.exact["out"]).abs().max() > 0.01
    inputs.k_scale = 1.3 * inputs.k_scale
    with pytest.raises(AssertionError, match="out: expected an error of at most"):
        looked_at.check(inputs.attend())
