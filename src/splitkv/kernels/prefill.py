"""Attention of whole sequences, for any NVIDIA GPU: the forward of prefill and of training.

Computes, for each sequence b, KV head h and the rows r = (query token, grouped head) that share it,

    s[r, n]  = score(scale * q[r] . k[n])          n in the bands of row r, the visible keys
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) kept[r, n] / (1 - dropout_p) v[n] / (l + exp(sink - m))

of keys and values as they are, or in 8 bits times scales: one that the keys of a head share joins
the softmax scale, of values the end; those of each key multiply the scores, and the weights.

A band of keys is three ranges of tiles: only in the outer two a row may see a part of a tile. So
there are two loops, one over those tiles and the tiles of the sink tokens, which asks the mask, and
one over the tiles between, which asks nothing.

Where few queries face many keys, the tiles of a row tile are cut into parts, as in `decode_split`,
and `combine` merges them, or the programs that come last do (tile/merge.py). Beside prompts, only
those of sequences of at most `Problem.cut_tokens` tokens are: so one launch serves a batch in which
some sequences have a chunk of a prompt and others one new token.

Shapes      q [batch, seqlen_q, num_heads, head_dim]; k, v [batch, seqlen_k, num_kv_heads, dim]; out
            as q, with head_dim_v; lse [batch, num_heads, seqlen_q] fp32; scales: see scales.py
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
            inputs multiply in IEEE fp32, not tf32; for 8 bits see tile/dequantize.py
Limits      NVIDIA GPU, sm_80 or newer; bf16, fp16 or fp32; head_dim and head_dim_v multiples of 8
            from 16 to 256; a first derivative only, and of a cache and beside quantised keys none
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv import errors
from splitkv.device import Device
from splitkv.kernels import workspace
from splitkv.kernels.combine import FINISHED, Final, Partial, combine, merge_tiles, write_absent
from splitkv.kernels.parts import num_parts, padded_dims
from splitkv.kernels.sequence_sizes import (
    draw_seed,
    lse_shape,
    lse_strides,
    offset_type,
    scoring_of,
    stride_slope,
    strides_of,
    tiles_and_lanes,
)
from splitkv.kernels.tile.attend import attend, write_rows
from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.codec import widen
from splitkv.kernels.tile.dequantize import (
    Scales,
    bits_of,
    key_scales,
    round_queries,
    scale_of_rows,
    shared_scales,
    stored_of,
    units_of,
)
from splitkv.kernels.tile.locate import Pages
from splitkv.kernels.tile.merge import (
    MOST_ARRIVALS,
    Meeting,
    Merged,
    counter_in_use,
    meet_and_merge,
    parts_a_step,
    rows_a_step,
    say_running,
)
from splitkv.kernels.tile.share import Share, parts_of, sequence_share
from splitkv.kernels.tile.visit import (
    Keys,
    Strides,
    cut,
    load_tile,
    own_part,
    place,
    rows_of,
    store_tile,
    tiles_seen,
)
from splitkv.kernels.tile.weight import Queries, Scoring
from splitkv.kv import AS_IS, Paged
from splitkv.plans import Config, Kernel, Plan, Traffic
from splitkv.problem import Operands, Problem
from splitkv.scores import PLAIN

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256

Shape = tuple[int, int, int, int]  # tile_m, tile_n, num_warps, num_stages
FEW_ROWS: tuple[Shape, ...] = ((16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 2))
# By the larger padded head dimension: those that ptxas, for sm_90, fits into registers.
HALF: dict[int, tuple[Shape, ...]] = {
    64: (
        *((128, 128, 8, 2), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2)),
        *((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        *((32, 64, 4, 3), (32, 64, 4, 2), *FEW_ROWS),
    ),
    128: (
        *((128, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        *((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2)),
        *((32, 64, 4, 3), (32, 64, 4, 2), *FEW_ROWS),
    ),
    256: (
        *((128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
        *FEW_ROWS,
    ),
}
SINGLE: dict[int, tuple[Shape, ...]] = {
    64: ((64, 32, 8, 2), (32, 32, 8, 2), (16, 16, 4, 2)),
    128: ((32, 16, 8, 2), (16, 16, 8, 2), (16, 16, 4, 2)),
    256: ((16, 16, 8, 2), (16, 16, 4, 2)),
}
LEAVES = ("q", "k", "v", "sink_logits", "alibi_slopes")
TENSORS = (*LEAVES, "cu_seqlens_q", "cu_seqlens_k")  # of Operands
SIZES = (  # arguments whose values are no reason to compile again
    *("left", "right", "sink_tokens", "chunk", "seqlen_q", "seqlen_k", "batch"),
    *("num_kv_heads", "total_q", "total_k", "stride_table", "stride_slope", "tiles", "lanes"),
    *("width", "near", "parts", "size", "most_q", "stride_lse_b", "stride_lse_h"),
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
    partial,  # Partial, or None: one part
    count_ptr,  # see tile/merge.py; None: `combine` merges
    sink_ptr,  # [num_heads], or None
    slope_ptr,  # [(batch,) num_heads], or None
    scoring,  # Scoring
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
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
    parts,  # most parts of a row tile's keys, or None: one
    size,  # tiles of keys a part; None: those of a row tile over `parts`
    most_q,  # tokens of the longest sequences whose keys are cut into parts
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET: tl.constexpr,  # the type of offsets inside a tile of keys
    UNITS: tl.constexpr,  # see tile/dequantize.py
    TILE_P: tl.constexpr,  # parts that are merged a step, of TILE_R rows
    TILE_R: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # as in decode_split
        tl.extra.cuda.gdc_launch_dependents()
    DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    bounds = Bounds(left, right, sink_tokens, chunk)
    meeting = Meeting(count_ptr, tl.num_programs(0))
    lse_strides = Strides(stride_lse_b, 1, stride_lse_h)
    merged = Merged(
        *(cu_q_ptr, batch, most_q, parts, num_kv_heads * GROUP, out_strides, lse_strides)
    )
    if count_ptr is not None:
        which = counter_in_use(meeting)
        say_running(meeting, which)
        to_merge = meeting, which, partial, final, sink_ptr, merged

    # whose rows, and which  [TILE_M]
    cutting = tl.program_id(0), tiles, lanes, width, parts, most_q
    whose = cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, batch, total_q, num_kv_heads
    own = own_part(*cutting, *whose, GROUP, TILE_M)
    part, b, h, tile_m, first_q, len_q, first_k, len_k = own
    if lens_ptr is not None:
        len_k = tl.load(lens_ptr + b, mask=b < batch, other=0)
    nothing = tile_m * TILE_M >= len_q * GROUP
    if count_ptr is None:  # else such programs arrive
        if nothing:
            return
    _, t, head, row_ok = rows_of(tile_m, h, len_q, GROUP, TILE_M)
    shift = len_k - len_q
    slope = None
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + b * stride_slope + head, mask=row_ok, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    sequence_head = (b * num_kv_heads * GROUP + head)[:, None]
    queries = Queries(t[:, None], (t + shift)[:, None], slope, sequence_head)

    # the keys that they see, and the part of them
    t_first, t_last = token_range(tile_m, len_q, GROUP, TILE_M)
    visit = tiles_seen(bounds, shift + t_first, shift + t_last, len_k, TILE_N)
    if partial is not None:
        per = sequence_share(Share(parts, size, None), visit.count)
        cuttable = len_q <= most_q
        per = tl.where(cuttable, per, tl.maximum(visit.count, 1))
        num_parts = parts_of(visit.count, per)
        slot = ((b * most_q + t).to(tl.int64) * num_kv_heads + h) * parts + part
        slot_rows = slot * GROUP + head % GROUP
        slot_ok = row_ok & cuttable & (b < batch)
        if (part >= num_parts) | nothing:
            write_absent(partial.m_ptr, partial.l_ptr, slot_rows, slot_ok, 0.0)
            if count_ptr is not None:
                meet_and_merge(*to_merge, GROUP, HEAD_DIM_V, DIM_V, TILE_P, TILE_R)
            return
        visit = cut(visit, part, per)
    slab = b
    table = None
    if table_ptr is not None:
        slab = b * 0
        table = table_ptr + b.to(tl.int64) * stride_table
    k_head = place(k_ptr, k_strides, slab, first_k, h)
    v_head = place(v_ptr, v_strides, slab, first_k, h)
    keys = Keys(k_head, v_head, k_strides.t, v_strides.t, len_k)
    pages = Pages(table, k_strides.b, v_strides.b)
    q_rows = place(q_ptr, q_strides, b, first_q + t, head)
    q = load_tile(q_rows, row_ok, HEAD_DIM, DIM)  # [TILE_M, DIM]
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM_V], tl.float32)
    q_scale = scale_of_rows(stored, b, first_q + t, head, row_ok, UNITS)
    if UNITS == "widened":
        q = widen(q, final.out_ptr.dtype.element_ty)
    elif UNITS != "as_is":
        if stored.q_ptr is None:
            q, q_scale = round_queries(q, k_ptr.dtype.element_ty)
    k_scale, v_scale = shared_scales(stored, b, h, UNITS)
    sequence = stored.of_tokens, slab, first_k, h
    k_at = key_scales(stored.k_ptr, stored.k_strides, *sequence)
    v_at = key_scales(stored.v_ptr, stored.v_strides, *sequence)
    scales = Scales(q_scale, k_at, v_at, stored.k_strides, stored.v_strides)
    weighing = scoring.softcap, scoring.seed_ptr, scoring.drop_below, scoring.keep_scale
    scoring = Scoring(scoring.scale * k_scale, *weighing)
    rest = q, keys, queries, scoring, visit, bounds, pages, scales, final.out_ptr
    m, l, acc = attend(
        m, l, acc, *rest, HEAD_DIM, HEAD_DIM_V, TILE_N, PAGE_SIZE, STAGES, OFFSET, UNITS, True
    )
    m, l, acc = attend(
        m, l, acc, *rest, HEAD_DIM, HEAD_DIM_V, TILE_N, PAGE_SIZE, STAGES, OFFSET, UNITS, False
    )

    acc *= v_scale
    if scoring.seed_ptr is not None:
        acc *= scoring.keep_scale
    where = out_strides, lse_strides, b, first_q + t, head, row_ok
    if partial is None:
        write_rows(acc, m, l, sink_ptr, final, *where, HEAD_DIM_V)
    elif num_parts == 1:
        write_rows(acc, m, l, sink_ptr, final, *where, HEAD_DIM_V)
        write_absent(partial.m_ptr, partial.l_ptr, slot_rows, slot_ok, FINISHED)
    else:
        store_tile(partial.acc_ptr + slot_rows * HEAD_DIM_V, acc, slot_ok, HEAD_DIM_V)
        tl.store(partial.m_ptr + slot_rows, m, mask=slot_ok)
        tl.store(partial.l_ptr + slot_rows, l, mask=slot_ok)
    if count_ptr is not None:
        meet_and_merge(*to_merge, GROUP, HEAD_DIM_V, DIM_V, TILE_P, TILE_R)


def unsupported(problem: Problem, device: Device) -> list[str]:
    reasons = []

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(device.kind == "cuda", f"device {device.kind}: expected cuda")
    if device.kind == "cuda":
        expect(device.capability >= (8, 0), f"device {device.arch}: expected sm_80 or newer")
    expect(
        problem.dtype in ("bfloat16", "float16", "float32"),
        f"dtype {problem.dtype}: expected bfloat16, float16 or float32",
    )
    for name in ("head_dim", "head_dim_v"):
        value = getattr(problem, name)
        expect(
            value % 8 == 0 and MIN_HEAD_DIM <= value <= MAX_HEAD_DIM,
            f"{name} {value}: expected a multiple of 8 from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}",
        )
    forward_only = problem.kind == "decode" or isinstance(problem.place, Paged)
    forward_only |= problem.codec != AS_IS
    expect(not (forward_only and problem.needs_grad), "gradient: expected inputs that require none")
    return reasons


def shapes(problem: Problem, device: Device) -> list[Shape]:
    """Those for these head dimensions with no more rows than a sequence has, the best first.

    128 keys a step are the best for the tensor cores of sm_90, but take registers that modifiers
    need as well, and leave much of a narrow window to be masked. A tile in one page has one look-up
    and the addresses of contiguous keys.
    """
    table = HALF if problem.element_bytes == 2 else SINGLE
    found = table[max(64, *padded_dims(problem))]
    rows = max(problem.rows, min(tile_m for tile_m, *_ in found))
    enough = min(tile_m for tile_m in (16, 32, 64, 128) if tile_m >= min(rows, 128))
    mask = problem.mask
    narrow = mask.left is not None and mask.right is not None and mask.left + mask.right < 512
    modified = problem.score != PLAIN or problem.dropout
    fewer_keys = narrow or modified or device.capability[0] != 9
    page_size = problem.place.page_size if isinstance(problem.place, Paged) else 0
    of_keys = problem.codec.granularity == "token"  # two more loads a key: 128 of them spill
    found = tuple(s for s in found if s[0] <= enough and not (of_keys and s[:2] == (128, 128)))
    return sorted(
        found,
        key=lambda shape: (
            fewer_keys and shape[1] == 128,
            page_size >= 64 and page_size % shape[1] > 0,
        ),
    )


def shared_bytes(problem: Problem, config: Config) -> int:
    """The most shared memory that Triton takes for a config: q, tiles in flight, sums of rows.

    Of what is widened a copy, and scales of keys. After the loop the output goes through it.
    """
    dim, dim_v = padded_dims(problem)
    loop = config.tile_m * (dim * problem.element_bytes + 8) + 64
    loop += config.num_stages * config.tile_n * (dim + dim_v) * problem.kv_element_bytes
    if problem.codec != AS_IS:
        a_key = max(dim, dim_v) * problem.element_bytes + 8 * (config.num_stages + 1)
        loop += config.tile_n * a_key
    return max(loop, 4 * config.tile_m * dim_v)


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits."""
    for tile_m, tile_n, num_warps, num_stages in shapes(problem, device):
        config = Config(tile_m=tile_m, tile_n=tile_n, num_warps=num_warps, num_stages=num_stages)
        if shared_bytes(problem, config) <= device.smem_per_block:
            yield config


def traffic(problem: Problem, config: Config) -> Traffic:
    """The lines of the docstring's Traffic section, every sequence at its upper bound."""
    rows = problem.batch * problem.seqlen_q * problem.num_heads
    pairs = problem.batch * problem.num_heads * problem.visible_pairs
    parts, cut = num_parts(problem, config), problem.batch * problem.cut_tokens * problem.num_heads
    return Traffic(
        kv_bytes=problem.kv_bytes,
        q_bytes=rows * problem.head_dim * problem.element_bytes,
        out_bytes=rows * (problem.head_dim_v * problem.element_bytes + 4 * problem.return_lse),
        partial_bytes=2 * parts * cut * (problem.head_dim_v + 2) * 4 if parts > 1 else 0,
        flops=2 * pairs * (problem.head_dim + problem.head_dim_v),
    )


class Launcher:
    """`prefill` and `combine` bound to one plan and one memory layout, differentiable where the
    problem is.

    forward(operands, seed) -> (out, lse), whatever the problem says of a gradient or the LSE
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        problem, config = plan.problem, plan.config
        self.problem, self.device = problem, plan.device
        q, k, v, slopes = operands.q, operands.k, operands.v, operands.alibi_slopes
        self.out_shape, self.lse_shape = (*q.shape[:-1], problem.head_dim_v), lse_shape(q)
        self.dtype = getattr(torch, problem.dtype)
        out = q.new_empty(self.out_shape, dtype=self.dtype)
        out = out if operands.out is None else operands.out
        self.out_strides = strides_of(out)
        total = q.shape[:-2].numel()
        lane_bytes = problem.kv_bytes // max(problem.batch * problem.num_kv_heads, 1)
        tiling = tiles_and_lanes(
            problem, plan.device, total, problem.group, config.tile_m, lane_bytes
        )
        parts = config.num_splits if config.num_splits > 1 else None
        size = config.split_size // config.tile_n if config.schedule == "fixed" else None
        cut = problem.cut_tokens
        programs = tiling[0] * tiling[1]
        self.slots, self.parts = 0, parts or 1
        if parts is not None:
            row_tiles = triton.cdiv(cut * problem.group, config.tile_m)
            programs += (parts - 1) * row_tiles * problem.batch * problem.num_kv_heads
            if config.merge != "cluster":
                self.slots = problem.batch * cut * problem.num_heads * parts
        self.last = parts is not None and config.merge in ("last", "pairs")
        self.pairs = config.merge == "pairs"
        self.expect_arrivals(programs)
        self.grid = programs, 1, 1
        lse, table, place = lse_strides(q), operands.page_table, problem.place
        units = units_of(problem, plan.device, config)
        self.bits = plan.device.capability < (8, 9)
        ahead = self.slots and not self.last and plan.device.capability >= (9, 0)
        pdl = bool(ahead and q.is_cuda)
        self.tail: tuple[Any, ...] = (
            *(*problem.mask.bounds, problem.seqlen_q, problem.seqlen_k, problem.batch),
            *(problem.num_kv_heads, total, strides_of(q), strides_of(k), strides_of(v)),
            *(self.out_strides, lse.b, lse.h, table.stride(0) if table is not None else 0),
            *(stride_slope(slopes), *tiling, parts, size if parts else None, cut),
            *(problem.group, problem.head_dim, problem.head_dim_v),
            *(place.page_size if isinstance(place, Paged) else 1, config.tile_m, config.tile_n),
            *(config.num_stages, offset_type(config.tile_n, 1, k, v), units),
            *(*self.merged_a_step(config.num_warps), pdl),
        )
        # multiply and add in one rounding: Triton's default, which from 3.9 on it wants said
        fused = {"enable_fp_fusion": True}
        self.options = {"num_warps": config.num_warps, **fused}
        if parts is None or not self.slots or self.last:
            return
        tile_p, tile_v, merge_warps = merge_tiles(parts, problem.head_dim_v)
        tokens = problem.batch * cut
        self.merge_grid = (tokens * problem.num_heads, 1, triton.cdiv(problem.head_dim_v, tile_v))
        self.merge_tail = (
            *(None, tokens, problem.num_kv_heads, None, None, None, None, parts, None),
            *(None, None, cut, total),
            *(*self.out_strides, 1, problem.group, problem.head_dim_v),
            *(1, problem.group, config.tile_n, tile_p, 0, tile_v, parts % tile_p == 0, pdl),
        )
        overlapping = {"launch_pdl": True} if pdl else {}
        self.merge_options = {"num_warps": merge_warps, **fused, **overlapping}

    def expect_arrivals(self, programs: int) -> None:
        few = programs <= MOST_ARRIVALS.value or not self.last
        errors.expect(few, "plan.config.merge", f"'combine' of {programs} programs", "last")

    def merged_a_step(self, num_warps: int) -> tuple[int, int]:
        """Parts, and rows, that so many warps merge together; 0 where `combine` merges."""
        if not self.last or self.pairs:
            return 0, 0
        dim = self.problem.head_dim_v
        step = parts_a_step(self.parts, dim)
        return step, rows_a_step(step, dim, num_warps)

    def partials(self, like: Tensor) -> tuple[Partial | None, Tensor | None]:
        """Those of a call, and the counters of a launch that merges them."""
        if not self.slots:
            return None, None
        partial = workspace.partials(like, self.slots * self.problem.head_dim_v, self.slots)
        return partial, workspace.counter_for(like) if self.last else None

    def __call__(self, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        seed = draw_seed(operands.q) if self.problem.dropout else None
        if self.problem.needs_grad:
            leaves = (getattr(operands, name) for name in LEAVES)
            out, lse = Attention.apply(self, operands, seed, *leaves)
        else:
            out, lse = self.forward(operands, seed)
        return out, lse if self.problem.return_lse else None

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        x = operands
        out = x.q.new_empty(self.out_shape, dtype=self.dtype) if x.out is None else x.out
        lse = x.q.new_empty(self.lse_shape, dtype=torch.float32)
        final = Final(out, lse)
        partial, count = self.partials(x.q)
        q, k, v = (bits_of(t) if self.bits else t for t in (x.q, x.k, x.v))
        prefill[self.grid](
            *(q, k, v, x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.page_table),
            *(stored_of(x), final, partial, count, x.sink_logits, x.alibi_slopes),
            *(scoring_of(x, seed), *self.tail),
            **self.options,
        )
        if partial is not None and not self.last:
            combine[self.merge_grid](
                *(partial, final, x.cu_seqlens_q, x.sink_logits, *self.merge_tail),
                **self.merge_options,
            )
        return out, lse


def for_any_address(plan: Plan, operands: Operands, reason: str) -> Launcher:
    """This kernel in the place of one that cannot read from everywhere, and a warning why."""
    warnings.warn(f"this call runs on {KERNEL.name}: {reason}", stacklevel=2)
    own = replace(plan.config, merge="combine") if plan.config.clustered else plan.config
    config = next(configs(plan.problem, plan.device))
    config = replace(config, num_splits=own.num_splits, merge=own.merge)
    return Launcher(replace(plan, kernel=KERNEL.name, config=config), operands)


class Attention(torch.autograd.Function):
    """The forward of a launcher, and the gradients of `backward`."""

    @staticmethod
    def forward(ctx: Any, launcher: Launcher, operands: Operands, seed: Any, *leaves: Any) -> Any:
        out, lse = launcher.forward(operands, seed)
        x = operands
        ctx.save_for_backward(*leaves, x.cu_seqlens_q, x.cu_seqlens_k, seed, out, lse)
        without: dict[str, Any] = dict.fromkeys(TENSORS)
        ctx.launcher, ctx.scalars = launcher, replace(x, **without)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        from splitkv.kernels.backward import backward_for

        if torch.is_grad_enabled():
            raise NotImplementedError("create_graph: expected False, as kernels differentiate once")
        *tensors, seed, out, lse = ctx.saved_tensors
        operands = replace(ctx.scalars, **dict(zip(TENSORS, tensors, strict=True)))
        run = backward_for(ctx.launcher.problem, ctx.launcher.device, operands)
        saved, of_slopes = (operands, seed, out, lse), ctx.needs_input_grad[-1]
        return None, None, None, *run(*saved, grad_out, grad_lse, of_slopes)


KERNEL = Kernel(
    *("prefill", unsupported, configs, traffic, Launcher),
    schedules=("even", "fixed"),
    merges=("combine", "last"),
)
