"""Gradients of attention, for any NVIDIA GPU: dq, dk, dv, those of sink logits and ALiBi slopes.

Computes, from out, lse and the gradients dout and dlse of both, for each row r and key n,

    total[r] = log(exp(lse[r]) + exp(sink))        p[r, n] = exp(s[r, n] - total[r])
    delta[r] = dout[r] . out[r] - dlse[r] exp(total[r] - lse[r])
    ds[r, n] = p[r, n] (kept[r, n] / (1 - dropout_p) dout[r] . v[n] - delta[r])
    dv[n]    = sum_r p[r, n] kept[r, n] / (1 - dropout_p) dout[r]
    dk[n]    = scale sum_r ds[r, n] s'[r, n] q[r]        dq[r] = scale sum_n ds[r, n] s'[r, n] k[n]
    dsink    = - sum_r exp(sink - total[r]) dout[r] . out[r]
    dslope   = - sum_r sum_n ds[r, n] |pos[r] - n|

where s' = 1 - tanh^2 under a soft cap, else 1. After `backward_rows`, which finds total and delta,
`backward_keys` makes dk and dv, `backward_queries` dq and what dsink and dslope sum over rows. Both
compute p once more, so that every sum is made by one program in one order: no atomics, the same
bits every time.

With sink tokens the first keys are seen by far more rows than a window of keys is: their tiles come
before all others. Where a program would be the last to end for all that, and where there are fewer
tiles of keys than fill the GPU, the rows that see a tile are cut into parts, which `backward_sum`
adds up: see `cut_tiles`.

Shapes      as in `prefill`; rows of statistics: see Stats
Grid        backward_rows, backward_queries  row tiles x lanes, as in `prefill`
            backward_keys                    parts x KV heads x sequences x tiles that come first,
                                             then tiles of keys x lanes, the first and so heaviest
                                             first; the heads of a group are more rows
Traffic     reads q, k, v, out, dout, writes dq, dk, dv; 8 bytes of statistics a row, 12 with sink
            logits; flops 7 products of 2 * pairs * head_dim where the forward has 2
Numerics    scores, p, ds and sums in fp32; p and ds are rounded to the type of q before a product;
            where that is fp32, sums over tiles are compensated: thousands of them may follow
Limits      those of `prefill`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv import reference
from splitkv.device import Device
from splitkv.kernels.backward_parts import cut_tiles
from splitkv.kernels.backward_rows import Stats, statistics, strides_of_stats
from splitkv.kernels.parts import padded_dims
from splitkv.kernels.prefill import SIZES
from splitkv.kernels.sequence_sizes import (
    offset_type,
    scoring_of,
    stride_slope,
    strides_of,
    tiles_and_lanes,
)
from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.gradient import Rows, sum_over_keys, sum_over_rows
from splitkv.kernels.tile.product import empty_sum
from splitkv.kernels.tile.visit import (
    Keys,
    cut_tile,
    load_tile,
    own_tile,
    part_of,
    place,
    row_tiles_seen,
    rows_of,
    store_tile,
    tile_and_lane,
    tiles_seen,
    tokens_of,
)
from splitkv.kernels.tile.weight import Queries
from splitkv.plans import Config
from splitkv.problem import Operands, Problem
from splitkv.scores import PLAIN

SUM_TILE, SUM_PARTS = 4, 8  # keys a program of backward_sum, and parts that it reads at once

Shape = tuple[int, int, int]  # keys or rows that a program owns, those of a step, warps
KEYS: tuple[Shape, ...] = (
    *((128, 64, 8), (128, 32, 8), (64, 64, 8), (64, 32, 8), (64, 64, 4), (32, 32, 4)),
    *((32, 16, 4), (16, 16, 4)),
)
QUERIES: tuple[Shape, ...] = (
    *((128, 64, 8), (128, 32, 8), (64, 64, 4), (64, 32, 8), (64, 32, 4), (32, 32, 4)),
    *((32, 16, 4), (16, 16, 4)),
)
# In fp32 products are made in registers: by the larger padded head dimension.
SINGLE: dict[int, tuple[Shape, ...]] = {
    64: ((32, 32, 8), (16, 16, 4)),
    128: ((32, 16, 8), (16, 16, 4)),
    256: ((16, 16, 8), (16, 16, 4)),
}

Gradients = tuple[Tensor | None, ...]


class Tensors(NamedTuple):
    """q, k, v, the gradient of out, and those to find; or the Strides of each."""

    q: Any
    k: Any
    v: Any
    grad: Any
    dq: Any
    dk: Any
    dv: Any


@triton.jit(do_not_specialize=SIZES)
def backward_keys(
    ptrs,  # Tensors
    strides,  # Tensors
    part_ptr,  # [batch, num_kv_heads, near, parts, TILE_N, HEAD_DIM + HEAD_DIM_V] fp32, or None
    stats,  # Stats
    stat_strides,  # Strides
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    slope_ptr,  # [(batch,) num_heads], or None
    scoring,  # Scoring
    softmax_scale,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    total_q,
    total_k,
    stride_slope,
    tiles,  # tiles of keys of a lane
    lanes,
    width,  # lanes that go together
    near,  # tiles that come first
    parts,  # of the rows that see each of them
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET: tl.constexpr,  # the type of offsets inside a row tile
):
    DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    bounds = Bounds(left, right, sink_tokens, chunk)
    pid = tl.program_id(0)

    # whose keys, and which  [TILE_N]
    tokens = cu_k_ptr, cu_q_ptr, seqlen_k, seqlen_q, batch
    before = batch * num_kv_heads * near * parts
    cut = pid < before
    if cut:
        b, h, tile, first_k, len_k, first_q, len_q = cut_tile(pid, parts, *tokens, num_kv_heads)
    else:
        tile, lane = tile_and_lane(pid - before, tiles, lanes, width)
        b, h, tile, first_k, len_k, first_q, len_q = own_tile(
            tile, lane, *tokens, total_k, num_kv_heads, 1, TILE_N
        )
        # the first tiles are made above, but for those of what lies after the last sequence
        len_k = tl.where((tile < near) & (b < batch), 0, len_k)
    if tile * TILE_N >= len_k:
        return
    offs_n = tile * TILE_N + tl.arange(0, TILE_N)
    n_ok = offs_n < len_k
    k = load_tile(place(ptrs.k, strides.k, b, first_k + offs_n, h), n_ok, HEAD_DIM, DIM)
    v = load_tile(place(ptrs.v, strides.v, b, first_k + offs_n, h), n_ok, HEAD_DIM_V, DIM_V)

    # the rows that see them
    head = h * GROUP
    slope_at = None
    if slope_ptr is not None:
        slope_at = slope_ptr + b * stride_slope + head
    q_head = place(ptrs.q, strides.q, b, first_q, head)
    grad_head = place(ptrs.grad, strides.grad, b, first_q, head)
    totals = place(stats.total + first_q * GROUP, stat_strides, b, first_q, h)
    deltas = place(stats.delta + first_q * GROUP, stat_strides, b, first_q, h)
    shift, number = len_k - len_q, b * num_kv_heads * GROUP + head
    addresses = q_head, strides.q, grad_head, strides.grad, totals, deltas
    rows = Rows(*addresses, slope_at, shift, len_q, number)
    last = tl.minimum(tile * TILE_N + TILE_N, len_k) - 1
    visit = row_tiles_seen(bounds, tile * TILE_N, last, shift, len_q, GROUP, TILE_M)
    if part_ptr is not None:
        of = tl.where(cut, parts, 1)
        visit = part_of(visit, pid % of, of)
    dk = empty_sum(k, TILE_N, DIM)
    dv = empty_sum(v, TILE_N, DIM_V)
    rest = k, v, offs_n, len_k, rows, scoring, visit, bounds
    dk, dv = sum_over_rows(dk, dv, *rest, GROUP, HEAD_DIM, HEAD_DIM_V, TILE_M, STAGES, OFFSET, True)
    dk, dv = sum_over_rows(
        dk, dv, *rest, GROUP, HEAD_DIM, HEAD_DIM_V, TILE_M, STAGES, OFFSET, False
    )

    dk = dk[0] * softmax_scale
    dv = dv[0]
    if scoring.seed_ptr is not None:
        dv *= scoring.keep_scale
    if part_ptr is not None:
        slot = ((b * num_kv_heads + h) * near + tile) * parts + pid % parts
        slots = slot.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
        part_rows = part_ptr + slots * (HEAD_DIM + HEAD_DIM_V)
        in_part = n_ok & cut
        store_tile(part_rows, dk, in_part, HEAD_DIM)
        store_tile(part_rows + HEAD_DIM, dv, in_part, HEAD_DIM_V)
        n_ok = n_ok & (pid >= before)
    dk_rows = place(ptrs.dk, strides.dk, b, first_k + offs_n, h)
    dv_rows = place(ptrs.dv, strides.dv, b, first_k + offs_n, h)
    store_tile(dk_rows, dk, n_ok, HEAD_DIM)
    store_tile(dv_rows, dv, n_ok, HEAD_DIM_V)


@triton.jit(do_not_specialize=SIZES)
def backward_sum(
    ptrs,  # Tensors
    strides,  # Tensors
    part_ptr,  # as backward_keys leaves it
    cu_k_ptr,
    seqlen_k,
    num_kv_heads,
    near,
    parts,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_N: tl.constexpr,  # of backward_keys
    ROWS: tl.constexpr,  # keys a program
    TOGETHER: tl.constexpr,  # parts that are read at once
    PDL: tl.constexpr,  # begin while backward_keys still runs
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    tile = tl.program_id(0)  # of all sequences and KV heads
    b = tile // near // num_kv_heads
    h = tile // near % num_kv_heads
    first_k, len_k = tokens_of(cu_k_ptr, b, seqlen_k)
    inside = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offs_n = tile % near * TILE_N + inside
    ok = offs_n < len_k
    offs = tl.arange(0, TOGETHER * ROWS)
    row = tl.program_id(1) * ROWS + offs % ROWS
    row_ok = tile % near * TILE_N + row < len_k
    dk = tl.zeros([ROWS, DIM], tl.float32)
    dv = tl.zeros([ROWS, DIM_V], tl.float32)
    for first in range(0, parts, TOGETHER):
        part = first + offs // ROWS
        part_rows = part_ptr + ((tile * parts + part).to(tl.int64) * TILE_N + row) * (
            HEAD_DIM + HEAD_DIM_V
        )
        part_ok = row_ok & (part < parts)
        some = load_tile(part_rows, part_ok, HEAD_DIM, DIM)
        dk += tl.sum(tl.reshape(some, [TOGETHER, ROWS, DIM]), 0)
        some = load_tile(part_rows + HEAD_DIM, part_ok, HEAD_DIM_V, DIM_V)
        dv += tl.sum(tl.reshape(some, [TOGETHER, ROWS, DIM_V]), 0)
    store_tile(place(ptrs.dk, strides.dk, b, first_k + offs_n, h), dk, ok, HEAD_DIM)
    store_tile(place(ptrs.dv, strides.dv, b, first_k + offs_n, h), dv, ok, HEAD_DIM_V)


@triton.jit(do_not_specialize=SIZES)
def backward_queries(
    ptrs,  # Tensors
    strides,  # Tensors
    stats,  # Stats
    stat_strides,  # Strides
    sink_ptr,  # [num_heads], or None
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    slope_ptr,  # [(batch,) num_heads], or None
    scoring,  # Scoring
    softmax_scale,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    total_q,
    stride_slope,
    tiles,  # row tiles of a lane
    lanes,
    width,  # lanes that go together
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET: tl.constexpr,  # the type of offsets inside a tile of keys
):
    DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)
    bounds = Bounds(left, right, sink_tokens, chunk)

    # whose rows, and which  [TILE_M]
    tile, lane = tile_and_lane(tl.program_id(0), tiles, lanes, width)
    own = tiles - 1 - tile, lane, cu_q_ptr, cu_k_ptr, seqlen_q, seqlen_k, batch, total_q
    b, h, tile_m, first_q, len_q, first_k, len_k = own_tile(*own, num_kv_heads, GROUP, TILE_M)
    if tile_m * TILE_M >= len_q * GROUP:
        return
    offs_m, t, head, ok = rows_of(tile_m, h, len_q, GROUP, TILE_M)
    q = load_tile(place(ptrs.q, strides.q, b, first_q + t, head), ok, HEAD_DIM, DIM)
    grad = load_tile(place(ptrs.grad, strides.grad, b, first_q + t, head), ok, HEAD_DIM_V, DIM_V)
    total_rows = place(stats.total + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
    total = tl.load(total_rows, mask=ok, other=float("inf"))
    delta_rows = place(stats.delta + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
    delta = tl.load(delta_rows, mask=ok, other=0.0)

    # the keys that they see
    shift = len_k - len_q
    slope = None
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + b * stride_slope + head, mask=ok, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    sequence_head = (b * num_kv_heads * GROUP + head)[:, None]
    queries = Queries(t[:, None], (t + shift)[:, None], slope, sequence_head)
    k_head = place(ptrs.k, strides.k, b, first_k, h)
    v_head = place(ptrs.v, strides.v, b, first_k, h)
    keys = Keys(k_head, v_head, strides.k.t, strides.v.t, len_k)
    t_first, t_last = token_range(tile_m, len_q, GROUP, TILE_M)
    visit = tiles_seen(bounds, shift + t_first, shift + t_last, len_k, TILE_N)
    dq = empty_sum(q, TILE_M, DIM)
    ds_sum = tl.zeros([TILE_M], tl.float32)
    ds_far = ds_sum
    p_far = ds_sum
    rest = q, grad, total, delta, stats, keys, queries, scoring, visit, bounds
    dq, ds_sum, ds_far, p_far = sum_over_keys(
        dq, ds_sum, ds_far, p_far, *rest, HEAD_DIM, HEAD_DIM_V, TILE_N, STAGES, OFFSET, True
    )
    dq, ds_sum, ds_far, p_far = sum_over_keys(
        dq, ds_sum, ds_far, p_far, *rest, HEAD_DIM, HEAD_DIM_V, TILE_N, STAGES, OFFSET, False
    )
    dq_rows = place(ptrs.dq, strides.dq, b, first_q + t, head)
    store_tile(dq_rows, dq[0] * softmax_scale, ok, HEAD_DIM)

    # delta has the rounding of out in it; sum_n p dp = sum_n ds + delta sum_n p has not
    exact = ds_sum + delta
    if stats.sink is not None:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32) * 1.4426950408889634
        p_sink = tl.exp2(sink - total)
        exact -= delta * p_sink
        sink_rows = place(stats.sink + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
        tl.store(sink_rows, -p_sink * exact, mask=ok)
    if stats.slope is not None:
        slope_rows = place(stats.slope + first_q * GROUP, stat_strides, b, first_q, h) + offs_m
        error = tl.load(slope_rows, mask=ok, other=0.0) - exact
        tl.store(slope_rows, -(ds_far + error * p_far), mask=ok)


def shapes(problem: Problem, device: Device, found: Sequence[Shape], sums: int) -> Iterator[Shape]:
    """Those that fit, for a program that sums up so many columns; two stages each.

    Registers hold the sums, s and ds, and more beside padding or score modifiers; without wgmma
    also what is multiplied. The limits are from where ptxas spills inside a loop. On sm_100 weights
    and sums go through shared memory.
    """
    dims = padded_dims(problem)
    if problem.element_bytes > 2:
        found = SINGLE[max(64, *dims)]
    wgmma, staged = device.capability[0] == 9, device.capability[0] in (10, 11)
    padded = dims != (problem.head_dim, problem.head_dim_v)
    more = 32 * (padded or problem.score != PLAIN or problem.dropout)
    for own, step, warps in found:
        registers = own * (sums + 2 * step) / (32 * warps) + more
        tiles = (own + 2 * step) * sum(dims) * problem.element_bytes
        moved = max(2 * step, sum(dims)) * own * problem.element_bytes * staged
        fits = tiles + moved + 16 * (own + step) + 1024 <= device.smem_per_block
        if fits and (registers <= (192 if wgmma or staged else 144) or own <= 32):
            yield own, step, warps


def key_configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape of `backward_keys`, the best first."""
    for own, step, warps in shapes(problem, device, KEYS, sum(padded_dims(problem))):
        yield Config(tile_m=step, tile_n=own, num_warps=warps, num_stages=2)


def query_configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape of `backward_queries`, the best first."""
    for own, step, warps in shapes(problem, device, QUERIES, padded_dims(problem)[0]):
        yield Config(tile_m=own, tile_n=step, num_warps=warps, num_stages=2)


def backward_for(problem: Problem, device: Device, operands: Operands) -> Any:
    """What makes the gradients of a call: the kernels for Hopper where they can, else these."""
    from splitkv.kernels.hopper import backward as hopper
    from splitkv.kernels.hopper.prefill import unfit

    if hopper.unsupported(problem, device) or unfit(operands):
        return Backward(problem, device)
    return hopper.Backward(problem, device)


class Backward:
    """The kernels bound to one problem, device and memory layout.

    Called with the operands of a forward, its seed, out and lse, and the gradients of both; returns
    those of q, k, v, sink_logits and alibi_slopes.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        keys: Config | None = None,
        queries: Config | None = None,
    ) -> None:
        self.problem, self.device = problem, device
        self.keys = keys or next(key_configs(problem, device))
        self.queries = queries or next(query_configs(problem, device))

    def __call__(
        self,
        operands: Operands,
        seed: Tensor | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        of_slopes: bool,
    ) -> Gradients:
        x = operands
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        stats = statistics(self.problem, x, out, lse, grad_out, grad_lse, of_slopes)
        found = (torch.empty_like(tensor) for tensor in (x.q, x.k, x.v))
        tensors = Tensors(x.q, x.k, x.v, grad_out, *found)
        both = tensors, Tensors(*(strides_of(tensor) for tensor in tensors))
        self.launch_keys(x, seed, stats, both)
        self.launch_queries(x, seed, stats, both)
        dsink = dslopes = None
        if x.sink_logits is not None:
            dsink = stats.sink.sum((0, 2)).flatten().to(x.sink_logits.dtype)
        if stats.slope is not None:
            dslopes = self.of_slopes(x, stats.slope).to(x.alibi_slopes.dtype)
        return tensors.dq, tensors.dk, tensors.dv, dsink, dslopes

    def launch_keys(self, x: Operands, seed: Tensor | None, stats: Stats, both: Any) -> None:
        p, c = self.problem, self.keys
        total = x.k.shape[:-2].numel()
        row_bytes = p.seqlen_q * p.group * (p.head_dim + p.head_dim_v) * p.element_bytes
        tiling = tiles_and_lanes(p, self.device, total, 1, c.tile_n, row_bytes)
        near, parts = cut_tiles(p, self.device, c)
        cut = p.batch * p.num_kv_heads * near
        part = None
        if parts > 1:
            shape = cut, parts, c.tile_n, p.head_dim + p.head_dim_v
            part = x.q.new_empty(shape, dtype=torch.float32)
        programs = cut * parts + tiling[0] * tiling[1]
        if programs:
            backward_keys[(programs,)](
                *(*both, part, stats, strides_of_stats(p, stats), *self.shared(x, seed), total),
                *(stride_slope(x.alibi_slopes), *tiling, near, parts),
                *(p.group, p.head_dim, p.head_dim_v, c.tile_m, c.tile_n, c.num_stages),
                offset_type(c.tile_m, p.group, x.q, both[0].grad),
                num_warps=c.num_warps,
                enable_fp_fusion=True,
            )
        if part is not None:
            backward_sum[(cut, triton.cdiv(c.tile_n, SUM_TILE))](
                *(*both, part, x.cu_seqlens_k, p.seqlen_k, p.num_kv_heads, near, parts),
                *(p.head_dim, p.head_dim_v, c.tile_n, SUM_TILE, SUM_PARTS, False),
                enable_fp_fusion=True,
            )

    def launch_queries(self, x: Operands, seed: Tensor | None, stats: Stats, both: Any) -> None:
        p, c = self.problem, self.queries
        key_bytes = p.kv_bytes // max(p.batch * p.num_kv_heads, 1)
        total = x.q.shape[:-2].numel()
        tiling = tiles_and_lanes(p, self.device, total, p.group, c.tile_m, key_bytes)
        backward_queries[(tiling[0] * tiling[1],)](
            *(*both, stats, strides_of_stats(p, stats), x.sink_logits, *self.shared(x, seed)),
            *(stride_slope(x.alibi_slopes), *tiling, p.group, p.head_dim, p.head_dim_v),
            *(c.tile_m, c.tile_n, c.num_stages, offset_type(c.tile_n, 1, x.k, x.v)),
            num_warps=c.num_warps,
            enable_fp_fusion=True,
        )

    def shared(self, x: Operands, seed: Tensor | None) -> tuple[Any, ...]:
        """The arguments of both kernels from cu_q_ptr to total_q."""
        p = self.problem
        return (
            *(x.cu_seqlens_q, x.cu_seqlens_k, x.alibi_slopes, scoring_of(x, seed)),
            *(x.softmax_scale, *p.mask.bounds, p.seqlen_q, p.seqlen_k, p.batch, p.num_kv_heads),
            x.q.shape[:-2].numel(),
        )

    def of_slopes(self, x: Operands, rows: Tensor) -> Tensor:
        """[num_heads] or [batch, num_heads] from rows as in Stats."""
        if x.alibi_slopes.dim() == 1:
            return rows.sum((0, 2)).flatten()
        rows = rows.transpose(1, 2).flatten(2)  # [sequences, tokens, num_heads]
        if self.problem.kind == "varlen":
            rows = reference.pad_sequences(rows[0], x.cu_seqlens_q, self.problem.seqlen_q)
        return rows.sum(1)
