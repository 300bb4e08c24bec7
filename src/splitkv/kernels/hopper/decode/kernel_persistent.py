"""`hopper_decode_split` by a schedule of the step: programs that stay, and walk over splits.

A producer warp issues the copies of all splits of a program into one ring, and the other warps
multiply, 16 or 32 packed rows: see walk_roles.py. What a program has is what a schedule says, or
what it finds by itself: tile/step_share.py. Partials are merged by kernels/combine_slots.py.

Where the call appends, two more warps write the new tokens of splits that have their tiles, and the
producer warp asks for those tiles when it is told that they are written.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.decode.key_scales import allocate_scale_stages, arrivals_per_tile
from splitkv.kernels.hopper.decode.launch_name import named_for_profilers
from splitkv.kernels.hopper.decode.records import (
    KeyScales,
    KVCache,
    Output,
    Ring,
    ScoreTerms,
)
from splitkv.kernels.hopper.decode.ring import allocate_boxes
from splitkv.kernels.hopper.decode.walk_roles import StepShares, WalkInputs, run_roles
from splitkv.kernels.hopper.decode.write_role import WRITTEN_AHEAD, AppendedTokens
from splitkv.kernels.hopper.primitives.tma_ring import make_barriers
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.decode_sizes import SIZES
from splitkv.kernels.tile.new import AngleTable, NewStrides
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.walk import DecodeStep


@gluon.jit(
    repr=named_for_profilers,
    do_not_specialize=SIZES,
)
def decode_walk(
    q_ptr,  # [batch, seqlen_q, num_heads, head_dim]
    k,  # TMA descriptor of [batch or pages, keys, num_kv_heads, columns], as v
    v,
    table_ptr,  # [batch, max_pages], or None
    lens_ptr,  # [batch] int32 keys of each sequence
    final,  # Final
    partial,  # Partial
    row,  # Row
    head_scales,  # Scales that the keys of a head share, or None
    key_scales,  # Scales [batch or pages, keys, num_kv_heads], or None
    scale,  # see tile/score.py
    softcap,  # float or None
    starts_ptr,  # [programs, 8] int32: the schedule of the step; None: programs find their shares
    growth,  # Growth: the lengths are those before the new tokens; None: nothing is appended
    new,  # New, or None
    turn,  # Turn, or None
    seqlen_q,
    batch,
    num_kv_heads,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    head_tiles,  # that a share goes through, or None: one
    programs,
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
    k_strides,  # from here on None where nothing is appended: Strides of the caches
    v_strides,
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
    bounds = Bounds(left, right, sink_tokens)
    group, program = gl.program_id(0), gl.program_id(1)
    added = growth, seqlen_new, capacity
    sizes = seqlen_q, batch, head_tiles, programs
    step = DecodeStep(lens_ptr, bounds, *sizes, CONFIG.split_tiles, *added)
    shares = StepShares(starts_ptr, step, group, program)
    kv = KVCache(
        k=k, v=v, table_ptr=table_ptr, stride_table=stride_table, k_steps=None, v_steps=None
    )
    k_boxes, k_tiles = allocate_boxes(k, CONFIG.dim_k, CONFIG)
    v_boxes, v_tiles = allocate_boxes(v, CONFIG.dim_v, CONFIG)
    scales = KeyScales(
        pointers=key_scales,
        stages=allocate_scale_stages(CONFIG),
        stride_b=stride_sb,
        stride_n=stride_sn,
    )
    full = make_barriers(CONFIG.num_stages, arrivals_per_tile(CONFIG, gl.num_warps()))
    empty = make_barriers(CONFIG.num_stages, 1)
    ring = Ring(
        k_boxes=k_boxes, v_boxes=v_boxes, full=full, empty=empty, k_tiles=k_tiles, v_tiles=v_tiles
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
    tokens = None
    if seqlen_new is not None:
        of_scales = Strides(new_scale_strides.b, None, new_scale_strides.h)
        strides = NewStrides(new_k_strides, k_strides, new_v_strides, v_strides, of_scales)
        angles = AngleTable(rotary_rows, stride_cos, stride_sin)
        written = make_barriers(WRITTEN_AHEAD, 1)
        taken = make_barriers(WRITTEN_AHEAD, 1)
        tokens = AppendedTokens(new, turn, strides, angles, slabs, q_step, written, taken)
    tl.extra.cuda.gdc_wait()  # for the schedule, and all before it
    tl.extra.cuda.gdc_launch_dependents()  # combine, which reads a schedule that is given at once
    inputs = WalkInputs(q_ptr, q_strides, terms, output)
    run_roles(kv, ring, scales, inputs, shares, tokens, CONFIG)
