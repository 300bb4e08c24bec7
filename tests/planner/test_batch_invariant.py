"""The policy `batch_invariant`: what is decided of a sequence follows from the bounds alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitkv.core.device import GPUS
from splitkv.core.kv import Codec, Paged
from splitkv.core.masks import Mask
from splitkv.core.problem import Problem
from splitkv.planner.policies import batch_invariant
from splitkv.planner.registry import make_plan

BATCHES = 1, 2, 7, 64, 300, 4096
MASKS = {"causal": Mask(True), "window": Mask(True, 1023), "both": Mask(False, 100, 100)}
CODECS = {"as is": Codec(), "fp8": Codec("fp8", "tensor"), "int8": Codec("int8", "token")}


def problems(kind: str, codec: Codec, mask: Mask) -> Problem:
    seqlen_q = {"decode": 1, "varlen": 8192}[kind]
    products = "half" if codec.name == "int8" else "widened"
    problem = Problem(kind, 1, 32, 8, 128, 128, seqlen_q, 32768, mask=mask, place=Paged(16))
    return replace(problem, lengths="device", codec=codec, products=products)


@pytest.mark.parametrize("kind", ["decode", "varlen"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gpu", ["h200", "a100", "rtx5090"])
def test_one_decision_for_every_batch(kind: str, codec: str, mask: str, gpu: str) -> None:
    problem = problems(kind, CODECS[codec], MASKS[mask])
    plans = [
        make_plan(replace(problem, batch=batch), GPUS[gpu], policy="batch_invariant")
        for batch in BATCHES
    ]
    assert len({(plan.kernel, plan.config) for plan in plans}) == 1
    config = plans[0].config
    if kind == "decode":
        assert config.schedule == "fixed" and config.split_size % config.tile_n == 0
    else:
        assert config.num_splits == 1
    assert plans[0].policy == "batch_invariant" and plans[0].why.startswith("whatever the batch")


def test_default_decisions_follow_the_batch() -> None:
    """What the policy is for: the default one cuts by the batch."""
    problem = problems("decode", Codec(), Mask(True))
    configs = {make_plan(replace(problem, batch=batch), GPUS["h200"]).config for batch in BATCHES}
    assert len(configs) > 1


@pytest.mark.parametrize("keys", [1, 1024, 32768, 32769, 1 << 20, (1 << 30) - 1])
def test_parts_that_one_step_merges(keys: int) -> None:
    size = batch_invariant.split_size(keys)
    assert size >= batch_invariant.LEAST_KEYS and size & (size - 1) == 0
    assert -(-keys // size) <= batch_invariant.MOST_SPLITS
