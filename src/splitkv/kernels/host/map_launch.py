"""Launches of compiled kernels that take maps of TMA: of caches of one length, of caches of every
length, and of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from splitkv.kernels.host.launch import Grid, Launch, calling_of, holding
from splitkv.kernels.host.lengths import Layout
from splitkv.kernels.host.tensor_maps import MAX_MAPS, Tile

MAX_OPERANDS = MAX_MAPS // 4  # of whole sequences in one layout; past it these start afresh


LaunchWith = Callable[[Sequence[Any], Any, Any], Launch]
"""`launch_with(tail, k_maps, v_maps)`: a launch whose last arguments are always `tail`, and which
takes K and V as the items of these maps of their addresses."""


def bind_to_maps(compiled: Any, grid: tuple[int, int, int]) -> LaunchWith | None:
    """Binds launches of a kernel that takes q, k and v, these as descriptors, and a page table:
    `launch(stream, at_q, (at_k, at_v, at_table), *args)`, as `Repeat` launches a split. None: no
    way is known. Whoever keeps one holds the kernel, see `holding`.
    """
    calling = calling_of(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling
    x, y, z = grid

    def one_by_one(tail: Sequence[Any], k_maps: Any, v_maps: Any) -> Launch:
        def launch(stream: int, at_q: int, kv: tuple[int, int, int | None], *args: Any) -> None:
            at_k, at_v, at_table = kv
            k, v = k_maps[at_k], v_maps[at_v]
            function(x, y, z, stream, *fixed, at_q, *k, *v, at_table, *args, *tail)

        return launch

    def in_a_tuple(tail: Sequence[Any], k_maps: Any, v_maps: Any) -> Launch:
        def launch(stream: int, at_q: int, kv: tuple[int, int, int | None], *args: Any) -> None:
            at_k, at_v, at_table = kv
            k, v = k_maps[at_k], v_maps[at_v]
            function(x, y, z, stream, *fixed, (at_q, *k, *v, at_table, *args, *tail))

        return launch

    return in_a_tuple if as_tuple else one_by_one


LengthLaunch = Callable[..., None]
"""`launch(length, at_layout, stream, *args)`: a Launch for caches of this length, which is among
its last arguments; at_layout: what their layout changes, such as a `CacheMaps`."""
CacheMaps = tuple[
    tuple[Sequence[Any], Sequence[Any]], dict[Any, tuple[Any, ...]], tuple[Layout, Layout]
]
"""(around, known, layouts): the arguments before the length and those behind it; what the kernel
takes of caches and page tables that are known by their addresses; and the layouts of K and V for
others, one object where their tiles are alike, too. A plain tuple, as one is made for every length
of caches that are made anew."""


def bind_to_lengths(
    compiled: Any, grid: tuple[int, int, int], tiles: tuple[Tile, Tile]
) -> LengthLaunch | None:
    """Binds a launch of a kernel as `bind_to_maps` has them, for caches that grow: its at_layout is
    a `CacheMaps`. None: no way is known.

    tiles   of K and V
    """
    calling = calling_of(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling
    x, y, z = grid

    def one_by_one(
        length: int, layout: CacheMaps, stream: int, at_q: int, kv: Any, *args: Any
    ) -> None:
        before, behind = layout[0]
        caches = layout[1].get(kv) or make_maps(tiles, layout, kv)
        function(x, y, z, stream, *fixed, at_q, *caches, *args, *before, length, *behind)

    def in_a_tuple(
        length: int, layout: CacheMaps, stream: int, at_q: int, kv: Any, *args: Any
    ) -> None:
        before, behind = layout[0]
        caches = layout[1].get(kv) or make_maps(tiles, layout, kv)
        rest = at_q, *caches, *args, *before, length, *behind
        function(x, y, z, stream, *fixed, rest)

    return holding(compiled, in_a_tuple if as_tuple else one_by_one)


def make_maps(
    tiles: tuple[Tile, Tile], layout: CacheMaps, kv: tuple[int, int, int | None]
) -> tuple[Any, ...]:
    """Asks the driver for maps of K and V at these addresses, and keeps them as a kernel takes
    them: each as of `TensorMaps`, and the address of a page table."""
    known, (of_k, of_v), (at_k, at_v, table) = layout[1], layout[2], kv
    (fill, (swizzle, size, element, tile)), (shape, strides) = tiles[0], of_k
    made = [fill(at_k, swizzle, size, element, tile, shape, strides, 0)]
    made += shape
    made += strides
    if of_v is not of_k:
        (fill, (swizzle, size, element, tile)), (shape, strides) = tiles[1], of_v
    made += (fill(at_v, swizzle, size, element, tile, shape, strides, 0),)
    made += shape
    made += strides
    if len(known) >= MAX_MAPS:
        known.clear()
    found = known[kv] = (*made, table)
    return found


OperandAddresses = tuple[int, int, int, int]
"""The addresses of (q, k, v, out); a plain tuple, as every call makes one."""


OperandBox = tuple[int, Tile, Any]
"""(operand, tile, box): which of (q, k, v, out) a descriptor is of, the tile that the kernel is
compiled for, and a box, whose `layout(shape, strides)` gives both as TMA is to see them, alike for
all of one `length`."""
OperandMaps = tuple[dict[OperandAddresses, tuple[Any, ...]], Sequence[Layout]]
"""(known, layouts): what the kernel takes of operands that are known by their addresses; and the
layouts of q, k, v and out, for others."""
LaunchLayout = tuple[Grid, Sequence[Any], OperandMaps]
"""(grid, tail, maps): the last arguments of a launch on the grid are always `tail`. A plain tuple,
as one is made for every length."""
LaunchAt = Callable[[LaunchLayout], Launch]
"""Gives a launch, as `Sequences` has it."""


def bind_to_descriptors(compiled: Any, boxes: Sequence[OperandBox | None]) -> LaunchAt | None:
    """Binds launches of a kernel whose first arguments are descriptors, or None, of these boxes,
    and which knows no ALiBi. None: no way is known. Whoever keeps one holds the kernel, see
    `holding`.
    """
    calling = calling_of(compiled)
    if calling is None:
        return None
    function, fixed, as_tuple = calling

    def one_by_one(
        layout: LaunchLayout, stream: int, at: Any, memory: Any, row: Any, *args: Any
    ) -> None:
        grid, tail, maps = layout
        operands = maps[0].get(at) or make_operand_maps(boxes, maps, at)
        function(*grid, stream, *fixed, *operands, *memory, row[0], *args, *tail)

    def in_a_tuple(
        layout: LaunchLayout, stream: int, at: Any, memory: Any, row: Any, *args: Any
    ) -> None:
        grid, tail, maps = layout
        operands = maps[0].get(at) or make_operand_maps(boxes, maps, at)
        function(*grid, stream, *fixed, (*operands, *memory, row[0], *args, *tail))

    # made for every length: less than functions of it
    return partial(partial, in_a_tuple if as_tuple else one_by_one)


def make_operand_maps(
    boxes: Sequence[OperandBox | None], maps: OperandMaps, at: OperandAddresses
) -> tuple[Any, ...]:
    """Asks the driver for maps of operands at these addresses, and keeps them as a kernel takes
    them: each as of `TensorMaps`, or None."""
    known, layouts = maps
    made: list[Any] = []
    before = of = None
    shape: Sequence[int] = ()
    strides: Sequence[int] = ()
    for described in boxes:
        if described is None:
            made.append(None)
            continue
        operand, (fill, (swizzle, size, element, tile)), box = described
        given = layouts[operand]
        if given is not before or box.length != of:
            before, of = given, box.length
            shape, strides = box.layout(*given)
        made += (fill(at[operand], swizzle, size, element, tile, shape, strides, 0),)
        made += shape
        made += strides
    if len(known) >= MAX_OPERANDS:
        known.clear()
    found = known[at] = tuple(made)
    return found
