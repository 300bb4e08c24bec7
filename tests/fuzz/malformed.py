"""Calls of which one argument is broken: refused in the package's words, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from fuzz.draw import Draw, Drawn, same_bits
from fuzz.oracle import Wrong
from splitkv.core.errors import UnsupportedProblem

GRAMMAR = re.compile(r"^[\w.\[\] ,()/+\-*]+: expected .+, got .+", re.S)
UNKNOWN = re.compile(r"(unexpected keyword|required (positional|keyword-only)|multiple values)")


class Rejected(Exception):
    """A malformed call that was refused as it should be."""


class Accepted(Exception):
    """A call with a strange argument that may be meant."""


def tensor_broken(d: Draw, x: Tensor) -> tuple[str, Any, bool]:
    """What was done, the broken one, and whether it can never be meant."""
    shape = tuple(x.shape)
    larger = d.rng.randrange(max(1, x.dim()))
    grown = tuple(n + 1 if i == larger else n for i, n in enumerate(shape))
    ways: list[tuple[str, Callable[[], Any], bool]] = [
        ("a NumPy array", lambda: numpy.zeros(shape, dtype=numpy.float32), True),
        ("complex", lambda: torch.zeros(shape, dtype=torch.complex64, device=x.device), True),
        ("booleans", lambda: torch.zeros(shape, dtype=torch.bool, device=x.device), True),
        ("int64", lambda: torch.zeros(shape, dtype=torch.int64, device=x.device), False),
        ("float64", lambda: torch.zeros(shape, dtype=torch.float64, device=x.device), False),
        ("0-d", lambda: torch.zeros((), dtype=x.dtype, device=x.device), False),
        ("a dimension more", lambda: x[None], False),
        ("a dimension less", lambda: x[0] if x.dim() and x.shape[0] else x[None, None], False),
        ("one longer", lambda: torch.zeros(grown, dtype=x.dtype, device=x.device), False),
        ("empty", lambda: torch.zeros(0, dtype=x.dtype, device=x.device), False),
        ("on another device", lambda: torch.zeros(shape, dtype=x.dtype, device="meta"), True),
        ("a list", lambda: [1, 2], True),
        ("a word", lambda: "q", True),
        ("a number", lambda: 1.5, True),
        ("sparse", lambda: torch.zeros(shape, device=x.device).to_sparse(), True),
    ]
    if d.device == "cuda":
        ways.append(("on the host", lambda: x.detach().cpu(), True))
    name, make, never = d.rng.choice(ways)
    return name, make(), never


def value_broken(d: Draw, x: Any) -> tuple[str, Any, bool]:
    """Of a number, flag, pair, word or None."""
    odd: list[tuple[str, Any, bool]]
    if isinstance(x, bool):
        odd = [("1", 1, True), ("0", 0, True), ("None", None, False), ("'yes'", "yes", True)]
        odd += [("a tensor", torch.tensor(True), True), ("NumPy's", numpy.float32(1.0), True)]
    elif isinstance(x, int):
        odd = [("negative", -3, False), ("a fraction", 1.5, True), ("a word", "3", True)]
        odd += [("huge", 1 << 70, False), ("nan", float("nan"), True), ("True", True, True)]
        odd += [("a tensor", torch.tensor([1, 2]), True), ("a list", [3], True)]
    elif isinstance(x, float):
        odd = [("nan", float("nan"), True), ("inf", float("inf"), True), ("a word", "1", True)]
        odd += [("negative", -1.0, True), ("a list", [1.0], True), ("True", True, True)]
        odd += [("a tensor", torch.ones(3), True)]
    elif isinstance(x, tuple):
        odd = [("of three", (1, 2, 3), True), ("of words", ("a", "b"), True), ("5", 5, True)]
        odd += [("below -1", (-7, 0), True), ("fractions", (0.5, 1), True), ("None", None, True)]
        odd += [("of NaN", (float("nan"), 1), True), ("huge", (1 << 80, 1), False)]
    elif isinstance(x, str):
        odd = [("another word", "sideways", True), ("a number", 3, True), ("bytes", b"x", True)]
    else:
        odd = [("an object", object(), True), ("a word", "x", True), ("a list", [], False)]
    return d.rng.choice(odd)


def malformed(d: Draw, make: Callable[[Draw], Drawn]) -> Drawn:
    """One argument of a drawn call is broken, after the call has been made as it was, or before."""
    drawn = make(d)
    name = d.rng.choice([*drawn.kwargs])
    kwargs = dict(drawn.kwargs)
    value = kwargs[name]
    if isinstance(value, Tensor):
        how, broken, never = tensor_broken(d, value)
        if how == "on another device" and sum(isinstance(x, Tensor) for x in kwargs.values()) == 1:
            never = False  # a tensor alone is on its own device
        if isinstance(broken, Tensor) and broken.dtype == value.dtype:
            never = never and (broken.shape != value.shape or broken.device != value.device)
    else:
        how, broken, never = value_broken(d, value)
    absent = d.chance(0.1)
    before = d.chance(0.4)
    if absent:
        kwargs["surprise"], how, never = 1, "an unknown argument", True
    else:
        kwargs[name] = broken

    def run(**kwargs: Any) -> None:
        if before:
            with suppress(UnsupportedProblem):
                drawn.function(**drawn.kwargs)
        kept = {n: x.detach().clone() for n, x in drawn.kwargs.items() if isinstance(x, Tensor)}
        said = f"{drawn.name}, {'' if absent else name} {how}"
        try:
            drawn.function(**kwargs)
        except (UnsupportedProblem, ValueError, TypeError) as error:
            fair = isinstance(error, UnsupportedProblem) or GRAMMAR.match(str(error))
            fair = fair or (isinstance(error, TypeError) and UNKNOWN.search(str(error)))
            if not fair:
                error.args = (f"{said}: not in the package's words: {error}",)
                raise
            for n, x in kept.items():
                if not same_bits(x, drawn.kwargs[n].detach()):
                    raise Wrong(f"{said}: refused, but {n} was written: {error}") from None
            raise Rejected(str(error)) from None
        except Exception as error:
            error.args = (f"{said}: {type(error).__name__}: {error}",)
            raise
        if never:
            raise Wrong(f"{said}: expected a refusal, and it was taken")
        raise Accepted(said)

    return replace(
        drawn,
        name=f"malformed {drawn.name.removesuffix(' under a plan')}",
        function=run,
        kwargs=kwargs,
        judge=lambda result: None,
        writes=tuple(kwargs),
        again=False,
    )


def respelt(d: Draw, drawn: Drawn) -> Drawn:
    """The same numbers as NumPy has them, and a window as a list: as good as they were."""
    kwargs = {}
    for name, x in drawn.kwargs.items():
        if type(x) is int:
            x = numpy.int64(x)
        elif type(x) is float:
            x = numpy.float64(x)
        elif type(x) is tuple and len(x) == 2:
            x = [*x] if d.chance(0.5) else tuple(numpy.int32(n) for n in x)
        kwargs[name] = x
    return replace(drawn, kwargs=kwargs)
