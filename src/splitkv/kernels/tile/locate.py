"""Where a key lives: the element offset of each row of a tile, in 64 bits."""

from __future__ import annotations

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
