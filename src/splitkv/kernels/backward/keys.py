"""dk and dv for any GPU: a program owns a tile of keys and visits the rows that see it.

Computes    dv = p^T dout and dk = ds^T q times the scale, as kernels/backward defines them
Shapes      as in kernels/backward
Grid        row splits x KV heads x sequences x tiles that come first, then tiles of keys x lanes
Traffic     reads k and v once, q, dout and 8 bytes of statistics of the rows that see each tile;
            writes dk and dv, or of tiles whose rows are split their sums in fp32
Numerics    as in kernels/backward
Limits      as in kernels/backward
"""

from __future__ import annotations

import triton
import triton.language as tl

from splitkv.kernels.backward.records import SIZES
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.gradient import KeyGradients, OwnKeys, SequenceRows, sum_over_rows
from splitkv.kernels.tile.product import empty_sum
from splitkv.kernels.tile.visit import (
    Strides,
    TiledTokens,
    load_tile,
    own_tile,
    part_of,
    place,
    row_tiles_seen,
    split_tile,
    store_tile,
    tile_and_lane,
    whole_tile,
)


@triton.jit(do_not_specialize=SIZES)
def backward_keys(
    ptrs,  # GradientTensors
    strides,  # GradientTensors
    split_ptr,  # [batch, num_kv_heads, split_tiles, row_splits, TILE_N, head_dim + head_dim_v]
    # fp32, or None: rows are not split
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
    total_k,
    stride_slope,
    tiles,  # tiles of keys of a lane
    lanes,
    width,  # lanes that go together
    split_tiles,  # tiles that come first
    row_splits,  # of the rows that see each of them
    CONFIG: tl.constexpr,  # BackwardConfig
):
    GROUP: tl.constexpr = CONFIG.group
    TILE_M: tl.constexpr = CONFIG.tile_m
    TILE_N: tl.constexpr = CONFIG.tile_n
    bounds = Bounds(left, right, sink_tokens, chunk)
    stat_strides = Strides(stride_stat_b, 0, stride_stat_h)
    pid = tl.program_id(0)

    # whose keys, and which  [TILE_N]
    before = batch * num_kv_heads * split_tiles * row_splits
    in_split = pid < before
    if in_split:
        own = split_tile(
            pid, row_splits, cu_k_ptr, cu_q_ptr, seqlen_k, seqlen_q, batch, num_kv_heads
        )
    else:
        tile, lane = tile_and_lane(pid - before, tiles, lanes, width)
        found = own_tile(
            tile,
            lane,
            TiledTokens(cu_k_ptr, cu_q_ptr, seqlen_k, seqlen_q, batch, total_k),
            num_kv_heads,
            1,
            TILE_N,
        )
        own = whole_tile(found, split_tiles, batch)
    b = own.sequence
    h = own.kv_head
    first_k = own.first_key
    first_q = own.first_row
    len_q = own.num_rows
    num_keys = own.num_keys
    if own.tile * TILE_N >= num_keys:
        return
    offs_n = own.tile * TILE_N + tl.arange(0, TILE_N)
    n_ok = offs_n < num_keys
    k = load_tile(
        place(ptrs.k, strides.k, b, first_k + offs_n, h), n_ok, CONFIG.head_dim, CONFIG.dim
    )
    v = load_tile(
        place(ptrs.v, strides.v, b, first_k + offs_n, h), n_ok, CONFIG.head_dim_v, CONFIG.dim_v
    )

    # the rows that see them
    head = h * GROUP
    slope_at = None
    if slope_ptr is not None:
        slope_at = slope_ptr + b * stride_slope + head
    q_head = place(ptrs.q, strides.q, b, first_q, head)
    grad_head = place(ptrs.grad, strides.grad, b, first_q, head)
    totals = place(stats.total + first_q * GROUP, stat_strides, b, first_q, h)
    deltas = place(stats.delta + first_q * GROUP, stat_strides, b, first_q, h)
    shift = num_keys - len_q
    rows = SequenceRows(
        q_ptr=q_head,
        q_strides=strides.q,
        grad_ptr=grad_head,
        grad_strides=strides.grad,
        total_ptr=totals,
        delta_ptr=deltas,
        slope_ptr=slope_at,
        shift=shift,
        count=len_q,
        sequence_head=b * num_kv_heads * GROUP + head,
    )
    last = tl.minimum(own.tile * TILE_N + TILE_N, num_keys) - 1
    visit = row_tiles_seen(bounds, own.tile * TILE_N, last, shift, len_q, GROUP, TILE_M)
    if split_ptr is not None:
        of = tl.where(in_split, row_splits, 1)
        visit = part_of(visit, pid % of, of)
    sums = KeyGradients(empty_sum(k, TILE_N, CONFIG.dim), empty_sum(v, TILE_N, CONFIG.dim_v))
    tile_of_keys = OwnKeys(k, v, offs_n, num_keys)
    sums = sum_over_rows(sums, tile_of_keys, rows, scoring, visit, bounds, CONFIG, "edges")
    sums = sum_over_rows(sums, tile_of_keys, rows, scoring, visit, bounds, CONFIG, "middle")

    dk = sums.dk[0] * softmax_scale
    dv = sums.dv[0]
    if scoring.seed_ptr is not None:
        dv *= scoring.keep_scale
    if split_ptr is not None:
        tile_of_head = (b * num_kv_heads + h) * split_tiles + own.tile
        number = tile_of_head * row_splits + pid % row_splits
        row = number.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
        split_rows = split_ptr + row * (CONFIG.head_dim + CONFIG.head_dim_v)
        split_ok = n_ok & in_split
        store_tile(split_rows, dk, split_ok, CONFIG.head_dim)
        store_tile(split_rows + CONFIG.head_dim, dv, split_ok, CONFIG.head_dim_v)
        n_ok = n_ok & (pid >= before)
    dk_rows = place(ptrs.dk, strides.dk, b, first_k + offs_n, h)
    dv_rows = place(ptrs.dv, strides.dv, b, first_k + offs_n, h)
    store_tile(dk_rows, dk, n_ok, CONFIG.head_dim)
    store_tile(dv_rows, dv, n_ok, CONFIG.head_dim_v)
