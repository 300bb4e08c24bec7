"""What `hopper_decode_split` does with its packed rows: their place, softmax and result.

Rows are [TILE_M], one a (query token, head of the group).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.combine import FINISHED, write_absent
from splitkv.kernels.hopper.pairs import SHIFT, parts_of_scale
from splitkv.kernels.hopper.ring import Tiles
from splitkv.kernels.tile.share import Share, batch_share, part_of_batch, parts_of
from splitkv.kernels.tile.softmax import finish, finite_or_zero


@gluon.jit
def place_in_batch(
    programs, bounds, lens_ptr, batch, seqlen_q, t_first, t_last, part, BATCH_P2, TILE_N
):
    """(sequence, which of its parts, how many) by the batch rule; see tile/share.py."""
    # every warp has all of up to 256 sequences: then no sum waits for other warps
    a_thread: gl.constexpr = max(1, min(BATCH_P2 // 32, 8), BATCH_P2 // (32 * gl.num_warps()))
    warps: gl.constexpr = gl.BlockedLayout([a_thread], [32], [gl.num_warps()], [0])
    offs_b = gl.arange(0, BATCH_P2, layout=warps)
    rule = Share(None, None, programs), bounds
    parts_b = batch_share(*rule, lens_ptr, batch, seqlen_q, t_first, t_last, offs_b, TILE_N)
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
def weights(s, m, sums, v_scale, WIDEN: gl.constexpr):
    """(p, shrink, m, sums) after scores s [TILE_M, TILE_N] in base 2: what of the softmax before is
    left is times `shrink`.

    v_scale  of each key, which p is to be times, or None: its exponent joins s, and is taken out of
             the sums again
    """
    if v_scale is not None:
        e, f, inverse = parts_of_scale(v_scale)
        s += e
    m_new = gl.maximum(m, gl.max(s, 1))
    top = finite_or_zero(m_new)
    shrink = gl.exp2(m - top)[:, None]
    if WIDEN is not None:
        top -= SHIFT
    p = gl.exp2(s - top[:, None])
    if v_scale is None:
        sums = sums * shrink + p
    else:
        sums = sums * shrink + p * inverse
        p *= f
    return p, shrink, m_new, sums


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
    offs_v = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))[None, :]
    if num_parts == 1:
        sink_log2 = None
        if row.sink_ptr is not None:
            sink = gl.load(row.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
            sink_log2 = sink * 1.4426950408889634
        out, lse = finish(acc, m, l, sink_log2)
        out_ptrs = final.out_ptr + out_rows[:, None] + offs_v
        gl.store(out_ptrs, out.to(final.out_ptr.dtype.element_ty), mask=ok[:, None])
        if final.lse_ptr is not None:
            gl.store(final.lse_ptr + lse_rows, lse, mask=ok)
        if partial is not None:
            write_absent(partial.m_ptr, partial.l_ptr, slot_rows, ok, FINISHED)
    elif partial is not None:
        acc_ptrs = partial.acc_ptr + slot_rows[:, None] * acc.shape[1] + offs_v
        gl.store(acc_ptrs, acc, mask=ok[:, None])
        gl.store(partial.m_ptr + slot_rows, m, mask=ok)
        gl.store(partial.l_ptr + slot_rows, l, mask=ok)
