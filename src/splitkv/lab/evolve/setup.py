"""The setup of a search: the workload, who times it, and where its timings are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitkv.core.device import Device, current
from splitkv.core.errors import expect, expect_one_of
from splitkv.lab.evolve.evaluate import Evaluator
from splitkv.lab.evolve.grammar import Slots
from splitkv.lab.evolve.timers import FlashAttention3, Kept, Ours, Simulated, Timer
from splitkv.lab.evolve.workload import workload_named
from splitkv.lab.harness.lines import Lines, Record
from splitkv.lab.harness.machine import facts
from splitkv.lab.reproduce import model
from splitkv.lab.reproduce.model import Rest

BACKENDS = ("splitkv", "fa3")
FITNESS = ("attention", "token")


@dataclass(frozen=True)
class Setup:
    """The workload of a search, and how it is timed.

    simulate   a GPU by name, for the cost model
    fitness    the time of attention, or that of an output token of a model's step
    """

    workload: str = "chat"
    backend: str = "splitkv"
    simulate: str | None = None
    rounds: int = 9
    fitness: str = "attention"

    def __post_init__(self) -> None:
        expect_one_of("fitness", self.fitness, FITNESS)
        told = "attention with simulate, as the rest of a step is measured"
        expect(self.simulate is None or self.fitness == "attention", "fitness", told, self.fitness)
        expect_one_of("backend", self.backend, BACKENDS)
        clash = self.simulate is not None and self.backend != "splitkv"
        expect(
            not clash,
            "simulate",
            "None with fa3, as the cost model is of our kernels",
            self.simulate,
        )

    def timer(self) -> Timer:
        if self.simulate is not None:
            return Simulated(Device.named(self.simulate))
        device = current()
        expect(device.kind == "cuda", "device", "a CUDA GPU, or simulate", device.name)
        return Ours(device) if self.backend == "splitkv" else FlashAttention3(device)


@contextmanager
def opened(folder: Path, setup: Setup, jobs: int = 0) -> Iterator[tuple[Evaluator, Slots]]:
    """An evaluator whose timings are kept in the folder."""
    workload, timer = workload_named(setup.workload), setup.timer()
    slots = Slots()
    if isinstance(timer, Ours):
        slots = Slots(timer.tiles(workload.counted), timer.tiles(workload.counted, packed=False))
    machine = {} if setup.simulate else {name: facts()[name] for name in ("gpu", "commit")}
    machine = machine or {"gpu": timer.device.name, "commit": "the cost model"}
    with Lines(folder / "times.jsonl") as lines:
        if isinstance(timer, Ours) and jobs:
            timer.compile_ahead((*workload.counted[::-1], *workload.held_out), jobs)
        try:
            rest = None
            if setup.fitness == "token":
                rest = rest_of_step(lines, machine, setup.rounds)
            yield Evaluator(workload, Kept(timer, lines, machine), setup.rounds, rest), slots
        finally:
            timer.stop()


def rest_of_step(lines: Lines, machine: Record, rounds: int) -> Rest:
    """A step of the model besides attention, from the file or measured and written there: every
    candidate of a search has the same."""
    for r in lines.records:
        if "rest" in r and all(r.get(name) == value for name, value in machine.items()):
            return Rest(**r["rest"])
    parts = model.rows_named(model.measure(rounds))
    names = ("layer_us", "vocabulary_us")
    found: dict[str, Any] = dict(zip(names, (parts[part] for part in model.PARTS), strict=True))
    lines.add({**machine, "timer": "rest", "rest": found})
    return Rest(**found)


def made_again(about: Record) -> tuple[Evaluator, Slots]:
    """The evaluator of a run, in another process of it; it lives as long as the process."""
    context = opened(Path(about["folder"]), Setup(**about["setup"]))
    _open.append(context)
    return context.__enter__()


_open: list[Any] = []
