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


class SequenceRows(NamedTuple):
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


class GradientSums(NamedTuple):
    """Sums over the keys that a row sees [TILE_M]: of p dp without the scale of what dropout keeps,
    of ds, of ds times the distance of the key, of p times it."""

    p_dp: Any
    ds: Any
    ds_far: Any
    p_far: Any


@triton.jit
def zero_sums(TILE_M: tl.constexpr):
    """Makes the GradientSums before the first tile of keys."""
    zero = tl.zeros([TILE_M], tl.float32)
    return GradientSums(zero, zero, zero, zero)


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


class OwnKeys(NamedTuple):
    """The tile of keys of a program: k [TILE_N, DIM], v [TILE_N, DIM_V], their numbers offs_n
    [TILE_N], and how many keys the sequence has."""

    k: Any
    v: Any
    offs_n: Any
    count: Any


class OwnRows(NamedTuple):
    """The tile of rows of a program: q [TILE_M, DIM], the gradient of the output [TILE_M, DIM_V],
    total and delta [TILE_M]; and the Stats, whose pointers say which GradientSums are wanted."""

    q: Any
    grad: Any
    total: Any
    delta: Any
    stats: Any


class KeyGradients(NamedTuple):
    """Sums [TILE_N, DIM] and [TILE_N, DIM_V], each beside what it lost."""

    dk: Any
    dv: Any


@triton.jit
def sum_over_rows(
    sums,  # KeyGradients
    own,  # OwnKeys
    rows,  # SequenceRows
    scoring,  # Scoring
    visit,  # Visit
    bounds,  # Bounds
    CONFIG: tl.constexpr,  # BackwardConfig
    REGION: tl.constexpr,
):
    """Computes the KeyGradients after the row tiles of a region: see `visits`."""
    GROUP: tl.constexpr = CONFIG.group
    TILE_M: tl.constexpr = CONFIG.tile_m
    STAGES: tl.constexpr = CONFIG.num_stages
    OFFSET: tl.constexpr = CONFIG.offset_type
    dk, dv = sums.dk, sums.dv
    k, v, offs_n = own.k, own.v, own.offs_n
    first, last = visits(visit, REGION)
    for i in tl.range(first, last, num_stages=STAGES):
        tile = tile_at(visit, i, REGION)
        offs_m = tile * TILE_M + tl.arange(0, TILE_M)
        ok = None
        if REGION == "edges":
            ok = offs_m < rows.count * GROUP
        q_rows = tile_rows(rows.q_ptr, rows.q_strides, tile, OFFSET, GROUP, TILE_M)
        q = load_tile(q_rows, ok, CONFIG.head_dim, k.shape[1])  # [TILE_M, DIM]
        grad_rows = tile_rows(rows.grad_ptr, rows.grad_strides, tile, OFFSET, GROUP, TILE_M)
        grad = load_tile(grad_rows, ok, CONFIG.head_dim_v, v.shape[1])  # [TILE_M, DIM_V]
        if REGION == "edges":
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
            qk,
            dp,
            total[None, :],
            rest,
            offs_n[:, None],
            own.count,
            queries,
            scoring,
            bounds,
            REGION,
        )
        dv = add_product_compensated(dv[0], dv[1], at.p_kept.to(grad.dtype), grad)
        dk = add_product_compensated(dk[0], dk[1], at.dx.to(q.dtype), q)
    return KeyGradients(dk, dv)


@triton.jit
def sum_over_keys(
    dq,  # (sum [TILE_M, DIM], what it lost)
    sums,  # GradientSums
    own,  # OwnRows
    keys,  # Keys
    queries,  # Queries
    scoring,  # Scoring
    visit,  # Visit
    bounds,  # Bounds
    CONFIG: tl.constexpr,  # BackwardConfig
    REGION: tl.constexpr,
):
    """Computes (dq, GradientSums) after the tiles of keys of a region: see `visits`."""
    TILE_N: tl.constexpr = CONFIG.tile_n
    STAGES: tl.constexpr = CONFIG.num_stages
    OFFSET: tl.constexpr = CONFIG.offset_type
    q, grad = own.q, own.grad
    dp_sum = sums.p_dp
    ds_sum = sums.ds
    ds_far = sums.ds_far
    p_far = sums.p_far
    offs = tl.arange(0, TILE_N).to(OFFSET)
    first, last = visits(visit, REGION)
    for i in tl.range(first, last, num_stages=STAGES):
        start = tile_at(visit, i, REGION) * TILE_N
        offs_n = start + tl.arange(0, TILE_N)
        n_ok = None
        if REGION == "edges":
            n_ok = offs_n < keys.count
        k_tile = keys.k_ptr + start.to(tl.int64) * keys.stride_k
        k = load_tile(k_tile + offs * keys.stride_k, n_ok, CONFIG.head_dim, q.shape[1])
        v_tile = keys.v_ptr + start.to(tl.int64) * keys.stride_v
        v = load_tile(v_tile + offs * keys.stride_v, n_ok, CONFIG.head_dim_v, grad.shape[1])
        qk = row_product(q, k)  # [TILE_M, TILE_N]
        dp = row_product(grad, v)
        at = gradients(
            qk,
            dp,
            own.total[:, None],
            own.delta[:, None],
            offs_n[None, :],
            keys.count,
            queries,
            scoring,
            bounds,
            REGION,
        )
        if own.stats.sink is not None:
            dp_sum += tl.sum(at.p_kept * dp, 1)
        if own.stats.slope is not None:
            ds_sum += tl.sum(at.ds, 1)
            distance = tl.abs(queries.pos - offs_n[None, :]).to(tl.float32)
            ds_far += tl.sum(at.ds * distance, 1)
            p_far += tl.sum(at.p * distance, 1)
        dq = add_product_compensated(dq[0], dq[1], at.dx.to(k.dtype), k)
    return dq, GradientSums(dp_sum, ds_sum, ds_far, p_far)
