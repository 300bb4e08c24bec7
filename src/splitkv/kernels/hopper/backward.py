"""Gradients of attention for Hopper: tiles by TMA, five products by two warpgroups.

Computes what kernels/backward.py computes, without dropout, soft cap and ALiBi. After
`backward_rows`, which finds total and delta, a program has 128 keys, 64 where head_dim is more than
that, and visits the rows that see them, the heads of the group one after another:

    p[n, r]  = exp(scale k[n] . q[r] - total[r])    ds[n, r] = p[n, r] (v[n] . dout[r] - delta[r])
    dv[n]   += p[n, r] dout[r]    dk[n] += scale ds[n, r] q[r]    dq[r] += scale ds[n, r] k[n]

Scores are transposed, so that p and ds come out of the products in the registers from which dv and
dk take them. dq is summed up over programs: TMA adds their tiles to fp32 sums in memory, in the
order of a warpgroup's registers, and `hopper_backward_round` brings these into the order and type
of dq. Such sums differ from run to run in their last bits. With `deterministic` programs of 128
keys add to a tile of rows in turns, in the order of their keys, where every row sees every key: all
come to it at about the same time. Elsewhere they would wait for each other, and
`hopper_backward_queries` makes dq, and S and dP once more: seven products.

As in kernels/backward.py tiles of sink tokens come before all others, and the rows that see a tile
are cut into parts where it would be the last to end or there are few tiles.

Shapes      as kernels/prefill.py; rows of statistics: see Stats, every head a group of its own
Grid        parts x KV heads x sequences x tiles that come first; then
            tiles of keys x lanes, the first and so heaviest first, a lane being a KV head, dense of
            one sequence: as many lanes together as have a tile for every SM
Traffic     reads k, v, and for each tile of keys q, dout and 8 bytes of statistics of the rows that
            see it; writes dk, dv; dq: `backward_rows` sets the fp32 sums to 0, each tile of keys
            adds to them, `hopper_backward_round` reads them and writes dq; flops 5 products of
            2 * pairs * head_dim where the forward has 2
Numerics    scores, p, ds and sums in fp32; p and ds are rounded to the type of q before a product,
            p with 64 keys also before it becomes ds, with sink logits to fp16.
            Rows and keys behind the end of a packed sequence are cleared before they are multiplied
            with zeros, as those of the next sequence may be NaN or infinite. Delta has the rounding
            of out in it; dsink has not: threads sum up ds, each row's times p_sink, in fp32
Limits      sm_90; bf16 or fp16; head_dim and head_dim_v equal and 64, 128 or 256, or 192 and 128;
            no soft cap, ALiBi or dropout; addresses and strides that are multiples of 16 bytes;
            otherwise those of kernels/prefill.py. Turns need programs to be started in the order of
            their numbers
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.device import Device
from splitkv.kernels import backward, prefill
from splitkv.kernels.backward_parts import cut_tiles
from splitkv.kernels.backward_rows import CLEARED, Stats, statistics
from splitkv.kernels.hopper import backward_queries
from splitkv.kernels.hopper.backward_loop import (
    Barriers,
    Boxes,
    Inputs,
    KeyGradients,
    RowTiles,
    Tiles,
    Work,
    finish_keys,
    own_tokens,
    produce,
)
from splitkv.kernels.hopper.backward_round import hopper_backward_round
from splitkv.kernels.hopper.backward_shapes import (
    HEAD_DIMS,
    configs,
    grad_stages,
    in_turns,
    pieces,
    tiling,
)
from splitkv.kernels.hopper.backward_sinks import put_no_sinks, threads_with_ds
from splitkv.kernels.hopper.backward_sums import (
    SUM_COLUMNS,
    Exchange,
    add_up,
    allocate_exchange,
)
from splitkv.kernels.hopper.backward_wide import run_wide
from splitkv.kernels.hopper.prefill import fits_tma
from splitkv.kernels.hopper.ring import arrivals, reinterpret
from splitkv.kernels.sequence_sizes import LOG2_E, bounds_of, strides_of
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.visit import cut_tile, row_tiles_seen, tile_and_lane
from splitkv.plans import Config
from splitkv.problem import Operands, Problem

BOXES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
SUMS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)

SIZES = (  # arguments whose values are no reason to compile again
    *("scale", "scale_log2", "left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch"),
    *("num_kv_heads", "total_q", "total_k", "tiles", "lanes", "width", "sum_tiles", "near"),
    *("parts", "sink_columns", "sink_first"),
)


@gluon.jit
def allocate(inputs, STAGES: gl.constexpr, TILE_N: gl.constexpr):
    """(Boxes, Tiles, Barriers) of a program, the barriers initialised."""
    dtype: gl.constexpr = inputs.q.dtype
    TILE_M: gl.constexpr = inputs.q.block_type.shape[1]
    DIM: gl.constexpr = inputs.q.block_type.shape[3]
    WIDE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows: gl.constexpr = [STAGES, 1, TILE_M, 1, DIM]
    keys: gl.constexpr = [1, TILE_N, 1, DIM]
    boxes = Boxes(
        gl.allocate_shared_memory(dtype, rows, inputs.q.layout),
        gl.allocate_shared_memory(dtype, rows, inputs.q.layout),
        gl.allocate_shared_memory(dtype, keys, inputs.k.layout),
        gl.allocate_shared_memory(dtype, keys, inputs.k.layout),
    )
    less = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], ROW)
    p_sink = less
    if inputs.sink_ptr is not None:
        p_sink = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], ROW)
    tiles = Tiles(
        reinterpret(boxes.q, dtype, [STAGES, TILE_M, DIM], WIDE),
        reinterpret(boxes.grad, dtype, [STAGES, TILE_M, DIM], WIDE),
        reinterpret(boxes.k, dtype, [TILE_N, DIM], WIDE),
        reinterpret(boxes.v, dtype, [TILE_N, DIM], WIDE),
        gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], ROW),
        *(less, p_sink),
    )
    # rows: TMA, and the warp that copies statistics
    bars = Barriers(arrivals(1, 1), arrivals(STAGES, 2), arrivals(STAGES, 2))
    return boxes, tiles, bars


@gluon.jit
def run_tiles(
    inputs,  # Inputs
    sums_desc,
    turn_ptr,
    work,  # Work
    visit,  # RowTiles
    bounds,  # Bounds
    scale_log2,
    out,  # KeyGradients
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
):
    """A program from its tiles on."""
    TILE_N: gl.constexpr = inputs.k.block_type.shape[1]
    boxes, held, bars = allocate(inputs, STAGES, TILE_N)
    tl.extra.cuda.gdc_wait()  # for statistics, and sums that are 0
    # A barrier that no role waits at would be in memory that Triton takes for what it hands to the
    # roles, and would be initialised over it.
    if sums_desc is None:
        exchange = Exchange(None, None, None, None, None, None)
        gl.warp_specialize(
            [
                (
                    finish_keys,
                    (held, exchange, bars, work, visit, bounds, scale_log2, out, PACKED, 0),
                ),
                (
                    finish_keys,
                    (held, exchange, bars, work, visit, bounds, scale_log2, out, PACKED, 1),
                ),
                (produce, (inputs, boxes, held, bars, work, visit, GROUP)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        exchange = allocate_exchange(inputs, sums_desc, TILE_N)
        gl.warp_specialize(
            [
                (
                    finish_keys,
                    (held, exchange, bars, work, visit, bounds, scale_log2, out, PACKED, 0),
                ),
                (
                    finish_keys,
                    (held, exchange, bars, work, visit, bounds, scale_log2, out, PACKED, 1),
                ),
                (produce, (inputs, boxes, held, bars, work, visit, GROUP)),
                (add_up, (sums_desc, turn_ptr, exchange, work, visit)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )


@gluon.jit(do_not_specialize=SIZES)
def hopper_backward(
    q_desc,  # [batch, seqlen_q, num_heads, DIM], or [1, total_q, num_heads, DIM], in tiles of rows
    grad_desc,  # as q_desc
    k_desc,  # the same of keys and KV heads
    v_desc,
    total_ptr,  # Stats.total of heads without groups
    delta_ptr,
    sink_ptr,  # [num_heads], or None
    sink_sums_ptr,  # [num_heads, columns] fp32: see backward_sinks.py
    dk_ptr,  # as k
    dv_ptr,
    dk_strides,  # Strides
    dv_strides,
    part_ptr,  # [batch, num_kv_heads, near, parts, TILE_N, KEY_DIM + DIM_V] fp32, or None
    sums_desc,  # [heads, tiles of rows, TILE_M * KEY_DIM] fp32 in the order of `put_sums`, or None
    turn_ptr,  # [heads, tiles of rows] int32: see `add_up`
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    scale,
    scale_log2,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    total_q,
    total_k,
    tiles,  # tiles of keys of a lane
    lanes,
    width,  # lanes that go together
    sum_tiles,  # of a head, and dense of a sequence
    sink_columns,  # of sink_sums_ptr, and the first of these kernels
    sink_first,
    near,  # tiles that come first
    parts,  # of the rows that see each of them
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    GRAD_STAGES: gl.constexpr,
    KEY_DIM: gl.constexpr,  # of q and k without padding
):
    TILE_M: gl.constexpr = q_desc.block_type.shape[1]
    TILE_N: gl.constexpr = k_desc.block_type.shape[1]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    PACKED: gl.constexpr = cu_q_ptr is not None
    bounds = Bounds(left, right, sink_tokens)
    tl.extra.cuda.gdc_launch_dependents()  # they wait for this grid before they read
    pid = gl.program_id(0)
    tokens = cu_k_ptr, cu_q_ptr, seqlen_k, seqlen_q, batch
    before = batch * num_kv_heads * near * parts
    cut = pid < before
    if cut:
        b, h, tile, first_k, len_k, first_q, len_q = cut_tile(pid, parts, *tokens, num_kv_heads)
        place = (tile * batch + b) * parts + pid % parts
    else:
        tile, lane = tile_and_lane(pid - before, tiles, lanes, width)
        place = near * batch * parts + tile
        if cu_q_ptr is None:
            place += lane // num_kv_heads * tiles
        b, h, tile, first_k, len_k, first_q, len_q = own_tokens(
            tile, lane, *tokens, total_k, num_kv_heads, TILE_N
        )
        # the first tiles are made above, but for those of what lies after the last sequence
        len_k = gl.where((tile < near) & (b < batch), 0, len_k)
    if sink_ptr is not None:
        sink_ptr += h * GROUP
        sink_sums_ptr += (h * GROUP).to(gl.int64) * sink_columns
        sink_sums_ptr += sink_first + place * threads_with_ds(KEY_DIM)
    if tile * TILE_N >= len_k:
        tl.extra.cuda.gdc_wait()  # this grid must not end before backward_rows does
        if sink_ptr is not None:
            put_no_sinks(sink_sums_ptr, sink_columns, GROUP, KEY_DIM)
        return
    shift = len_k - len_q
    last = gl.minimum(tile * TILE_N + TILE_N, len_k) - 1
    seen = row_tiles_seen(bounds, tile * TILE_N, last, shift, len_q, 1, TILE_M)
    first = seen.skip
    end = first + seen.count
    whole = tile * TILE_N + TILE_N <= len_k  # else keys that are not there have to be masked
    middle = gl.where(whole, first + seen.middle_first, end)
    middle_end = gl.where(whole, first + seen.middle_last, end)
    if part_ptr is not None:
        per = gl.where(cut, (seen.count + parts - 1) // parts, seen.count)
        first = gl.minimum(first + gl.where(cut, pid % parts * per, 0), end)
        end = gl.minimum(first + per, end)
    visit = RowTiles(end - first, middle - first, middle_end - first)
    if sink_ptr is not None:
        if visit.count == 0:
            put_no_sinks(sink_sums_ptr, sink_columns, GROUP, KEY_DIM)

    # from here on keys count from the first of the tile and rows from the first that it visits
    t = first * TILE_M
    n = tile * TILE_N
    len_k -= n
    first_k += n
    shift += t - n
    near_keys = sink_tokens
    if sink_tokens is not None:
        near_keys = sink_tokens - n
    bounds = Bounds(left, right, near_keys)
    if cu_q_ptr is None:
        stat_row = (b * num_kv_heads + h) * GROUP * seqlen_q + t
        stat_head = seqlen_q
        sum_tile = (b * num_kv_heads + h) * GROUP * sum_tiles + first
        at = b
    else:
        stat_row = h * GROUP * total_q + first_q + t
        stat_head = total_q
        sum_tile = h * GROUP * sum_tiles + first_q // TILE_M + b + first
        at = b * 0
    work = Work(
        *(visit.count * GROUP, at, h, tile, first_k, len_k, first_q + t, len_q - t, shift),
        *(stat_head, sum_tile, sum_tiles),
    )
    dk_at = at.to(gl.int64) * dk_strides.b + first_k.to(gl.int64) * dk_strides.t
    dv_at = at.to(gl.int64) * dv_strides.b + first_k.to(gl.int64) * dv_strides.t
    dk_ptr += dk_at + h.to(gl.int64) * dk_strides.h
    dv_ptr += dv_at + h.to(gl.int64) * dv_strides.h
    if part_ptr is not None:
        slot = ((b * num_kv_heads + h) * near + tile) * parts + pid % parts
        part_ptr += slot.to(gl.int64) * (TILE_N * (KEY_DIM + DIM_V))
    own_sinks = sink_sums_ptr, sink_columns
    of_keys = dk_ptr, dv_ptr, dk_strides.t, dv_strides.t, scale, part_ptr, cut
    out = KeyGradients(*of_keys, *own_sinks)
    own_stats = total_ptr + stat_row, delta_ptr + stat_row, sink_ptr
    inputs = Inputs(q_desc, grad_desc, k_desc, v_desc, *own_stats)
    of_rows = work, visit, bounds, scale_log2, out
    if KEY_DIM > 128:
        run_wide(inputs, sums_desc, *of_rows, GROUP, STAGES, GRAD_STAGES, PACKED, KEY_DIM)
    else:
        run_tiles(inputs, sums_desc, turn_ptr, *of_rows, GROUP, STAGES, PACKED)


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    reasons = prefill.unsupported(replace(problem, head_dim=64, head_dim_v=64), device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(
        problem.dtype in ("bfloat16", "float16"),
        f"dtype {problem.dtype}: expected bfloat16 or float16",
    )
    dims = problem.head_dim, problem.head_dim_v
    known = ", ".join(f"{a}/{b}" for a, b in HEAD_DIMS)
    expect(dims in HEAD_DIMS, f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected one of {known}")
    expect(not problem.score.softcap, "softcap: expected none")
    expect(not problem.score.alibi, "alibi: expected none")
    expect(not problem.dropout, "dropout: expected none")
    expect(not problem.mask.chunk, f"attention_chunk {problem.mask.chunk}: expected 0")
    return reasons


def descriptor(x: Any, tokens: int) -> TensorDescriptor:
    """x [(batch,) tokens, heads, dim] as TMA is to see it, so many tokens of a head at a time."""
    shape, strides = list(x.shape), list(x.stride())
    if len(shape) == 3:
        shape, strides = [1, *shape], [shape[-1], *strides]
    # along a single element there are no steps, and torch may say anything
    strides = [step if n > 1 else shape[-1] for n, step in zip(shape, strides, strict=True)]
    box = [1, tokens, 1, 1 << (shape[3] - 1).bit_length()]
    return TensorDescriptor(x, shape, [*strides[:3], 1], box, BOXES)


def sums_descriptor(sums: Any, pieces: int) -> TensorDescriptor:
    """Sums [.., size] of dq, one of so many pieces of a tile at a time."""
    columns = SUM_COLUMNS.value
    rows, box = sums.shape.numel() // columns, sums.shape[-1] // (pieces * columns)
    return TensorDescriptor(sums, [rows, columns], [columns, 1], [box, columns], SUMS)


class Backward:
    """The kernels bound to one problem and device; called as kernels.backward.Backward is.

    The operands have to be such that `prefill.unfit` says nothing of them; the gradient of the
    output is copied where TMA cannot describe it.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        config: Config | None = None,
        queries: Config | None = None,
    ) -> None:
        self.problem, self.device = problem, device
        self.config = config or next(configs(problem, device))
        self.queries = queries or next(backward_queries.configs(problem, device))

    def __call__(
        self,
        operands: Operands,
        seed: Tensor | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        of_slopes: bool,
    ) -> backward.Gradients:
        x = operands
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        elif not fits_tma(grad_out):
            grad_out = grad_out.contiguous()
        p = replace(self.problem, num_kv_heads=self.problem.num_heads)  # every head has its rows
        memory, sums, turns = self.sums_of(x)
        sinks = self.programs(x) // self.problem.num_kv_heads * threads_with_ds(p.head_dim)
        stats = statistics(p, x, out, lse, grad_out, grad_lse, False, sinks, memory)
        found = (torch.empty_like(tensor) for tensor in (x.q, x.k, x.v))
        tensors = backward.Tensors(x.q, x.k, x.v, grad_out, *found)
        self.launch_keys(x, stats, tensors, sums, turns)
        if sums is None:
            self.launch_queries(x, stats, tensors)
        else:
            self.round(x, sums, tensors.dq)
        dsink = None
        if x.sink_logits is not None:
            dsink = stats.sink_sums.sum(1).to(x.sink_logits.dtype)
        return tensors.dq, tensors.dk, tensors.dv, dsink, None

    def sums_of(self, x: Operands) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(memory to set to 0, in it the sums of dq, turns); None of what is not needed."""
        p = self.problem
        if p.deterministic and not in_turns(p):
            return None, None, None
        shape = self.sums_shape(x)
        size, tiles = self.config.tile_m * p.head_dim, shape[0] * shape[1]
        turns = tiles if p.deterministic else 0
        numel = triton.cdiv(tiles * size + turns, CLEARED) * CLEARED
        memory = x.q.new_empty(numel, dtype=torch.float32)
        sums = memory[: tiles * size].view(*shape, size)
        return memory, sums, memory[tiles * size :][:turns].view(torch.int32) if turns else None

    def sums_shape(self, x: Operands) -> tuple[int, int]:
        """Lanes of query heads, and the tiles of rows of each."""
        p = self.problem
        tiling_q = tiling(p, self.device, x.q.shape[:-2].numel(), p.num_heads, self.config.tile_m)
        return tiling_q[1], tiling_q[0]

    def programs(self, x: Operands) -> int:
        """Of `hopper_backward`, the same number for every KV head."""
        p, c = self.problem, self.config
        tiles, lanes, _ = tiling(p, self.device, x.k.shape[:-2].numel(), p.num_kv_heads, c.tile_n)
        near, parts = cut_tiles(p, self.device, c)
        return p.batch * p.num_kv_heads * near * parts + tiles * lanes

    def launch_keys(
        self,
        x: Operands,
        stats: Stats,
        tensors: backward.Tensors,
        sums: Tensor | None,
        turns: Tensor | None,
    ) -> None:
        """dk, dv and, in fp32, dq where there are sums for it."""
        p, c = self.problem, self.config
        total = x.k.shape[:-2].numel()
        tiles, lanes, width = tiling(p, self.device, total, p.num_kv_heads, c.tile_n)
        near, parts = cut_tiles(p, self.device, c)
        cut = p.batch * p.num_kv_heads * near
        programs, columns = self.programs(x), 0
        if stats.sink_sums is not None:
            columns = stats.sink_sums.shape[1]
        first = columns - programs // p.num_kv_heads * threads_with_ds(p.head_dim)
        summed = None if sums is None else sums_descriptor(sums, pieces(p))
        part = None
        if parts > 1:
            shape = cut, parts, c.tile_n, p.head_dim + p.head_dim_v
            part = x.q.new_empty(shape, dtype=torch.float32)
        hopper_backward[(programs,)](
            descriptor(x.q, c.tile_m),
            descriptor(tensors.grad, c.tile_m),
            descriptor(x.k, c.tile_n),
            descriptor(x.v, c.tile_n),
            *(stats.total, stats.delta, x.sink_logits, stats.sink_sums),
            *(tensors.dk, tensors.dv, strides_of(tensors.dk), strides_of(tensors.dv)),
            *(part, summed, turns, x.cu_seqlens_q, x.cu_seqlens_k),
            *(x.softmax_scale, x.softmax_scale * LOG2_E, *bounds_of(p)),
            *(p.seqlen_q, p.seqlen_k, p.batch, p.num_kv_heads),
            *(x.q.shape[:-2].numel(), total, tiles, lanes, width),
            *(
                self.sums_shape(x)[1],
                columns,
                first,
                near,
                parts,
                p.group,
                c.num_stages,
                grad_stages(p, c),
                p.head_dim,
            ),
            num_warps=4,  # of the first consumer
            enable_fp_fusion=True,
            launch_pdl=True,
        )
        if part is not None:
            both = tensors, backward.Tensors(*(strides_of(tensor) for tensor in tensors))
            backward.backward_sum[(cut, triton.cdiv(c.tile_n, backward.SUM_TILE))](
                *(*both, part, x.cu_seqlens_k, p.seqlen_k, p.num_kv_heads, near, parts),
                *(p.head_dim, p.head_dim_v, c.tile_n, backward.SUM_TILE, backward.SUM_PARTS, True),
                enable_fp_fusion=True,
                launch_pdl=True,
            )

    def round(self, x: Operands, sums: Tensor, dq: Tensor) -> None:
        """dq of its fp32 sums."""
        p, c = self.problem, self.config
        lanes, tiles, _ = sums.shape
        hopper_backward_round[(tiles * lanes,)](
            *(sums, dq, strides_of(dq), x.cu_seqlens_q, x.softmax_scale, p.seqlen_q, p.batch),
            *(p.num_heads, x.q.shape[:-2].numel(), tiles, c.tile_m, p.head_dim),
            num_warps=8,
            enable_fp_fusion=True,
            launch_pdl=True,
        )

    def launch_queries(self, x: Operands, stats: Stats, tensors: backward.Tensors) -> None:
        """dq, in one order."""
        p, c = self.problem, self.queries
        total = x.q.shape[:-2].numel()
        tiles, lanes, width = tiling(p, self.device, total, p.num_heads, c.tile_m)
        backward_queries.hopper_backward_queries[(tiles * lanes,)](
            descriptor(x.q, c.tile_m),
            descriptor(tensors.grad, c.tile_m),
            descriptor(x.k, c.tile_n),
            descriptor(x.v, c.tile_n),
            *(tensors.dq, strides_of(tensors.dq), stats.total, stats.delta),
            *(x.cu_seqlens_q, x.cu_seqlens_k, x.softmax_scale, x.softmax_scale * LOG2_E),
            *(*bounds_of(p), p.seqlen_q, p.seqlen_k, p.batch, p.num_heads, total),
            *(tiles, lanes, width, p.group, c.num_stages, p.head_dim),
            num_warps=4,  # of the first consumer
            enable_fp_fusion=True,
        )
