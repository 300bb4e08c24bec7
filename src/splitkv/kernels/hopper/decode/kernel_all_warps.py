"""`hopper_decode_split` where every warp issues copies and multiplies: 16 or 32 packed rows, mma.

One thread issues TMA copies of whole tiles, or all gather rows; nothing is computed an address, so
the first copy leaves a few hundred cycles after the start.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.attend import attend_tiles
from splitkv.kernels.hopper.decode.epilogue import finish_split, locate_partial_rows, mark_absent
from splitkv.kernels.hopper.decode.key_scales import (
    allocate_scale_stages,
    arrivals_per_tile,
    copy_first_tiles_and_scales,
    store_first_scales,
)
from splitkv.kernels.hopper.decode.launch_name import named_for_profilers
from splitkv.kernels.hopper.decode.mma_loop import mma_loop
from splitkv.kernels.hopper.decode.queries import load_mma_queries, locate_rows
from splitkv.kernels.hopper.decode.records import (
    BatchRule,
    KeyScales,
    KVCache,
    Output,
    QueryRows,
    Ring,
    ScoreTerms,
    Work,
)
from splitkv.kernels.hopper.decode.ring import (
    allocate_boxes,
    allocate_rows,
    gather_steps,
    load_first_page_ids,
)
from splitkv.kernels.hopper.decode.split_range import (
    load_num_keys,
    locate_in_batch,
    locate_program,
    locate_rows_of_head,
    locate_split,
    prefetch_first_page_id,
)
from splitkv.kernels.hopper.primitives.cluster import arrive_running
from splitkv.kernels.hopper.primitives.tma_ring import make_barriers
from splitkv.kernels.tile.band import Bounds, load_sink_tokens, token_range
from splitkv.kernels.tile.decode_sizes import SIZES
from splitkv.kernels.tile.share import Share
from splitkv.kernels.tile.visit import Strides


@gluon.jit
def allocate_stages(x, DIM: gl.constexpr, CONFIG: gl.constexpr):
    """Allocates the stages of K or V for the way in which they are copied: (boxes, tiles)."""
    if CONFIG.load == "gather":
        boxes, tiles = allocate_rows(x, DIM, CONFIG)
    else:
        boxes, tiles = allocate_boxes(x, DIM, CONFIG)
    return boxes, tiles


@gluon.jit(
    repr=named_for_profilers,
    do_not_specialize=SIZES,
)
def decode_all_warps(
    q_ptr,  # [batch, seqlen_q, num_heads, head_dim]
    k,  # TMA descriptor of [batch or pages, keys, num_kv_heads, columns], or pointer, as v
    v,
    table_ptr,  # [batch, max_pages], or None
    lens_ptr,  # [batch] int32 keys of each sequence, or None: seqlen_k each
    final,  # Final
    partial,  # Partial, or None: one split a sequence
    row,  # Row
    head_scales,  # Scales that the keys of a head share, or None
    key_scales,  # Scales [batch or pages, keys, num_kv_heads], or None
    scale,  # see tile/score.py
    softcap,  # float or None
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
    k_strides,  # Strides of the caches where rows are gathered, or None
    v_strides,
    stride_table,
    stride_slope,
    stride_qsb,  # of the scales of q: a sequence, a token, a head
    stride_qst,
    stride_qsh,
    stride_sb,  # of those of K and V: a sequence or a page, a key, a head
    stride_sn,
    stride_sh,
    CONFIG: gl.constexpr,  # DecodeConfig
):
    program = locate_program(programs)
    if row.sink_tokens_ptr is not None:
        sink_tokens = load_sink_tokens(row.sink_tokens_ptr, program.sequence)
    bounds = Bounds(left, right, sink_tokens)
    share = Share(parts, size, programs)
    k_steps = gather_steps(k_strides, CONFIG)
    v_steps = gather_steps(v_strides, CONFIG)
    kv = KVCache(
        k=k, v=v, table_ptr=table_ptr, stride_table=stride_table, k_steps=k_steps, v_steps=v_steps
    )
    # page ids of the first tiles are loaded beside the length, or prefetched, where no length says
    # which they are
    SPLIT_KNOWN: gl.constexpr = left is None and programs is None
    PAGES_EARLY: gl.constexpr = (
        SPLIT_KNOWN and CONFIG.load == "gather" and CONFIG.predecessor == "done"
    )
    if SPLIT_KNOWN and not PAGES_EARLY:
        prefetch_first_page_id(kv, program, share, seqlen_k, CONFIG)
    keys = seqlen_k
    if programs is None and lens_ptr is not None:
        keys = gl.load(lens_ptr + program.sequence)
    k_boxes, k_tiles = allocate_stages(k, CONFIG.dim_k, CONFIG)
    v_boxes, v_tiles = allocate_stages(v, CONFIG.dim_v, CONFIG)
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
    pages = None
    if PAGES_EARLY:
        most = locate_split(work, kv_head, seqlen_k, CONFIG)
        pages = load_first_page_ids(kv, most, CONFIG)
    arrive_running(CONFIG.cluster_size)
    if partial is not None:  # combine waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    scales = KeyScales(
        pointers=key_scales,
        stages=allocate_scale_stages(CONFIG),
        stride_b=stride_sb,
        stride_n=stride_sn,
    )
    full = make_barriers(CONFIG.num_stages, arrivals_per_tile(CONFIG, gl.num_warps()))
    ring = Ring(
        k_boxes=k_boxes, v_boxes=v_boxes, full=full, empty=None, k_tiles=k_tiles, v_tiles=v_tiles
    )
    if programs is not None:
        rule = BatchRule(programs=programs, batch=batch, seqlen_new=None, capacity=None)
        sequence, split_of_sequence, num_splits = locate_in_batch(work, rule, None, CONFIG)
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
        keys = load_num_keys(work)

    # prologue: copies are on their way before q is read
    split = locate_split(work, kv_head, keys, CONFIG)
    loaded = copy_first_tiles_and_scales(ring, kv, scales, split, pages, keys - seqlen_q, CONFIG)

    # rows
    q_of_sequence = q_ptr + split.sequence.to(gl.int64) * q_strides.b
    queries = QueryRows(
        q_ptr=q_of_sequence,
        kv_head=kv_head,
        row_tile=row_tile,
        seqlen_q=seqlen_q,
        stride_t=q_strides.t,
        stride_h=q_strides.h,
        rotation=None,
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
    q = load_mma_queries(queries, CONFIG)
    if CONFIG.key_scales == "preloaded":
        store_first_scales(scales, ring, loaded, CONFIG)

    # main loop
    softmax = attend_tiles(mma_loop, work, split, queries, terms, q, ring, kv, scales, CONFIG)

    finish_split(softmax, output, work, split, row_tile, rows, partial_rows, CONFIG)
