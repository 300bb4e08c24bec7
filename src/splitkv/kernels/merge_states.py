"""Merge attention over disjoint sets of keys: one program a few rows, all states in one pass.

Computes, over the states i of a row, in their order,

    m = max_i lse[i]     l = sum_i exp(lse[i] - m)     acc = sum_i exp(lse[i] - m) out[i]
    out = acc / (l + exp(sink - m))                    lse = m + log l

Shapes      out[i] [batch, seqlen_q, num_heads, head_dim_v] and lse[i] [batch, num_heads, seqlen_q]
            fp32, or packed [total, num_heads, head_dim_v] and [num_heads, total]; the strides of
            all out[i] are the same, and those of all lse[i]; out and lse likewise, with strides of
            their own; sink [num_heads]
Grid        (batch * seqlen_q * num_heads / TILE_ROWS,)
Traffic     every state read once, out and lse written once
Numerics    fp32 throughout, base-2 exponentials, one rounding at the end; states are merged in
            order, so bits do not vary
Limits      states of bf16, fp16 or fp32, the last dimension contiguous. What a state without keys
            (-inf) holds is not read. `out` and `lse` may be the memory of any one state
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.combine import Final
from splitkv.kernels.host.arguments import prepared
from splitkv.kernels.tile.softmax import finish, finite_or_zero
from splitkv.kernels.tile.visit import Strides

if TYPE_CHECKING:
    from torch import Tensor

TILE_ELEMENTS = 1024  # of a state, a program


class State(NamedTuple):
    """Pointers to the result of attention over some of the keys, and to its LSE."""

    out_ptr: Any
    lse_ptr: Any


@triton.jit
def offsets(strides, b, t, head):
    """Where rows begin, 64-bit."""
    return b.to(tl.int64) * strides.b + t.to(tl.int64) * strides.t + head.to(tl.int64) * strides.h


@triton.jit(
    do_not_specialize=[
        "rows",
        "num_heads",
        "seqlen_q",
        "stride_lb",
        "stride_lt",
        "stride_lh",
        "stride_final_lb",
        "stride_final_lt",
        "stride_final_lh",
    ]
)
def merge_states(
    states,  # tuple of State
    final,  # Final
    sink_ptr,  # [num_heads], or None
    rows,  # batch * seqlen_q * num_heads
    num_heads,
    seqlen_q,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_lb,
    stride_lt,
    stride_lh,
    stride_final_ob,
    stride_final_ot,
    stride_final_oh,
    stride_final_lb,
    stride_final_lt,
    stride_final_lh,
    HEAD_DIM_V: tl.constexpr,
    DIM_V: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    ok = row < rows
    head = row % num_heads
    t = row // num_heads % seqlen_q
    b = row // num_heads // seqlen_q
    offs_v = tl.arange(0, DIM_V)
    v_ok = (offs_v < HEAD_DIM_V)[None, :]
    at_out = offsets(Strides(stride_ob, stride_ot, stride_oh), b, t, head)
    at_lse = offsets(Strides(stride_lb, stride_lt, stride_lh), b, t, head)
    m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, DIM_V], tl.float32)
    for i in tl.static_range(len(states)):
        lse = tl.load(states[i].lse_ptr + at_lse, mask=ok, other=float("-inf"))  # [TILE_ROWS]
        seen = lse != float("-inf")
        out_ptrs = states[i].out_ptr + at_out[:, None] + offs_v[None, :]
        out = tl.load(out_ptrs, mask=seen[:, None] & v_ok, other=0.0)  # [TILE_ROWS, DIM_V]
        m_i = lse * 1.4426950408889634
        m_new = tl.maximum(m, m_i)
        top = finite_or_zero(m_new)
        shrink = tl.exp2(m - top)
        weight = tl.exp2(m_i - top)
        l = l * shrink + weight
        acc = acc * shrink[:, None] + out.to(tl.float32) * weight[:, None]
        m = m_new
    sink_log2 = None
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=ok, other=0.0).to(tl.float32)
        sink_log2 = sink * 1.4426950408889634
    out, lse = finish(acc, m, l, sink_log2)
    to_out = offsets(Strides(stride_final_ob, stride_final_ot, stride_final_oh), b, t, head)
    out_ptrs = final.out_ptr + to_out[:, None] + offs_v[None, :]
    tl.store(out_ptrs, out.to(final.out_ptr.dtype.element_ty), mask=ok[:, None] & v_ok)
    to_lse = offsets(Strides(stride_final_lb, stride_final_lt, stride_final_lh), b, t, head)
    tl.store(final.lse_ptr + to_lse, lse, mask=ok)


def launch(
    states: Sequence[tuple[Tensor, Tensor]], out: Tensor, lse: Tensor, sink_logits: Tensor | None
) -> None:
    """Merges states (out, lse) of the same shapes and strides into `out` and `lse`, on the current
    stream of their device, which has to be current."""
    first_out, first_lse = states[0]
    *_, num_heads, head_dim_v = out.shape
    rows, seqlen_q = out.shape[:-1].numel(), out.shape[-3]
    if not rows:
        return
    dim_v = triton.next_power_of_2(head_dim_v)
    tile_rows = max(1, TILE_ELEMENTS // dim_v)
    prepared(merge_states)[(triton.cdiv(rows, tile_rows),)](
        tuple(State(*state) for state in states),
        Final(out, lse),
        sink_logits,
        rows,
        num_heads,
        seqlen_q,
        *_strides(first_out, -3, -2),
        *_strides(first_lse, -1, -2),
        *_strides(out, -3, -2),
        *_strides(lse, -1, -2),
        head_dim_v,
        dim_v,
        tile_rows,
        num_warps=4,
        enable_fp_fusion=True,
    )


def _strides(x: Tensor, token: int, head: int) -> Strides:
    """The strides of batch entries, 0 where tokens are packed, of tokens and of heads."""
    packed = x.dim() == (2 if token == -1 else 3)
    return Strides(0 if packed else x.stride(0), x.stride(token), x.stride(head))
