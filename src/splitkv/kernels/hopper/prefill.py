"""Attention of whole sequences for Hopper: tiles by TMA, products by warpgroups that take turns.

Computes what kernels/prefill.py computes, without ALiBi and dropout, and shares its backward:

    s[r, n]  = score(scale * q[r] . k[n])          n in the bands of row r, the visible keys
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v[n] / (l + exp(sink - m))

A program has one warp that has tiles copied and two or three warpgroups that multiply, each 64 rows
of a row tile; prefill_tile.py has the roles. The tiles of keys in which a row may see a part come
first and ask the mask, the others ask nothing. A program goes on to its next row tile by itself, so
that the first tiles of that arrive while the results of the one before leave.

Shapes      as kernels/prefill.py. Rows are query tokens of one head, or with `pack_gqa` of as many
            heads of a group as a power of two divides it by: row = token * heads + head
Grid        one axis: `programs` programs that go through the row tiles forth and back, or one each.
            A lane is a sequence and the packed heads; so many lanes that their keys and values fit
            into the L2 go together
Traffic     as kernels/prefill.py
Numerics    scores and sums in fp32, base-2 exponentials; p is rounded to the value type before p @
            v. Behind the end of a packed sequence values are cleared before they are multiplied
            with zeros, as those of the next sequence may be NaN or infinite
Limits      sm_90; bf16 or fp16; head_dim and head_dim_v equal and 64, 128 or 256, or 192 and 128;
            no ALiBi, no dropout; addresses and strides that are multiples of 16 bytes; otherwise
            those of kernels/prefill.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.device import Device
from splitkv.kernels import prefill
from splitkv.kernels.hopper.prefill_tile import (
    Output,
    Parts,
    Signals,
    Work,
    consume,
    produce,
)
from splitkv.kernels.hopper.ring import reinterpret
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.weight import Scoring
from splitkv.kv import Paged
from splitkv.plans import Config, Kernel, Plan, Traffic
from splitkv.problem import Operands, Problem

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
ROWS = 64  # of a warpgroup
BARRIER_BYTES = 1024  # of shared memory: all barriers, and what alignment costs
TURNS = True  # warpgroups issue products in turns: see prefill_tile.py

# By head_dim: tile_m, tile_n, num_stages, the best guess first. More rows or keys do not fit into
# the registers of a warpgroup, more stages not into shared memory.
SHAPES: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: ((192, 128, 4), (128, 128, 4), (128, 128, 2), (192, 128, 2), (128, 64, 4)),
    128: ((128, 128, 2), (128, 64, 4), (128, 64, 3), (192, 64, 4), (192, 64, 3)),
    192: ((128, 128, 2), (128, 64, 3), (128, 64, 2)),
    256: ((128, 64, 2),),
}
SIZES = [  # arguments whose values are no reason to compile again
    *("left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch", "total_q", "num_heads"),
    *("stride_lse_b", "stride_lse_h", "tiles", "lanes", "width"),
]


@gluon.jit
def allocate(desc, SLOTS: gl.constexpr):
    """Shared memory as boxes [SLOTS, 1, tokens, heads, dim] and tiles [SLOTS, rows, dim]."""
    BOX: gl.constexpr = desc.block_type.shape
    shape: gl.constexpr = [SLOTS, BOX[0], BOX[1], BOX[2], BOX[3]]
    tile: gl.constexpr = [SLOTS, BOX[1] * BOX[2], BOX[3]]
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return boxes, reinterpret(boxes, desc.dtype, tile, layout)


@gluon.jit
def barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that `COUNT` arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(NUMBER):
        mbarrier.init(made.index(n), count=COUNT)
    return made


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill(
    q_desc,  # [batch, seqlen_q, num_heads, HEAD_DIM], boxes of 64 rows; packed: [1, total_q, ..]
    q_rest_desc,  # its columns from head_dim_v on, or None
    k_desc,  # boxes of TILE_N keys of one head, as v_desc
    k_rest_desc,
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
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
    tiles,  # row tiles of a lane
    lanes,
    width,  # lanes that go together
    GROUP: gl.constexpr,
    PACK: gl.constexpr,  # heads of q that are packed into rows
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    OUT_SLOTS: gl.constexpr,  # tiles of shared memory for out; 0: it takes the place of q
    TURNS: gl.constexpr,
):
    TILE_N: gl.constexpr = k_desc.block_type.shape[1]
    DIM_V: gl.constexpr = v_desc.block_type.shape[3]
    q_boxes, q = allocate(q_desc, WARPGROUPS)
    k_boxes, k = allocate(k_desc, STAGES)
    v_boxes, v = allocate(v_desc, STAGES)
    q_rest_boxes = None
    q_rest = None
    k_rest_boxes = None
    k_rest = None
    if q_rest_desc is not None:
        q_rest_boxes, q_rest = allocate(q_rest_desc, WARPGROUPS)
        k_rest_boxes, k_rest = allocate(k_rest_desc, STAGES)
    out_boxes = None
    out = None
    if OUT_SLOTS > 0:
        out_boxes, out = allocate(out_desc, OUT_SLOTS)
    turn = None
    if TURNS:
        turn = barriers(WARPGROUPS, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, WARPGROUPS)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, WARPGROUPS)
    q_full, q_free = barriers(1, 1), barriers(1, WARPGROUPS)
    signals = Signals(q_full, q_free, k_full, k_free, v_full, v_free, turn)
    maps = Parts(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc)
    boxes = Parts(q_boxes, q_rest_boxes, k_boxes, k_rest_boxes, v_boxes, out_boxes)
    shared = Parts(q, q_rest, k, k_rest, v, out)
    bounds, scoring = Bounds(left, right, sink_tokens), Scoring(scale, softcap, None, None, None)
    place = num_heads // PACK, tiles, lanes, width
    work = Work(cu_q_ptr, cu_k_ptr, bounds, scoring, seqlen_q, seqlen_k, batch, total_q, *place)
    output = Output(out_ptr, lse_ptr, sink_ptr, num_heads * DIM_V, stride_lse_b, stride_lse_h)
    # registers: in all 504 and 512 for a thread of each warpgroup, of which the first gets the rest
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (work, maps, boxes, shared, signals, output, 0, PACK, 2, STAGES)),
                (consume, (work, maps, boxes, shared, signals, output, 1, PACK, 2, STAGES)),
                (produce, (work, maps, boxes, signals, GROUP, PACK, 2, TILE_N, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (work, maps, boxes, shared, signals, output, 0, PACK, 3, STAGES)),
                (consume, (work, maps, boxes, shared, signals, output, 1, PACK, 3, STAGES)),
                (consume, (work, maps, boxes, shared, signals, output, 2, PACK, 3, STAGES)),
                (produce, (work, maps, boxes, signals, GROUP, PACK, 3, TILE_N, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    reasons = prefill.unsupported(replace(problem, head_dim=64, head_dim_v=64), device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(problem.kind != "decode", "kind decode: expected dense or varlen")
    expect(not isinstance(problem.place, Paged), f"kv {problem.place}: expected no pages")
    expect(
        problem.dtype in ("bfloat16", "float16"),
        f"dtype {problem.dtype}: expected bfloat16 or float16",
    )
    dims = problem.head_dim, problem.head_dim_v
    known = ", ".join(f"{a}/{b}" for a, b in HEAD_DIMS)
    expect(dims in HEAD_DIMS, f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected one of {known}")
    expect(not problem.score.alibi, "alibi: expected none")
    expect(not problem.dropout, "dropout: expected none")
    return reasons


def unfit(operands: Operands) -> list[str]:
    """What of a memory layout TMA cannot describe."""
    reasons = []
    for name in ("q", "k", "v"):
        x = getattr(operands, name)
        if 0 in x.shape:
            reasons.append(f"{name}: expected at least one token, got {list(x.shape)}")
        elif not fits_tma(x):
            reasons.append(
                f"{name}: expected strides and an address that are multiples of 16 bytes"
            )
    return reasons


def fits_tma(x: Any) -> bool:
    """Whether TMA can describe a tensor; along a single element torch may say any stride."""
    steps = [step for n, step in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    aligned = all(step > 0 and step * x.element_size() % 16 == 0 for step in steps)
    return aligned and x.stride()[-1] == 1 and x.data_ptr() % 16 == 0


def packed_heads(problem: Problem, config: Config) -> int:
    """Query heads that share a row tile: a power of two that divides the group."""
    group = problem.group
    return min(group & -group, ROWS) if config.pack_gqa else 1


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config, the output in the place of q."""
    rows = config.tile_m * problem.head_dim
    keys = config.num_stages * config.tile_n * (problem.head_dim + problem.head_dim_v)
    return (rows + keys) * problem.element_bytes + BARRIER_BYTES


def out_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of an output tile."""
    return config.tile_m * problem.head_dim_v * problem.element_bytes


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, with and without packed heads, by as many programs as there are
    SMs or by one a row tile.

    Packed sequences start with one a row tile: how heavy each is, only the device knows.
    """
    programs = (0, device.num_sms) if problem.kind == "varlen" else (device.num_sms, 0)
    packs = (True, False) if problem.group & 1 == 0 else (False,)
    for count in programs:
        for pack_gqa in packs:
            for tile_m, tile_n, num_stages in SHAPES[problem.head_dim]:
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


def tiling(problem: Problem, device: Device, config: Config, tokens: int) -> tuple[int, int, int]:
    """(row tiles of a lane, lanes, lanes together) for so many tokens of q in all.

    Together: as many lanes as have their keys and values in half of the L2, which is in two halves
    that hold the same.
    """
    pack = packed_heads(problem, config)
    heads = problem.num_heads // pack
    if problem.kind == "varlen":
        return tokens * pack // config.tile_m + problem.batch + 1, heads, heads
    kv_lanes = problem.batch * problem.num_kv_heads
    together = device.l2_bytes // 2 * kv_lanes // max(problem.kv_bytes, 1)
    lanes = problem.batch * heads
    width = max(1, min(together * (problem.group // pack), lanes))
    return triton.cdiv(problem.seqlen_q * pack, config.tile_m), lanes, width


def descriptor(x: Any, tokens: int, heads: int, dim: int) -> TensorDescriptor:
    """x [(batch,) tokens, heads, dim] as TMA is to see it, in boxes [1, tokens, heads, dim]."""
    shape, strides = list(x.shape), list(x.stride())
    if len(shape) == 3:
        shape, strides = [1, *shape], [shape[-1], *strides]
    # along a single element there are no steps, and torch may say anything
    strides = [step if n > 1 else shape[-1] for n, step in zip(shape, strides, strict=True)]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(x, shape, [*strides[:3], 1], [1, tokens, heads, dim], layout)


class Launcher(prefill.Launcher):
    """`hopper_prefill` bound to one plan and one memory layout; see `prefill.Launcher`."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        super().__init__(plan, operands)
        self.plan = plan
        self.any_address: prefill.Launcher | None = None
        problem, config, q = plan.problem, plan.config, operands.q
        self.pack = packed_heads(problem, config)
        tokens = q.shape[0] if problem.kind == "varlen" else q.shape[0] * q.shape[1]
        tiles, lanes, width = tiling(problem, plan.device, config, tokens)
        self.grid = (min(tiles * lanes, config.programs or tiles * lanes),)
        lse = prefill.lse_strides(q)
        warpgroups = config.tile_m // ROWS
        room = plan.device.smem_per_block - shared_bytes(problem, config)
        self.rest = (
            *(*prefill.bounds_of(problem), problem.seqlen_q, problem.seqlen_k, problem.batch),
            *(tokens, problem.num_heads, lse.b, lse.h, tiles, lanes, width, problem.group),
            *(self.pack, warpgroups, config.num_stages),
            *(warpgroups if out_bytes(problem, config) <= room else 0, TURNS),
        )
        # of the first warpgroup; the others are the kernel's own
        self.options = {"num_warps": 4, "enable_fp_fusion": True}

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        x = operands
        if (x.q.data_ptr() | x.k.data_ptr() | x.v.data_ptr()) & 15:
            return self.without_tma(operands).forward(operands, seed)
        problem, tile_n = self.problem, self.plan.config.tile_n
        out = x.q.new_empty(self.out_shape)
        lse = x.q.new_empty(self.lse_shape, dtype=torch.float32)
        rows, main = (ROWS // self.pack, self.pack), problem.head_dim_v
        rest = problem.head_dim - main
        hopper_prefill[self.grid](
            descriptor(x.q, *rows, main),
            descriptor(x.q, *rows, rest) if rest else None,
            descriptor(x.k, tile_n, 1, main),
            descriptor(x.k, tile_n, 1, rest) if rest else None,
            descriptor(x.v, tile_n, 1, main),
            descriptor(out, *rows, main),
            *(out, lse, x.cu_seqlens_q, x.cu_seqlens_k, x.sink_logits),
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


KERNEL = Kernel("hopper_prefill", unsupported, configs, traffic, Launcher, unfit)
