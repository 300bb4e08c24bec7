"""Whether a kernel writes the new tokens of a call itself, or `append` runs before it.

A launch costs more than the writing: a kernel that can does it, whichever policy chose it.
"""

from __future__ import annotations

from dataclasses import replace

from splitkv.plans import Choice, Config, Kernel
from splitkv.problem import Problem


def decide(problem: Problem, kernel: Kernel, config: Config) -> tuple[Config, str]:
    """(config, why), why empty where nothing is appended."""
    if not problem.appends:
        return replace(config, appends=False), ""
    against = kernel.apart(problem)
    if against:
        return replace(config, appends=False), f"append runs before it: {'; '.join(against)}"
    return replace(config, appends=True), "it writes the new tokens itself"


def with_new_tokens(problem: Problem, kernel: Kernel, choice: Choice) -> Choice:
    """A policy's choice, and what becomes of new tokens."""
    config, why = decide(problem, kernel, choice.config)
    return replace(choice, config=config, why="; ".join(filter(None, (choice.why, why))))
