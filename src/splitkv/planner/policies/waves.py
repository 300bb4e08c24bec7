"""Our policy, the default where nothing was timed: the plan that the cost model finds cheapest.

`decode_cost` models the kernels for decode, `short_queries` those for whole sequences. More parts
shorten the waves of programs until the merge costs more than they save, and too few programs cannot
ask for what the memory can give. The choice is the shape and number of splits of least seconds, of
whichever kernel; of another than the first only where it promises to be `OTHER` times as fast.

Sequences whose lengths only the device knows may be much shorter than planned for, all but one. So
no part may be longer than `longest_part` bytes, which one SM reads in a time that may be waited
for; where that would take more than a wave of programs, the device shares one out by the lengths
(`schedule="batch"`). Where a schedule of the step costs hardly anything should lengths
be equal, it is taken in the place of either: `persistent.where_it_costs_little`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from splitkv.core.device import Device, MiB
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import WIDE, ceil_div
from splitkv.planner.policies import persistent, short_queries
from splitkv.planner.policies.decode_cost import (
    H200,
    HOPPER_DECODE,
    Batch,
    Constants,
    Cost,
    Shape,
    batch_of,
    cheapest,
    constants_of,
    tile_of,
    widened_apart,
)
from splitkv.planner.policies.shared import (
    MAX_SPLITS,
    ROUNDED,
    WHOLE_SEQUENCES,
    Policy,
    clusters,
    count,
    shapes,
    splits_keys,
)
from splitkv.planner.policies.variants import gathers, long_split

# Of shapes that the model cannot tell apart, the first, but for one that shares the batch out.
CLOSE = 1.02
# A cluster of four or eight needs as many places in one part of the GPU, and some wait for a second
# wave where there are hardly enough; clusters of two do not. So of the places, up to two an SM,
# this share. Figures of this and what follows: measurements/thresholds.md#waves.
ROOM_FOR_CLUSTERS = 0.75

# Numbers of splits to weigh: those, and what fills so many eighths of a wave.
FEW_SPLITS = (*range(1, 17), 32, 64, 128)
EIGHTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
# Sequences to share programs out over: with the parts they are one axis of a grid, not its first.
MOST_SHARED = 65535 - MAX_SPLITS
# times as long as in even parts that are short enough, for what is shared out where lengths are
# equal after all
SHARING = 1.05
# How much less another kernel than the first has to promise: how far the models of kernels are off
# differs by more than how far they are off on plans of one.
OTHER = 1.05
# More packed rows are many: of quantised keys, where they are so many bytes, kernels for whole
# sequences are preferred.
MANY_ROWS, LARGE = 32, 16 * MiB
# For 17 to 32 rows the kernel for Hopper has narrow and wide tiles, and wide ones are taken from so
# many bytes of keys and values on.
LARGE_OF_WIDE = 16 * MiB
# Of head_dim 256 narrow ones have 16 rows, and two of them read the same keys: from so many bytes.
LARGE_OF_TWICE = 2 * MiB
# In pages smaller than a tile, of so many keys, a wide one takes two copies a page for keys, as for
# values, in 16 bits: kernels for whole sequences are faster.
WIDE_PAGES = 64
# Splits of wide tiles are clusters of two at most: programs of larger ones send each other more.
WIDE_CLUSTER = 2


def many_rows(problem: Problem, kernel: Kernel) -> bool:
    """Whether the kernels of whole sequences are to be preferred to this one."""
    if problem.codec == AS_IS or problem.rows <= MANY_ROWS or problem.kv_bytes <= LARGE:
        return False
    small_pages = isinstance(problem.place, Paged) and problem.place.page_size % WIDE_PAGES > 0
    half = problem.codec.name == "int8" and problem.products != "widened"
    return kernel.name != HOPPER_DECODE or small_pages or half


def with_constants(constants: Constants, hopper: Constants | None = None) -> Policy:
    """The policy with other constants, say fitted to another GPU; hopper: of the kernel for it."""
    of_equal = for_equal_lengths(constants, hopper)

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        own, first = of_equal(problem, device, candidates), candidates[0]
        of_first = constants_of(first, constants, hopper)
        return persistent.where_it_costs_little(own, problem, device, first, of_first)

    return choose


def for_equal_lengths(constants: Constants = H200, hopper: Constants | None = None) -> Policy:
    """The policy without schedules of the step: what is the fastest where lengths are equal."""

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        decoding = problem.kind == "decode"
        if decoding and many_rows(problem, candidates[0]):
            candidates = sorted(candidates, key=lambda k: k.name not in WHOLE_SEQUENCES)
        cut = short_queries.choose(problem, device, candidates)
        if cut is not None:
            return cut
        first, *others = candidates
        found = shapes(first, problem, device)
        if not splits_keys(problem, found):
            return Choice(first.name, found[0], f"waves: {first.name} has no splits to weigh")
        seconds, own = fastest(problem, device, first, constants_of(first, constants, hopper))
        if own.config.schedule == "batch" and problem.rows <= MANY_ROWS:
            return own  # made for lengths that differ
        for kernel in _rivals(problem, first, others):
            told = short_queries.faster(problem, device, kernel, seconds / (OTHER * ROUNDED))
            if told is not None and told[0].seconds * OTHER < seconds:
                seconds, own = told[0].seconds, told[1]
        return own

    return choose


def _rivals(problem: Problem, first: Kernel, others: Sequence[Kernel]) -> list[Kernel]:
    """The kernels to weigh beside the first: those of whole sequences."""
    if problem.codec != AS_IS:
        return []
    able = [kernel for kernel in others if kernel.name in WHOLE_SEQUENCES]
    # one that does not write new tokens itself takes a launch more
    return [k for k in able if not problem.appends or not k.apart(problem) or first.apart(problem)]


def fastest(
    problem: Problem, device: Device, kernel: Kernel, constants: Constants
) -> tuple[float, Choice]:
    """The shape and number of splits of least seconds of a kernel for decode."""
    found = of_rows(problem, kernel, shapes(kernel, problem, device))
    batch = batch_of(problem, device, constants)
    worth = _worth(batch, found)
    together = modelled_clusters(kernel, batch, worth)
    weighed = []
    for shape in worth:
        of_shape = [_cheapest(batch, found, shape)]
        of_shape += [(model.cut(c), c) for c, model in together if tile_of(c) == tile_of(shape)]
        weighed.append(min(of_shape, key=lambda pair: pair[0].seconds))
    least = min(cost.seconds for cost, _ in weighed)
    weighed.sort(key=lambda pair: pair[1].schedule == "batch")
    best, config = next(pair for pair in weighed if pair[0].seconds <= least * CLOSE)
    if problem.codec != AS_IS and problem.codec.granularity != "token":
        # as many stages as gain
        same = [x for x in weighed if replace(x[1], num_stages=config.num_stages) == config]
        best, config = min(same, key=lambda pair: (pair[0].seconds, pair[1].num_stages))
    return best.seconds, Choice(kernel.name, config, _why(batch, config, best))


def of_rows(problem: Problem, kernel: Kernel, found: Sequence[Config]) -> list[Config]:
    """The shapes of a kernel with the TILE_M that is best for the problem; only that for decode
    on Hopper has others than its first."""
    if kernel.name != HOPPER_DECODE:
        return list(found)
    tiles = sorted({shape.tile_m for shape in found})
    enough = LARGE_OF_WIDE if problem.rows <= tiles[0] else LARGE_OF_TWICE
    large = problem.kv_bytes > enough and problem.codec == AS_IS
    wanted = tiles[-1] if tiles[0] >= WIDE or large else tiles[0]
    return [shape for shape in found if shape.tile_m == wanted]


def _worth(batch: Batch, found: Sequence[Config]) -> list[Config]:
    """The shapes worth weighing, in order of preference; all, where none of those is legal."""
    problem, constants, units = batch.problem, batch.constants, batch.units
    wanted = constants.shapes_widened if batch.widened else constants.shapes
    if batch.page_size and batch.wider > 128:
        wanted = constants.shapes_256
    if batch.widened and gathers(problem, found[0]):
        wanted = constants.shapes_gathered
    elif widened_apart(problem, found[0], constants):
        first = batch.shape(found[0])
        shared = least_splits(problem, first, constants) * units > first.slots
        wanted = constants.shapes_scales if batch.scaled else constants.shapes_apart
        wanted = constants.shapes_gathered if shared else wanted
    by_shape = {tile_of(c)[1:]: c for c in reversed(found)}
    worth = [by_shape[shape] for shape in wanted if shape in by_shape]
    # One slot, and nothing is on its way while a tile is worked on: for parts of one tile.
    in_a_wave = [
        c
        for c in worth
        if c.num_stages > 1 or units * batch.tiles(c.tile_n) <= batch.shape(c).slots
    ]
    return in_a_wave or worth or list(found)


def in_clusters(
    kernel: Kernel, problem: Problem, device: Device, constants: Constants | None = None
) -> list[Config]:
    """The configs whose parts are clusters that can all run at once, none of them too long."""
    batch = batch_of(problem, device, constants or constants_of(kernel))
    every = shapes(kernel, problem, device)
    return [config for config, _ in modelled_clusters(kernel, batch, every)]


def modelled_clusters(
    kernel: Kernel, batch: Batch, worth: Collection[Config]
) -> list[tuple[Config, Shape]]:
    """The configs of `in_clusters` that have these tile shapes, and the model of each."""
    problem, device, constants = batch.problem, batch.device, batch.constants
    if "cluster" not in kernel.merges or not worth:
        return []
    # a cluster takes more shared memory than as many programs apart, so no more find room
    places = math.inf if batch.widened else max(batch.shape(shape).slots for shape in worth)
    if 2 * batch.units > places:
        return []
    found, tiles_worth = [], {tile_of(shape) for shape in worth}
    for config in clusters(kernel, problem, device):
        parts, tiles = config.num_splits, batch.tiles(config.tile_n)
        if batch.units * parts > places or tile_of(config) not in tiles_worth:
            continue
        in_time = parts == tiles or (parts < tiles and config.num_stages > 1)
        few = parts <= WIDE_CLUSTER or config.tile_m < WIDE
        if not in_time or not few:
            continue
        model = batch.shape(config)
        units = problem.batch * model.head_tiles
        room: float = model.slots
        if parts > 2:
            room = min(model.slots, 2 * device.num_sms) * ROOM_FOR_CLUSTERS
        if parts >= least_splits(problem, model, constants) and units * parts <= room:
            found.append((config, model))
    return found


def least_splits(problem: Problem, shape: Shape, constants: Constants) -> int:
    """So many that no part is too long where the lengths may differ."""
    if problem.lengths == "host" or problem.batch == 1:
        return 1
    return ceil_div(shape.tiles, int(constants.longest_part // shape.tile_bytes) or 1)


def _splits_worth(tiles: int, least: int, most: int, a_wave: float) -> list[int]:
    """Numbers of splits to weigh: few, those of few tiles each, and what fills up to four waves; of
    no more programs than their longest part asks for, as one more may not fit into a wave."""
    some = {least, most, *FEW_SPLITS}
    some.update([ceil_div(tiles, per) for per in (1, 2, 3, 4, 6, 8)])
    some.update([round(a_wave * k / 8) for k in EIGHTHS])
    longest = {ceil_div(tiles, splits) for splits in some if least <= splits <= most}
    return sorted([ceil_div(tiles, per) for per in longest])


def _cheapest(batch: Batch, found: Sequence[Config], config: Config) -> tuple[Cost, Config]:
    """A tile shape with its best number of splits, or of programs."""
    problem, constants, shape = batch.problem, batch.constants, batch.shape(config)
    most = min(MAX_SPLITS, shape.tiles) if splits_keys(problem, found) else 1
    a_wave = shape.slots / (shape.batch * shape.head_tiles)
    least = min(most, least_splits(problem, shape, constants))
    even = most
    if widened_apart(problem, config, constants):  # of shorter parts rows are gathered
        even = max(least, min(most, shape.tiles // long_split(problem)))
    worth = _splits_worth(shape.tiles, least, even, a_wave)
    splits = cheapest(shape, worth if config.num_stages > 1 else worth[-1:])
    best = shape.cost(ceil_div(shape.tiles, splits), merged=splits > 1)
    alone = shape.batch > MOST_SHARED or problem.sequence_sink_tokens
    if least == 1 or least <= a_wave or alone:
        return best, replace(config, num_splits=splits)
    # equal lengths and one long sequence among short ones count alike
    alike = [
        (math.sqrt(shape.shared_out(full).seconds * shape.mixed(full).seconds), full)
        for full in _shares_worth(shape)
    ]
    least_seconds = min(seconds for seconds, _ in alike)
    full = next(full for seconds, full in alike if seconds <= least_seconds * CLOSE)
    shared = replace(
        config, num_splits=min(most, full), schedule="batch", programs=shape.batch + full
    )
    if shape.cut(shared).seconds > SHARING * best.seconds:
        return best, replace(config, num_splits=splits)
    return shape.cut(shared), shared


def _shares_worth(shape: Shape) -> list[int]:
    """Numbers of parts to share the batch out in, the fewest first: what fills a wave with what
    rounding adds, and several of every sequence, so that a long one has as many."""
    a_wave = shape.slots // shape.head_tiles - shape.batch // 2
    wanted = {a_wave, *(shape.batch * each for each in range(2, 9))}
    most = min(shape.batch * shape.tiles, MAX_SPLITS)
    return sorted({min(full, most) for full in wanted if full >= 2 * shape.batch})


def _why(batch: Batch, config: Config, best: Cost) -> str:
    problem, device = batch.problem, batch.device
    keys = f"{problem.seqlen_k}"
    if problem.visible_keys < problem.seqlen_k:
        keys = f"{problem.visible_keys} visible of {keys}"
    text = (
        f"waves: {keys} keys; {count(best.num_ctas, 'program')} for {device.num_sms} SMs x "
        f"{best.slots // device.num_sms}, {count(best.waves, 'wave')} of "
        f"{count(best.tiles_per_split, 'tile')} of {config.tile_n} keys, "
        f"{best.split_seconds * 1e6:.1f} us"
    )
    if best.merge_seconds:
        whole = replace(config.shape, schedule="even", programs=0)
        unsplit = batch.shape(whole).cost(batch.tiles(whole.tile_n), merged=False)
        how = "merge in clusters" if config.merge == "cluster" else "merge"
        text += f" + {best.merge_seconds * 1e6:.1f} us to {how}"
        text += f"; in one split {unsplit.seconds * 1e6:.1f} us"
    return text


choose = with_constants(H200)
