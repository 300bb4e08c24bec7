"""Which tile of tokens a program of the backward on Hopper has."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.tile.visit import OwnTile


@gluon.jit
def locate_tokens(
    tile,
    lane,
    cu_ptr,  # [batch + 1] of the tokens that are tiled, or None: dense
    other_cu_ptr,  # of the others
    length,  # tokens of a sequence where dense
    other_length,
    batch,
    total,  # tokens that are tiled, of all sequences
    num_heads,
    TILE: gl.constexpr,
):
    """Finds the OwnTile of a tile and a lane as `own_tile` does, with a row a token."""
    if cu_ptr is None:
        b = lane // num_heads
        head = lane % num_heads
        first = b * 0
        other_first = b * 0
    else:
        layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        head = lane
        b = lane * 0
        for past in range(1, batch + 1, 128):
            offs = past + gl.arange(0, 128, layout=layout)
            starts = gl.load(cu_ptr + offs, mask=offs <= batch, other=0)
            before = (starts // TILE + offs <= tile) & (offs <= batch)
            b += gl.sum(before.to(gl.int32), 0)
        known = b < batch
        first = gl.load(cu_ptr + b)
        length = gl.where(known, gl.load(cu_ptr + b + 1, mask=known, other=0), total) - first
        other_first = gl.load(other_cu_ptr + b)
        other_length = gl.load(other_cu_ptr + b + 1, mask=known, other=0) - other_first
        other_length = gl.where(known, other_length, 0)
        tile -= first // TILE + b
    return OwnTile(b, head, tile, first, length, other_first, other_length)
