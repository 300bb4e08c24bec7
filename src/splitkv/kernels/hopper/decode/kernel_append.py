"""`hopper_decode_split` of calls that append: new tokens are written into the cache, q and they
rotated, while earlier tiles are on their way. Only the programs that have tiles with new tokens
wait for that."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.attend import attend_tiles
from splitkv.kernels.hopper.decode.epilogue import finish_split, locate_partial_rows, mark_absent
from splitkv.kernels.hopper.decode.key_scales import arrivals_per_tile
from splitkv.kernels.hopper.decode.launch_name import named_for_profilers
from splitkv.kernels.hopper.decode.new_tokens import copy_first_tiles_and_write
from splitkv.kernels.hopper.decode.queries import locate_rows
from splitkv.kernels.hopper.decode.records import (
    BatchRule,
    KeyScales,
    KVCache,
    Output,
    QueryRows,
    Ring,
    Rotation,
    ScoreTerms,
    Work,
)
from splitkv.kernels.hopper.decode.ring import gather_steps
from splitkv.kernels.hopper.decode.split_range import (
    locate_in_batch,
    locate_program,
    locate_rows_of_head,
    locate_split,
    prefetch_first_page_id,
)
from splitkv.kernels.hopper.primitives.cluster import arrive_running
from splitkv.kernels.hopper.primitives.tma_ring import make_barriers
from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.decode_sizes import SIZES
from splitkv.kernels.tile.new import AngleTable, NewStrides, NewTokens, grown, seen_tiles, start_of
from splitkv.kernels.tile.share import Share
from splitkv.kernels.tile.visit import Strides


@gluon.jit(
    repr=named_for_profilers,
    do_not_specialize=SIZES,
)
def decode_append(
    q_ptr,  # [batch, seqlen_q, num_heads, head_dim]
    k,  # TMA descriptor of [batch or pages, keys, num_kv_heads, columns], or pointer, as v
    v,
    table_ptr,  # [batch, max_pages], or None
    lens_ptr,  # [batch] int32 keys of each sequence, or None: seqlen_k each
    final,  # Final
    partial,  # Partial, or None: one split a sequence
    row,  # Row
    head_scales,  # Scales that the keys of a head share, or None
    key_scales,  # None: keys that are appended have no scales of their own
    scale,  # see tile/score.py
    softcap,  # float or None
    growth,  # Growth: the lengths are those before the new tokens
    new,  # New
    turn,  # Turn
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    parts,  # splits of each sequence, or None
    size,  # tiles of a split by the fixed rule, or None
    programs,  # splits of the whole batch by the batch rule, or None
    q_strides,  # Strides, as out_strides
    out_strides,
    k_strides,  # of the caches
    v_strides,
    stride_table,
    stride_slope,
    stride_qsb,  # of the scales of q: a sequence, a token, a head
    stride_qst,
    stride_qsh,
    stride_sb,  # of those of K and V: a sequence or a page, a key, a head
    stride_sh,
    seqlen_new,  # new tokens of a sequence
    capacity,  # keys that a sequence has room for
    slabs,  # sequences or pages of the cache
    rotary_rows,  # rows of cos and sin
    q_step,  # rows of cos and sin between query tokens
    new_k_strides,  # Strides of the new k: of a sequence, a token, a head
    new_v_strides,
    new_scale_strides,  # of the scales that new tokens are stored by
    stride_cos,  # between rows
    stride_sin,
    CONFIG: gl.constexpr,  # DecodeConfig
):
    program = locate_program(programs)
    bounds = Bounds(left, right, sink_tokens)
    share = Share(parts, size, programs)
    k_steps = gather_steps(k_strides, CONFIG)
    v_steps = gather_steps(v_strides, CONFIG)
    kv = KVCache(
        k=k, v=v, table_ptr=table_ptr, stride_table=stride_table, k_steps=k_steps, v_steps=v_steps
    )
    if left is None and programs is None:  # where the split starts needs no length
        prefetch_first_page_id(kv, program, share, seqlen_k, CONFIG)
    keys = seqlen_k
    if programs is None:
        length = grown(lens_ptr, growth, program.sequence, True, seqlen_new, capacity)
        keys = length.keys
    k_boxes, k_tiles = CONFIG.allocate(k, CONFIG.dim_k, CONFIG)
    v_boxes, v_tiles = CONFIG.allocate(v, CONFIG.dim_v, CONFIG)
    kv_head, row_tile = locate_rows_of_head(program.head_tile, seqlen_q, CONFIG)
    first_token, last_token = token_range(row_tile, seqlen_q, CONFIG.group, CONFIG.tile_m)
    work = Work(
        lens_ptr=lens_ptr,
        max_keys=seqlen_k,
        seqlen_q=seqlen_q,
        sequence=program.sequence,
        split=program.split,
        num_splits=parts,
        split_tiles=size,
        bounds=bounds,
        first_token=first_token,
        last_token=last_token,
    )
    arrive_running(CONFIG.cluster_size)
    if partial is not None:  # combine waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    scales = KeyScales(pointers=None, stages=None, stride_b=None, stride_n=None)
    full = make_barriers(CONFIG.num_stages, arrivals_per_tile(CONFIG, gl.num_warps()))
    ring = Ring(
        k_boxes=k_boxes, v_boxes=v_boxes, full=full, empty=None, k_tiles=k_tiles, v_tiles=v_tiles
    )
    if programs is not None:
        rule = BatchRule(programs=programs, batch=batch, seqlen_new=seqlen_new, capacity=capacity)
        sequence, split_of_sequence, num_splits = locate_in_batch(work, rule, growth, CONFIG)
        if sequence >= batch:
            return
        work = Work(
            lens_ptr=lens_ptr,
            max_keys=seqlen_k,
            seqlen_q=seqlen_q,
            sequence=sequence,
            split=split_of_sequence,
            num_splits=num_splits,
            split_tiles=None,
            bounds=bounds,
            first_token=first_token,
            last_token=last_token,
        )
        length = grown(lens_ptr, growth, work.sequence, True, seqlen_new, capacity)
        keys = length.keys

    # prologue: copies are on their way before new tokens are written and q is read
    split = locate_split(work, kv_head, keys, CONFIG)
    of_scales = Strides(new_scale_strides.b, None, new_scale_strides.h)
    strides = NewStrides(new_k_strides, k_strides, new_v_strides, v_strides, of_scales)
    angles = AngleTable(rotary_rows, stride_cos, stride_sin)
    first = (work.split == 0) & (row_tile == 0)
    shown = seen_tiles(bounds, keys, seqlen_q, first, CONFIG.tile_n)
    tokens = NewTokens(new, turn, growth, length, shown, strides, angles, capacity, slabs)
    copy_first_tiles_and_write(ring, kv, split, tokens, CONFIG)

    # rows
    rotation = None
    if CONFIG.rotary_dim:
        start = start_of(turn, length.before, split.sequence, True)
        rotation = Rotation(turn, angles, start, q_step)
    q_of_sequence = q_ptr + split.sequence.to(gl.int64) * q_strides.b
    queries = QueryRows(
        q_ptr=q_of_sequence,
        kv_head=kv_head,
        row_tile=row_tile,
        seqlen_q=seqlen_q,
        stride_t=q_strides.t,
        stride_h=q_strides.h,
        rotation=rotation,
    )
    of_q = Strides(stride_qsb, stride_qst, stride_qsh)
    of_kv = Strides(stride_sb, None, stride_sh)
    terms = ScoreTerms(
        row=row,
        head_scales=head_scales,
        slope_stride=stride_slope,
        q_strides=of_q,
        kv_strides=of_kv,
        scale=scale,
        softcap=softcap,
    )
    output = Output(
        final=final,
        partial=partial,
        sink_ptr=row.sink_ptr,
        seqlen_q=seqlen_q,
        num_kv_heads=num_kv_heads,
        strides=out_strides,
    )
    rows = locate_rows(kv_head, row_tile, seqlen_q, CONFIG)
    partial_rows = locate_partial_rows(program.slot, seqlen_q, CONFIG)
    if (work.split >= split.num_splits) & (not CONFIG.cluster_size):  # a cluster merges with all
        mark_absent(output, rows, partial_rows)
        return
    q = CONFIG.load_queries(queries, CONFIG)

    # main loop
    softmax = attend_tiles(
        CONFIG.mainloop, work, split, queries, terms, q, ring, kv, scales, CONFIG
    )

    finish_split(softmax, output, work, split, row_tile, rows, partial_rows, CONFIG)
