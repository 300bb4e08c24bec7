"""K and V as TMA reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def layouts_of(
    x: Any, panels: bool, pairs: bool = False
) -> Callable[[int, tuple[int, ...]], Layout]:
    """Gives what computes, for so many keys and such strides of K or V, how TMA sees them.

    panels   one thread issues the copies of a box: the panels of 128 bytes that TMA's swizzle makes
             of a key are a dimension, so that a box is one message
    pairs    two elements of 8 bits are one, as in what `pairs_of` makes of x
    """
    outer, heads, dim = x.shape[0], x.shape[2], x.shape[3]
    size, together = x.element_size(), 1
    if pairs and size == 1:
        size = together = 2
        dim //= 2
    width = min(dim, 128 // size)

    def in_panels(keys: int, strides: tuple[int, ...]) -> Layout:
        b, t, h = strides[:3]
        shape = outer, heads, dim // width, keys, width
        return shape, (b // together, h // together, width, t // together, 1)

    def as_it_is(keys: int, strides: tuple[int, ...]) -> Layout:
        return (outer, keys, heads, dim), strides

    def in_rows(keys: int, strides: tuple[int, ...]) -> Layout:
        b, t, h = strides[:3]
        return (outer, keys, heads, dim), (b // together, t // together, h // together, 1)

    if panels:
        return in_panels
    return as_it_is if together == 1 else in_rows


def boxes_of(x: Any, box: int, parts: bool, panels: bool) -> TensorDescriptor:
    """Makes the descriptor of K or V [outer, inner, num_kv_heads, dim], `box` keys of one head at a
    time; `panels` as in `layouts_of`; parts: boxes of 128 bytes a key, as wide tiles have several.
    """
    shape, strides = layouts_of(x, panels)(x.shape[1], x.stride())
    size, columns = x.element_size(), shape[-1]
    if parts:
        columns = min(columns, 128 // size)
    block = [1, 1, shape[2], box, columns] if panels else [1, box, 1, columns]
    swizzle = min(128, columns * size)
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=len(block)
    )
    return TensorDescriptor(x, list(shape), list(strides), block, layout)
