"""The loss curves of the demo's model on a CPU: few steps of a small shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitkv.demo import curves, text
from splitkv.demo.model import Shape

SMALL = Shape(
    width=64, hidden=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, context=40
)


def test_every_run_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(name: str, steps: int, device: str) -> torch.Tensor:
        return losses(name, steps, device, SMALL)

    losses = curves.losses
    monkeypatch.setattr(curves, "losses", small)
    monkeypatch.setattr(curves, "corpus", lambda: text.encode("def f(x):\n    return x\n" * 99))
    picture = tmp_path / "losses.svg"
    curves.main(["--steps", "12", "--device", "cpu", "--plot", str(picture)])
    table = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in table[2:]]
    assert [name for name, *_ in rows] == list(curves.RUNS)
    assert all(float(last) < float(first) for _, first, last, *_ in rows)
    assert "<svg" in picture.read_text()


def test_distances_are_of_smoothed_curves() -> None:
    exact = torch.linspace(4, 3, 30, dtype=torch.float64)
    noisy = exact + 0.1 * (-1.0) ** torch.arange(30)
    away = curves.distances({"float32": exact, "noisy": noisy, "off": exact + 0.25})
    assert away["noisy"] < 1e-9 and away["off"] == pytest.approx(0.25)
