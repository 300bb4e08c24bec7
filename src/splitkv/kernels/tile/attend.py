"""The steps of a row tile over keys and values, and what it leaves in the end."""

from __future__ import annotations

import triton
import triton.language as tl

from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.dequantize import add_values, query_product, scales_at
from splitkv.kernels.tile.dropout import kept
from splitkv.kernels.tile.locate import key_rows, pages_of
from splitkv.kernels.tile.softmax import finish, finite_or_zero
from splitkv.kernels.tile.visit import (
    load_tile,
    place,
    store_tile,
    tile_at,
    visits,
)
from splitkv.kernels.tile.weight import scores_of_rows


@triton.jit
def attend(
    m,  # [TILE_M] in base 2
    l,  # [TILE_M]
    acc,  # [TILE_M, DIM_V]
    q,  # [TILE_M, DIM]
    keys,  # Keys
    queries,  # Queries
    scoring,  # Scoring
    visit,  # Visit
    bounds,  # Bounds
    pages,  # Pages
    scales,  # Scales
    out_ptr,  # of the working type
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(m, l, acc) after the tiles in which the mask has to be asked, or after the others."""
    WORKING: tl.constexpr = out_ptr.dtype.element_ty
    first, last = visits(visit, MASKED)
    page = None
    if pages.table_ptr is not None:
        start = tile_at(visit, first, MASKED) * TILE_N
        page = pages_of(pages, start, keys.count, TILE_N, PAGE_SIZE)
    for i in tl.range(first, last, num_stages=STAGES):
        start = tile_at(visit, i, MASKED) * TILE_N
        offs_n = start + tl.arange(0, TILE_N)
        n_ok = None
        if MASKED:
            n_ok = offs_n < keys.count
        k_at = keys.k_ptr, keys.stride_k, pages.stride_k, start
        k_rows = key_rows(page, *k_at, OFFSET, TILE_N, PAGE_SIZE)
        k = load_tile(k_rows, n_ok, HEAD_DIM, q.shape[1])
        qk = query_product(q, k)  # [TILE_M, TILE_N]
        if scales.k_ptr is not None:
            at = scales.k_ptr, scales.k_strides, start
            qk *= scales_at(page, *at, n_ok, OFFSET, TILE_N, PAGE_SIZE)[None, :]
        s, unit, column = scores_of_rows(qk, scales.q, scoring, queries, offs_n[None, :])
        if MASKED:
            seen = visible(bounds, queries.pos, offs_n[None, :], keys.count)
            s = tl.where(seen, s, float("-inf"))
        m_here = tl.max(s, 1) * unit
        m_new = tl.maximum(m, m_here)
        top = m_new
        if MASKED:
            top = finite_or_zero(m_new)
        p = tl.exp2(s * column - top[:, None])
        shrink = tl.exp2(m - top)
        m = m_new
        l = l * shrink + tl.sum(p, 1)
        if scoring.seed_ptr is not None:
            at = offs_n[None, :], queries.t, queries.sequence_head
            p = tl.where(kept(scoring.seed_ptr, scoring.drop_below, *at), p, 0.0)
        v_at = keys.v_ptr, keys.stride_v, pages.stride_v, start
        v_rows = key_rows(page, *v_at, OFFSET, TILE_N, PAGE_SIZE)
        v = load_tile(v_rows, n_ok, HEAD_DIM_V, acc.shape[1])
        v_scale = None
        if scales.v_ptr is not None:
            at = scales.v_ptr, scales.v_strides, start
            v_scale = scales_at(page, *at, n_ok, OFFSET, TILE_N, PAGE_SIZE)
        acc = add_values(acc, shrink, p, tl.exp2(m_here - top), v, v_scale, WORKING, UNITS)
        if pages.table_ptr is not None:  # a step ahead, as keys wait for it
            start = tile_at(visit, i + 1, MASKED) * TILE_N
            page = pages_of(pages, start, keys.count, TILE_N, PAGE_SIZE)
    return m, l, acc


@triton.jit
def write_rows(
    acc,  # [TILE_M, DIM_V]
    m,  # [TILE_M]
    l,
    sink_ptr,
    final,  # Final
    out_strides,  # Strides
    lse_strides,
    b,
    token,  # [TILE_M]
    head,
    ok,
    HEAD_DIM_V: tl.constexpr,
):
    """Finish the softmax of rows whose keys have all been seen."""
    sink_log2 = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32)
        sink_log2 = sink * 1.4426950408889634
    out, lse = finish(acc, m, l, sink_log2)
    store_tile(place(final.out_ptr, out_strides, b, token, head), out, ok, HEAD_DIM_V)
    tl.store(place(final.lse_ptr, lse_strides, b, token, head), lse, mask=ok)
