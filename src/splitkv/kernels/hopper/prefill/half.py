"""Attention of sequences whose keys are multiplied in 8 bits and values in 16, for Hopper.

Computes what kernels/hopper/prefill/quantised.py computes with products "half", by two launches:
`widen_rows` (kernels/widen.py) makes values numbers of the working type, each times its scale; then

    s[r, n]  = score(scale * q_scale[r] * k_scale * (q[r] . k[n]))        n in the bands of row r
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v[n] / (l + exp(sink - m))

with keys as they are stored. A program is one of `hopper_prefill`: a load role and mma roles, each
64 rows of a row tile, by the same steps (prefill/mma.py). A q of 16 bits is rounded before a row
tile's first product, its rows by each warpgroup: prefill/scales.py.

Shapes      those of kernels/hopper/prefill/quantised.py, k_scale and v_scale one number or one a
            head. Values in pages come out in order, [batch, seqlen_k, num_kv_heads, head_dim]
Grid        that of `widen_rows`, then that of kernels/hopper/prefill/kernel.py
Traffic     values are read in 8 bits, written in 16 and read again, keys read in 8 bits; the rest
            as kernels/prefill.py. Workspace: 16 bits for each element of values, for as many keys
            of every sequence as the longest may have
Numerics    sums of int8 products in int32, scores and sums in fp32, base-2 exponentials; values
            times their scale are rounded to the working type, as p is. e4m3 units keep some 14 bits
            of a sum, which leaves an lse up to 5e-3 off, so there is none
Limits      sm_90; bf16 or fp16; int8 or e4m3, products half or full, of which the latter permits
            the former; one scale a head; no lse of e4m3; head_dim and head_dim_v equal and 64 or
            128; no gradient; otherwise those of `hopper_prefill`, of values any strides
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.core.kv import Ragged
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.kernels import prefill
from splitkv.kernels.hopper.prefill import kernel as hopper_prefill
from splitkv.kernels.hopper.prefill.epilogue import announce_program, merge_splits
from splitkv.kernels.hopper.prefill.kernel import bind_warpgroups
from splitkv.kernels.hopper.prefill.launch import HopperLauncher
from splitkv.kernels.hopper.prefill.load import ROWS
from splitkv.kernels.hopper.prefill.records import (
    InKernelMerge,
    KeySource,
    OperandScales,
    PerOperand,
    PipelineBarriers,
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
from splitkv.kernels.limits.hopper_prefill import refit as refit_without_tma
from splitkv.kernels.limits.hopper_prefill_half import bytes_of_values, refit
from splitkv.kernels.limits.scale_layout import scale_strides
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring
from splitkv.kernels.widen import Widening

SIZES = [  # arguments whose values are no reason to compile again
    *hopper_prefill.SIZES,
    *(f"stride_{name}s_{axis}" for name in "qk" for axis in "bth"),
]


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill_half(
    q_desc,  # what is not said here is that of hopper_prefill; of 8 or 16 bits
    q_rest_desc,  # None, as k_rest_desc
    k_desc,  # of 8 bits
    k_rest_desc,
    v_desc,  # of 16
    out_desc,
    final,
    partial,
    count_ptr,
    lengths,
    sink_ptr,
    scale_ptrs,  # ScalePointers; that of q None: q has none, that of V of values before
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
    CONFIG: gl.constexpr,  # PrefillConfig
):
    if CONFIG.dependents == "launched_first":  # combine waits for this grid before it reads
        tl.extra.cuda.gdc_launch_dependents()
    maps = PerOperand(q_desc, None, k_desc, None, v_desc, out_desc)
    memory = allocate_operands(maps, CONFIG)
    out_boxes, out = allocate_wgmma_tiles(out_desc, CONFIG.out_stages, ROWS, CONFIG.head_dim_v)
    q = memory.q
    unrounded_q = None
    if q_desc.dtype != k_desc.dtype:
        unrounded_q = q
        DIM: gl.constexpr = CONFIG.head_dim_v
        rounded: gl.constexpr = gl.NVMMASharedLayout(DIM, 8, rank=2)
        q = gl.allocate_shared_memory(k_desc.dtype, [CONFIG.mma_roles, ROWS, DIM], rounded)
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
            ordered_values=lengths.table_ptr,  # values of pages are in order
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
    scales = OperandScales(
        q_ptr=scale_ptrs.q_ptr,
        k_ptr=scale_ptrs.k_ptr,
        v_ptr=None,
        q=Strides(stride_qs_b, stride_qs_t, stride_qs_h),
        k=Strides(stride_ks_b, stride_ks_t, stride_ks_h),
        v=Strides(None, None, None),
        of_k=None,
        of_v=None,
        of_tile=None,
        inverse=None,
        unrounded_q=unrounded_q,
    )
    program = PrefillProgram(
        batch=work,
        maps=maps,
        boxes=PerOperand(memory.q_boxes, None, memory.k_boxes, None, memory.v_boxes, out_boxes),
        tiles=PerOperand(q, None, memory.k, None, memory.v, out),
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


def bind_products(plan: Plan, operands: Operands) -> HopperLauncher:
    """`hopper_prefill_half` and `combine` bound to one plan and one memory layout, with values that
    have been widened."""
    problem, x = plan.problem, operands
    qs_b, qs_t, qs_h = scale_strides(x.q_scale, x.q)
    ks_b, ks_t, ks_h = scale_strides(x.k_scale, x.k)
    more = {
        "stride_qs_b": qs_b,
        "stride_qs_t": qs_t,
        "stride_qs_h": qs_h,
        "stride_ks_b": ks_b,
        "stride_ks_t": ks_t,
        "stride_ks_h": ks_h,
    }
    kv_bytes = problem.kv_bytes // 2 + bytes_of_values(problem)
    bound = bind_warpgroups(
        *(plan, x, lambda: hopper_prefill_half, kv_bytes), more=more, ordered_values=True
    )
    return HopperLauncher(plan, x, bound, refit_without_tma)


class WidenedValues:
    """`widen_rows` and `hopper_prefill_half` bound to one plan and one memory layout.

    The latter is bound at the first call, to the memory that the former wrote.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        problem, x, ragged = plan.problem, operands, plan.problem.place == Ragged()
        self.plan = plan
        self.any_address: prefill.PrefillLauncher | None = None
        self.attend: HopperLauncher | None = None
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
                self.any_address = prefill.in_place_of(self.plan, refit(self.plan, x), x)
            return self.any_address(x)
        values = [(x.v, x.v_scale)]
        widened = self.widen(values, x.cache_seqlens, x.page_table, x.cu_seqlens_q)
        ready = Operands(
            q=x.q,
            k=x.k,
            v=widened.tensors[0],
            out=x.out,
            cache_seqlens=x.cache_seqlens,
            page_table=x.page_table,
            cu_seqlens_q=x.cu_seqlens_q,
            cu_seqlens_k=x.cu_seqlens_k,
            sink_logits=x.sink_logits,
            q_scale=x.q_scale,
            k_scale=x.k_scale,
            v_scale=x.v_scale,
            softmax_scale=x.softmax_scale,
            softcap=x.softcap,
        )
        if self.attend is None:
            self.attend = bind_products(self.plan, ready)
        return self.attend(ready)
