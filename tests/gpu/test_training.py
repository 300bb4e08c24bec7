"""A model in the shape of gpt-oss trains as it does with plain PyTorch."""

from __future__ import annotations

from running import DEVICE

from splitkv.demo.curves import RUNS, distances, losses


def test_the_loss_curve_is_that_of_eager_attention() -> None:
    """200 steps in bfloat16, beside two runs of plain PyTorch that differ by rounding alone."""
    curves = {name: losses(name, 200, DEVICE) for name in RUNS}
    assert all(curve[-10:].mean() < 0.75 * curve[0] for curve in curves.values())
    away = distances(curves)
    noise = max(away["eager"], away["reordered"])
    assert away["splitkv"] <= 2 * noise, away
