"""The command `splitkv warmup`, and what `doctor` says of its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from splitkv.lab.harness.terminal import console, one_line_errors
from splitkv.runtime.serving_shapes import ENGINE_BATCHES
from splitkv.runtime.warm_model import SERVING, Serving, warmup_model
from splitkv.runtime.warm_record import cache_folder, records

SHOWN = 5  # failures that are printed


def warmup(
    model: Annotated[Path, typer.Option(help="config.json of the model, or its folder.")],
    gpu: Annotated[str | None, typer.Option(help="A GPU by name; else the one here.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder; else Triton's cache.")] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(help="paged, growing, static, paged:int8:head; repeat for more."),
    ] = None,
    page_size: Annotated[int, typer.Option(help="Of the paged cache.")] = 16,
    max_batch: Annotated[int, typer.Option(help="Sequences of a step, at most.")] = 256,
    max_seqlen: Annotated[int | None, typer.Option(help="Keys; else as the model says.")] = None,
    sinks: Annotated[bool, typer.Option(help="A learnable sink logit per head.")] = False,
    training: Annotated[bool, typer.Option(help="Forward and backward, too.")] = True,
    processes: Annotated[int | None, typer.Option(help="That compile; else one a core.")] = None,
) -> None:
    """Compile what serving and training a model launch, before its first call; needs no GPU."""
    with one_line_errors():
        batches = sorted({*(n for n in ENGINE_BATCHES if n <= max_batch), max_batch})
        serving = Serving(
            caches=tuple(cache or SERVING.caches),
            page_size=page_size,
            batch_sizes=tuple(batches),
            max_seqlen=max_seqlen,
            sink_logits=sinks,
            training=training,
        )
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
            tasks = {what: bar.add_task(what, total=None) for what in ("plans", "kernels")}
            made = warmup_model(
                model,
                serving,
                gpu=gpu,
                out=out,
                processes=processes,
                progress=lambda what, done, of: bar.update(tasks[what], completed=done, total=of),
            )
        folder = cache_folder(out)
        console.print(f"{len(made.folders)} of {len(made.kernels)} kernels in {folder}")
        for name, count in sorted(Counter(made.kernels.values()).items()):
            console.print(f"  {count:4} {name}")
        for failure in made.failures[:SHOWN]:
            console.print(f"failed: {failure}")
        if made.failures:
            raise typer.Exit(1)


def said_of_records() -> Iterator[tuple[str, str]]:
    """Lists what is warm, a line a model."""
    found = [str(record) for record in records()]
    for line in found or ["nothing: `splitkv warmup --model config.json` makes it so"]:
        yield "warm", line
