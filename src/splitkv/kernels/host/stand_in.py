"""Tensors of a GPU that may not be there: layouts without memory, which launchers take for real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from splitkv.core.device import Device

ADDRESS = 1 << 20  # a multiple of all that kernels are specialised for
_INDEX = torch.device("cuda", 0)


class StandIn(Tensor):
    """A tensor that has shape, strides and type, a GPU, and no memory.

    gpu   the Device that it stands on

    What torch computes of it has these, too. Triton takes it for a tensor at a multiple of 16
    bytes. Nothing can read it, and nothing that a launcher does needs to.
    """

    gpu: Device

    @staticmethod
    def __new__(cls, layout: Tensor, gpu: Device) -> StandIn:
        """layout: on the device "meta"."""
        made = Tensor._make_wrapper_subclass(
            cls,
            layout.size(),
            strides=layout.stride(),
            dtype=layout.dtype,
            device=layout.device,
        )
        made.gpu = gpu
        return made

    def __init__(self, layout: Tensor, gpu: Device) -> None:
        super().__init__()

    @property
    def device(self) -> torch.device:
        return _INDEX

    @property
    def is_cuda(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return ADDRESS

    def __repr__(self, **_: Any) -> str:
        return f"StandIn({list(self.shape)}, {self.dtype}, {self.gpu.name})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        gpus = [x.gpu for x in (*args, *(kwargs or {}).values()) if isinstance(x, StandIn)]
        gpus += [x.gpu for xs in args if isinstance(xs, list) for x in xs if isinstance(x, StandIn)]
        named = {name: _layout(x) for name, x in (kwargs or {}).items()}
        if "device" in named:
            named["device"] = torch.device("meta")
        made = func(*map(_layout, args), **named)
        return StandIn(made, gpus[0]) if isinstance(made, Tensor) else made


def stand_in(shape: Sequence[int], dtype: torch.dtype, gpu: Device) -> StandIn:
    """A contiguous tensor of a GPU without memory."""
    return StandIn(torch.empty(tuple(shape), dtype=dtype, device="meta"), gpu)


def _layout(x: Any) -> Any:
    if isinstance(x, StandIn):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return [_layout(item) for item in x] if isinstance(x, list) else x
