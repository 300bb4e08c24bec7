"""What `hopper_decode_split` does with its packed rows: their place, softmax and result.

Rows are [TILE_M], one a (query token, head of the group).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.combine import write_part
from splitkv.kernels.hopper.pairs import SHIFT
from splitkv.kernels.tile.band import visited_tiles
from splitkv.kernels.tile.new import Tiles, keys_of
from splitkv.kernels.tile.share import Share, batch_share, part_of_batch, parts_of

# Weights of a row are relative to a maximum that is let be as long as no score is more than 3 above
# it, in base 2: until then nothing that was summed up has to shrink. Beside widened values they are
# relative to what is 12 below, see `pairs.SHIFT`. (how far scores may be above that, its bits,
# those of such a weight)
MOST = (3.0, 0x40400000)
MOST_WIDENED = (15.0, 0x41700000, 0x47000000)
LOWEST = gl.constexpr(-(2.0**100))  # where a row has seen no key


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
def tiles_within(of_part, keys, TILE_N: gl.constexpr):
    """`tiles_of_part` of a program, see `own_tiles`, whose sequence has so many keys."""
    _, _, seqlen_q, _, part, parts, size, bounds, t_first, t_last = of_part
    first_pos = keys - seqlen_q
    seen = visited_tiles(bounds, first_pos + t_first, first_pos + t_last, keys, TILE_N)
    return tiles_of_part(part, parts, size, *seen)


@gluon.jit
def own_tiles(of_part, TILE_N: gl.constexpr):
    """(keys of the sequence, Tiles, number of parts) of a program, for a role of its own.

    of_part   lens_ptr, seqlen_k, seqlen_q, b, part, parts, size, Bounds, first and last token
    """
    lens_ptr, keys, _, b, _, _, _, _, _, _ = of_part
    if lens_ptr is not None:
        keys = gl.load(lens_ptr + b)
    tiles, num_parts = tiles_within(of_part, keys, TILE_N)
    return keys, tiles, num_parts


@gluon.jit
def slopes_of(row, at, row_ok):
    """The ALiBi slope of each row as a column, or None."""
    slope = None
    if row.slope_ptr is not None:
        slope = gl.load(row.slope_ptr + at, mask=row_ok, other=0.0).to(gl.float32)[:, None]
    return slope


@gluon.constexpr_function
def most_above(widen):
    return MOST if widen is None else MOST_WIDENED


@gluon.jit
def raised_maxima(m, s, WIDEN: gl.constexpr):
    """What weights [TILE_M] are relative to with scores s [TILE_M, TILE_N] in base 2: the same but
    for rows that have a score too far above it, whatever other rows have."""
    LIMIT: gl.constexpr = most_above(WIDEN)
    top = gl.max(s, 1)
    raised = top if WIDEN is None else top - SHIFT
    return gl.where(top - m > LIMIT[0], raised, m)


@gluon.jit
def true_or_none(m):
    """What rows are relative to in the end: -inf where they have seen no key."""
    return gl.where(m == LOWEST, float("-inf"), m)


@gluon.jit
def as_rows(x, LAYOUT: gl.constexpr):
    """The same rows, of which a thread has the same."""
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


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
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    m, l = as_rows(m, ROWS), as_rows(l, ROWS)
    ok, slot_rows = as_rows(ok, ROWS), as_rows(slot_rows, ROWS)
    t, head = as_rows(t, ROWS), as_rows(head, ROWS)
    out_rows = b.to(gl.int64) * stride_ob + t.to(gl.int64) * stride_ot + head * stride_oh
    lse_rows = (b * num_kv_heads * GROUP + head).to(gl.int64) * seqlen_q + t
    offs_v = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    where = head, ok, out_rows, lse_rows, slot_rows, offs_v, num_parts
    write_part(final, partial, row.sink_ptr, acc, m, l, *where, acc.shape[1])
