"""`hopper_decode_split` where a producer warp issues copies and the others multiply: 16 rows.

For the many boxes of small pages in long splits of large caches: see producer_warp.py.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.epilogue import finish_split, locate_partial_rows, mark_absent
from splitkv.kernels.hopper.decode.key_scales import allocate_scale_stages, arrivals_per_tile
from splitkv.kernels.hopper.decode.launch_name import named_for_profilers
from splitkv.kernels.hopper.decode.producer_warp import MmaInputs, attend_by_roles
from splitkv.kernels.hopper.decode.queries import locate_rows
from splitkv.kernels.hopper.decode.records import (
    KeyScales,
    KVCache,
    Output,
    QueryRows,
    Ring,
    ScoreTerms,
    Split,
    Work,
)
from splitkv.kernels.hopper.decode.ring import allocate_boxes
from splitkv.kernels.hopper.decode.split_range import (
    locate_program,
    locate_rows_of_head,
    prefetch_page_ids,
)
from splitkv.kernels.hopper.primitives.cluster import arrive_running
from splitkv.kernels.hopper.primitives.tma_ring import make_barriers
from splitkv.kernels.tile.band import Bounds, load_sink_tokens, token_range
from splitkv.kernels.tile.decode_sizes import SIZES
from splitkv.kernels.tile.share import Share
from splitkv.kernels.tile.visit import Strides


@gluon.jit(
    repr=named_for_profilers,
    do_not_specialize=SIZES,
)
def decode_producer(
    q_ptr,  # [batch, seqlen_q, num_heads, head_dim]
    k,  # TMA descriptor of [batch or pages, keys, num_kv_heads, columns], as v
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
    num_kv_heads,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    parts,  # splits of each sequence
    q_strides,  # Strides, as out_strides
    out_strides,
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
    program = locate_program(None)
    if row.sink_tokens_ptr is not None:
        sink_tokens = load_sink_tokens(row.sink_tokens_ptr, program.sequence)
    bounds = Bounds(left, right, sink_tokens)
    share = Share(parts, None, None)
    kv = KVCache(k, v, table_ptr, stride_table, None, None)
    if left is None:  # where the split starts needs no length
        prefetch_page_ids(kv, program, share, lens_ptr, seqlen_k, CONFIG)
    k_boxes, k_tiles = allocate_boxes(k, CONFIG.dim_k, CONFIG)
    v_boxes, v_tiles = allocate_boxes(v, CONFIG.dim_v, CONFIG)
    kv_head, row_tile = locate_rows_of_head(program.head_tile, seqlen_q, CONFIG)
    first_token, last_token = token_range(row_tile, seqlen_q, CONFIG.group, CONFIG.tile_m)
    work = Work(
        lens_ptr,
        seqlen_k,
        seqlen_q,
        program.sequence,
        program.split,
        parts,
        None,
        bounds,
        first_token,
        last_token,
    )
    arrive_running(CONFIG.cluster_size)
    if partial is not None:  # combine waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    scales = KeyScales(key_scales, allocate_scale_stages(CONFIG), stride_sb, stride_sn)
    full = make_barriers(CONFIG.num_stages, arrivals_per_tile(CONFIG, gl.num_warps()))

    q_of_sequence = q_ptr + program.sequence.to(gl.int64) * q_strides.b
    queries = QueryRows(q_of_sequence, kv_head, row_tile, seqlen_q, q_strides.t, q_strides.h, None)
    of_q = Strides(stride_qsb, stride_qst, stride_qsh)
    of_kv = Strides(stride_sb, None, stride_sh)
    terms = ScoreTerms(row, head_scales, stride_slope, of_q, of_kv, scale, softcap)
    output = Output(final, partial, row.sink_ptr, seqlen_q, num_kv_heads, out_strides)
    empty = None
    if CONFIG.ring == "wraps":
        empty = make_barriers(CONFIG.num_stages, 1)
    ring = Ring(k_boxes, v_boxes, full, empty, k_tiles, v_tiles)
    inputs = MmaInputs(queries, terms, work)
    softmax, num_splits = attend_by_roles(kv, ring, scales, inputs, CONFIG)
    split = Split(work.sequence, kv_head, None, None, num_splits)
    rows = locate_rows(kv_head, row_tile, seqlen_q, CONFIG)
    partial_rows = locate_partial_rows(program.slot, seqlen_q, CONFIG)
    if (work.split >= num_splits) & (not CONFIG.cluster_size):  # a cluster merges with all
        mark_absent(output, rows, partial_rows)
        return
    finish_split(softmax, output, work, split, row_tile, rows, partial_rows, CONFIG)
