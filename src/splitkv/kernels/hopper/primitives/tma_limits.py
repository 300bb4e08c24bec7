"""Which tensors TMA can describe, and which results kernels can store beside it."""

from __future__ import annotations

from typing import Any

from splitkv.core.problem import Operands


def unfit(operands: Operands) -> list[str]:
    """Every reason why TMA cannot describe q, k, v or out of a call, or packed results cannot be
    stored: row by row, where a sequence ends inside a tile."""
    reasons = []
    for name in ("q", "k", "v", "out"):
        x = getattr(operands, name)
        if x is None:
            continue
        if 0 in x.shape:
            reasons.append(f"{name}: expected at least one token, got {list(x.shape)}")
        elif not fits_tma(x):
            reasons.append(
                f"{name}: expected strides and an address that are multiples of 16 bytes"
            )
    out = operands.out
    if operands.cu_seqlens_q is not None and out is not None and not out.is_contiguous():
        strides = list(out.stride())
        reasons.append(f"out: expected packed rows without gaps between, got strides {strides}")
    return reasons


def fits_tma(x: Any) -> bool:
    """Whether TMA can describe a tensor; along a single element torch may say any stride, and 0
    along what is expanded.
    """
    steps = [step for n, step in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    aligned = all(step * x.element_size() % 16 == 0 for step in steps)
    return aligned and x.stride()[-1] == 1 and x.data_ptr() % 16 == 0
