"""Loss curves of a small model in the shape of gpt-oss, with sinks and without."""

from __future__ import annotations

from splitkv.core.device import current
from splitkv.demo import curves
from splitkv.lab.harness.lines import Record

STEPS, ORDERS = 100, 3
LAST = 10  # steps whose mean is the loss at the end


def measure(rounds: int, steps: int = STEPS) -> list[Record]:
    """A row for each way to train: loss at the end and, of those in bf16, distance from fp32.

    `rounds` makes no difference. Without sinks there is one run, and no distance: it is another
    model.
    """
    device = current().kind
    found = curves.all_losses(steps, device, ORDERS)
    away: dict[str, float | None] = {**curves.distances(found), "float32": 0.0}
    found["without sinks"] = curves.losses("without sinks", steps, device)[None]
    return [
        {
            **{"kernel": name, "us": None, "err": None, "repeats": None, "reasons": []},
            "loss": runs[:, -LAST:].mean().item(),
            "distance": away.get(name),
            "runs": len(runs),
        }
        for name, runs in found.items()
    ]
