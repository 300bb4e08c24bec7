"""K and V as TMA reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def layout_of(x: Any, panels: bool) -> tuple[Sequence[int], Sequence[int]]:
    """Computes shape and strides of K or V as TMA sees them.

    panels   one thread issues the copies of a box: the panels of 128 bytes that TMA's swizzle makes
             of a key are a dimension, so that a box is one message
    """
    shape, strides = x.shape, x.stride()
    if panels:
        width = min(x.shape[3], 128 // x.element_size())
        shape = shape[0], shape[2], shape[3] // width, shape[1], width
        strides = strides[0], strides[2], width, strides[1], 1
    return shape, strides


def boxes_of(x: Any, box: int, parts: bool, panels: bool) -> TensorDescriptor:
    """Makes the descriptor of K or V [outer, inner, num_kv_heads, dim], `box` keys of one head at a
    time; `panels` as in `layout_of`; parts: boxes of 128 bytes a key, as wide tiles have several.
    """
    shape, strides = layout_of(x, panels)
    size, columns = x.element_size(), shape[-1]
    if parts:
        columns = min(columns, 128 // size)
    block = [1, 1, shape[2], box, columns] if panels else [1, box, 1, columns]
    swizzle = min(128, columns * size)
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=len(block)
    )
    return TensorDescriptor(x, list(shape), list(strides), block, layout)
