"""Who times options: our kernels, FlashAttention-3, or the cost model of `waves` in their place.

`times` gives microseconds of options of one problem, taken in turns, or the reason why an option
has none. `Kept` keeps what a timer said on disk, as a ratio to the default in the same turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from splitkv.core.device import Device
from splitkv.core.plan import Choice
from splitkv.core.problem import Problem
from splitkv.lab.evolve.candidate import Answer, Option, Tile, Tiles, our_option, their_answer
from splitkv.lab.harness import backends, space
from splitkv.lab.harness.cases import Case
from splitkv.lab.harness.compiler import Compiler
from splitkv.lab.harness.lines import Lines
from splitkv.lab.harness.work import Work
from splitkv.lab.reproduce.model import Rest
from splitkv.lab.tune.studies import Contest
from splitkv.planner.policies import decode_cost
from splitkv.planner.registry import kernel_named, make_plan

OPEN = 64  # problems whose operands stay on the GPU
Times = dict[str, float | str]


class Timer(Protocol):
    """name: of what it times; device: the GPU."""

    name: str
    device: Device

    def option(self, answer: Answer | None, p: Problem) -> Option: ...

    def times(self, case: Case, options: Sequence[Option], rounds: int) -> Times: ...

    def stop(self) -> None: ...


class Ours:
    """Our kernels on the GPU that is here."""

    name = "splitkv"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.contests: dict[str, Contest] = {}
        self.known: dict[Problem, tuple[Option, Tiles]] = {}

    def about(self, p: Problem) -> tuple[Option, Tiles]:
        """The default of a problem, and its tile shapes."""
        if p not in self.known:
            tiles = Tiles(p, self.device, space.splitting(p, self.device))
            self.known[p] = our_option(make_plan(p, self.device)), tiles
        return self.known[p]

    def option(self, answer: Answer | None, p: Problem) -> Option:
        """The plan that follows from an answer. ValueError: it is no legal one."""
        default, tiles = self.about(p)
        if answer is None:
            return default
        return our_option(space.plan_of(p, self.device, tiles.choice(answer)))

    def tiles(self, cases: Sequence[Case], packed: bool = True) -> list[Tile]:
        """The tile shapes that all of these problems have; those of one head each: not `packed`."""
        each = [self.about(case.problem)[1] for case in cases]
        first, *others = [list(tiles.known if packed else tiles.apart) for tiles in each]
        return [tile for tile in first if all(tile in other for other in others)]

    def compile_ahead(self, cases: Sequence[Case], jobs: int) -> None:
        """The defaults of the problems, and of the first every tile shape, unsplit and split, in so
        many processes."""
        with Compiler(jobs) as compiler:
            options = [self.option(None, case.problem) for case in cases]
            for tile in self.tiles(cases[:1]):
                for splits in (1, 4):
                    options.append(self.option(Answer(splits, True, 0, tile), cases[0].problem))
            for future in compiler.submit(option.plan for option in options if option.plan):
                future.exception()

    def times(self, case: Case, options: Sequence[Option], rounds: int) -> Times:
        """An error that leaves the GPU unusable is raised."""
        if case.name not in self.contests:
            if len(self.contests) == OPEN:
                self.contests.pop(next(iter(self.contests)))
                torch.cuda.empty_cache()
            self.contests[case.name] = Contest(case, self.device, rounds)
        contest = self.contests[case.name]
        keys = {}
        for option in options:
            assert option.plan is not None
            keys[option.label] = (option.plan.kernel, option.plan.config)
            contest.enter([Choice(option.plan.kernel, option.plan.config, "evolved")])
        timed = contest.time(keys.values(), rounds)
        reasons = dict(reason.split(": ", 1) for reason in contest.reasons)
        contest.reasons.clear()
        contest.replays = {key: r for key, r in contest.replays.items() if key in keys.values()}
        return {
            name: timed[key].us if key in timed else reasons.get(name, "no time")
            for name, key in keys.items()
        }

    def stop(self) -> None:
        self.contests.clear()


class Simulated(Ours):
    """The cost model of `waves` for a GPU that need not be here."""

    name = "simulated"

    def compile_ahead(self, cases: Sequence[Case], jobs: int) -> None:
        pass

    def times(self, case: Case, options: Sequence[Option], rounds: int) -> Times:
        found: Times = {}
        for option in options:
            assert option.plan is not None
            plan = option.plan
            seconds = decode_cost.model(case.problem, self.device, kernel_named(plan.kernel))
            found[option.label] = seconds(plan.config) * 1e6
        return found


class FlashAttention3:
    """FlashAttention-3, its schedule made ahead."""

    name = "fa3"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.backend = backends.FlashAttention3()

    def option(self, answer: Answer | None, p: Problem) -> Option:
        return their_answer(answer)

    def times(self, case: Case, options: Sequence[Option], rounds: int) -> Times:
        ways = tuple(option.way for option in options if option.way)
        rows = self.backend.measure(Work("evolve", case, ways), rounds)
        return {
            row["kernel"]: row["us"] if row["us"] is not None else "; ".join(row["reasons"])
            for row in rows
        }

    def stop(self) -> None:
        self.backend.stop()


class Kept:
    """Ratios to the default, each taken once.

    lines   JSON lines of them, on disk
    same    what a record says besides; a record with anything else is not used
    """

    def __init__(self, timer: Timer, lines: Lines, same: Mapping[str, object]) -> None:
        self.timer, self.lines = timer, lines
        self.same = {"timer": timer.name, **same}
        self.known: dict[tuple[str, str, int], float | str] = {}
        self.us: dict[tuple[str, str, int], float] = {}
        for r in lines.records:
            if all(r.get(name) == value for name, value in self.same.items()):
                told = r["reason"] if r["ratio"] is None else r["ratio"]
                self.known[r["case"], r["option"], r["rounds"]] = told
                if r["ratio"] is not None and r["us"] is not None:
                    self.us[r["case"], r["option"], r["rounds"]] = r["us"]
        self.taken = 0

    def default(self, case: Case) -> Option:
        return self.timer.option(None, case.problem)

    def ratios(self, case: Case, options: Sequence[Option], rounds: int) -> dict[str, float | str]:
        """label -> the option's time over the default's, or why it has none."""
        base = self.default(case)
        left = {
            option.label: option
            for option in options
            if (case.name, option.label, rounds) not in self.known and option.label != base.label
        }
        if left:
            self.taken += len(left)
            times = self.timer.times(case, [base, *left.values()], rounds)
            standard = times[base.label]
            for name in left:
                us = times[name]
                if isinstance(us, str) or isinstance(standard, str):
                    self._keep(case, name, rounds, standard if isinstance(us, float) else us, None)
                else:
                    self._keep(case, name, rounds, us / standard, us)
        known = {name: self.known.get((case.name, name, rounds)) for name in left}
        found: dict[str, float | str] = {}
        for option in options:
            told = known.get(option.label, self.known.get((case.name, option.label, rounds)))
            found[option.label] = 1.0 if told is None else told
        return found

    def of_steps(self, case: Case, option: Option, rounds: int, rest: Rest) -> float | str:
        """The option's time per output token over the default's, or why it has none."""
        told = self.ratios(case, [option], rounds)[option.label]
        us = self.us.get((case.name, option.label, rounds))
        if isinstance(told, str) or us is None:  # without a time it is the default itself
            return told
        return rest.step_us(us) / rest.step_us(us / told)

    def _keep(
        self, case: Case, name: str, rounds: int, told: float | str, us: float | None
    ) -> None:
        self.known[case.name, name, rounds] = told
        if us is not None:
            self.us[case.name, name, rounds] = us
        ratio, reason = (None, told) if isinstance(told, str) else (told, None)
        record = {"case": case.name, "option": name, "rounds": rounds}
        self.lines.add({**self.same, **record, "ratio": ratio, "us": us, "reason": reason})
