"""Attention of sequences whose keys are multiplied in 8 bits and values in 16, for Hopper.

Computes what kernels/hopper/prefill_quantised.py computes with products "half", by two launches:
`widen_rows` (kernels/widen.py) makes values numbers of the working type, each times its scale; then

    s[r, n]  = score(scale * q_scale[r] * k_scale * (q[r] . k[n]))        n in the bands of row r
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v[n] / (l + exp(sink - m))

with keys as they are stored. A program is one of `hopper_prefill`: a warp that has tiles copied and
warpgroups that multiply, each 64 rows of a row tile, by the same steps (prefill_tile.py). A q of 16
bits is rounded before a row tile's first product, its rows by each warpgroup: prefill_scaled.py.

Shapes      as kernels/hopper/prefill_quantised.py, k_scale and v_scale one number or one a head.
            Values in pages come out in order, [batch, seqlen_k, num_kv_heads, head_dim]
Grid        of `widen_rows`, then as kernels/hopper/prefill.py
Traffic     values are read in 8 bits, written in 16 and read again, keys read in 8 bits; the rest
            as kernels/prefill.py. Workspace: 16 bits for each element of values, for as many keys
            of every sequence as the longest may have
Numerics    sums of int8 products in int32, scores and sums in fp32, base-2 exponentials; values
            times their scale are rounded to the working type, as p is. e4m3 units keep some 14 bits
            of a sum, which leaves an lse up to 5e-3 off, so there is none
Limits      sm_90; bf16 or fp16; int8 or e4m3, products half or full, of which the latter permits
            the former; one scale a head; no lse of e4m3; head_dim and head_dim_v equal and 64 or
            128; no gradient; otherwise those of hopper/prefill.py, of values any strides
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.device import Device
from splitkv.kernels import prefill
from splitkv.kernels.hopper import prefill as hopper_prefill
from splitkv.kernels.hopper.prefill import BARRIER_BYTES, fitting
from splitkv.kernels.hopper.prefill_load import ROWS, Parts, Signals, allocate
from splitkv.kernels.hopper.prefill_quantised import SIZES
from splitkv.kernels.hopper.prefill_roles import give_roles_to_warpgroups
from splitkv.kernels.hopper.prefill_rows import Cutting, Keys, Work
from splitkv.kernels.hopper.prefill_scaled import Scales
from splitkv.kernels.hopper.prefill_shapes import ordered
from splitkv.kernels.hopper.prefill_tile import keeps_products
from splitkv.kernels.hopper.prefill_write import Merging, Output, begin, merge
from splitkv.kernels.hopper.ring import arrivals
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.codec import scale_strides
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring
from splitkv.kernels.widen import Widening
from splitkv.kv import AS_IS, Ragged
from splitkv.plans import Config, Kernel, Plan, Traffic
from splitkv.problem import Operands, Problem


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill_half(
    q_desc,  # as of hopper_prefill, of 8 or 16 bits; all that is not said here is as there
    q_rest_desc,  # None, as k_rest_desc
    k_desc,  # of 8 bits
    k_rest_desc,
    v_desc,  # of 16
    out_desc,
    out_ptr,
    lse_ptr,
    partial,
    count_ptr,
    cu_q_ptr,
    cu_k_ptr,
    lens_ptr,
    table_ptr,
    sink_ptr,
    q_scale_ptr,  # None: q has none
    k_scale_ptr,
    v_scale_ptr,  # of values before they were widened
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
    parts,
    size,
    most_q,
    stride_ob,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    TILE_N: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    TILE_P: gl.constexpr,
    TILE_R: gl.constexpr,
    PDL: gl.constexpr,
    stride_qs_b,  # of q_scale, 0 along what has one
    stride_qs_t,
    stride_qs_h,
    stride_ks_b,
    stride_ks_t,
    stride_ks_h,
    Q_SLOTS: gl.constexpr,  # row tiles of q in shared memory
):
    if PDL:  # combine waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    q_boxes, q = allocate(q_desc, Q_SLOTS * WARPGROUPS, ROWS, DIM)
    k_boxes, k = allocate(k_desc, STAGES, TILE_N, DIM)
    v_boxes, v = allocate(v_desc, STAGES, TILE_N, DIM)
    out_boxes, out = allocate(out_desc, WARPGROUPS, ROWS, DIM)
    wide = None
    if q_desc.dtype != k_desc.dtype:
        wide = q
        rounded: gl.constexpr = gl.NVMMASharedLayout(DIM, 8, rank=2)
        q = gl.allocate_shared_memory(k_desc.dtype, [WARPGROUPS, ROWS, DIM], rounded)
    turn = None
    if WARPGROUPS > 1:
        turn = WARPGROUPS
    k_full, k_free = arrivals(STAGES, 1), arrivals(STAGES, WARPGROUPS)
    v_full, v_free = arrivals(STAGES, 1), arrivals(STAGES, WARPGROUPS)
    q_full, q_free = arrivals(Q_SLOTS, 1), arrivals(Q_SLOTS, WARPGROUPS)
    signals = Signals(q_full, q_free, k_full, k_free, v_full, v_free, turn, None)
    maps = Parts(q_desc, None, k_desc, None, v_desc, out_desc)
    boxes = Parts(q_boxes, None, k_boxes, None, v_boxes, out_boxes)
    shared = Parts(q, None, k, None, v, out)
    bounds, scoring = Bounds(left, right, sink_tokens), Scoring(scale, softcap, None, None, None)
    behind = cu_k_ptr
    if lens_ptr is not None:
        behind = lens_ptr
    if table_ptr is not None:
        behind = table_ptr
    # values of pages are in order
    keys = Keys(cu_k_ptr, lens_ptr, table_ptr, stride_table, behind, seqlen_k, table_ptr)
    cutting = Cutting(parts, size, most_q)
    place = lane_heads, tiles, lanes, width, items
    scarce = None
    BOX: gl.constexpr = k_desc.block_type.shape[1]
    if keeps_products(WARPGROUPS, DIM, TILE_N, BOX, partial is not None, softcap is not None):
        scarce = WARPGROUPS
    sizes = seqlen_q, batch, total_q
    work = Work(cu_q_ptr, keys, bounds, scoring, cutting, *sizes, *place, scarce)
    of_out = Strides(stride_ob, stride_ot, stride_oh)
    merging = Merging(count_ptr, of_out)
    strides = lane_heads * PACK * DIM, stride_lse_b, stride_lse_h
    output = Output(out_ptr, lse_ptr, sink_ptr, partial, merging, *strides)
    of_q = Strides(stride_qs_b, stride_qs_t, stride_qs_h)
    of_k = Strides(stride_ks_b, stride_ks_t, stride_ks_h)
    none = Strides(None, None, None)
    scales = Scales(q_scale_ptr, k_scale_ptr, None, of_q, of_k, none, None, None, None, None, wide)
    whole = work, maps, boxes, shared, scales, signals, output
    begin(output)
    give_roles_to_warpgroups(whole, GROUP, PACK, WARPGROUPS, STAGES, PAGE_SIZE)
    if count_ptr is not None:
        merge(work, output, GROUP, PACK, DIM, TILE_P, TILE_R)


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    plain = replace(problem, codec=AS_IS, needs_grad=False, head_dim=128, head_dim_v=128)
    reasons = hopper_prefill.unsupported(plain, device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(problem.codec != AS_IS, f"kv {problem.codec}: expected int8 or fp8")
    expect(
        problem.codec.granularity != "token",
        f"kv {problem.codec}: expected scales per tensor or head",
    )
    expect(
        problem.codec == AS_IS or problem.products != "widened",
        "products widened: expected half or full",
    )
    expect(
        problem.codec.name != "fp8" or not problem.return_lse,
        "return_lse of fp8: expected none, as units keep 14 bits",
    )
    expect(not problem.needs_grad, "gradient: expected inputs that require none")
    dims = problem.head_dim, problem.head_dim_v
    expect(
        dims in ((64, 64), (128, 128)),
        f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected 64/64 or 128/128",
    )
    return reasons


def unfit(operands: Operands) -> list[str]:
    """What TMA cannot describe of the memory that is read as it is given."""
    reasons = hopper_prefill.unfit(replace(operands, v=None))
    if 0 in operands.v.shape:
        reasons.append(f"v: expected at least one token, got {list(operands.v.shape)}")
    return reasons


def bytes_of_values(problem: Problem) -> int:
    """Of values that have been widened."""
    return problem.widened.kv_bytes * problem.head_dim_v // (problem.head_dim + problem.head_dim_v)


def bytes_of_q(problem: Problem) -> int:
    """Of an element of q as it comes."""
    return problem.element_bytes if problem.q_granularity == "none" else 1


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config."""
    of_q, of_out, stages = bytes_of_q(problem), problem.element_bytes, config.num_stages
    a_row = of_q + (of_q > 1) + of_out
    a_key = stages * (1 + problem.element_bytes)
    return (config.tile_m * a_row + config.tile_n * a_key) * problem.head_dim + BARRIER_BYTES


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """As of `hopper_prefill`."""
    return fitting(problem, device, ordered(problem, device), shared_bytes)


def traffic(problem: Problem, config: Config) -> Traffic:
    """The lines of the docstring's Traffic section, every sequence at its upper bound."""
    of_keys = problem.kv_bytes + 2 * bytes_of_values(problem)
    return replace(prefill.traffic(problem, config), kv_bytes=of_keys)


class Attending(hopper_prefill.Launcher):
    """`hopper_prefill_half` and `combine` bound to one plan and one memory layout."""

    def own_tail(self, operands: Operands) -> tuple[Any, ...]:
        problem, config, x = self.problem, self.plan.config, operands
        of_q, of_k = scale_strides(x.q_scale, x.q), scale_strides(x.k_scale, x.k)
        room = self.device.smem_per_block - shared_bytes(problem, config)
        # rows that are rounded first leave their place early
        stays = bytes_of_q(problem) == 1 and config.tile_m * problem.head_dim <= room
        return *of_q, *of_k, 2 if config.programs and stays else 1

    def kv_bytes(self) -> int:
        return self.problem.kv_bytes // 2 + bytes_of_values(self.problem)

    def out_has_place(self) -> bool:
        return True

    def values_in_pages(self) -> bool:
        return False

    def start(self, *args: Any) -> Any:
        return hopper_prefill_half[self.grid](*args, *self.tail, **self.options)


class Launcher:
    """`widen_rows` and `hopper_prefill_half` bound to one plan and one memory layout.

    The latter is bound at the first call, to the memory that the former wrote.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        problem, x, ragged = plan.problem, operands, plan.problem.place == Ragged()
        self.plan = plan
        self.any_address: prefill.Launcher | None = None
        self.attend: Attending | None = None
        self.widen = Widening(
            [(x.v, x.v_scale)],
            getattr(torch, problem.dtype),
            1 if ragged else problem.batch,
            x.v.shape[0] if ragged else max(problem.seqlen_k, 1),
            mask=None if ragged else problem.mask,
            seqlen_q=problem.seqlen_q,
            table=x.page_table,
        )

    def __call__(self, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        x = operands
        if any(tensor.data_ptr() & 15 for tensor in (x.q, x.k, x.out) if tensor is not None):
            if self.any_address is None:
                self.any_address = prefill.for_any_address(self.plan, x, unfit(x)[0])
            return self.any_address(x)
        values = [(x.v, x.v_scale)]
        (v,), _ = self.widen(values, x.cache_seqlens, x.page_table, x.cu_seqlens_q)
        ready = Operands(
            *(x.q, x.k, v, x.out, x.cache_seqlens, x.page_table, x.cu_seqlens_q, x.cu_seqlens_k),
            *(x.sink_logits, None, x.q_scale, x.k_scale, x.v_scale),
            softmax_scale=x.softmax_scale,
            softcap=x.softcap,
        )
        if self.attend is None:
            self.attend = Attending(self.plan, ready)
        return self.attend(ready)


KERNEL = Kernel(
    *("hopper_prefill_half", unsupported, configs, traffic, Launcher, unfit),
    schedules=("even", "fixed"),
    merges=("combine", "last"),
)
