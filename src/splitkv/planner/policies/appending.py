"""Whether a kernel writes the new tokens of a call itself, or `append` runs before it.

A launch costs more than writing a few tokens, so a kernel that can writes them, whichever policy
chose it; with many tokens that is slower. More than `FEW` are therefore written by the kernel only
where there would be three launches else.

Kernels that write none merge their parts themselves after `append`: two launches at most. Elsewhere
`combine` is sooner done, and merges; so it does where more programs would come than are counted.
Figures: measurements/thresholds.md#new-tokens.
"""

from __future__ import annotations

from dataclasses import replace

from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import SCHEDULED, Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import MOST_ARRIVALS, ceil_div

FEW = 4  # tokens a sequence
MOST_DIM_IN_8_BITS = 128  # head_dim of programs of a schedule that write new tokens
MOST_SHARING = 64  # query heads of a row tile, by each kernel for whole sequences at least


def decide(problem: Problem, kernel: Kernel, config: Config) -> tuple[Config, str]:
    """(config, why), why empty where nothing is appended."""
    cluster = config.merge == "cluster"
    merged = config.num_splits > 1 and not cluster
    if "last" in kernel.merges and not cluster:
        packed_pages = problem.kind == "varlen" and isinstance(problem.place, Paged)
        by_items = config.schedule == "items"  # it says what is merged
        after = merged and not by_items and (problem.appends or packed_pages)
        after = after and most_programs(problem, config) <= MOST_ARRIVALS
        config = replace(config, merge="last" if after else "combine")
    if not problem.appends:
        return (replace(config, appends=False) if config.appends else config), ""
    against = kernel.apart(problem)
    widest = max(problem.head_dim, problem.head_dim_v)
    if config.schedule in SCHEDULED and problem.codec != AS_IS and widest > MOST_DIM_IN_8_BITS:
        expected = f"expected at most {MOST_DIM_IN_8_BITS} in 8 bits by a schedule"
        against = [*against, f"head_dim {widest}: {expected}, else registers are spilled"]
    if not against and problem.seqlen_new > FEW and not merged:
        against = [f"new keys {problem.seqlen_new}: more than {FEW} take a launch less time"]
    if against:
        return replace(config, appends=False), f"append runs before it: {'; '.join(against)}"
    return replace(config, appends=True), "it writes the new tokens itself"


def most_programs(problem: Problem, config: Config) -> int:
    """An upper bound of the programs of a kernel for whole sequences: one for each row tile, of
    packed sequences a row tile more, and one for each further split of those that are cut."""
    group, batch = problem.group, problem.batch
    shared = min(group & -group, MOST_SHARING) if config.pack_gqa else 1  # heads of a row tile
    whole = ceil_div(problem.seqlen_q * shared, config.tile_m) + 1
    further = (config.num_splits - 1) * ceil_div(problem.cut_tokens * shared, config.tile_m)
    programs = (batch * (whole + further) + 1) * problem.num_heads // shared
    return min(programs, config.programs or programs)


def with_new_tokens(problem: Problem, kernel: Kernel, choice: Choice) -> Choice:
    """A policy's choice, and what becomes of new tokens."""
    config, why = decide(problem, kernel, choice.config)
    if config is choice.config and not why:
        return choice
    return replace(choice, config=config, why="; ".join(filter(None, (choice.why, why))))
