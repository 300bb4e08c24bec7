"""Paged attention v2: partitions of 512 keys and a second kernel that reduces them, or one pass.

Source: "vLLM's Paged Attention V2 in Triton" (lesson 12, 2026, measured on an L4), which ports
vLLM's partitions and tries two rules for when to use them. On its ten shapes the first,
`PERMISSIVE`, splits two that one pass does faster; the second, `CONSERVATIVE`, misses one win and
loses nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.planner.policies.shared import Policy, count, fit

PARTITION_SIZE = 512


@dataclass(frozen=True, slots=True)
class Rule:
    """Partition where less than this share of the SMs has a program and there are enough parts."""

    name: str
    sm_share: float
    min_partitions: int


PERMISSIVE = Rule("permissive", 0.75, 2)
CONSERVATIVE = Rule("conservative", 0.5, 4)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Whether to partition, and into how many."""

    partitioned: bool
    num_partitions: int
    why: str

    @property
    def num_splits(self) -> int:
        return self.num_partitions if self.partitioned else 1


def dispatch(problem: Problem, device: Device, rule: Rule = CONSERVATIVE) -> Dispatch:
    """One pass, or one program for each partition of the longest context.

    The source has a program for one query of a sequence, so every query of a call counts as a
    sequence: a prompt fills the SMs in one pass, and has partials for none of its many rows.
    """
    programs = problem.batch * problem.seqlen_q * problem.num_kv_heads
    partitions = ceil_div(problem.seqlen_k, PARTITION_SIZE)
    idle = programs < rule.sm_share * device.num_sms
    partitioned = idle and partitions >= rule.min_partitions
    why = (
        f"paged attention v2, {rule.name}: {count(programs, 'program')}, "
        f"{'below' if idle else 'not below'} {rule.sm_share} x {device.num_sms} SMs; "
        f"{count(partitions, 'partition')} of {PARTITION_SIZE}, wanted {rule.min_partitions}: "
        f"{'split' if partitioned else 'one pass'}"
    )
    return Dispatch(partitioned, partitions, why)


def with_rule(rule: Rule) -> Policy:
    """The policy that follows this rule."""

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        told = dispatch(problem, device, rule)
        return fit(problem, device, candidates, told.num_splits, told.why)

    return choose


choose = with_rule(CONSERVATIVE)
choose_permissive = with_rule(PERMISSIVE)


@dataclass(frozen=True, slots=True)
class Shape:
    """A row of the source's table: fp16, head_dim 128, pages of 16; milliseconds on an L4."""

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_k: int
    one_pass_ms: float
    partitioned_ms: float


TEN_SHAPES = (
    Shape("llama7b-B1-ctx1k", 1, 32, 32, 1024, 0.142, 0.196),
    Shape("llama7b-B1-ctx4k", 1, 32, 32, 4096, 0.475, 0.389),
    Shape("llama7b-B8-ctx2k", 8, 32, 32, 2048, 1.140, 1.206),
    Shape("llama7b-B32-ctx2k", 32, 32, 32, 2048, 4.359, 4.448),
    Shape("llama7b-B8-ctx8k", 8, 32, 32, 8192, 4.370, 4.411),
    Shape("llama38b-B8-ctx2k", 8, 32, 8, 2048, 0.326, 0.393),
    Shape("llama38b-B32-ctx2k", 32, 32, 8, 2048, 1.130, 1.227),
    Shape("llama70b-B4-ctx2k", 4, 64, 8, 2048, 0.165, 0.196),
    Shape("llama70b-B8-ctx4k", 8, 64, 8, 4096, 0.591, 0.693),
    Shape("mqa-B16-ctx4k", 16, 32, 1, 4096, 0.331, 0.196),
)
