"""FlashAttention-3 in the place of our kernels, in sweeps and studies.

What a policy decides reaches it as `num_splits`, in the call and in the scheduler metadata that is
made ahead; tiles and packing stay its own. It is timed in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from splitkv.core.device import Device
from splitkv.core.errors import expect
from splitkv.core.plan import Choice, Config
from splitkv.core.problem import Problem
from splitkv.lab.harness.backends import Backend, FlashAttention3
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.records import FA3
from splitkv.lab.harness.space import Key
from splitkv.lab.harness.timing import Timing
from splitkv.lab.harness.work import Way, Work
from splitkv.lab.tune.studies import Library, chosen
from splitkv.planner.policies import Policy
from splitkv.planner.policies.shared import num_tiles

ITS_OWN = "its own"  # in the place of a policy: it decides itself
MOST = 64  # splits that a study tries
TILE = 64  # keys: no tile is smaller, and more splits than tiles leave some without keys


@contextmanager
def library() -> Iterator[Library]:
    """FlashAttention-3, in a process that ends with the context."""
    backend = FlashAttention3()
    absent = backend.absent()
    expect(not absent, "backend", "FlashAttention-3 installed", "; ".join(absent))
    try:
        yield of(backend)
    finally:
        backend.stop()


def of(backend: Backend) -> Library:
    return Library(candidates, injected, partial(Contest, backend), compiled=False)


def choice(splits: int, why: str) -> Choice:
    """So many splits; 0: as it decides itself."""
    return Choice(FA3, Config(splits), why)


def most_splits(problem: Problem) -> int:
    """One a tile of the fewest keys."""
    return num_tiles(problem, TILE)


def candidates(problem: Problem, device: Device, count: int) -> list[Choice]:
    """About `count` numbers of splits, even on a logarithmic scale."""
    most = min(MOST, most_splits(problem))
    steps = max(1, count - 1)
    found = sorted({round(most ** (i / steps)) for i in range(count)})
    return [choice(splits, "candidate") for splits in found]


def injected(problem: Problem, device: Device, policies: Mapping[str, Policy]) -> dict[str, Choice]:
    """The number of splits of each policy's plan, and what it decides itself."""
    found = chosen(problem, device, policies)
    own = {ITS_OWN: choice(0, "as FlashAttention-3 decides")}
    return {name: choice(c.config.num_splits, c.why) for name, c in found.items()} | own


class Contest:
    """A `studies.Rival`. What cannot run is known once it is timed."""

    def __init__(self, backend: Backend, case: Case, device: Device, rounds: int) -> None:
        self.backend, self.case = backend, case
        self.replays: dict[Key, Way] = {}
        self.reasons: list[str] = []
        self.times: dict[Key, Timing] = {}

    def enter(self, choices: Iterable[Choice]) -> None:
        for c in choices:
            splits = c.config.num_splits
            self.replays[c.kernel, c.config] = Way(f"s={splits}" if splits else "default", splits)

    def time(self, keys: Iterable[Key], rounds: int) -> dict[Key, Timing]:
        named = {self.replays[k].name: k for k in dict.fromkeys(keys) if k in self.replays}
        ways = tuple(self.replays[key] for key in named.values())
        for row in self.backend.measure(Work("sweep", self.case, ways), rounds):
            key = named[row["kernel"]]
            if row["us"] is None:
                self.replays.pop(key, None)
                self.reasons.append(f"{FA3} {row['kernel']}: {'; '.join(row['reasons'])}")
            else:
                self.times[key] = Timing(row["us"], row["spread_us"])
        return {key: self.times[key] for key in named.values() if key in self.replays}
