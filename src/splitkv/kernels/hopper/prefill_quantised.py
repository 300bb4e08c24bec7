"""Attention of whole sequences stored in 8 bits, for Hopper: products on the int8 and e4m3 units.

Computes, for q, k and v that are stored values times scales,

    s[r, n]  = score(scale * q_scale[r] * k_scale[n] * (q[r] . k[n]))     n in the bands of row r
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v_scale[n] * v[n] / (l + exp(sink - m))

A q of 16 bits is rounded here, with a scale a token and head. Products of 8 bits: "half" is q . k,
and v is widened to 16 bits; "full" is p . v too, for which p is rounded and v stays as it is
stored. A program has a warpgroup that has tiles copied and makes the values ready, beside the two
or three that multiply; see prefill_quantised_tile.py.

Shapes      as kernels/prefill.py, out in the working type; q_scale one number, [num_heads] or one a
            token and head; k_scale and v_scale one number, [(batch,) num_kv_heads] or one a token
            and head
Grid        as kernels/hopper/prefill.py
Traffic     as kernels/prefill.py, one byte an element of k and v, and the scales
Numerics    sums of int8 products in int32, scores and sums of weights in fp32, base-2 exponentials.
            half: p is rounded to fp16, or p * v_scale to bf16, see `wide_type`. full: p is rounded
            to e4m3 from 2 ** 8 down, or to int8 from 127 down, relative to its row's maximum with
            v_scale where that is one a token. The tensor cores keep some 14 bits of sums of e4m3
            products: those of p . v are added up tile by tile in fp32 outside them, and those of
            q . k leave an lse up to 5e-3 off, so there is none
Limits      sm_90; bf16 or fp16; int8 or e4m3 with products half or full; no lse of e4m3; head_dim
            and head_dim_v equal and 64 or 128; dense or packed; no ALiBi, no dropout, no gradient,
            no pages; addresses and strides that are multiples of 16 bytes
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.device import Device
from splitkv.kernels import prefill
from splitkv.kernels.hopper import prefill as hopper_prefill
from splitkv.kernels.hopper.eight_bits import PART
from splitkv.kernels.hopper.prefill import BARRIER_BYTES, ROWS, barriers, packed_heads, tiling
from splitkv.kernels.hopper.prefill_load import Parts, Signals
from splitkv.kernels.hopper.prefill_quantised_tile import (
    Scales,
    Stored,
    consume,
    produce,
)
from splitkv.kernels.hopper.prefill_rows import Cutting, Keys, Work
from splitkv.kernels.hopper.prefill_tile import Output
from splitkv.kernels.hopper.ring import reinterpret
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.codec import scale_strides
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring
from splitkv.kv import AS_IS, Contiguous, Paged
from splitkv.plans import Config, Kernel, Plan, Traffic
from splitkv.problem import Operands, Problem

RAW = 2  # slots for values as they are stored
CONSUMER, PRODUCER = gl.constexpr(240), gl.constexpr(24)  # registers of two and one
TURNS = True  # warpgroups issue products in turns: see prefill_tile.py

# By products: tile_m, tile_n, num_stages, the best guess first.
SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "half": ((128, 128, 2), (192, 64, 3), (128, 64, 3)),
    "full": ((128, 128, 2), (128, 128, 3), (128, 64, 3)),
}
SIZES = [  # arguments whose values are no reason to compile again
    *("left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch", "total_q", "num_heads"),
    *("stride_lse_b", "stride_lse_h", "tiles_each", "lanes", "width"),
    *(f"stride_{name}s_{axis}" for name in "qkv" for axis in "bth"),
]


@gluon.jit
def allocate(desc, SLOTS: gl.constexpr):
    """Shared memory as boxes [SLOTS, 1, tokens, heads, dim] and tiles [SLOTS, rows, dim]."""
    BOX: gl.constexpr = desc.block_type.shape
    BITS: gl.constexpr = desc.dtype.primitive_bitwidth
    SWIZZLE: gl.constexpr = desc.layout.swizzle_byte_width
    layout: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, BITS, rank=2)
    boxes = gl.allocate_shared_memory(
        desc.dtype, [SLOTS, BOX[0], BOX[1], BOX[2], BOX[3]], desc.layout
    )
    return boxes, reinterpret(boxes, desc.dtype, [SLOTS, BOX[1] * BOX[2], BOX[3]], layout)


@gluon.jit
def allocate_columns(SLOTS: gl.constexpr, TILE_N: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.float32, [SLOTS, TILE_N], layout)


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill_quantised(
    q_desc,  # [batch, seqlen_q, num_heads, HEAD_DIM], boxes of 64 rows; packed: [1, total_q, ..];
    # of 16 bits: rounded here, and q_scale_ptr is None
    k_desc,  # boxes of TILE_N keys of one head, as v_desc
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    sink_ptr,  # [num_heads], or None
    scale,  # see tile/score.py
    softcap,  # float or None
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    total_q,
    num_heads,
    stride_lse_b,
    stride_lse_h,
    tiles_each,  # row tiles of a lane
    lanes,
    width,  # lanes that go together
    stride_qs_b,  # of q_scale, 0 along what has one
    stride_qs_t,
    stride_qs_h,
    stride_ks_b,
    stride_ks_t,
    stride_ks_h,
    stride_vs_b,
    stride_vs_t,
    stride_vs_h,
    PER_KEY: gl.constexpr,  # k and v have a scale a token
    WIDE: gl.constexpr,  # the type that values are widened to, as p; None: they are not
    GROUP: gl.constexpr,
    PACK: gl.constexpr,  # heads of q that are packed into rows
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):
    TILE_N: gl.constexpr = k_desc.block_type.shape[1]
    DIM: gl.constexpr = v_desc.block_type.shape[3]
    PARTS: gl.constexpr = TILE_N // PART
    q_boxes, q = allocate(q_desc, WARPGROUPS)
    k_boxes, k = allocate(k_desc, STAGES)
    wide = None
    if q_scale_ptr is None:
        wide = q
        q = gl.allocate_shared_memory(k.dtype, [WARPGROUPS, q.shape[1], DIM], k.layout)
    raw_boxes, raw = allocate(v_desc, 2)
    out_boxes, out = allocate(out_desc, WARPGROUPS)
    SWIZZLE: gl.constexpr = v_desc.layout.swizzle_byte_width
    ready = None
    if WIDE is not None:
        broad: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        v = gl.allocate_shared_memory(WIDE, [STAGES, TILE_N, DIM], broad)
        raw_parts = reinterpret(raw, v_desc.dtype, [2 * PARTS, PART, DIM], raw.layout)
    else:
        # rows of PART keys: each part is in one piece
        narrow: gl.constexpr = gl.NVMMASharedLayout(32, 8, rank=2)
        pairs: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
        v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, DIM, TILE_N], narrow)
        ready = reinterpret(v, gl.int16, [STAGES * PARTS, DIM, PART // 2], pairs)
        raw_pairs: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, 16, rank=2)
        raw_parts = reinterpret(raw, gl.int16, [2 * PARTS, PART, DIM // 2], raw_pairs)
    of_k = None
    of_v = None
    inverse = None
    columns_full = None
    if PER_KEY:
        of_k = allocate_columns(STAGES + 1, TILE_N)
        of_v = allocate_columns(STAGES + 1, TILE_N)
        columns_full = barriers(STAGES + 1, 1)
        if gl.bfloat16 != WIDE:
            inverse = allocate_columns(STAGES + 1, TILE_N)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, WARPGROUPS)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, WARPGROUPS)
    q_full, q_free = barriers(1, 1), barriers(1, WARPGROUPS)
    turn = None
    if TURNS:
        turn = barriers(WARPGROUPS, 1)
    signals = Signals(q_full, q_free, k_full, k_free, v_full, v_free, turn)
    stored = Stored(raw_boxes, barriers(2, 1), raw_parts, ready)
    maps = Parts(q_desc, None, k_desc, None, v_desc, out_desc)
    boxes = Parts(q_boxes, None, k_boxes, None, None, out_boxes)
    tiles = Parts(q, None, k, None, v, out)
    bounds, scoring = Bounds(left, right, sink_tokens), Scoring(scale, softcap, None, None, None)
    keys = Keys(cu_k_ptr, None, None, None, None, seqlen_k)
    whole = Cutting(None, None, None)
    place = num_heads // PACK, tiles_each, lanes, width, tiles_each * lanes
    work = Work(cu_q_ptr, keys, bounds, scoring, whole, seqlen_q, batch, total_q, *place)
    output = Output(out_ptr, lse_ptr, sink_ptr, None, num_heads * DIM, stride_lse_b, stride_lse_h)
    scales = Scales(
        q_scale_ptr,
        k_scale_ptr,
        v_scale_ptr,
        Strides(stride_qs_b, stride_qs_t, stride_qs_h),
        Strides(stride_ks_b, stride_ks_t, stride_ks_h),
        Strides(stride_vs_b, stride_vs_t, stride_vs_h),
        of_k,
        of_v,
        inverse,
        columns_full,
        wide,
    )
    # registers: in all 504 and 512 for a thread of each warpgroup, of which the first gets the rest
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (
                    consume,
                    (work, maps, boxes, tiles, scales, signals, output, 0, GROUP, PACK, 2, STAGES),
                ),
                (
                    consume,
                    (work, maps, boxes, tiles, scales, signals, output, 1, GROUP, PACK, 2, STAGES),
                ),
                (
                    produce,
                    (work, maps, boxes, tiles, scales, signals, stored, GROUP, PACK, 2, STAGES),
                ),
            ],
            [4, 4],
            [CONSUMER, PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume,
                    (work, maps, boxes, tiles, scales, signals, output, 0, GROUP, PACK, 3, STAGES),
                ),
                (
                    consume,
                    (work, maps, boxes, tiles, scales, signals, output, 1, GROUP, PACK, 3, STAGES),
                ),
                (
                    consume,
                    (work, maps, boxes, tiles, scales, signals, output, 2, GROUP, PACK, 3, STAGES),
                ),
                (
                    produce,
                    (work, maps, boxes, tiles, scales, signals, stored, GROUP, PACK, 3, STAGES),
                ),
            ],
            [4, 4, 4],
            [160, 160, 32],
        )


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    plain = replace(problem, kind="dense", place=Contiguous(), codec=AS_IS, needs_grad=False)
    reasons = hopper_prefill.unsupported(replace(plain, head_dim=128, head_dim_v=128), device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(problem.kind != "decode", "kind decode: expected dense or varlen")
    expect(
        problem.codec != AS_IS and problem.products != "widened",
        f"kv {problem.codec}, products {problem.products}: expected int8 or fp8 with half or full",
    )
    expect(not isinstance(problem.place, Paged), f"kv {problem.place}: expected no pages")
    expect(
        problem.codec.name != "fp8" or not problem.return_lse,
        "return_lse: expected none of fp8, as its units keep 14 bits of sums",
    )
    expect(not problem.needs_grad, "gradient: expected inputs that require none")
    dims = problem.head_dim, problem.head_dim_v
    expect(
        dims in ((64, 64), (128, 128)),
        f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected 64/64 or 128/128",
    )
    return reasons


def unfit(operands: Operands) -> list[str]:
    """What of a memory layout TMA cannot describe."""
    return hopper_prefill.unfit(operands)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config."""
    dim, n = problem.head_dim, config.tile_n
    wide = 2 if problem.products == "half" else 1
    rows = (3 if problem.q_granularity != "none" else 5) * config.tile_m * dim  # q and out
    tiles = n * dim * (RAW + config.num_stages * (1 + wide))
    columns = 3 * 4 * n * (config.num_stages + 1) if problem.codec.granularity == "token" else 0
    return rows + tiles + columns + BARRIER_BYTES


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, with and without packed heads, by as many programs as there are
    SMs or by one a row tile."""
    programs = (0, device.num_sms) if problem.kind == "varlen" else (device.num_sms, 0)
    packs = (True, False) if problem.group & 1 == 0 else (False,)
    for count in programs:
        for pack_gqa in packs:
            for tile_m, tile_n, num_stages in SHAPES[problem.products]:
                config = Config(
                    tile_m=tile_m,
                    tile_n=tile_n,
                    num_warps=tile_m // 16,
                    num_stages=num_stages,
                    programs=count,
                    pack_gqa=pack_gqa,
                )
                if shared_bytes(problem, config) <= device.smem_per_block:
                    yield config


def traffic(problem: Problem, config: Config) -> Traffic:
    return prefill.traffic(problem, config)


def wide_type(problem: Problem) -> Any:
    """What values are widened to. fp16 takes less time and is finer; p with the scales of single
    values keeps its range in bf16, where that is fine enough."""
    if problem.products == "full":
        return None
    by_key = problem.codec.granularity == "token"
    rough = by_key and problem.codec.name == "int8" and problem.dtype == "bfloat16"
    return gl.bfloat16 if rough else gl.float16


def descriptor(x: Any, tokens: int, heads: int) -> TensorDescriptor:
    """x [(batch,) tokens, heads, dim] as TMA is to see it, in boxes [1, tokens, heads, dim]."""
    shape, strides, bits = list(x.shape), list(x.stride()), 8 * x.element_size()
    if len(shape) == 3:
        shape, strides = [1, *shape], [shape[-1], *strides]
    # along a single element there are no steps, and torch may say anything
    strides = [step if n > 1 else shape[-1] for n, step in zip(shape, strides, strict=True)]
    swizzle = min(128, shape[-1] * bits // 8)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=4)
    return TensorDescriptor(x, shape, [*strides[:3], 1], [1, tokens, heads, shape[-1]], layout)


class Launcher(prefill.Launcher):
    """`hopper_prefill_quantised` bound to one plan and one memory layout."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        self.problem, self.device = plan.problem, plan.device
        problem, config, x = plan.problem, plan.config, operands
        self.plan, self.dtype = plan, getattr(torch, problem.dtype)
        self.any_address: prefill.Launcher | None = None
        self.tile_n = config.tile_n
        self.out_shape, self.lse_shape = tuple(x.q.shape), prefill.lse_shape(x.q)
        self.pack = packed_heads(problem, config)
        tokens = x.q.shape[:-2].numel()
        tiles, lanes, width = tiling(problem, plan.device, config, tokens)
        self.grid = (min(tiles * lanes, config.programs or tiles * lanes),)
        lse = prefill.lse_strides(x.q)
        self.rest = (
            *(*prefill.bounds_of(problem), problem.seqlen_q, problem.seqlen_k, problem.batch),
            *(tokens, problem.num_heads, lse.b, lse.h, tiles, lanes, width),
            *scale_strides(x.q_scale, x.q),
            *scale_strides(x.k_scale, x.k),
            *scale_strides(x.v_scale, x.v),
            *(problem.codec.granularity == "token", wide_type(problem)),
            *(problem.group, self.pack),
            *(config.tile_m // ROWS.value, config.num_stages, TURNS),
        )
        # of the first warpgroup; the others are the kernel's own
        self.options = {"num_warps": 4, "enable_fp_fusion": True}

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        x = operands
        if (x.q.data_ptr() | x.k.data_ptr() | x.v.data_ptr()) & 15:
            return self.without_tma(operands).forward(operands, seed)
        out = x.q.new_empty(self.out_shape, dtype=self.dtype)
        lse = x.q.new_empty(self.lse_shape, dtype=torch.float32)
        rows = ROWS.value // self.pack, self.pack
        hopper_prefill_quantised[self.grid](
            descriptor(x.q, *rows),
            descriptor(x.k, self.tile_n, 1),
            descriptor(x.v, self.tile_n, 1),
            descriptor(out, *rows),
            *(out, lse, x.q_scale, x.k_scale, x.v_scale),
            *(x.cu_seqlens_q, x.cu_seqlens_k, x.sink_logits),
            *(*prefill.scoring_of(x, None)[:2], *self.rest),
            **self.options,
        )
        return out, lse

    def without_tma(self, operands: Operands) -> prefill.Launcher:
        """The kernel for any GPU, for addresses of which `unfit` did not know."""
        if self.any_address is None:
            why = f"this call runs on {prefill.KERNEL.name}: {unfit(operands)[0]}"
            warnings.warn(why, stacklevel=2)
            config = next(prefill.configs(self.problem, self.device))
            plan = replace(self.plan, kernel=prefill.KERNEL.name, config=config)
            self.any_address = prefill.Launcher(plan, operands)
        return self.any_address


KERNEL = Kernel("hopper_prefill_quantised", unsupported, configs, traffic, Launcher, unfit)
