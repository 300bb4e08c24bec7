"""Attention of a tile of packed rows to a split of the keys of a cache, by any GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.codec import widen
from splitkv.kernels.tile.locate import locate
from splitkv.kernels.tile.product import add_product, row_product
from splitkv.kernels.tile.score import score_log2
from splitkv.kernels.tile.softmax import weights


class CachedHead(NamedTuple):
    """The keys and values of a sequence and KV head in a cache.

    k_ptr, v_ptr          of the head in the first sequence or page
    table_ptr             the sequence's row of the page table; None: contiguous
    sequence, head        indices
    k_strides, v_strides  Strides: of a sequence or a page, a key, a head
    scales                Scales of each key; None: none
    scale_strides         Strides of them; without meaning where there are none
    """

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any
    sequence: Any
    head: Any
    k_strides: Any
    v_strides: Any
    scales: Any
    scale_strides: Any


class ScoredRows(NamedTuple):
    """The inputs of the scores of rows.

    bounds   Bounds of the mask
    pos      [TILE_M, 1] key position of each row
    keys     of the sequence
    scale, softcap, slope   as in tile/score.py
    """

    bounds: Any
    pos: Any
    keys: Any
    scale: Any
    softcap: Any
    slope: Any


@triton.jit
def attend_split(
    q,  # [TILE_M, DIM]
    cache,  # CachedHead
    rows,  # ScoredRows
    tiles,  # Tiles
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes (m [TILE_M], l [TILE_M], acc [TILE_M, DIM_V]) over the keys of the tiles."""
    TILE_M: tl.constexpr = q.shape[0]
    dtype: tl.constexpr = q.dtype
    offs_d = tl.arange(0, q.shape[1])
    offs_v = tl.arange(0, DIM_V)
    keys = rows.keys
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM_V], tl.float32)
    for i in tl.range(tiles.first, tiles.last, tiles.by, num_stages=STAGES):
        offs_n = tl.where(i < tiles.near, i, i + tiles.skip) * TILE_N + tl.arange(0, TILE_N)
        n_ok = offs_n < keys
        outer, inner = locate(cache.table_ptr, cache.sequence, offs_n, n_ok, PAGE_SIZE)
        k_rows = outer * cache.k_strides.b + inner * cache.k_strides.t
        k_ok = n_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(cache.k_ptr + k_rows[:, None] + offs_d[None, :], mask=k_ok, other=0.0)
        qk = row_product(q, widen(k, dtype))  # [TILE_M, TILE_N]
        if cache.scales is not None:
            at = outer * cache.scale_strides.b + inner * cache.scale_strides.t
            at += cache.head.to(tl.int64) * cache.scale_strides.h
            qk *= tl.load(cache.scales.k_ptr + at, mask=n_ok, other=0.0)[None, :]
        s = score_log2(qk, rows.scale, rows.softcap, rows.slope, rows.pos, offs_n[None, :])
        s = tl.where(visible(rows.bounds, rows.pos, offs_n[None, :], keys), s, float("-inf"))
        m, p, shrink = weights(m, s)
        l = l * shrink + tl.sum(p, 1)
        if cache.scales is not None:
            p *= tl.load(cache.scales.v_ptr + at, mask=n_ok, other=0.0)[None, :]
        v_rows = outer * cache.v_strides.b + inner * cache.v_strides.t
        v_ok = n_ok[:, None] & (offs_v < HEAD_DIM_V)[None, :]
        v = tl.load(cache.v_ptr + v_rows[:, None] + offs_v[None, :], mask=v_ok, other=0.0)
        v = widen(v, dtype)
        acc = add_product(acc * shrink[:, None], p.to(dtype), v)
    return m, l, acc
