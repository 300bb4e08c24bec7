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
            `reference` in working precision; from then on as hopper/prefill.py
Limits      int8 or e4m3; no lse with products widened or of q in 8 bits, as rounding leaves it more
            than 1e-3 off: of scores around 10 by 2e-3 in fp16, by 4e-2 in bf16; no gradient;
            otherwise those of hopper/prefill.py for keys as they are; pages and strides of keys of
            any size
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS, Paged, Ragged
from splitkv.core.plan import Config, Kernel, Plan, Traffic
from splitkv.core.problem import Operands, Problem
from splitkv.kernels import prefill
from splitkv.kernels.hopper.prefill import kernel as hopper_prefill
from splitkv.kernels.hopper.prefill.launch import HopperLauncher
from splitkv.kernels.widen import Widening


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    reasons = hopper_prefill.unsupported(replace(problem.widened, needs_grad=False), device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    known = problem.codec.name in ("int8", "fp8")
    expect(known, f"kv {problem.codec}: expected int8 or fp8")
    rounds_q = problem.products != "widened" and problem.q_granularity == "none"
    expect(
        rounds_q or not problem.return_lse or problem.codec == AS_IS,
        "return_lse: expected products half or full and q of 16 bits, as keys and q are rounded",
    )
    expect(not problem.needs_grad, "gradient: expected inputs that require none")
    return reasons


def unfit(operands: Operands) -> list[str]:
    """What TMA cannot describe of the memory that is read as it is given."""
    x = operands
    q = x.q if x.q_scale is None else None  # else `widen_rows` reads it
    reasons = hopper_prefill.unfit(Operands(q, None, None, x.out))
    for name in ("q", "k", "v"):
        shape = list(getattr(x, name).shape)
        if 0 in shape and (name != "q" or x.q_scale is not None):
            reasons.append(f"{name}: expected at least one token, got {shape}")
    return reasons


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Those of `hopper_prefill` for the widened problem."""
    return hopper_prefill.configs(problem.widened, device)


def traffic(problem: Problem, config: Config) -> Traffic:
    """The lines of the docstring's Traffic section, every sequence at its upper bound."""
    wide = prefill.traffic(problem.widened, config)
    return replace(wide, kv_bytes=problem.kv_bytes + 2 * wide.kv_bytes)


class WidenedOperands:
    """`widen_rows` and `hopper_prefill` bound to one plan and one memory layout.

    The latter is bound at the first call, to the memory that the former wrote.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        problem = plan.problem
        self.plan = replace(plan, problem=problem.widened, kernel=hopper_prefill.KERNEL.name)
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
            (q,), _ = self.of_queries([(q, x.q_scale)])
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


KERNEL = Kernel(
    *("hopper_prefill_widened", unsupported, configs, traffic, WidenedOperands, unfit),
    schedules=("even", "fixed"),
    merges=("combine", "last"),
)
