"""The steps of a row tile over keys and values, and what it leaves in the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.compile_time import CompileTimeRecord
from splitkv.kernels.tile.band import in_reach, visible
from splitkv.kernels.tile.codec import working_type
from splitkv.kernels.tile.dequantize import add_values, query_product, scales_at
from splitkv.kernels.tile.dropout import kept
from splitkv.kernels.tile.encode import encode_out
from splitkv.kernels.tile.locate import key_rows, pages_of
from splitkv.kernels.tile.softmax import finish, finite_or_zero
from splitkv.kernels.tile.visit import load_tile, place, store_tile, tile_at, visits
from splitkv.kernels.tile.weight import scores_of_rows


class SequenceConfig(CompileTimeRecord):
    """The compile-time values of `prefill`.

    group                  query heads a KV head
    head_dim, head_dim_v   columns of q and K, and of V; dim, dim_v: of their tiles, powers of two
    page_size              keys a page; 1 where keys are not in pages
    tile_m                 packed rows a row tile; tile_n: keys a tile
    num_stages             tiles of keys and values in flight
    offset_type            of offsets inside a tile of keys
    units                  what is multiplied in 8 bits: see tile/dequantize.py
    merge_splits, merge_rows   splits and rows that a program merges at a time, where the launch
                           that makes partials merges them
    dependents             when `combine` is launched: launched_first, when this grid starts;
                           launched_after, when it is done
    """

    group: int
    head_dim: int
    head_dim_v: int
    dim: int
    dim_v: int
    page_size: int
    tile_m: int
    tile_n: int
    num_stages: int
    offset_type: Any
    units: str
    merge_splits: int
    merge_rows: int
    dependents: str


class RowTile(NamedTuple):
    """The inputs of the scores and sums of a row tile.

    q         [TILE_M, DIM]
    keys      Keys; pages: Pages of the sequence
    queries   Queries; scoring, bounds: Scoring and Bounds
    reach     Reach of the rows [TILE_M, 1], or None
    scales    RowTileScales
    q_ptr     by whose type that of the weights is known
    """

    q: Any
    keys: Any
    pages: Any
    queries: Any
    scoring: Any
    bounds: Any
    reach: Any
    scales: Any
    q_ptr: Any


class RowSums(NamedTuple):
    """The softmax of a row tile that is not finished: m [TILE_M] in base 2, l [TILE_M] and acc
    [TILE_M, DIM_V]."""

    m: Any
    l: Any
    acc: Any


@triton.jit
def attend(sums, row_tile, visit, CONFIG: tl.constexpr, REGION: tl.constexpr):
    """The RowSums after the tiles of a Visit that lie in a region: see `visits`.

    sums       RowSums before
    row_tile   RowTile
    """
    TILE_N: tl.constexpr = CONFIG.tile_n
    PAGE_SIZE: tl.constexpr = CONFIG.page_size
    OFFSET: tl.constexpr = CONFIG.offset_type
    UNITS: tl.constexpr = CONFIG.units
    STAGES: tl.constexpr = CONFIG.num_stages
    WORKING: tl.constexpr = working_type(row_tile.q_ptr.dtype.element_ty)
    q, keys, pages = row_tile.q, row_tile.keys, row_tile.pages
    queries, scoring, scales = row_tile.queries, row_tile.scoring, row_tile.scales
    m, l, acc = sums.m, sums.l, sums.acc
    first, last = visits(visit, REGION)
    page = None
    if pages.table_ptr is not None:
        start = tile_at(visit, first, REGION) * TILE_N
        page = pages_of(pages, start, keys.count, TILE_N, PAGE_SIZE)
    for i in tl.range(first, last, num_stages=STAGES):
        start = tile_at(visit, i, REGION) * TILE_N
        offs_n = start + tl.arange(0, TILE_N)
        n_ok = None
        if REGION == "edges":
            n_ok = offs_n < keys.count
        k_rows = key_rows(
            page, keys.k_ptr, keys.stride_k, pages.stride_k, start, OFFSET, TILE_N, PAGE_SIZE
        )
        k = load_tile(k_rows, n_ok, CONFIG.head_dim, q.shape[1])  # [TILE_N, DIM]
        qk = query_product(q, k)  # [TILE_M, TILE_N]
        if scales.k_ptr is not None:
            k_scale = scales_at(
                page, scales.k_ptr, scales.k_strides, start, n_ok, OFFSET, TILE_N, PAGE_SIZE
            )
            qk *= k_scale[None, :]
        s, unit, column = scores_of_rows(qk, scales.q, scoring, queries, offs_n[None, :])
        if REGION == "edges":
            seen = visible(row_tile.bounds, queries.pos, offs_n[None, :], keys.count)
            if row_tile.reach is not None:
                seen = seen | in_reach(row_tile.reach, offs_n[None, :])
            s = tl.where(seen, s, float("-inf"))
        m_here = tl.max(s, 1) * unit
        m_new = tl.maximum(m, m_here)
        top = m_new
        if REGION == "edges":
            top = finite_or_zero(m_new)
        p = tl.exp2(s * column - top[:, None])
        shrink = tl.exp2(m - top)
        m = m_new
        l = l * shrink + tl.sum(p, 1)
        if scoring.seed_ptr is not None:
            seed_ptr, below = scoring.seed_ptr, scoring.drop_below
            keep = kept(seed_ptr, below, offs_n[None, :], queries.t, queries.sequence_head)
            p = tl.where(keep, p, 0.0)
        v_rows = key_rows(
            page, keys.v_ptr, keys.stride_v, pages.stride_v, start, OFFSET, TILE_N, PAGE_SIZE
        )
        v = load_tile(v_rows, n_ok, CONFIG.head_dim_v, acc.shape[1])  # [TILE_N, DIM_V]
        v_scale = None
        if scales.v_ptr is not None:
            v_scale = scales_at(
                page, scales.v_ptr, scales.v_strides, start, n_ok, OFFSET, TILE_N, PAGE_SIZE
            )
        acc = add_values(acc, shrink, p, tl.exp2(m_here - top), v, v_scale, WORKING, UNITS)
        if pages.table_ptr is not None:  # a step ahead, as keys wait for it
            start = tile_at(visit, i + 1, REGION) * TILE_N
            page = pages_of(pages, start, keys.count, TILE_N, PAGE_SIZE)
    return RowSums(m, l, acc)


class RowPlaces(NamedTuple):
    """Where the rows of a row tile are: sequence, and of each row [TILE_M] its token in memory, its
    head, and whether it exists."""

    b: Any
    token: Any
    head: Any
    ok: Any


@triton.jit
def write_rows(
    sums,  # RowSums
    sink_ptr,  # [num_heads], or None
    final,  # Final
    out_strides,  # Strides
    lse_strides,
    rows,  # RowPlaces
    HEAD_DIM_V: tl.constexpr,
):
    """Finishes the softmax of rows whose keys have all been seen, and stores it."""
    b, token, head = rows.b, rows.token, rows.head
    sink_log2 = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=rows.ok, other=0.0).to(tl.float32)
        sink_log2 = sink * 1.4426950408889634
    out, lse = finish(sums.acc, sums.m, sums.l, sink_log2)
    out_rows = place(final.out_ptr, out_strides, b, token, head)
    store_tile(out_rows, encode_out(out, final), rows.ok, HEAD_DIM_V)
    tl.store(place(final.lse_ptr, lse_strides, b, token, head), lse, mask=rows.ok)
