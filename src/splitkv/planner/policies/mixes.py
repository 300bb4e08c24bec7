"""The time of a mix: the cost model for a batch whose lengths are known.

    seconds = start + slowest(the place that is busy longest, the bytes through the memory) + merge
              + append, where that is a launch before it

A place is room for one program on an SM. Programs take places in the order of the launch, each the
one that is free first. A program is busy for every split that it has and every tile of those. The
constants are those of `decode_cost`, which were fitted to equal lengths. By a schedule of the step
programs find their shares in the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapreplace

from splitkv.core.device import Device
from splitkv.core.errors import expect, expect_in_range, expect_one_of
from splitkv.core.plan import SCHEDULED, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.planner.policies.decode_cost import SHARE_STEP, batch_of, constants_of
from splitkv.planner.policies.shared import num_tiles, row_tiles, slowest

Program = tuple[int, int]
"""The splits and tiles of a program."""


def seconds_of_mix(
    problem: Problem, device: Device, kernel: Kernel, config: Config, lengths: Sequence[int]
) -> float:
    """The model's time of a decode call with these keys of each sequence."""
    expect_one_of("kind", problem.kind, ("decode",))
    expect(len(lengths) == problem.batch, "lengths", f"{problem.batch} of them", len(lengths))
    for length in lengths:
        expect_in_range("lengths", length, 0, problem.seqlen_k)
    constants = constants_of(kernel)
    shape = batch_of(problem, device, constants).shape(config)
    tiles = [tiles_of(problem, config, length) for length in lengths]
    head_tiles = problem.num_kv_heads * row_tiles(problem, config.tile_m)
    programs = list(programs_of(tiles, head_tiles, config))
    most = max(count for _, count in programs)
    alone = shape.wave(1, most) / most  # a tile of a program that has the memory for itself
    together = shape.wave(shape.slots, most) / most / shape.slots
    places = [0.0] * shape.slots
    for splits, count in programs:
        each = splits * (constants.program + constants.latency) + count * alone
        heapreplace(places, places[0] + each)
    read = sum(count for _, count in programs) * together
    merge = 0.0
    if config.merge == "combine" and len(programs) > len(tiles) * head_tiles:
        merge = constants.merge + shape.merge_part * (len(programs) / (len(tiles) * head_tiles))
    elif config.schedule in SCHEDULED:
        merge = constants.merge_slots
        merge += constants.walk + constants.share * ceil_div(len(lengths), SHARE_STEP)
    append = constants.append * (problem.appends and not config.appends)
    return append + shape.start + slowest(max(places), read) + merge


def tiles_of(problem: Problem, config: Config, length: int) -> int:
    """Tiles of a sequence of so many keys, one at least."""
    one = replace(problem, batch=1, seqlen_k=max(1, length), lengths="host")
    return num_tiles(one, config.tile_n)


def programs_of(tiles: Sequence[int], head_tiles: int, config: Config) -> Iterator[Program]:
    """The programs of a launch in their order, of sequences of so many tiles."""
    of_split = config.split_tiles
    if config.schedule == "ranges":
        yield from ranges(tiles, head_tiles, config.programs, of_split)
        return
    if config.schedule == "head_ranges":
        own = list(ranges(tiles, 1, config.programs, of_split))
    else:
        own = [(1, count) for count in splits_of(tiles, config)]
        if config.schedule == "proportional":
            own.sort(reverse=True)
    for program in own:
        for _ in range(head_tiles):
            yield program


def ranges(
    tiles: Sequence[int], head_tiles: int, programs: int, of_split: int
) -> Iterator[Program]:
    """Programs with as many places each, one behind the other, to within one: what each split costs
    and its tiles; of those that have tiles: tile/step_share.py on the host."""
    each, more = divmod(head_tiles * (sum(tiles) + of_split * len(tiles)), programs)
    items = (count for count in tiles for _ in range(head_tiles))
    left = 0  # places of the head tile that the last range ended in
    tiles_left = 0  # and its tiles, which are the last of them
    for program in range(programs if each else more):
        wanted = each + (program < more)
        splits = count = 0
        while wanted > 0:
            if not left:
                tiles_left = next(items)
                left = of_split + tiles_left
            taken = min(left, wanted)
            wanted, left = wanted - taken, left - taken
            own = max(tiles_left - left, 0)
            tiles_left -= own
            splits, count = splits + (own > 0), count + own
        if splits:
            yield splits, count


def splits_of(tiles: Sequence[int], config: Config) -> Iterator[int]:
    """The tiles of every split, sequence by sequence: tile/share.py on the host."""
    spare = config.programs - len(tiles)
    for count in tiles:
        per = ceil_div(count, config.num_splits)
        if config.schedule == "fixed":
            per = config.split_size // config.tile_n
        elif config.schedule in ("batch", "proportional"):
            splits = max(1, min(ceil_div(count * spare, sum(tiles)), count))
            if config.schedule == "proportional":  # every so many-th tile
                yield from (len(range(first, count, splits)) for first in range(splits))
                continue
            per = ceil_div(count, splits)
        for first in range(0, count, per):
            yield min(per, count - first)
