"""New tokens of a call that appends: written into the cache before TMA reads the tiles that they
are in, while earlier tiles are on their way."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.layouts import row_a_warp
from splitkv.kernels.hopper.decode.ring import copy_first_tiles_that, has_key_from, is_before
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.hopper.primitives.tma_ring import thread_barrier
from splitkv.kernels.tile.new import NewHead, TokenOffsets, has_new, write_new


@gluon.jit
def copy_first_tiles_and_write(ring, kv, split, tokens, CONFIG: gl.constexpr):
    """Copies the first tiles of a split. Those before the new tokens are issued at once; then the
    new tokens are written and fenced, so that TMA sees them; then the tiles that hold them are
    issued."""
    length = tokens.length
    first_new = length.before - length.padding
    copy_first_tiles_that(is_before, first_new, ring, kv, split, CONFIG)
    if has_new(tokens, split.tiles, CONFIG.tile_n):
        write_new_tokens(kv, split, tokens, CONFIG)
        # what threads have written, before TMA reads it
        run_ptx("fence.proxy.async.global;", "r", (split.sequence,))
        thread_barrier()
    copy_first_tiles_that(has_key_from, first_new, ring, kv, split, CONFIG)


@gluon.jit
def write_new_tokens(kv, split, tokens, CONFIG: gl.constexpr):
    """Writes the new tokens that lie in the tiles of a split."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    ROW: gl.constexpr = row_a_warp(max(HEAD_DIM, HEAD_DIM_V), gl.num_warps())
    table = None
    if kv.table_ptr is not None:
        table = kv.table_ptr + split.sequence.to(gl.int64) * kv.stride_table
    offs = TokenOffsets(
        gl.arange(0, CONFIG.tile_t, layout=gl.SliceLayout(1, ROW)),
        gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, ROW)),
        gl.arange(0, HEAD_DIM_V, layout=gl.SliceLayout(0, ROW)),
    )
    write_new(
        tokens,
        NewHead(split.sequence, split.kv_head, table),
        split.tiles,
        offs,
        HEAD_DIM=HEAD_DIM,
        HEAD_DIM_V=HEAD_DIM_V,
        PAGE_SIZE=CONFIG.page_size,
        TILE_N=CONFIG.tile_n,
        ROTARY_DIM=CONFIG.rotary_dim,
        PAIR=CONFIG.rotary_pair,
    )
