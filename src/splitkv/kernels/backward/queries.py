"""dq for any GPU, and what sink logits and ALiBi slopes get from each row: a program owns a tile of
rows and visits the keys that they see.

Computes    dq = ds k times the scale, and sums of p dp and ds for sinks and slopes, as
            kernels/backward defines them
Shapes      as in kernels/backward
Grid        row tiles x lanes, the last and so heaviest first
Traffic     reads q, dout and statistics once, k and v of the keys that each tile sees; writes dq
            and, where wanted, a number a row for sink logits and one for slopes
Numerics    as in kernels/backward
Limits      as in kernels/backward
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitkv.kernels.backward.records import SIZES
from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.gradient import OwnRows, sum_over_keys, zero_sums
from splitkv.kernels.tile.product import empty_sum
from splitkv.kernels.tile.visit import (
    Keys,
    Strides,
    TiledTokens,
    load_tile,
    own_tile,
    place,
    rows_of,
    store_tile,
    tile_and_lane,
    tiles_seen,
)
from splitkv.kernels.tile.weight import Queries


@triton.jit(do_not_specialize=SIZES)
def backward_queries(
    ptrs,  # GradientTensors
    strides,  # GradientTensors
    stats,  # Stats
    stride_stat_b,  # a token has an element for each head of its group
    stride_stat_h,
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    slope_ptr,  # [(batch,) num_heads], or None
    scoring,  # Scoring
    softmax_scale,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    total_q,
    stride_slope,
    tiles,  # row tiles of a lane
    lanes,
    width,  # lanes that go together
    CONFIG: tl.constexpr,  # BackwardConfig
):
    GROUP: tl.constexpr = CONFIG.group
    TILE_M: tl.constexpr = CONFIG.tile_m
    TILE_N: tl.constexpr = CONFIG.tile_n
    bounds = Bounds(left, right, sink_tokens, chunk)
    stat_strides = Strides(stride_stat_b, 0, stride_stat_h)

    # whose rows, and which  [TILE_M]
    tile, lane = tile_and_lane(tl.program_id(0), tiles, lanes, width)
    own = own_tile(
        tiles - 1 - tile,
        lane,
        TiledTokens(cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, batch, total_q),
        num_kv_heads,
        GROUP,
        TILE_M,
    )
    b = own.sequence
    h = own.head
    first_q = own.first
    len_q = own.length
    first_k = own.other_first
    len_k = own.other_length
    if own.tile * TILE_M >= len_q * GROUP:
        return
    rows = rows_of(own.tile, h, len_q, GROUP, TILE_M)
    offs_m = rows.row
    t = rows.token
    head = rows.head
    ok = rows.ok
    q = load_tile(place(ptrs.q, strides.q, b, first_q + t, head), ok, CONFIG.head_dim, CONFIG.dim)
    grad = load_tile(
        place(ptrs.grad, strides.grad, b, first_q + t, head), ok, CONFIG.head_dim_v, CONFIG.dim_v
    )
    total_rows = place(stats.total + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
    total = tl.load(total_rows, mask=ok, other=float("inf"))
    delta_rows = place(stats.delta + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
    delta = tl.load(delta_rows, mask=ok, other=0.0)

    # the keys that they see
    shift = len_k - len_q
    slope = None
    if slope_ptr is not None:
        slope_ok = ok & (b < batch)  # what lies after the last sequence has none
        slope = tl.load(slope_ptr + b * stride_slope + head, mask=slope_ok, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    sequence_head = (b * num_kv_heads * GROUP + head)[:, None]
    queries = Queries(t[:, None], (t + shift)[:, None], slope, sequence_head)
    k_head = place(ptrs.k, strides.k, b, first_k, h)
    v_head = place(ptrs.v, strides.v, b, first_k, h)
    keys = Keys(k_head, v_head, strides.k.t, strides.v.t, len_k)
    t_first, t_last = token_range(own.tile, len_q, GROUP, TILE_M)
    visit = tiles_seen(bounds, shift + t_first, shift + t_last, len_k, TILE_N)
    dq = empty_sum(q, TILE_M, CONFIG.dim)
    sums = zero_sums(TILE_M)
    own_rows = OwnRows(q, grad, total, delta, stats)
    dq, sums = sum_over_keys(
        dq, sums, own_rows, keys, queries, scoring, visit, bounds, CONFIG, "edges"
    )
    dq, sums = sum_over_keys(
        dq, sums, own_rows, keys, queries, scoring, visit, bounds, CONFIG, "middle"
    )
    dq_rows = place(ptrs.dq, strides.dq, b, first_q + t, head)
    store_tile(dq_rows, dq[0] * softmax_scale, ok, CONFIG.head_dim)

    # not dout . out, which has the rounding of out, nor ds, in which dlse may be far larger
    if stats.sink is not None:
        dp_sum = sums.p_dp
        if scoring.seed_ptr is not None:
            dp_sum *= scoring.keep_scale
        sink_rows = place(stats.sink + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
        tl.store(sink_rows, -tl.load(sink_rows, mask=ok, other=0.0) * dp_sum, mask=ok)
    # ds have the rounding of out from delta, and say by their sum what it was
    if stats.slope is not None:
        slope_rows = place(stats.slope + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
        error = tl.load(slope_rows, mask=ok, other=0.0) - sums.ds
        tl.store(slope_rows, -(sums.ds_far + error * sums.p_far), mask=ok)
