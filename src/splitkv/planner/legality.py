"""Whether a kernel can be launched with a config: what is asked of plans that come from the caller.

Policies choose among `Kernel.configs`. A plan may as well be made, or changed, by hand: what no
kernel was written for is refused here, before it is launched.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

from splitkv.core.device import Device
from splitkv.core.errors import (
    expect,
    expect_at_least,
    expect_divides,
    expect_in_range,
    expect_one_of,
    expect_positive,
)
from splitkv.core.kv import Paged
from splitkv.core.plan import SCHEDULED, Config, Kernel, Plan
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.core.values import checked
from splitkv.core.variants import Plain, RowSplits, Variant
from splitkv.kernels.limits.decode_split import MAX_GRID
from splitkv.planner.policies.shared import (
    MAX_SPLITS,
    MAX_TILES,
    count,
    num_tiles,
    row_tiles,
)

SHAPE = ("pack_gqa", "tile_m", "tile_n", "num_warps", "num_stages")


def expect_config(kernel: Kernel, problem: Problem, device: Device, config: Config) -> Config:
    """A config that the kernel has for a problem that it can run, in Python's own numbers."""
    config = checked(config, "plan.config")
    _expect_config(kernel, problem, device, config)
    return config


@lru_cache(maxsize=4096)
def _expect_config(kernel: Kernel, problem: Problem, device: Device, config: Config) -> None:
    expect_one_of("plan.config.schedule", config.schedule, kernel.schedules)
    expect_one_of("plan.config.merge", config.merge, kernel.merges)
    expect_in_range("plan.config.num_splits", config.num_splits, 1, MAX_SPLITS)
    _expect_shape(kernel, problem, device, config)
    if config.schedule in ("batch", *SCHEDULED):
        hint = "lengths on the host leave nothing to share out"
        shared = problem.lengths == "device"
        expect(shared, "plan.config.schedule", "'even' or 'fixed'", config.schedule, hint)
        hint = "what is shared out has as many sink tokens for every sequence"
        alike = not problem.sequence_sink_tokens
        expect(alike, "plan.config.schedule", "'even' or 'fixed'", config.schedule, hint)
        least = {"ranges": 1, "head_ranges": 1, "proportional": problem.batch + 1}
        least_programs = least.get(config.schedule, problem.batch)
        expect_in_range("plan.config.programs", config.programs, least_programs, MAX_GRID)
    if config.schedule in SCHEDULED:
        _expect_scheduled(problem, config)
    if config.schedule == "items":
        _expect_items(problem, config)
    elif config.schedule == "fixed":
        _expect_every_key(problem, config)
    else:
        hint = "schedule 'fixed' has parts of a size"
        expect(config.split_size == 0, "plan.config.split_size", "0", config.split_size, hint)
    if config.appends:
        against = kernel.apart(problem) if problem.appends else ["the call has no new tokens"]
        expect(not against, "plan.config.appends", "False", True, "; ".join(against))
    _expect_variant(config.variant, kernel.variants(problem, device, config))


def _expect_variant(variant: Variant, legal: list[Variant]) -> None:
    """One of those that the kernel lists beside the numbers of a config; Plain: to be chosen."""
    name, hint = "plan.config.variant", "variant=Plain() has it chosen"
    expect(legal, "plan.config", "numbers that a variant of the kernel is for", "others")
    if isinstance(variant, Plain):
        return
    found = [other for other in legal if type(other) is type(variant)]
    expect(found, name, f"{type(legal[0]).__name__}()", variant)
    for field in fields(variant):
        value, values = getattr(variant, field.name), [getattr(x, field.name) for x in found]
        expect_one_of(f"{name}.{field.name}", value, dict.fromkeys(values), hint)
        found = [other for other in found if getattr(other, field.name) == value]


def expect_backward(kernel: Kernel, plan: Plan) -> None:
    """Gradients by tiles that the kernel lists for the plan's problem, and as many splits of rows
    as there are tiles of keys for; None: they are to be chosen, or nobody wants any."""
    made = plan.backward
    if made is None:
        return
    problem, device, name = plan.problem, plan.device, "plan.backward"
    expect(problem.needs_grad, name, "None, as no input requires a gradient", made)
    legal = list(kernel.gradients(problem, device))
    tiles = replace(made, row_splits=RowSplits())
    said = f"tiles that {kernel.name} has here, like {legal[0]}" if legal else "None"
    expect(tiles in legal, name, said, made)
    expect_at_least(f"{name}.row_splits.tiles", made.row_splits.tiles, 0)
    expect_at_least(f"{name}.row_splits.splits", made.row_splits.splits, 1)


def is_legal(kernel: Kernel, problem: Problem, device: Device, config: Config) -> bool:
    """Whether `expect_config` has nothing against it."""
    try:
        expect_config(kernel, problem, device, config)
    except ValueError:
        return False
    return True


def _expect_shape(kernel: Kernel, problem: Problem, device: Device, config: Config) -> None:
    """A shape of tile among the kernel's configs, of clusters among those of clusters; numbers that
    go with those before them."""
    cluster = config.merge == "cluster"
    found = [c for c in kernel.configs(problem, device) if (c.merge == "cluster") == cluster]
    if not found:
        others = [merge for merge in kernel.merges if merge != "cluster"]
        hint = f"{kernel.name} has no tile here whose parts are clusters"
        expect_one_of("plan.config.merge", config.merge, others, hint)
    names: tuple[str, ...] = SHAPE
    before = ""
    if cluster:
        names, before = (*names, "schedule", "num_splits"), "merge cluster"
    for name in names:
        value, values = getattr(config, name), sorted({getattr(c, name) for c in found})
        hint = f"{kernel.name} has these with {before}" if before else ""
        expect_one_of(f"plan.config.{name}", value, values, hint)
        found = [c for c in found if getattr(c, name) == value]
        before = ", ".join(filter(None, [before, f"{name} {value}"]))
    if config.schedule not in ("batch", *SCHEDULED):
        several = {c.programs > 0 for c in found}
        known = " or ".join("more than 0" if some else "0" for some in sorted(several))
        expect_at_least("plan.config.programs", config.programs, 0)
        expect((config.programs > 0) in several, "plan.config.programs", known, config.programs)


def _expect_scheduled(problem: Problem, config: Config) -> None:
    """A schedule of the step, whose tiles are counted in 32 bits."""
    name = "plan.config"
    expect_at_least(f"{name}.split_tiles", config.split_tiles, 0)
    head_tiles = problem.num_kv_heads * row_tiles(problem, config.tile_m)
    tiles = problem.batch * head_tiles * num_tiles(problem, config.tile_n)
    tiles += problem.batch * head_tiles * config.split_tiles
    expect(tiles < MAX_TILES, f"{name}.schedule", f"fewer than {MAX_TILES} tiles", tiles)
    early = problem.early_kv
    expect(not early, f"{name}.schedule", "'even' or 'batch' with early_kv", config.schedule)


def _expect_items(problem: Problem, config: Config) -> None:
    """A schedule of packed sequences whose keys are in pages, one item a program."""
    name, hint = "plan.config", "a schedule of items is made from lengths of pages on the device"
    paged = problem.kind == "varlen" and isinstance(problem.place, Paged)
    expect(paged, f"{name}.schedule", "'even' or 'fixed'", config.schedule, hint)
    expect(not problem.needs_grad, f"{name}.schedule", "'even' with gradients", config.schedule)
    expect(config.programs == 0, f"{name}.programs", "0", config.programs, "one an item")
    expect(config.merge == "combine", f"{name}.merge", "'combine'", config.merge)
    expect_positive(f"{name}.split_size", config.split_size)
    expect_divides(f"{name}.split_size", config.split_size, tile_n=config.tile_n)
    tiles = problem.batch * num_tiles(problem, config.tile_n)
    expect(tiles < MAX_TILES, f"{name}.schedule", f"fewer than {MAX_TILES} tiles", tiles)


def _expect_every_key(problem: Problem, config: Config) -> None:
    """Parts of whole tiles, as many as there are keys for."""
    expect_positive("plan.config.split_size", config.split_size)
    expect_divides("plan.config.split_size", config.split_size, tile_n=config.tile_n)
    tiles = num_tiles(problem, config.tile_n)
    least = ceil_div(tiles, config.split_size // config.tile_n)
    hint = f"else keys are left out of {count(tiles, 'tile')}"
    enough = config.num_splits >= least
    expect(enough, "plan.config.num_splits", f"at least {least}", config.num_splits, hint)
