"""Frozen dataclasses as plain data, for JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin
from typing import Union as TypingUnion
from typing import get_type_hints as type_hints

from splitkv.core.errors import expect, expect_bool, expect_int, expect_number, expect_one_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T", bound="Value")


class Value:
    """A frozen dataclass whose fields are numbers, strings, tuples and other values.

    TAG   what tells it from others that may stand in its place; None: nothing else may
    """

    __slots__ = ()
    TAG: ClassVar[str | None] = None

    def as_dict(self) -> dict[str, Any]:
        """The value as plain data, for JSON."""
        data: dict[str, Any] = _plain(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The value that `as_dict` made this of, also where JSON was in between.

        Raises ValueError for keys that are not its fields, for fields that are missing and for
        values of other types.
        """
        value: Self = _read(cls, data, cls.__name__.lower())
        return value


def checked(value: T, argument: str = "") -> T:
    """The value with Python's own numbers. Raises ValueError where a field is not of its type; the
    fields of an `argument` are called by its name and theirs."""
    read: T = _read(type(value), value, argument)
    return read


def _field(argument: str, name: str) -> str:
    return f"{argument}.{name}" if argument else name


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        tag = {} if value.TAG is None else {"kind": value.TAG}
        assert is_dataclass(value)
        return tag | {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


@cache
def _types(kind: type) -> dict[str, Any]:
    """The type of each field."""
    hints = type_hints(kind)
    assert is_dataclass(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _read(kind: Any, data: Any, argument: str) -> Any:
    """Something of a type of a field of a Value."""
    origin, of = get_origin(kind), get_args(kind)
    if origin is Literal:
        expect_one_of(argument, data, of)
        return next(option for option in of if option == data)
    if origin in (UnionType, TypingUnion):
        return _read_one_of(of, data, argument)
    if origin is tuple:
        return _read_tuple(of, data, argument)
    if kind is bool:
        expect_bool(argument, data)
        return data
    if kind is int:
        expect_int(argument, data)
        return int(data)
    if kind is float:
        expect_number(argument, data)
        return float(data)
    if kind is str:
        expect(isinstance(data, str), argument, "a string", data)
        return str(data)
    return _read_value(kind, data, argument)


def _read_value(kind: Any, data: Any, argument: str) -> Any:
    types = _types(kind)
    if isinstance(data, kind):
        given = {name: getattr(data, name) for name in types}
    else:
        expect(isinstance(data, Mapping), argument, f"a dict of {', '.join(types)}", data)
        given = dict(data)
        if kind.TAG is not None:
            tag = given.pop("kind", None)
            expect(tag == kind.TAG, f"{argument}.kind", repr(kind.TAG), tag)
        for name in given:
            expect_one_of(f"key of {argument}", name, types)
        for name in types:
            expect(name in given, f"{argument}.{name}", "a value", "none")
    return kind(
        **{name: _read(of, given[name], _field(argument, name)) for name, of in types.items()}
    )


def _read_one_of(kinds: tuple[Any, ...], data: Any, argument: str) -> Any:
    """A value of one of several classes, told by their tags, or None where that is one."""
    if type(None) in kinds:
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        if data is None:
            return None
        if len(kinds) == 1:
            return _read(kinds[0], data, argument)
    for kind in kinds:
        if isinstance(data, kind):
            return _read_value(kind, data, argument)
    expect(isinstance(data, Mapping), argument, "a dict with a key 'kind'", data)
    tagged = {kind.TAG: kind for kind in kinds}
    expect_one_of(f"{argument}.kind", data.get("kind"), tagged)
    return _read_value(tagged[data["kind"]], data, argument)


def _read_tuple(kinds: tuple[Any, ...], data: Any, argument: str) -> Any:
    expect(isinstance(data, tuple | list), argument, "a list", data)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(data)
    expect(len(data) == len(kinds), argument, f"{len(kinds)} items", data)
    items = zip(kinds, data, strict=True)
    return tuple(_read(kind, item, f"{argument}[{i}]") for i, (kind, item) in enumerate(items))
