"""Programs that stay, with shares of a step's tiles that a schedule made on the device gives them.

For batches whose lengths differ: the policy `balanced` takes such plans wherever there are any, and
`with_schedule` makes policies that take one in particular. The default policy, which knows the
greatest length alone, does not. What the cost model says of a mix of lengths: `mixes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from splitkv.core.device import Device, KiB
from splitkv.core.errors import UnsupportedProblem, expect_at_least, expect_one_of
from splitkv.core.plan import SCHEDULED, Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import WIDE
from splitkv.planner.policies import tuned
from splitkv.planner.policies.shared import (
    Policy,
    best_shape,
    count,
    row_tiles,
    shapes,
)

Schedule = Literal["ranges", "head_ranges", "proportional"]
IN_FLIGHT = 96 * KiB  # of keys and values on their way to an SM
PROPORTIONAL_WAVES = 2  # programs of proportional splits for each place on the GPU


def with_schedule(
    schedule: Schedule = "ranges", programs_per_sm: int = 1, tile_n: int = 64, num_stages: int = 0
) -> Policy:
    """A policy that has a schedule of the step say what programs work on.

    schedule         "ranges", "head_ranges" or "proportional": see kernels/schedule.py
    programs_per_sm  programs that an SM runs at a time
    tile_n           keys a tile, or the kernel's nearest
    num_stages       tiles in flight a program; 0: as many as `IN_FLIGHT` bytes are

    Raises UnsupportedProblem where no kernel that can run the problem has schedules: for calls that
    are not decode, lengths on the host, and more packed rows than a kernel has narrow tiles for.
    """
    expect_one_of("schedule", schedule, SCHEDULED)
    expect_at_least("programs_per_sm", programs_per_sm, 1)
    expect_at_least("num_stages", num_stages, 0)

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        against = []
        for kernel in candidates:
            reasons = why_not(kernel, problem, device)
            if not reasons:
                break
            against.append((kernel.name, tuple(reasons)))
        else:
            raise UnsupportedProblem(problem, device, tuple(against))
        found = narrow(shapes(kernel, problem, device))
        shape = best_shape(found, problem, tile_n)
        stages = num_stages or stages_of(problem, shape, programs_per_sm)
        alike = [
            c
            for c in found
            if (c.tile_m, c.tile_n, c.num_warps) == (shape.tile_m, shape.tile_n, shape.num_warps)
        ]
        shape = min(alike, key=lambda c: (abs(c.num_stages - stages), c.num_stages))
        places = device.num_sms * programs_per_sm
        head_tiles = problem.num_kv_heads * row_tiles(problem, shape.tile_m)
        programs = places if schedule == "ranges" else max(1, places // head_tiles)
        if schedule == "proportional":
            programs = problem.batch + PROPORTIONAL_WAVES * programs
        config = replace(shape, schedule=schedule, programs=programs)
        why = f"{schedule}, as asked: {count(programs, 'program')}"
        if schedule != "ranges":
            why += f" for each of {count(head_tiles, 'head tile')}"
        return Choice(kernel.name, config, f"{why} on {device.num_sms} SMs")

    return choose


def balanced(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    """The policy for batches whose lengths differ, however they do: a schedule of the step wherever
    the first kernel has one for several sequences, else what `tuned` decides.

    The lengths of most batches of an engine are far below the greatest one that it serves, which is
    all that a plan knows. Programs of neighbouring heads read neighbouring keys; with several KV
    heads two of them share an SM: measurements/thresholds.md#schedules.
    """
    reasons = ["one sequence: expected several"] if problem.batch < 2 else []
    reasons += why_not(candidates[0], problem, device)
    if reasons:
        own = tuned.choose(problem, device, candidates)
        return replace(own, why=f"balanced: {reasons[0]}; {own.why}")
    programs_per_sm = 1 if problem.num_kv_heads == 1 else 2
    choose = with_schedule("head_ranges", programs_per_sm)
    return choose(problem, device, candidates[:1])


def narrow(found: Sequence[Config]) -> list[Config]:
    """The shapes whose programs a schedule can have."""
    return [config for config in found if config.tile_m < WIDE or config.tile_m == found[0].tile_m]


def why_not(kernel: Kernel, problem: Problem, device: Device) -> list[str]:
    """Every reason why programs of a kernel follow no schedule for a problem."""
    if not set(SCHEDULED) <= {*kernel.schedules}:
        return ["schedule: expected a kernel that has one of a step"]
    reasons = []
    if problem.lengths != "device":
        reasons.append(f"lengths {problem.lengths}: expected device")
    if problem.appends:
        reasons.append(f"{count(problem.seqlen_new, 'new key')}: expected none")
    if problem.early_kv:
        reasons.append("early_kv: expected False")
    tile_m = min(config.tile_m for config in shapes(kernel, problem, device))
    if kernel.name == "hopper_decode_split" and tile_m >= WIDE:
        reasons.append(f"packed rows {problem.rows}: expected at most {WIDE // 2}")
    return reasons


def stages_of(problem: Problem, shape: Config, programs_per_sm: int) -> int:
    """Tiles in flight a program."""
    a_key = (problem.head_dim + problem.head_dim_v) * problem.kv_element_bytes
    return max(2, IN_FLIGHT // (programs_per_sm * shape.tile_n * a_key))
