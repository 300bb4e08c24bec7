"""A decode step of a model."""

from __future__ import annotations

from dataclasses import replace

from splitkv.lab.reproduce import model


def test_a_decode_step_is_eighty_layers() -> None:
    assert model.step_us(model.LLAMA, 10.0, 50.0, 60.0) == 4860.0
    small = replace(model.LLAMA, hidden=32, heads=2, head_dim=16, feed_forward=24, vocabulary=40)
    bodies = model.bodies(small, "cpu")
    assert list(bodies) == list(model.PARTS)
    assert [tuple(body(0).shape) for body in bodies.values()] == [(1, 32), (1, 40)]
