"""Loss curves of the demo's model, larger, trained with splitkv and with plain PyTorch.

    python -m splitkv.demo.curves --plot losses.svg

Every run starts from the same weights and sees the same text. `float32` is plain PyTorch; the
others multiply in bfloat16: `eager` is plain PyTorch, and `splitkv` calls `splitkv.attention`,
forward and backward. These two run several times, each time with the head dimension in another
order, so that runs differ by rounding alone. Rounding grows from step to step, and how far a run
wanders off is chance: what is compared is how far runs are from `float32` in the mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import splitkv
from splitkv.demo import BATCH, batch_of, text
from splitkv.demo.model import Attend, Layer, Model, Shape, eager_attend, splitkv_attend

SHAPE = Shape(width=512, hidden=1280, num_heads=8, num_kv_heads=2, window=128, context=512)
LEARNING_RATE, WARM_UP = 1e-3, 20
SMOOTHING = 10  # steps whose mean is compared


ORDERS = 5  # of the head dimension: runs in bfloat16


class Run(NamedTuple):
    """A training: its attention, its type, in how many orders of the head dimension."""

    attend: Attend
    dtype: torch.dtype
    orders: int


RUNS = {
    "float32": Run(eager_attend, torch.float32, 1),
    "eager": Run(eager_attend, torch.bfloat16, ORDERS),
    "splitkv": Run(splitkv_attend, torch.bfloat16, ORDERS),
}


def attend_without_sinks(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a model that has no sink logits: theirs stay as they are and have no part."""
    return splitkv.attention(q, k, v, causal=True, window_size=layer.window_size)


WITHOUT_SINKS = {"without sinks": Run(attend_without_sinks, torch.bfloat16, 1)}


def reordered(attend: Attend, order: Tensor) -> Attend:
    """`attend` with the head dimension in this order: products are summed up in another."""
    back = order.argsort()

    def again(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(layer, *(x[..., order] for x in (q, k, v)))[..., back]

    return again


@cache
def corpus() -> Tensor:
    return text.encode(text.corpus())


def losses(
    name: str, steps: int, device: str, shape: Shape = SHAPE, seed: int = 0, number: int = 0
) -> Tensor:
    """[steps] nats a character of one of RUNS or WITHOUT_SINKS, float64, on the CPU; `number` of
    its orders."""
    run = {**RUNS, **WITHOUT_SINKS}[name]
    attend, dtype = run.attend, run.dtype
    if number > 0:
        g = torch.Generator().manual_seed(number)
        attend = reordered(attend, torch.randperm(shape.head_dim, generator=g).to(device))

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


def all_losses(steps: int, device: str, orders: int = ORDERS) -> dict[str, Tensor]:
    """[runs, steps] of each of RUNS, in so many of their orders at most."""
    return {
        name: torch.stack(
            [losses(name, steps, device, number=n) for n in range(min(orders, run.orders))]
        )
        for name, run in RUNS.items()
    }


def smoothed(curves: Tensor) -> Tensor:
    """The mean of each `SMOOTHING` steps in a row."""
    return curves.unfold(-1, SMOOTHING, 1).mean(-1)


def distances(curves: dict[str, Tensor]) -> dict[str, float]:
    """How far each smoothed run of [runs, steps] is from that of `float32` at most, in the mean."""
    exact = smoothed(curves["float32"])
    rest = (name for name in curves if name != "float32")
    return {name: (smoothed(curves[name]) - exact).abs().amax(1).mean().item() for name in rest}


def draw(curves: dict[str, Tensor], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    exact = smoothed(curves["float32"].mean(0))
    for color, (name, runs) in enumerate(curves.items()):
        above.plot(runs.mean(0), label=name, linewidth=1, color=f"C{color}")
        if name != "float32":
            below.plot(smoothed(runs.mean(0)) - exact, linewidth=1.5, color=f"C{color}")
            below.plot((smoothed(runs) - exact).T, linewidth=0.4, color=f"C{color}")
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
    curves = all_losses(options.steps, options.device)
    print(f"{options.steps} steps of {BATCH} x {SHAPE.context} characters on {options.device}")
    print(f"{'':10} {'runs':>4} {'first':>8} {'last':>8}   smoothed, from float32 at most")
    away = distances(curves)
    for name, runs in curves.items():
        curve = runs.mean(0)
        last = smoothed(curve)[-1].item()
        beside = f"{away[name]:.4f}" if name in away else ""
        print(f"{name:10} {len(runs):4} {curve[0].item():8.4f} {last:8.4f}   {beside}")
    if options.json is not None:
        options.json.write_text(json.dumps({name: x.tolist() for name, x in curves.items()}))
    if options.plot is not None:
        draw(curves, options.plot)


if __name__ == "__main__":
    main()
