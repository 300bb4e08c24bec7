"""A model in the shape of gpt-oss trains as it does with plain PyTorch."""

from __future__ import annotations

from running import DEVICE

from splitkv.demo.curves import all_losses, distances


def test_the_loss_curve_is_that_of_eager_attention() -> None:
    """200 steps in bfloat16, beside as many runs of plain PyTorch that differ by rounding alone."""
    curves = all_losses(200, DEVICE)
    assert all((runs[:, -10:].mean(1) < 0.75 * runs[:, 0]).all() for runs in curves.values())
    away = distances(curves)
    assert away["splitkv"] <= 2 * away["eager"], away
