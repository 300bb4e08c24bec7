"""explain(): the documented questions and their answers, and the figures behind them."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.core.device import GPUS
from splitkv.core.kv import Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.kernels.host.partition import grid as grid_of
from splitkv.planner import registry
from splitkv.planner.explanation import Explanation, explain
from splitkv.planner.policies.paged_attention_v2 import (
    CONSERVATIVE,
    PERMISSIVE,
    TEN_SHAPES,
    dispatch,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"```console\n\$ (splitkv explain [^\n]*)\n(.*?)```\n", re.S)
TABLE = re.compile(r"(\| shape \|[^\n]*\n\|[-|]*\n)((?:\|[^\n]*\n)*)")
DECODE = Problem("decode", 1, 28, 4, 128, 128, 1, 532, mask=Mask(causal=True))


def examples() -> list[tuple[str, str]]:
    """(file, command) of every quoted `splitkv explain`."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        (page.relative_to(ROOT).as_posix(), found[1])
        for page in pages
        for found in EXAMPLE.finditer(page.read_text())
    ]


def answer(command: str) -> str:
    """What a `splitkv explain` command prints, lines wider than a page wrapped as quoted."""
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    return result.stdout


def quoted(page: Path, pattern: re.Pattern[str], command: str | None = None) -> re.Match[str]:
    found = [m for m in pattern.finditer(page.read_text()) if command is None or m[1] == command]
    assert len(found) == 1
    return found[0]


def check(page: Path, match: re.Match[str], text: str, update: bool) -> None:
    """The second group of the match is `text`; with --update-docs it becomes so."""
    if update:
        whole = page.read_text()
        page.write_text(whole[: match.start(2)] + text + whole[match.end(2) :])
    else:
        assert match[2] == text


@pytest.mark.parametrize(("page", "command"), examples())
def test_documented_example(page: str, command: str, pytestconfig: pytest.Config) -> None:
    path = ROOT / page
    update = pytestconfig.getoption("--update-docs")
    check(path, quoted(path, EXAMPLE, command), answer(command), update)


def test_documented_table_of_ten_shapes(pytestconfig: pytest.Config) -> None:
    rows = []
    for shape in TEN_SHAPES:
        problem = Problem(
            "decode", shape.batch, shape.num_heads, shape.num_kv_heads, 128, 128, 1, shape.seqlen_k
        )
        chosen = [
            dispatch(problem, GPUS["l4"], rule).partitioned for rule in (PERMISSIVE, CONSERVATIVE)
        ]
        better = shape.partitioned_ms < shape.one_pass_ms
        cells = [
            shape.name,
            shape.batch,
            f"{shape.num_heads}/{shape.num_kv_heads}",
            shape.seqlen_k,
            f"{shape.one_pass_ms:.3f}",
            f"{shape.partitioned_ms:.3f}",
            *("partition" if cut else "one pass" for cut in (*chosen, better)),
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |\n")
    path = ROOT / "docs" / "explain.md"
    update = pytestconfig.getoption("--update-docs")
    check(path, quoted(path, TABLE), "".join(rows), update)


def splits(problem: Problem, gpu: str, policy: str) -> int:
    return explain(problem, GPUS[gpu], [policy]).plans[0].config.num_splits


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200"])
def test_flash_attention_2_splits_a_small_batch_from_the_second_block_on(gpu: str) -> None:
    at = {n: splits(replace(DECODE, seqlen_k=n), gpu, "flash_attention_2") for n in range(1, 600)}
    assert {n for n, s in at.items() if s == 1} == set(range(1, 129))
    assert at[532] == 5


def test_flash_attention_3_runs_8_ctas_at_512_keys() -> None:
    problem = replace(DECODE, num_heads=64, num_kv_heads=8, seqlen_k=512)
    figures = explain(problem, GPUS["h100"], ["flash_attention_3"]).figures[0]
    assert figures.grid is not None
    assert figures.grid.programs == 8
    assert figures.grid.sms_busy == pytest.approx(8 / 132)


def test_every_policy_stands_in_its_own_column() -> None:
    told = explain(DECODE, GPUS["h200"], list(registry.POLICIES))
    assert told.plan_rows()[0] == ("policy", *registry.POLICIES)
    assert {len(row) for row in told.plan_rows()} == {len(registry.POLICIES) + 1}
    assert [policy for policy, _ in told.why_rows()] == list(registry.POLICIES)


@pytest.mark.parametrize(
    "config",
    [
        Config(tile_m=16, tile_n=64, num_splits=5),
        Config(tile_m=16, tile_n=64, num_splits=9, schedule="batch", programs=24),
        Config(tile_m=16, tile_n=64, num_splits=5, schedule="fixed", split_size=128),
    ],
)
def test_programs_are_the_grid_that_the_kernel_launches(config: Config) -> None:
    problem = replace(DECODE, batch=3, seqlen_q=5)
    plan = replace(registry.make_plan(problem, GPUS["h200"]), config=config)
    grid = explain(plan).figures[0].grid
    assert grid is not None
    assert grid.programs == math.prod(grid_of(problem, config))


def test_figures_follow_from_the_plan() -> None:
    told = explain(DECODE, GPUS["h200"], num_splits=3)
    plan, figures = told.plans[0], told.figures[0]
    assert plan.config.num_splits == 3
    assert figures.grid is not None
    assert figures.grid.key_tiles == math.ceil(532 / plan.config.tile_n)
    assert figures.grid.tiles_a_split == math.ceil(figures.grid.key_tiles / 3)
    assert figures.traffic == records.DECODE_SPLIT.traffic(DECODE, plan.config)
    assert figures.seconds == figures.traffic.bytes / 4.8e12


def test_a_window_counts_the_keys_it_lets_through() -> None:
    windowed = replace(DECODE, seqlen_k=100_000, mask=Mask(causal=True, window_left=127))
    grid = explain(windowed, GPUS["h200"], ["fixed"]).figures[0].grid
    assert grid is not None
    assert grid.key_tiles <= math.ceil(128 / 16)


def test_a_plan_is_explained_as_it_is() -> None:
    plan = registry.make_plan(DECODE, GPUS["h200"], policy="flash_attention_2")
    told = explain(plan)
    assert told.plans == (plan,)
    assert (told.problem, told.device) == (DECODE, GPUS["h200"])


def test_no_kernel_is_an_answer_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KERNELS", (records.DECODE_SPLIT,))
    told = explain(replace(DECODE, head_dim=320, head_dim_v=264), GPUS["h200"])
    assert told.plans == ()
    text = str(told)
    assert "head_dim 320: " in text
    assert "head_dim_v 264: " in text
    assert text.endswith("no kernel can run this problem here")


def test_a_kernel_that_leaves_no_choice_has_no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    told = explain(replace(DECODE, head_dim=320, head_dim_v=320), GPUS["h200"])
    assert told.plans[0].kernel.startswith("torch")
    assert told.figures[0].grid is None
    assert "waves" not in [label for label, _ in told.plan_rows()]


def test_as_dict_is_json_and_holds_every_fact() -> None:
    told: Explanation = explain(DECODE, GPUS["h200"], ["waves", "fixed"])
    data = json.loads(json.dumps(told.as_dict()))
    assert data["problem"]["place"] == "contiguous"
    assert data["device"]["num_sms"] == 132
    assert data["kernels"]["decode_split"] == []
    assert [plan["policy"] for plan in data["plans"]] == ["waves", "fixed"]
    first, figures = data["plans"][0], told.figures[0]
    assert first["traffic"]["bytes"] == figures.traffic.bytes
    assert first["seconds_at_full_bandwidth"] == figures.seconds
    assert first["config"]["num_splits"] == told.plans[0].config.num_splits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"out_scale": True}, "out_scale: expected None, as TMA stores the working type"),
        ({"bidirectional_ranges": True}, "bidirectional_ranges: expected None"),
        (
            {"sequence_sink_tokens": True, "mask": Mask(True, 99, -1, 4)},
            "sink_tokens: expected one number, got one a sequence",
        ),
    ],
    ids=["out_scale", "bidirectional_ranges", "sink_tokens"],
)
def test_what_kernels_for_hopper_leave_to_others(changes: dict[str, Any], reason: str) -> None:
    """The plan says why, and the problem what it is."""
    packed = Problem("varlen", 2, 8, 2, 128, 128, 300, 700, mask=Mask(True), lengths="device")
    packed = replace(packed, place=Ragged())
    problem = replace(packed, **changes)
    name = next(iter(changes))
    for gpu in ("a100", "h200", "b200"):
        made = registry.make_plan(problem, GPUS[gpu])
        assert made.kernel == "prefill" and Plan.from_dict(made.as_dict()) == made
        if gpu == "h200":
            assert dict(made.rejected)["hopper_prefill"] == (reason,)
    assert name.replace("_", " ") in str(problem) and name.replace("_", " ") in str(
        explain(problem)
    )
    assert registry.make_plan(packed, GPUS["h200"]).kernel == "hopper_prefill"


def test_decode_stores_8_bits_on_every_gpu() -> None:
    problem = Problem("decode", 8, 32, 8, 128, 128, 1, 4096, mask=Mask(True), lengths="device")
    for gpu, kernel in (("h200", "hopper_decode_split"), ("a100", "decode_split")):
        plain, scaled = (
            registry.make_plan(replace(problem, out_scale=flag), GPUS[gpu])
            for flag in (False, True)
        )
        assert scaled.kernel == plain.kernel == kernel and scaled.config == plain.config
        traffic = registry.kernel_named(kernel).traffic
        wide, narrow = (traffic(x.problem, x.config).out_bytes for x in (plain, scaled))
        assert wide == 2 * narrow
