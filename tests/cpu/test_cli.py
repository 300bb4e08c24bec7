"""The command line: what it prints and how it exits."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from splitkv import registry
from splitkv.cli import app, parse_window, render
from splitkv.device import GPUS
from splitkv.explanation import explain
from splitkv.kernels import decode_split
from splitkv.problem import Problem

QWEN = ["--batch", "1", "--heads", "28", "--kv-heads", "4", "--head-dim", "128"]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args))


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
        *("--alibi", "--lengths", "device", "--num-splits", "2"),
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
    }
    assert problem["score"] == {"softcap": True, "alibi": True}
    assert problem["sink_logits"] is True
    assert problem["lengths"] == "device"
    assert json.loads(result.stdout)["plans"][0]["config"]["num_splits"] == 2


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
        (["--page-size", "0"], "page_size: expected more than 0, got 0"),
        (["--num-splits", "-1"], "num_splits: expected at least 0, got -1"),
        (["--window", "3"], "window: expected LEFT,RIGHT as integers, got '3'"),
        (["--window", "-2,0"], "window left: expected at least -1, got -2"),
        (
            ["--dtype", "int8"],
            "dtype: expected 'bfloat16', 'float16', 'float32' or 'float64', got 'int8'",
        ),
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


def test_an_unknown_option_is_status_2() -> None:
    assert run("explain", "--no-such-option").exit_code == 2


def test_no_kernel_is_status_1_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", (decode_split.KERNEL,))
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
