"""Strides of an operand, which the host makes and device code reads. Imports no Triton."""

from __future__ import annotations

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Elements between sequences (0 where packed), tokens and heads."""

    b: Any
    t: Any
    h: Any
