"""A candidate's time over a workload, or the reason why it is rejected."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from splitkv.lab.evolve.candidate import Answered, Option, ask
from splitkv.lab.evolve.timers import Kept
from splitkv.lab.evolve.workload import Workload
from splitkv.lab.reproduce.model import Rest

WORST = 1.01  # times the default's, on a held-out problem
ASKED_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Evaluation:
    """ratio      geometric mean over the counted problems of the time over the default's: of
                 attention, or of an output token
    worst        the largest such ratio on a held-out problem; its case
    reason       why it is rejected; None: it is not
    behaviour    the labels of its options: candidates that do the same take the same time
    host_us      what a call of the policy takes on the processor
    """

    ratio: float | None = None
    worst: float | None = None
    case: str | None = None
    reason: str | None = None
    behaviour: tuple[str, ...] = ()
    host_us: float | None = None


class Evaluator:
    """Candidates of one workload.

    rounds   of every timing
    rest     of a model's step: what counts is the time per output token; None: that of attention
    """

    def __init__(
        self, workload: Workload, kept: Kept, rounds: int, rest: Rest | None = None
    ) -> None:
        self.workload, self.kept, self.rounds, self.rest = workload, kept, rounds, rest
        self.cases = (*workload.counted, *workload.held_out)
        self.pool = ThreadPoolExecutor(ASKED_AT_ONCE)
        self.asked: dict[str, Future[Answered]] = {}

    def foresee(self, source: str) -> None:
        """Have it answer meanwhile."""
        if source not in self.asked:
            problems = [case.problem for case in self.cases]
            self.asked[source] = self.pool.submit(
                ask, source, problems, self.kept.timer.device.num_sms
            )

    def options(self, source: str) -> tuple[list[Option], float]:
        """Its options over all problems and its own time. ValueError says why it has none."""
        self.foresee(source)
        told = self.asked.pop(source).result()
        options = []
        for case, answer in zip(self.cases, told.answers, strict=True):
            try:
                options.append(self.kept.timer.option(answer, case.problem))
            except ValueError as error:
                raise ValueError(f"invalid: {case.name}: {error}") from None
        return options, told.us

    def evaluate(self, options: list[Option], us: float, bound: float = math.inf) -> Evaluation:
        """Time it on what is counted, and on what is held out where it is below the bound."""
        behaviour = tuple(option.label for option in options)
        found = Evaluation(behaviour=behaviour, host_us=us)
        try:
            ratio = self.mean(options, self.rounds)
        except ValueError as error:
            return replace(found, reason=str(error))
        found = replace(found, ratio=ratio)
        return self.guard(found, options, self.rounds) if ratio < bound else found

    def mean(self, options: list[Option], rounds: int) -> float:
        """Over the counted problems. ValueError says which option has no time."""
        counted = self.workload.counted
        logs = [
            math.log(self._ratio(i, option, rounds, self.rest))
            for i, option in enumerate(options[: len(counted)])
        ]
        return math.exp(math.fsum(logs) / len(logs))

    def guard(self, found: Evaluation, options: list[Option], rounds: int) -> Evaluation:
        """With the worst of the held-out problems, of attention alone, and rejected where that is
        above `WORST`."""
        first = len(self.workload.counted)
        worst, case = 0.0, ""
        for i in range(first, len(options)):
            try:
                ratio = self._ratio(i, options[i], rounds)
                if ratio > WORST:  # chance has a second one, with more rounds
                    ratio = self._ratio(i, options[i], 3 * rounds)
            except ValueError as error:
                return replace(found, reason=str(error))
            if ratio > worst:
                worst, case = ratio, self.cases[i].name
        reason = None
        if worst > WORST:
            reason = f"regression: {case}: {worst - 1:+.1%} over the default"
        return replace(found, worst=worst, case=case, reason=reason)

    def _ratio(self, i: int, option: Option, rounds: int, rest: Rest | None = None) -> float:
        if rest is None:
            told = self.kept.ratios(self.cases[i], [option], rounds)[option.label]
        else:
            told = self.kept.of_steps(self.cases[i], option, rounds, rest)
        if isinstance(told, str):
            unstable = "AssertionError" in told
            kind = "numerically unstable" if unstable else "cannot run"
            raise ValueError(f"{kind}: {self.cases[i].name}: {option.label}: {told}")
        return told
