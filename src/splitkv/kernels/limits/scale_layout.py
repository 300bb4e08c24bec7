"""Layouts of scales: which strides kernels are given, and which they have none for."""

from __future__ import annotations

from typing import Any


def scale_strides(scale: Any, x: Any) -> tuple[int, int, int]:
    """Elements between the scales of sequences or pages, of tokens and of heads; 0: they share it.

    scale  None, or of one element, [heads], [batch, heads] or of the shape of x without its last
           dimension
    x      [batch or pages, tokens, heads, dim], or packed [tokens, heads, dim]
    """
    if scale is None or scale.numel() == 1:
        return 0, 0, 0
    *outer, head = scale.stride()
    if tuple(scale.shape) == tuple(x.shape)[:-1]:
        b, t = outer if len(outer) == 2 else (0, *outer)
        return b, t, head
    return (outer[0] if outer else 0), 0, head


def unfit(operands: Any) -> list[str]:
    """Every reason against the layout of scales: kernels have one set of strides for K and V."""
    k, v = operands.k_scale, operands.v_scale
    if k is None or scale_strides(k, operands.k) == scale_strides(v, operands.v):
        return []
    return [f"v_scale: expected the strides of k_scale {tuple(k.stride())}, got {v.stride()}"]
