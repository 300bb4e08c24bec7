"""`make test`: every part runs, and the last line and the exit status say what became of them.

The tools are stand-ins that write down how they were called.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {  # and what its call has that no other part's has
    "lint": "ruff check",
    "types": "bin/mypy",
    "test-newest": "-m newest",
    "test-cpu": "tests/lab tests/project",
    "test-baseline": "tests/doors/test_api.py",
    "test-interpreter": "tests/interpreter",
    "test-evolve": "tests/lab/evolve/test_guided.py",
}
STAND_IN = """#!/bin/sh
echo "ran $0 $* with ${ATEN_CPU_CAPABILITY:-every} instructions" | tee -a called
case "$0 $* " in *"$FAILING"*) exit 1;; esac
"""
OURS = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ATEN_CPU_CAPABILITY")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile and the tests, beside an environment that looks installed."""
    for name in ("Makefile", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = ("pyproject.toml", "constraints.txt", "constraints-newest.txt", "constraints-evolve.txt")
    made += (".venv/.installed", ".triton-newest/.installed", ".openevolve/.installed")
    for age, name in enumerate(reversed(made)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1e9 - age, 1e9 - age))
    for name in ("python", "ruff", "mypy"):
        path = tmp_path / ".venv" / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(STAND_IN)
        path.chmod(0o755)
    return tmp_path


def make(checkout: Path, failing: str, *target: str) -> tuple[int, str, str]:
    """(exit status, the last line, how the tools were called)."""
    env = {name: x for name, x in os.environ.items() if name not in OURS} | {"FAILING": failing}
    command = ["make", "--no-print-directory", *target]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()[-1], (checkout / "called").read_text()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_fails_hides_none(part: str, checkout: Path) -> None:
    code, last, called = make(checkout, PARTS[part], "test")
    assert code != 0
    passed = " ".join(name for name in PARTS if name != part)
    assert last == f"make test: passed: {passed}; failed: {part}"
    assert all(words in called for words in PARTS.values())


def test_all_that_pass(checkout: Path) -> None:
    code, last, called = make(checkout, "nothing", "test")
    assert (code, last) == (0, f"make test: passed: {' '.join(PARTS)}; failed: none")
    (baseline,) = (line for line in called.splitlines() if "default instructions" in line)
    for name in ("tests/doors/test_api.py", "tests/kernels/test_torch_kernels.py"):
        assert name in baseline
    assert "test_style.py" not in baseline


@pytest.mark.parametrize("failing", ["torch numpy", "--editable", "compileall", "nothing"])
def test_an_environment_is_there_where_pip_says_so(failing: str, checkout: Path) -> None:
    """Whatever becomes of what is compiled beside it."""
    installed = checkout / ".venv" / ".installed"
    installed.unlink()
    code, _, called = make(checkout, failing, ".venv/.installed", "PYTHON=.venv/bin/python")
    fails = failing in ("torch numpy", "--editable")
    assert (code != 0) == fails and installed.exists() != fails
    assert called.count("compileall") == {"torch numpy": 0, "--editable": 1}.get(failing, 2)
