"""The fuzzer itself: it finds what is wrong, says how to repeat it, and its oracle stands alone."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import oracle
from fuzz.calling import judged
from fuzz.catalogue import KINDS, WHERE, drawn_by
from fuzz.draw import Draw, Drawn
from torch.nn.functional import scaled_dot_product_attention

import splitkv
from splitkv import flash_attn

TESTS = Path(__file__).parents[1]
SEED = 11


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "fuzz", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_oracle_imports_nothing_of_the_package() -> None:
    found = set()
    for node in ast.walk(ast.parse((TESTS / "fuzz" / "oracle.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    assert found == {"__future__", "dataclasses", "math", "typing", "torch"}


def test_the_oracle_is_torch_s_attention() -> None:
    q, k, v = (torch.randn(7, 4, 16, dtype=torch.float64) for _ in range(3))
    out, lse = oracle.attend(
        oracle.Sequence(q, k[:, ::2], v[:, ::2]), oracle.Asked(causal=True), torch.float64
    )
    heads_first = (x.transpose(0, 1) for x in (q, k[:, ::2], v[:, ::2]))
    wanted = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(0, 1))
    assert lse.shape == (4, 7)


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (oracle.Asked(), ["11111", "11111"]),
        (oracle.Asked(causal=True), ["11110", "11111"]),
        (oracle.Asked(window=(1, 0)), ["00110", "00011"]),
        (oracle.Asked(window=(0, 1)), ["00011", "00001"]),
        (oracle.Asked(causal=True, window=(0, -1), sink_tokens=2), ["11010", "11001"]),
        (oracle.Asked(causal=True, chunk=4), ["11110", "00001"]),
        (oracle.Asked(causal=True, chunk=4, sink_tokens=1), ["11110", "10001"]),
    ],
)
def test_what_the_oracle_sees(asked: oracle.Asked, seen: list[str]) -> None:
    """Two queries, the last of five keys."""
    matrix = oracle.visible(asked, 2, 5, "cpu").int().tolist()
    assert ["".join(map(str, row)) for row in matrix] == seen


def drawn(kind: str, index: int = 0) -> Drawn:
    """A well-formed call of a kind, with a key and a query."""
    for number in range(index, 1000):
        made = drawn_by(Draw(SEED, number, "cpu", 1), kind)
        whole = all(x.numel() for x in made.kwargs.values() if isinstance(x, torch.Tensor))
        if whole and not made.name.startswith("malformed"):
            return made
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["attention", "varlen", "decode", "paged", "flash", "kvcache"])
def test_a_wrong_number_is_found(kind: str) -> None:
    """One element of the output is off."""
    made = drawn(kind)

    def off(**kwargs: Any) -> Any:
        result = made.function(**kwargs)
        out = result[0] if isinstance(result, tuple) else result
        changed = out.clone()
        last = (-1,) * out.dim()
        if out.element_size() == 1:  # in e4m3: the largest number of the other sign
            changed.view(torch.uint8)[last] = 0x7E if out.float()[last] < 0 else 0xFE
        else:
            changed[last] += 1
        return (changed, *result[1:]) if isinstance(result, tuple) else changed

    made.kwargs.pop("out", None)
    assert judged(made)[0] == "equal"
    assert judged(replace(made, function=off))[0] == "wrong"


def test_other_exceptions_are_failures() -> None:
    made = drawn("attention")

    def fails(**kwargs: Any) -> Any:
        raise KeyError("q")

    def malformed(**kwargs: Any) -> Any:
        raise ValueError("q: expected a tensor, got None")

    assert judged(replace(made, function=fails))[0] == "raw error"
    assert judged(replace(made, function=malformed))[0] == "raw error"


def test_arguments_that_are_written_are_found() -> None:
    made = drawn("attention")

    def writes(**kwargs: Any) -> Any:
        result = made.function(**kwargs)
        kwargs["k"].detach()[0, 0, 0, 0] += 1
        return result

    outcome, text = judged(replace(made, function=writes, judge=lambda result: None, again=False))
    assert outcome == "wrong" and "expected an argument that stays" in text


def test_every_public_function_is_drawn() -> None:
    """By its name, or within a case of another name."""
    within = {"Device", "Plan", "Problem", "UnsupportedProblem", "plan", "explain"}
    within |= {"Schedule", "make_schedule"}  # of a GPU: tests/gpu/test_schedule.py
    within |= {"warmup_model"}  # compiles: tests/runtime/test_warm_model.py
    names = set()
    for kind in KINDS:
        if WHERE.get(kind, ("cpu",))[0] == "cpu" and kind != "models":
            for number in range(60):
                names.add(drawn_by(Draw(SEED, number, "cpu", 1), kind).name)
    names = {name.removeprefix("malformed ").removesuffix(" under a plan") for name in names}
    assert {*splitkv.__all__, *flash_attn.__all__} - within <= names


@pytest.mark.parametrize(("where", "first", "count"), [("cpu", 665, 200), ("interpret", 1817, 100)])
def test_the_program_counts_and_ends(where: str, first: int, count: int) -> None:
    """A short run, each case of which a line repeats."""
    cases = ("--where", where, "--seed", "2026", "--first", str(first), "--count", str(count))
    done = run(*cases, "--seconds", "300")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert re.search(rf"{where}: {count} cases of {count} variants; 0 failures", last), last
    again = run("--where", where, "--seed", "2026", "--only", str(first))
    assert again.returncode == 0 and again.stdout.startswith(f"{first} "), again.stderr


def test_a_failure_s_line_repeats_it() -> None:
    """Which fails again, as what is broken is broken in every process."""
    code = (
        "import sys, fuzz.models, fuzz.__main__ as main\n"
        "from fuzz import calling, environment, running\n"
        "environment.prepare('cpu')\n"
        "import splitkv.runtime.attention as broken\n"
        "whole = broken._launch\n"
        "def wrong(*args, **kwargs):\n"
        "    out, lse = whole(*args, **kwargs)\n"
        "    return out * 1.5, lse\n"
        "broken._launch = wrong\n"
        "sys.exit(main.main(['--only', '0-20', '--kinds', 'attention', '--seed', '3']))\n"
    )
    path = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1 and "attention: wrong" in done.stdout, done.stdout + done.stderr
