"""Attention of sequences stored in 8 bits, for Hopper: on int8 and e4m3 units, or widened.

Computes, for q, k and v that are stored values times scales,

    s[r, n]  = score(scale * q_scale[r] * k_scale[n] * (q[r] . k[n]))     n in the bands of row r
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v_scale[n] * v[n] / (l + exp(sink - m))

Products of 8 bits: "half" is q . k, and v is dequantized to 16 bits; "full" is p . v too, for which
p is rounded and v stays as it is stored. "widened": none, and both are dequantized.

A program is one of `hopper_prefill`, whose splits and pages these are, with a role more: between
the load role and the mma role a warpgroup makes keys and values ready (prefill/convert.py). All
warpgroups that multiply are one role, with all rows of a row tile, and hand tiles over by barriers
of the hardware (primitives/named_barriers.py). Rows of q are rounded before their first product:
see prefill/scales.py. Steps are in prefill/mma_scaled.py; warpgroups take turns at issuing products
where int8 keys have scales of their own.

The start and the end count most where rows are few. Programs that know their item by their place in
the grid issue its first copies before warps have their roles, and one that has a single item goes
through no loop of items (prefill/mma_one_item.py).

Shapes      those of kernels/prefill.py, out in the working type; q_scale one number, [num_heads] or
            one a token and head; k_scale and v_scale one number, [(batch,) num_kv_heads] or one a
            token and head
Grid        that of kernels/hopper/prefill/kernel.py; where a sequence and its packed heads have one
            row tile: splits x packed heads x sequences, of which a program may take several in
            turn. Two splits may be a cluster, which merges them: prefill/cluster_merge.py
Traffic     that of kernels/prefill.py, one byte an element of k and v, and the scales
Numerics    sums of int8 products in int32, scores and sums of weights in fp32, base-2 exponentials.
            widened: q, keys and p in fp16, which holds stored numbers exactly, with a power of two
            taken out of each row of q. half: p is rounded to fp16. Where v_scale is one a token,
            widened v * v_scale is rounded to fp16 too, relative to its tile. full: p is rounded to
            e4m3 up to 448 or, relative to its row's maximum in the tile of keys, to int8 up to 127,
            with v_scale where that is one a token: see prefill/mma_scaled.py. The tensor cores
            keep some 14 bits of sums of e4m3 products: those of p . v are added up tile by tile in
            fp32 outside them, and those of q . k leave an lse up to 5e-3 off, so there is none
Limits      sm_90; bf16 or fp16; int8 or e4m3; no lse of e4m3 with products half or full; head_dim
            and head_dim_v equal and 64 or 128; pages of a multiple of 16 keys; no ALiBi, no
            dropout, no gradient, no out_scale; addresses and strides that are multiples of 16 bytes
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.core import errors
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.core.tiles import ceil_div
from splitkv.core.variants import HopperPrefillQuantised
from splitkv.kernels.hopper.prefill import kernel as hopper_prefill
from splitkv.kernels.hopper.prefill.cluster_merge import PAIR, open_exchange
from splitkv.kernels.hopper.prefill.convert import ready_pieces, stored_pieces
from splitkv.kernels.hopper.prefill.epilogue import announce_program, merge_splits
from splitkv.kernels.hopper.prefill.items import item_at_grid
from splitkv.kernels.hopper.prefill.kernel import item_tilings_of
from splitkv.kernels.hopper.prefill.launch import (
    BoundKernel,
    Box,
    HopperLauncher,
    ItemTiling,
    boxes_of_plan,
    hopper_size_arguments,
    launches_early,
    page_size,
)
from splitkv.kernels.hopper.prefill.load import ROWS, ROWS_OF_WARP, issue_first_steps
from splitkv.kernels.hopper.prefill.records import (
    ConvertRing,
    ConvertRings,
    InKernelMerge,
    KeySource,
    Loads,
    OperandScales,
    PerOperand,
    PipelineBarriers,
    PrefillProgram,
    QuantisedConfig,
    Results,
    SequenceBatch,
    Splitting,
)
from splitkv.kernels.hopper.prefill.specialize import specialize_convert
from splitkv.kernels.hopper.primitives.conversion import PART
from splitkv.kernels.hopper.primitives.named_barriers import FIRST, PHASES, READY, NamedBarriers
from splitkv.kernels.hopper.primitives.tma_ring import allocate_wgmma_tiles, make_barriers
from splitkv.kernels.host.launch import Grid
from splitkv.kernels.host.sequences import sequence_splits
from splitkv.kernels.limits.hopper_prefill import packed_heads
from splitkv.kernels.limits.hopper_prefill_quantised import (
    pair_exchange_bytes,
    programs_across,
    refit,
    types,
)
from splitkv.kernels.limits.scale_layout import scale_strides
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring

TYPES = {"int8": gl.int8, "fp8": gl.float8e4nv, "float16": gl.float16, "bfloat16": gl.bfloat16}
MOST_ALONG_AN_AXIS = 65535  # programs, of an axis of a grid that is not its first
SIZES = [  # arguments whose values are no reason to compile again
    *hopper_prefill.SIZES,
    *(f"stride_{name}s_{axis}" for name in "qkv" for axis in "bth"),
]


@gluon.jit
def allocate_columns(DTYPE: gl.constexpr, STAGES: gl.constexpr, TILE_N: gl.constexpr):
    """Allocates a number a key [STAGES, TILE_N]."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(DTYPE, [STAGES, TILE_N], layout)


@gluon.jit
def allocate_ready(stored, DTYPE: gl.constexpr):
    """Shared memory for tiles of `stored` widened to DTYPE, or by column: with DTYPE as it is."""
    TILE_N: gl.constexpr = stored.shape[1]
    DIM: gl.constexpr = stored.shape[2]
    if stored.dtype == DTYPE:
        narrow: gl.constexpr = gl.NVMMASharedLayout(32, 8, rank=2)
        ready = gl.allocate_shared_memory(DTYPE, [READY, DIM, TILE_N], narrow)
    else:
        broad: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        ready = gl.allocate_shared_memory(DTYPE, [READY, TILE_N, DIM], broad)
    return ready


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill_quantised(
    q_desc,  # what is not said here is that of hopper_prefill; of 8 or 16 bits
    q_rest_desc,  # None, as k_rest_desc
    k_desc,
    k_rest_desc,
    v_desc,
    out_desc,
    final,
    partial,
    count_ptr,
    lengths,
    sink_ptr,
    scale_ptrs,  # ScalePointers; that of q None: q has none
    scale,
    softcap,
    left,
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    total_q,
    lane_heads,
    stride_lse_b,
    stride_lse_h,
    stride_table,
    tiles,
    lanes,
    width,
    items,
    num_splits,
    split_tiles,
    max_tokens,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_qs_b,  # of scales of q, 0 along what has one
    stride_qs_t,
    stride_qs_h,
    stride_ks_b,
    stride_ks_t,
    stride_ks_h,
    stride_vs_b,
    stride_vs_t,
    stride_vs_h,
    CONFIG: gl.constexpr,  # QuantisedConfig
):
    STORED: gl.constexpr = k_desc.dtype
    K_TYPE: gl.constexpr = CONFIG.k_type
    STAGES: gl.constexpr = CONFIG.num_stages
    TILE_M: gl.constexpr = CONFIG.tile_m
    TILE_N: gl.constexpr = CONFIG.tile_n
    DIM: gl.constexpr = CONFIG.head_dim_v
    by_grid = None
    if CONFIG.program_items == "by_grid":
        by_grid = 1
    work = SequenceBatch(
        cu_q_ptr=lengths.cu_q_ptr,
        keys=KeySource(
            cu_ptr=lengths.cu_k_ptr,
            lens_ptr=lengths.lens_ptr,
            table_ptr=lengths.table_ptr,
            stride_table=stride_table,
            undefined_tail=None,
            seqlen_k=seqlen_k,
        ),
        bounds=Bounds(left, right, sink_tokens),
        scoring=Scoring(scale, softcap, None, None, None),
        splitting=Splitting(num_splits, split_tiles, max_tokens),
        seqlen_q=seqlen_q,
        batch=batch,
        total_q=total_q,
        lane_heads=lane_heads,
        tiles=tiles,
        lanes=lanes,
        width=width,
        items=items,
        lazy_maxima=None,
        scarce=None,
        by_grid=by_grid,
    )
    item = None
    if by_grid is not None:  # its length arrives while barriers are set up
        item = item_at_grid(work, 0, CONFIG)
    # tiles as they arrive, rows of q as they are multiplied, rows of out
    q_boxes, q = allocate_wgmma_tiles(q_desc, CONFIG.q_stages, TILE_M, DIM)
    k_boxes, k_stored = allocate_wgmma_tiles(k_desc, STAGES, TILE_N, DIM)
    v_boxes, v_stored = allocate_wgmma_tiles(v_desc, STAGES, TILE_N, DIM)
    out_boxes, out = allocate_wgmma_tiles(out_desc, 1, TILE_M, DIM)
    unrounded_q = None
    if q_desc.dtype != K_TYPE:
        unrounded_q = q
        BITS: gl.constexpr = K_TYPE.primitive_bitwidth
        rounded: gl.constexpr = gl.NVMMASharedLayout(min(128, DIM * BITS // 8), BITS, rank=2)
        q = gl.allocate_shared_memory(K_TYPE, [1, TILE_M, DIM], rounded)
    # barriers, and tiles that are made ready
    q_full, q_empty = make_barriers(CONFIG.q_stages, 1), make_barriers(CONFIG.q_stages, 1)
    v_arrived, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 1)
    v_full = make_barriers(READY, 1)
    v = allocate_ready(v_stored, CONFIG.v_type)
    KEYS: gl.constexpr = TILE_N if CONFIG.warpgroups == 1 else PART  # dequantized at a time
    v_ring = ConvertRing(
        stored=stored_pieces(v_stored, v, KEYS),
        ready=ready_pieces(v_stored, v),
        full=v_arrived,
        empty=v_empty,
        ready_full=v_full,
    )
    k_arrived = make_barriers(STAGES, 1)
    k = k_stored
    # keys that are multiplied as they are stored are given back to the load role
    THREADS: gl.constexpr = 2 * TILE_M
    K_THREADS: gl.constexpr = THREADS + (32 if STORED == K_TYPE else 128)
    V_EMPTY: gl.constexpr = FIRST + PHASES * CONFIG.warpgroups
    turns = None
    if CONFIG.mma_order == "in_turns":  # the barriers that are left
        turns = V_EMPTY + READY + STAGES
    named = NamedBarriers(
        warpgroups=CONFIG.warpgroups,
        k_empty=V_EMPTY + READY,
        k_threads=K_THREADS,
        v_empty=V_EMPTY,
        v_threads=THREADS + 128,
        turns=turns,
    )
    if STORED == K_TYPE:
        k_ring = ConvertRing(None, None, None, None, None)
        k_empty = None
        load_named = named
    else:
        k_empty = make_barriers(STAGES, 1)
        k = allocate_ready(k_stored, K_TYPE)
        k_ring = ConvertRing(
            stored=stored_pieces(k_stored, k, KEYS),
            ready=ready_pieces(k_stored, k),
            full=k_arrived,
            empty=k_empty,
            ready_full=None,
        )
        load_named = None
    of_k = None
    of_v = None
    of_tile = None
    inverse = None
    if CONFIG.key_scales == "per_key":
        if gl.float16 == CONFIG.v_type:
            of_k = allocate_columns(gl.float32, READY + 1, TILE_N)
            of_v = allocate_columns(gl.float16, READY + 1, TILE_N)
            of_tile = allocate_columns(gl.float32, 2 * (READY + 1), 1)
        else:
            pairs: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            of_k = gl.allocate_shared_memory(gl.float32, [READY + 1, TILE_N, 2], pairs)
            inverse = allocate_columns(gl.float32, READY + 1, TILE_N)
    # what the roles are given
    maps = PerOperand(q_desc, None, k_desc, None, v_desc, out_desc)
    boxes = PerOperand(q_boxes, None, k_boxes, None, v_boxes, out_boxes)
    loads = Loads(
        batch=work,
        maps=maps,
        boxes=boxes,
        tiles=PerOperand(None, None, k_stored, None, v_stored, None),
        barriers=PipelineBarriers(
            q_full=q_full,
            q_empty=q_empty,
            k_full=k_arrived,
            k_empty=k_empty,
            v_full=v_arrived,
            v_empty=v_empty,
            mma_turns=None,
            named=load_named,
        ),
    )
    results = Results(
        out_ptr=final.out_ptr,
        lse_ptr=final.lse_ptr,
        sink_ptr=sink_ptr,
        partial=partial,
        merging=InKernelMerge(count_ptr, Strides(stride_ob, stride_ot, stride_oh)),
        stride_t=lane_heads * CONFIG.packed_heads * DIM,
        stride_lse_b=stride_lse_b,
        stride_lse_h=stride_lse_h,
    )
    scales = OperandScales(
        q_ptr=scale_ptrs.q_ptr,
        k_ptr=scale_ptrs.k_ptr,
        v_ptr=scale_ptrs.v_ptr,
        q=Strides(stride_qs_b, stride_qs_t, stride_qs_h),
        k=Strides(stride_ks_b, stride_ks_t, stride_ks_h),
        v=Strides(stride_vs_b, stride_vs_t, stride_vs_h),
        of_k=of_k,
        of_v=of_v,
        of_tile=of_tile,
        inverse=inverse,
        unrounded_q=unrounded_q,
    )
    program = PrefillProgram(
        batch=work,
        maps=maps,
        boxes=boxes,
        tiles=PerOperand(q, None, k, None, v, out),
        scales=scales,
        barriers=PipelineBarriers(q_full, q_empty, None, None, v_full, None, None, named),
        results=results,
    )
    announce_program(results)
    if CONFIG.issued_first > 0:
        issue_first_steps(loads, item, CONFIG)
    open_exchange(CONFIG)
    specialize_convert(program, ConvertRings(k_arrived, k_ring, v_ring), loads, CONFIG)
    if count_ptr is not None:
        merge_splits(work, results, CONFIG)


def grid_of_places(plan: Plan, batch: int) -> tuple[tuple[int, int, int], int | None]:
    """(grid by split, lane of a sequence and sequence, how many of so many sequences a program goes
    through; None: one)."""
    problem, config = plan.problem, plan.config
    across = programs_across(problem, config)
    cluster = config.merge == "cluster"
    programs = 0 if cluster else config.programs
    at_once = min(batch, programs // across if programs else MOST_ALONG_AN_AXIS)
    rounds = ceil_div(batch, at_once)
    assert not cluster or config.num_splits == PAIR.value, "a cluster is a pair"
    if cluster:
        one = f"'combine' or 'last' beside more than {MOST_ALONG_AN_AXIS} sequences"
        errors.expect(rounds == 1, "plan.config.merge", one, config.merge)
    lanes = problem.num_heads // packed_heads(problem, config)
    splits = 1 if cluster else config.num_splits
    return (splits, lanes, ceil_div(batch, rounds)), None if rounds == 1 else rounds


def scale_arguments(operands: Operands) -> dict[str, int]:
    """The strides of scales, by name."""
    x, strides = operands, {}
    for name, scale, tensor in (
        ("q", x.q_scale, x.q),
        ("k", x.k_scale, x.k),
        ("v", x.v_scale, x.v),
    ):
        for axis, step in zip("bth", scale_strides(scale, tensor), strict=True):
            strides[f"stride_{name}s_{axis}"] = step
    return strides


def bind(plan: Plan, operands: Operands) -> HopperLauncher:
    """`hopper_prefill_quantised` and `combine` bound to one plan and one memory layout."""
    problem, config, variant = plan.problem, plan.config, plan.config.variant
    assert isinstance(variant, HopperPrefillQuantised), f"expected a variant, got {plan}"
    pack, splits = packed_heads(problem, config), sequence_splits(plan)
    by_grid = variant.items == "by_grid"
    cluster = config.merge == "cluster"
    assert by_grid or not cluster, "a cluster has the splits of one row tile"
    tiling = item_tilings_of(plan, problem.kv_bytes)

    def on_grid(seqlen_q: int, total_q: int, batch: int) -> tuple[Grid, ItemTiling]:
        tiled = tiling(seqlen_q, total_q, batch)
        places = grid_of_places(plan, batch) if by_grid else None
        if places is None:
            programs = min(tiled[3], config.programs or tiled[3])
            return (programs, 1, 1), tiled
        grid, rounds = places
        return grid, (*tiled[:3], rounds)

    num_warps = config.tile_m // ROWS_OF_WARP.value
    merge_step, merge_rows = splits.merge_step(num_warps)
    cluster_size = PAIR.value if cluster else 0
    found = types(problem)
    compiled = QuantisedConfig(
        group=problem.group,
        packed_heads=pack,
        page_size=page_size(problem),
        head_dim_v=problem.head_dim_v,
        columns=problem.head_dim_v,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        mma_roles=1,
        warpgroups=config.tile_m // ROWS.value,
        num_stages=config.num_stages,
        q_stages=variant.q_stages,
        mma_order=variant.mma_order,
        key_scales="per_key" if problem.codec.granularity == "token" else "shared",
        k_type=TYPES[found.k],
        v_type=TYPES[found.v],
        program_items=variant.items,
        issued_first=variant.issued_first,
        cluster_size=cluster_size,
        cluster_rows=min(config.tile_m, problem.seqlen_q * pack) if cluster_size else 0,
        merge_splits=merge_step,
        merge_rows=merge_rows,
        dependents="launched_last" if launches_early(splits, operands) else "launched_after",
    )
    fixed = hopper_size_arguments(plan, operands, splits, pack)
    fixed |= {**scale_arguments(operands), "CONFIG": compiled}
    rows = Box(config.tile_m // pack, pack, problem.head_dim_v)
    bound = BoundKernel(
        kernel=lambda: hopper_prefill_quantised,
        tiling=on_grid,
        fixed=fixed,
        num_warps=num_warps,
        boxes=boxes_of_plan(plan, operands, rows, rows),
        splits=splits,
        cluster_size=cluster_size,
        exchange_bytes=pair_exchange_bytes(problem.head_dim_v) if cluster_size else 0,
    )
    return HopperLauncher(plan, operands, bound, refit)
