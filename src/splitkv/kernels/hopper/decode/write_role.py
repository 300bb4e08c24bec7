"""The write role of persistent decode on Hopper: new tokens of a call that appends.

It walks over the splits of its program as the other roles do, and where new tokens lie in the tiles
of one, writes them, rotated and quantised, while other tiles are on their way. Two barriers a split
that has new tokens, from `WRITTEN_AHEAD` pairs in turns: `written` tells the load role that TMA may
read their tiles, `taken` tells the write role that the pair can be used again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from splitkv.kernels.hopper.decode.new_tokens import write_new_tokens
from splitkv.kernels.hopper.decode.records import Split
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.hopper.primitives.tma_ring import stage_after, thread_barrier
from splitkv.kernels.tile.new import NewTokens, Tiles, grown, has_new, seen_tiles

WRITTEN_AHEAD = gl.constexpr(2)  # splits with new tokens that are written before they are taken


class AppendedTokens(NamedTuple):
    """The new tokens of a call, as NewTokens has them of a sequence.

    q_step           rows of cos and sin between query tokens
    written, taken   barriers [WRITTEN_AHEAD]
    """

    new: Any
    turn: Any
    strides: Any
    angles: Any
    slabs: Any
    q_step: Any
    written: Any
    taken: Any


@gluon.jit
def length_of(split, step):
    """The Grown of the sequence of a split."""
    return grown(step.lens_ptr, step.growth, split.sequence, True, step.seqlen_new, step.capacity)


@gluon.jit
def shown_of(split, row_tile, step, CONFIG: gl.constexpr):
    """The Tiles beside which a split writes new tokens as well, as NewTokens has them."""
    first = (split.tiles.first == 0) & (row_tile == 0)
    return seen_tiles(step.bounds, split.num_keys, step.seqlen_q, first, CONFIG.tile_n)


@gluon.jit
def write_if_any(kv, split, row_tile, tokens, step, new_splits, CONFIG: gl.constexpr):
    """Writes the new tokens of a split, if it has any; returns `new_splits` with this one.

    new_splits   splits so far that had any
    """
    of_split = NewTokens(
        tokens.new,
        tokens.turn,
        step.growth,
        length_of(split, step),
        shown_of(split, row_tile, step, CONFIG),
        tokens.strides,
        tokens.angles,
        step.capacity,
        tokens.slabs,
    )
    if has_new(of_split, split.tiles, CONFIG.tile_n):
        pair, phase = stage_after(new_splits, new_splits * 0, WRITTEN_AHEAD)
        mbarrier.wait(tokens.taken.index(pair), 1 - phase)
        write_new_tokens(kv, split, of_split, CONFIG)
        # each thread orders what it has written before what TMA reads
        run_ptx("fence.proxy.async.global;", "r", (split.sequence,))
        thread_barrier()
        mbarrier.arrive(tokens.written.index(pair), count=1)
        new_splits += 1
    return new_splits


@gluon.jit
def wait_for_new_tokens(split, row_tile, tokens, step, new_splits, CONFIG: gl.constexpr):
    """Waits in the load role until the new tokens of a split are written, if it has any; returns
    `new_splits` with this one, as `write_if_any` does."""
    length, shown = length_of(split, step), shown_of(split, row_tile, step, CONFIG)
    of_split = NewTokens(None, None, None, length, shown, None, None, step.capacity, tokens.slabs)
    if has_new(of_split, split.tiles, CONFIG.tile_n):
        pair, phase = stage_after(new_splits, new_splits * 0, WRITTEN_AHEAD)
        mbarrier.wait(tokens.written.index(pair), phase)
        # and the warp that issues TMA, what it now knows of
        run_ptx("fence.proxy.async.global;", "r", (split.sequence,))
        mbarrier.arrive(tokens.taken.index(pair), count=1)
        new_splits += 1
    return new_splits


@gluon.jit
def tiles_before_new(split, step, CONFIG: gl.constexpr):
    """The part of a split whose tiles hold no new tokens, and the part behind it."""
    length, tiles = length_of(split, step), split.tiles
    tile = gl.maximum(length.before - length.padding, 0) // CONFIG.tile_n
    place = gl.where(tile < tiles.near, tile, gl.maximum(tile - tiles.skip, tiles.near))
    rounds = (gl.maximum(place - tiles.first, 0) + tiles.by - 1) // tiles.by
    cut = gl.minimum(tiles.first + rounds * tiles.by, tiles.last)
    ahead = Tiles(tiles.first, cut, tiles.by, tiles.near, tiles.skip)
    behind = Tiles(cut, tiles.last, tiles.by, tiles.near, tiles.skip)
    sequence, kv_head, keys = split.sequence, split.kv_head, split.num_keys
    return (
        Split(sequence, kv_head, ahead, keys, split.num_splits),
        Split(sequence, kv_head, behind, keys, split.num_splits),
    )
