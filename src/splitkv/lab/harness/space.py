"""Which plans of a problem are worth timing: a few tile shapes of each kernel, each with a few
numbers of splits, spread around those that the cost model of `waves` finds best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import get_args

from splitkv.core.device import Device
from splitkv.core.plan import Choice, Config, Kernel, Plan
from splitkv.core.problem import Problem
from splitkv.planner import registry
from splitkv.planner.policies import decode_cost, persistent, waves
from splitkv.planner.policies.shared import even_splits, num_tiles, shapes, splits_keys
from splitkv.planner.policies.tuned import cheapest_splits, most_splits

Key = tuple[str, Config]  # a kernel and its config

AROUND = (1.0, 1.5, 1 / 1.5, 2.5, 1 / 2.5)  # times the number of splits that the model finds best
CLUSTERED = 4  # plans of a kernel whose parts are clusters, beside its others
NEAR = (1.25, 0.8, 1.6, 0.6)  # times the number of splits that was fastest


def splitting(problem: Problem, device: Device) -> list[Kernel]:
    """The kernels that can run a problem and leave a tile shape and a number of splits to choose,
    in order of preference."""
    able = [kernel for kernel in registry.KERNELS if not kernel.unsupported(problem, device)]
    return [k for k in able if splits_keys(problem, shapes(k, problem, device))]


def tile_shapes(problem: Problem, device: Device, kernel: Kernel) -> list[Config]:
    """The shapes of a kernel worth timing: the one that `waves` takes, then in turns, each with
    another number of keys a tile, the kernel's own first and the cheapest by the cost model."""
    found = shapes(kernel, problem, device)
    equal = replace(problem, lengths="host")  # for differing ones it may share programs out instead
    taken = waves.choose(equal, device, [kernel]).config.shape
    by_seconds = sorted(found, key=lambda shape: _seconds(problem, device, shape, kernel))
    in_turns = zip(_one_a_tile(found), _one_a_tile(by_seconds), strict=True)
    listed = [taken, *(shape for pair in in_turns for shape in pair)]
    return [shape for shape in dict.fromkeys(listed) if shape in found]


def _one_a_tile(found: Sequence[Config]) -> list[Config]:
    """The first shape of each number of keys a tile."""
    first: dict[int, Config] = {}
    for shape in found:
        first.setdefault(shape.tile_n, shape)
    return list(first.values())


def _seconds(problem: Problem, device: Device, shape: Config, kernel: Kernel) -> float:
    """By the cost model, with one split, or so many that they fill half a wave, one or two."""
    programs, slots = decode_cost.programs(problem, device, shape, kernel)
    most, a_wave = most_splits(problem, shape), slots / max(1, programs)
    some = {1, *(min(most, max(1, int(a_wave * filled))) for filled in (0.5, 1, 2))}
    seconds = decode_cost.model(problem, device, kernel)
    return min(seconds(replace(shape, num_splits=splits)) for splits in some)


def candidates(problem: Problem, device: Device, count: int) -> list[Choice]:
    """About `count` plans, as many of each kernel, first every shape with the splits that the model
    finds best for it."""
    kernels = splitting(problem, device)
    found: list[Choice] = []
    for kernel in kernels:
        each = max(1, count // len(kernels))
        listed = tile_shapes(problem, device, kernel)[: max(2, each // 2)]
        best = {shape: cheapest_splits(problem, device, shape, kernel) for shape in listed}
        configs: dict[Config, None] = {}
        for factor in AROUND:
            for shape in listed:
                configs |= dict.fromkeys(_with_splits(problem, shape, [best[shape] * factor]))
        clustered = in_clusters(kernel, problem, device)[:CLUSTERED]
        configs = dict.fromkeys([*list(configs)[:each], *clustered])
        found += [Choice(kernel.name, config, "candidate") for config in configs]
    return found


def scheduled(problem: Problem, device: Device) -> list[Choice]:
    """Schedules of the step: those of each kind, of one program an SM and of two."""
    found = []
    for kernel in splitting(problem, device):
        if not persistent.why_not(kernel, problem, device):
            for rule, programs_per_sm in product(get_args(persistent.Schedule), (1, 2)):
                choose = persistent.with_schedule(rule, programs_per_sm)
                found.append(replace(choose(problem, device, [kernel]), why="candidate"))
    return found


def in_clusters(kernel: Kernel, problem: Problem, device: Device) -> list[Config]:
    """Plans whose parts are clusters, one a shape, those first that the model finds fastest."""
    constants, equal = decode_cost.constants_of(kernel), replace(problem, lengths="host")
    worth = (*constants.shapes, (128, 4, 1))
    best: dict[Config, tuple[float, Config]] = {}
    model = decode_cost.model(problem, device, kernel)
    for config in waves.in_clusters(kernel, equal, device):
        if (config.tile_n, config.num_warps, config.num_stages) in worth:
            seconds = model(config)
            known = best.get(config.shape)
            if known is None or seconds < known[0]:
                best[config.shape] = seconds, config
    return [config for _, config in sorted(best.values(), key=lambda pair: pair[0])]


def neighbours(problem: Problem, best: Key, tried: Iterable[Key] = ()) -> list[Choice]:
    """The shape of the fastest plan with other numbers of splits near its own, not tried yet.

    None of a plan whose number of splits is not free, or its own.
    """
    (kernel, config), known = best, set(tried)
    if config.programs or config.split_size or config.num_splits == 0:
        return []
    near = _with_splits(problem, config.shape, [config.num_splits * factor for factor in NEAR])
    new = [other for other in dict.fromkeys(near) if (kernel, other) not in known]
    return [Choice(kernel, other, "neighbour") for other in new]


def _with_splits(problem: Problem, shape: Config, splits: Sequence[float]) -> Iterator[Config]:
    most, tiles = most_splits(problem, shape), num_tiles(problem, shape.tile_n)
    for number in splits:
        wanted = min(max(1, round(number)), most)
        yield replace(shape, num_splits=even_splits(tiles, wanted))


def plan_of(problem: Problem, device: Device, choice: Choice) -> Plan:
    """A choice as a plan, for `decode`."""
    return Plan(problem, device, "lab", choice.kernel, choice.config, choice.why)
