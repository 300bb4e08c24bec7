"""`splitkv accuracy`: a record for every way, and what has to be true of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from splitkv.cli import app
from splitkv.lab.bench.accuracy import INPUTS, PRODUCTS, How, markdown, shown, ways

KEYS = 256


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["accuracy", "--keys", str(KEYS), "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def error(records: list[dict[str, Any]], name: str, how: How, products: str = "widened") -> float:
    (found,) = (
        r["error"]
        for r in records
        if r["input"] == name
        and How(*(r[field] for field in How._fields)) == how
        and r["products"] == products
    )
    assert isinstance(found, float)
    return found


def test_every_way_once(records: list[dict[str, Any]]) -> None:
    quantised = len(list(ways())) - 1
    assert quantised == 2 * 3 * 2
    assert len(records) == (len(INPUTS) + 1) * (1 + quantised * len(PRODUCTS))
    assert len({tuple(r[n] for n in ("input", *How._fields, "products")) for r in records}) == len(
        records
    )
    assert {(r["keys"], r["seed"], r["through"]) for r in records} == {(KEYS, 0, "reference")}


def test_errors_are_in_their_order(records: list[dict[str, Any]]) -> None:
    for name in INPUTS:
        bf16 = error(records, name, How("bf16"))
        for dtype in ("int8", "fp8"):
            token = How(dtype, "token")
            widened, half, full = (error(records, name, token, p) for p in PRODUCTS)
            assert bf16 < widened < 0.1 and widened < 1.05 * half < 1.1 * full
        assert error(records, name, How("int8", "token")) < error(
            records, name, How("fp8", "token")
        )
    outliers = [error(records, "outliers", How("fp8", "token", smooth)) for smooth in (False, True)]
    assert outliers[1] < 0.8 * outliers[0]
    assert error(records, "outliers", How("int8", "token")) < error(
        records, "outliers", How("int8", "tensor")
    )


def test_needles_are_found(records: list[dict[str, Any]]) -> None:
    assert all(r["found"] == 1 for r in records if r["input"] == "needles")


def test_the_table_has_a_number_of_every_record(records: list[dict[str, Any]]) -> None:
    lines = [line.strip("| ").split(" | ") for line in markdown(records).splitlines()]
    assert lines[0][-1].strip() == "needles" and len(lines) == 2 + len(list(ways()))
    numbers = [n.strip() for line in lines[2:] for cell in line[-4:] for n in cell.split(" / ")]
    assert sorted(numbers) == sorted(map(shown, records))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keys", "100"], "keys: expected at least 128, got 100"),
        (["--device", "tpu"], "device: expected 'cpu' or 'cuda', got 'tpu'"),
        (["--through", "luck"], "through: expected 'reference' or 'kernels', got 'luck'"),
    ],
)
def test_malformed(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["accuracy", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
