"""Maps of TMA: arguments of a compiled kernel in the place of one tensor descriptor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton

MAX_MAPS = 4096  # tensor maps kept, of about 400 bytes each; past it the cache starts afresh


class JustAddresses(dict[int, tuple[Any, ...]]):
    """In the place of `TensorMaps`, for a kernel that takes a pointer there."""

    def __missing__(self, address: int) -> tuple[Any, ...]:
        return (address,)


JUST_ADDRESSES = JustAddresses()


class Tile(NamedTuple):
    """The tile of a tensor descriptor that a kernel is compiled for.

    fill    the driver's function that makes a map
    box     in its terms: swizzle, bytes of an element, its type, elements along each dimension
    """

    fill: Callable[..., Any]
    box: tuple[Any, int, int, Any]


def tile_of(compiled: Any, index: int) -> Tile:
    """The Tile of a kernel's descriptor of this number."""
    meta = compiled.metadata.tensordesc_meta[index]
    assert not meta["fp4_padded"] and not meta.get("is_im2col"), f"plain tiles only, got {meta}"
    driver = sys.modules[type(compiled.run).__module__]
    element_type = driver.TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None)  # from Triton 3.7 on
    box = meta["swizzle"], meta["elem_size"], element_type, meta["block_size"]
    return Tile(fill or utils.fill_tma_descriptor, box)


class TensorMaps(dict[int, tuple[Any, ...]]):
    """Arguments of the C function in the place of one tensor descriptor, made once an address.

    shape, strides   of the tensor, in elements; the last stride is 1

    `maps[address]` is (CUtensorMap, *shape, *strides). A map holds an address and a layout and no
    memory, so it stays right when the memory is freed and taken again. Out of bounds reads 0.
    """

    __slots__ = "fill", "given", "layout"

    def __init__(self, tile: Tile, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.fill = tile.fill
        self.given, self.layout = (*tile.box, shape, strides, 0), (*shape, *strides)

    def __missing__(self, address: int) -> tuple[Any, ...]:
        """Asks the driver for a map, and keeps it among all."""
        made = self.fill(address, *self.given), *self.layout
        if len(_made) >= MAX_MAPS:
            kept = _made[:]  # another thread may add to it
            del _made[: len(kept)]
            for maps, other in kept:
                maps.pop(other, None)
        _made.append((self, address))
        self[address] = made
        return made


_made: list[tuple[TensorMaps, int]] = []  # all maps that are kept


class MapsOfLength(dict[int, tuple[Any, ...]]):
    """In the place of `TensorMaps`, for tensors that have this length for a while: they are
    forgotten with it. There is one of every length, so it is made in little time."""

    __slots__ = "shape", "strides", "tile"

    def __init__(self, tile: Tile, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.tile, self.shape, self.strides = tile, shape, strides

    def __missing__(self, address: int) -> tuple[Any, ...]:
        (fill, box), shape, strides = self.tile, self.shape, self.strides
        if len(self) >= MAX_MAPS:
            self.clear()
        made = self[address] = fill(address, *box, shape, strides, 0), *shape, *strides
        return made
