"""The tiles of `hopper_prefill`, and which of them are the first guess for a problem."""

from __future__ import annotations

from splitkv.core.device import Device
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.kernels.host.partition import padded

ROWS = 64  # of a warpgroup
COLUMNS = 8  # of 16 bits: TMA wants multiples of them in every stride
CODECS_8BIT = ("int8", "fp8")  # that the kernels for whole sequences of 8 bits have code for

# By columns of q and K: tile_m, tile_n, num_stages, the best guess first; see `ordered`. More rows
# or keys do not fit into the registers of a warpgroup, more stages not into shared memory. What
# keeps as many keys in flight as fit is for few rows, which wait for memory.
SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: (
        *((192, 128, 4), (128, 128, 4), (128, 128, 2), (192, 128, 2), (128, 64, 6)),
        *((128, 64, 4), (128, 128, 6), (64, 128, 6)),
    ),
    128: (
        *((192, 64, 4), (128, 128, 2), (128, 64, 4), (128, 64, 3), (192, 64, 3)),
        *((128, 128, 3), (128, 64, 6), (64, 128, 3), (64, 64, 6)),
    ),
    192: ((128, 128, 2), (128, 64, 3), (128, 64, 2), (128, 64, 4), (64, 64, 5)),
    256: ((128, 64, 2), (64, 64, 3)),
}
# Figures of what follows: measurements/thresholds.md#tiles-of-hopper_prefill.
NARROW = 512  # keys of a window for which tiles of 128 rows and 64 keys are the fastest
# Three warpgroups are faster than two with tiles of 128 keys by as much as rows that no sequence
# has may cost (a factor), where a program has several row tiles.
MOST_PADDING = 1.02
LEAST_ROUNDS = 3
# Packed rows of the longest sequence, the only one that is known: of a quarter of it, half a row
# tile more or less is still within that padding.
LEAST_PACKED_ROWS = 6400


def tile_dims(problem: Problem) -> tuple[int, int]:
    """Columns of the tiles of q and K, and of those of V: a tensor may have fewer, and TMA fills
    the others with zeros."""
    dims = problem.head_dim, problem.head_dim_v
    return dims if dims == (192, 128) else (padded(dims[0]), padded(dims[1]))


def ordered(problem: Problem, device: Device) -> list[tuple[int, int, int]]:
    """The shapes of a head_dim, the best guess first."""
    head_dim = tile_dims(problem)[0]
    found = list(SHAPES[head_dim])
    pack = min(problem.group & -problem.group, ROWS)
    rows, lanes = problem.seqlen_q * pack, problem.batch * problem.num_heads // pack
    left, right = problem.mask.left, problem.mask.right
    if left is not None and right is not None and left + right < NARROW:
        found.sort(key=lambda shape: shape[:2] != (128, 64))
    elif head_dim == 128:
        if problem.kind == "dense":
            tiles = {tile_m: ceil_div(rows, tile_m) for tile_m in (128, 192)}
            wide = 192 * tiles[192] <= MOST_PADDING * 128 * tiles[128]
            wide &= tiles[192] * lanes >= LEAST_ROUNDS * device.num_sms
        else:
            wide = rows >= LEAST_PACKED_ROWS
        if not wide:
            found.sort(key=lambda shape: shape[0] == 192)
    return found
