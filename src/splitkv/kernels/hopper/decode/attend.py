"""Attention of a tile of packed rows to a split, by the main loop that is passed."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.queries import locate_rows
from splitkv.kernels.hopper.decode.records import RowScoring, Softmax
from splitkv.kernels.tile.codec import row_scale, scale_of_head


@gluon.jit
def attend_tiles(mainloop, work, split, queries, terms, q, ring, kv, scales, CONFIG: gl.constexpr):
    """Runs a main loop over a split: a Softmax, times the scale that values share.

    mainloop   mma_loop or wgmma_loop
    work       Work; split: Split; queries: QueryRows, of which q, a QueryTile, has been loaded;
               terms: ScoreTerms; scales: KeyScales
    """
    rows = locate_rows(queries.kv_head, queries.row_tile, queries.seqlen_q, CONFIG)
    slope = load_slopes(terms, split, rows)
    scale, v_scale = load_scales_of_rows(terms, split, rows, q.unit, CONFIG)
    first_pos = split.num_keys - work.seqlen_q
    pos = (first_pos + rows.token)[:, None]
    first, last = first_pos + work.first_token, first_pos + work.last_token
    scoring = RowScoring(work.bounds, pos, first, last, scale, terms.softcap, slope)
    softmax = mainloop(q, ring, kv, split, scoring, scales, CONFIG)
    acc = softmax.acc
    if CONFIG.dequantize is not None:
        acc *= gl.where(split.num_keys > 0, v_scale, 1.0)  # that of no keys may be anything
    return Softmax(acc, softmax.m, softmax.l)


@gluon.jit
def load_slopes(terms, split, rows):
    """Loads the ALiBi slope of each row [TILE_M, 1]; None without any."""
    slope = None
    if terms.row.slope_ptr is not None:
        at = split.sequence * terms.slope_stride + rows.head
        slope = gl.load(terms.row.slope_ptr + at, mask=rows.ok, other=0.0)
        slope = slope.to(gl.float32)[:, None]
    return slope


@gluon.jit
def load_scales_of_rows(terms, split, rows, unit, CONFIG: gl.constexpr):
    """Loads two factors of rows: (of their scores, of their results).

    unit   [TILE_M] of the QueryTile
    """
    of_kv, of_q = terms.kv_strides, terms.q_strides
    b, h = split.sequence, split.kv_head
    k_scale, v_scale = scale_of_head(terms.head_scales, b, h, of_kv.b, of_kv.h)
    scale = terms.scale * k_scale
    if CONFIG.dequantize is not None:
        scale *= unit[:, None]
        scale *= row_scale(terms.row, b, rows.token, rows.head, rows.ok, of_q.b, of_q.t, of_q.h)
    return scale, v_scale
