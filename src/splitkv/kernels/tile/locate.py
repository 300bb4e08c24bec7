"""Where a key lives: the element offset of each row of a tile, in 64 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def locate(table_ptr, b, offs_n, ok, PAGE_SIZE: tl.constexpr):
    """(outer, inner) [TILE_N] of keys `offs_n` of sequence b: outer counts slabs, inner rows of a
    slab.

    Contiguous: the slab is the sequence. Paged: it is a page, looked up only where `ok`, so that
    the table may be padded with anything. table_ptr: the row of sequence b, or None.
    """
    if table_ptr is None:
        outer = offs_n * 0 + b
        inner = offs_n
    else:
        outer = tl.load(table_ptr + offs_n // PAGE_SIZE, mask=ok, other=0)
        inner = offs_n % PAGE_SIZE
    return outer.to(tl.int64), inner.to(tl.int64)


class Pages(NamedTuple):
    """The page table of a sequence, None where contiguous, and the elements between pages of keys
    and values."""

    table_ptr: Any
    stride_k: Any
    stride_v: Any


@triton.jit
def pages_of(pages, start, count, TILE_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The pages of keys `start..start + TILE_N` below `count`: one where they share it, else
    [TILE_N]."""
    offs = start
    if PAGE_SIZE % TILE_N != 0:
        offs = start + tl.arange(0, TILE_N)
    return tl.load(pages.table_ptr + offs // PAGE_SIZE, mask=offs < count, other=0)


@triton.jit
def key_rows(
    page,
    ptr,
    stride,
    stride_page,
    start,
    OFFSET: tl.constexpr,  # the type of offsets inside a tile
    TILE_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """The first address [TILE_N] of each row of the tile of keys at `start`.

    page  as `pages_of` gives it, or None: contiguous
    ptr   of the first key of the sequence, or of the first page
    """
    offs = tl.arange(0, TILE_N).to(OFFSET)
    if page is None:
        rows = ptr + start.to(tl.int64) * stride + offs * stride
    elif PAGE_SIZE % TILE_N == 0:
        first = page.to(tl.int64) * stride_page + (start % PAGE_SIZE).to(tl.int64) * stride
        rows = ptr + first + offs * stride
    else:
        inside = (start + tl.arange(0, TILE_N)) % PAGE_SIZE
        rows = ptr + (page.to(tl.int64) * stride_page + inside.to(tl.int64) * stride)
    return rows
