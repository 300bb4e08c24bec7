"""`splitkv demo --ranks N`: the demo's model trained with every sequence spread over N processes.

Each process has the whole model and its part of the tokens; attention exchanges what it needs, and
the gradients of all parameters are summed. The losses are those of one process, for each exchange.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from splitkv import distributed
from splitkv.demo import LEARNING_RATE, batch_of, text
from splitkv.demo.model import Attend, Layer, Model, Shape, splitkv_attend
from splitkv.distributed.spread import Exchange

STEPS = 20
CLOSE = 1e-3  # nats a character between the losses of a step, in fp32
SHOWN = 5  # rows of the table


def run_ranks(
    ranks: int,
    steps: int = STEPS,
    device: str | None = None,
    seed: int = 0,
    shape: Shape | None = None,
) -> int:
    """Train in one process and over `ranks`; 0: the losses are equal with every exchange, else 1.

    device   cpu or cuda, of which there has to be one a rank; None: cuda where there is
    """
    console, shape = Console(), shape or Shape()
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    on = device or ("cuda" if enough else "cpu")
    alone = losses(shape, steps, seed, torch.device(on))
    exchanges = [x for x in get_args(Exchange) if x != "heads" or shape.num_heads % ranks == 0]
    with tempfile.TemporaryDirectory() as where:
        arguments = ranks, where, shape, steps, seed, on, exchanges
        torch.multiprocessing.spawn(_process, arguments, ranks)
        found: dict[str, list[float]] = json.loads((Path(where) / "losses").read_text())
    table = Table("step", "one process", *(f"{name}, {ranks} ranks" for name in found))
    for step in sorted({*range(0, steps, max(1, steps // SHOWN)), steps - 1}):
        cells = (f"{of[step]:.5f}" for of in (alone, *found.values()))
        table.add_row(str(step + 1), *cells)
    console.print(table)
    worst = max(abs(a - b) for of in found.values() for a, b in zip(alone, of, strict=True))
    same = worst <= CLOSE
    verdict = "[bold green]the losses are equal" if same else "[bold red]the losses differ"
    console.print(f"{verdict}[/] to {worst:.1e} nats a character")
    return 0 if same else 1


def losses(
    shape: Shape,
    steps: int,
    seed: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    exchange: Exchange = "heads",
) -> list[float]:
    """The loss of every step of training; over the ranks of a group where there is one."""
    torch.manual_seed(seed)
    model = Model(shape).to(device)
    tokens = text.encode(text.corpus())
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    found = []
    for _ in range(steps):
        batch = batch_of(tokens, shape.context, g).to(device)
        loss = _loss(model, batch, group, exchange)
        optimizer.zero_grad()
        loss.backward()
        if group is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            loss = loss.detach()
            dist.all_reduce(loss, group=group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def _loss(
    model: Model, batch: Tensor, group: dist.ProcessGroup | None, exchange: Exchange
) -> Tensor:
    """This rank's part of the mean nats a character."""
    count, positions = batch.shape[1] - 1, torch.arange(batch.shape[1] - 1, device=batch.device)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    attend: Attend = splitkv_attend
    if group is not None:
        layout: Any = "zigzag" if exchange == "ring" else "contiguous"
        cut = partial(distributed.shard, group=group, layout=layout)
        inputs, targets, positions = cut(inputs, dim=1), cut(targets, dim=1), cut(positions)
        attend = _attend_over(group, exchange)
    logits = model(inputs, positions, attend)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (batch.shape[0] * count)


def _attend_over(group: dist.ProcessGroup, exchange: Exchange) -> Attend:
    def attend(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = distributed.attention(
            q,
            k,
            v,
            group=group,
            exchange=exchange,
            layout="zigzag" if exchange == "ring" else "contiguous",
            parameter_gradients="own",  # summed with those of all parameters
            causal=True,
            window_size=layer.window_size,
            sink_logits=layer.sink_logits,
        )
        return out

    return attend


def _process(
    rank: int,
    ranks: int,
    where: str,
    shape: Shape,
    steps: int,
    seed: int,
    on: str,
    exchanges: list[Exchange],
) -> None:
    """One rank; the first one writes the losses."""
    torch.set_num_threads(1)
    device = torch.device(on, rank) if on == "cuda" else torch.device(on)
    if on == "cuda":
        torch.cuda.set_device(device)
    store = f"file://{where}/store"
    backend = "nccl" if on == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD
    found = {name: losses(shape, steps, seed, device, group, name) for name in exchanges}
    if rank == 0:
        (Path(where) / "losses").write_text(json.dumps(found))
    dist.destroy_process_group()
