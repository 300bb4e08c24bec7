"""Attention of whole sequences for Hopper: tiles by TMA, products by warpgroups that take turns.

Computes what kernels/prefill.py computes, without ALiBi and dropout, and shares its backward and,
for the splits of few queries' keys, its partials and their merge:

    s[r, n]  = score(scale * q[r] . k[n])          n in the bands of row r, the visible keys
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v[n] / (l + exp(sink - m))

A program has a load role, one warp that issues copies (prefill/load.py), and one to three mma
roles, warpgroups that multiply 64 rows of a row tile each (prefill/mma.py) and store them
(prefill/epilogue.py); prefill/items.py says which rows. The tiles of keys in which a row may see a
part come first and ask the mask, the others ask nothing. A program goes on to its next row tile by
itself, so that the first tiles of that arrive while the results of the one before leave.

What roles do with each other is in kernels/hopper/README.md, and the order in which to read them.

Shapes      those of kernels/prefill.py. Rows are query tokens of one head, or with `pack_gqa` of as
            many heads of a group as a power of two divides it by: row = token * heads + head
Grid        one axis: `programs` programs that go through the row tiles forth and back, or one each.
            A lane is a sequence and the packed heads; so many lanes that their keys and values fit
            into the L2 go together. After all row tiles the further splits of their keys
Traffic     that of kernels/prefill.py
Numerics    scores and sums in fp32, base-2 exponentials; p is rounded to the value type before p @
            v and may be up to 2 ** 15.5, which fp16 has, as m follows a maximum only where it grew
            by more. Of head_dim 128 no maximum is looked for until a weight is too large, and what
            that gives is the same: see `grown`. Behind the last key of a sequence values are
            cleared before they are multiplied with zeros, as what is there may be NaN or infinite
Limits      sm_90; bf16 or fp16; head_dim and head_dim_v multiples of 8 whose tiles are as wide, 64,
            128 or 256, or 192 and 128; pages of a multiple of 16 keys; no ALiBi, no dropout, no
            out_scale, no ranges of keys; addresses and strides that are multiples of 16 bytes;
            otherwise those of kernels/prefill.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.core.tiles import ceil_div
from splitkv.core.variants import HopperPrefill
from splitkv.kernels.hopper.prefill.epilogue import announce_program, merge_splits
from splitkv.kernels.hopper.prefill.launch import (
    PANEL_BYTES,
    BoundKernel,
    Box,
    HopperLauncher,
    ItemTiling,
    boxes_of_plan,
    hopper_size_arguments,
    launches_early,
    page_size,
)
from splitkv.kernels.hopper.prefill.load import ROWS, ROWS_OF_WARP
from splitkv.kernels.hopper.prefill.records import (
    InKernelMerge,
    KeySource,
    OperandScales,
    PerOperand,
    PipelineBarriers,
    PrefillConfig,
    PrefillProgram,
    Results,
    SequenceBatch,
    Splitting,
)
from splitkv.kernels.hopper.prefill.shared_memory import (
    allocate_operands,
    init_barriers,
    undefined_tail,
)
from splitkv.kernels.hopper.prefill.specialize import specialize_warpgroups
from splitkv.kernels.hopper.primitives.tma_ring import allocate_wgmma_tiles
from splitkv.kernels.host.launch import Grid
from splitkv.kernels.host.sequences import scheduled_splits, sequence_splits
from splitkv.kernels.limits.hopper_prefill import packed_heads, refit
from splitkv.kernels.limits.hopper_prefill_tiles import tile_dims
from splitkv.kernels.schedule_items import ItemSchedule, rule_of
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring

# Of results half as wide where registers are scarce: a thread then stores at two addresses and at
# multiples behind them, not at four, and they are in registers all along.
OUT_PANEL_BYTES = 64

SIZES = [  # arguments whose values are no reason to compile again
    *("left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch", "total_q", "lane_heads"),
    *("stride_lse_b", "stride_lse_h", "stride_table", "tiles", "lanes", "width", "items"),
    *("num_splits", "split_tiles", "max_tokens", "stride_ob", "stride_ot", "stride_oh"),
]


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill(
    q_desc,  # [batch, seqlen_q, num_heads, HEAD_DIM], boxes of 64 rows; packed: [1, total_q, ..]
    q_rest_desc,  # its columns from head_dim_v on, or None
    k_desc,  # boxes of keys of one head, as v_desc: a tile, or of one page 64 columns
    k_rest_desc,
    v_desc,
    out_desc,
    final,  # Final
    partial,  # Partial, or None: one split
    count_ptr,  # see tile/merge.py; None: `combine` merges
    lengths,  # Lengths
    sink_ptr,  # [num_heads], or None
    scale_ptrs,  # ScalePointers of None: keys and values are as they are
    scale,  # see tile/score.py
    softcap,  # float or None
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    total_q,
    lane_heads,  # heads of q that are not packed into rows
    stride_lse_b,
    stride_lse_h,
    stride_table,
    tiles,  # row tiles of a lane
    lanes,
    width,  # lanes that go together
    items,  # row tiles, and the further splits of their keys
    num_splits,  # most splits of a row tile's keys, or None: one
    split_tiles,  # tiles of keys a split; None: those of a row tile over num_splits
    max_tokens,  # tokens of the longest sequences whose keys are split
    stride_ob,
    stride_ot,
    stride_oh,
    CONFIG: gl.constexpr,  # PrefillConfig
):
    if CONFIG.dependents == "launched_first":  # combine waits for this grid before it reads
        tl.extra.cuda.gdc_launch_dependents()
    if lengths.items_ptr is not None:  # the schedule is made by the grid before
        tl.extra.cuda.gdc_wait()
    maps = PerOperand(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc)
    memory = allocate_operands(maps, CONFIG)
    q_rest_boxes = None
    q_rest = None
    k_rest_boxes = None
    k_rest = None
    if q_rest_desc is not None:
        REST: gl.constexpr = CONFIG.head_dim_rest
        Q_TILES: gl.constexpr = CONFIG.q_stages * CONFIG.mma_roles
        q_rest_boxes, q_rest = allocate_wgmma_tiles(q_rest_desc, Q_TILES, ROWS, REST)
        k_rest_boxes, k_rest = allocate_wgmma_tiles(
            k_rest_desc, CONFIG.num_stages, CONFIG.tile_n, REST
        )
    out_boxes = None
    out = None
    if CONFIG.out_stages > 0:
        out_boxes, out = allocate_wgmma_tiles(out_desc, CONFIG.out_stages, ROWS, CONFIG.head_dim_v)
    mma_turns = None
    if CONFIG.mma_order == "in_turns":
        mma_turns = CONFIG.mma_roles
    rings = init_barriers(CONFIG)
    lazy_maxima = None
    if CONFIG.maxima == "lazy":
        lazy_maxima = CONFIG.mma_roles
    work = SequenceBatch(
        cu_q_ptr=lengths.cu_q_ptr,
        keys=KeySource(
            cu_ptr=lengths.cu_k_ptr,
            lens_ptr=lengths.lens_ptr,
            table_ptr=lengths.table_ptr,
            stride_table=stride_table,
            undefined_tail=undefined_tail(lengths),
            seqlen_k=seqlen_k,
        ),
        bounds=Bounds(left, right, sink_tokens),
        scoring=Scoring(scale, softcap, None, None, None),
        splitting=Splitting(num_splits, split_tiles, max_tokens, lengths.items_ptr),
        seqlen_q=seqlen_q,
        batch=batch,
        total_q=total_q,
        lane_heads=lane_heads,
        tiles=tiles,
        lanes=lanes,
        width=width,
        items=items,
        lazy_maxima=lazy_maxima,
        scarce=lazy_maxima,
    )
    results = Results(
        out_ptr=final.out_ptr,
        lse_ptr=final.lse_ptr,
        sink_ptr=sink_ptr,
        partial=partial,
        merging=InKernelMerge(count_ptr, Strides(stride_ob, stride_ot, stride_oh)),
        stride_t=lane_heads * CONFIG.packed_heads * CONFIG.columns,
        stride_lse_b=stride_lse_b,
        stride_lse_h=stride_lse_h,
    )
    none = Strides(None, None, None)
    scales = OperandScales(None, None, None, none, none, none, None, None, None, None, None)
    program = PrefillProgram(
        batch=work,
        maps=maps,
        boxes=PerOperand(
            q=memory.q_boxes,
            q_rest=q_rest_boxes,
            k=memory.k_boxes,
            k_rest=k_rest_boxes,
            v=memory.v_boxes,
            out=out_boxes,
        ),
        tiles=PerOperand(memory.q, q_rest, memory.k, k_rest, memory.v, out),
        scales=scales,
        barriers=PipelineBarriers(
            q_full=rings.q_full,
            q_empty=rings.q_empty,
            k_full=rings.k_full,
            k_empty=rings.k_empty,
            v_full=rings.v_full,
            v_empty=rings.v_empty,
            mma_turns=mma_turns,
            named=None,
        ),
        results=results,
    )
    announce_program(results)
    specialize_warpgroups(program, CONFIG)
    if count_ptr is not None:
        merge_splits(work, results, CONFIG)


def item_tilings_of(plan: Plan, kv_bytes: int) -> Callable[[int, int, int], ItemTiling]:
    """Gives what computes the ItemTiling of a plan: tiling(seqlen_q, total_q, batch).

    Lanes go together, as many as have their keys and values in half of the L2, which is in two
    halves that hold the same.

    kv_bytes   of the plan's keys and values as they are multiplied
    """
    problem, config = plan.problem, plan.config
    pack, tile_m = packed_heads(problem, config), config.tile_m
    heads, lanes_of_group = problem.num_heads // pack, problem.group // pack
    lanes, packed = (heads, True) if problem.kind == "varlen" else (problem.batch * heads, False)
    width = lanes
    if not packed:
        room = plan.device.l2_bytes // 2 * problem.batch * problem.num_kv_heads
        width = max(1, min(room // max(kv_bytes, 1) * lanes_of_group, lanes))
    further_splits, cut_tokens_of = config.num_splits - 1, problem.cut_tokens_of

    def tiling(seqlen_q: int, total_q: int, batch: int) -> ItemTiling:
        if packed:
            tiles = total_q * pack // tile_m + batch + 1
        else:
            tiles = -(-seqlen_q * pack // tile_m)
        items = tiles * lanes
        if further_splits:  # of the row tiles whose keys are split
            row_tiles = ceil_div(cut_tokens_of(seqlen_q) * pack, tile_m)
            items += further_splits * row_tiles * batch * heads
        tiled = tiles, lanes, width, items
        return tiled

    return tiling


def bind_warpgroups(
    plan: Plan,
    operands: Operands,
    kernel: Callable[[], Any],
    kv_bytes: int,
    *,
    more: dict[str, Any] | None = None,
    ordered_values: bool = False,
) -> BoundKernel:
    """Binds `hopper_prefill`, or `hopper_prefill_half`, which takes `more` arguments.

    kv_bytes         of keys and values as they are multiplied
    ordered_values   V is in order, where K is in pages
    """
    problem, config, variant = plan.problem, plan.config, plan.config.variant
    assert isinstance(variant, HopperPrefill), f"expected a variant, got {plan}"
    pack, splits = packed_heads(problem, config), sequence_splits(plan)
    schedule, tiling = None, item_tilings_of(plan, kv_bytes)
    if config.schedule == "items":
        schedule = ItemSchedule(plan, rule_of(plan, pack, ROWS.value), operands.q.is_cuda)
        splits = scheduled_splits(problem, schedule.rule)

    most = config.programs

    def on_grid(seqlen_q: int, total_q: int, batch: int) -> tuple[Grid, ItemTiling]:
        if schedule is None:
            tiled = tiling(seqlen_q, total_q, batch)
        else:
            entries, lanes = schedule.entries_of(total_q, batch), schedule.rule.lanes
            tiled = entries, lanes, lanes, entries * lanes
        items = tiled[3]
        return (most if most and most < items else items, 1, 1), tiled

    head_dim, head_dim_v = tile_dims(problem)
    num_warps = ROWS.value // ROWS_OF_WARP.value
    merge_step, merge_rows = splits.merge_step(num_warps)
    own, mma_roles = variant.out == "own_tiles", config.tile_m // ROWS.value
    compiled = PrefillConfig(
        group=problem.group,
        packed_heads=pack,
        page_size=page_size(problem),
        head_dim_v=head_dim_v,
        columns=problem.head_dim_v,
        head_dim_rest=head_dim - head_dim_v,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        mma_roles=mma_roles,
        num_stages=config.num_stages,
        q_stages=variant.q_stages,
        out_stages=mma_roles if own else 0,
        mma_order=variant.mma_order,
        maxima=variant.maxima,
        issued_first=0,
        merge_splits=merge_step,
        merge_rows=merge_rows,
        dependents="launched_first" if launches_early(splits, operands) else "launched_after",
    )
    narrow = own and variant.maxima == "lazy"
    panel_bytes = OUT_PANEL_BYTES if narrow else PANEL_BYTES
    rows = Box(ROWS.value // pack, pack, head_dim_v)
    out_box = rows._replace(panel_bytes=panel_bytes)
    fixed = hopper_size_arguments(plan, operands, splits, pack)
    return BoundKernel(
        kernel=kernel,
        tiling=on_grid,
        fixed={**fixed, **(more or {}), "CONFIG": compiled},
        num_warps=num_warps,
        boxes=boxes_of_plan(plan, operands, rows, out_box, ordered_values=ordered_values),
        splits=splits,
        schedule=schedule,
    )


def bind(plan: Plan, operands: Operands) -> HopperLauncher:
    """`hopper_prefill` and `combine` bound to one plan and one memory layout."""
    bound = bind_warpgroups(plan, operands, lambda: hopper_prefill, plan.problem.kv_bytes)
    return HopperLauncher(plan, operands, bound, refit)
