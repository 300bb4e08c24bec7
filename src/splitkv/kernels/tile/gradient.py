"""The loops of the backward: over the rows that see a tile of keys, over the keys of some rows.

The maths and its letters are those of `backward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.product import add_product_compensated, row_product
from splitkv.kernels.tile.visit import load_tile, tile_at, visits
from splitkv.kernels.tile.weight import Queries, gradients


class Rows(NamedTuple):
    """Queries and gradients of the output of one sequence and KV head: first addresses, strides,
    statistics, slopes or None, key position of the first token, number of tokens, number of the
    sequence and first head."""

    q_ptr: Any
    q_strides: Any
    grad_ptr: Any
    grad_strides: Any
    total_ptr: Any
    delta_ptr: Any
    slope_ptr: Any
    shift: Any
    count: Any
    sequence_head: Any


class RowSums(NamedTuple):
    """Sums over the keys that a row sees [TILE_M]: of p dp without the scale of what dropout keeps,
    of ds, of ds times the distance of the key, of p times it."""

    p_dp: Any
    ds: Any
    ds_far: Any
    p_far: Any


@triton.jit
def zero_sums(TILE_M: tl.constexpr):
    """Makes the RowSums before the first tile of keys."""
    zero = tl.zeros([TILE_M], tl.float32)
    return RowSums(zero, zero, zero, zero)


@triton.jit
def tile_rows(ptr, strides, tile, OFFSET: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr):
    """The first address of each row of a row tile; ptr: that of the first token and head."""
    offs = tl.arange(0, TILE_M)
    if TILE_M % GROUP == 0:  # tiles of whole tokens: only the first address differs
        inside = (offs // GROUP).to(OFFSET) * strides.t + (offs % GROUP).to(OFFSET) * strides.h
        rows = ptr + tile.to(tl.int64) * (TILE_M // GROUP) * strides.t + inside
    else:
        offs += tile * TILE_M
        inside = (offs // GROUP).to(tl.int64) * strides.t + (offs % GROUP).to(tl.int64) * strides.h
        rows = ptr + inside
    return rows


@triton.jit
def sum_over_rows(
    dk,  # (sum [TILE_N, DIM], what it lost)
    dv,  # (sum [TILE_N, DIM_V], what it lost)
    k,  # [TILE_N, DIM]
    v,  # [TILE_N, DIM_V]
    offs_n,  # [TILE_N]
    keys,  # number of keys
    rows,  # Rows
    scoring,  # Scoring
    visit,  # Visit
    bounds,  # Bounds
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Computes (dk, dv) after the row tiles in which the mask has to be asked, or after the
    others."""
    first, last = visits(visit, MASKED)
    for i in tl.range(first, last, num_stages=STAGES):
        tile = tile_at(visit, i, MASKED)
        offs_m = tile * TILE_M + tl.arange(0, TILE_M)
        ok = None
        if MASKED:
            ok = offs_m < rows.count * GROUP
        q_rows = tile_rows(rows.q_ptr, rows.q_strides, tile, OFFSET, GROUP, TILE_M)
        q = load_tile(q_rows, ok, HEAD_DIM, k.shape[1])  # [TILE_M, DIM]
        grad_rows = tile_rows(rows.grad_ptr, rows.grad_strides, tile, OFFSET, GROUP, TILE_M)
        grad = load_tile(grad_rows, ok, HEAD_DIM_V, v.shape[1])  # [TILE_M, DIM_V]
        if MASKED:
            total = tl.load(rows.total_ptr + offs_m, mask=ok, other=float("inf"))
            delta = tl.load(rows.delta_ptr + offs_m, mask=ok, other=0.0)
        else:
            total = tl.load(rows.total_ptr + offs_m)
            delta = tl.load(rows.delta_ptr + offs_m)
        t = offs_m // GROUP
        slope = None
        if rows.slope_ptr is not None:
            slope = tl.load(rows.slope_ptr + offs_m % GROUP).to(tl.float32)[None, :]
        head = (rows.sequence_head + offs_m % GROUP)[None, :]
        queries = Queries(t[None, :], (t + rows.shift)[None, :], slope, head)
        # dp first, minus delta from its start where nothing comes between: fewer registers are live
        rest = delta[None, :]
        if scoring.seed_ptr is None and grad.dtype != tl.float32:
            start = tl.zeros([k.shape[0], TILE_M], tl.float32) - rest
            dp = tl.dot(v, tl.trans(grad), start)  # [TILE_N, TILE_M]
            rest = 0.0
        else:
            dp = row_product(v, grad)
        qk = row_product(k, q)
        at = gradients(
            qk, dp, total[None, :], rest, offs_n[:, None], keys, queries, scoring, bounds, MASKED
        )
        dv = add_product_compensated(dv[0], dv[1], at.p_kept.to(grad.dtype), grad)
        dk = add_product_compensated(dk[0], dk[1], at.dx.to(q.dtype), q)
    return dk, dv


@triton.jit
def sum_over_keys(
    dq,  # (sum [TILE_M, DIM], what it lost)
    sums,  # RowSums
    q,  # [TILE_M, DIM]
    grad,  # [TILE_M, DIM_V]
    total,  # [TILE_M]
    delta,  # [TILE_M]
    stats,  # Stats
    keys,  # Keys
    queries,  # Queries
    scoring,  # Scoring
    visit,  # Visit
    bounds,  # Bounds
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Computes (dq, RowSums) after the tiles in which the mask has to be asked, or after the
    others."""
    dp_sum = sums.p_dp
    ds_sum = sums.ds
    ds_far = sums.ds_far
    p_far = sums.p_far
    offs = tl.arange(0, TILE_N).to(OFFSET)
    first, last = visits(visit, MASKED)
    for i in tl.range(first, last, num_stages=STAGES):
        start = tile_at(visit, i, MASKED) * TILE_N
        offs_n = start + tl.arange(0, TILE_N)
        n_ok = None
        if MASKED:
            n_ok = offs_n < keys.count
        k_tile = keys.k_ptr + start.to(tl.int64) * keys.stride_k
        k = load_tile(k_tile + offs * keys.stride_k, n_ok, HEAD_DIM, q.shape[1])
        v_tile = keys.v_ptr + start.to(tl.int64) * keys.stride_v
        v = load_tile(v_tile + offs * keys.stride_v, n_ok, HEAD_DIM_V, grad.shape[1])
        qk = row_product(q, k)  # [TILE_M, TILE_N]
        dp = row_product(grad, v)
        at = gradients(
            qk,
            dp,
            total[:, None],
            delta[:, None],
            offs_n[None, :],
            keys.count,
            queries,
            scoring,
            bounds,
            MASKED,
        )
        if stats.sink is not None:
            dp_sum += tl.sum(at.p_kept * dp, 1)
        if stats.slope is not None:
            ds_sum += tl.sum(at.ds, 1)
            distance = tl.abs(queries.pos - offs_n[None, :]).to(tl.float32)
            ds_far += tl.sum(at.ds * distance, 1)
            p_far += tl.sum(at.p * distance, 1)
        dq = add_product_compensated(dq[0], dq[1], at.dx.to(k.dtype), k)
    return dq, RowSums(dp_sum, ds_sum, ds_far, p_far)
