"""The rows of q of `hopper_decode_split`, as the products with keys take them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode_new import turned_rows
from splitkv.kernels.hopper.decode_wide import wide_rows
from splitkv.kernels.hopper.pairs import load_rows, of_all_rows
from splitkv.kernels.tile.codec import row_scale, scale_of_head


@gluon.jit
def rows_to_multiply(
    q_ptr,  # of the sequence
    h,
    tile_m,
    seqlen_q,
    stride_t,
    stride_h,
    turning,  # Turning, or None
    S: gl.constexpr,  # the layout of scores
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    TILE_M: gl.constexpr,
    OF_K: gl.constexpr,
    ROTARY_DIM: gl.constexpr,
    PAIR: gl.constexpr,
    WIDEN: gl.constexpr,
    ROUNDED: gl.constexpr,
    HALF: gl.constexpr,
):
    """((q, q_odd), unit [TILE_M]) of the rows of a KV head: see `load_rows`, and of wide tiles
    `wide_rows`, where q_odd means nothing."""
    M: gl.constexpr = gl.SliceLayout(1, S)
    A: gl.constexpr = gl.DotOperandLayout(0, S, 4 if ROUNDED else 2)
    of_rows = q_ptr, h, tile_m, seqlen_q, stride_t, stride_h
    if OF_K is not None:
        q, unit = wide_rows(*of_rows, turning, GROUP, DIM, TILE_M, M, OF_K, ROTARY_DIM, PAIR)
        q_odd = q
    elif ROTARY_DIM:
        q, q_odd, unit = turned_rows(
            *of_rows, turning, A, GROUP, DIM, TILE_M, ROTARY_DIM, PAIR, WIDEN, ROUNDED
        )
    else:
        q, q_odd, unit = load_rows(*of_rows, A, GROUP, DIM, TILE_M, WIDEN, ROUNDED, HALF)
    return (q, q_odd), of_all_rows(unit, TILE_M, M)


@gluon.jit
def places_of_rows(h, tile_m, seqlen_q, M: gl.constexpr, GROUP: gl.constexpr, TILE_M: gl.constexpr):
    """(whether it is one, query token, head) of each row of a tile."""
    rows = tile_m * TILE_M + gl.arange(0, TILE_M, layout=M)
    return rows < seqlen_q * GROUP, rows // GROUP, h * GROUP + rows % GROUP


@gluon.jit
def scales_of_rows(scale, unit, scales, strides, places, b, h, WIDEN: gl.constexpr):
    """(what the rows' scores are multiplied by, what their results are).

    scales    Row, and Scales that the keys of a head share, or None
    strides   of slopes; of those of keys: b, h; of those of q: b, t, h
    places    of `places_of_rows`
    """
    row, head_scales = scales
    row_ok, t, head = places
    k_scale, v_scale = scale_of_head(head_scales, b, h, strides[1], strides[2])
    scale *= k_scale
    if WIDEN is not None:
        scale *= unit[:, None]
        scale *= row_scale(row, b, t, head, row_ok, strides[3], strides[4], strides[5])
    return scale, v_scale
