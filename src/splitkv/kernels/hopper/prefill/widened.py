"""Attention of sequences stored in 8 bits, for Hopper: made a working type once, then multiplied.

Computes what kernels/hopper/prefill/quantised.py computes, by two launches or three: `widen_rows`
(kernels/widen.py) makes of keys and values, and of queries in 8 bits, numbers of the working type,
each times its scale; `hopper_prefill` attends to these. In a prefill every key is multiplied by
hundreds of rows or more, so what that reads and writes is little beside the products, which then
run at the rate of 16 bits whatever the scales are of and however small the pages.

Shapes      as kernels/hopper/prefill/quantised.py. Keys in pages come out contiguous or, for packed
            queries, packed with room for `seqlen_k` of each sequence
Grid        of `widen_rows`, then of `hopper_prefill`
Traffic     keys and values are read in 8 bits, written in 16 and read again; the rest as
            kernels/prefill.py. Workspace: 16 bits for each element of keys and values, for as many
            keys of every sequence as the longest may have
Numerics    keys, values and queries times their scales are rounded to the working type, as by
            `reference` in working precision; from then on as hopper/prefill/kernel.py
Limits      int8, e4m3 or e5m2; no lse with products widened or of q in 8 bits, as rounding leaves
            it more than 1e-3 off: of scores around 10 by 2e-3 in fp16, by 4e-2 in bf16; no
            gradient; otherwise those of hopper/prefill/kernel.py for keys as they are; pages and
            strides of keys of any size
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from splitkv.core.kv import Paged, Ragged
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.kernels.hopper.prefill import kernel as hopper_prefill
from splitkv.kernels.hopper.prefill.launch import HopperLauncher
from splitkv.kernels.limits.hopper_prefill import NAME
from splitkv.kernels.widen import Widening


class WidenedOperands:
    """`widen_rows` and `hopper_prefill` bound to one plan and one memory layout.

    The latter is bound at the first call, to the memory that the former wrote.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        problem = plan.problem
        self.plan = replace(plan, problem=problem.widened, kernel=NAME)
        self.attend: HopperLauncher | None = None
        dtype, x, ragged = getattr(torch, problem.dtype), operands, problem.place == Ragged()
        paged = isinstance(problem.place, Paged)
        self.packed = paged and problem.kind == "varlen"
        self.of_keys = Widening(
            [(x.k, x.k_scale), (x.v, x.v_scale)],
            dtype,
            1 if ragged else problem.batch,
            x.k.shape[0] if ragged else max(problem.seqlen_k, 1),
            mask=None if ragged else problem.mask,
            seqlen_q=problem.seqlen_q,
            table=x.page_table,
            packed=self.packed,
        )
        self.of_queries = None
        if x.q_scale is not None:
            lead = (1, x.q.shape[0]) if x.q.dim() == 3 else tuple(x.q.shape[:2])
            self.of_queries = Widening([(x.q, x.q_scale)], dtype, *lead)

    def __call__(self, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        x, q = operands, operands.q
        if self.of_queries is not None:
            q = self.of_queries([(q, x.q_scale)]).tensors[0]
        keys = (x.k, x.k_scale), (x.v, x.v_scale)
        cu_q = x.cu_seqlens_q if self.packed else None
        (k, v), first = self.of_keys(keys, x.cache_seqlens, x.page_table, cu_q)
        wide = Operands(
            q=q,
            k=k,
            v=v,
            out=x.out,
            cache_seqlens=x.cache_seqlens,
            cu_seqlens_q=x.cu_seqlens_q,
            cu_seqlens_k=first if self.packed else x.cu_seqlens_k,
            sink_logits=x.sink_logits,
            softmax_scale=x.softmax_scale,
            softcap=x.softcap,
        )
        if self.attend is None:
            self.attend = hopper_prefill.bind(self.plan, wide)
        return self.attend(wide)
