"""The arguments that the public functions share: one table, of which their other lists are made.

Defaults, what `describe_decode` and `describe_attention` are given, the tensors of a launcher and
the schemas of operators come from here. The signatures themselves and the TypedDicts in
`runtime/arguments.py` are written out for type checkers; a test holds them equal to the table.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any, Literal, get_args

Function = Literal["attention", "attention_varlen", "decode", "append_and_decode"]

REQUIRED = Parameter.empty
"""In the place of a default: the argument has to be given, by position."""

_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "Plan": "str",  # its handle; none: an empty string
    "Schedule": "Tensor",  # where its programs start
}


@dataclass(frozen=True, slots=True)
class Option:
    """One argument.

    type        as a signature writes it
    functions   those that have it with this type and default
    """

    name: str
    type: str
    default: Any
    functions: tuple[Function, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether its layout keys a call, and its contents are read by the kernel; what is no
        tensor keys a call by value and type, and a plan by identity."""
        return self.type.startswith("Tensor")

    @property
    def inside(self) -> tuple[Option, ...]:
        """Itself, or where it may be a number or a tensor an argument for each: how what is behind
        the public functions takes it, see `runtime.dispatch.apart`."""
        if self.type != "int | Tensor":
            return (self,)
        of_sequences = Option(f"sequence_{self.name}", "Tensor | None", None, self.functions)
        return replace(self, type="int"), of_sequences

    @property
    def decides(self) -> bool:
        """Whether it is about the plan, and not about the problem."""
        return self.name in ("num_splits", "plan", "schedule")

    def schema(self, optional: bool) -> tuple[str, ...]:
        """How an operator takes it; `optional`: it may be None there."""
        if self.type == "tuple[int, int]":
            return "SymInt window_left", "SymInt window_right"
        kind, *none = self.type.split(" | ", 1)
        may_be_none = (optional or none) and kind != "Plan"
        return (f"{_SCHEMA_TYPES[kind]}{'?' if may_be_none else ''} {self.name}",)


_VARLEN: tuple[Function, ...] = ("attention_varlen",)
_SEQUENCES: tuple[Function, ...] = ("attention", "attention_varlen")
_CACHE: tuple[Function, ...] = ("decode", "append_and_decode")
_EVERY: tuple[Function, ...] = get_args(Function)
_PUBLIC: tuple[Function, ...] = ("attention", "attention_varlen", "decode")

# An argument has a row for each type and default, and where signatures differ in its place; the
# order is that in which messages list them.
OPTIONS = (
    Option("cu_seqlens_q", "Tensor", REQUIRED, _VARLEN),
    Option("cu_seqlens_k", "Tensor | None", REQUIRED, _VARLEN),
    Option("max_seqlen_q", "int", REQUIRED, _VARLEN),
    Option("max_seqlen_k", "int", REQUIRED, _VARLEN),
    Option("page_table", "Tensor | None", None, _VARLEN),
    Option("cache_seqlens", "Tensor | None", None, ("attention_varlen", "decode")),
    Option("page_table", "Tensor | None", None, _CACHE),
    Option("max_seqlen_k", "int | None", None, _CACHE),
    Option("causal", "bool", False, _SEQUENCES),
    Option("causal", "bool", True, _CACHE),
    Option("window_size", "tuple[int, int]", (-1, -1), _EVERY),
    Option("sink_tokens", "int | Tensor", 0, _PUBLIC),
    Option("sink_tokens", "int", 0, ("append_and_decode",)),
    Option("max_sink_tokens", "int | None", None, _PUBLIC),
    Option("attention_chunk", "int", 0, _EVERY),
    Option("bidirectional_ranges", "Tensor | None", None, _VARLEN),
    Option("sink_logits", "Tensor | None", None, _EVERY),
    Option("softmax_scale", "float | None", None, _EVERY),
    Option("softcap", "float", 0.0, _EVERY),
    Option("alibi_slopes", "Tensor | None", None, _EVERY),
    Option("return_lse", "bool", False, _EVERY),
    Option("q_scale", "Tensor | None", None, _EVERY),
    Option("k_scale", "Tensor | None", None, _EVERY),
    Option("v_scale", "Tensor | None", None, _EVERY),
    Option("products", "str | None", None, _EVERY),
    Option("dropout_p", "float", 0.0, _SEQUENCES),
    Option("deterministic", "bool", False, _SEQUENCES),
    Option("out", "Tensor | None", None, _PUBLIC),
    Option("out_scale", "Tensor | None", None, _PUBLIC),
    Option("early_kv", "bool", False, ("decode",)),
    Option("num_splits", "int", 0, _CACHE),
    Option("plan", "Plan | None", None, _EVERY),
    Option("schedule", "Schedule | None", None, _CACHE),
)


def options_of(function: Function) -> dict[str, Option]:
    """The arguments of a function behind its queries, keys and values, by name."""
    return {option.name: option for option in OPTIONS if function in option.functions}


def inside_of(function: Function) -> dict[str, Option]:
    """The arguments as what is behind the public functions takes them, by name."""
    return {o.name: o for option in options_of(function).values() for o in option.inside}


def defaults_of(function: Function) -> dict[str, Any]:
    """The defaults of what describes a problem; arguments that have none are not among them."""
    return {
        name: option.default
        for name, option in options_of(function).items()
        if option.default is not REQUIRED and not option.decides
    }


def required_of(function: Function) -> tuple[str, ...]:
    """The arguments without a default, in the order of their positions."""
    options = options_of(function)
    return tuple(name for name, option in options.items() if option.default is REQUIRED)


def tensors_of(function: Function) -> tuple[str, ...]:
    """The arguments that are tensors."""
    return tuple(name for name, option in inside_of(function).items() if option.is_tensor)


def scalars_of(function: Function) -> tuple[str, ...]:
    """The arguments that are no tensors and describe the problem."""
    options = inside_of(function).items()
    return tuple(name for name, o in options if not o.is_tensor and not o.decides)


def schema_of(*functions: Function, without: Collection[str] = ()) -> tuple[str, ...]:
    """The arguments of an operator that does what these functions do: "SymInt sink_tokens", ...

    What one of the functions does not have may be None.
    """
    found: dict[str, Option] = {}
    for option in (inside for row in OPTIONS for inside in row.inside):
        if option.name not in without and set(functions) & set(option.functions):
            found.setdefault(option.name, option)
    arguments: list[str] = []
    for name, option in found.items():
        everywhere = all(name in inside_of(function) for function in functions)
        arguments += option.schema(optional=not everywhere)
    return tuple(arguments)


def names_of(schema: Collection[str]) -> tuple[str, ...]:
    """The names of the arguments of a schema."""
    return tuple(argument.split()[-1] for argument in schema)
