"""Fresh memory that the package asks for is NaN, so that an element left unwritten shows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch


def poison_fresh_memory(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone."""
    know_functions()

    def poisoning(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Any:
            fresh = allocate(*args, **kwargs)
            if torch.compiler.is_compiling():
                return fresh
            return poison_for(sys._getframe(1), fresh)

        return allocate_poisoned

    new_empty = torch.Tensor.new_empty

    def poisoned_new_empty(x: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():  # which cannot trace a method taken off its class
            return x.new_zeros(*size, **kwargs)
        return poison_for(sys._getframe(1), new_empty(x, *size, **kwargs))

    for name in ("empty", "empty_like", "empty_strided"):
        patch.setattr(torch, name, poisoning(getattr(torch, name)))
    patch.setattr(torch.Tensor, "new_empty", poisoned_new_empty)
    guards = torch._C._dynamo.guards
    if hasattr(guards, "_empty_strided_cuda"):
        patch.setattr(guards, "_empty_strided_cuda", poisoning(guards._empty_strided_cuda))


def know_functions() -> None:
    """Has Dynamo, where it is loaded, list torch's functions: a list that is made while they are
    patched has none of these. Making a process group throws the list away."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map()


def poison_for(caller: FrameType, x: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or the type's largest integer, if the package is the caller."""
    if caller.f_globals.get("__name__", "").split(".")[0] != "splitkv":
        return x
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)
