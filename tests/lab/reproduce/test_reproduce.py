"""`splitkv reproduce` without a GPU: what is timed, resuming, tables, claims that can fail."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from results import MACHINE
from rich.console import Console
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core import device
from splitkv.core.device import GPUS
from splitkv.core.plan import Plan
from splitkv.lab.harness import backends, peers
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.lines import Lines
from splitkv.lab.harness.screen import Advance
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Variant
from splitkv.lab.harness.work import DEFAULT, Way, Work
from splitkv.lab.reproduce import model, run, tables, tracing, training, works
from splitkv.lab.reproduce.check import check
from splitkv.lab.reproduce.claims import int8, paged
from splitkv.lab.reproduce.claims.verdict import SOURCES, Verdict
from splitkv.planner.policies import paged_attention_v2
from splitkv.testing import assert_close

H200 = GPUS["h200"]
Us = Callable[[Work, Way], float | None]


def fast(work: Work, way: Way) -> float | None:
    """A GPU on which the claims of the sources hold."""
    p = work.case.problem
    if work.step.startswith("packing"):
        row = int8.TABLE_3[p.seqlen_k]
        return {**row._asdict(), "both": row.both / 1.01}[way.name] + (way.name == "split")
    if work.step == "sdpa":
        return 9.5
    if work.step == "page sizes":
        return 12.0 if way.name == "one pass" else 10.0
    if work.step == "one launch":
        return 10.0 + p.seqlen_k / (100 if way.name == "one program" else 1000)
    if work.step == "kernels":
        return 80.0 if way.name == "triton" else 10.0
    if work.step == "no metadata":
        return 10.2 if way.name == "standard" else 10.0
    if work.step == "ten shapes":
        shape = work.case.name.removeprefix("seed003_").removesuffix("_page16")
        picked = works.picks(paged_attention_v2.CONSERVATIVE, p, 132)
        picked = paged.NAMED[shape][0] if shape in paged.NAMED else picked
        return {"default": 9.0, picked: 10.0}.get(way.name, 20.0)
    splits = way.splits or 3
    if work.step == "splits" and way.splits > 32:
        return None
    slowest = 14.0 if p.seqlen_k == 512 else 10.0
    return slowest if splits == 1 else 10.0 + 0.001 * abs(splits - 8)


class FakeBackend:
    """Times nothing; says what `us` says."""

    def __init__(self, name: str, us: Us = fast, absent: str = "") -> None:
        self.name, self.us, self.why = name, us, absent
        self.asked: list[str] = []

    def absent(self) -> list[str]:
        return [self.why] if self.why else []

    def measure(self, work: Work, rounds: int) -> list[dict[str, Any]]:
        self.asked.append(work.case.name)
        rows = []
        for way in work.ways:
            us = self.us(work, way)
            found = {"us": us, "spread_us": 0.1, "err": 1e-4, "repeats": True}
            variant = Variant(self.name, way.name, lambda inputs: None)
            rows.append(variant.row(**found) if us else variant.row(reasons=["too many"]))
        return rows

    def stop(self) -> None:
        pass


def taken(backend: str, todo: list[Work]) -> list[Work]:
    return [work for work in todo if works.takes(backend, work.step)]


def rest(rounds: int) -> list[dict[str, Any]]:
    row = {"spread_us": 0.1, "err": None, "repeats": None, "reasons": []}
    return [
        {"kernel": part, "us": us, **row} for part, us in zip(model.PARTS, (50, 60), strict=True)
    ]


def traced(rounds: int) -> list[dict[str, Any]]:
    """Kernels as the source's traces have them."""
    one = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(params)"
    split = "void pytorch_flash::flash_fwd_splitkv_kernel<Traits<128, 64>, false>(params)"
    merged = f"void pytorch_flash::{tracing.COMBINE}<Traits<128, 64>, 4, 3, true>(params)"
    rows = [(94, one, [1, 1, 4]), (542, split, [1, 5, 4]), (542, merged, [7, 1, 1])]
    own = {"us": None, "err": None, "repeats": None, "reasons": []}
    return [{"kernel": name, "keys": keys, "grid": grid, **own} for keys, name, grid in rows]


def trained(rounds: int) -> list[dict[str, Any]]:
    rows = [("float32", 0.0), ("eager", 0.01), ("splitkv", 0.011), ("without sinks", None)]
    own = {"us": None, "err": None, "repeats": None, "reasons": [], "loss": 1.5, "runs": 5}
    return [{"kernel": name, "distance": distance, **own} for name, distance in rows]


BESIDE = {"decode step": rest, "trace": traced, "training": trained}


def measured(
    path: Path, *who: FakeBackend, todo: list[Work] | None = None, effort: str = "full"
) -> tuple[bool, str]:
    screen = io.StringIO()
    with Lines(path) as lines:
        lost = run.run_works(
            works.in_turns(works.works(effort == "quick", 132)) if todo is None else todo,
            list(who),
            *(H200, effort, lines, Compiler(0)),
            **{"ends": {}, "console": Console(file=screen, width=200)},
            **{"machine": MACHINE, "beside": BESIDE},
        )
    return lost, screen.getvalue()


def rates(direction: str, case: str, library: str, us: float, tflops: float = 1.0) -> Any:
    shape = {"suite": "prefill", "direction": direction, "case": case, "library": library}
    return {**shape, "us": us, "tflops": tflops, "peak_fraction": 0.5, "reasons": [], **MACHINE}


def whole_sequences() -> list[dict[str, Any]]:
    """Results of prefill and backward on which the sources' claims hold."""
    found = []
    for mask, columns in int8.TABLES.items():
        for dtype, by_tokens in columns.items():
            for tokens, tflops in zip(int8.TOKENS, by_tokens, strict=True):
                case = int8.prefill_case(tokens, mask, dtype)
                for name in ("splitkv", "fa3x"):
                    found.append(rates("forward", case, name, 1.0, 1.1 * tflops))
    for direction in ("forward", "backward"):
        for tokens in (1024, 8192, 16384):
            full, window = tokens**2 / 8192, float(tokens)
            name = f"gqa32x8_b1_{tokens}"
            found.append(rates(direction, f"{name}_causal", "fa2", full))
            ours = rates(direction, f"{name}_window4096_sink_tokens4", "splitkv", window - 1)
            found.append(ours)
            found.append(rates(direction, f"{name}_causal", "splitkv", full))
        for tokens in (32768, 131072):
            name = f"gqa32x8_b1_{tokens}_window4096_sink_tokens4"
            linear = {"us": float(tokens), "peak_bytes": 4 * tokens}
            found.append({**rates(direction, name, "splitkv", 1.0), **linear})
    for end, us in (("", 100.5), ("_nosink", 100.0)):
        found.append(rates("backward", f"gpt_oss_b1_4096_causal{end}", "splitkv", us))
    return found


@pytest.fixture
def records(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "results.jsonl"
    measured(path, FakeBackend("splitkv"), FakeBackend("fa3"), FakeBackend("torch"))
    return [json.loads(line) for line in path.read_text().splitlines()] + whole_sequences()


def verdicts(records: list[dict[str, Any]]) -> dict[str, Verdict]:
    return {v.claim: v for v in check(records)}


# --- what is timed


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


def test_our_plans_are_the_splits_asked_for() -> None:
    sweep_work = works.split_sweep()
    plans = backends.our_plans(sweep_work, H200)
    made = {way.splits: plan for way, plan in plans.items() if isinstance(plan, Plan)}
    assert made.keys() == {0, *range(1, 17)}
    assert all(plan.config.num_splits == n for n, plan in made.items() if n)
    assert len({plan.kernel for plan in made.values()}) == 1
    assert str(plans[Way("s=17", 17)]) == "splits: expected at most 16, as there are tiles, got 17"
    for work in works.packing(True):
        plans = backends.our_plans(work, H200)
        assert {p.kernel for p in plans.values() if isinstance(p, Plan)} == {backends.ABLATED}
        heads = [p.problem.num_kv_heads for p in plans.values() if isinstance(p, Plan)]
        assert heads == [16, 16, 1, 1]


def test_unpacked_heads_read_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ABLATED", "torch_math")
    p = replace(CASES["mqa8_b1_512"].problem, batch=2, seqlen_k=40, seqlen_q=3)
    work = Work("packing", Case("small", p), (Way("split", 0, False), Way("both", 0)))
    inputs = Inputs(work.case, 1, device="cpu")
    ref, pt = inputs.references()
    for variant in backends.our_variants(work):
        assert not variant.unsupported(work.case)
        call, _, plan = variant.prepare(inputs)
        assert plan["problem"]["num_kv_heads"] == (8 if variant.kernel == "split" else 1)
        assert_close(call(0), ref, pt)


def test_fa3_is_asked_for_the_splits_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def fake(inputs: Any, **options: Any) -> None:
        given.append(options)

    monkeypatch.setattr(backends.peers, "fa3", fake)
    (work,) = (w for w in works.packing(True) if w.case.name == "packing_b256_1024")
    for variant in backends.fa3_variants(work):
        variant.prepare(None)
    assert [(g["num_splits"], g["pack_gqa"]) for g in given] == [
        *((1, False), (0, False), (1, True), (0, True))
    ]


def test_a_work_travels_to_another_process_and_what_ends_it_is_a_reason() -> None:
    work = works.split_sweep()
    line = base64.b64encode(pickle.dumps((work, 7))).decode()
    assert pickle.loads(base64.b64decode(line)) == (work, 7)
    echo = 'import sys\nfor _ in sys.stdin: print(\'{"kernel": "s=1", "us": 2}\\n{}\', flush=True)'
    there = backends.FlashAttention3([sys.executable, "-c", echo])
    rows = there.measure(work, 7)
    assert rows == [{"kernel": "s=1", "us": 2}]
    there.stop()
    dies = backends.FlashAttention3([sys.executable, "-c", "raise SystemExit('no library')"])
    rows = dies.measure(work, 7)
    dies.stop()
    assert [row["kernel"] for row in rows] == [way.name for way in work.ways]
    assert "no library" in rows[0]["reasons"][0]


def test_a_decode_step_is_eighty_layers() -> None:
    assert model.step_us(model.LLAMA, 10.0, 50.0, 60.0) == 4860.0
    small = replace(model.LLAMA, hidden=32, heads=2, head_dim=16, feed_forward=24, vocabulary=40)
    bodies = model.bodies(small, "cpu")
    assert list(bodies) == list(model.PARTS)
    assert [tuple(body(0).shape) for body in bodies.values()] == [(1, 32), (1, 40)]


# --- running


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    path, todo = tmp_path / "results.jsonl", works.works(True, 132)
    ours = FakeBackend("splitkv")
    lost, text = measured(path, ours, FakeBackend("fa3", absent="no module"), todo=todo[:3])
    assert not lost and len(ours.asked) == 3 and "fa3: no module" in text
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("\n", 0, -1) + 20])  # cut short in its last record
    again = FakeBackend("splitkv")
    measured(path, again, todo=todo)
    assert len(again.asked) == len(taken("splitkv", todo)) - 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["case"] for r in lines if r["step"] == "decode step"] == ["llama3_70b_tp8"]
    assert len(lines) == len(taken("splitkv", todo)) + len(BESIDE)
    other = FakeBackend("splitkv")
    measured(path, other, todo=todo[:2], effort="quick")
    assert len(other.asked) == 2


def test_a_lost_gpu_loses_no_result(tmp_path: Path) -> None:
    def breaks(work: Work, way: Way) -> float:
        if work.case.name == todo[2].case.name:
            raise RuntimeError("CUDA error: an illegal memory access")
        return 1.0

    path, todo = tmp_path / "results.jsonl", works.works(True, 132)
    lost, text = measured(path, FakeBackend("splitkv", breaks), todo=todo)
    assert lost and "splitkv: stopped: RuntimeError: CUDA error" in text
    assert len(path.read_text().splitlines()) == len(BESIDE) + 2  # steps beside, and two shapes


def test_past_its_time_a_backend_begins_nothing_and_the_next_one_does(tmp_path: Path) -> None:
    screen, ours, theirs = io.StringIO(), FakeBackend("splitkv"), FakeBackend("fa3")
    with Lines(tmp_path / "r.jsonl") as lines:
        options: Any = {"ends": {"fa3": 0.0}, "machine": MACHINE, "beside": BESIDE}
        options["console"] = Console(file=screen)
        todo = [w for w in works.works(True, 132) if w.step == "table 1"][:5]
        who: Any = [ours, theirs]
        run.run_works(todo, who, H200, "quick", lines, Compiler(0), **options)
    assert not theirs.asked and len(ours.asked) == 5
    assert "fa3: time limit: 5 shapes left out" in screen.getvalue()


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


def cut_short(monkeypatch: pytest.MonkeyPatch, folder: Path, ending: Callable[[], Any]) -> str:
    """`reproduce` on fakes, of which the 14th shape is not the end of the run, but `ending`."""

    def us(work: Work, way: Way) -> float | None:
        return ending() if len(ours.asked) == 14 else fast(work, way)

    ours, screen = FakeBackend("splitkv", us), io.StringIO()
    monkeypatch.setattr(run, "current", lambda: H200)
    monkeypatch.setattr(run, "facts", lambda: MACHINE)
    monkeypatch.setattr(run, "Ours", lambda: ours)
    monkeypatch.setattr(run, "beside_attention", lambda effort: {"decode step": rest})
    monkeypatch.setattr(run, "Torch", lambda: FakeBackend("torch", absent="left out"))
    options: Any = {"backends": ["splitkv"], "whole_sequences": False, "jobs": 0}
    with pytest.raises(KeyboardInterrupt):
        run.reproduce(
            folder, quick=True, time_limit=None, console=Console(file=screen, width=300), **options
        )
    return screen.getvalue()


def test_an_interrupted_run_says_what_its_results_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def terminated() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    for name, ending in (("ctrl-c", interrupted), ("term", terminated)):
        folder = tmp_path / name
        said = cut_short(monkeypatch, folder, ending)
        assert len((folder / "results.jsonl").read_text().splitlines()) == 14  # and a decode step
        claims = {v["claim"]: v for v in json.loads((folder / "claims.json").read_text())}
        words = {v["verdict"] for v in claims.values()}
        assert words == {"PASS", "NOT RUN"} and all(v["why"] for v in claims.values())
        assert claims["512 keys, 1 KV head: patched over standard (splitkv)"]["verdict"] == "PASS"
        assert "see" in said.splitlines()[-1] and (folder / "report.md").is_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_whole_sequences_that_are_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def bench(command: str, cases: list[Case], **options: Any) -> tuple[list[Any], int]:
        asked.append((command, [case.name for case in cases]))
        return [], 0

    monkeypatch.setattr(run, "facts", lambda: MACHINE)
    monkeypatch.setattr(run.sequences, "bench_sequences", bench)
    monkeypatch.setattr(run.torch.cuda, "synchronize", lambda: None)
    path = tmp_path / "results.jsonl"
    quiet, ahead = Console(file=io.StringIO()), Compiler(0)
    assert not run.run_sequences(path, "quick", ahead, math.inf, quiet)
    assert [command for command, _ in asked] == ["prefill", "backward"]
    names = [name for _, listed in asked for name in listed]
    assert "mqa16_b8_4096_full" in names and not [n for n in names if "window128" in n]
    done = [
        {**rates("forward", name, "splitkv", 1.0), "suite": command}
        for command, listed in asked
        for name in listed
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in done))
    asked.clear()
    run.run_sequences(path, "quick", ahead, math.inf, quiet)
    assert asked == []
    path.unlink()
    run.run_sequences(path, "quick", ahead, 0.0, quiet)
    assert asked == [], "past the time limit"
    assert [len(names) for _, names in run.sequence_cases("full")] == [48, 16]


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "current", device.cpu)
    said = CliRunner().invoke(app, ["reproduce", "--quick"])
    assert said.exit_code == 2 and "device: expected a CUDA GPU, got 'CPU'" in said.output
    said = CliRunner().invoke(app, ["reproduce", "--backend", "fa9"])
    assert said.exit_code == 2 and "backend: expected 'splitkv' or 'fa3', got 'fa9'" in said.output


# --- claims


def test_claims_hold_on_results_like_the_sources(records: list[dict[str, Any]]) -> None:
    found = verdicts(records)
    failed = {v.text: v.why for v in found.values() if v.verdict != "PASS"}
    assert failed == {int8.PREFILL_GAIN.text: "this command times no whole model in prefill"}
    patched = found["512 keys, 1 KV head: patched over standard (splitkv)"]
    assert patched.why == "1.399 is >= 1.21: 14.00 us in 1 split, 10.01 us in 3"


def doctored(
    records: list[dict[str, Any]], step: str, backend: str, way: str, **change: Any
) -> list[dict[str, Any]]:
    """The same results, but of one way in one step."""
    copy = json.loads(json.dumps(records))
    for r in copy:
        if r.get("step") == step and r.get("backend") == backend:
            for row in r["rows"]:
                if row["kernel"] == way:
                    row.update(change)
    return copy


@pytest.mark.parametrize(
    ("step", "way", "change", "claim", "why"),
    [
        (
            *("table 1", "patched", {"us": 13.0}, "512 keys, 2 KV heads: patched over standard"),
            "1.077 is not >= 1.24: 14.00 us in 1 split, 13.00 us in 3",
        ),
        (
            *("matrix", "patched", {"us": 20.0}),
            "patched is nowhere slower than standard, over the matrix",
            "0.5 is not >= 0.99: the least of 160 of 160 configurations",
        ),
        ("splits", "s=1", {"us": 10.5}, "1 split over 3, split sweep at 512 keys", "1.049 is not"),
        (
            "splits",
            "s=3",
            {"us": 11.0},
            "3 splits over the best of the sweep",
            "1.1 is not <= 1.02",
        ),
        (
            *("boundary", "patched", {"repeats": False}, "a second replay gives the same bits"),
            "14 is not <= 0",
        ),
        (
            "boundary",
            "patched",
            {"us": None, "reasons": ["AssertionError: out: expected an error of 0.1"]},
            "every result is within the tolerance of fp32",
            "14 is not <= 0",
        ),
        (
            "packing",
            "both",
            {"us": 100.0},
            "packing, bf16 keys, with splitting: the least speed-up",
            "3.236 is not",
        ),
    ],
)
@pytest.mark.parametrize("backend", ["splitkv", "fa3"])
def test_doctored_results_fail_their_claim(
    records: list[dict[str, Any]],
    backend: str,
    step: str,
    way: str,
    change: dict[str, Any],
    claim: str,
    why: str,
) -> None:
    found = verdicts(doctored(records, step, backend, way, **change))
    failed = {name: v for name, v in found.items() if v.verdict == "FAIL"}
    assert f"{claim} ({backend})" in failed
    assert failed[f"{claim} ({backend})"].why.startswith(why)
    assert {v.backend for v in failed.values()} == {backend}, "another backend's claim failed"


@pytest.mark.parametrize(
    ("step", "way", "us", "claim"),
    [
        ("matrix", "default", 12.0, "default policy over the patched rule on our kernels"),
        ("table 1", "default", 15.0, "time per output token, llama3_70b_tp8, 512 keys"),
        ("ten shapes", "partitions", 30.0, "16 x 32/1 x 4096: partitions over one pass (splitkv)"),
        ("ten shapes", "partitions", 60.0, "16 x 32/1 x 4096: partitions over SDPA, gap in % (sp"),
        (
            "page sizes",
            "one pass",
            5.0,
            "16 x 32/1 x 4096: the best page size in one pass over "
            "partitions on pages of 16 (splitkv)",
        ),
        (
            "one launch",
            "chunks",
            99.0,
            "1 query token: keys from which chunks of 256 in programs of"
            " their own are faster (splitkv)",
        ),
        ("kernels", "triton", 11.0, "a decode step with int8 caches"),
        ("packing int8", "neither", 333.0, "int8 keys, neither split nor packed: time as"),
        ("packing int8", "packed", 36.0, "int8 keys, not split: keys from which unpacked"),
        ("packing int8", "both", 60.0, "packing, int8 keys, with splitting: bandwidth over"),
        ("ten shapes", "one pass", 99.0, "share of its shapes on which the conservative rule"),
    ],
)
def test_doctored_results_fail_claims_of_ours(
    records: list[dict[str, Any]], step: str, way: str, us: float, claim: str
) -> None:
    found = verdicts(doctored(records, step, "splitkv", way, us=us))
    assert [v.verdict for name, v in found.items() if name.startswith(claim)] == ["FAIL"]


def test_slow_sequences_fail_their_claims(records: list[dict[str, Any]]) -> None:
    slow = json.loads(json.dumps(records))
    for r in slow:
        if r.get("library") == "splitkv":
            r["us"] *= 100
            r["tflops"] /= 2
    found = verdicts(slow)
    failed = {name for name, v in found.items() if v.verdict == "FAIL"}
    assert failed == {
        *(
            f"prefill in {dtype}, {mask}: rate over the source's on an H100, mean (splitkv)"
            for dtype in ("bf16", "int8", "fp8")
            for mask in ("full", "causal")
        ),
        "backward, causal: rate over FlashAttention-2's, the least (splitkv)",
        "forward: tokens from which the window is faster than FlashAttention-2's full (splitkv)",
        "training: tokens from which the window is faster than FlashAttention-2's full (splitkv)",
    }


@pytest.mark.parametrize(
    ("case", "change", "claim"),
    [
        ("gpt_oss_b1_4096_causal", {"us": 102.0}, "backward: what the gradient of sink logits"),
        (
            *("gqa32x8_b1_131072_window4096_sink_tokens4", {"us": 9e5}),
            "backward, window and sink tokens: exponent of time",
        ),
        (
            *("gqa32x8_b1_131072_window4096_sink_tokens4", {"peak_bytes": 1 << 30}),
            "forward, window and sink tokens: exponent of memory",
        ),
        ("mqa16_b8_4096_full_int8", {"tflops": 100.0}, "prefill in int8: how far its rate"),
    ],
)
def test_doctored_sequences_fail_their_claim(
    records: list[dict[str, Any]], case: str, change: dict[str, Any], claim: str
) -> None:
    found = [
        {**r, **change} if r["case"] == case and r.get("library") == "splitkv" else r
        for r in records
    ]
    failed = [name for name, v in verdicts(found).items() if v.verdict == "FAIL"]
    assert any(name.startswith(claim) for name in failed), failed


@pytest.mark.parametrize(
    ("step", "kernel", "change", "claim"),
    [
        ("trace", "flash_fwd_kernel", {"kernel": "cudnn"}, "64 new tokens: kernels"),
        ("trace", tracing.COMBINE, {"kernel": "flash_fwd_kernel"}, "512 new tokens: kernels"),
        ("trace", tracing.COMBINE, {"grid": [28, 1, 1]}, "the combine's grid"),
        (
            *("trace", tracing.COMBINE, {"kernel": f"{tracing.COMBINE}<Traits<128>, 8, 2, true>"}),
            "the combine's rows a block",
        ),
        ("training", "splitkv", {"distance": 0.05}, "loss curve in bf16 with sinks"),
    ],
)
def test_doctored_steps_beside_attention_fail_their_claim(
    records: list[dict[str, Any]], step: str, kernel: str, change: dict[str, Any], claim: str
) -> None:
    copy = json.loads(json.dumps(records))
    for r in copy:
        if r.get("step") == step:
            for row in r["rows"]:
                row.update(change if kernel in row["kernel"] else {})
    failed = [name for name, v in verdicts(copy).items() if v.verdict == "FAIL"]
    assert len(failed) == 1 and failed[0].startswith(claim), failed


def test_every_source_has_claims_with_a_place_and_a_figure() -> None:
    found = check([])
    assert {v.source for v in found} == set(SOURCES.values())
    assert len({v.claim for v in found}) == len(found)
    assert all(v.where and v.figure and v.why for v in found)


def test_a_trace_is_read_for_the_kernels_of_attention() -> None:
    events = [
        {"cat": "kernel", "name": "pytorch_flash::flash_fwd_kernel<>", "args": {"grid": [1, 4]}},
        {"cat": "kernel", "name": "flash_unknown"},
        {"cat": "cpu_op", "name": "aten::_flash_attention_forward"},
        {"cat": "kernel", "name": "vectorized_elementwise_kernel", "args": {"grid": [9]}},
    ]
    assert list(tracing.kernels({"traceEvents": events})) == [
        ("pytorch_flash::flash_fwd_kernel<>", [1, 4]),
        ("flash_unknown", []),
    ]


def test_training_says_where_every_way_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"float32": [[2.0] * 12], "eager": [[2.5] * 12] * 2, "splitkv": [[2.25] * 12] * 2}
    made = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in runs.items()}
    monkeypatch.setattr(training.curves, "all_losses", lambda steps, device: made)
    monkeypatch.setattr(training.curves, "losses", lambda *_: made["eager"][0] + 1)
    rows = {row["kernel"]: row for row in training.measure(3, 12)}
    assert rows["splitkv"]["distance"] == 0.25 and rows["eager"]["loss"] == 2.5
    assert rows["float32"]["distance"] == 0.0 and rows["without sinks"]["distance"] is None
    assert rows["without sinks"]["loss"] == 3.5 and rows["without sinks"]["runs"] == 1


def test_without_results_no_claim_passes_but_that_of_the_rules() -> None:
    found = verdicts([])
    assert {v.verdict for name, v in found.items() if "(rules)" not in name} == {"NOT RUN"}
    assert all(v.why and v.value is None for n, v in found.items() if "(rules)" not in n)


def test_a_rule_that_splits_elsewhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(works.RULES, "patched", works.no_guard)  # type: ignore[arg-type]
    (found,) = (v for v in check([]) if v.text.startswith("keys besides 385"))
    assert found.verdict == "FAIL" and found.value == 4


def test_results_of_other_sources_do_not_count(records: list[dict[str, Any]]) -> None:
    old = [{**r, "commit": "old"} for r in doctored(records, "table 1", "fa3", "patched", us=99.0)]
    assert not [v for v in check(old + records) if v.verdict == "FAIL"]


# --- what is written


def test_the_report_has_every_table(records: list[dict[str, Any]]) -> None:
    decode = [r for r in records if r["suite"] == "reproduce"]
    text = tables.report(decode, check(decode))
    for step, title in tables.TITLES.items():
        for backend in ("splitkv", "fa3", "torch"):
            times = int(works.takes(backend, step))
            assert text.count(f"## {title}, on {backend}\n") == times
    assert "## One token of Qwen2.5-7B, traced" in text and "## Loss curves" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["512", "1", "14.00 (1)", "10.01 (3)", "1.40", "10.01"] in rows
    assert "80 layers of 50.0 us besides attention" in text
    assert tables.report([], []) == "# Reproduction\n\nNo results."


def test_a_run_ends_with_its_files(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    decode = [r for r in records if r["suite"] == "reproduce"]
    bad = doctored(decode, "table 1", "fa3", "patched", us=14.0)
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in bad))
    screen = io.StringIO()
    run.conclude(tmp_path, Console(file=screen, width=300))
    said = json.loads((tmp_path / "claims.json").read_text())
    (failed,) = (v for v in said if v["verdict"] == "FAIL" and "1 KV head:" in v["claim"])
    assert failed["value"] == 1.0 and failed["bound"] == 1.21 and failed["relation"] == ">="
    assert "FAIL    512 keys, 1 KV head: patched over standard (fa3): 1 is not" in screen.getvalue()
    assert "NOT RUN prefill in bf16" in screen.getvalue()
    assert (tmp_path / "report.md").read_text().startswith("# Reproduction\n\nNVIDIA H200")
    picture = (tmp_path / "splits.svg").read_text()
    assert "<svg" in picture
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h2>") == len(SOURCES) + 2 and "<svg" in page
    for v in check(bad):
        assert escape(v.text) in page and escape(v.figure) in page
    assert "NVIDIA H200" in page and "abc, 20" in page


def test_the_page_without_results_has_every_claim_not_run(tmp_path: Path) -> None:
    run.conclude(tmp_path, Console(file=io.StringIO()))
    page = (tmp_path / "report.html").read_text()
    assert "no results" in page and page.count("NOT RUN") > 40

    from splitkv.lab.reproduce.page import sections

    for section in list(sections([], check([])))[1:]:
        rows = [line for line in section.markdown.splitlines() if line.startswith("| ")][2:]
        assert rows and all(any(w in row for w in ("PASS", "NOT RUN")) for row in rows)


def test_scales_of_unpacked_heads_are_those_of_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ABLATED", "torch_math")
    p = replace(CASES["packing_b2_131072_int8"].problem, seqlen_k=40)
    work = Work("packing int8", Case("small", p), (Way("split", 0, False), Way("both", 0)))
    inputs = Inputs(work.case, 1, device="cpu")
    ref, pt = inputs.references()
    for variant in backends.our_variants(work):
        assert_close(variant.prepare(inputs).call(0), ref, pt)


def test_every_way_of_a_step_is_a_plan_of_ours_or_a_reason() -> None:
    for work in taken("splitkv", works.works(True, 132)):
        plans = backends.our_plans(work, H200)
        assert all(isinstance(x, Plan) or str(x) for x in plans.values())
        if work.step in ("one launch", "page sizes", "kernels"):
            assert all(isinstance(x, Plan) for x in plans.values()), (work.case.name, plans)
        if work.step == "kernels":
            assert [x.kernel == works.TRITON for x in plans.values() if isinstance(x, Plan)] == [
                *(True, False)
            ]


def test_a_way_without_metadata_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    fa = SimpleNamespace(
        get_scheduler_metadata=lambda *_, **__: made.append("ahead"),
        flash_attn_with_kvcache=lambda *_, scheduler_metadata, **__: scheduler_metadata,
    )
    monkeypatch.setattr(peers, "import_module", lambda name: fa)
    inputs = Inputs(works.mqa(64), 1, device="cpu")
    for ahead, times in ((False, 0), (True, 1)):
        peers.fa3(inputs, ahead=ahead).call(0)
        assert len(made) == times
    (first, *_) = works.no_metadata(132)
    assert [way.ahead for way in first.ways] == [False] * 3


def test_progress_is_told_with_an_estimate(tmp_path: Path) -> None:
    todo = [w for w in works.works(True, 132) if w.step == "table 1"][:4]
    text = measured(tmp_path / "r.jsonl", FakeBackend("splitkv"), todo=todo)[1]
    assert re.search(r"\(1/4, \d+ s left\)", text) and "(4/4, 0 s left)" in text
    clock = iter([0.0, 10.0, 20.0])
    advance = Advance(Console(file=io.StringIO()), "x", 4, lambda: next(clock))
    assert [advance.step(), advance.step()] == ["1/4, 30 s left", "2/4, 20 s left"]
