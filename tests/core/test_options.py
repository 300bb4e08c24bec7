"""What has to be written out for type checkers is what the one table of arguments says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

import splitkv
from splitkv.core import options
from splitkv.core.options import (
    OPTIONS,
    REQUIRED,
    Function,
    defaults_of,
    inside_of,
    options_of,
    required_of,
    scalars_of,
    tensors_of,
)
from splitkv.core.problem import Operands, Options, describe_attention, describe_decode
from splitkv.runtime.append_decode import append_decode_op
from splitkv.runtime.arguments import AttentionOptions, DecodeOptions, VarlenOptions
from splitkv.runtime.autograd import attention_op
from splitkv.runtime.call_cache import Relaunch
from splitkv.runtime.decode import decode_op
from splitkv.runtime.dispatch import apart, together

PUBLIC: dict[Function, tuple[Callable[..., Any], Any]] = {
    "attention": (splitkv.attention, AttentionOptions),
    "attention_varlen": (splitkv.attention_varlen, VarlenOptions),
    "decode": (splitkv.decode, DecodeOptions),
}
DESCRIBED: dict[Function, Callable[..., Any]] = {
    "attention": describe_attention,
    "attention_varlen": describe_attention,
    "decode": describe_decode,
}


@pytest.mark.parametrize("function", PUBLIC)
def test_signatures(function: Function) -> None:
    """Names, defaults and types; those without a default in their order."""
    _, _, _, *parameters = inspect.signature(PUBLIC[function][0]).parameters.values()
    written = {
        p.name: (REQUIRED if p.default is p.empty else p.default, p.annotation) for p in parameters
    }
    table = options_of(function)
    assert written == {name: (option.default, option.type) for name, option in table.items()}
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert tuple(positional) == required_of(function)


@pytest.mark.parametrize("function", PUBLIC)
def test_what_type_checkers_read(function: Function) -> None:
    written: dict[str, str] = {}
    for part in reversed(PUBLIC[function][1].__mro__[:-1]):
        written |= getattr(part, "__annotations__", {})
    told = {name: getattr(kind, "__forward_arg__", kind) for name, kind in written.items()}
    table = options_of(function).items()
    assert told == {
        name: option.type
        for name, option in table
        if option.default is not REQUIRED and name != "return_lse"  # which overloads tell apart
    }


def test_what_is_described() -> None:
    """Every argument but those about the plan; what some function lacks may be left out."""
    functions: tuple[Function, ...] = (*DESCRIBED, "append_and_decode")
    described = [{*tensors_of(function), *scalars_of(function)} for function in functions]
    assert set().union(*described) == {*Options._fields}
    assert set.intersection(*described) == {*Options._fields} - Options._field_defaults.keys()


@pytest.mark.parametrize(("function", "foreign"), [("decode", "dropout_p"), ("attention", "plans")])
def test_what_is_not_described_is_refused(function: Function, foreign: str) -> None:
    q = torch.zeros(1, 1, 1, 16)
    given = defaults_of(function)
    problem, _ = DESCRIBED[function](q, q, q, needs_grad=False, **given)
    assert problem.seqlen_k == 1
    with pytest.raises(TypeError, match=f"unexpected argument '{foreign}'"):
        DESCRIBED[function](q, q, q, needs_grad=False, **given, **{foreign: 0.0})


@pytest.mark.parametrize("function", [*PUBLIC, "append_and_decode"])
def test_every_argument_is_a_tensor_a_scalar_or_about_the_plan(function: Function) -> None:
    tensors, scalars = tensors_of(function), scalars_of(function)
    deciding = [name for name, option in inside_of(function).items() if option.decides]
    assert sorted((*tensors, *scalars, *deciding)) == sorted(inside_of(function))
    assert set(tensors) <= {field.name for field in fields(Operands)}


def test_tensors_of_a_relaunch() -> None:
    _, _, _, *names = list(inspect.signature(Relaunch.__call__).parameters)[1:]
    assert set(names) == {*tensors_of("decode"), "softmax_scale", "softcap", "new"}


@pytest.mark.parametrize(
    ("operator", "functions", "without"),
    [
        (decode_op, ["decode"], {"out"}),
        (attention_op, ["attention", "attention_varlen"], {"out"}),
        (append_decode_op, ["append_and_decode"], set()),
    ],
    ids=["decode", "attention", "append_decode"],
)
def test_operators_take_every_argument(
    operator: Any, functions: list[Function], without: set[str]
) -> None:
    taken = {argument.name for argument in operator._opoverload._schema.arguments}
    wanted = {name for function in functions for name in options_of(function)} - without
    assert wanted - {"window_size"} | {"window_left", "window_right"} <= taken


def test_how_an_operator_takes_an_argument() -> None:
    schema = options.schema_of("attention", "attention_varlen")
    assert {"SymInt? max_seqlen_q", "Tensor? cu_seqlens_q", "bool causal", "str plan"} <= {*schema}
    assert "SymInt max_seqlen_q" in options.schema_of("attention_varlen")
    assert "float? softmax_scale" in schema and "float softcap" in schema
    assert options.names_of(schema)[:2] == ("cu_seqlens_q", "cu_seqlens_k")


def test_what_may_be_a_number_or_a_tensor_is_two_arguments_inside() -> None:
    given = defaults_of("decode")
    of_all, of_each = given | {"sink_tokens": 4}, given | {"sink_tokens": torch.tensor([3, 4])}
    for arguments, number, tensor in (
        (of_all, 4, None),
        (of_each, 0, of_each["sink_tokens"]),
    ):
        inside = apart(arguments)
        assert inside["sink_tokens"] == number and inside["sequence_sink_tokens"] is tensor
        assert set(inside) - {"sequence_sink_tokens"} == set(arguments)
        assert together(inside) == arguments
    assert set(inside_of("decode")) - set(options_of("decode")) == {"sequence_sink_tokens"}
    assert inside_of("append_and_decode") == options_of("append_and_decode")


def test_rows_of_the_table_do_not_overlap() -> None:
    rows = [(option.name, function) for option in OPTIONS for function in option.functions]
    assert len(rows) == len(set(rows))
