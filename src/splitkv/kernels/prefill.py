"""Attention of whole sequences, for any NVIDIA GPU: the forward of prefill and of training.

Computes, for each sequence b, KV head h and the rows r = (query token, grouped head) that share it,

    s[r, n]  = score(scale * q[r] . k[n])          n in the bands of row r, the visible keys
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) kept[r, n] / (1 - dropout_p) v[n] / (l + exp(sink - m))

of keys and values as they are, or in 8 bits times scales: one that the keys of a head share joins
the softmax scale, of values the end; those of each key multiply the scores, and the weights.

Beside its bands a row sees the ranges of keys that it stands in, which are read on the device: they
widen the band (`Reach` in tile/band.py). The sink tokens of each sequence may be read there, too.

A band of keys is three ranges of tiles: only in the outer two a row may see a part of a tile. So
there are two loops, one over those tiles and the tiles of the sink tokens, which asks the mask, and
one over the tiles between, which asks nothing.

Where few queries face many keys, the tiles of a row tile are cut into parts, as in `decode_split`,
and `combine` merges them, or the programs that come last do (tile/merge.py). Beside prompts, only
those of sequences of at most `Problem.cut_tokens` tokens are: so one launch serves a batch in which
some sequences have a chunk of a prompt and others one new token.

Shapes      q [batch, seqlen_q, num_heads, head_dim]; k, v [batch, seqlen_k, num_kv_heads, dim]; out
            as q, with head_dim_v; lse [batch, num_heads, seqlen_q] fp32; scales: see core/scales.py
            varlen: [total, heads, dim], lse [num_heads, total]; tokens after the last sequence see
            no key. Paged: k, v [num_pages, page_size, num_kv_heads, dim]
            partials [batch, cut_tokens, num_kv_heads, parts, group, head_dim_v + 2] fp32
Grid        one axis: row tiles x lanes, the last and so heaviest row tiles first. A lane is a KV
            head, dense of one sequence; so many lanes that their keys and values fit into the L2 go
            together. Varlen: a row tile finds its sequence, of which each has at most one too many.
            After the first part of all row tiles the other parts, row tiles of a sequence, KV heads
            and sequences
Traffic     keys, values  batch * num_kv_heads * visible keys * (head_dim + head_dim_v) * kv bytes,
            read once: row tiles of one lane find them in the L2
            partials      2 * parts * batch * cut_tokens * num_heads * (head_dim_v + 2) * 4, where
            there are two parts or more
            flops         2 * batch * num_heads * (pairs of a query and a key that it sees)
                          * (head_dim + head_dim_v)
Numerics    scores and sums in fp32, base-2 exponentials; p, times the scale of its key where keys
            have one, is rounded to the working type before p @ v (in fp16 v times scale is); fp32
            inputs multiply in IEEE fp32, not tf32; for 8 bits see tile/dequantize.py; out with a
            scale is rounded to e4m3 from fp32
Limits      NVIDIA GPU, sm_80 or newer; bf16, fp16 or fp32; head_dim and head_dim_v multiples of 8
            from 16 to 256; a first derivative only, and of a cache, beside quantised keys,
            ranges of keys, sink tokens of each sequence and out_scale none
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.core.kv import Paged
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import ceil_div
from splitkv.kernels.backward.records import Saved
from splitkv.kernels.combine import FINISHED, final_of, write_absent
from splitkv.kernels.gradients import Differentiable, backward_for, backward_of
from splitkv.kernels.host.arguments import Tail, in_order
from splitkv.kernels.host.launch import Grid, LatestKernel, Launch, LaunchOn, bind_to_grids
from splitkv.kernels.host.launcher import aligned
from splitkv.kernels.host.lengths import relaunched
from splitkv.kernels.host.map_launch import OperandAddresses
from splitkv.kernels.host.partition import padded_dims
from splitkv.kernels.host.sequence_repeat import LaunchMemory, Sequences
from splitkv.kernels.host.sequence_sizes import (
    CallLayout,
    SequenceLayouts,
    SequenceLengths,
    SequenceSizes,
    draw_seed,
    layouts_of_call,
    offset_type,
    result_layouts,
    row_steps,
    scale_and_softcap,
    scoring_of,
    stride_slope,
    tiles_and_lanes,
)
from splitkv.kernels.host.sequences import (
    CombineLaunch,
    SequenceLauncher,
    SequenceSplits,
    combine_launch,
    result_shapes,
    sequence_splits,
)
from splitkv.kernels.tile.attend import (
    RowPlaces,
    RowSums,
    RowTile,
    SequenceConfig,
    attend,
    write_rows,
)
from splitkv.kernels.tile.band import Bounds, Reach, load_sink_tokens, reach_of, token_range
from splitkv.kernels.tile.codec import widen, working_type
from splitkv.kernels.tile.dequantize import (
    RowTileScales,
    bits_of,
    key_scales,
    round_queries,
    scale_of_rows,
    scale_of_scores,
    shared_scales,
    stored_of,
    units_of,
)
from splitkv.kernels.tile.locate import Pages
from splitkv.kernels.tile.merge import (
    Meeting,
    Merged,
    counter_in_use,
    meet_and_merge,
    say_running,
)
from splitkv.kernels.tile.share import Share, parts_of, sequence_share
from splitkv.kernels.tile.visit import (
    Keys,
    RowTiling,
    Strides,
    TokenLengths,
    cut,
    load_tile,
    own_split,
    place,
    rows_of,
    store_tile,
    tiles_seen,
)
from splitkv.kernels.tile.weight import Queries, Scoring

SIZES = (  # arguments whose values are no reason to compile again
    *("left", "right", "sink_tokens", "chunk", "num_ranges", "seqlen_q", "seqlen_k", "batch"),
    *("num_kv_heads", "total_q", "total_k", "stride_table", "stride_slope", "tiles", "lanes"),
    *("width", "near", "parts", "num_splits", "split_tiles", "max_tokens"),
    *("stride_lse_b", "stride_lse_h"),
)


@triton.jit(do_not_specialize=SIZES)
def prefill(
    q_ptr,  # [batch, seqlen_q, num_heads, HEAD_DIM], or [total_q, num_heads, HEAD_DIM]
    k_ptr,
    v_ptr,
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    lens_ptr,  # [batch] int32 keys of each sequence, or None
    table_ptr,  # [batch, max_pages] int32, or None
    stored,  # Stored
    final,  # Final
    partial,  # Partial, or None: one split
    count_ptr,  # see tile/merge.py; None: `combine` merges
    sink_ptr,  # [num_heads], or None
    slope_ptr,  # [(batch,) num_heads], or None
    ranges_ptr,  # [batch, num_ranges, 2] int32, or None
    sink_tokens_ptr,  # [batch] int32, or None: sink_tokens each
    scoring,  # Scoring
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    num_ranges,
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    total_q,
    q_strides,  # Strides
    k_strides,
    v_strides,
    out_strides,
    stride_lse_b,  # its tokens are contiguous
    stride_lse_h,
    stride_table,
    stride_slope,
    tiles,  # row tiles of a lane
    lanes,
    width,  # lanes that go together
    num_splits,  # most splits of a row tile's keys, or None: one
    split_tiles,  # tiles of keys a split; None: those of a row tile over num_splits
    max_tokens,  # tokens of the longest sequences whose keys are split
    CONFIG: tl.constexpr,  # SequenceConfig
):
    if CONFIG.dependents == "launched_first":  # combine waits for this grid before it reads
        tl.extra.cuda.gdc_launch_dependents()
    GROUP: tl.constexpr = CONFIG.group
    TILE_M: tl.constexpr = CONFIG.tile_m
    TILE_N: tl.constexpr = CONFIG.tile_n
    HEAD_DIM_V: tl.constexpr = CONFIG.head_dim_v
    DIM_V: tl.constexpr = CONFIG.dim_v
    UNITS: tl.constexpr = CONFIG.units
    meeting = Meeting(count_ptr, tl.num_programs(0))
    lse_strides = Strides(stride_lse_b, 1, stride_lse_h)
    merged = Merged(
        cu_q_ptr=cu_q_ptr,
        batch=batch,
        most_q=max_tokens,
        parts=num_splits,
        num_heads=num_kv_heads * GROUP,
        out_strides=out_strides,
        lse_strides=lse_strides,
    )
    if count_ptr is not None:
        which = counter_in_use(meeting)
        say_running(meeting, which)

    # whose rows, and which  [TILE_M]
    tiling = RowTiling(tiles, lanes, width, num_splits)
    lengths = TokenLengths(cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, batch, total_q)
    own = own_split(tl.program_id(0), tiling, lengths, max_tokens, num_kv_heads, GROUP, TILE_M)
    b, h = own.b, own.h
    len_q, len_k = own.len_q, own.len_k
    if lens_ptr is not None:
        len_k = tl.load(lens_ptr + b, mask=b < batch, other=0)
    nothing = own.tile * TILE_M >= len_q * GROUP
    if count_ptr is None:  # else such programs arrive
        if nothing:
            return
    rows = rows_of(own.tile, h, len_q, GROUP, TILE_M)
    t, head, row_ok = rows.token, rows.head, rows.ok
    shift = len_k - len_q
    slope = None
    if slope_ptr is not None:
        slope_ok = row_ok & (b < batch)  # what lies after the last sequence has none
        slope = tl.load(slope_ptr + b * stride_slope + head, mask=slope_ok, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    sequence_head = (b * num_kv_heads * GROUP + head)[:, None]
    queries = Queries(t[:, None], (t + shift)[:, None], slope, sequence_head)

    # the keys that they see, and the split of them
    t_first, t_last = token_range(own.tile, len_q, GROUP, TILE_M)
    if sink_tokens_ptr is not None:
        sink_tokens = load_sink_tokens(sink_tokens_ptr, tl.minimum(b, batch - 1))
    bounds = Bounds(left, right, sink_tokens, chunk)
    reach = None
    reach_of_tile = None
    if ranges_ptr is not None:
        of_sequence = ranges_ptr + tl.minimum(b, batch - 1) * num_ranges * 2
        found = reach_of(of_sequence, num_ranges, t + shift, row_ok, len_k)
        reach = Reach(found.first[:, None], found.end[:, None])
        reach_of_tile = Reach(tl.min(found.first, 0), tl.max(found.end, 0))
    visit = tiles_seen(bounds, shift + t_first, shift + t_last, len_k, TILE_N, reach_of_tile)
    if partial is not None:
        per = sequence_share(Share(num_splits, split_tiles, None), visit.count)
        may_split = len_q <= max_tokens
        per = tl.where(may_split, per, tl.maximum(visit.count, 1))
        splits = parts_of(visit.count, per)
        slot = ((b * max_tokens + t).to(tl.int64) * num_kv_heads + h) * num_splits + own.split
        slot_rows = slot * GROUP + head % GROUP
        slot_ok = row_ok & may_split & (b < batch)
        if (own.split >= splits) | nothing:
            write_absent(partial.m_ptr, partial.l_ptr, slot_rows, slot_ok, 0.0)
            if count_ptr is not None:
                meet_and_merge(meeting, which, partial, final, sink_ptr, merged, CONFIG)
            return
        visit = cut(visit, own.split, per)
    slab = b
    table = None
    if table_ptr is not None:
        slab = b * 0
        table = table_ptr + b.to(tl.int64) * stride_table
    k_head = place(k_ptr, k_strides, slab, own.first_k, h)
    v_head = place(v_ptr, v_strides, slab, own.first_k, h)
    keys = Keys(k_head, v_head, k_strides.t, v_strides.t, len_k)
    pages = Pages(table, k_strides.b, v_strides.b)
    token = own.first_q + t
    q_rows = place(q_ptr, q_strides, b, token, head)
    q = load_tile(q_rows, row_ok, CONFIG.head_dim, CONFIG.dim)  # [TILE_M, DIM]
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM_V], tl.float32)
    q_scale = scale_of_rows(stored, b, token, head, row_ok, UNITS)
    if UNITS == "widened":
        q = widen(q, working_type(q_ptr.dtype.element_ty))
    elif UNITS != "as_is":
        if stored.q_ptr is None:
            q, q_scale = round_queries(q, k_ptr.dtype.element_ty)
    k_scale, v_scale = shared_scales(stored, b, h, len_k, UNITS)
    of_tokens = stored.of_tokens
    k_at = key_scales(stored.k_ptr, stored.k_strides, of_tokens, slab, own.first_k, h)
    v_at = key_scales(stored.v_ptr, stored.v_strides, of_tokens, slab, own.first_k, h)
    row_tile = RowTile(
        q=q,
        keys=keys,
        pages=pages,
        queries=queries,
        scoring=Scoring(
            scale=scale_of_scores(scoring.scale, k_scale, stored, UNITS),
            softcap=scoring.softcap,
            seed_ptr=scoring.seed_ptr,
            drop_below=scoring.drop_below,
            keep_scale=scoring.keep_scale,
        ),
        bounds=bounds,
        reach=reach,
        scales=RowTileScales(q_scale, k_at, v_at, stored.k_strides, stored.v_strides),
        q_ptr=q_ptr,
    )
    sums = attend(RowSums(m, l, acc), row_tile, visit, CONFIG, "edges")
    sums = attend(sums, row_tile, visit, CONFIG, "middle")

    acc = sums.acc * v_scale
    if scoring.seed_ptr is not None:
        acc *= scoring.keep_scale
    sums = RowSums(sums.m, sums.l, acc)
    places = RowPlaces(b, token, head, row_ok)
    if partial is None:
        write_rows(sums, sink_ptr, final, out_strides, lse_strides, places, HEAD_DIM_V)
    elif splits == 1:
        write_rows(sums, sink_ptr, final, out_strides, lse_strides, places, HEAD_DIM_V)
        write_absent(partial.m_ptr, partial.l_ptr, slot_rows, slot_ok, FINISHED)
    else:
        store_tile(partial.acc_ptr + slot_rows * HEAD_DIM_V, sums.acc, slot_ok, HEAD_DIM_V)
        tl.store(partial.m_ptr + slot_rows, sums.m, mask=slot_ok)
        tl.store(partial.l_ptr + slot_rows, sums.l, mask=slot_ok)
    if count_ptr is not None:
        meet_and_merge(meeting, which, partial, final, sink_ptr, merged, CONFIG)


PER_CALL = (
    *("q_ptr", "k_ptr", "v_ptr", "cu_q_ptr", "cu_k_ptr", "lens_ptr", "table_ptr", "stored"),
    *("final", "partial", "count_ptr", "sink_ptr", "slope_ptr", "ranges_ptr", "sink_tokens_ptr"),
    "scoring",
)
"""The arguments that change from call to call."""
STRIDES = "q_strides", "k_strides", "v_strides", "out_strides"
OF_LENGTHS = (
    *("seqlen_q", "seqlen_k", "total_q", "batch", *STRIDES, "stride_lse_b", "stride_lse_h"),
    *("tiles", "lanes", "width", "max_tokens"),
)
"""Those that lengths change."""


class PrefillLauncher(SequenceLauncher):
    """`prefill` and `combine` bound to one plan and one memory layout, differentiable where the
    problem is."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        problem, config, q = plan.problem, plan.config, operands.q
        self.plan, self.problem, self.device = plan, problem, plan.device
        self.results = result_shapes(problem, q)
        self.splits = sequence_splits(plan)
        self.tiling = tilings_of(plan)
        self.first_sizes = self.sizes(layouts_of_call(problem, operands))
        self.splits.expect_arrivals(self.first_sizes.grid[0])
        self.bits = plan.device.capability < (8, 9)
        left_to_combine = self.splits.rows and not self.splits.in_kernel
        early = bool(left_to_combine and plan.device.capability >= (9, 0) and q.is_cuda)
        of_lengths = dict(zip(OF_LENGTHS, self.first_sizes.arguments, strict=True))
        self.fixed = {
            **size_arguments(problem, operands),
            **of_lengths,
            **{name: Strides(*of_lengths[name]) for name in STRIDES},
            "num_splits": self.splits.num_splits,
            "split_tiles": self.splits.split_tiles,
            "CONFIG": compile_time_config(plan, operands, self.splits, early),
        }
        # multiply and add in one rounding: Triton's default, which from 3.9 on it wants said
        self.options = {"num_warps": config.num_warps, "enable_fp_fusion": True}
        self.combine = combine_launch(plan, self.splits, early)
        self.of_scales = stored_of(operands)[3:]  # compiled for by value
        self.launches: LatestKernel[LaunchOn] = LatestKernel(bind_to_grids)
        # the latest layout of `at_lengths` but for the number of keys, and what launches it
        self.latest: tuple[Any, Sequences | None] = (None, None)

    def __call__(self, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        return attention(self, operands)

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), through Triton or with what it compiled before."""
        x = operands
        # `Sequences` has no address of these
        own = x.bidirectional_ranges is not None or x.sequence_sink_tokens is not None
        plain = seed is None and x.out_scale is None and not own
        if self.again is not None and plain:
            done = relaunched(self.again, x, *scale_and_softcap(x))
            if done is not None:
                return done
        results, merge = self.results.allocate(x), None
        final = final_of(*results)
        partial, count = self.splits.partials(x.q)
        q, k, v = (bits_of(t) if self.bits else t for t in (x.q, x.k, x.v))
        arguments = {
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "cu_q_ptr": x.cu_seqlens_q,
            "cu_k_ptr": x.cu_seqlens_k,
            "lens_ptr": x.cache_seqlens,
            "table_ptr": x.page_table,
            "stored": stored_of(x),
            "final": final,
            "partial": partial,
            "count_ptr": count,
            "sink_ptr": x.sink_logits,
            "slope_ptr": x.alibi_slopes,
            "ranges_ptr": x.bidirectional_ranges,
            "sink_tokens_ptr": x.sequence_sink_tokens,
            "scoring": scoring_of(x, seed),
            **self.fixed,
        }
        grid = self.first_sizes.grid
        made = prefill[grid](*in_order(prefill, arguments), **self.options)
        if isinstance(self.combine, CombineLaunch) and partial is not None:
            merge = self.combine.launch(partial, final, x, self.first_sizes)
        if made is not None and self.again is None and plain and aligned(x):
            self.keep(made, merge, x)
        return results.out_ptr, results.lse_ptr

    def sizes(self, layouts: SequenceLayouts) -> SequenceSizes:
        lengths, q, k, v = layouts.lengths, layouts.q, layouts.k, layouts.v
        results = result_layouts(self.problem, q[0], layouts.out)
        max_tokens = self.problem.cut_tokens_of(lengths.seqlen_q)
        tiles, lanes, width = self.tiling(lengths)
        programs = tiles * lanes
        if self.splits.num_splits is not None:
            programs += split_programs(self.plan, lengths.batch, max_tokens)
        arguments = (
            *lengths,
            *(row_steps(*q), row_steps(*k), row_steps(*v)),
            *(results.out_strides, *results.lse_strides, tiles, lanes, width, max_tokens),
        )
        return SequenceSizes((programs, 1, 1), arguments, lengths, max_tokens, results)

    @cached_property
    def tail(self) -> Tail:
        return Tail(prefill, PER_CALL, self.fixed, STRIDES, OF_LENGTHS)

    def variant(self) -> Hashable:
        merge = None if self.combine is None else self.combine.variant()
        parts = bool(self.splits.rows), self.splits.in_kernel
        return self.tail.variant(), (self.options["num_warps"], parts, self.of_scales), merge

    def relaunch(
        self, compiled: Any, sizes: SequenceSizes, layouts: SequenceLayouts
    ) -> Launch | None:
        launch_on = self.launches.binder(compiled)
        if launch_on is None:
            return None
        tail = self.tail.changed(sizes.arguments)
        return PrefillLaunch((launch_on, sizes.grid, tail), self.of_scales)

    def at_lengths(self, here: CallLayout, v_shape: Sequence[int]) -> Sequences | None:
        """Makes what SequenceLauncher does. Of a call that differs from the one before in its keys
        alone, as one query against ever more of them does, only that is put into what is there."""
        (queries, keys, batch), (q_shape, k_shape), (of_q, of_k, of_v) = here
        steps = row_steps(k_shape, of_k), row_steps(v_shape, of_v)
        but_for_keys = queries, batch, q_shape, of_q, steps
        before, made = self.latest
        if made is None or before != but_for_keys:
            made = super().at_lengths(here, v_shape)
            self.latest = but_for_keys, made
            return made
        assert isinstance(made.launch, PrefillLaunch)
        return made.with_launch(made.launch.with_argument(self.tail.place["seqlen_k"], keys))


class PrefillLaunch:
    """A launch of `prefill`, called as `Sequences` calls it.

    bound_to    what binds launches, the grid, the last arguments
    of_scales   the items of Stored behind its pointers
    """

    __slots__ = "bound_to", "launch", "of_scales"

    def __init__(
        self, bound_to: tuple[LaunchOn, Grid, Sequence[Any]], of_scales: tuple[Any, ...]
    ) -> None:
        self.bound_to, self.of_scales = bound_to, of_scales
        launch_on, grid, tail = bound_to
        self.launch = launch_on(grid, tail)

    def with_argument(self, at: int, value: int) -> PrefillLaunch:
        """Another, of which the last argument of this number has another value."""
        launch_on, grid, tail = self.bound_to
        return PrefillLaunch(
            (launch_on, grid, (*tail[:at], value, *tail[at + 1 :])), self.of_scales
        )

    def __call__(
        self,
        stream: int,
        at: OperandAddresses,
        memory: LaunchMemory,
        row: Sequence[Any],
        scales: tuple[Any, ...],
        scale: float,
        softcap: float | None,
    ) -> None:
        stored, scoring = scales + self.of_scales, (scale, softcap, None, 0.0, 1.0)
        written = stored, *memory[:3]
        self.launch(stream, *at[:3], *memory[3][:4], *written, *row, None, None, scoring)


def tilings_of(plan: Plan) -> Callable[[SequenceLengths], tuple[int, int, int]]:
    """Gives what computes (row tiles of a lane, lanes, lanes together) for queries of such
    lengths."""
    problem, device, tile = plan.problem, plan.device, plan.config.tile_m
    rows, lane_bytes = problem.group, 0
    if problem.kind != "varlen":
        lane_bytes = problem.kv_bytes // max(problem.batch * problem.num_kv_heads, 1)

    def tiling(lengths: SequenceLengths) -> tuple[int, int, int]:
        total, batch = lengths.total_q, lengths.batch
        return tiles_and_lanes(problem, device, total, batch, rows, tile, lane_bytes)

    return tiling


def split_programs(plan: Plan, batch: int, max_tokens: int) -> int:
    """Programs of the further splits of all row tiles of so many sequences, of at most so many
    tokens."""
    problem, config = plan.problem, plan.config
    row_tiles = ceil_div(max_tokens * problem.group, config.tile_m)
    return (config.num_splits - 1) * row_tiles * batch * problem.num_kv_heads


def size_arguments(problem: Problem, operands: Operands) -> dict[str, Any]:
    """The sizes and strides that no length changes, by name."""
    table, bounds = operands.page_table, problem.mask.bounds
    ranges = operands.bidirectional_ranges
    return {
        "left": bounds.left,
        "right": bounds.right,
        "sink_tokens": bounds.sink_tokens,
        "chunk": bounds.chunk,
        "num_ranges": None if ranges is None else ranges.shape[1],
        "num_kv_heads": problem.num_kv_heads,
        "stride_table": table.stride(0) if table is not None else 0,
        "stride_slope": stride_slope(operands.alibi_slopes),
    }


def compile_time_config(
    plan: Plan, operands: Operands, splits: SequenceSplits, early: bool
) -> SequenceConfig:
    """The compile-time values of a plan; early: see `combine_launch`."""
    problem, config, place = plan.problem, plan.config, plan.problem.place
    merge_step, merge_rows = splits.merge_step(config.num_warps)
    dim, dim_v = padded_dims(problem, plan.device, config.tile_m, config.num_warps)
    return SequenceConfig(
        group=problem.group,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        dim=dim,
        dim_v=dim_v,
        page_size=place.page_size if isinstance(place, Paged) else 1,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        num_stages=config.num_stages,
        offset_type=offset_type(config.tile_n, 1, operands.k, operands.v),
        units=units_of(problem, plan.device, config),
        merge_splits=merge_step,
        merge_rows=merge_rows,
        dependents="launched_first" if early else "launched_after",
    )


def attention(launcher: Differentiable, operands: Operands) -> tuple[Tensor, Tensor | None]:
    """(out, lse or None) of a launcher, differentiable where its problem is."""
    problem, x = launcher.problem, operands
    seed = draw_seed(x.q) if problem.dropout else None
    if not problem.needs_grad:
        out, lse = launcher.forward(x, seed)
        return out, lse if problem.return_lse else None
    # of functorch's transforms torch has to say that this function is none of theirs
    apply = Attention.apply if functorch_is_active() else apply_in_no_transform
    made: Any
    if x.alibi_slopes is not None:
        made = apply((launcher, x, seed), x.q, x.k, x.v, x.sink_logits, x.alibi_slopes)
    elif x.sink_logits is not None:  # each argument takes time
        made = apply((launcher, x, seed), x.q, x.k, x.v, x.sink_logits)
    else:
        made = apply((launcher, x, seed), x.q, x.k, x.v)
    return made if problem.return_lse else (made, None)


def in_place_of(plan: Plan, other: Plan, operands: Operands) -> PrefillLauncher:
    """Binds this kernel by another plan than was made for a call, and warns why."""
    why = other.why.removeprefix(f"{plan.why}; ")
    warnings.warn(f"this call runs on {other.kernel}: {why}", stacklevel=2)
    return PrefillLauncher(other, operands)


SCALARS = "softmax_scale", "softcap", "dropout_p", "seqlen_q", "seqlen_k"
"""The fields of Operands that the backward takes beside tensors, the scale first."""
scalars_of = attrgetter(*SCALARS)


class Attention(torch.autograd.Function):
    """The forward of a launcher, and the gradients of `backward`."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, Operands, Tensor | None], *leaves: Any) -> Any:
        """(out, lse), or where the problem of the launcher does not ask for the LSE, out.

        call: a launcher, operands, and the seed of dropout; leaves: in the order of `LEAVES` in
        gradients.py, up to the last one that is given."""
        launcher, x, seed = call
        out, lse = launcher.forward(x, seed)
        sinks, slopes, cu_q, cu_k = x.sink_logits, x.alibi_slopes, x.cu_seqlens_q, x.cu_seqlens_k
        if slopes is None and cu_q is None and seed is None:  # what is kept takes time
            if sinks is None:
                ctx.save_for_backward(x.q, x.k, x.v, out, lse)
            else:
                ctx.save_for_backward(x.q, x.k, x.v, out, lse, sinks)
        else:
            ctx.save_for_backward(x.q, x.k, x.v, out, lse, sinks, slopes, cu_q, cu_k, seed)
        ctx.launcher, ctx.scalars = launcher, scalars_of(x)
        ctx.set_materialize_grads(False)
        return (out, lse) if launcher.problem.return_lse else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph: expected False, as kernels differentiate once")
        kept = Saved(*ctx.saved_tensors)  # asked for once: checkpointing recomputes them only then
        launcher = ctx.launcher
        found, again = None, launcher.backward_again.get(backward_for)
        if again is not None and grad_out is not None:
            found = again.call(kept, grad_out, grad_lse, ctx.scalars[0])
        if found is None:
            operands = Operands(kept.q, kept.k, kept.v)
            operands.sink_logits, operands.alibi_slopes = kept.sink_logits, kept.alibi_slopes
            operands.cu_seqlens_q, operands.cu_seqlens_k = kept.cu_seqlens_q, kept.cu_seqlens_k
            for name, value in zip(SCALARS, ctx.scalars, strict=True):
                setattr(operands, name, value)
            run = backward_of(launcher, operands, backward_for)
            rest = kept.out, kept.lse, grad_out, grad_lse
            of_slopes = kept.alibi_slopes is not None and ctx.needs_input_grad[-1]
            found = run(operands, kept.seed, *rest, of_slopes)
            launcher.backward_again[backward_for] = run.again(operands, *rest)
        return None, *found  # past the leaves there are Nones, which autograd drops


apply_in_no_transform = super(torch.autograd.Function, Attention).apply
"""`Attention.apply` without what that asks in Python on every call for the sake of functorch."""
functorch_is_active = torch._C._are_functorch_transforms_active
