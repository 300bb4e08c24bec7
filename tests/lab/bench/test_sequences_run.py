"""`splitkv bench prefill`, `backward`, `varlen` without a GPU: plans, records, tables, command."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from compiling import AnyGPU
from ending import ENDINGS, ending
from results import MACHINE, PEAK, TWO, measured
from results import rate_records as records
from rich.console import Console
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core.device import GPUS
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.lab.bench.sequences import run as bench
from splitkv.lab.bench.sequences import timing
from splitkv.lab.bench.sequences.suites import CASES, SUITES, select
from splitkv.lab.bench.sequences.timing import QUICK, Measured, Pace, Sample, Station, key_of
from splitkv.lab.harness import compiler
from splitkv.lab.harness import sequence_cases as cases
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.sequence_cases import Inputs, flops
from splitkv.lab.report import sequences as tables
from splitkv.planner.registry import completed, kernel_named
from splitkv.runtime import dispatch

H200 = GPUS["h200"]
PEAK_TFLOPS = 2 * 8192**3 / 1500.0 / 1e6


def command(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", *args])


# plans


def test_a_kernel_may_be_forced_and_compared() -> None:
    assert [v.library for v in bench.our_variants()] == ["splitkv"]
    variants = bench.our_variants(["prefill", "torch_math"])
    assert [v.library for v in variants] == ["splitkv (prefill)", "splitkv (torch_math)"]
    problem = CASES["backward", "gqa32x8_b4_4096_causal"].problem
    plan = bench.forced("prefill", problem, H200)
    assert (plan.kernel, plan.problem) == ("prefill", problem)
    assert plan.config in list(kernel_named("prefill").configs(problem, H200))
    assert plan.why.endswith("; the kernel as asked")
    with pytest.raises(ValueError, match=r"^kernel: expected .*, got 'best'$"):
        bench.our_variants(["best"])


def test_a_forced_kernel_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "current", lambda: H200)
    case = Case("odd", replace(CASES["forward", TWO[0]].problem, head_dim=12))
    (variant,) = bench.our_variants(["prefill"])
    assert variant.unsupported(case)[0].startswith("head_dim 12: expected a multiple of 8")
    assert bench.plans(case, [variant], H200) == []


def test_what_is_compiled_ahead_are_our_own_kernels() -> None:
    case = CASES["forward", TWO[0]]
    variants = [*bench.our_variants(), *bench.our_variants(["prefill", "torch_sdpa"])]
    default, forced = bench.plans(case, variants, H200)
    assert forced.kernel == "prefill" and not default.kernel.startswith("torch_")


class Loaded:
    """What Triton makes to launch a kernel."""

    global_scratch_size = profile_scratch_size = 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_process_compiles_forward_and_backward_and_launches_none(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    class Driver(AnyGPU):
        def launcher_cls(self, src: Any, metadata: Any) -> Loaded:
            compiled.append(src.fn.__name__)
            return Loaded()

    for owner, name in (
        (JITFunction, "run"),
        (CompiledKernel, "_init_handles"),
        (CompiledKernel, "__getitem__"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(compiler.os, "nice", lambda by: None)
    monkeypatch.setattr(driver, "_active", Driver(90))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", int, raising=False)
    monkeypatch.setattr(dispatch, "fit_plan", lambda plan, *_: completed(plan))
    on_cpu = {"device": "cpu"}
    monkeypatch.setattr(cases, "Inputs", lambda case, **more: Inputs(case, **more, **on_cpu))
    compiler.only_compile()
    whole = CASES["backward", "gqa32x8_b64_log_normal_causal" if packed else "mha16_b2_8192_full"]
    sizes = {"batch": 2, "num_heads": 3, "num_kv_heads": 1, "seqlen_q": 300, "seqlen_k": 300}
    dim = 128 if packed else 64  # of its own: what Triton has compiled is compiled once
    problem = replace(whole.problem, head_dim=dim, head_dim_v=dim, **sizes)  # type: ignore[arg-type]
    config = next(kernel_named("prefill").configs(problem, H200))
    compiler.compile_plan(problem, H200, "prefill", config)
    assert {"prefill", "backward_rows", "hopper_backward", "hopper_backward_finish"} <= set(
        compiled
    )


# records and tables


def test_a_record_says_what_decode_says_and_the_rate() -> None:
    r, fa3x, _ = records()[:3]
    case = CASES["forward", TWO[0]]
    assert (r["suite"], r["direction"], r["library"]) == ("prefill", "forward", "splitkv")
    assert r["tflops"] == pytest.approx(flops(case) / 8e-3 / 1e12)
    assert r["peak_tflops"] == pytest.approx(PEAK_TFLOPS)
    assert r["peak_fraction"] == pytest.approx(r["tflops"] / PEAK_TFLOPS)
    assert r["floor_us"] == pytest.approx(flops(case) / PEAK_TFLOPS / 1e6)
    assert r["floor"]["by"] == "torch.matmul bfloat16 8192x8192x8192"
    assert r["floor"]["spread_us"] == pytest.approx(r["floor_us"] / 100)
    assert r["floor"]["sm_mhz"] == 1490 and r["clocks"] == {"sm_mhz": 1500}
    assert r["pace"] == {"rounds": 9, "burst_us": 15_000.0, "calls": 5}
    assert (r["mode"], r["cache"], r["launched"]) == ("queued", "warm", ["prefill"])
    assert r["peak_bytes"] == 33_554_432
    assert r["shape"]["batch"] == 4 and r["shape"]["mask"] == "full"
    assert r["tbs"] == case.kv_bytes / r["us"] / 1e6
    assert fa3x["kernel"] == "upstream" and fa3x["versions"]["library"] == "1"
    assert json.loads(json.dumps(r)) == r


def test_a_record_without_a_time_has_no_rate() -> None:
    r = records()[4]
    assert r["reasons"] == ["too old"]
    assert r["us"] is r["tflops"] is r["peak_fraction"] is r["tbs"] is r["clocks"] is None
    case = CASES["forward", TWO[0]]
    without = measured(case, (1.0, 1.0, 1.0))._replace(peak=None)
    for r in bench.records("prefill", case, without, QUICK, MACHINE):
        assert r["tflops"] is not None
        assert r["floor"] is r["floor_us"] is r["peak_tflops"] is r["peak_fraction"] is None


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_sets_ours_beside_every_library() -> None:
    lines = tables.rates_table(records()).splitlines()
    assert cells(lines[0]) == [
        *("forward, TFLOP/s", "splitkv", "fa3x upstream", "cudnn sdpa", "of peak", "best peer"),
        "ratio",
    ]
    rate = flops(CASES["forward", TWO[0]]) / 1e12
    assert cells(lines[2]) == [
        *(TWO[0], f"{rate / 8e-3:.0f}", f"{rate / 4e-3:.0f}", f"{rate / 6e-3:.0f}"),
        *(f"{rate / 8e-3 / PEAK_TFLOPS:.0%}", "fa3x upstream", "0.50"),
    ]
    assert cells(lines[3])[2] == "-" and cells(lines[3])[-2:] == ["cudnn sdpa", "2.00"]
    assert "best peer / ours over 2 cases: geometric mean 1.00, least 0.50, most 2.00" in lines
    assert f"matrix peak in the same rounds {PEAK_TFLOPS:.0f} to {PEAK_TFLOPS:.0f} TFLOP/s" in lines
    assert lines[-1] == "SM clock of the timed calls 1500 to 1500 MHz"


def test_the_fastest_of_ours_stands_against_the_best_peer() -> None:
    first, *rest = records()[:3]
    slower = {**first, "library": "splitkv (prefill)"}
    faster = {**first, "library": "splitkv (hopper_prefill)", "us": 2e3, "tflops": 999.4}
    faster["peak_fraction"] = 0.876
    lines = tables.rates_table([slower, *rest, faster]).splitlines()
    assert cells(lines[0])[1:3] == ["splitkv (prefill)", "splitkv (hopper_prefill)"]
    assert cells(lines[2])[2] == "999" and cells(lines[2])[-3:] == ["88%", "fa3x upstream", "2.00"]


def test_where_nobody_has_a_time_there_is_a_table_of_none() -> None:
    untimed = [r for r in records() if r["us"] is None]
    assert cells(tables.rates_table(untimed).splitlines()[2]) == [TWO[1], "-", "-", "-"]


def test_report_has_each_direction_and_what_did_not_run(tmp_path: Path) -> None:
    both = [*records(suite="varlen"), *records("backward", "varlen")]
    again = {**both[0], "us": 1234.5, "spread_us": 0.5}
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in [*both, again]))
    result = CliRunner().invoke(app, ["report", str(path)])
    assert result.exit_code == 0
    text = result.stdout
    assert text.startswith("NVIDIA H200, driver 580, torch 2.11, triton 3.6; bfloat16, queued, ")
    for way in ("forward", "backward"):
        for what in ("TFLOP/s", "us (spread)", "MB allocated by a call"):
            assert text.count(f"| {way}, {what}") == 1
    assert text.count("33.6") == 2 * 5
    assert "1234.50 (0.50)" in text and text.count("8000.00 (5.00)") == 1
    assert text.count("* fa3x upstream on 1 of 2 cases: too old\n") == 2


def test_packed_sequences_are_set_beside_equal_ones() -> None:
    found = []
    packed, equal = "gqa32x8_b64_log_normal_causal", "gqa32x8_b64_2048_causal"
    for name, ms in ((equal, 1.0), (packed, 1.25)):
        case = CASES["forward", name]
        found += bench.records("varlen", case, measured(case, (ms,) * 3), Pace(), MACHINE)
    text = "\n\n".join(tables.rates_tables(found))
    assert f"geometric mean 1.250, most 1.250 ({packed})" in text


# the command


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "current", lambda: H200)
    monkeypatch.setattr(bench, "facts", lambda: MACHINE)
    monkeypatch.setattr(bench, "Peak", lambda pace: lambda: Sample(PEAK.us))


def run(monkeypatch: pytest.MonkeyPatch, measure: Any, **options: Any) -> tuple[int, str]:
    monkeypatch.setattr(bench, "measure", measure)
    screen = io.StringIO()
    found, status = bench.bench_sequences(
        "backward",
        select("backward", "dims", ["mha16_d64*"]),
        ours=bench.our_variants(),
        **{"console": Console(file=screen, width=80), "peers": ["cudnn"], "pace": QUICK, **options},
    )
    assert {r["suite"] for r in found} <= {"backward"}
    return status, screen.getvalue()


@pytest.mark.usefixtures("h200")
def test_results_are_on_disk_and_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], int]] = []

    def measure(case: Case, stations: Sequence[Station], peak: Any, rounds: int) -> Measured:
        here = stations[0]
        assert isinstance(here, timing.Here)
        asked.append(([v.library for v in here.variants], rounds))
        return measured(case, (2.0, 3.0, 4.0))

    path = tmp_path / "new" / "results.jsonl"
    status, screen = run(monkeypatch, measure, json_path=path)
    assert status == 0 and asked == [(["splitkv", "cudnn"], 3)] * 2
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 6 and {r["suite"] for r in lines} == {r["direction"] for r in lines}
    assert "mha16_d64_b4_8192_full backward  splitkv  2000.00 (5.00)" in screen
    assert "| backward, TFLOP/s" in screen and "  1500  1.0e-03" in screen


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("kind", ENDINGS)
def test_whatever_ends_a_run_loses_no_result(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = ending(kind, tmp_path / "results.jsonl", "mha16", monkeypatch)

    def measure(case: Case, *_: Any) -> Measured:
        ended.take(case.name)
        return Measured(measured(case, (2.0, 3.0, 4.0)).rows[:1], PEAK, 1490)

    with ended.raised():
        run(monkeypatch, measure, json_path=ended.path, console=ended.console)
    assert [r["case"] for r in ended.kept(capsys)] == ended.taken


@pytest.mark.usefixtures("h200")
def test_a_run_that_loses_the_gpu_stops_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: Case, *_: Any) -> Measured:
        rows = measured(case, (None, None, None)).rows
        return Measured(rows, lost="RuntimeError: illegal access")

    status, screen = run(monkeypatch, measure)
    assert status == 1
    assert "mha16_d64_b4_8192_full: stopped: RuntimeError: illegal access" in screen
    assert "mha16_d64_b4_8192_causal" not in screen


@pytest.mark.usefixtures("h200")
def test_past_the_time_limit_no_case_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 11.0])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    status, screen = run(
        monkeypatch, lambda case, *_: measured(case, (1.0, 1.0, 1.0)), time_limit=10
    )
    assert status == 0 and "time limit of 10 s: 1 cases left out" in screen


@pytest.mark.parametrize("name", ["prefill", "backward", "varlen"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "device: expected a CUDA GPU, got 'CPU'"),
        (["--case", "nobody"], "case: expected a glob that matches one of"),
        (["--suite", "best"], "suite: expected '"),
        (["--peers", "xqa"], "peers: expected all, none or some of fa2,cudnn,fa3x,fa3,flex"),
        (["--kernel", "best"], "kernel: expected "),
        (["--time-limit", "0"], "time_limit: expected more than 0, got 0"),
        (["--jobs", "-1"], "jobs: expected at least 0, got -1"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(
    args: list[str], message: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command(name, *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"splitkv: {message}")
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_options_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def benchmark(name: str, chosen: list[Case], **options: Any) -> Any:
        seen.update(name=name, cases=chosen, **options)
        return [], 1

    monkeypatch.setattr(bench, "bench_sequences", benchmark)
    result = command(
        *("varlen", "--suite", "backward", "--case", "mha16*", "--peers", "fa3x,fa2", "--quick"),
        *("--kernel", "prefill", "--kernel", "torch_sdpa", "--json", str(tmp_path / "r.jsonl")),
        *("--time-limit", "30", "--jobs", "3"),
    )
    assert result.exit_code == 1, result.output
    assert seen["name"] == "varlen" and seen["peers"] == ["fa3x", "fa2"]
    assert seen["cases"] == [c for c in SUITES["varlen"]["backward"] if c.name.startswith("mha16")]
    assert [v.library for v in seen["ours"]] == ["splitkv (prefill)", "splitkv (torch_sdpa)"]
    assert (seen["pace"], seen["time_limit"], seen["jobs"]) == (QUICK, 30.0, 3)
    assert seen["json_path"] == tmp_path / "r.jsonl"


def test_keys_name_a_library_and_its_kernel() -> None:
    problem = Problem("dense", 1, 1, 1, 64, 64, 8, 8, mask=Mask(True))
    rows = measured(Case("small", problem), (1.0, 1.0, 1.0)).rows
    keys = [key_of(row) for row in rows]
    assert keys == ["splitkv attention", "fa3x upstream", "cudnn sdpa"]
