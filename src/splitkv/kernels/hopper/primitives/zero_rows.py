"""Zeroes rows of a tile in shared memory that belong to another sequence or to none.

What lies there may be NaN or infinite, and a product takes a row's 0 times it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from splitkv.kernels.hopper.primitives.named_barriers import meet
from splitkv.kernels.hopper.primitives.tma_ring import thread_barrier

ALL_CLEARED = gl.constexpr(14)  # a barrier of the hardware: turns have 8 and on, Triton the first


@gluon.jit
def clear_behind(x, count, STRIP: gl.constexpr, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Zero the rows of a tile from `count` on, of which each of several warpgroups does its strips.

    Before products read the tile all of them call `all_cleared`, under the same condition.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, STRIP, layout=gl.SliceLayout(1, layout))
    for first in gl.static_range(W * STRIP, ROWS, WARPGROUPS * STRIP):
        if count < first + STRIP:
            strip = x.slice(first, STRIP)
            kept = strip.load(layout)
            strip.store(gl.where((rows + first < count)[:, None], kept, gl.zeros_like(kept)))


@gluon.jit
def all_cleared(WARPGROUPS: gl.constexpr):
    """Waits until all warpgroups that clear a tile have done so, and makes it visible to their
    products."""
    fence_async_shared()
    if WARPGROUPS == 1:
        thread_barrier()
    else:
        meet(ALL_CLEARED, 128 * WARPGROUPS)
