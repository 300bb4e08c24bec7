"""Persistent decode attention by a schedule of the step, for any NVIDIA GPU.

Computes what kernels/decode_split.py computes. A program has a share of the tiles of the whole
batch, which a schedule (kernels/schedule.py) says or the program finds by itself, and goes on with
the next head tile or sequence where the last one ends: lengths may differ as they like, every
program has as much to do. Head tiles that one program has all keys of are finished here; of others
the programs store partials, which `combine_slots` merges.

Where the call appends, a program writes the new tokens that lie in its tiles before it reads those:
as kernels/decode_split.py. Lengths are then those before, also where a schedule is given, which is
of those after.

Shapes      as kernels/decode_split.py; starts [programs, 8] int32; partials
            [2 * groups * programs, rows, head_dim_v + 2] fp32
Grid        (groups, programs): by `ranges` one group, whose shares go through all head tiles; else
            a group for each, side by side
Traffic     keys, values as kernels/decode_split.py; partials at most two a program, of splits that
            are not all keys of a head tile
Numerics    as kernels/decode_split.py; the same lengths give the same bits
Limits      as kernels/decode_split.py; lengths on the device; head tiles * tiles of the batch below
            2^31; as many sink tokens for every sequence
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from splitkv.core.kv import Paged
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.kernels.combine import ResultRows, mask_of_columns, write_final, write_partial
from splitkv.kernels.host.append_arguments import TokenTiles, token_tiles
from splitkv.kernels.host.arguments import in_order, tail_in_order
from splitkv.kernels.host.launch import launch_of
from splitkv.kernels.host.launcher import (
    BOUNDS,
    SplitKernel,
    compile_options,
    dependent_launches,
)
from splitkv.kernels.host.partition import padded_dims
from splitkv.kernels.host.step import (
    StepLauncher,
    grid_of,
    launched_early,
    per_call_of,
    step_arguments,
)
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.codec import row_scale, scale_of_head, widen, working_type
from splitkv.kernels.tile.decode_sizes import SIZES
from splitkv.kernels.tile.new import (
    AngleTable,
    NewHead,
    NewStrides,
    NewTokens,
    TokenOffsets,
    grown,
    has_new,
    rotated,
    seen_tiles,
    start_of,
    write_new,
)
from splitkv.kernels.tile.split import CachedHead, ScoredRows, attend_split
from splitkv.kernels.tile.step_share import RULES, SEQUENCES, share_of
from splitkv.kernels.tile.visit import Strides, load_tile, place, rows_of
from splitkv.kernels.tile.walk import (
    DecodeStep,
    first_walk,
    head_tile_of_share,
    next_split,
    slot_of_split,
    split_length,
    tiles_of_split,
)


@triton.jit(do_not_specialize=SIZES)
def decode_persistent(
    q_ptr,  # [batch, seqlen_q, num_heads, HEAD_DIM]
    kv,  # KV
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
    chunk,
    head_tiles,  # that a share goes through, or None: one
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
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    RULE: tl.constexpr,  # ShareRule
    SPLIT_TILES: tl.constexpr,  # of a DecodeStep
    ROTARY_DIM: tl.constexpr,
    PAIR: tl.constexpr,
    TILE_T: tl.constexpr,  # new tokens that are written at once
    DEPENDENTS: tl.constexpr,  # early: grids are launched before the one before has ended; in_order
):
    if DEPENDENTS == "early":
        tl.extra.cuda.gdc_wait()  # for the schedule, and all before it
        tl.extra.cuda.gdc_launch_dependents()  # combine, which reads the schedule at once
    bounds = Bounds(left, right, sink_tokens, chunk)
    scale_strides = Strides(stride_sb, stride_sn, stride_sh)
    dtype: tl.constexpr = working_type(q_ptr.dtype.element_ty)
    group = tl.program_id(0)
    program = tl.program_id(1)
    row_tiles = (seqlen_q * GROUP + TILE_M - 1) // TILE_M
    rows_of_slot = tl.minimum(TILE_M, seqlen_q * GROUP)
    offs_d = tl.arange(0, DIM)
    offs_v = tl.arange(0, DIM_V)
    added = growth, seqlen_new, capacity
    sizes = seqlen_q, batch, head_tiles, programs
    step = DecodeStep(lens_ptr, bounds, *sizes, SPLIT_TILES, *added)
    start = share_of(starts_ptr, step, program, tl.arange(0, SEQUENCES), RULE.find, TILE_N)
    walk = first_walk(start)
    while walk.left > 0:
        b = walk.sequence
        keys = walk.keys
        head_tile = head_tile_of_share(step, group, walk.head_tile)
        h = head_tile // row_tiles
        first_pos = keys - seqlen_q

        # the rows  [TILE_M]
        rows = rows_of(head_tile % row_tiles, h, seqlen_q, GROUP, TILE_M)
        slope = None
        if row.slope_ptr is not None:
            slope = tl.load(row.slope_ptr + b * stride_slope + rows.head, mask=rows.ok, other=0.0)
            slope = slope.to(tl.float32)[:, None]
        q_rows = place(q_ptr, q_strides, b, rows.token, rows.head)
        if ROTARY_DIM > 0:
            length = grown(lens_ptr, growth, b, True, seqlen_new, capacity)
            angle = start_of(turn, length.before, b, True) + q_step * rows.token
            angles = AngleTable(rotary_rows, stride_cos, stride_sin)
            q = rotated(q_rows, rows.ok, angle, offs_d, turn, angles, HEAD_DIM, ROTARY_DIM, PAIR)
        else:
            q = load_tile(q_rows, rows.ok, HEAD_DIM, DIM)
        q = widen(q, dtype)
        k_scale, v_scale = scale_of_head(head_scales, b, h, stride_sb, stride_sh)
        of_rows = row_scale(
            row, b, rows.token, rows.head, rows.ok, stride_qsb, stride_qst, stride_qsh
        )
        pos = (first_pos + rows.token)[:, None]

        table = None
        if kv.table_ptr is not None:
            table = kv.table_ptr + b.to(tl.int64) * stride_table
        of_head = CachedHead(
            kv.k_ptr + h.to(tl.int64) * k_strides.h,
            kv.v_ptr + h.to(tl.int64) * v_strides.h,
            table,
            b,
            h,
            k_strides,
            v_strides,
            key_scales,
            scale_strides,
        )
        scored = ScoredRows(bounds, pos, keys, scale * k_scale * of_rows, softcap, slope)
        own_tiles = tiles_of_split(walk, bounds, seqlen_q, TILE_N)
        if seqlen_new is not None:
            length = grown(lens_ptr, growth, b, True, seqlen_new, capacity)
            of_scales = Strides(new_scale_strides.b, None, new_scale_strides.h)
            strides = NewStrides(new_k_strides, k_strides, new_v_strides, v_strides, of_scales)
            is_first = (walk.tile == 0) & (head_tile % row_tiles == 0)
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
        m, l, acc = attend_split(
            q,
            of_head,
            scored,
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

        out_ok = mask_of_columns(acc, rows.ok, offs_v, HEAD_DIM_V)
        if split_length(walk) == walk.tiles:
            out_rows = place(0, out_strides, b, rows.token, rows.head)
            lse_rows = (b * num_kv_heads * GROUP + rows.head).to(tl.int64) * seqlen_q + rows.token
            places = ResultRows(out_rows, lse_rows)
            write_final(
                *(final, places, row.sink_ptr, acc, m, l, rows.head, rows.ok, offs_v, out_ok)
            )
        else:
            slot = slot_of_split(walk, program, programs, group)
            slot_rows = slot.to(tl.int64) * rows_of_slot + tl.arange(0, TILE_M)
            write_partial(partial, slot_rows, acc, m, l, rows.ok, offs_v, out_ok, HEAD_DIM_V)
        walk = next_split(walk, step, TILE_N)


def bind_split(plan: Plan, operands: Operands) -> SplitKernel:
    """`decode_persistent` bound to one plan and one memory layout."""
    problem, config = plan.problem, plan.config
    dim, dim_v = padded_dims(problem, plan.device, config.tile_m, config.num_warps)
    tokens = token_tiles(operands) if config.appends else TokenTiles()
    fixed = step_arguments(plan, operands) | {
        **dict(zip(BOUNDS, problem.mask.bounds, strict=True)),
        "k_strides": Strides(*operands.k.stride()[:3]),
        "v_strides": Strides(*operands.v.stride()[:3]),
        "GROUP": problem.group,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "DIM": dim,
        "DIM_V": dim_v,
        "PAGE_SIZE": problem.place.page_size if isinstance(problem.place, Paged) else 1,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        # an indirect load takes Triton's pipeline two stages a tile in flight
        "STAGES": (1 if operands.page_table is None else 2) * config.num_stages + 1,
        "RULE": RULES[config.schedule],
        "SPLIT_TILES": config.split_tiles,
        "ROTARY_DIM": tokens.rotary_dim,
        "PAIR": tokens.pair,
        "TILE_T": tokens.tile_t,
        "DEPENDENTS": "early" if dependent_launches(plan, operands) else "in_order",
    }
    programs = grid_of(plan)
    options = compile_options(config.num_warps) | launched_early(plan, operands)
    tail = tail_in_order(decode_persistent, per_call_of(plan), fixed)

    def launch(arguments: dict[str, Any]) -> Any:
        return decode_persistent[programs](
            *in_order(decode_persistent, arguments | fixed), **options
        )

    return SplitKernel(launch, lambda compiled: launch_of(compiled, programs, tail))


def bind(plan: Plan, operands: Operands) -> StepLauncher:
    """The kernel and `combine_slots` bound to one plan and one memory layout."""
    return StepLauncher(plan, operands, bind_split(plan, operands))
