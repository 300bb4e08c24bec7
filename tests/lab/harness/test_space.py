"""Candidates among the plans of a problem."""

from __future__ import annotations

from dataclasses import replace

import pytest
from studying import CASE, H200

from splitkv.core.device import GPUS
from splitkv.core.plan import Config, Plan
from splitkv.core.problem import Problem
from splitkv.kernels import records
from splitkv.lab.harness import space
from splitkv.lab.harness.suites import CASES
from splitkv.planner import registry
from splitkv.planner.policies import waves
from splitkv.planner.policies.shared import num_tiles, shapes


@pytest.fixture(autouse=True)
def one_kernel_that_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = records.DECODE_SPLIT, records.TORCH_SDPA, records.TORCH_MATH
    monkeypatch.setattr(registry, "KERNELS", kernels)


@pytest.mark.parametrize("name", ["mqa8_b1_512", "gqa32x8_b8_4096_q16_page16", "mqa8_b64_mixed"])
def test_candidates_are_legal_and_different(name: str) -> None:
    problem = CASES[name].problem
    found = space.candidates(problem, H200, 12)
    assert 6 <= len(found) <= 12
    assert len({(c.kernel, c.config) for c in found}) == len(found)
    kernels = {kernel.name: kernel for kernel in space.splitting(problem, H200)}
    for kernel, config in ((c.kernel, c.config) for c in found):
        assert replace(config, num_splits=1) in shapes(kernels[kernel], problem, H200)
        assert 1 <= config.num_splits <= num_tiles(problem, config.tile_n)
    assert len({c.config.tile_n for c in found}) >= 3
    equal = replace(problem, lengths="host")
    first = waves.choose(equal, H200, [kernels[found[0].kernel]]).config
    likeness = first.tile_n, first.num_warps, first.num_stages
    assert (found[0].config.tile_n, *likeness[1:]) == likeness


def test_every_kernel_that_splits_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = space.splitting(CASE.problem, H200)[0]
    rivals = (replace(kernel, name="a"), replace(kernel, name="b"))
    monkeypatch.setattr(registry, "KERNELS", rivals)
    found = space.candidates(CASE.problem, H200, 12)
    assert [c.kernel for c in found].count("a") == [c.kernel for c in found].count("b") == 6


def test_the_kernels_of_a_gpu_have_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for gpu in (H200, GPUS["l4"]):
        kernels = {kernel.name for kernel in space.splitting(CASE.problem, gpu)}
        assert {c.kernel for c in space.candidates(CASE.problem, gpu, 12)} == kernels


def test_neighbours_are_other_splits_of_the_shape_not_tried_yet() -> None:
    problem = CASES["mqa8_b1_131072"].problem
    best = Config(100, 16, 64, 4, 2)
    near = space.neighbours(problem, ("a", best))
    assert {(c.kernel, replace(c.config, num_splits=100)) for c in near} == {("a", best)}
    splits = [c.config.num_splits for c in near]
    assert len(set(splits)) == 4 and min(splits) < 100 < max(splits)
    tried = {kernel: [(kernel, c.config) for c in near] for kernel in "ab"}
    assert space.neighbours(problem, ("a", best), tried["a"]) == []
    assert space.neighbours(problem, ("a", best), tried["b"]) == near
    shared = replace(best, schedule="batch", programs=200)
    assert space.neighbours(problem, ("a", shared)) == []


def test_shapes_are_listed_by_promise() -> None:
    kernel = space.splitting(CASE.problem, H200)[0]
    listed = space.tile_shapes(CASE.problem, H200, kernel)
    legal = shapes(kernel, CASE.problem, H200)
    taken = waves.choose(CASE.problem, H200, [kernel]).config
    assert listed[0] == replace(taken, num_splits=1) and listed[1] == legal[0]
    assert set(listed) <= set(legal) and len(set(listed)) == len(listed)
    assert {shape.tile_n for shape in listed} == {shape.tile_n for shape in legal}


def plan(splits: int = 4, tile_n: int = 64, problem: Problem = CASE.problem) -> Plan:
    return Plan(problem, H200, "test", "decode_split", Config(splits, 16, tile_n, 4, 2), "")
