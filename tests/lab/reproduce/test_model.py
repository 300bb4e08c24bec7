"""Steps of a model: a decode step, and a prompt through a layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reproducing import H200

from splitkv.core.plan import Plan
from splitkv.lab.bench.sequences.run import forced
from splitkv.lab.reproduce import model, prefill_step
from splitkv.planner.registry import make_plan


def test_a_decode_step_is_eighty_layers() -> None:
    assert model.step_us(model.LLAMA, 10.0, 50.0, 60.0) == 4860.0
    small = replace(model.LLAMA, hidden=32, heads=2, head_dim=16, feed_forward=24, vocabulary=40)
    bodies = model.bodies(small, "cpu")
    assert list(bodies) == list(model.PARTS)
    assert [tuple(body(0).shape) for body in bodies.values()] == [(1, 32), (1, 40)]
    many = model.bodies(small, "cpu", tokens=6)
    assert many[model.PARTS[0]](0).shape == (6, 32)


@pytest.mark.parametrize("tokens", prefill_step.TOKENS)
def test_a_prompt_is_of_int8_on_two_kernels(tokens: int) -> None:
    p = prefill_step.case_of_prompt(tokens).problem
    assert (p.batch, p.num_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k) == (
        1,
        8,
        1,
        tokens,
        tokens,
    )
    assert p.codec.name == "int8" and p.mask.causal
    portable = forced(prefill_step.PORTABLE, p, H200)
    assert isinstance(portable, Plan)
    assert make_plan(p, H200).kernel != portable.kernel == "prefill"
