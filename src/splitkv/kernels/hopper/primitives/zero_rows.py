"""Zeroes rows of a tile in shared memory that belong to another sequence or to none.

What lies there may be NaN or infinite, and a product takes a row's 0 times it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def clear_behind(x, count, STRIP: gl.constexpr, W: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Zeroes the rows of a tile from `count` on.

    STRIP        rows that are cleared at a time: fewer take fewer registers
    WARPGROUPS   that call this, under the same condition, and share out the strips; W: which of
                 them this is

    Before wgmma reads the tile, and before TMA writes it anew, all of them call `all_cleared` of
    named_barriers.py. Products whose operands go through registers need no fence: mma of decode.
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
