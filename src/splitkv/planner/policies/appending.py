"""Whether a kernel writes the new tokens of a call itself, or `append` runs before it.

A launch costs more than writing a few tokens, so a kernel that can writes them, whichever policy
chose it. On an H200 (2026-11-22, rotary, heads 8/1 and 32/8) that was 1.02 to 1.31 times as fast
with one token and 1.02 to 1.15 with four; with 8 and 16 the kernel for Hopper was 0.93 to 1.01
times as fast, `decode_split` 0.85 to 1.05. More than `FEW` tokens are therefore written by the
kernel only where there would be three launches else.

Kernels that write none merge their parts themselves after `append`: two launches at most. In a CUDA
graph that was 0.1 to 3.9 us later than `combine` in 11 of 12 shapes, so elsewhere `combine` merges.
"""

from __future__ import annotations

from dataclasses import replace

from splitkv.core.kv import Paged
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.problem import Problem

FEW = 4


def decide(problem: Problem, kernel: Kernel, config: Config) -> tuple[Config, str]:
    """(config, why), why empty where nothing is appended."""
    merged = config.num_splits > 1 and not config.clustered
    if "last" in kernel.merges and not config.clustered:
        packed_pages = problem.kind == "varlen" and isinstance(problem.place, Paged)
        after = merged and (problem.appends or packed_pages)
        config = replace(config, merge="last" if after else "combine")
    if not problem.appends:
        return replace(config, appends=False), ""
    against = kernel.apart(problem)
    if not against and problem.seqlen_new > FEW and not merged:
        against = [f"new keys {problem.seqlen_new}: more than {FEW} take a launch less time"]
    if against:
        return replace(config, appends=False), f"append runs before it: {'; '.join(against)}"
    return replace(config, appends=True), "it writes the new tokens itself"


def with_new_tokens(problem: Problem, kernel: Kernel, choice: Choice) -> Choice:
    """A policy's choice, and what becomes of new tokens."""
    config, why = decide(problem, kernel, choice.config)
    return replace(choice, config=config, why="; ".join(filter(None, (choice.why, why))))
