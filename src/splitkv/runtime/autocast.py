"""The rule of torch.autocast for a call, that of torch's own scaled_dot_product_attention.

`attention`, `attention_varlen` and `decode` cast q, k and v of 16 and 32 bits to autocast's type
first, and their output has it. Tensors of 64 and of 8 bits stay as they are, and so does everything
that enters the softmax in fp32: sink logits, slopes, scales. What runs then runs without autocast,
so that nothing inside is rounded once more. Functions that write into a cache take tensors as they
come, as the cache's type is its own.

The check of a cached call sees whether autocast is on: a call without it asks nothing more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

CAST = (torch.bfloat16, torch.float16, torch.float32)


def autocast_dtype(q: Any) -> torch.dtype | None:
    """The type that autocast casts to on the device of q; None where it is off."""
    kind = q.device.type if isinstance(q, Tensor) else ""
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def as_autocast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v as autocast has them; as they are where it is off."""
    dtype = autocast_dtype(q)
    if dtype is None:
        return q, k, v
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in CAST else x for x in (q, k, v))
    return q, k, v


def without_autocast(q: Any) -> AbstractContextManager[Any]:
    """Autocast off on the device of q."""
    if autocast_dtype(q) is None:
        return nullcontext()
    off: AbstractContextManager[Any] = torch.autocast(q.device.type, enabled=False)
    return off
