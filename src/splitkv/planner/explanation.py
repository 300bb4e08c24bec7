"""Why a call runs as it does: the problem, the device, each kernel's reasons, each policy's plan.

    print(explain(problem, GPUS["h200"], policies=("waves", "flash_attention_2")))

Nothing is launched and the GPU need not be here. The figures of a plan are counts and ratios, not
measurements: programs of the grid, waves of them, bytes, and the time that the bytes alone take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from splitkv.core.device import Device, current
from splitkv.core.plan import SCHEDULED, Config, Plan, Traffic
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.core.variants import (
    Backward,
    Gradients,
    HopperDecode,
    HopperPrefill,
    HopperPrefillQuantised,
    Variant,
)
from splitkv.kernels.limits.hopper_decode_split import ring_of
from splitkv.planner import registry
from splitkv.planner.policies import mixes


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid that a plan launches, where the kernel's tiles are the plan's to choose.

    key_tiles      steps of `tile_n` keys that cover the visible keys of a longest sequence
    tiles_a_split  most of them that one split takes
    programs       programs (CTAs), each with its own part of the work
    waves          programs over SMs: above 1, some SMs run more than one
    sms_busy       share of the SMs that get a program at all
    """

    key_tiles: int
    tiles_a_split: int
    programs: int
    waves: float
    sms_busy: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The counts behind a plan, every sequence at its upper bound.

    grid      None on a CPU, and for a kernel that leaves a policy nothing to choose
    traffic   bytes and operations
    seconds   the time to move those bytes at the device's full bandwidth
    """

    grid: Grid | None
    traffic: Traffic
    seconds: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of `explain()`: print it, or take it apart with `as_dict()`.

    kernels   every kernel, in order of preference, with the reasons against it; none: it can run
    plans     one a policy, beside its figures; empty where no kernel can run the problem
    mix_seconds  what the cost model says of the lengths that were asked for, of each plan
    """

    problem: Problem
    device: Device
    kernels: tuple[tuple[str, tuple[str, ...]], ...]
    plans: tuple[Plan, ...]
    figures: tuple[Figures, ...]
    mix_seconds: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return {
            "problem": {
                **asdict(self.problem),
                "place": str(self.problem.place),
                "codec": str(self.problem.codec),
            },
            "device": asdict(self.device),
            "kernels": {name: list(against) for name, against in self.kernels},
            "plans": [
                {
                    "policy": plan.policy,
                    "kernel": plan.kernel,
                    "why": plan.why,
                    "config": plan.config.as_dict(),
                    "grid": asdict(figures.grid) if figures.grid else None,
                    "traffic": {**asdict(figures.traffic), "bytes": figures.traffic.bytes},
                    "seconds_at_full_bandwidth": figures.seconds,
                }
                for plan, figures in zip(self.plans, self.figures, strict=True)
            ],
            **({"mix_seconds": list(self.mix_seconds)} if self.mix_seconds else {}),
        }

    def kernel_rows(self) -> list[tuple[str, str]]:
        """(kernel, reason) lines: a kernel's name stands on its first line alone."""
        return [
            (name if i == 0 else "", reason)
            for name, against in self.kernels
            for i, reason in enumerate(against or ("can run it",))
        ]

    def plan_rows(self) -> list[tuple[str, ...]]:
        """The plans side by side, as text: a row a fact, a label and then a cell a plan."""
        columns = [_column(p, f) for p, f in zip(self.plans, self.figures, strict=True)]
        for column, seconds in zip(columns, self.mix_seconds, strict=False):
            column["at these lengths"] = f"{_seconds(seconds)}, by the model"
        labels = dict.fromkeys(label for column in columns for label in column)
        return [(label, *(column.get(label, "-") for column in columns)) for label in labels]

    def why_rows(self) -> list[tuple[str, str]]:
        """(policy, why) lines."""
        return [(p.policy, p.why.removeprefix(f"{p.policy}: ")) for p in self.plans]

    def __str__(self) -> str:
        blocks = [f"{self.problem}\non {self.device}", _table(self.kernel_rows())]
        if self.plans:
            blocks += [_table(self.plan_rows()), _table(self.why_rows())]
        else:
            blocks.append("no kernel can run this problem here")
        return "\n\n".join(blocks)


def explain(
    problem: Problem | Plan,
    device: Device | None = None,
    policies: Sequence[str] = ("waves",),
    num_splits: int = 0,
    lengths: Sequence[int] = (),
) -> Explanation:
    """Explain a problem under each of `policies`, side by side, or one plan that is already made.

    device       where the problem is to run; None: the device that torch sees here
    num_splits   above 0: what the caller forces, as in `decode`
    lengths      keys of each sequence, to be told what the cost model says of them

    A Plan is shown as it is, with the problem, device and policy that it carries. A problem that no
    kernel can run is an answer too: the explanation has every reason, and no plan.
    """
    if isinstance(problem, Plan):
        plan = problem
        return Explanation(
            plan.problem,
            plan.device,
            _kernels(plan.problem, plan.device),
            (plan,),
            (figures(plan),),
            _mixes((plan,), lengths),
        )
    device = current() if device is None else device
    kernels = _kernels(problem, device)
    plans: tuple[Plan, ...] = ()
    if not all(against for _, against in kernels):
        plans = tuple(
            registry.make_plan(problem, device, policy=policy, num_splits=num_splits)
            for policy in policies
        )
    found = tuple(figures(plan) for plan in plans)
    return Explanation(problem, device, kernels, plans, found, _mixes(plans, lengths))


def _mixes(plans: Sequence[Plan], lengths: Sequence[int]) -> tuple[float, ...]:
    """Seconds of each plan with these lengths; none where there are no lengths."""
    if not len(lengths):
        return ()
    return tuple(
        mixes.seconds_of_mix(
            plan.problem, plan.device, registry.kernel_named(plan.kernel), plan.config, lengths
        )
        for plan in plans
    )


def figures(plan: Plan) -> Figures:
    """The counts behind one plan."""
    problem, device = plan.problem, plan.device
    kernel = registry.kernel_named(plan.kernel)
    has_choice = len(list(islice(kernel.configs(problem, device), 2))) > 1
    grid = _grid(problem, device, plan.config) if has_choice and device.kind == "cuda" else None
    traffic = kernel.traffic(problem, plan.config)
    return Figures(grid, traffic, traffic.bytes / device.bandwidth)


def _kernels(problem: Problem, device: Device) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((k.name, tuple(k.unsupported(problem, device))) for k in registry.KERNELS)


def _grid(problem: Problem, device: Device, config: Config) -> Grid:
    if config.pack_gqa:
        row_tiles = problem.num_kv_heads * ceil_div(problem.rows, config.tile_m)
    else:
        row_tiles = problem.num_heads * ceil_div(problem.seqlen_q, config.tile_m)
    key_tiles = ceil_div(problem.visible_keys, config.tile_n)
    parts = config.num_splits * problem.batch
    tiles_a_split = ceil_div(key_tiles, config.num_splits)
    if config.schedule in SCHEDULED:
        groups = 1 if config.schedule == "ranges" else row_tiles
        programs = groups * config.programs
        tiles_a_program = ceil_div(key_tiles * problem.batch * row_tiles, programs)
        waves, busy = programs / device.num_sms, min(1.0, programs / device.num_sms)
        return Grid(key_tiles, tiles_a_program, programs, waves, busy)
    if config.schedule == "batch":
        parts = config.programs
        tiles_a_split = ceil_div(key_tiles * problem.batch, parts)
    elif config.schedule == "fixed":
        tiles_a_split = config.split_size // config.tile_n
    programs = parts * row_tiles
    if problem.cut_tokens < problem.seqlen_q:  # of the first row tiles alone
        cut = problem.num_kv_heads * ceil_div(problem.cut_tokens * problem.group, config.tile_m)
        further = (
            0 if config.schedule == "items" else config.num_splits - 1
        )  # where all are prompts
        programs = problem.batch * (row_tiles + further * cut)
    return Grid(
        key_tiles=key_tiles,
        tiles_a_split=tiles_a_split,
        programs=programs,
        waves=programs / device.num_sms,
        sms_busy=min(1.0, programs / device.num_sms),
    )


def _column(plan: Plan, figures: Figures) -> dict[str, str]:
    """One plan as label -> cell."""
    cells = {"policy": plan.policy, "kernel": plan.kernel}
    grid, config, traffic = figures.grid, plan.config, figures.traffic
    if grid:
        cells |= {
            "splits": _splits(config),
            "tile": f"{config.tile_m} rows x {config.tile_n} keys",
            "key tiles": f"{grid.key_tiles}, {grid.tiles_a_split} a split",
            "programs (CTAs)": str(grid.programs),
            "waves": f"{grid.waves:.2f}",
            "SMs busy": f"{grid.sms_busy:.0%} of {plan.device.num_sms}",
        }
    cells |= _variant(plan, config.variant)
    if plan.problem.appends:
        cells["new tokens"] = "written by the kernel" if config.appends else "append runs before"
    if plan.backward is not None:
        cells |= _gradients(plan.backward)
    return cells | {
        "bytes": _bytes(traffic.bytes),
        "of which partials": _bytes(traffic.partial_bytes),
        "at full bandwidth": _seconds(figures.seconds),
    }


def _variant(plan: Plan, variant: Variant) -> dict[str, str]:
    """The variant of the kernel, as label -> cell."""
    if isinstance(variant, HopperDecode):
        return _arrival(plan, variant)
    if not isinstance(variant, HopperPrefill | HopperPrefillQuantised):
        return {}
    turns = {"in_turns": "warpgroups take turns", "any": "warpgroups as they come"}
    cells = {
        "products": turns[variant.mma_order],
        "row tiles of q": f"{variant.q_stages} in shared memory",
    }
    if isinstance(variant, HopperPrefillQuantised):
        items = {"numbered": "by number", "by_grid": "by place in the grid"}[variant.items]
        early = f"; {variant.issued_first} step issued before roles" * (variant.issued_first > 0)
        return cells | {"row tiles found": items + early}
    maxima = {"each_tile": "in each tile", "lazy": "where a weight is too large"}
    out = {"own_tiles": "tiles of their own", "place_of_q": "the place of q"}
    return cells | {"maxima": maxima[variant.maxima], "results leave by": out[variant.out]}


def _gradients(made: Gradients) -> dict[str, str]:
    """The backward, as label -> cell."""
    shared = made.row_splits
    rows = f"split by {shared.splits} for {shared.tiles} key tiles" if shared.tiles else "not split"
    if isinstance(made, Backward):
        tiles = [f"{x.tile_m} rows x {x.tile_n} keys" for x in (made.keys, made.queries)]
        return {"gradients": f"dk, dv {tiles[0]}; dq {tiles[1]}", "rows of gradients": rows}
    ways = {
        "added": "dq added in any order",
        "added_in_turns": "dq added in order",
        "recomputed": "dq by a kernel of its own",
    }
    tiles_of_keys = f"{made.tile_m} rows x {made.tile_n} keys"
    return {"gradients": f"{tiles_of_keys}; {ways[made.dq]}", "rows of gradients": rows}


def _arrival(plan: Plan, variant: HopperDecode) -> dict[str, str]:
    """How tiles and scales of keys arrive, as label -> cell."""
    loads = {"tma": "TMA", "producer_warp": "producer warp", "gather": "gathered rows"}
    ring = {"holds_split": "holds a split", "wraps": "wraps"}[ring_of(plan.problem, plan.config)]
    cells = {"K and V": f"{loads[variant.load]}; ring of {plan.config.num_stages} {ring}"}
    scales = {
        "per_tile": "one a key, beside tiles",
        "preloaded": "one a key, before tiles",
        "bulk": "one a key, all KV heads in bulk",
    }
    if variant.key_scales != "none":
        cells["key scales"] = scales[variant.key_scales]
    return cells


def _splits(config: Config) -> str:
    if config.schedule == "items":
        return f"pieces of {config.split_size} keys or more, by a schedule of items"
    if config.schedule in SCHEDULED:
        return f"{config.schedule} of a schedule"
    if config.schedule == "batch":
        return f"up to {config.num_splits}, by length"
    splits = f"{config.num_splits}" + f" of {config.split_size} keys" * (config.schedule == "fixed")
    how = {
        "cluster": ", a cluster",
        "last": ", merged by the programs that come last",
    }
    return splits + how.get(config.merge, "")


def _bytes(count: int) -> str:
    power = min(4, int(math.log10(max(count, 1)) / 3))
    return f"{count / 1000**power:.4g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Cells in columns as wide as their widest cell, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
