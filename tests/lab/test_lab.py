"""The lab without a GPU: cases, the arithmetic of timing, peers' reasons, records and tables."""

from __future__ import annotations

import functools
import io
import itertools
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from cases import CODECS
from click.testing import Result
from compiling import AnyGPU
from ending import ENDINGS, ending
from results import FLOOR, MACHINE
from results import decode_records as records
from rich.console import Console
from triton.runtime.driver import driver
from typer.testing import CliRunner

import splitkv
from splitkv.cli import app
from splitkv.core.device import DEFAULT_BANDWIDTH, GPUS
from splitkv.core.kv import AS_IS, Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.core.variants import Plain
from splitkv.lab import bench, floor, lines, peers, process, report, suites, timing
from splitkv.lab.cases import Case, Inputs
from splitkv.lab.suites import CASES, PLACES, SUITES, select
from splitkv.lab.timing import Prepared, Protocol, Timing, Variant
from splitkv.planner.registry import make_plan
from splitkv.testing import assert_close

SMALL = Problem("decode", 3, 4, 2, 16, 16, 1, 48, mask=Mask(causal=True), lengths="device")


def small(place: str = "contiguous", lengths: tuple[int, ...] | None = None, **more: Any) -> Case:
    return Case("small", replace(SMALL, place=PLACES[place], **more), lengths)


def command(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "decode", *args])


# cases


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


def test_the_columns_of_packing_are_four_plans() -> None:
    """Heads packed or apart, keys in one part or in several, of one kernel; 67 MB each."""
    device = GPUS["h200"]
    cases = select([], suite="seed004_int8")
    assert len(cases) == 8 and all(case.problem.rows == 48 for case in cases)
    assert {case.problem.kv_bytes for case in cases} == {2 * 262144 * 128}
    few = {}
    for case in cases:
        plans = [make_plan(case.problem, device, **column.decision) for column in bench.columns()]
        assert {plan.kernel for plan in plans} == {"hopper_prefill_quantised"}
        assert [plan.config.pack_gqa for plan in plans] == [False, False, True, True]
        for plan in (plans[0], plans[2]):
            assert replace(plan.config, variant=Plain()) == plan.config.shape
        few[case.name] = plans[3].config.num_splits
    assert few["packing_b256_1024_int8"] == 1 and few["packing_b2_131072_int8"] > 30
    assert few["packing_b64_4096_int8"] == 2  # a cluster, where one part is none


VARIED = {
    "plain": {},
    "lengths": {"lengths": (48, 1, 17)},
    "tokens": {"seqlen_q": 4},
    "window": {"mask": Mask(True, window_left=7)},
    "sink": {"sink_logits": True, "mask": Mask(True, window_left=7, sink_tokens=2)},
    "dims": {"head_dim_v": 32, "dtype": "float16"},
}


@pytest.mark.parametrize("what", VARIED)
@pytest.mark.parametrize("place", PLACES)
def test_inputs_are_a_call_of_decode(place: str, what: str) -> None:
    case = small(place, **VARIED[what])
    inputs = Inputs(case, 2, device="cpu", seed=1)
    assert torch.equal(inputs.q[0], inputs.x) and torch.equal(inputs.q[1], inputs.x)
    assert not torch.equal(inputs.k[0], inputs.k[1])
    keys = case.lengths or (48, 48, 48)
    assert inputs.lengths.tolist() == list(keys)
    if inputs.table is not None:
        used = [-(-n // 16) for n in keys]
        pages = [row[:n] for row, n in zip(inputs.table.tolist(), used, strict=True)]
        assert sorted(sum(pages, [])) == list(range(sum(used)))
        assert len(inputs.k[0]) == sum(used)
    ref, pt = inputs.references()
    assert_close(splitkv.decode(**inputs.arguments(0)), ref, pt)
    given = inputs.arguments(0)
    tensors = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
    assert splitkv.plan(*tensors, **given).problem == case.problem


def test_lengths_known_to_the_host_are_no_argument() -> None:
    case = Case("host", replace(SMALL, lengths="host", place=Paged(32)))
    given = Inputs(case, 1, device="cpu").arguments(0)
    assert "cache_seqlens" not in given and given["max_seqlen_k"] == 48
    tensors = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
    assert splitkv.plan(*tensors, **given).problem == case.problem


def test_inputs_refuse_what_they_do_not_make() -> None:
    with pytest.raises(ValueError, match="^problem: expected decode without score modifiers"):
        Inputs(small(return_lse=True), 1, device="cpu")


@pytest.mark.parametrize("codec", [AS_IS, *CODECS], ids=str)
def test_blank_inputs_have_no_keys(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is drawn or quantised for them."""
    case = small("page16", codec=codec)
    filled = Inputs(case, 2, device="cpu").arguments(1)
    for name in ("torch.randn", "splitkv.lab.cases.quantize_kv"):
        monkeypatch.setattr(name, None)
    blank = Inputs(case, 2, device="cpu", blank=True)
    assert not blank.lengths.any() and blank.table is not None and not blank.table.any()
    found = blank.arguments(1)
    assert found.keys() == filled.keys()
    for name, x in filled.items():
        if isinstance(x, torch.Tensor):
            assert (found[name].shape, found[name].dtype) == (x.shape, x.dtype)


def test_the_bytes_of_a_case_are_those_of_its_own_lengths() -> None:
    assert small().kv_bytes == 3 * 48 * 2 * 2 * 16 * 2
    assert small(lengths=(48, 1, 17)).kv_bytes == 66 * 2 * 2 * 16 * 2
    windowed = small(lengths=(48, 1, 17), mask=Mask(True, window_left=7))
    assert windowed.kv_bytes == (8 + 1 + 8) * 2 * 2 * 16 * 2


def test_the_reference_in_parts_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(small("page16", lengths=(17, 48, 3)), 1, device="cpu")
    whole = inputs.references()
    monkeypatch.setattr("splitkv.lab.cases.REFERENCE_BYTES", 2 * SMALL.kv_bytes // 3)
    for a, b in zip(whole, inputs.references(), strict=True):
        torch.testing.assert_close(a, b)


# timing


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
        *bench.our_variants(),
        *bench.our_variants(["fixed"]),
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

    variants = [*bench.our_variants(), Variant("stops", "x", stops)]
    rows = list(timing.measure(small(), variants, Protocol("back-to-back", rounds=5)))
    assert [row["us"] for row in rows] == [4.0, None]
    assert rows[1]["err"] < 0.01, "it was right before its rounds"
    assert rows[1]["reasons"][0].startswith("after its rounds: AssertionError: out: ")


@pytest.mark.usefixtures("fake_gpu")
def test_a_time_below_that_of_the_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(GPUS["h200"], bandwidth=1e9)  # 18 us for the bytes of `small`
    monkeypatch.setattr(timing, "current", lambda: slow)
    (row,) = timing.measure(small(), bench.our_variants(), Protocol("back-to-back", rounds=5))
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
    (row,) = timing.measure(small(), bench.our_variants(), Protocol())
    assert row["reasons"] == ["OutOfMemoryError: tried to allocate"]


def test_kernels_compile_for_hopper() -> None:
    from splitkv.lab import read_tma

    x = torch.zeros(4096, floor.COLUMNS, dtype=torch.bfloat16)
    before = driver._active
    driver.set_active(AnyGPU(90))
    try:
        made = [timing.write_q.warmup(x, x, 1024, BLOCK=1024, num_warps=4, grid=(1,))]
        for tile, num_warps, _ in floor.LOAD_SETTINGS:
            words = x.view(torch.int32)
            options = {"TILE": tile, "num_warps": num_warps, "grid": (1,)}
            made.append(floor.read_loads.warmup(words, words, 64, 1 << 20, **options))
            assert "ld.global.v4" in made[-1].asm["ptx"]
        for rows, in_flight, _ in read_tma.SETTINGS:
            shape = [rows, floor.COLUMNS]
            layout = read_tma.gl.NVMMASharedLayout.get_default_for(shape, read_tma.gl.bfloat16)
            rows_of_x = read_tma.TensorDescriptor.from_tensor(x, shape, layout)
            options = {"IN_FLIGHT": in_flight, "num_warps": 4, "grid": (1,)}
            made.append(read_tma.read_tma.warmup(rows_of_x, 64, **options))
            assert made[-1].asm["ptx"].count("cp.async.bulk.tensor") >= 2
    finally:
        driver._active = before
    for rows, in_flight, programs in read_tma.SETTINGS:
        tile_bytes = rows * floor.COLUMNS * 2
        assert in_flight * tile_bytes <= GPUS["h200"].smem_per_block
        assert programs * in_flight * tile_bytes <= GPUS["h200"].smem_per_sm
    assert all(compiled.asm["cubin"] for compiled in made)


# peers


def test_peers_say_which_features_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda module: True)
    lacking = {
        "mqa8_b64_mixed_page16": "lengths that differ: expected equal lengths",
        "mqa8_b64_4096_q4_page16": "query tokens 4: expected 1",
        "gpt_oss_b1_4096_page16": "sink logits: expected none",
        "gpt_oss_b1_4096_window128_nosink_page16": "mask causal window(127, -1): expected causal",
    }
    for case, reason in lacking.items():
        assert reasons("sglang_triton", case) == [[reason]]
        assert reasons("fa3", case) == [[]]
        assert (reason in reasons("flashinfer", case)[0]) == ("mixed" not in case)
        assert reason in reasons("cudnn", case)[0]
    for name in peers.PEERS:
        assert not any("lengths" in r for r in sum(reasons(name, "mqa8_b1_512"), []))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("what", ["one", "tokens", "window"])
def test_flex_attends_as_decode(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled here: what is compared is how it is called."""
    from torch._functorch import config
    from torch.nn.attention import flex_attention

    plain = flex_attention.create_block_mask
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(
        flex_attention,
        "create_block_mask",
        lambda *args, _compile, **options: plain(*args, **options),
    )
    mask = Mask(True, window_left=9) if what == "window" else Mask(True)
    case = small(seqlen_q=1 if what == "one" else 3, mask=mask)
    (variant,) = peers.PEERS["flex"].variants
    assert not variant.unsupported(case)
    assert variant.unsupported(small("page16")) == ["place paged(16): expected contiguous"]
    inputs = Inputs(case, 2, device="cpu")
    ref, pt = inputs.references()
    with config.patch(donated_buffer=True):  # and back
        assert_close(variant.prepare(inputs).call(0), ref, pt)


def reasons(name: str, case: str) -> list[list[str]]:
    return [variant.unsupported(CASES[case]) for variant in peers.PEERS[name].variants]


def test_peers_say_why_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda module: False)
    assert reasons("fa2", "mqa8_b1_512") == [[], []]
    assert reasons("cudnn", "mqa8_b1_512_page16") == [["place paged(16): expected contiguous"]] * 2
    assert reasons("fa3", "mqa8_b1_512") == [["module peers.fa3: expected importable, got none"]]
    missing = "module peers.fi or flashinfer: expected importable, got none"
    assert reasons("flashinfer", "mqa8_b8_4096") == [
        [missing, "batch 8: expected 1 with a contiguous cache"],
        [missing, "place contiguous: expected pages"],
    ]
    monkeypatch.setattr(peers, "importable", lambda module: True)
    assert reasons("flashinfer", "mqa8_b8_4096_page16") == [[], []]


def test_peers_are_named() -> None:
    assert peers.parse("none") == [] and peers.parse("all") == list(peers.PEERS)
    assert peers.parse("fa3, cudnn") == ["fa3", "cudnn"]
    with pytest.raises(ValueError, match=r"^peers: expected all, none or some of .*, got 'fa4'$"):
        peers.parse("fa3,fa4")


def worker(monkeypatch: pytest.MonkeyPatch, code: str) -> peers.Worker:
    monkeypatch.setattr(peers, "importable", lambda module: True)
    return peers.Worker("flashinfer", Protocol(), [sys.executable, "-c", code])


def test_a_process_that_ends_is_a_reason_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"library": "flashinfer", "kernel": "tensor cores", "us": 7.0}
    w = worker(
        monkeypatch,
        f"import sys; input(); print({json.dumps(row)!r}, flush=True); sys.exit('it broke')",
    )
    for _ in range(process.MAX_STARTS):
        first, second = w.measure(CASES["mqa8_b1_512_page16"])
        assert first == row
        assert second["kernel"] == "xqa" and second["us"] is None
        assert second["reasons"] == ["its process ended: status 1, it broke"]
    for given_up in w.measure(CASES["mqa8_b1_512_page16"]):
        assert given_up["reasons"] == ["its process ended 3 times before"]


def test_a_process_answers_case_after_case(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import json, sys\n"
        "for case in sys.stdin:\n"
        "    row = dict(library='flashinfer', kernel=case.strip())\n"
        "    print(json.dumps(row), '{}', sep='\\n', flush=True)\n"
    )
    w = worker(monkeypatch, code)
    for name in ("mqa8_b1_512_page16", "mqa8_b8_4096_page16"):
        assert [row["kernel"] for row in w.measure(CASES[name])] == [name]
    assert w.process.starts == 1
    w.stop()


def test_a_process_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    w = worker(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(peers, "SECONDS", 0.1)
    for row in w.measure(CASES["mqa8_b1_512_page16"]):
        assert row["reasons"] == ["its process took more than 0.1 s"]
    assert w.process.child is None


# records and tables


def test_a_record_says_what_where_and_when() -> None:
    r = records()[0]
    assert {
        *(
            "case",
            "library",
            "kernel",
            "shape",
            "dtype",
            "us",
            "spread_us",
            "floor_us",
            "tbs",
            "err",
        ),
        *(
            "plan",
            "mode",
            "gpu",
            "driver",
            "versions",
            "commit",
            "date",
            "reasons",
            "cache",
            "clocks",
        ),
    } <= r.keys()
    assert r["tbs"] == pytest.approx(262144 / 4e-6 / 1e12)
    assert r["flops"] == 4 * 8 * 512 * 128 and r["tflops"] == r["flops"] / 4.0 / 1e6
    assert r["floor_us"] == 2.0 and r["floor"]["by"] == "tma 64x12x1"
    assert r["shape"]["place"] == "contiguous" and r["shape"]["seqlen_k"] == 512
    assert r["versions"] == {**MACHINE["versions"], "library": "1"}
    assert json.loads(json.dumps(r)) == r


def test_the_commit_or_the_hash_of_the_sources_is_named() -> None:
    assert bench.commit()


def test_summary_sets_ours_against_floor_and_best_peer() -> None:
    lines = report.summary(records()).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:4]]
    assert cells[0] == [
        *("mqa8_b1_512", "0.3", "2.00", "4.00", "2.00", "0.07", "cudnn sdpa", "6.00", "1.50")
    ]
    assert cells[1][6:] == ["fa3 metadata ahead", "9.00", "1.12"]
    assert lines[-1].endswith("geometric mean 1.30, least 1.12, most 1.50")
    assert len({len(line) for line in lines[:4]}) == 1


def test_report_takes_the_last_of_each_and_lists_what_did_not_run(tmp_path: Path) -> None:
    first = records()[0]
    again = {**first, "us": 3.0}
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in [*records(), again]))
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 0
    assert result.stdout.startswith("NVIDIA H200, driver 580, torch 2.11, triton 3.6; bfloat16, ")
    assert "3.00 (0.10)" in result.stdout and "4.00 (0.10)" not in result.stdout
    assert "* cudnn sdpa on 1 of 2 cases: too old\n" in result.stdout


def test_ours_is_set_beside_ours_on_the_case_that_is_compared() -> None:
    ours, protocol = bench.our_variants()[0], Protocol()
    found = []
    for name, us in (("mqa8_b64_4096", 40.0), ("mqa8_b64_4096_page16", 41.0)):
        case = next(case for case in SUITES["pages"] if case.name == name)
        row = ours.row(us=us, spread_us=0.1, err=0.0)
        found.append(bench.record(case, row, FLOOR, protocol, MACHINE))
    assert [r["beside"] for r in found] == [None, "mqa8_b64_4096"]
    text = report.besides(found)
    cells = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert cells == [
        *("splitkv", "mqa8_b64_4096_page16", "41.00", "mqa8_b64_4096", "40.00", "1.025")
    ]
    assert text.endswith("geometric mean 1.025, most 1.025 (mqa8_b64_4096_page16)")
    assert text in report.report(found)
    assert report.besides(found[:1]) == report.besides(found[1:]) == ""
    assert report.besides(records()) == ""


def test_a_record_names_what_is_special_about_a_case() -> None:
    case = next(case for case in SUITES["mixed"] if case.beside)
    row = bench.our_variants()[0].row(us=50.0, spread_us=0.1, err=0.0)
    r = bench.record(case, row, FLOOR, Protocol(), MACHINE)
    assert r["kv_bytes"] == case.kv_bytes and r["tbs"] == case.kv_bytes / 50.0 / 1e6
    assert r["flops"] / r["kv_bytes"] == case.problem.num_heads / case.problem.num_kv_heads
    assert tuple(r["shape"]["lengths"]) == suites.mixed_lengths()
    windowed = bench.record(CASES["gpt_oss_b1_4096_window128"], row, FLOOR, Protocol(), MACHINE)
    assert windowed["shape"]["mask"] == "causal window(127, -1)"
    assert windowed["flops"] == 4 * 64 * 128 * 64
    assert windowed["shape"]["sink_logits"] is True


def test_lines_go_on_where_a_file_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    with lines.Lines(path) as first:
        assert first.records == []
        first.add({"a": 1})
        assert path.read_text() == '{"a": 1}\n'
    path.write_text('{"a": 1}\n{"b": "\u00e9"}\n{"c": ', encoding="utf-8")
    with lines.Lines(path) as again:
        assert again.records == [{"a": 1}, {"b": "\u00e9"}]
        again.add({"d": 4})
    assert lines.read(path) == [{"a": 1}, {"b": "\u00e9"}, {"d": 4}]
    with lines.Lines(None) as nowhere:
        nowhere.add({"a": 1})
        assert nowhere.records == []


def test_report_names_a_line_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("{}\n{\n")
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 2
    assert result.stderr == f"splitkv: {path}:2: expected a JSON object, got '{{'\n"


# the command


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "current", lambda: GPUS["h200"])
    monkeypatch.setattr(bench, "facts", lambda: MACHINE)
    monkeypatch.setattr(bench.Floors, "__call__", lambda self, num_bytes: FLOOR)


@pytest.mark.usefixtures("h200")
def test_results_are_on_disk_before_a_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case, variants: list[Variant], protocol: Protocol) -> Any:
        yield variants[0].row(us=5.0, spread_us=0.1, err=0.0)
        if "2048" in case.name:
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(bench, "measure", broken)
    path, screen = tmp_path / "new" / "results.jsonl", io.StringIO()
    found, status = bench.bench_decode(
        select(["mqa8_b1_*"], "contiguous"),
        ours=bench.our_variants(),
        peers=[],
        protocol=Protocol(),
        json_path=path,
        console=Console(file=screen, width=80),
    )
    assert status == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["case"] for r in lines] == ["mqa8_b1_512", "mqa8_b1_2048"]
    assert json.loads(json.dumps(found)) == lines
    assert "mqa8_b1_2048: stopped: RuntimeError: CUDA error" in screen.getvalue()
    assert "| mqa8_b1_2048" in screen.getvalue()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("kind", ENDINGS)
def test_whatever_ends_a_run_loses_no_result(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ending(kind, tmp_path / "results.jsonl", "mqa8", monkeypatch)

    def measured(case: Case, variants: list[Variant], protocol: Protocol) -> Any:
        run.take(case.name)
        yield variants[0].row(us=5.0, spread_us=0.1, err=0.0)

    monkeypatch.setattr(bench, "measure", measured)
    with run.raised() as ended:
        bench.bench_decode(
            select(["mqa8_b1_*"], "contiguous"),
            ours=bench.our_variants(),
            peers=[],
            protocol=Protocol(),
            json_path=run.path,
            console=run.console,
        )
    assert [r["case"] for r in run.kept(capsys)] == run.taken
    if kind == "disk":
        said = f"results: expected {run.path} to take another line, got No"
        assert str(ended.value).startswith(said) and len(run.taken) == 2


@pytest.mark.usefixtures("h200")
def test_past_the_time_limit_no_case_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 5.0, 11.0])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    row = bench.our_variants()[0].row(us=1.0, spread_us=0.0)
    monkeypatch.setattr(bench, "measure", lambda *_: iter([row]))
    screen = io.StringIO()
    _, status = bench.bench_decode(
        select([]),
        ours=bench.our_variants(),
        peers=[],
        protocol=Protocol(),
        time_limit=10,
        console=Console(file=screen),
    )
    assert status == 0
    assert "time limit of 10 s: 32 cases left out" in screen.getvalue()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "device: expected a CUDA GPU, got 'CPU'"),
        (["--case", "nobody"], "case: expected a glob that matches one of"),
        (["--place", "page8"], "place: expected 'all', 'contiguous' or 'page16', got 'page8'"),
        (["--suite", "best"], "suite: expected 'records', 'pages', 'mixed', "),
        (["--suite", "mixed", "--case", "mqa8_b1_512"], "case: expected a glob that matches one"),
        (["--peers", "fa4"], "peers: expected all, none or some of"),
        (["--mode", "hot"], "mode: expected 'isolated' or 'back-to-back', got 'hot'"),
        (["--policy", "best"], "policy: expected "),
        (["--num-splits", "-1"], "num_splits: expected at least 0, got -1"),
        (["--num-splits", "2", "--policy", "waves"], "num_splits: expected 0 with a policy, got 2"),
        (["--time-limit", "0"], "time_limit: expected more than 0, got 0"),
        (["--jobs", "-1"], "jobs: expected at least 0, got -1"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"splitkv: {message}")
    assert result.stderr.count("\n") == 1 and result.stdout == ""
