"""Counts of tiles: arithmetic that policies, limits and launchers share."""

from __future__ import annotations

from splitkv.core.kv import AS_IS, Codec, Paged
from splitkv.core.problem import Problem

WIDE = 64  # packed rows of a tile of decode on Hopper that a warpgroup multiplies by wgmma
# What a split costs beside its tiles, in tiles, where a schedule of the step shares them out: its
# q, its result and the wait for its first keys. Of 0, 1/4, 1/2, 1, 2, 3 and 4 the fastest over
# mixes of lengths, of 16 bits and of 8: measurements/mixes.md.
SPLIT_TILES, SPLIT_TILES_IN_8_BITS = 1, 3
MOST_ARRIVALS = (1 << 21) - 1  # programs of a launch that counts those that have come


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def split_tiles(codec: Codec) -> int:
    """Counts the tiles that a split costs beside its own."""
    return SPLIT_TILES if codec == AS_IS else SPLIT_TILES_IN_8_BITS


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def box_rows(problem: Problem, tile_n: int) -> int:
    """Keys that arrive in one copy by TMA: a tile, or what of it lies in one page."""
    if isinstance(problem.place, Paged):
        page_size = problem.place.page_size
        return min(tile_n, page_size & -page_size)
    return tile_n


def visited(problem: Problem, tile_n: int) -> int:
    """Tiles of a sequence as long as it may be: tile/band.py on the host."""
    tiles = end = 0
    for lo, hi in problem.span:
        first, end = max(lo // tile_n, end), -(-hi // tile_n)
        tiles += end - first
    return tiles
