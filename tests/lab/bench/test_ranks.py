"""`splitkv bench ranks` on a CPU: cases, what is checked before it is timed, records, tables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the lab extra is not installed")

from rank_tasks import benched  # noqa: E402
from ranks import Ranks  # noqa: E402

from splitkv.core.masks import Mask  # noqa: E402
from splitkv.distributed.traffic import HeadShape, moved, spread_of  # noqa: E402
from splitkv.lab.bench import ranks as lab  # noqa: E402
from splitkv.lab.bench.ranks import CASES, RanksCase, moved_bytes, select  # noqa: E402
from splitkv.lab.harness.lines import Lines  # noqa: E402
from splitkv.lab.overview import report  # noqa: E402

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DECODE = RanksCase("decode", "decode", 64, **SMALL)
TRAIN = RanksCase("train", "training", 64, **SMALL)
WINDOW = RanksCase("train_w", "training", 64, window=9, **SMALL)


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool


def test_every_way_of_every_case(pool: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    cases = [DECODE, TRAIN, WINDOW]
    (found, status, said), (other, _, nothing) = pool.run(benched, 2, cases, [], path)
    assert status == 0 and not nothing
    timed = [(r["case"], r["way"]) for r in found if r["us"] is not None]
    three = ("heads", "keys", "ring")
    assert timed == [
        *(("decode", way) for way in ("all", "own")),
        *(("train", way) for way in three),
        *(("train_w", way) for way in three),
    ]
    assert [r["us"] for r in other] == [r["us"] for r in found], "expected one result of all ranks"
    for r in found:
        if r["us"] is not None:
            assert r["us"] > 0 and r["alone_us"] > 0 and r["err"] < 0.05
    (written,) = {tuple(r["way"] for r in x) for x in (Lines(path).records, found)}
    assert written.count("verl") == 2
    for r in found:
        if r["way"] == "verl":
            assert r["reasons"] == ["verl: expected verl installed"]
    text = report(Lines(path).records)
    assert "| train_w  | keys  |     2 |" in text and "its rate" in text
    assert "* train verl: verl: expected verl installed" in text
    assert text.partition("\n\n")[2] in said.replace("\r", "")


def test_ways_by_name(pool: Ranks) -> None:
    for found, status, _ in pool.run(benched, 2, [WINDOW, DECODE], ["keys", "own"], None):
        assert status == 0
        assert [(r["case"], r["way"]) for r in found] == [("train_w", "keys"), ("decode", "own")]


def wrong(group: Any, cases: Any) -> Any:
    """A benchmark whose exchange is wrong on the second rank."""
    from splitkv import distributed

    original = distributed.attention

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = original(*args, **kwargs)
        return out + (0.5 if torch.distributed.get_rank(group) else 0.0)

    distributed.attention = attention
    try:
        return benched(group, cases, ["keys"], None)
    finally:
        distributed.attention = original


def test_what_is_wrong_on_any_rank_has_no_time(pool: Ranks) -> None:
    for (record,), status, _ in pool.run(wrong, 2, [TRAIN]):
        assert status == 1 and record["us"] is None
        assert record["reasons"][0].startswith("wrong on rank 1: out: expected an error of at most")


def test_cases_are_those_of_the_aims() -> None:
    decode = [case.tokens for case in CASES if case.kind == "decode"]
    assert decode[0] == 131072 and decode[-1] == 2**20
    train = [case for case in CASES if case.kind == "training"]
    assert [(case.tokens, case.window) for case in train] == [(131072, 0), (131072, 4096)]
    assert {(case.num_heads, case.num_kv_heads, case.head_dim) for case in CASES} == {(32, 8, 128)}
    assert train[1].window_size == (4095, 0) and train[1].mask == Mask(True, 4095)


def test_select() -> None:
    assert [case.name for case in select(["train_*"], [])] == ["train_131072", "train_131072_w4096"]
    (small,) = select(["*_w4096"], ["keys"], 1024)
    assert small == RanksCase("train_131072_w4096/1024", "training", 128, window=4)
    for globs, ways, shrink, message in (
        (["prefill"], [], 1, "case: expected one of decode_b1_131072, "),
        ([], ["pages"], 1, "way: expected one of all, own, heads, keys, ring, verl, got 'pages'"),
        ([], [], 0, "shrink: expected more than 0, got 0"),
    ):
        with pytest.raises(ValueError) as refused:
            select(globs, ways, shrink)
        assert str(refused.value).startswith(message)


def test_bytes_that_move() -> None:
    """Of decode by hand; of training those that `traffic` counts."""
    assert moved_bytes(CASES[0], "all", 2) == 32 * (128 * 2 + 4)
    assert moved_bytes(CASES[0], "own", 2) == 32 * (128 * 2 + 4) // 2
    shape = HeadShape(32, 8, 128, 128, 2)
    spread = spread_of("keys", 131072, 2, Mask(True, 4095))
    assert moved_bytes(CASES[-1], "keys", 2) == moved(spread, shape).total
    assert moved_bytes(CASES[-2], "verl", 2) == moved_bytes(CASES[-2], "heads", 2)


def test_without_torchrun() -> None:
    with pytest.raises(ValueError, match="ranks: expected torchrun to start them"):
        lab.join()


def test_under_torchrun(tmp_path: Path) -> None:
    """The command itself, as on two GPUs."""
    path = tmp_path / "ranks.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--case", "*_w4096", "--way", "keys", "--shrink", "2048", "--rounds", "2"]
    command += ["-m", "splitkv", "bench", "ranks", *options, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (record,) = Lines(path).records
    assert record["way"] == "keys" and record["ranks"] == 2 and record["backend"] == "gloo"
    assert "train_131072_w4096/2048 | keys |" in done.stdout
