"""Split-KV decode attention, for any NVIDIA GPU.

Computes, for each sequence b, KV head h and the rows r = (query token, grouped head) that share it,

    s[r, n]  = score(scale * q[r] . k[n])          n in the bands of row r, the visible keys
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])
    acc[r]   = sum_n exp(s[r, n] - m[r]) v[n]

over one part of the keys, and stores the partial (acc, m, l). `combine` merges the parts. A
sequence of only one part is finished here, out = acc / (l + exp(sink - m)), and leaves no partial.

Where the call appends (`Operands.new`), new keys and values go into the cache here, q and they
rotated, before the tiles that they are in are read: see tile/new.py. Lengths are then those before.

Shapes      q [batch, seqlen_q, num_heads, head_dim]; k, v and their scales: see core/kv.py; out as
            q, with head_dim_v
            partials [slots, rows, head_dim_v + 2] fp32, one slot a program
Grid        even: (num_splits, num_kv_heads * row_tiles, batch)
            batch: (programs, num_kv_heads * row_tiles); a program finds its sequence by the lengths
            the num_heads / num_kv_heads heads of all query tokens share each key tile
Traffic     keys, values  batch * num_kv_heads * visible keys * (head_dim + head_dim_v) * kv bytes;
            read
                          once: later row tiles of the same keys find them in the L2
            partials      2 * parts * rows * (head_dim_v + 2) * 4, for sequences of two parts or
                          more
            new tokens are not counted: read and written once a row tile
            flops         2 * batch * num_heads * seqlen_q * visible keys * (head_dim + head_dim_v)
Numerics    scores and sums in fp32, base-2 exponentials; p is rounded to the value type before p @
            v; fp32 inputs multiply in IEEE fp32, not tf32; 8 bits are widened exactly, a scale of q
            or k joins the score, one of v the output, or p where each key has its own; out with a
            scale is rounded to e4m3 from fp32
Limits      NVIDIA GPU, sm_80 or newer; bf16, fp16 or fp32; head_dim and head_dim_v multiples of 16
            from 16 to 256; at most 16 query tokens; at most 64 query heads a KV head; batch, and
            KV heads times row tiles, at most 65535; no dropout, no gradient
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from splitkv.core.kv import Paged
from splitkv.core.plan import SCHEDULED, Plan
from splitkv.core.problem import Operands
from splitkv.kernels.combine import PartRows, write_absent, write_part
from splitkv.kernels.host.append_arguments import (
    NO_NEW_TOKENS,
    TokenTiles,
    fixed_arguments,
    token_tiles,
)
from splitkv.kernels.host.arguments import in_order
from splitkv.kernels.host.launch import Launch, launch_of
from splitkv.kernels.host.launcher import (
    BOUNDS,
    PER_CALL,
    PER_CALL_OF_APPEND,
    CacheLaunch,
    CacheTail,
    DecodeLauncher,
    SplitKernel,
    batch_p2,
    compile_options,
    dependent_launches,
    partial_rows,
    split_arguments,
)
from splitkv.kernels.host.partition import grid, padded_dims
from splitkv.kernels.tile.band import Bounds, load_sink_tokens, token_range, visited_tiles
from splitkv.kernels.tile.codec import row_scale, scale_of_head, widen, working_type
from splitkv.kernels.tile.decode_sizes import SIZES
from splitkv.kernels.tile.new import (
    AngleTable,
    NewHead,
    NewStrides,
    NewTokens,
    Tiles,
    TokenOffsets,
    grown,
    has_new,
    keys_of,
    rotated,
    seen_tiles,
    start_of,
    write_new,
)
from splitkv.kernels.tile.share import Share, batch_share, part_of_batch, parts_of, sequence_share
from splitkv.kernels.tile.split import CachedHead, ScoredRows, attend_split
from splitkv.kernels.tile.visit import Strides

if TYPE_CHECKING:
    from splitkv.kernels.host.step import StepLauncher


@triton.jit(do_not_specialize=SIZES)
def decode_split(
    q_ptr,  # [batch, seqlen_q, num_heads, HEAD_DIM]
    kv,  # KV
    lens_ptr,  # [batch] int32 keys of each sequence, or None: seqlen_k each
    final,  # Final
    partial,  # Partial, or None: one part a sequence
    row,  # Row
    head_scales,  # Scales that the keys of a head share, or None
    key_scales,  # Scales [batch or pages, keys, num_kv_heads], or None
    scale,  # see tile/score.py
    softcap,  # float or None
    growth,  # Growth: the lengths are those before the new tokens; None: nothing is appended
    new,  # New, or None
    turn,  # Turn, or None
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    parts,  # the share's numbers, or None
    size,
    programs,
    q_strides,  # Strides: of a sequence, a token, a head
    k_strides,  # of a sequence or a page, a key, a head
    v_strides,
    out_strides,
    stride_table,
    stride_slope,
    stride_qsb,  # of the scales of q: a sequence, a token, a head
    stride_qst,
    stride_qsh,
    stride_sb,  # of those of K and V: a sequence or a page, a key, a head
    stride_sn,
    stride_sh,
    seqlen_new,  # from here on None where nothing is appended
    capacity,
    slabs,
    rotary_rows,
    q_step,
    new_k_strides,  # Strides of the new k: of a sequence, a token, a head
    new_v_strides,
    new_scale_strides,  # of the scales that new tokens are stored by
    stride_cos,  # between rows
    stride_sin,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    DIM: tl.constexpr,  # columns of tiles: head_dim and head_dim_v, padded
    DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH_P2: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    TILE_T: tl.constexpr,  # new tokens that are written at once
    DEPENDENTS: tl.constexpr,  # early: combine is launched before this grid has ended; or in_order
):
    if DEPENDENTS == "early":  # combine waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    bounds = Bounds(left, right, sink_tokens, chunk)
    share = Share(parts, size, programs)

    # whose keys, and which part of them
    row_tiles = (seqlen_q * GROUP + TILE_M - 1) // TILE_M
    AXIS: tl.constexpr = 0 if share.programs is None else 1
    part, head_tile = tl.program_id(AXIS), tl.program_id(1 - AXIS)
    h, tile_m = head_tile // row_tiles, head_tile % row_tiles
    t_first, t_last = token_range(tile_m, seqlen_q, GROUP, TILE_M)
    if share.programs is None:
        b = tl.program_id(2)
        slot = (b * tl.num_programs(1) + head_tile) * tl.num_programs(0) + part
    else:
        slot = head_tile * share.programs + part
        offs_b = tl.arange(0, BATCH_P2)
        keys_b = keys_of(lens_ptr, growth, offs_b, offs_b < batch, seqlen_new, capacity)
        parts_b = batch_share(
            share, bounds, keys_b, batch, seqlen_q, t_first, t_last, offs_b, TILE_N
        )
        b, part, parts_here = part_of_batch(parts_b, offs_b, batch, part)
        if b >= batch:
            return
    keys = seqlen_k
    if seqlen_new is not None:
        length = grown(lens_ptr, growth, b, True, seqlen_new, capacity)
        keys = length.keys
    elif lens_ptr is not None:
        keys = tl.load(lens_ptr + b)
    if row.sink_tokens_ptr is not None:
        bounds = Bounds(left, right, load_sink_tokens(row.sink_tokens_ptr, b), chunk)
    first_pos = keys - seqlen_q
    tiles, near, skip = visited_tiles(bounds, first_pos + t_first, first_pos + t_last, keys, TILE_N)
    if share.programs is None:
        per = sequence_share(share, tiles)
    else:
        per = sequence_share(Share(parts_here, None, None), tiles)
    num_parts = parts_of(tiles, per)

    # the rows  [TILE_M]
    offs_m = tl.arange(0, TILE_M)
    rows = tile_m * TILE_M + offs_m
    row_ok = rows < seqlen_q * GROUP
    slot_rows = slot.to(tl.int64) * tl.minimum(TILE_M, seqlen_q * GROUP) + offs_m
    if part >= num_parts:
        if partial is not None:
            write_absent(partial.m_ptr, partial.l_ptr, slot_rows, row_ok, 0.0)
        return
    t = rows // GROUP
    head = h * GROUP + rows % GROUP
    pos = (first_pos + t)[:, None]
    offs_d = tl.arange(0, DIM)
    offs_v = tl.arange(0, DIM_V)
    slope = None
    if row.slope_ptr is not None:
        slope = tl.load(row.slope_ptr + b * stride_slope + head, mask=row_ok, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    q_of_sequence = q_ptr + b.to(tl.int64) * q_strides.b
    q_rows = q_of_sequence + t.to(tl.int64) * q_strides.t + head.to(tl.int64) * q_strides.h
    dtype: tl.constexpr = working_type(q_ptr.dtype.element_ty)
    if ROTARY_DIM > 0:
        angle = start_of(turn, length.before, b, True) + q_step * t
        q = rotated(
            q_rows,
            row_ok,
            angle,
            offs_d,
            turn,
            AngleTable(rotary_rows, stride_cos, stride_sin),
            DIM=HEAD_DIM,
            ROTARY_DIM=ROTARY_DIM,
            PAIR=PAIR,
        )
    else:
        q_ok = row_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
        q = tl.load(q_rows[:, None] + offs_d[None, :], mask=q_ok, other=0.0)
    q = widen(q, dtype)
    k_scale, v_scale = scale_of_head(head_scales, b, h, stride_sb, stride_sh)
    scale *= k_scale * row_scale(row, b, t, head, row_ok, stride_qsb, stride_qst, stride_qsh)

    k_head = kv.k_ptr + h.to(tl.int64) * k_strides.h
    v_head = kv.v_ptr + h.to(tl.int64) * v_strides.h
    table = None
    if kv.table_ptr is not None:
        table = kv.table_ptr + b.to(tl.int64) * stride_table
    first = part * per
    last = tl.minimum(first + per, tiles)
    own_tiles = Tiles(first, last, 1, near, skip)
    if seqlen_new is not None:
        of_scales = Strides(new_scale_strides.b, None, new_scale_strides.h)
        strides = NewStrides(new_k_strides, k_strides, new_v_strides, v_strides, of_scales)
        is_first = (part == 0) & (tile_m == 0)
        shown = seen_tiles(bounds, keys, seqlen_q, is_first, TILE_N)
        angles = AngleTable(rotary_rows, stride_cos, stride_sin)
        tokens = NewTokens(new, turn, growth, length, shown, strides, angles, capacity, slabs)
        if has_new(tokens, own_tiles, TILE_N):
            write_new(
                tokens,
                NewHead(b, h, table),
                own_tiles,
                TokenOffsets(tl.arange(0, TILE_T), offs_d, offs_v),
                HEAD_DIM=HEAD_DIM,
                HEAD_DIM_V=HEAD_DIM_V,
                PAGE_SIZE=PAGE_SIZE,
                TILE_N=TILE_N,
                ROTARY_DIM=ROTARY_DIM,
                PAIR=PAIR,
            )
            tl.debug_barrier()  # all warps have written before one reads
    scale_strides = Strides(stride_sb, stride_sn, stride_sh)
    of_head = CachedHead(
        k_head, v_head, table, b, h, k_strides, v_strides, key_scales, scale_strides
    )
    m, l, acc = attend_split(
        q,
        of_head,
        ScoredRows(bounds, pos, keys, scale, softcap, slope),
        own_tiles,
        HEAD_DIM=HEAD_DIM,
        HEAD_DIM_V=HEAD_DIM_V,
        DIM_V=DIM_V,
        PAGE_SIZE=PAGE_SIZE,
        TILE_N=TILE_N,
        STAGES=STAGES,
    )
    if head_scales is not None:
        v_scale = tl.where(keys > 0, v_scale, 1.0)  # that of no keys may be anything
    acc *= v_scale

    out_of_sequence = b.to(tl.int64) * out_strides.b
    out_of_token = out_of_sequence + t.to(tl.int64) * out_strides.t
    rows = PartRows(
        head=head,
        ok=row_ok,
        out_rows=out_of_token + head.to(tl.int64) * out_strides.h,
        lse_rows=(b * num_kv_heads * GROUP + head).to(tl.int64) * seqlen_q + t,
        slot_rows=slot_rows,
    )
    write_part(final, partial, row.sink_ptr, acc, m, l, rows, offs_v, num_parts, HEAD_DIM_V)


def bind_split(plan: Plan, operands: Operands) -> SplitKernel:
    """`decode_split` bound to one plan and one memory layout."""
    problem, config = plan.problem, plan.config
    new, tokens = NO_NEW_TOKENS, TokenTiles()
    per_call = PER_CALL_OF_APPEND if config.appends else PER_CALL
    if config.appends:
        new, tokens = fixed_arguments(operands), token_tiles(operands)
    dim, dim_v = padded_dims(problem, plan.device, config.tile_m, config.num_warps)
    early = dependent_launches(plan, operands) and partial_rows(plan) > 0
    fixed = split_arguments(plan, operands) | {
        name: value for name, value in new.items() if name not in per_call
    }
    fixed |= {
        **dict(zip(BOUNDS, problem.mask.bounds, strict=True)),
        "k_strides": Strides(*operands.k.stride()[:3]),
        "v_strides": Strides(*operands.v.stride()[:3]),
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "DIM": dim,
        "DIM_V": dim_v,
        "PAGE_SIZE": problem.place.page_size if isinstance(problem.place, Paged) else 1,
        "BATCH_P2": batch_p2(plan),
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        # an indirect load takes Triton's pipeline two stages a tile in flight
        "STAGES": (1 if operands.page_table is None else 2) * config.num_stages + 1,
        "ROTARY_DIM": tokens.rotary_dim,
        "PAIR": tokens.pair,
        "TILE_T": tokens.tile_t,
        "DEPENDENTS": "early" if early else "in_order",
    }
    programs, options = grid(problem, config), compile_options(config.num_warps)
    tail = cache(partial(CacheTail, decode_split, per_call, fixed))  # when it is asked for

    def launch(arguments: dict[str, Any]) -> Any:
        return decode_split[programs](*in_order(decode_split, arguments | fixed), **options)

    def relaunch(compiled: Any) -> Launch:
        return launch_of(compiled, programs, tail().arguments)

    def at_lengths(compiled: Any) -> CacheLaunch:
        launch, around_length = launch_of(compiled, programs), tail().around_length

        def at_length(length: int, layout: Any, stream: int, *args: Any) -> None:
            before, behind = layout
            launch(stream, *args, *before, length, *behind)

        return CacheLaunch(lambda here, room: around_length(here), at_length)

    def variant() -> Hashable:
        return tail().variant(), config.num_warps, partial_rows(plan) > 0

    return SplitKernel(launch, relaunch, at_lengths, variant)


def bind(plan: Plan, operands: Operands) -> DecodeLauncher | StepLauncher:
    """The kernel and `combine`, or by a schedule of the step `decode_persistent`, bound to one plan
    and one memory layout."""
    if plan.config.schedule in SCHEDULED:
        from splitkv.kernels import decode_persistent

        return decode_persistent.bind(plan, operands)
    return DecodeLauncher(plan, operands, bind_split(plan, operands))
