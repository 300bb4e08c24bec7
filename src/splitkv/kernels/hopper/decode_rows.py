"""What `hopper_decode_split` does with its packed rows: their place, softmax and result.

Rows are [TILE_M], one a (query token, head of the group).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.combine import write_part
from splitkv.kernels.hopper.pairs import SHIFT, parts_of_scale
from splitkv.kernels.tile.new import Tiles, keys_of
from splitkv.kernels.tile.share import Share, batch_share, part_of_batch, parts_of
from splitkv.kernels.tile.softmax import finite_or_zero


@gluon.jit
def place_in_batch(
    programs,
    bounds,
    lens_ptr,
    growth,
    seqlen_new,
    capacity,
    batch,
    seqlen_q,
    t_first,
    t_last,
    part,
    BATCH_P2,
    TILE_N,
):
    """(sequence, which of its parts, how many) by the batch rule; see tile/share.py."""
    # every warp has all of up to 256 sequences: then no sum waits for other warps
    a_thread: gl.constexpr = max(1, min(BATCH_P2 // 32, 8), BATCH_P2 // (32 * gl.num_warps()))
    warps: gl.constexpr = gl.BlockedLayout([a_thread], [32], [gl.num_warps()], [0])
    offs_b = gl.arange(0, BATCH_P2, layout=warps)
    keys_b = keys_of(lens_ptr, growth, offs_b, offs_b < batch, seqlen_new, capacity)
    rule = Share(None, None, programs), bounds, keys_b
    parts_b = batch_share(*rule, batch, seqlen_q, t_first, t_last, offs_b, TILE_N)
    return part_of_batch(parts_b, offs_b, batch, part)


@gluon.jit
def tiles_of_part(part, parts, size, count, near, skip):
    """(Tiles, number of parts) of a part of `count` tiles: in turns with the others, or a range of
    `size`."""
    if size is None:
        tiles = Tiles(part, count, parts, near, skip)
        num_parts = gl.maximum(gl.minimum(count, parts), 1)
    else:
        tiles = Tiles(part * size, gl.minimum(part * size + size, count), 1, near, skip)
        num_parts = parts_of(count, size)
    return tiles, num_parts


@gluon.jit
def slopes_of(row, at, row_ok):
    """The ALiBi slope of each row as a column, or None."""
    slope = None
    if row.slope_ptr is not None:
        slope = gl.load(row.slope_ptr + at, mask=row_ok, other=0.0).to(gl.float32)[:, None]
    return slope


@gluon.jit
def weights(s, m, v_scale, WIDEN: gl.constexpr):
    """(p, what of it sums are of, shrink [TILE_M], m) after scores s [TILE_M, TILE_N] in base 2:
    what of the softmax before is left is times `shrink`.

    v_scale  of each key, which p is to be times, or None: its exponent joins s, and is taken out of
             the sums again
    """
    if v_scale is not None:
        e, f, inverse = parts_of_scale(v_scale)
        s += e
    m_new = gl.maximum(m, gl.max(s, 1))
    top = finite_or_zero(m_new)
    shrink = gl.exp2(m - top)
    if WIDEN is not None:
        top -= SHIFT
    p = gl.exp2(s - top[:, None])
    own = p
    if v_scale is not None:
        own = p * inverse
        p *= f
    return p, own, shrink, m_new


@gluon.jit
def write_rows(
    final,
    partial,
    row,
    acc,
    m,
    l,
    ok,
    b,
    t,
    head,
    seqlen_q,
    num_kv_heads,
    stride_ob,
    stride_ot,
    stride_oh,
    slot_rows,
    num_parts,
    GROUP: gl.constexpr,
):
    """The result of rows whose keys this program has all seen, else the partial."""
    out_rows = b.to(gl.int64) * stride_ob + t.to(gl.int64) * stride_ot + head * stride_oh
    lse_rows = (b * num_kv_heads * GROUP + head).to(gl.int64) * seqlen_q + t
    offs_v = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    where = head, ok, out_rows, lse_rows, slot_rows, offs_v, num_parts
    write_part(final, partial, row.sink_ptr, acc, m, l, *where, acc.shape[1])
