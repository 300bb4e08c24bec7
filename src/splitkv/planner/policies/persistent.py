"""Programs that stay, with shares of a step's tiles that a schedule made on the device gives them.

For batches whose lengths differ: the policy `scheduled` takes such plans wherever there are any,
`balanced` where some mix of lengths may gain by one, and `with_schedule` makes policies that take
one in particular. `tuned` and `waves`, which know the greatest length alone, take one where it
costs next to nothing should lengths be equal after all: `where_it_costs_little`. What the cost
model says of a mix of lengths: `mixes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from splitkv.core.device import Device, KiB
from splitkv.core.errors import UnsupportedProblem, expect_at_least, expect_one_of
from splitkv.core.kv import AS_IS, Contiguous
from splitkv.core.plan import SCHEDULED, Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import WIDE, split_tiles
from splitkv.planner.policies import appending
from splitkv.planner.policies.decode_cost import Constants, batch_of, constants_of
from splitkv.planner.policies.shared import (
    MAX_TILES,
    Policy,
    best_shape,
    count,
    num_tiles,
    row_tiles,
    shapes,
)

Schedule = Literal["ranges", "head_ranges", "proportional"]
IN_FLIGHT = 96 * KiB  # of keys and values on their way to an SM
PROPORTIONAL_WAVES = 2  # programs of proportional splits for each place on the GPU

# What a schedule may take longer where lengths are equal after all, of the time that the cost model
# has for the plan without: of what follows, too, see measurements/thresholds.md#schedules.
MOST_LONGER = 0.02
# What schedules were timed on: the kernel, packed rows, head_dim.
TIMED_KERNEL, TIMED_ROWS, TIMED_DIM = "hopper_decode_split", 16, 256
TIMED_WHOLE_DIM = 128  # and those of whole sequences
# Programs for as many whole sequences each are taken where they are so many of those that an SM
# has one of.
LEAST_OF_SMS = 15 / 16


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
        config = replace(
            shape,
            schedule=schedule,
            programs=programs,
            split_tiles=split_tiles(problem.codec),
        )
        why = f"{schedule}, as asked: {count(programs, 'program')}"
        if schedule != "ranges":
            why += f" for each of {count(head_tiles, 'head tile')}"
        return Choice(kernel.name, config, f"{why} on {device.num_sms} SMs")

    return choose


@lru_cache(maxsize=64)  # whether there is one, and which, is asked for after each other
def best_known(problem: Problem, device: Device, kernel: Kernel) -> Choice:
    """The schedule that measured best, of a kernel that has them for the problem.

    Programs of neighbouring heads read neighbouring keys; with several KV heads two of them share
    an SM: measurements/thresholds.md#schedules. With one, in e4m3, larger tiles are faster, as it
    is not memory that its programs wait for: measurements/mixes.md#where-programs-are-when. Where
    an SM has no room for two, one is faster: measurements/mixes.md#room-for-two.
    """
    if problem.num_kv_heads > 1:
        two = with_schedule("head_ranges", 2)(problem, device, [kernel])
        if all_at_once(two.config, problem, device, kernel):
            return two
    tile_n = 128 if in_larger_tiles(problem, kernel) else 64
    return with_schedule("head_ranges", 1, tile_n)(problem, device, [kernel])


def all_at_once(config: Config, problem: Problem, device: Device, kernel: Kernel) -> bool:
    """Whether the GPU has room for all programs of a schedule at a time."""
    shape = batch_of(problem, device, constants_of(kernel)).shape(config)
    return all_programs(problem, config) <= shape.slots


def in_larger_tiles(problem: Problem, kernel: Kernel) -> bool:
    """Whether tiles of 128 keys are known to be faster by a schedule than those of 64, with one KV
    head: as they were timed."""
    codec, dims = problem.codec, {problem.head_dim, problem.head_dim_v}
    shared = codec.name == "fp8" and codec.granularity != "token"
    timed = kernel.name == TIMED_KERNEL and problem.rows <= TIMED_ROWS and dims == {TIMED_WHOLE_DIM}
    return shared and timed and problem.place == Contiguous()


def of_whole_sequences(problem: Problem, device: Device, kernel: Kernel) -> list[Choice]:
    """A schedule by which programs have as many whole sequences each where lengths are equal, so
    that nothing is merged: one program an SM, of 16 bits and head_dim 128, as it was timed. Nothing
    where they would be too few, or of something else.
    """
    dims = {problem.head_dim, problem.head_dim_v}
    if problem.codec != AS_IS or dims != {TIMED_WHOLE_DIM}:
        return []
    choice = with_schedule("head_ranges", 1)(problem, device, [kernel])
    most, batch = choice.config.programs, problem.batch
    programs = next(n for n in range(min(most, batch), 0, -1) if batch % n == 0)
    if programs < LEAST_OF_SMS * most:
        return []
    return [replace(choice, config=replace(choice.config, programs=programs))]


def where_it_costs_little(
    own: Choice, problem: Problem, device: Device, kernel: Kernel, constants: Constants
) -> Choice:
    """A schedule of the step in the place of a choice that was made for equal lengths, where that
    is of the same kernel and would hardly be faster if they were; else the choice itself. `why`
    says which, of decode of several sequences whose lengths only the device knows.

    kernel   the first that can run the problem; constants: those that its cost goes by

    New tokens that the choice would write by itself and a schedule not are a launch more.
    """
    alone = problem.lengths == "host" or problem.batch < 2
    if problem.kind != "decode" or alone:
        return own
    against = why_not_several(kernel, problem, device)
    if own.kernel != kernel.name:
        against.append(f"{own.kernel} is faster where lengths are equal")
    against += [] if against else not_timed(kernel, problem)
    if not against:
        known = best_known(problem, device, kernel), *of_whole_sequences(problem, device, kernel)
        batch, costs = batch_of(problem, device, constants), ""
        without = batch.shape(own.config)
        told = without.cut(own.config)
        for choice in known:
            shape = batch.shape(choice.config)
            longer = shape.longer_by_schedule(choice.config) - without.lost_by_drift(told)
            appends, by_schedule = (
                appending.decide(problem, kernel, x.config)[0].appends for x in (own, choice)
            )
            longer += constants.append * (appends and not by_schedule)
            than = "longer" if longer > 0 else "less"
            costs = f"{abs(longer) * 1e6:.1f} us {than} than {told.seconds * 1e6:.0f} us without"
            if longer > MOST_LONGER * told.seconds:
                continue
            programs = f"{count(choice.config.programs, 'program')} for each of "
            programs += count(shape.head_tiles, "head tile")
            why = f"a schedule of the step, as lengths may differ: at equal ones {costs}"
            return replace(choice, why=f"{own.why.partition(':')[0]}: {why}; {programs}")
        against.append(f"at equal lengths {costs}: expected at most {MOST_LONGER:.0%}")
    return replace(own, why=f"{own.why}; no schedule of the step: {against[0]}")


def all_programs(problem: Problem, config: Config) -> int:
    """The programs of all head tiles by a schedule of the step."""
    if config.schedule == "ranges":
        return config.programs
    return config.programs * problem.num_kv_heads * row_tiles(problem, config.tile_m)


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
    if problem.early_kv:
        reasons.append("early_kv: expected False")
    if problem.sequence_sink_tokens:
        reasons.append("sink_tokens: expected one number, got one a sequence")
    tile_m = min(config.tile_m for config in shapes(kernel, problem, device))
    if kernel.name == "hopper_decode_split" and tile_m >= WIDE:
        reasons.append(f"packed rows {problem.rows}: expected at most {WIDE // 2}")
    return reasons


def why_not_several(kernel: Kernel, problem: Problem, device: Device) -> list[str]:
    """Every reason against a schedule that balances several sequences."""
    reasons = ["one sequence: expected several"] if problem.batch < 2 else []
    reasons += why_not(kernel, problem, device)
    if not reasons:
        config = best_known(problem, device, kernel).config
        tiles = problem.batch * problem.num_kv_heads * row_tiles(problem, config.tile_m)
        tiles *= num_tiles(problem, config.tile_n) + config.split_tiles
        if tiles >= MAX_TILES:
            reasons.append(f"{tiles} tiles: expected fewer than {MAX_TILES}")
    return reasons


def not_timed(kernel: Kernel, problem: Problem) -> list[str]:
    """Every reason why what a schedule costs is not known."""
    reasons = []
    if kernel.name != TIMED_KERNEL:
        reasons.append(f"kernel {kernel.name}: schedules were timed of {TIMED_KERNEL}")
    if problem.rows > TIMED_ROWS:
        reasons.append(f"packed rows {problem.rows}: timed up to {TIMED_ROWS}")
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > TIMED_DIM:
        reasons.append(f"head_dim {widest}: timed up to {TIMED_DIM}")
    return reasons


def stages_of(problem: Problem, shape: Config, programs_per_sm: int) -> int:
    """Tiles in flight a program."""
    a_key = (problem.head_dim + problem.head_dim_v) * problem.kv_element_bytes
    return max(2, IN_FLIGHT // (programs_per_sm * shape.tile_n * a_key))
