"""Split-KV decode attention, for any NVIDIA GPU.

Computes, for each sequence b, KV head h and the rows r = (query token, grouped head) that share it,

    s[r, n]  = score(scale * q[r] . k[n])          n in the bands of row r, the visible keys
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])
    acc[r]   = sum_n exp(s[r, n] - m[r]) v[n]

over one part of the keys, and stores the partial (acc, m, l). `combine` merges the parts. A
sequence of only one part is finished here, out = acc / (l + exp(sink - m)), and leaves no partial.

Shapes      q [batch, seqlen_q, num_heads, head_dim]; k, v and their scales: see kv.py; out as q,
            with head_dim_v
            partials [slots, rows, head_dim_v + 2] fp32, one slot a program
Grid        even: (num_splits, num_kv_heads * row_tiles, batch)
            batch: (programs, num_kv_heads * row_tiles); a program finds its sequence by the lengths
            the num_heads / num_kv_heads heads of all query tokens share each key tile
Traffic     keys, values  batch * num_kv_heads * visible keys * (head_dim + head_dim_v) * kv bytes;
            read
                          once: later row tiles of the same keys find them in the L2
            partials      2 * parts * rows * (head_dim_v + 2) * 4, for sequences of two parts or
                          more
            flops         2 * batch * num_heads * seqlen_q * visible keys * (head_dim + head_dim_v)
Numerics    scores and sums in fp32, base-2 exponentials; p is rounded to the value type before p @
            v; fp32 inputs multiply in IEEE fp32, not tf32; int8 and e4m3 are widened exactly, a
            scale of q or k joins the score, one of v the output, or p where each key has its own
Limits      NVIDIA GPU, sm_80 or newer; bf16, fp16 or fp32; head_dim and head_dim_v multiples of 16
            from 16 to 256; at most 16 query tokens; at most 64 query heads a KV head; batch, and
            KV heads times row tiles, at most 65535; no dropout, no gradient
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from splitkv.device import Device
from splitkv.kernels.combine import FINISHED, Final, combine, merge_tiles, write_absent
from splitkv.kernels.direct import Launch, Repeat, launch_of
from splitkv.kernels.parts import grid, packed_rows, padded_dims, traffic
from splitkv.kernels.tile.band import Bounds, token_range, visible, visited_tiles
from splitkv.kernels.tile.codec import (
    Scales,
    row_scale,
    scale_of_head,
    scale_strides,
    unfit,
    widen,
)
from splitkv.kernels.tile.locate import locate
from splitkv.kernels.tile.product import add_product, row_product
from splitkv.kernels.tile.score import score_log2
from splitkv.kernels.tile.share import (
    Share,
    batch_share,
    part_of_batch,
    parts_of,
    sequence_share,
)
from splitkv.kernels.tile.softmax import finish, finite_or_zero
from splitkv.kv import Paged
from splitkv.plans import Config, Kernel, Plan
from splitkv.problem import Operands, Problem
from splitkv.scores import PLAIN

if TYPE_CHECKING:
    import torch

MAX_HEAD_DIM, MAX_SEQLEN_Q, MAX_GROUP, MAX_SPLITS, MAX_GRID = 256, 16, 64, 1024, 65535
MAX_REGISTER_NEED = 192  # of the 255 that a thread can have: from here on configs spill on sm_90


class KV(NamedTuple):
    """Pointers to keys, values and the page table [batch, max_pages], None where contiguous."""

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any


class Row(NamedTuple):
    """Pointers to a row's sink logit [num_heads], ALiBi slope [(batch,) num_heads] and the scale of
    its quantised q, or None."""

    sink_ptr: Any
    slope_ptr: Any
    scale_ptr: Any


@triton.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "batch",
        "num_kv_heads",
        "left",
        "right",
        "sink_tokens",
        "chunk",
        "parts",
        "size",
        "programs",
        "stride_table",
        "stride_slope",
        "stride_qsb",
        "stride_qst",
        "stride_qsh",
        "stride_sb",
        "stride_sn",
        "stride_sh",
    ]
)
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
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,  # of a sequence, or of a page
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_table,
    stride_slope,
    stride_qsb,  # of the scales of q: a sequence, a token, a head
    stride_qst,
    stride_qsh,
    stride_sb,  # of those of K and V: a sequence or a page, a key, a head
    stride_sn,
    stride_sh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BATCH_P2: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # the combine may start its prologue; it waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    bounds = Bounds(left, right, sink_tokens, chunk)
    share = Share(parts, size, programs)
    DIM: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    DIM_V: tl.constexpr = triton.next_power_of_2(HEAD_DIM_V)

    # whose keys, and which part of them
    row_tiles = (seqlen_q * GROUP + TILE_M - 1) // TILE_M
    head_tile = tl.program_id(1)
    h = head_tile // row_tiles
    tile_m = head_tile % row_tiles
    t_first, t_last = token_range(tile_m, seqlen_q, GROUP, TILE_M)
    part = tl.program_id(0)
    if share.programs is None:
        b = tl.program_id(2)
        slot = (b * tl.num_programs(1) + head_tile) * tl.num_programs(0) + part
    else:
        slot = head_tile * tl.num_programs(0) + part
        offs_b = tl.arange(0, BATCH_P2)
        parts_b = batch_share(
            share, bounds, lens_ptr, batch, seqlen_q, t_first, t_last, offs_b, TILE_N
        )
        b, part, parts_here = part_of_batch(parts_b, offs_b, batch, part)
        if b >= batch:
            return
    keys = seqlen_k
    if lens_ptr is not None:
        keys = tl.load(lens_ptr + b)
    pos_first = keys - seqlen_q + t_first
    pos_last = keys - seqlen_q + t_last
    tiles, near, skip = visited_tiles(bounds, pos_first, pos_last, keys, TILE_N)
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
    pos = (keys - seqlen_q + t)[:, None]
    offs_d = tl.arange(0, DIM)
    offs_v = tl.arange(0, DIM_V)
    slope = None
    if row.slope_ptr is not None:
        slope = tl.load(row.slope_ptr + b * stride_slope + head, mask=row_ok, other=0.0)
        slope = slope.to(tl.float32)[:, None]
    q_rows = q_ptr + b.to(tl.int64) * stride_qb + t.to(tl.int64) * stride_qt + head * stride_qh
    q_ok = row_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
    dtype: tl.constexpr = final.out_ptr.dtype.element_ty
    q = widen(tl.load(q_rows[:, None] + offs_d[None, :], mask=q_ok, other=0.0), dtype)
    k_scale, v_scale = scale_of_head(head_scales, b, h, stride_sb, stride_sh)
    scale *= k_scale * row_scale(row, b, t, head, row_ok, stride_qsb, stride_qst, stride_qsh)

    k_head = kv.k_ptr + h.to(tl.int64) * stride_kh
    v_head = kv.v_ptr + h.to(tl.int64) * stride_vh
    table = None
    if kv.table_ptr is not None:
        table = kv.table_ptr + b.to(tl.int64) * stride_table
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DIM_V], tl.float32)
    first = part * per
    for i in tl.range(first, tl.minimum(first + per, tiles), num_stages=STAGES):
        offs_n = tl.where(i < near, i, i + skip) * TILE_N + tl.arange(0, TILE_N)
        n_ok = offs_n < keys
        outer, inner = locate(table, b, offs_n, n_ok, PAGE_SIZE)
        k_rows = outer * stride_kb + inner * stride_kn
        k_ok = n_ok[:, None] & (offs_d < HEAD_DIM)[None, :]
        k = tl.load(k_head + k_rows[:, None] + offs_d[None, :], mask=k_ok, other=0.0)
        qk = row_product(q, widen(k, dtype))  # [TILE_M, TILE_N]
        if key_scales is not None:
            at = outer * stride_sb + inner * stride_sn + h * stride_sh
            qk *= tl.load(key_scales.k_ptr + at, mask=n_ok, other=0.0)[None, :]
        s = score_log2(qk, scale, softcap, slope, pos, offs_n[None, :])
        s = tl.where(visible(bounds, pos, offs_n[None, :], keys), s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        top = finite_or_zero(m_new)
        p = tl.exp2(s - top[:, None])
        shrink = tl.exp2(m - top)
        m = m_new
        l = l * shrink + tl.sum(p, 1)
        if key_scales is not None:
            p *= tl.load(key_scales.v_ptr + at, mask=n_ok, other=0.0)[None, :]
        v_rows = outer * stride_vb + inner * stride_vn
        v_ok = n_ok[:, None] & (offs_v < HEAD_DIM_V)[None, :]
        v = widen(tl.load(v_head + v_rows[:, None] + offs_v[None, :], mask=v_ok, other=0.0), dtype)
        acc = add_product(acc * shrink[:, None], p.to(dtype), v)
    acc *= v_scale

    out_ok = row_ok[:, None] & (offs_v < HEAD_DIM_V)[None, :]
    if num_parts == 1:
        sink_log2 = None
        if row.sink_ptr is not None:
            sink = tl.load(row.sink_ptr + head, mask=row_ok, other=0.0).to(tl.float32)
            sink_log2 = sink * 1.4426950408889634
        out, lse = finish(acc, m, l, sink_log2)
        out_rows = b.to(tl.int64) * stride_ob + t.to(tl.int64) * stride_ot + head * stride_oh
        out_ptrs = final.out_ptr + out_rows[:, None] + offs_v[None, :]
        tl.store(out_ptrs, out.to(final.out_ptr.dtype.element_ty), mask=out_ok)
        if final.lse_ptr is not None:
            lse_rows = (b * num_kv_heads * GROUP + head).to(tl.int64) * seqlen_q + t
            tl.store(final.lse_ptr + lse_rows, lse, mask=row_ok)
        if partial is not None:
            write_absent(partial.m_ptr, partial.l_ptr, slot_rows, row_ok, FINISHED)
    elif partial is not None:
        acc_ptrs = partial.acc_ptr + slot_rows[:, None] * HEAD_DIM_V + offs_v[None, :]
        tl.store(acc_ptrs, acc, mask=out_ok)
        tl.store(partial.m_ptr + slot_rows, m, mask=row_ok)
        tl.store(partial.l_ptr + slot_rows, l, mask=row_ok)


def unsupported(problem: Problem, device: Device) -> list[str]:
    reasons = []

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(problem.kind == "decode", f"kind {problem.kind}: expected decode")
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
            value % 16 == 0 and 16 <= value <= MAX_HEAD_DIM,
            f"{name} {value}: expected a multiple of 16 from 16 to {MAX_HEAD_DIM}",
        )
    expect(
        problem.seqlen_q <= MAX_SEQLEN_Q,
        f"seqlen_q {problem.seqlen_q}: expected at most {MAX_SEQLEN_Q}",
    )
    expect(
        problem.group <= MAX_GROUP,
        f"query heads a KV head {problem.group}: expected at most {MAX_GROUP}",
    )
    expect(problem.batch <= MAX_GRID, f"batch {problem.batch}: expected at most {MAX_GRID}")
    head_tiles = problem.num_kv_heads * triton.cdiv(problem.rows, tile_m(problem))
    expect(
        head_tiles <= MAX_GRID, f"KV heads x row tiles {head_tiles}: expected at most {MAX_GRID}"
    )
    expect(not problem.dropout, "dropout_p: expected 0")
    expect(not problem.needs_grad, "gradient: expected inputs that require none")
    return reasons


def tile_m(problem: Problem) -> int:
    """Rows a program: the packed rows rounded up to a matrix tile, at most 64.

    In fp32 16: without a matrix unit, more rows would only take registers.
    """
    most = 64 if problem.element_bytes == 2 else 16
    return min(most, max(16, triton.next_power_of_2(max(problem.rows, 1))))


def shared_bytes(problem: Problem, config: Config) -> int:
    """The most shared memory that Triton takes for a config.

    In the loop tiles in flight, q, p, sums of rows and the table; after it acc on its way out.
    """
    dim, dim_v = padded_dims(problem)
    in_flight = config.num_stages + (config.tile_m == 64)  # wgmma still reads the tile before
    a_tile = config.tile_n * (dim + dim_v)
    tiles = in_flight * a_tile * problem.kv_element_bytes
    rows = config.tile_m * (dim + config.tile_n)
    if problem.kv_element_bytes < problem.element_bytes:  # widened, for the matrix unit
        rows += a_tile
    rows += config.tile_n * dim // 2 * (problem.element_bytes > 2)  # halves: tile/product.py
    table = 8 * config.num_stages * config.tile_n if isinstance(problem.place, Paged) else 0
    loop = tiles + rows * problem.element_bytes + 8 * config.tile_m + table
    return max(loop, 4 * config.tile_m * dim_v)


def register_need(problem: Problem, config: Config) -> float:
    """Registers of a thread, besides a fixed number, for acc, s, q and for loading keys and values.

    Each 16 bytes that it loads take addresses and masks, more of them beside score modifiers or a
    window; fp32 tiles are multiplied in registers. Fitted to where ptxas spills on sm_90.
    """
    dim, dim_v = padded_dims(problem)
    element = problem.element_bytes / 4
    plain = problem.score == PLAIN and problem.mask.left is None and not problem.mask.chunk
    a_load = 12 if problem.element_bytes > 2 else 4 if plain else 8
    rows = config.tile_m * (dim_v + config.tile_n + dim * element)
    loads = config.tile_n * (dim + dim_v) * element / 4
    return (rows + a_load * loads) / (32 * config.num_warps)


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, with one split; `num_splits` may then be anything up to 1024."""
    rows = tile_m(problem)
    for tile_n in (64, 32, 128, 16):
        for num_warps in (4, 2, 8):
            for num_stages in (2, 3, 1, 4, 6, 8):
                config = Config(1, rows, tile_n, num_warps, num_stages)
                fits = shared_bytes(problem, config) <= device.smem_per_block
                if fits and register_need(problem, config) < MAX_REGISTER_NEED:
                    yield config


class Launcher:
    """`decode_split` and `combine` bound to one plan and one memory layout.

    Everything that does not change from call to call is worked out here once. The first call goes
    through Triton's own dispatch and keeps what it compiled: `repeat` launches that directly, with
    addresses, unless one is not a multiple of 16, which is another specialisation.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        import torch

        from splitkv.kernels.workspace import partials

        problem, config = plan.problem, plan.config
        q, k, v = operands.q, operands.k, operands.v
        table, slopes, mask = operands.page_table, operands.alibi_slopes, problem.mask
        self.key_scales = problem.codec.granularity == "token"
        native = not q.is_cuda or plan.device.capability >= (8, 9)
        self.in_bits = problem.codec.name == "fp8" and not native
        self.out_shape = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)
        self.lse_shape = (problem.batch, problem.num_heads, problem.seqlen_q)
        self.return_lse, self.partials = problem.return_lse, partials
        self.dtype = getattr(torch, problem.dtype)
        out = operands.out if operands.out is not None else q.new_empty(self.out_shape)

        programs = size = None
        parts: int | None = config.num_splits
        max_parts = config.num_splits if config.merge == "combine" else 1
        if config.schedule == "batch":
            parts, programs = None, config.programs
            max_parts = config.programs - problem.batch
        elif config.schedule == "fixed":
            size = config.split_size // config.tile_n
        self.grid = grid(problem, config)
        rows = packed_rows(problem, config)[1]
        self.partial_rows = math.prod(self.grid) * rows if max_parts > 1 else 0
        self.acc_numel = self.partial_rows * problem.head_dim_v

        batch_p2 = triton.next_power_of_2(problem.batch) if programs else 1
        pdl = bool(q.is_cuda and plan.device.capability >= (9, 0))
        self.tail = (
            problem.seqlen_q,
            problem.seqlen_k,
            problem.batch,
            problem.num_kv_heads,
            *mask.bounds,
            parts,
            size,
            programs,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *out.stride()[:3],
            table.stride(0) if table is not None else 0,
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            *scale_strides(operands.q_scale, operands.q),
            *scale_strides(operands.k_scale, operands.k),
            problem.group,
            problem.head_dim,
            problem.head_dim_v,
            problem.place.page_size if isinstance(problem.place, Paged) else 1,
            batch_p2,
            config.tile_m,
            config.tile_n,
            # an indirect load takes Triton's pipeline two stages a tile in flight
            (2 if table is not None else 1) * config.num_stages + 1,
            pdl and self.partial_rows > 0,
        )
        # multiply and add in one rounding: Triton's default, which from 3.9 on it wants said
        fused = {"enable_fp_fusion": True}
        self.options = {"num_warps": config.num_warps, **fused}
        self.repeat: Callable[..., Any] | None = None

        # by the batch rule most sequences have few parts, but a long one is not to be waited for
        tile_p, tile_v, merge_warps = merge_tiles(
            min(max_parts, 64) if programs else max_parts, problem.head_dim_v
        )
        self.merge_grid = (
            problem.num_kv_heads * problem.rows,
            problem.batch,
            triton.cdiv(problem.head_dim_v, tile_v),
        )
        self.merge_tail = (
            problem.batch,
            problem.num_kv_heads,
            *(*mask.bounds, parts, programs, None, None),
            *out.stride()[:3],
            *(problem.seqlen_q, problem.group, problem.head_dim_v),
            batch_p2,
            config.tile_m,
            config.tile_n,
            tile_p,
            tile_v,
            not programs and max_parts % tile_p == 0,
            pdl,
        )
        self.merge_options = {
            "num_warps": merge_warps,
            **fused,
            **({"launch_pdl": True} if pdl else {}),
        }

    def __call__(self, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        o, done = operands, None
        per_call = o.cache_seqlens, o.page_table, o.sink_logits, o.alibi_slopes
        tensors = o.q, o.k, o.v, o.out, *per_call, o.q_scale, o.k_scale, o.v_scale
        if self.repeat is not None:
            done = self.repeat(*tensors, o.softmax_scale, o.softcap)
        return done or self.dispatch(tensors, o.softmax_scale, o.softcap or None)

    def dispatch(
        self, tensors: tuple[Any, ...], scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch through Triton, which compiles what these arguments need, and keep that."""
        import torch

        q, k, v, out, lens, table, sink, slopes, q_scale, k_scale, v_scale = tensors
        out, lse = q.new_empty(self.out_shape, dtype=self.dtype) if out is None else out, None
        if self.return_lse:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        if self.in_bits:
            q, k, v = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (q, k, v))
        kv, final, row = KV(k, v, table), Final(out, lse), Row(sink, slopes, q_scale)
        scales = None if k_scale is None else Scales(k_scale, v_scale)
        head_scales, key_scales = (None, scales) if self.key_scales else (scales, None)
        partial = merge = None
        if self.partial_rows:
            partial = self.partials(q, self.acc_numel, self.partial_rows)
        scale = scale / softcap if softcap else scale * 1.4426950408889634
        rest = lens, final, partial, row, head_scales, key_scales, scale, softcap
        split = self.first_split(q, kv, *rest)
        if partial is not None:
            merge = combine[self.merge_grid](
                partial, final, lens, sink, *self.merge_tail, **self.merge_options
            )
        aligned = not any(x is not None and x.data_ptr() & 15 for x in tensors)
        later = None
        if split is not None and aligned and self.repeat is None:
            later = self.later_splits(split)
        if later is not None:
            self.repeat = Repeat(
                later,
                launch_of(merge, self.merge_grid, self.merge_tail) if merge else None,
                out.device,
                out.dtype,
                self.out_shape,
                self.lse_shape if self.return_lse else None,
                self.acc_numel,
                self.partial_rows,
                key_scales=self.key_scales,
            ).call
        return out, lse

    def first_split(self, *args: Any) -> Any:
        """Launch the kernel through Triton; the compiled kernel."""
        return decode_split[self.grid](*args, *self.tail, **self.options)

    def later_splits(self, compiled: Any) -> Launch | None:
        """A function that launches it again: see `Repeat`. None: Triton has to, every time."""
        return launch_of(compiled, self.grid, self.tail)


KERNEL = Kernel(
    *("decode_split", unsupported, configs, traffic, Launcher, unfit),
    schedules=("even", "batch", "fixed"),
)
