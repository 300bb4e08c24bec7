"""Loss curves of the demo's model, larger, trained with splitkv and with plain PyTorch.

    python -m splitkv.demo.curves --plot losses.svg

Every run starts from the same weights and sees the same text. `float32` is plain PyTorch; the
others multiply in bfloat16: `eager` is plain PyTorch, `reordered` the same with the head dimension
in another order, so that the two differ by rounding alone, and `splitkv` calls
`splitkv.attention`, forward and backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from splitkv.demo import BATCH, batch_of, text
from splitkv.demo.model import Attend, Layer, Model, Shape, eager_attend, splitkv_attend

SHAPE = Shape(width=512, hidden=1280, num_heads=8, num_kv_heads=2, window=128, context=512)
LEARNING_RATE, WARM_UP = 1e-3, 20
SMOOTHING = 10  # steps whose mean is compared


def reordered_attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`eager_attend` with products summed up in another order."""
    return eager_attend(layer, q.flip(-1), k.flip(-1), v)


RUNS: dict[str, tuple[Attend, torch.dtype]] = {
    "float32": (eager_attend, torch.float32),
    "eager": (eager_attend, torch.bfloat16),
    "reordered": (reordered_attend, torch.bfloat16),
    "splitkv": (splitkv_attend, torch.bfloat16),
}


@cache
def corpus() -> Tensor:
    return text.encode(text.corpus())


def losses(name: str, steps: int, device: str, shape: Shape = SHAPE, seed: int = 0) -> Tensor:
    """[steps] nats a character of one of RUNS, float64, on the CPU."""
    attend, dtype = RUNS[name]

    def cast(layer: Layer, *qkv: Tensor) -> Tensor:
        return attend(layer, *(x.to(dtype) for x in qkv))

    torch.manual_seed(seed)
    model = Model(shape).to(device)
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    positions = torch.arange(shape.context, device=device)
    found = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        batch = batch_of(corpus(), shape.context, g).to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, dtype == torch.bfloat16):
            logits = model(batch[:, :-1], positions, cast)
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found).double().cpu()


def smoothed(curve: Tensor) -> Tensor:
    """The mean of each `SMOOTHING` steps in a row."""
    return curve.unfold(0, SMOOTHING, 1).mean(-1)


def distances(curves: dict[str, Tensor]) -> dict[str, float]:
    """How far each smoothed curve is from that of `float32`, at most."""
    exact = smoothed(curves["float32"])
    rest = (name for name in curves if name != "float32")
    return {name: (smoothed(curves[name]) - exact).abs().max().item() for name in rest}


def draw(curves: dict[str, Tensor], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    exact = smoothed(curves["float32"])
    for name, curve in curves.items():
        above.plot(curve, label=name, linewidth=1)
        if name != "float32":
            below.plot(smoothed(curve) - exact, label=name, linewidth=1)
    above.set_ylabel("nats a character")
    below.set_ylabel("minus float32")
    below.set_xlabel("step")
    above.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="the curves")
    parser.add_argument("--plot", type=Path, help="a picture of them; needs splitkv[lab]")
    options: Any = parser.parse_args(arguments)
    curves = {name: losses(name, options.steps, options.device) for name in RUNS}
    print(f"{options.steps} steps of {BATCH} x {SHAPE.context} characters on {options.device}")
    print(f"{'':10} {'first':>8} {'last':>8}   smoothed, from float32 at most")
    away = distances(curves)
    for name, curve in curves.items():
        last = smoothed(curve)[-1].item()
        beside = f"{away[name]:.4f}" if name in away else ""
        print(f"{name:10} {curve[0].item():8.4f} {last:8.4f}   {beside}")
    if options.json is not None:
        options.json.write_text(json.dumps({name: x.tolist() for name, x in curves.items()}))
    if options.plot is not None:
        draw(curves, options.plot)


if __name__ == "__main__":
    main()
