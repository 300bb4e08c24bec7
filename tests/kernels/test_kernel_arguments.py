"""Arguments of kernels by name, and the plans for tensors that a variant does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from compiling import Layout, layouts

from splitkv import explain
from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.core.variants import HopperDecode, Plain
from splitkv.kernels import records
from splitkv.kernels.hopper.decode import kernel as hopper_decode_split
from splitkv.kernels.host.arguments import in_order, tail_in_order
from splitkv.planner.legality import expect_config
from splitkv.planner.registry import completed

H200 = GPUS["h200"]
KERNEL: Any = SimpleNamespace(__name__="kernel", arg_names=["q", "k", "scale", "TILE"])


def plan_of(place: Any, codec: Codec, config: Config, **changes: Any) -> Plan:
    problem = Problem(
        "decode", 4, 16, 2, 128, 128, 1, 8192, place=place, codec=codec, lengths="device"
    )
    problem = replace(problem, **changes)
    return completed(Plan(problem, H200, "mine", "hopper_decode_split", config, "made by hand"))


BULK = plan_of(Contiguous(), Codec("int8", "token"), Config(8, tile_n=128))
GATHER = plan_of(Paged(16), Codec("fp8", "head"), Config(64, tile_n=64), batch=1)


def test_arguments_are_put_in_the_order_of_the_parameters() -> None:
    assert in_order(KERNEL, {"TILE": 4, "scale": 3, "k": 2, "q": 1}) == (1, 2, 3, 4)
    assert tail_in_order(KERNEL, ("q", "k"), {"TILE": 4, "scale": 3}) == (3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": 1, "k": 2, "scale": 3}, r"missing \['TILE'\], unknown \[\]"),
        ({"q": 1, "k": 2, "scale": 3, "TILE": 4, "tile": 5}, r"missing \[\], unknown \['tile'\]"),
    ],
)
def test_an_argument_that_is_missing_or_unknown_is_refused(
    arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        in_order(KERNEL, arguments)


def test_a_tail_begins_where_the_arguments_of_each_call_end() -> None:
    with pytest.raises(AssertionError, match="expected .*'k', 'q'.* first"):
        tail_in_order(KERNEL, ("k", "q"), {"TILE": 4, "scale": 3})
    with pytest.raises(AssertionError, match="given twice"):
        tail_in_order(KERNEL, ("q", "k"), {"k": 2, "TILE": 4, "scale": 3})


def test_a_plan_has_its_variant_wherever_it_is_read() -> None:
    assert BULK.config.variant == HopperDecode("tma", "bulk")
    read = Plan.from_dict(json.loads(json.dumps(BULK.as_dict())))
    assert read == BULK and read.config.variant == BULK.config.variant
    assert "one a key, all KV heads in bulk" in str(explain(BULK))


def test_scales_that_do_not_lie_in_one_piece_give_another_plan() -> None:
    operands = layouts(BULK.problem)
    assert hopper_decode_split.refit(BULK, operands) == BULK
    shape = operands.k_scale.shape
    operands.k_scale = operands.v_scale = Layout(shape, operands.k_scale.dtype, row_gap=2)
    other = hopper_decode_split.refit(BULK, operands)
    assert other.config == replace(BULK.config, variant=HopperDecode(key_scales="per_tile"))
    assert other.why.endswith("scales of keys do not lie in one piece")


def test_addresses_that_bulk_copies_cannot_take_give_another_plan() -> None:
    operands = layouts(BULK.problem)
    scales = Layout(operands.k_scale.shape, operands.k_scale.dtype, address=(1 << 20) + 4)
    operands.k_scale = operands.v_scale = scales
    other = hopper_decode_split.refit(BULK, operands)
    assert other.config.variant == HopperDecode(key_scales="per_tile")


@pytest.mark.parametrize(
    "strides",
    [
        (1 << 32, 256, 128, 1),
        # heads first: those of two heads are further apart than an offset of 32 bits
        (16 * 128, 128, 1 << 32, 1),
        (128, 1 << 29, 64, 1),
    ],
    ids=["pages", "heads", "keys"],
)
def test_keys_too_far_apart_to_be_gathered_give_another_plan(strides: tuple[int, ...]) -> None:
    assert GATHER.config.variant == HopperDecode("gather")
    operands = layouts(GATHER.problem)
    assert hopper_decode_split.refit(GATHER, operands) == GATHER
    operands.k.stride = lambda dim=None: strides if dim is None else strides[dim]  # type: ignore[method-assign]
    other = hopper_decode_split.refit(GATHER, operands)
    assert other.config.variant == HopperDecode("tma")
    assert other.why.endswith("keys are too far apart to be gathered")


def test_caches_with_their_heads_first_are_gathered_up_to_where_offsets_end() -> None:
    operands = layouts(GATHER.problem)
    _, page_size, heads, dim = operands.k.shape
    most = ((1 << 32) - 1 - page_size * dim) // (heads - 1) // 16 * 16
    for apart, load in ((most, "gather"), (most + 16, "tma")):
        strides = page_size * dim, dim, apart, 1
        operands.k.stride = lambda dim=None, s=strides: s if dim is None else s[dim]  # type: ignore[method-assign]
        variant = hopper_decode_split.refit(GATHER, operands).config.variant
        assert variant == HopperDecode(load)


@pytest.mark.parametrize("address", [8, 2])
def test_caches_that_tma_cannot_read_give_a_plan_for_any_gpu(address: int) -> None:
    operands = layouts(BULK.problem, address=(1 << 20) + address)
    other = hopper_decode_split.refit(BULK, operands)
    assert (other.kernel, other.config.variant) == ("decode_split", Plain())
    assert "multiples of 16 bytes" in other.why


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (HopperDecode("producer_warp"), "variant.load: expected 'tma', got"),
        (HopperDecode("gather"), "variant.load: expected 'tma'"),
        (HopperDecode(key_scales="none"), "variant.key_scales: expected"),
    ],
)
def test_a_variant_that_the_problem_cannot_have_is_refused(
    variant: HopperDecode, message: str
) -> None:
    config = replace(BULK.config, variant=variant)
    with pytest.raises(ValueError, match=message):
        expect_config(records.HOPPER_DECODE_SPLIT, BULK.problem, H200, config)
