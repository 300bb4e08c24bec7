"""The self-check of `splitkv doctor`, on the CPU and with the answers of a GPU that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from results import FLOOR
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core.device import GPUS, cpu
from splitkv.core.problem import Problem
from splitkv.lab.bench import doctor
from splitkv.planner.policies import tuned_tables

H200 = GPUS["h200"]


def test_every_check_is_right_here() -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    said = {line[:28].strip(): line[29:] for line in done.stdout.splitlines() if line[28:29] == " "}
    for name in doctor.CHECKS:
        assert said[name].startswith("ok, torch_"), said[name]
    assert said["tuned"].startswith("no table for ")


def test_without_the_check_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check", lambda *_, **__: pytest.fail("run"))
    done = CliRunner().invoke(app, ["doctor", "--no-check"])
    assert done.exit_code == 0 and "packed sequences" not in done.stdout


def test_what_is_wrong_is_said_and_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem, **_: Any) -> None:
        assert problem.kind != "varlen", "out: expected an error of at most 1"

    monkeypatch.setattr(doctor, "check", wrong)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "FAIL AssertionError: out: expected an error of at most 1" in done.stdout
    assert done.stdout.count("FAIL") == 1


def test_past_the_limit_checks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 9))
    monkeypatch.setattr(doctor, "check", lambda *_, **__: None)
    said = list(doctor.correctness(cpu(), lambda: float(next(now))))
    assert [text.split(",")[0] for _, text in said] == ["ok"] + ["left out after 20 s"] * 4


def row(**found: Any) -> list[dict[str, Any]]:
    return [{"us": 40.0, "reasons": [], "clocks": None, **found}]


def test_the_read_is_set_beside_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.Floors, "__call__", lambda self, num_bytes: FLOOR)
    clocks = {"sm_mhz": 1980, "memory_mhz": 3201}
    monkeypatch.setattr(doctor, "measure", lambda *_: row(us=4.0, clocks=clocks))
    said = dict(doctor.bandwidth(H200))
    share = 134217728 / 2.0 / 1e-6 / 4.8e12
    assert said == {
        "read": f"134 MB in 2.0 us, {share:.0%} of 4.80 TB/s",
        "decode": "4.0 us, 50% of the speed of the read",
        "clocks then": "SM 1980, memory 3201 MHz",
    }
    monkeypatch.setattr(doctor, "measure", lambda *_: row(us=None, reasons=["a wrong answer"]))
    assert dict(doctor.bandwidth(H200))["decode"] == "FAIL a wrong answer"


def test_without_a_floor_there_is_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, num_bytes: int) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(doctor.Floors, "__call__", full)
    assert list(doctor.bandwidth(H200)) == [
        ("read", "not measured: RuntimeError: CUDA out of memory")
    ]


def test_what_holds_the_clocks_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([["345", "1980", "3201", "3201", "700.00"], ["0x0000000000000024"]])
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *_: next(answers))
    assert list(doctor.clocks()) == [
        ("clocks", "SM 345 of 1980, memory 3201 of 3201 MHz, up to 700.00 W"),
        ("slowed by", "power cap, too hot (software)"),
    ]
    monkeypatch.setattr(doctor, "nvidia_smi", lambda *_: None)
    assert list(doctor.clocks()) == [("clocks", "nvidia-smi does not tell")]


def test_the_table_of_the_policy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tuned_tables.table_of(H200.name)
    assert shipped is not None
    name, said = doctor.table(H200)
    assert name == "tuned" and said.startswith(
        f"{len(shipped.measured)} problems on NVIDIA H200, 20"
    )
    assert doctor.table(GPUS["a10"])[1] == "no table for NVIDIA A10: `splitkv tune` makes one"
