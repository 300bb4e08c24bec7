"""The name under which profilers see the decode kernels for Hopper."""

from __future__ import annotations

from typing import Any


def named_for_profilers(specialization: Any) -> str:
    """The name of every entry point, whichever it is."""
    return "hopper_decode_split"
