"""Problems, devices, configs and plans as plain data, and back; copies and pickles of them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from typing import Any

import cases
import numpy as np
import pytest

import splitkv
from splitkv.core.device import CPU, GPUS, Device
from splitkv.core.kv import Codec, Contiguous, Paged, Place, Ragged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Plan, plan_at, plan_with_handle
from splitkv.core.problem import Operands, Problem
from splitkv.core.scales import Types
from splitkv.core.scores import Score
from splitkv.core.values import Value, checked
from splitkv.core.variants import HopperDecode
from splitkv.planner.registry import make_plan

PAGED = Problem("decode", 1, 8, 2, 64, 64, 1, 4096, mask=Mask(True, 127), place=Paged(16))
PLAN = make_plan(PAGED, GPUS["h200"])
VALUES: list[Value] = [
    PLAN,
    PAGED,
    GPUS["a100"],
    CPU,
    Config(4, schedule="fixed", split_size=256),
    Mask(True, 3, 4, 5, 6),
    Contiguous(),
    Ragged(),
    Paged(48),
    Codec("fp8", "head"),
    Score(True, False),
    *(case.problem for case in cases.DECODE[::5]),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_round_trip(value: Value) -> None:
    data = json.loads(json.dumps(value.as_dict()))
    again = type(value).from_dict(data)
    assert again == value and hash(again) == hash(value) and repr(again) == repr(value)
    assert again.as_dict() == data


@pytest.mark.parametrize("place", [Contiguous(), Ragged(), Paged(1), Paged(16)], ids=str)
def test_places_stay_apart(place: Place) -> None:
    problem = replace(PAGED, place=place)
    assert Problem.from_dict(problem.as_dict()).place == place


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_key_too_few_or_too_many(value: Value) -> None:
    kind, data = type(value), value.as_dict()
    argument = kind.__name__.lower()
    with pytest.raises(ValueError, match=f"^key of {argument}: expected .*got 'colour'$"):
        kind.from_dict(data | {"colour": 1})
    for field in fields(value):  # type: ignore[arg-type]
        less = {name: x for name, x in data.items() if name != field.name}
        with pytest.raises(ValueError, match=rf"^{argument}.{field.name}: expected a value, got"):
            kind.from_dict(less)
    for wrong in (None, 3, "a", [data]):
        with pytest.raises(ValueError, match=f"^{argument}: expected a dict of "):
            kind.from_dict(wrong)  # type: ignore[arg-type]


def changed(data: Any, path: tuple[str, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return data


WRONG = [
    (("problem", "batch"), 1.0, "problem.batch: expected an integer, got 1.0"),
    (("problem", "batch"), True, "problem.batch: expected an integer, got True"),
    (("problem", "kind"), "prefill", "problem.kind: expected 'decode', 'dense' or 'varlen', got "),
    (("problem", "return_lse"), 0, "problem.return_lse: expected True or False, got 0"),
    (("problem", "mask"), None, "problem.mask: expected a dict of causal, window_left"),
    (("problem", "mask", "causal"), 1, "problem.mask.causal: expected True or False, got 1"),
    (
        ("problem", "place"),
        "paged",
        "problem.place: expected a dict with a key 'kind', got 'paged'",
    ),
    (("problem", "place"), {}, "problem.place.kind: expected 'contiguous', 'ragged' or 'paged', g"),
    (("problem", "place"), {"kind": "paged"}, "problem.place.page_size: expected a value, got "),
    (("problem", "place", "page_size"), "16", "problem.place.page_size: expected an integer, got"),
    (
        ("problem", "codec", "name"),
        "int4",
        "problem.codec.name: expected 'as_is', 'fp8', 'fp8_e5m2' or 'int8'",
    ),
    (("device",), "h200", "device: expected a dict of name, kind, capability, num_sms, "),
    (("device", "capability"), [9], "device.capability: expected 2 items, got [9]"),
    (("device", "capability"), [9, "0"], "device.capability[1]: expected an integer, got '0'"),
    (("device", "bandwidth"), "fast", "device.bandwidth: expected a finite number, got 'fast'"),
    (
        ("config", "schedule"),
        "odd",
        "config.schedule: expected 'even', 'batch', 'fixed', 'ranges',",
    ),
    (("config", "merge"), ["last"], "config.merge: expected 'combine', 'cluster' or 'last', got"),
    (("config", "merge"), "pairs", "config.merge: expected 'combine', 'cluster' or 'last', got"),
    (("kernel",), None, "kernel: expected a string, got None"),
    (("rejected",), [["prefill"]], "rejected[0]: expected 2 items, got ['prefill']"),
    (("rejected",), [["prefill", [1]]], "rejected[0][1][0]: expected a string, got 1"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_values_of_other_types(path: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Plan.from_dict(changed(PLAN.as_dict(), path, value))
    assert str(caught.value).startswith(f"plan.{message}")


def test_a_variant_with_a_key_that_it_does_not_have() -> None:
    variant = {**HopperDecode().as_dict(), "start": "after_q"}
    said = "^key of plan.config.variant: expected 'load' or 'key_scales', got 'start'$"
    with pytest.raises(ValueError, match=said):
        Plan.from_dict(changed(PLAN.as_dict(), ("config", "variant"), variant))


def test_a_handle_of_no_plan() -> None:
    for handle in ("plan-0", "{}", "[]", ""):
        with pytest.raises(ValueError, match=r"^plan.*: expected "):
            plan_with_handle(handle)


COPIES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda x: pickle.loads(pickle.dumps(x)),
    lambda x: replace(x),
]


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle", "replace"])
def test_a_plan_in_use_is_found_by_its_id(duplicate: Callable[[Any], Any]) -> None:
    made = duplicate(PLAN)
    assert plan_at(id(made)) is made and plan_at(id(PLAN)) is PLAN
    forgotten = id(made)
    del made
    with pytest.raises(KeyError):
        plan_at(forgotten)


@pytest.mark.parametrize("made", [Problem, Types, Operands])
def test_defaults_that_a_trace_takes(made: Any) -> None:
    """torch.compile of torch 2.11 cannot describe a call where a default is an object; with the
    oldest torch, `make test-oldest` compiles the calls themselves."""
    defaults = getattr(made, "_field_defaults", None)
    if defaults is None:
        defaults = {x.name: x.default for x in fields(made) if x.default is not MISSING}
    assert defaults
    for name, default in defaults.items():
        assert default is None or isinstance(default, int | float | str), name


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle", "replace"])
def test_a_copy_is_the_same_plan(duplicate: Callable[[Any], Any]) -> None:
    for asked in (False, True):  # for its handle, before
        plan = make_plan(PAGED, GPUS["h200"])
        if asked:
            assert plan.handle
        other = duplicate(plan)
        assert other == plan and hash(other) == hash(plan)
        assert other.handle == plan.handle
        assert plan_with_handle(other.handle) == plan
        changed_plan = replace(other, why="another")
        assert changed_plan != plan and changed_plan.handle != plan.handle


def test_a_handle_is_one_plan_while_it_is_used() -> None:
    """A compiled graph asks in every call, and a launcher is known by the plan itself."""
    assert plan_with_handle(PLAN.handle) is plan_with_handle(PLAN.handle)


NUMBERS = {name: getattr(PAGED, name) for name in ("batch", "num_heads", "head_dim", "seqlen_k")}


@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8], ids=lambda kind: kind.__name__)
def test_numpy_integers_are_integers(number: Any) -> None:
    problem = replace(
        PAGED,
        **{name: number(getattr(PAGED, name)) for name in ("batch", "num_heads", "num_kv_heads")},
        head_dim=number(64),
        head_dim_v=number(64),
        seqlen_q=number(1),
        seqlen_k=np.int64(4096),
        mask=Mask(True, number(127), np.int64(-1), number(0)),
        place=Paged(number(16)),
    )
    plan = splitkv.plan(problem, device=GPUS["h200"])
    assert plan == PLAN
    json.dumps(plan.as_dict())
    assert plan_with_handle(plan.handle) == plan
    assert str(splitkv.explain(problem, device=GPUS["h200"]))
    config = replace(plan.config, num_splits=number(2))
    assert type(checked(config, "config").num_splits) is int


def test_problems_of_other_types_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mask": "causal"}, "mask: expected a dict of causal, "),
        ({"place": 16}, "place: expected a dict with a key 'kind', got 16"),
        ({"place": Paged(2.0)}, "place.page_size: expected an integer, got 2.0"),  # type: ignore[arg-type]
        ({"return_lse": 1}, "return_lse: expected True or False, got 1"),
        ({"lengths": "gpu"}, "lengths: expected 'host' or 'device', got 'gpu'"),
        ({"mask": Mask(1)}, "mask.causal: expected True or False, got 1"),  # type: ignore[arg-type]
        ({"codec": Codec("int4")}, "codec.name: expected "),  # type: ignore[arg-type]
    ]
    for changes, message in wrong:
        for function in (splitkv.plan, splitkv.explain):
            with pytest.raises(ValueError) as caught:
                function(replace(PAGED, **changes), device=GPUS["h200"])
            assert str(caught.value).startswith(message)
    with pytest.raises(ValueError, match=r"^device.num_sms: expected an integer, got '132'$"):
        device = replace(GPUS["h200"], num_sms="132")  # type: ignore[arg-type]
        splitkv.plan(PAGED, device=device)


def test_a_device_from_a_dict() -> None:
    assert Device.from_dict(GPUS["b200"].as_dict()) == GPUS["b200"]
