"""FlashAttention-3's rule with three guards in place of one: short contexts may split.

Source: Llopart Font, Hernando and España-Bonet, "Sequence-Aware Split Heuristic to Mitigate SM
Underutilization in FlashAttention-3 Low-Head-Count Decoding" (2026), figure 2. FlashAttention-3
never splits four blocks of keys or fewer. Here four blocks split in three where there are fewer
than four tiles; everything else is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Kernel
from splitkv.core.problem import Problem
from splitkv.planner.policies import flash_attention_3
from splitkv.planner.policies.flash_attention_3 import Dispatch, saturated
from splitkv.planner.policies.shared import fit


def num_splits_heuristic(
    total_mblocks: int,
    num_SMs: int,
    num_n_blocks: int,
    num_m_blocks: int,
    size_one_kv_head: int,
    is_causal_or_local: bool,
    max_splits: int,
) -> int:
    """The number of splits; arguments as FlashAttention-3's."""
    if not saturated(total_mblocks, num_SMs):
        if num_n_blocks <= 3:  # short contexts are left alone
            return 1
        if num_n_blocks == 4:  # the boundary: split where most SMs would idle
            return 1 if total_mblocks >= 4 else 3
    return flash_attention_3.num_splits_heuristic(
        total_mblocks,
        num_SMs,
        num_n_blocks,
        num_m_blocks,
        size_one_kv_head,
        is_causal_or_local,
        max_splits,
    )


def dispatch(
    problem: Problem, device: Device, *, pack_gqa: bool | None = None, sm_margin: int = 0
) -> Dispatch:
    """FlashAttention-3's tiles and packing with the sequence-aware number of splits."""
    return flash_attention_3.dispatch(
        problem,
        device,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        heuristic=num_splits_heuristic,
        name="sequence-aware FlashAttention-3",
    )


def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    """The sequence-aware number of splits, on our kernel."""
    told = dispatch(problem, device)
    return fit(problem, device, candidates, told.num_splits, told.why, told.block_n)
