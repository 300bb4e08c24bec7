"""Studies of many plans without a GPU: candidates, rounds, resuming, tune, regret and sweeps.

The timers are fake: a plan takes what the cost model says, times a factor of its tile shape.
"""

from __future__ import annotations

import io
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import AnyGPU
from ending import ENDINGS, ending
from results import MACHINE
from rich.console import Console
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from splitkv.core.device import GPUS
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.kernels.host import launcher
from splitkv.lab import compiler, space, studies, sweep, timing, tune
from splitkv.lab.cases import Case, Inputs
from splitkv.lab.compiler import Compiler, in_order_of_readiness
from splitkv.lab.report import boundary_table, regret, regret_table, report, sweep_table
from splitkv.lab.studies import Effort
from splitkv.lab.suites import CASES, SUITES
from splitkv.lab.timing import Protocol, Timing, Variant
from splitkv.planner import registry
from splitkv.planner.policies import POLICIES, decode_cost, fixed, tuned, waves
from splitkv.planner.policies.shared import num_tiles, shapes
from splitkv.runtime import dispatch

ALL_KERNELS = registry.KERNELS
H200 = GPUS["h200"]
CASE = CASES["mqa8_b1_512"]
POLICY = {"waves": waves.choose, "one": fixed.with_splits(1)}


def us_of(problem: Problem, config: Config) -> float:
    """What the fake GPU takes: wide tiles are better than the cost model thinks."""
    seconds = decode_cost.cost(problem, H200, config).seconds
    return seconds * 1e6 * (0.5 if config.tile_n == 128 else 1.0)


class FakeSession:
    """Captures nothing; its stopwatch takes turns and medians as the real one."""

    entered: list[Config] = []
    broken: Callable[[Config], Exception | None] = staticmethod(lambda config: None)
    stops: Callable[[str], bool] = staticmethod(lambda name: False)

    def __init__(self, case: Case, protocol: Protocol) -> None:
        self.problem, self.rounds = case.problem, []
        FakeSession.last = self

    def capture(self, variant: Variant) -> tuple[Callable[[], float], dict[str, Any]]:
        config = variant.decision["plan"].config
        assert variant.decision["plan"].problem == self.problem
        if error := FakeSession.broken(config):
            raise error
        FakeSession.entered.append(config)
        return lambda: us_of(self.problem, config), {}

    def time(
        self, replays: Mapping[str, Callable[[], float]], rounds: int
    ) -> tuple[dict[str, Timing], dict[str, str]]:
        self.rounds.append((rounds, len(replays)))
        samples = timing.interleave(replays, rounds)
        reasons = {name: "after its rounds: no" for name in samples if FakeSession.stops(name)}
        times = {n: timing.summarize(us) for n, us in samples.items() if n not in reasons}
        return times, reasons


@pytest.fixture(autouse=True)
def one_kernel_that_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = records.DECODE_SPLIT, records.TORCH_SDPA, records.TORCH_MATH
    monkeypatch.setattr(registry, "KERNELS", kernels)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (studies, sweep):
        monkeypatch.setattr(module, "facts", lambda: MACHINE)
    for module in (sweep, tune):
        monkeypatch.setattr(module, "current", lambda: H200)
    monkeypatch.setattr(studies, "Session", FakeSession)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(FakeSession, "entered", [])
    yield


def console() -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(file=screen, width=200), screen


def run(cases: list[Case], path: Path | None = None, **options: Any) -> tuple[Any, Any, str]:
    out, screen = console()
    options = {"effort": Effort(), "jobs": 0, "time_limit": None, "console": out, **options}
    policies = options.pop("policies", POLICY)
    records, lost = studies.run_studies(cases, H200, policies, json_path=path, **options)
    return records, lost, screen.getvalue()


def one(case: Case = CASE) -> dict[str, Any]:
    who = studies.entries(case, H200, POLICY, 12)
    return studies.study(case, H200, who, 9)


# --- which plans -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mqa8_b1_512", "gqa32x8_b8_4096_q16_page16", "mqa8_b64_mixed"])
def test_candidates_are_legal_and_different(name: str) -> None:
    problem = CASES[name].problem
    found = space.candidates(problem, H200, 12)
    assert 6 <= len(found) <= 12
    assert len({(c.kernel, c.config) for c in found}) == len(found)
    kernels = {kernel.name: kernel for kernel in space.splitting(problem, H200)}
    for kernel, config in ((c.kernel, c.config) for c in found):
        assert replace(config, num_splits=1) in shapes(kernels[kernel], problem, H200)
        assert 1 <= config.num_splits <= num_tiles(problem, config.tile_n)
    assert len({c.config.tile_n for c in found}) >= 3
    equal = replace(problem, lengths="host")
    first = waves.choose(equal, H200, [kernels[found[0].kernel]]).config
    likeness = first.tile_n, first.num_warps, first.num_stages
    assert (found[0].config.tile_n, *likeness[1:]) == likeness


def test_every_kernel_that_splits_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = space.splitting(CASE.problem, H200)[0]
    rivals = (replace(kernel, name="a"), replace(kernel, name="b"))
    monkeypatch.setattr(registry, "KERNELS", rivals)
    found = space.candidates(CASE.problem, H200, 12)
    assert [c.kernel for c in found].count("a") == [c.kernel for c in found].count("b") == 6


def test_the_kernels_of_a_gpu_have_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for gpu in (H200, GPUS["l4"]):
        kernels = {kernel.name for kernel in space.splitting(CASE.problem, gpu)}
        assert {c.kernel for c in space.candidates(CASE.problem, gpu, 12)} == kernels


def test_neighbours_are_other_splits_of_the_shape_not_tried_yet() -> None:
    problem = CASES["mqa8_b1_131072"].problem
    best = Config(100, 16, 64, 4, 2)
    near = space.neighbours(problem, ("a", best))
    assert {(c.kernel, replace(c.config, num_splits=100)) for c in near} == {("a", best)}
    splits = [c.config.num_splits for c in near]
    assert len(set(splits)) == 4 and min(splits) < 100 < max(splits)
    tried = {kernel: [(kernel, c.config) for c in near] for kernel in "ab"}
    assert space.neighbours(problem, ("a", best), tried["a"]) == []
    assert space.neighbours(problem, ("a", best), tried["b"]) == near
    shared = replace(best, schedule="batch", programs=200)
    assert space.neighbours(problem, ("a", shared)) == []


def test_shapes_are_listed_by_promise() -> None:
    kernel = space.splitting(CASE.problem, H200)[0]
    listed = space.tile_shapes(CASE.problem, H200, kernel)
    legal = shapes(kernel, CASE.problem, H200)
    taken = waves.choose(CASE.problem, H200, [kernel]).config
    assert listed[0] == replace(taken, num_splits=1) and listed[1] == legal[0]
    assert set(listed) <= set(legal) and len(set(listed)) == len(listed)
    assert {shape.tile_n for shape in listed} == {shape.tile_n for shape in legal}


# --- a study -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("h200")
def test_a_study_finds_the_fastest_and_times_the_policies_with_it() -> None:
    record = one()
    tried = {json.dumps(t["config"]): t["us"] for t in record["tried"]}
    best = record["best"]
    assert best["config"]["tile_n"] == 128
    assert best["us"] == min(tried.values()) == us_of(CASE.problem, Config(**best["config"]))
    assert record["chosen"]["one"]["config"]["num_splits"] == 1
    shares = {name: regret(record, name) for name in POLICY}
    assert shares["one"] > shares["waves"] > 0
    assert record["chosen"]["waves"]["why"].startswith("waves: ")
    assert not record["reasons"] and json.loads(json.dumps(record)) == record
    assert record["problem"] == tuned.dims(CASE.problem)


@pytest.mark.usefixtures("h200")
def test_few_rounds_for_all_and_many_for_the_fastest() -> None:
    record = one()
    (few, everyone), (many, finalists) = FakeSession.last.rounds
    assert (few, many) == (studies.FIRST_ROUNDS, 9)
    assert finalists < everyone <= 12 + len(POLICY)
    assert sum(t["final"] for t in record["tried"]) == finalists
    for plan in (record["best"], *record["chosen"].values()):
        (same,) = (t for t in record["tried"] if t["config"] == plan["config"])
        assert same["final"]


@pytest.mark.usefixtures("h200")
def test_a_plan_that_cannot_run_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Config) -> Exception | None:
        return AssertionError("out: expected an error") if config.tile_n == 128 else None

    monkeypatch.setattr(FakeSession, "broken", staticmethod(broken))
    record = one()
    assert record["best"]["config"]["tile_n"] != 128
    assert record["reasons"] and "x 128, 4 warps" in record["reasons"][0]
    assert record["reasons"][0].endswith("AssertionError: out: expected an error")


@pytest.mark.usefixtures("h200")
def test_a_plan_that_is_wrong_after_its_rounds_is_not_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best = sweep.label_of(one()["best"])
    monkeypatch.setattr(FakeSession, "stops", staticmethod(lambda name: name == best))
    record = one()
    assert record["reasons"] == [f"{best}: after its rounds: no"]
    assert best not in map(sweep.label_of, record["tried"])
    assert record["best"] in [{n: t[n] for n in record["best"]} for t in record["tried"]]


@pytest.mark.usefixtures("h200")
def test_where_nothing_can_run_the_reasons_are_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "broken", staticmethod(lambda config: ValueError("no")))
    record = one()
    assert record["best"] is None and record["tried"] == [] and len(record["reasons"]) > 5
    assert record["chosen"]["waves"]["us"] is None and regret(record, "waves") is None

    def too_much(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(studies, "Session", too_much)
    assert one()["reasons"] == ["OutOfMemoryError: tried to allocate"]
    assert "tried to allocate" in studies.line(one())


def test_graphs_are_short_and_cold() -> None:
    small = studies.protocol_for(CASE, H200, 9)
    assert (small.calls, small.flush, small.rounds, small.mode) == (64, True, 9, "isolated")
    large = studies.protocol_for(CASES["gqa32x8_b8_32768"], H200, 9)
    assert large.calls == 8


# --- many studies ------------------------------------------------------------------------------

FEW = [CASES[name] for name in ("mqa8_b1_512", "mqa8_b1_2048", "mqa8_b1_8192")]


@pytest.mark.usefixtures("h200")
def test_a_run_goes_on_where_another_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "studies.jsonl"
    first, *_ = run(FEW[:2], path)
    with path.open("a") as file:
        file.write('{"suite": "study", "case": "mqa8_b1_81')
    FakeSession.entered.clear()
    records, lost, text = run(FEW, path)
    assert not lost and [r["case"] for r in records] == [c.name for c in FEW]
    assert records[:2] == first
    assert "2 of 3 cases were already measured" in text and "3/3 mqa8_b1_8192  " in text
    assert len(path.read_text().splitlines()) == 3
    FakeSession.entered.clear()
    run(FEW, path)
    assert FakeSession.entered == []
    run(FEW[:1], path, policies={"waves": fixed.with_splits(2)})
    assert len([c for c in FakeSession.entered if c.num_splits == 2]) >= 1
    FakeSession.entered.clear()
    monkeypatch.setattr(studies, "facts", lambda: {**MACHINE, "commit": "def"})
    run(FEW[:1], path)
    assert FakeSession.entered


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("kind", ENDINGS)
def test_whatever_ends_a_run_loses_no_study(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, study = ending(kind, tmp_path / "studies.jsonl", "mqa8", monkeypatch), studies.study

    def studied(case: Case, *args: Any) -> Any:
        ended.take(case.name)
        return study(case, *args)

    monkeypatch.setattr(studies, "study", studied)
    with ended.raised():
        run(FEW, ended.path, console=ended.console)
    assert [r["case"] for r in ended.kept(capsys)] == ended.taken
    assert 0 < len(ended.taken) < len(FEW)


@pytest.mark.usefixtures("h200")
def test_past_the_time_limit_no_study_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.0, 1.0, 11.0])
    monkeypatch.setattr(studies, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    records, lost, text = run(FEW, time_limit=10)
    assert [r["case"] for r in records] == ["mqa8_b1_512"] and not lost
    assert "time limit of 10 s: 2 cases left out" in text


@pytest.mark.usefixtures("h200")
def test_studies_are_on_disk_before_the_gpu_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost_at_2048(case: Case, protocol: Protocol) -> FakeSession:
        if case == FEW[1]:
            raise RuntimeError("CUDA error: an illegal memory access")
        return FakeSession(case, protocol)

    def unusable() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(studies, "Session", lost_at_2048)
    monkeypatch.setattr(torch.cuda, "synchronize", unusable)
    path = tmp_path / "studies.jsonl"
    records, lost, text = run(FEW, path)
    assert lost and [r["case"] for r in records] == ["mqa8_b1_512"]
    assert len(path.read_text().splitlines()) == 1
    assert "mqa8_b1_2048: stopped: RuntimeError: CUDA error" in text


# --- tune and regret ---------------------------------------------------------------------------


def test_problems_are_drawn_over_every_axis() -> None:
    cases = tune.drawn(320, 0, 1.1e9)
    assert [c.name for c in cases] == [c.name for c in tune.drawn(320, 0, 1.1e9)]
    others = {c.name for c in tune.drawn(150, 1, 1.1e9)}
    assert len(others.intersection(c.name for c in cases)) < 5
    assert len({c.name for c in cases}) == 320
    problems = [c.problem for c in cases]
    assert max(p.kv_bytes for p in problems) <= 1.1e9
    for axis, values in (
        (lambda p: p.num_kv_heads, tune.KV_HEADS),
        (lambda p: p.group, tune.RATIOS),
        (lambda p: p.head_dim, tune.HEAD_DIMS),
        (lambda p: getattr(p.place, "page_size", None), tune.PAGE_SIZES),
        (lambda p: p.seqlen_q, (1, 4, 16)),
        (lambda p: min(7, p.batch.bit_length() - 1), range(8)),
        (lambda p: p.seqlen_k.bit_length() - 1, range(7, 19)),
    ):
        counts = {value: [axis(p) for p in problems].count(value) for value in values}
        assert sum(counts.values()) == 320 and min(counts.values()) >= 8
    assert all(p.batch <= 256 and 128 <= p.seqlen_k <= 1 << 19 for p in problems)
    with pytest.raises(ValueError, match=r"^max_bytes: expected at least 10000000.0, got 5$"):
        tune.drawn(10, 0, 5)


def test_the_matrix_is_that_of_the_source() -> None:
    cases = tune.matrix()
    assert len({case.name for case in cases}) == 160
    assert {c.problem.group for c in cases} == {8}
    assert cases[0].name == "b1_h8x1_d128_q1_k128"


def test_what_is_known_is_tuned_too_in_shares() -> None:
    whole = tune.tuning(20, 0, 1e9, True, (1, 1))
    assert len(whole) == len({case.name for case in whole})
    assert {case.name for case in tune.matrix()} < {case.name for case in whole}
    shares = [tune.tuning(20, 0, 1e9, True, tune.share_of(f"{k}/3")) for k in (1, 2, 3)]
    assert sorted(case.name for share in shares for case in share) == sorted(
        case.name for case in whole
    )
    for text in ("0/3", "4/3", "1", "a/b", "1/2/3"):
        with pytest.raises(ValueError, match=r"^share: expected k/n with k from 1 to n, got "):
            tune.share_of(text)


def tuned_with(path: Path | None, count: int = 5, **options: Any) -> tuple[int, str]:
    out, screen = console()
    given: dict[str, Any] = {
        **{"problems": count, "seed": 0, "max_bytes": 1e9, "effort": Effort(8, 3)},
        **{"with_known": False, "share": (1, 1)},
        **{"table_path": path, "command": "splitkv tune", "jobs": 0, "json_path": None},
        **{"time_limit": None, "console": out},
    }
    return tune.tune(**{**given, **options}), screen.getvalue()


@pytest.mark.usefixtures("h200")
def test_tune_writes_a_table_that_tuned_follows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "h200.json"
    status, text = tuned_with(path, 12)
    assert status == 0 and f"{path}: 12 problems" in text and "| waves " in text
    table = tuned.load(path)
    assert table.gpu == "NVIDIA H200" and len(table.measured) == 12
    assert table.made["command"] == "splitkv tune" and table.made["commit"] == "abc"
    choose, kernels = tuned.with_table(table), space.splitting(CASE.problem, H200)
    for measured in table.measured:
        us = [plan.us for plan in measured.plans]
        assert us == sorted(us) and 2 <= len(us) <= tune.PLANS_KEPT
        assert {plan.config.schedule for plan in measured.plans} == {"even"}
        chosen = choose(measured.problem, H200, kernels).config
        if chosen.schedule == "even":
            assert us_of(measured.problem, chosen) <= 1.02 * us[0]


@pytest.mark.usefixtures("h200")
def test_tune_writes_where_the_policy_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITKV_CACHE", str(tmp_path))
    status, text = tuned_with(None, 3)
    assert status == 0 and f"{tmp_path / 'h200.json'}: 3 problems" in text
    assert {path.name for path in tmp_path.iterdir()} == {"h200.json", "h200.jsonl"}
    found = tuned.table_of("NVIDIA H200")
    monkeypatch.undo()
    tuned.table_of.cache_clear()
    assert found is not None and found.note.startswith(", your table of 20")


@pytest.mark.usefixtures("h200")
def test_an_interrupted_tune_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told a file: what was timed stands beside the table."""
    path, taken, study = tmp_path / "h200.json", list[str](), studies.study

    def studied(case: Case, *args: Any) -> Any:
        taken.append(case.name)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return study(case, *args)

    monkeypatch.setattr(studies, "study", studied)
    with pytest.raises(KeyboardInterrupt):
        tuned_with(path, 4)
    assert not path.exists() and len(path.with_suffix(".jsonl").read_text().splitlines()) == 2
    status, text = tuned_with(path, 4)
    assert status == 0 and f"2 of 4 cases were already measured: {tmp_path}" in text
    assert len(taken) == 5 and len(tuned.load(path).measured) == 4


@pytest.mark.usefixtures("h200")
def test_a_table_of_320_problems_is_small(tmp_path: Path) -> None:
    plans = tuple(
        tuned.Timed("hopper_decode_split", Config(1000 + i, 64, 128, 8, i), 1234.56)
        for i in range(tune.PLANS_KEPT)
    )
    measured = [tuned.Measured(case.problem, plans) for case in tune.drawn(320, 0, 1.1e9)]
    table = tuned.Table("NVIDIA H200", MACHINE, tuple(measured))
    assert len(tuned.dump(table)) < 100_000


@pytest.mark.usefixtures("h200")
def test_without_a_time_there_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "broken", staticmethod(lambda config: ValueError("no")))
    status, text = tuned_with(tmp_path / "h200.json")
    assert status == 1 and "no plan was timed: no table" in text
    assert not (tmp_path / "h200.json").exists()


def regret_of(**options: Any) -> tuple[int, str]:
    out, screen = console()
    given: dict[str, Any] = {
        **{"with_matrix": False, "random_problems": 6, "seed": 1, "max_bytes": 1e9},
        **{"lengths": "device", "share": (1, 1), "policies": POLICY, "effort": Effort(8, 3)},
        **{"jobs": 0, "json_path": None, "time_limit": None, "console": out},
    }
    return tune.measure_regret(**{**given, **options}), screen.getvalue()


@pytest.mark.usefixtures("h200")
def test_regret_goes_over_the_matrix_and_problems_at_random(tmp_path: Path) -> None:
    path = tmp_path / "regret.jsonl"
    status, text = regret_of(with_matrix=True, random_problems=2, json_path=path)
    assert status == 0 and "162/162" in text
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| one ")]
    assert rows[0][1].strip() == "162"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 162 and all(r["chosen"].keys() == POLICY.keys() for r in lines)
    assert "median" in report(lines) and report(lines).startswith("NVIDIA H200, driver 580")


@pytest.mark.usefixtures("h200")
def test_regret_in_shares_is_that_of_the_whole(tmp_path: Path) -> None:
    found = []
    for k in (1, 2, 3):
        path = tmp_path / f"{k}.jsonl"
        regret_of(share=(k, 3), random_problems=7, json_path=path)
        found += [json.loads(line)["case"] for line in path.read_text().splitlines()]
    assert sorted(found) == sorted(case.name for case in tune.drawn(7, 1, 1e9))


@pytest.mark.usefixtures("h200")
def test_regret_where_the_host_knows_the_lengths(tmp_path: Path) -> None:
    path = tmp_path / "regret.jsonl"
    regret_of(lengths="host", random_problems=1, json_path=path)
    assert json.loads(path.read_text())["case"].endswith("_host")
    with pytest.raises(ValueError, match="^random: expected some, without the matrix, got 0$"):
        regret_of(random_problems=0)


def test_the_regret_table_counts_from_the_best() -> None:
    def record(case: str, us: float | None) -> dict[str, Any]:
        config = {"num_splits": 4, "tile_n": 64, "num_warps": 4, "num_stages": 2}
        plan = {"kernel": "k", "config": config}
        chosen = {"waves": {**plan, "us": us}}
        return {"case": case, "best": {**plan, "us": 10.0}, "chosen": chosen}

    records = [record(f"c{i}", 10.0 + i / 10) for i in range(11)] + [record("none", None)]
    lines = regret_table(records, worst=2).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["waves", "11", "1", "5.0%", "9.0%", "10.0%"]
    plan = "k 4 x 64 keys, 4 warps, 2 stages"
    assert cells[6] == ["waves", "10.0%", "c10", plan, "11.00", plan, "10.00"]
    assert len(cells) == 8


# --- sweeps ------------------------------------------------------------------------------------


def swept(case: Case = CASE, path: Path | None = None, **options: Any) -> tuple[Any, bool, str]:
    out, screen = console()
    given: dict[str, Any] = {
        **{"policies": POLICY, "num_splits": 64, "kernels": [], "all_tiles": False},
        **{"jobs": 0, "json_path": path, "time_limit": None, "console": out},
    }
    records, lost = sweep.sweep(case, **{**given, **options})
    return records, lost, screen.getvalue()


@pytest.mark.usefixtures("h200")
def test_a_sweep_times_every_number_of_splits(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    records, lost, text = swept(path=path)
    assert not lost
    curve = [r for r in records if not r["policy"]]
    tiles: dict[tuple[int, int, int], list[int]] = {}
    for r in curve:
        c = r["config"]
        shape = c["tile_n"], c["num_warps"], c["num_stages"]
        tiles.setdefault(shape, []).append(c["num_splits"])
    assert len(tiles) == sweep.TILES
    assert all(splits == list(range(1, 512 // n + 1)) for (n, *_), splits in tiles.items())
    assert {r["policy"] for r in records} - {None} == POLICY.keys()
    best = min(curve, key=lambda r: r["us"])
    row = next(line for line in text.splitlines() if line.startswith("| best of decode_split"))
    assert f"{best['us']:.2f}" in row
    assert report(records).startswith("mqa8_b1_512: NVIDIA H200")
    FakeSession.entered.clear()
    assert len(swept(path=path)[0]) == len(records)
    assert FakeSession.entered == []


@pytest.mark.usefixtures("h200")
def test_an_interrupted_sweep_has_its_points_on_disk_and_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, (out, screen) = tmp_path / "sweep.jsonl", console()
    whole, *_ = swept()
    time, batches = sweep._time, iter(range(2))

    def interrupted(*args: Any) -> Any:
        if next(batches, None) is None:
            raise KeyboardInterrupt
        return time(*args)

    monkeypatch.setattr(sweep, "_time", interrupted)
    with pytest.raises(KeyboardInterrupt):
        swept(path=path, console=out)
    monkeypatch.setattr(sweep, "_time", time)
    first = path.read_text().splitlines()
    assert 0 < len(first) < len(whole) and "| best of decode_split" in screen.getvalue()
    again, *_ = swept(path=path)
    assert len(again) == len(whole) and path.read_text().splitlines()[: len(first)] == first


@pytest.mark.usefixtures("h200")
def test_a_sweep_of_all_splits_and_all_tiles() -> None:
    case = CASES["mqa8_b1_8192"]
    records, *_ = swept(case, num_splits=0, policies={}, kernels=["decode_split"])
    assert max(r["config"]["num_splits"] for r in records) == max(
        num_tiles(case.problem, r["config"]["tile_n"]) for r in records
    )
    legal = shapes(space.splitting(case.problem, H200)[0], case.problem, H200)
    records, *_ = swept(case, num_splits=2, policies={}, all_tiles=True)
    assert len(records) == 2 * len(legal)
    with pytest.raises(ValueError, match="^kernel: expected 'decode_split'"):
        swept(kernels=["nobody"])


@pytest.mark.usefixtures("h200")
def test_a_sweep_stops_at_its_time_limit_but_times_the_policies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 1.0, 11.0])
    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    records, _, text = swept(time_limit=10)
    assert "time limit of 10 s: not every number of splits" in text
    assert len({r["config"]["tile_n"] for r in records if not r["policy"]}) == 1
    assert {r["policy"] for r in records} - {None} == POLICY.keys()


@pytest.mark.usefixtures("h200")
def test_the_boundary_sweep_goes_over_lengths(tmp_path: Path) -> None:
    out, screen = console()
    options: dict[str, Any] = {"jobs": 0, "json_path": None, "time_limit": None, "console": out}
    records, lost = sweep.boundary(CASE, [384, 512, 640], policies=POLICY, **options)
    assert not lost and [r["problem"]["seqlen_k"] for r in records] == [384, 512, 640]
    assert [r["case"] for r in records] == [f"mqa8_b1_512@{keys}" for keys in (384, 512, 640)]
    assert boundary_table(records) in screen.getvalue()
    mixed = SUITES["mixed"][1]
    with pytest.raises(ValueError, match="^case: expected sequences of equal length"):
        sweep.boundary(mixed, [512], policies=POLICY, **options)


@pytest.mark.usefixtures("h200")
def test_pictures_of_sweeps_are_drawn(tmp_path: Path) -> None:
    plots = pytest.importorskip("splitkv.lab.plots")
    records, *_ = swept()
    plots.draw(records, tmp_path / "new" / "curve.svg")
    assert "decode_split" in (tmp_path / "new" / "curve.svg").read_text()
    studied, *_ = run(FEW)
    plots.draw(studied, tmp_path / "boundary.png")
    assert (tmp_path / "boundary.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="^plot: expected results of `splitkv sweep`, got 'none'$"):
        plots.draw([{"suite": "decode"}], tmp_path / "none.svg")


def test_the_sweep_table_has_a_row_for_each_kernel_and_policy() -> None:
    def point(kernel: str, splits: int, us: float | None, policy: str | None) -> dict[str, Any]:
        config = {"num_splits": splits, "tile_n": 64, "num_warps": 4, "num_stages": 2}
        return {"kernel": kernel, "config": config, "us": us, "policy": policy}

    records = [point("a", 1, 8.0, None), point("a", 2, 4.0, None), point("b", 1, 5.0, None)]
    records += [point("a", 1, 8.0, "waves"), point("b", 1, None, "fixed")]
    lines = sweep_table(records).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [(row[0], row[2], row[3]) for row in cells] == [
        ("best of a", "4.00", "+0.0%"),
        ("best of b", "5.00", "+25.0%"),
        ("waves", "8.00", "+100.0%"),
    ]


def test_a_shape_to_sweep_is_a_case_or_dimensions() -> None:
    assert sweep.case_to_sweep("mqa8_b1_512", batch=None) == CASE
    usual = sweep.case_to_sweep(None, batch=None, page_size=None)
    assert usual.name == "b1_h8x1_d128_q1_k512" and usual.problem == CASE.problem
    paged = sweep.case_to_sweep(None, num_heads=32, num_kv_heads=8, page_size=16)
    assert paged.name == "b1_h32x8_d128_q1_k512_page16"


@pytest.mark.parametrize(
    ("text", "seqlens"),
    [("128:512:128", [128, 256, 384, 512]), ("5,7,5", [5, 7]), ("64", [64])],
)
def test_seqlens_are_a_range_or_a_list(text: str, seqlens: list[int]) -> None:
    assert sweep.parse_seqlens(text) == seqlens


@pytest.mark.parametrize("text", ["", "1:2", "1:2:0", "9:1:1", "a", "0,5", "-1:5:1"])
def test_malformed_seqlens(text: str) -> None:
    with pytest.raises(ValueError, match="^seqlens: expected FIRST:LAST:STEP or numbers"):
        sweep.parse_seqlens(text)


# --- compiling ahead ---------------------------------------------------------------------------


def plan(splits: int = 4, tile_n: int = 64, problem: Problem = CASE.problem) -> Plan:
    return Plan(problem, H200, "test", "decode_split", Config(splits, 16, tile_n, 4, 2), "")


def test_plans_that_differ_in_run_time_numbers_share_their_kernels() -> None:
    wide = replace(CASE.problem, batch=7, seqlen_k=9999)
    same = [plan(3), plan(4), plan(4, problem=wide)]
    assert len({compiler.key(p) for p in same}) == 1
    grouped = replace(CASE.problem, num_heads=16)
    tokens = [replace(CASE.problem, num_heads=4, seqlen_q=n) for n in (2, 4)]  # 8 and 16 rows
    other = [plan(1), plan(2), plan(5), plan(4, 32), plan(problem=grouped)]
    other += [plan(problem=problem) for problem in tokens]
    assert len({compiler.key(p) for p in (*same, *other)}) == 1 + len(other)


class FakePool:
    """Runs nothing: its work is done when the test says so."""

    def __init__(self) -> None:
        self.work: list[tuple[Any, ...]] = []
        self.futures: list[Future[None]] = []

    def submit(self, function: Any, *args: Any) -> Future[None]:
        if len(self.work) == 3:
            raise compiler.BrokenExecutor
        self.work.append((function, *args))
        self.futures.append(Future())
        return self.futures[-1]


def test_what_is_still_compiling_is_ended_with_the_run() -> None:
    with Compiler(1) as ahead:
        assert ahead.pool is not None
        ahead.pool.submit(int).result()  # until its process has started
        long = ahead.pool.submit(time.sleep, 600)
        end = time.monotonic() + 20
        while not long.running() and time.monotonic() < end:
            time.sleep(0.01)
    with pytest.raises(compiler.BrokenExecutor):
        long.result(20)


def test_each_kernel_is_compiled_once_and_small_caches_only() -> None:
    ahead = Compiler(0)
    assert ahead.submit([plan()]) == []
    ahead.pool = pool = FakePool()  # type: ignore[assignment]
    first = ahead.submit([plan(3), plan(4)])
    assert len(first) == 1 and ahead.submit([plan(4)]) == first
    huge = replace(CASE.problem, batch=256, seqlen_k=1 << 19)
    assert ahead.submit([plan(4, 128, huge)]) == []
    assert pool.work == [
        (compiler.compile_plan, CASE.problem, H200, "decode_split", plan(4).config)
    ]
    pool.futures[0].set_exception(RuntimeError("ptxas\ndied"))
    assert ahead.failures() == ["RuntimeError: ptxas"]
    assert len(ahead.submit([plan(1), plan(2), plan(8), plan(16)])) == 2
    assert ahead.pool is None and ahead.submit([plan(32)]) == []


def test_what_is_ready_comes_first() -> None:
    futures = {name: Future[None]() for name in "abc"}
    futures["b"].set_result(None)
    order = in_order_of_readiness("abcd", lambda name: [futures[name]] if name in futures else [])
    assert next(order) == "b" and next(order) == "d"
    futures["c"].set_exception(RuntimeError("no matter"))
    assert next(order) == "c"
    futures["a"].set_result(None)
    assert list(order) == ["a"]


def test_no_more_wait_than_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    order = in_order_of_readiness(range(1000), lambda i: asked.append(i) or [])
    assert next(order) == 0 and len(asked) == compiler.AHEAD
    assert next(order) == 1 and len(asked) == compiler.AHEAD + 1
    assert list(order) == list(range(2, 1000))


class Loaded:
    """What Triton makes to launch a kernel, in its own module as far as anyone looks."""

    __module__ = nvidia.__name__
    global_scratch_size = profile_scratch_size = 0
    launch = staticmethod(print)  # of C, as Triton's; never called

    def __call__(self, *args: Any) -> None:
        self.launch(*args)


# Other heads each: a kernel that was compiled for one test is not compiled for another.
@pytest.mark.parametrize(("kernel", "heads"), [("decode_split", 3), ("hopper_decode_split", 5)])
def test_a_process_compiles_the_kernels_of_a_plan_and_launches_none(
    kernel: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    class Driver(AnyGPU):
        def launcher_cls(self, src: Any, metadata: Any) -> Loaded:
            compiled.append(metadata.name)
            return Loaded()

    for owner, name in (
        (JITFunction, "run"),
        (CompiledKernel, "_init_handles"),
        (CompiledKernel, "__getitem__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for name in ("_cuda_getCurrentRawStream", "_cuda_isCurrentStreamCapturing"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    monkeypatch.setattr(registry, "KERNELS", ALL_KERNELS)
    monkeypatch.setattr(compiler.os, "nice", lambda by: None)
    monkeypatch.setattr(driver, "_active", Driver(90))
    monkeypatch.setattr(dispatch, "fit_plan", lambda plan, *_: registry.completed(plan))
    monkeypatch.setattr(
        compiler, "Inputs", lambda case, count, blank: Inputs(case, count, "cpu", blank=blank)
    )
    compiler.only_compile()
    merge = launcher.combine  # whichever test has compiled it in this process before
    monkeypatch.setattr(merge, "device_caches", defaultdict(merge.create_binder))
    problem = replace(CASE.problem, num_heads=heads)
    compiler.compile_plan(problem, H200, kernel, Config(4, num_stages=2))
    assert compiled == [kernel, "combine"]


def test_every_policy_may_be_studied() -> None:
    who = studies.entries(CASE, H200, POLICIES, 4)
    assert who.chosen.keys() == POLICIES.keys()
    assert {p.kernel for p in studies.foreseen(CASE, H200, who)} == {"decode_split"}
