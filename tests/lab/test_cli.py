"""The command line: what it prints and how it exits."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

import splitkv
from splitkv.__main__ import main
from splitkv.cli import app, parse_window, render
from splitkv.core import device
from splitkv.core.device import CPU, GPUS
from splitkv.core.plan import Config
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.lab.tune.problems import Draw
from splitkv.planner import registry
from splitkv.planner.explanation import explain
from splitkv.planner.policies import tuned_tables

QWEN = ["--batch", "1", "--heads", "28", "--kv-heads", "4", "--head-dim", "128"]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the packages of the command line are missing."""
    wanted = f"splitkv {splitkv.__version__}\n"
    assert run("--version").stdout == wanted
    assert "--version" in run("--help").stdout
    monkeypatch.setitem(sys.modules, "splitkv.cli", None)
    monkeypatch.setattr(sys, "argv", ["splitkv", "--version"])
    main()
    assert capsys.readouterr().out == wanted


def test_explain_as_json() -> None:
    result = run("explain", *QWEN, "--seqlen-k", "600", "--gpu", "h200", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["problem"]["num_heads"] == 28
    assert data["problem"]["mask"]["causal"] is True
    assert data["device"]["name"] == "NVIDIA H200"
    assert [plan["policy"] for plan in data["plans"]] == ["waves"]


def test_explain_takes_every_feature() -> None:
    features = [
        *("--seqlen-q", "3", "--head-dim-v", "64", "--dtype", "float16", "--page-size", "16"),
        *("--no-causal", "--window", "127,-1", "--sink-tokens", "4", "--sink-logits", "--softcap"),
        *("--attention-chunk", "256", "--alibi", "--lengths", "device", "--num-splits", "2"),
        *("--new-keys", "3", "--rotary"),
    ]
    result = run("explain", *QWEN, *features, "--gpu", "A100", "--json")
    assert result.exit_code == 0, result.output
    problem = json.loads(result.stdout)["problem"]
    assert problem["seqlen_q"] == 3
    assert problem["head_dim_v"] == 64
    assert problem["dtype"] == "float16"
    assert problem["place"] == "paged(16)"
    assert problem["mask"] == {
        "causal": False,
        "window_left": 127,
        "window_right": -1,
        "sink_tokens": 4,
        "chunk": 256,
    }
    assert problem["score"] == {"softcap": True, "alibi": True}
    assert problem["sink_logits"] is True
    assert problem["lengths"] == "device"
    assert (problem["seqlen_new"], problem["rotary"]) == (3, True)
    assert json.loads(result.stdout)["plans"][0]["config"]["num_splits"] == 2


@pytest.mark.parametrize(
    ("options", "codec", "products"),
    [
        ((), "as_is", "widened"),
        (("--stored", "int8"), "int8 per head", "half"),
        (("--stored", "fp8", "--scales", "token"), "fp8 per token", "widened"),
        (("--stored", "fp8", "--products", "full"), "fp8 per head", "full"),
    ],
)
def test_explain_of_quantised_keys(options: Sequence[str], codec: str, products: str) -> None:
    result = run("explain", *QWEN, *options, "--gpu", "h200", "--json")
    assert result.exit_code == 0, result.output
    problem = json.loads(result.stdout)["problem"]
    assert (problem["codec"], problem["products"]) == (codec, products)


def test_explain_compares_policies() -> None:
    result = run(
        "explain", *QWEN, "--gpu", "h100", "--policy", "flash_attention_3", "--policy", "waves"
    )
    assert result.exit_code == 0
    row = next(line for line in result.stdout.splitlines() if line.startswith("policy"))
    assert row.split() == ["policy", "flash_attention_3", "waves"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--heads", "30"], "heads: expected a multiple of kv_heads=8, got 30"),
        (["--batch", "0"], "batch: expected more than 0, got 0"),
        (["--seqlen-k", "-1"], "seqlen_k: expected at least 0, got -1"),
        (["--seqlen-k", "1073741824"], "seqlen_k: expected at most 1073741823, got 1073741824"),
        (["--batch", "1073741824"], "batch: expected at most 1073741823, got 1073741824"),
        (["--page-size", "0"], "page_size: expected more than 0, got 0"),
        (["--num-splits", "-1"], "num_splits: expected at least 0, got -1"),
        (["--window", "3"], "window: expected LEFT,RIGHT as integers, got '3'"),
        (["--window", "-2,0"], "window left: expected at least -1, got -2"),
        (
            ["--dtype", "int8"],
            "dtype: expected 'bfloat16', 'float16', 'float32' or 'float64', got 'int8'",
        ),
        (["--stored", "int4"], "stored: expected 'as_is', 'fp8', 'fp8_e5m2' or 'int8', got 'int4'"),
        (
            ["--stored", "int8", "--scales", "none"],
            "scales: expected 'tensor', 'head' or 'token', got 'none'",
        ),
        (
            ["--stored", "fp8", "--products", "all"],
            "products: expected 'widened', 'half' or 'full', got 'all'",
        ),
        (["--scales", "head"], "scales: expected None with keys stored as_is, got 'head'"),
        (["--products", "half"], "products: expected None with keys stored as_is, got 'half'"),
        (["--gpu", "h999"], f"gpu: expected one of {', '.join(GPUS)}, got h999"),
        (
            ["--policy", "best"],
            f"policy: expected {', '.join(map(repr, list(registry.POLICIES)[:-1]))} or "
            f"{list(registry.POLICIES)[-1]!r}, got 'best'",
        ),
    ],
)
def test_a_malformed_question_is_one_line_and_status_2(args: list[str], message: str) -> None:
    result = run("explain", "--gpu", "h200", *args)
    assert result.exit_code == 2
    assert result.stderr == f"splitkv: {message}\n"
    assert result.stdout == ""


def test_a_mask_without_edges_that_no_sequence_reaches() -> None:
    """As the public functions make of such a window."""
    far = ["--window", "2147483647,-1", "--attention-chunk", "2147483647"]
    result = run("explain", "--gpu", "h200", "--json", *far)
    mask = json.loads(result.stdout)["problem"]["mask"]
    assert (mask["window_left"], mask["chunk"]) == (-1, 0)


def test_an_unknown_option_is_status_2() -> None:
    assert run("explain", "--no-such-option").exit_code == 2


def test_no_kernel_is_status_1_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", (records.DECODE_SPLIT,))
    result = run("explain", "--head-dim", "320", "--gpu", "h200")
    assert result.exit_code == 1
    assert "head_dim 320: " in result.stdout


def test_window_has_two_sides() -> None:
    assert parse_window("127, -1") == (127, -1)


def test_terminal_output_has_the_same_cells() -> None:
    problem = Problem("decode", 1, 28, 4, 128, 128, 1, 532)
    told = explain(problem, GPUS["h200"], ["waves", "flash_attention_2"])
    screen = io.StringIO()
    Console(width=200, file=screen).print(render(told))
    text = screen.getvalue()
    for row in [*told.plan_rows(), *told.kernel_rows(), *told.why_rows()]:
        for cell in row:
            assert cell in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_policies_stay_apart_in_a_narrow_terminal(width: int) -> None:
    """No cell is cut short: read down its column, each is there as a whole."""
    policies = ("paged_attention_v2", "paged_attention_v2_permissive")
    told = explain(Problem("decode", 1, 28, 4, 128, 128, 1, 4096), GPUS["h200"], policies)
    screen = io.StringIO()
    Console(width=width, file=screen).print(render(told))
    text = screen.getvalue()
    assert "\u2026" not in text
    rows = [line.split("\u2502") for line in text.splitlines() if line.startswith("\u2502")]
    header = [line.split("\u2503") for line in text.splitlines() if line.startswith("\u2503")]
    assert rows and header
    columns = ["".join(row[i].strip() for row in header) for i in (2, 3)]
    assert columns == list(policies)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": 1}\n', "results: expected records of splitkv with 'suite', got "),
        (b'{"suite": "prefill", "us": 1}\n', "results: expected records of splitkv with "),
        (b'{"suite": "decode"}\n', "results: expected records of splitkv with "),
        (b'{"suite": "reproduce"}\n', "results: expected records of splitkv with "),
        (b'{"suite": "sweep"}\n', "results: expected records of splitkv with "),
        (b'{"suite": ["sweep"]}\n', "suite: expected 'decode', "),
        (b'{"suite": "my own"}\n', "suite: expected 'decode', "),
        (b"[1, 2]\n", "FILE:1: expected a JSON object, got '[1, 2]'"),
        (b"3\n", "FILE:1: expected a JSON object, got '3'"),
        (b"\xff\xfe\n", "FILE: expected JSON lines, got bytes that are no text"),
    ],
    ids=str,
)
def test_report_of_the_lines_of_others(text: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(text)
    result = run("report", str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith("splitkv: " + said.replace("FILE", str(path)))
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "command",
    [
        ["evolve", "--simulate", "h200", "--generations", "1", "--rounds", "2", "--out", "FILE"],
        ["evolve", "--simulate", "h200", "--generations", "1", "--out", "FILE/folder"],
        ["report", "RESULTS", "--html", "FILE/page.html"],
    ],
    ids=lambda command: f"{command[0]} {command[-2]}",
)
def test_a_place_that_cannot_be_written(command: list[str], tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("")
    file = tmp_path / "file"
    file.touch()
    args = [x.replace("FILE", str(file)).replace("RESULTS", str(results)) for x in command]
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"splitkv: {file}")
    assert ": expected a path to read or write, got " in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_doctor_names_versions_and_kernels() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    first_words = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    assert {"python", "torch", "triton", "driver", "device"} <= first_words
    assert {kernel.name for kernel in registry.KERNELS} <= first_words


def test_demo_passes_its_options_and_its_status_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    stand_in = ModuleType("splitkv.demo")
    stand_in.run = lambda **options: calls.append(options) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "splitkv.demo", stand_in)
    result = run("demo", "--steps", "5", "--device", "cpu", "--seed", "7")
    assert result.exit_code == 3
    assert calls == [{"steps": 5, "seconds": 60.0, "device": "cpu", "seed": 7}]


def test_demo_refuses_no_steps() -> None:
    result = run("demo", "--steps", "0")
    assert result.exit_code == 2
    assert result.stderr == "splitkv: steps: expected more than 0, got 0\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["sweep"], "device: expected a CUDA GPU, got 'CPU'"),
        (
            ["sweep", "--case", "mqa8"],
            "case: expected the name of a case of `splitkv bench decode`",
        ),
        (
            ["sweep", "--case", "mqa8_b1_512", "--batch", "2"],
            "batch: expected nothing beside a case",
        ),
        (["sweep", "--heads", "3", "--kv-heads", "2"], "heads: expected a multiple of kv_heads=2"),
        (["sweep", "--seqlen-k", "0"], "seqlen_k: expected more than 0, got 0"),
        (["sweep", "--num-splits", "-1"], "num_splits: expected at least 0, got -1"),
        (["sweep", "--policy", "best"], "policy: expected 'waves', "),
        (["sweep", "--seqlens", "9:1"], "seqlens: expected FIRST:LAST:STEP or numbers with commas"),
        (["sweep", "--seqlens", "9", "--all-tiles"], "all_tiles: expected None with seqlens"),
        (
            ["sweep", "--seqlens", "9", "--num-splits", "2"],
            "num_splits: expected None with seqlens",
        ),
        (["demo", "--device", "cuda"], "device: expected a CUDA GPU for cuda, got 'CPU"),
        (["demo", "--device", "tpu"], "device: expected 'cpu' or 'cuda', got 'tpu'"),
        (["quality", "--device", "cuda"], "device: expected a CUDA GPU for cuda, got 'CPU"),
        (["quality", "--model", "gpt"], "model: expected 'demo' or 'smollm2', got 'gpt'"),
        (["accuracy", "--device", "cuda"], "device: expected a CUDA GPU for cuda, got 'CPU"),
        (["tune"], "device: expected a CUDA GPU, got 'CPU'"),
        (["tune", "--problems", "0"], "problems: expected 1 to 10000, got 0"),
        (["tune", "--rounds", "1"], "rounds: expected at least 2, got 1"),
        (["tune", "--candidates", "0"], "candidates: expected more than 0, got 0"),
        (["tune", "--time-limit", "0"], "time_limit: expected more than 0, got 0"),
        (["regret"], "device: expected a CUDA GPU, got 'CPU'"),
        (
            ["regret", "--no-matrix", "--random", "0", "--mixes", "0"],
            "random: expected some, without the matrix",
        ),
        (["regret", "--mixes", "-1"], "mixes: expected at least 0, got -1"),
        (["regret", "--random", "-1"], "random: expected at least 0, got -1"),
        (["regret", "--table", "none.json"], "table: expected a file that `splitkv tune` wrote"),
        (
            ["regret", "--policy", "waves", "--table", "none.json"],
            "table: expected None without the policy tuned, got 'none.json'",
        ),
        (["regret", "--jobs", "-1"], "jobs: expected at least 0, got -1"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"splitkv: {message}")
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def stand_in(monkeypatch: pytest.MonkeyPatch, function: str, result: Any) -> dict[str, Any]:
    """What a function of the lab is called with, in place of the function."""
    calls: dict[str, Any] = {}

    def called(*args: Any, **options: Any) -> Any:
        calls.update(options, args=args)
        return result

    monkeypatch.setattr(f"splitkv.lab.{function}", called)
    return calls


def test_sweep_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point = {"suite": "sweep", "case": "c"}
    calls = stand_in(monkeypatch, "tune.sweep.sweep", ([point], True))
    drawn = stand_in(monkeypatch, "report.plots.draw", None)
    path = tmp_path / "curve.png"
    result = run("sweep", "--seqlen-k", "700", "--page-size", "16", "--plot", str(path))
    assert result.exit_code == 1
    assert calls["args"][0].name == "b1_h8x1_d128_q1_k700_page16"
    assert (calls["num_splits"], calls["kernels"], calls["all_tiles"]) == (64, [], False)
    assert calls["policies"] == registry.POLICIES
    assert drawn["args"] == ([point], path)


def test_sweep_over_lengths_is_another_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, "tune.sweep.boundary", ([], False))
    chosen = ["--policy", "waves", "--policy", "sequence_aware"]
    assert run("sweep", "--seqlens", "384:640:128", *chosen).exit_code == 0
    assert calls["args"][1] == [384, 512, 640]
    assert list(calls["policies"]) == ["waves", "sequence_aware"]


def test_bench_draws_mixes_with_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch, "bench.decode.bench_decode", ([], 0))
    assert run("bench", "decode", "--suite", "mixes", "--seed", "5").exit_code == 0
    names = [case.name for case in calls["args"][0]]
    assert len(names) == 320 and sum(name.startswith("mix5_") for name in names) == 160
    result = run("bench", "decode", "--seed", "5")
    assert result.exit_code == 2 and result.stderr.startswith("splitkv: seed: expected None with")


def test_host_times_are_those_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a call returns when it is computed: what that takes is not what a call costs."""
    calls = stand_in(monkeypatch, "bench.host.bench_host", ([], 0))
    monkeypatch.setattr(device, "current", lambda: CPU)
    result = run("bench", "host")
    assert result.exit_code == 2 and not calls
    assert result.stderr == "splitkv: device: expected a CUDA GPU, got 'CPU'\n"
    monkeypatch.setattr(device, "current", lambda: GPUS["h200"])
    assert run("bench", "host", "--case", "decode").exit_code == 0
    assert [case.name for case in calls["args"][0]] == ["decode"]


def test_tune_records_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = stand_in(monkeypatch, "tune.table.tune", 3)
    table = tmp_path / "h200.json"
    given = ["--problems", "40", "--table", str(table), "--jobs", "5"]
    result = run("tune", *given, "--share", "2/4", "--no-known")
    assert result.exit_code == 3
    assert calls["command"] == (
        "splitkv tune --problems 40 --seed 0 --max-bytes 1.1e+09 --candidates 16 --rounds 9 "
        "--share 2/4 --no-known"
    )
    assert (calls["table_path"], calls["jobs"], calls["effort"].candidates) == (table, 5, 16)


def test_regret_takes_a_table_that_is_not_in_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = tuned_tables.tuned_problem(1, 8, 1, 128, 1, 512, None)
    best = tuned_tables.Timed("decode_split", Config(2, 16, 128, 4, 2), 5.0)
    made = tuned_tables.Table("NVIDIA H200", {}, (tuned_tables.Measured(problem, (best,)),))
    path = tmp_path / "table.json"
    path.write_text(tuned_tables.dump(made))
    calls = stand_in(monkeypatch, "tune.regret.measure_regret", 0)
    options = "--lengths", "host", "--share", "2/2", "--codec", "fp8"
    assert run("regret", "--codec", "int4").exit_code == 2
    assert run("regret", "--table", str(path), *options).exit_code == 0
    assert calls["args"] == (Draw(150, 1, 1.1e9, (2, 2), 40),)
    assert (calls["lengths"], calls["codec"]) == ("host", "fp8")
    assert list(calls["policies"]) == ["waves", "tuned"]
    choice = calls["policies"]["tuned"](problem, GPUS["h200"], [records.DECODE_SPLIT])
    assert choice.config.tile_n == 128


def test_report_draws_a_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = stand_in(monkeypatch, "report.plots.draw", None)
    results = tmp_path / "sweep.jsonl"
    results.write_text("")
    result = run("report", str(results), "--plot", str(tmp_path / "curve.svg"))
    assert result.exit_code == 0 and drawn["args"] == ([], tmp_path / "curve.svg")
    drawn = stand_in(monkeypatch, "report.plots.draw_all", None)
    result = run("report", str(results), "--plot", str(tmp_path / "curves"))
    assert result.exit_code == 0 and drawn["args"] == ([], tmp_path / "curves")


def test_without_matplotlib_the_plot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "splitkv.lab.report.plots", raising=False)
    result = run("sweep", "--plot", "curve.svg")
    assert result.exit_code == 2
    assert result.stderr.startswith("splitkv: plot: expected splitkv[lab] installed, got no matpl")


def test_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "splitkv", "explain", *QWEN, "--gpu", "h200", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plans"]


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from splitkv.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr == ("splitkv: the command line needs typer: pip install 'splitkv[lab]'\n")
