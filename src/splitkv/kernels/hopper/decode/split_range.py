"""Which keys a program reads: its sequence, its split, and the tiles of that.

Split s of n takes the tiles s, s + n, s + 2n, ...; by the fixed rule a range of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.records import Program, Split
from splitkv.kernels.hopper.primitives.inline_asm import run_ptx
from splitkv.kernels.hopper.primitives.tma_ring import prefetch_page_id
from splitkv.kernels.tile.band import visited_tiles
from splitkv.kernels.tile.new import Tiles, keys_of
from splitkv.kernels.tile.share import Share, batch_share, part_of_batch, parts_of

LANES = gl.constexpr(32)
PREFETCHED_TILES = gl.constexpr(8)  # tiles whose page ids are prefetched for a producer warp


@gluon.jit
def locate_program(programs):
    """The Program of this program; `programs`: splits of the whole batch, or None."""
    split, head_tile, sequence = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    slot = (sequence * gl.num_programs(1) + head_tile) * gl.num_programs(0) + split
    if programs is not None:
        split, head_tile = head_tile, split
        slot = head_tile * programs + split
    return Program(split, head_tile, sequence, slot)


@gluon.jit
def locate_rows_of_head(head_tile, seqlen_q, CONFIG: gl.constexpr):
    """(KV head, row tile) of a program."""
    row_tiles = (
        1
        if CONFIG.used_rows == 8
        else (seqlen_q * CONFIG.group + CONFIG.tile_m - 1) // CONFIG.tile_m
    )
    return head_tile // row_tiles, head_tile % row_tiles


@gluon.jit
def load_num_keys(work):
    """Keys of the sequence."""
    keys = work.max_keys
    if work.lens_ptr is not None:
        keys = gl.load(work.lens_ptr + work.sequence)
    return keys


@gluon.jit
def locate_in_batch(work, rule, growth, CONFIG: gl.constexpr):
    """Finds (sequence, split of it, its number of splits) of a program by the batch rule, see
    tile/share.py. The sequence is the batch where there are fewer splits than programs.

    work     Work whose `split` counts the splits of the whole batch
    rule     BatchRule; growth: Growth, where the lengths are those before new tokens; or None
    """
    BATCH_P2: gl.constexpr = CONFIG.batch_p2
    # every warp has all of up to 256 sequences: then no sum waits for other warps
    a_thread: gl.constexpr = max(1, min(BATCH_P2 // 32, 8), BATCH_P2 // (32 * gl.num_warps()))
    warps: gl.constexpr = gl.BlockedLayout([a_thread], [32], [gl.num_warps()], [0])
    offs_b = gl.arange(0, BATCH_P2, layout=warps)
    here = offs_b < rule.batch
    keys_b = keys_of(work.lens_ptr, growth, offs_b, here, rule.seqlen_new, rule.capacity)
    parts_b = batch_share(
        Share(None, None, rule.programs),
        work.bounds,
        keys_b,
        batch=rule.batch,
        seqlen_q=work.seqlen_q,
        t_first=work.first_token,
        t_last=work.last_token,
        offs_b=offs_b,
        TILE_N=CONFIG.tile_n,
    )
    sequence, split, num_splits = part_of_batch(parts_b, offs_b, rule.batch, work.split)
    return sequence, split, num_splits


@gluon.jit
def locate_split(work, kv_head, num_keys, CONFIG: gl.constexpr):
    """The Split of a program whose sequence has so many keys."""
    first_pos = num_keys - work.seqlen_q
    first, last = first_pos + work.first_token, first_pos + work.last_token
    count, near, skip = visited_tiles(work.bounds, first, last, num_keys, CONFIG.tile_n)
    if work.split_tiles is None:
        tiles = Tiles(work.split, count, work.num_splits, near, skip)
        num_splits = gl.maximum(gl.minimum(count, work.num_splits), 1)
    else:
        start = work.split * work.split_tiles
        tiles = Tiles(start, gl.minimum(start + work.split_tiles, count), 1, near, skip)
        num_splits = parts_of(count, work.split_tiles)
    return Split(work.sequence, kv_head, tiles, num_keys, num_splits)


@gluon.jit
def prefetch_first_page_id(kv, program, share, max_keys, CONFIG: gl.constexpr):
    """Prefetches the page id of the first tile of a split whose start needs no length."""
    last = (max_keys - 1) // CONFIG.tile_n
    start = program.split if share.size is None else program.split * share.size
    tile = gl.minimum(start, last)
    prefetch_page_id(kv, program.sequence, tile, CONFIG.page_size, CONFIG.tile_n)


@gluon.jit
def prefetch_page_ids(kv, program, share, lens_ptr, max_keys, CONFIG: gl.constexpr):
    """Prefetches the length, and the page ids of the tiles that a producer warp issues first."""
    last = (max_keys - 1) // CONFIG.tile_n
    if lens_ptr is not None:
        run_ptx("prefetch.global.L1 [$1];", "l", (lens_ptr + program.sequence,))
    lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    tiles = gl.minimum(program.split + lanes % PREFETCHED_TILES * share.parts, last)
    prefetch_page_id(kv, program.sequence, tiles, CONFIG.page_size, CONFIG.tile_n)
