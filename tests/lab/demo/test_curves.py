"""The loss curves of the demo's model on a CPU: few steps of a small shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from splitkv.demo import curves, text
from splitkv.demo.model import Layer, Shape, eager_attend

SMALL = Shape(
    width=64, hidden=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, context=40
)


def test_every_run_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(name: str, steps: int, device: str, number: int) -> torch.Tensor:
        return losses(name, steps, device, SMALL, number=number)

    losses = curves.losses
    monkeypatch.setattr(curves, "losses", small)
    monkeypatch.setattr(curves, "corpus", lambda: text.encode("def f(x):\n    return x\n" * 99))
    picture = tmp_path / "losses.svg"
    curves.main(["--steps", "12", "--device", "cpu", "--plot", str(picture)])
    table = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in table[2:]]
    assert [name for name, *_ in rows] == list(curves.RUNS)
    assert [int(runs) for _, runs, *_ in rows] == [1, curves.ORDERS, curves.ORDERS]
    assert all(float(last) < float(first) for _, _, first, last, *_ in rows)
    assert "<svg" in picture.read_text()


def test_distances_are_of_smoothed_runs() -> None:
    exact = torch.linspace(4, 3, 30, dtype=torch.float64)[None]
    noisy = exact + 0.1 * (-1.0) ** torch.arange(30)
    apart = exact + torch.tensor([[0.5], [-0.25]])
    away = curves.distances({"float32": exact, "noisy": noisy, "apart": apart})
    assert away["noisy"] < 1e-9 and away["apart"] == pytest.approx(0.375)


def test_another_order_is_the_same_attention() -> None:
    layer = Layer(SMALL, 0)
    q, k, v = (torch.randn(1, 7, heads, 32) for heads in (2, 1, 1))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    found = curves.reordered(eager_attend, order)(layer, q, k, v)
    torch.testing.assert_close(found, eager_attend(layer, q, k, v))
