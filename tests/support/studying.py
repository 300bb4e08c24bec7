"""Studies of plans whose times are a formula."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from splitkv.core.device import GPUS
from splitkv.core.plan import Config
from splitkv.core.problem import Problem
from splitkv.lab.harness import timing
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.suites import CASES
from splitkv.lab.harness.timing import Protocol, Timing, Variant
from splitkv.planner.policies import decode_cost, fixed, waves

H200 = GPUS["h200"]
CASE = CASES["mqa8_b1_512"]
FEW = [CASES[name] for name in ("mqa8_b1_512", "mqa8_b1_2048", "mqa8_b1_8192")]
POLICY = {"waves": waves.choose, "one": fixed.with_splits(1)}


def us_of(problem: Problem, config: Config) -> float:
    """What the fake GPU takes: wide tiles are better than the cost model thinks."""
    seconds = decode_cost.cost(problem, H200, config).seconds
    return seconds * 1e6 * (0.5 if config.tile_n == 128 else 1.0)


class FakeSession:
    """Captures nothing; its stopwatch takes turns and medians as the real one."""

    entered: list[Config] = []
    broken: Callable[[Config], Exception | None] = staticmethod(lambda config: None)
    stops: Callable[[str], bool] = staticmethod(lambda name: False)

    def __init__(self, case: Case, protocol: Protocol) -> None:
        self.problem, self.rounds = case.problem, []
        FakeSession.last = self

    def capture(self, variant: Variant) -> tuple[Callable[[], float], dict[str, Any]]:
        config = variant.decision["plan"].config
        assert variant.decision["plan"].problem == self.problem
        if error := FakeSession.broken(config):
            raise error
        FakeSession.entered.append(config)
        return lambda: us_of(self.problem, config), {}

    def time(
        self, replays: Mapping[str, Callable[[], float]], rounds: int
    ) -> tuple[dict[str, Timing], dict[str, str]]:
        self.rounds.append((rounds, len(replays)))
        samples = timing.interleave(replays, rounds)
        reasons = {name: "after its rounds: no" for name in samples if FakeSession.stops(name)}
        times = {n: timing.summarize(us) for n, us in samples.items() if n not in reasons}
        return times, reasons


def console() -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(file=screen, width=200), screen
