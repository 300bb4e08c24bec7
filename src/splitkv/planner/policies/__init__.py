"""Policies: pure functions from (problem, device, kernels that can) to a Choice.

`POLICIES` is the one list of them, by name. Nothing here imports torch or triton, so that a plan
for any GPU can be made anywhere.
"""

from splitkv.planner.policies import (
    appending,
    balanced,
    batch_invariant,
    fixed,
    flash_attention_2,
    flash_attention_3,
    mixes,
    paged_attention_v2,
    persistent,
    scheduled,
    sequence_aware,
    tuned,
    waves,
    widening,
)
from splitkv.planner.policies.shared import Policy

POLICIES: dict[str, Policy] = {
    "waves": waves.choose,
    "tuned": tuned.choose,
    "flash_attention_2": flash_attention_2.choose,
    "flash_attention_3": flash_attention_3.choose,
    "sequence_aware": sequence_aware.choose,
    "paged_attention_v2": paged_attention_v2.choose,
    "paged_attention_v2_permissive": paged_attention_v2.choose_permissive,
    "fixed": fixed.choose,
    "batch_invariant": batch_invariant.choose,
    "scheduled": scheduled.choose,
    "balanced": balanced.choose,
}
DEFAULT = "tuned"

__all__ = [
    "DEFAULT",
    "POLICIES",
    "Policy",
    "appending",
    "balanced",
    "batch_invariant",
    "fixed",
    "flash_attention_2",
    "flash_attention_3",
    "mixes",
    "paged_attention_v2",
    "persistent",
    "scheduled",
    "sequence_aware",
    "tuned",
    "waves",
    "widening",
]
