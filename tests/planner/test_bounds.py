"""What is left out by a bound could not have been chosen: bounds beside what they bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Contiguous, Paged
from splitkv.core.masks import Mask
from splitkv.core.plan import Config, Kernel
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.lab.tune.problems import drawn
from splitkv.planner import registry
from splitkv.planner.policies import decode_cost, shared, short_queries, tuned, tuned_tables, waves
from splitkv.planner.policies.shared import (
    MAX_SPLITS,
    ROUNDED,
    WHOLE_SEQUENCES,
    num_tiles,
    shapes,
)

H200 = GPUS["h200"]
CODECS = Codec(), Codec("fp8", "head"), Codec("int8", "token")
PROBLEMS = [
    replace(case.problem, codec=CODECS[i % 6 % 3], lengths="host" if i % 2 else "device")
    for i, case in enumerate(drawn(36, 28, 1.1e9))
]

CLUSTERED = [p for p in PROBLEMS if not records.HOPPER_DECODE_SPLIT.unsupported(p, H200)]

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=map(str, range(len(PROBLEMS))))


def able(problem: Problem) -> list[Kernel]:
    """The kernels that the cost model knows and that can run the problem, best first."""
    modelled = (records.HOPPER_DECODE_SPLIT, records.DECODE_SPLIT, *whole_sequences())
    return [kernel for kernel in modelled if not kernel.unsupported(problem, H200)]


def whole_sequences() -> list[Kernel]:
    return [kernel for kernel in registry.KERNELS if kernel.name in WHOLE_SEQUENCES]


def splits_of(tiles: int) -> list[int]:
    """Numbers of splits, of which no two have parts of the same length."""
    longest = {-(-tiles // splits) for splits in range(1, min(tiles, MAX_SPLITS) + 1)}
    return sorted(-(-tiles // per) for per in longest)


@pytest.mark.parametrize("place", [Contiguous(), Paged(48)], ids=str)
def test_tiles_are_counted_once_for_each_length(
    place: Contiguous | Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(
        *("decode", 3, 8, 2, 64, 64, 1, 1000, "bfloat16", Mask(True, 300)),
        place=place,
        lengths="device",
    )
    models = (
        decode_cost.Batch(problem, H200, decode_cost.H200),
        short_queries.Queries(problem, H200, short_queries.H200),
    )
    counted: list[int] = []

    def count(problem: Problem, tile_n: int) -> int:
        counted.append(tile_n)
        return num_tiles(problem, tile_n)

    monkeypatch.setattr(shared, "num_tiles", count)
    for model in models:
        assert model.page_size == (48 if isinstance(place, Paged) else 0)
        for tile_n in (32, 64, 32):
            assert model.tiles(tile_n) == num_tiles(problem, tile_n)
    assert counted == [32, 64, 32, 64]


@every_problem
def test_no_number_of_splits_takes_less_than_a_shape_does(problem: Problem) -> None:
    for kernel in able(problem):
        models = decode_cost.models(problem, H200, kernel)
        for shape in shapes(kernel, problem, H200)[::3]:
            model, splits = models(shape), splits_of(models(shape).tiles)
            cut = {n: model.cut(replace(shape, num_splits=n)).seconds for n in splits}
            assert cut == {n: model.seconds(n, "combine") for n in splits}
            assert min(cut.values()) >= model.least_seconds * ROUNDED
            assert all(cut[n] >= model.floor(n) * ROUNDED for n in splits)
            _, fewest = min((cut[n], n) for n in splits)
            assert decode_cost.cheapest(model, splits) == fewest
            assert decode_cost.cheapest(model, splits[::-1]) == fewest


@every_problem
def test_a_kernel_that_is_not_faster_is_told_as_none(problem: Problem) -> None:
    for kernel in able(problem):
        if kernel.name not in WHOLE_SEQUENCES:
            continue
        best, choice = short_queries.fastest(problem, H200, kernel)
        weighed = short_queries.queries_of(problem, H200, short_queries.constants_of(kernel))
        assert weighed.floor * ROUNDED <= best.seconds
        for factor in (1.001, 1.5, 4.0):
            told = short_queries.faster(problem, H200, kernel, best.seconds * factor)
            assert told == (best, choice)
        for factor in (0.5, 0.999, 1.0):
            assert short_queries.faster(problem, H200, kernel, best.seconds * factor) is None


@pytest.mark.parametrize("problem", CLUSTERED, ids=map(str, range(len(CLUSTERED))))
def test_clusters_for_which_there_is_no_room_are_no_more_than_those_left_out(
    problem: Problem,
) -> None:
    kernel = records.HOPPER_DECODE_SPLIT
    batch = decode_cost.batch_of(problem, H200, decode_cost.constants_of(kernel))
    found = waves.in_clusters(kernel, problem, H200)
    for config in kernel.configs(problem, H200):
        if config.merge == "cluster" and config not in found:
            room = batch.shape(config).slots
            parts, tiles = config.num_splits, batch.tiles(config.tile_n)
            if parts > 2:
                room = min(room, 2 * H200.num_sms) * waves.ROOM_FOR_CLUSTERS
            shape = batch.shape(config)
            programs = problem.batch * shape.head_tiles * parts
            short = parts >= waves.least_splits(problem, shape, batch.constants)
            few = parts <= waves.WIDE_CLUSTER or config.tile_m < decode_cost.WIDE
            in_time = parts == tiles or (parts < tiles and config.num_stages > 1)
            assert programs > room or not (short and few and in_time)


@every_problem
def test_the_best_around_a_table_is_the_best_of_all_that_is_proposed(problem: Problem) -> None:
    problem, table = replace(problem, codec=Codec()), tuned_tables.table_of(H200.name)
    assert table is not None
    candidates = able(problem)
    near = [table.near(away, number, H200) for away, number in tuned._nearest(problem, table)]
    local = tuned._Local(problem, H200, candidates, near)
    own = waves.for_equal_lengths()(problem, H200, candidates)
    if own.kernel not in local.known or own.config.schedule == "batch":
        return
    listed: list[tuple[float, int, Config]] = []
    for known, config, model in local._worth():
        margin = 1.0 if known.kernel == own.kernel else tuned.OTHER_KERNEL
        cut = [config.num_splits]
        if config.merge == "combine":
            cut = local._splits(config, model)
        for splits in cut:
            seconds = local._corrected(known, splits, model.seconds(splits, config.merge))
            listed.append((seconds * margin, splits, replace(config, num_splits=splits)))
    expected = local.seconds_of(own)
    listed.append((math.inf if expected is None else expected, own.config.num_splits, own.config))
    _, best = local.best(own)
    assert best.config == min(listed, key=lambda one: one[:2])[2]
