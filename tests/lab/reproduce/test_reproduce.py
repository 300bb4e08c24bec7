"""`splitkv reproduce` without a GPU: what is timed, resuming, tables, claims that can fail."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from results import MACHINE
from rich.console import Console
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core import device
from splitkv.core.device import GPUS
from splitkv.core.plan import Plan
from splitkv.lab.harness import backends
from splitkv.lab.harness.cases import Case, Inputs
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.lines import Lines
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Variant
from splitkv.lab.harness.work import DEFAULT, Way, Work
from splitkv.lab.reproduce import claims, model, run, tables, works
from splitkv.lab.reproduce.claims import Verdict, check
from splitkv.planner.policies import paged_attention_v2
from splitkv.testing import assert_close

H200 = GPUS["h200"]
Us = Callable[[Work, Way], float | None]


def fast(work: Work, way: Way) -> float | None:
    """A GPU on which the claims of the sources hold."""
    p = work.case.problem
    if work.step == "packing":
        return 40.0 if way.name == "both" else 400.0
    if work.step == "ten shapes":
        picked = works.picks(paged_attention_v2.CONSERVATIVE, p, 132)
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


def rest(rounds: int) -> list[dict[str, Any]]:
    row = {"spread_us": 0.1, "err": None, "repeats": None, "reasons": []}
    return [
        {"kernel": part, "us": us, **row} for part, us in zip(model.PARTS, (50, 60), strict=True)
    ]


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
            **{"machine": MACHINE, "rest": rest},
        )
    return lost, screen.getvalue()


def rates(direction: str, case: str, library: str, us: float, tflops: float = 1.0) -> Any:
    shape = {"suite": "prefill", "direction": direction, "case": case, "library": library}
    return {**shape, "us": us, "tflops": tflops, "peak_fraction": 0.5, "reasons": [], **MACHINE}


def whole_sequences() -> list[dict[str, Any]]:
    """Results of prefill and backward on which the sources' claims hold."""
    found = []
    for mask, by_tokens in claims.PREFILL_H100.items():
        for tokens, tflops in by_tokens.items():
            case = f"mqa16_b{32768 // tokens}_{tokens}_{mask}"
            found += [
                rates("forward", case, name, 1.0, 1.1 * tflops) for name in ("splitkv", "fa3x")
            ]
    for direction in ("forward", "backward"):
        for tokens in (1024, 8192, 16384):
            full, window = tokens**2 / 8192, float(tokens)
            name = f"gqa32x8_b1_{tokens}"
            found.append(rates(direction, f"{name}_causal", "fa2", full))
            ours = rates(direction, f"{name}_window4096_sink_tokens4", "splitkv", window - 1)
            found.append(ours)
    return found


@pytest.fixture
def records(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "results.jsonl"
    measured(path, FakeBackend("splitkv"), FakeBackend("fa3"))
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
    assert len(again.asked) == len(todo) - 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["case"] for r in lines if r["step"] == "decode step"] == ["llama3_70b_tp8"]
    assert len(lines) == len(todo) + 1
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
    assert len(path.read_text().splitlines()) == 3  # the parts of a decode step, and two shapes


def test_past_its_time_a_backend_begins_nothing_and_the_next_one_does(tmp_path: Path) -> None:
    screen, ours, theirs = io.StringIO(), FakeBackend("splitkv"), FakeBackend("fa3")
    with Lines(tmp_path / "r.jsonl") as lines:
        options: Any = {"ends": {"fa3": 0.0}, "machine": MACHINE, "rest": rest}
        options["console"] = Console(file=screen)
        todo = works.in_turns(works.works(True, 132))[:5]
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
        early = {(w.step, w.case.name) for w in turns[:20]}
        for kv_heads in (1, 2):
            assert ("table 1", works.mqa(512, kv_heads).name) in early


def cut_short(monkeypatch: pytest.MonkeyPatch, folder: Path, ending: Callable[[], Any]) -> str:
    """`reproduce` on fakes, of which the ninth shape is not the end of the run, but `ending`."""

    def us(work: Work, way: Way) -> float | None:
        return ending() if len(ours.asked) == 9 else fast(work, way)

    ours, screen = FakeBackend("splitkv", us), io.StringIO()
    monkeypatch.setattr(run, "current", lambda: H200)
    monkeypatch.setattr(run, "facts", lambda: MACHINE)
    monkeypatch.setattr(run, "Ours", lambda: ours)
    monkeypatch.setattr(run.model, "measure", rest)
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
        assert len((folder / "results.jsonl").read_text().splitlines()) == 9  # and a decode step
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
    assert [len(names) for _, names in run.sequence_cases("full")] == [22, 10]


def test_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "current", device.cpu)
    said = CliRunner().invoke(app, ["reproduce", "--quick"])
    assert said.exit_code == 2 and "device: expected a CUDA GPU, got 'CPU'" in said.output
    said = CliRunner().invoke(app, ["reproduce", "--backend", "fa9"])
    assert said.exit_code == 2 and "backend: expected 'splitkv' or 'fa3', got 'fa9'" in said.output


# --- claims


def test_claims_hold_on_results_like_the_sources(records: list[dict[str, Any]]) -> None:
    found = verdicts(records)
    failed = {v.claim: v.why for v in found.values() if v.verdict != "PASS"}
    assert not failed
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
            "packing, with splitting: the least speed-up",
            "4 is not",
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
    assert all(backend in name for name in failed), "another backend's claim failed"


@pytest.mark.parametrize(
    ("step", "way", "us", "claim"),
    [
        ("matrix", "default", 12.0, "default policy over the patched rule on our kernels"),
        ("table 1", "default", 15.0, "time per output token, llama3_70b_tp8, 512 keys"),
        ("ten shapes", "partitions", 30.0, "16 x 32/1 x 4096: partitions over one pass"),
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
        "prefill in bf16, full: rate over the source's on an H100, mean (splitkv)",
        "prefill in bf16, causal: rate over the source's on an H100, mean (splitkv)",
        "forward: tokens from which the window is faster than FlashAttention-2's full (splitkv)",
        "training: tokens from which the window is faster than FlashAttention-2's full (splitkv)",
    }


def test_without_results_no_claim_passes_but_that_of_the_rules() -> None:
    found = verdicts([])
    assert {v.verdict for name, v in found.items() if "(rules)" not in name} == {"NOT RUN"}
    assert all(v.why and v.value is None for n, v in found.items() if "(rules)" not in n)


def test_a_rule_that_splits_elsewhere_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(works.RULES, "patched", works.no_guard)  # type: ignore[arg-type]
    (found,) = (v for v in check([]) if v.backend == "rules")
    assert found.verdict == "FAIL" and found.value == 4


def test_results_of_other_sources_do_not_count(records: list[dict[str, Any]]) -> None:
    old = [{**r, "commit": "old"} for r in doctored(records, "table 1", "fa3", "patched", us=99.0)]
    assert not [v for v in check(old + records) if v.verdict == "FAIL"]


# --- what is written


def test_the_report_has_every_table(records: list[dict[str, Any]]) -> None:
    decode = [r for r in records if r["suite"] == "reproduce"]
    text = tables.report(decode, check(decode))
    for title in tables.TITLES.values():
        assert text.count(f"{title}, on splitkv") == text.count(f"{title}, on fa3") == 1
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
