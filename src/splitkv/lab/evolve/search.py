"""Islands of policies that mutate and cross over; taken up again where they were stopped.

Each island has a population of its own. A generation: parents are drawn by tournaments, of equal
ones the smaller; children are made by typed crossover and mutation, evaluated, and of both
generations the best of different behaviour where it counts stay. Every few generations the best of
an island go on to the next. A candidate that does what another did takes its figures and no time.

In the folder: `candidates.jsonl`, a line a candidate with its parents and how it was made;
`candidates/`, their files; `best.py`; `times.jsonl`, every timing; `checkpoint.json`, from which a
run goes on as if it had not been stopped.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deap import base, tools

from splitkv.core.errors import expect
from splitkv.lab.evolve import grammar
from splitkv.lab.evolve.evaluate import Evaluation, Evaluator
from splitkv.lab.evolve.grammar import Policy, Slots
from splitkv.lab.harness.lines import Lines, Record

CROSSOVER = 0.4  # of the children; the others are mutants
MUTATIONS = 3  # of a mutant, at most
TOURNAMENT, PARSIMONY = 4, 1.3
MIGRATE_EVERY, MIGRANTS = 4, 2
REJECTED = (float("inf"), float("inf"))
WRITTEN_OUT = "what the default decides, written out"


class Fitness(base.Fitness):
    """(time over the default's, nodes): less is better, and time comes first."""

    weights = (-1.0, -1.0)


class Individual:
    """A candidate of the offline search."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.number = policy, -1
        self.fitness = Fitness()
        self.behaviour: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.policy.size


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a search shares with the one that it goes on with."""

    population: int = 16
    islands: int = 3
    seed: int = 0
    fitness: str = "attention"


@dataclass
class Found:
    """The outcome of a run; best: the fastest that passed on what is held out."""

    candidates: list[Record] = field(default_factory=list)
    best: Record | None = None
    generation: int = 0


STARTS = {  # policies to begin with, beside random ones
    "the default everywhere": {"applies": "False", "num_splits": "1"},
    "evolved on FlashAttention-3, as its source gives it": {
        "applies": "batch < 2 and seqlen_k < 513",
        "num_splits": "16 if seqlen_k < 256 else 12",
    },
    "three splits of the boundary, as its source gives it": {
        "applies": "batch * num_kv_heads < 4 and seqlen_k < 513",
        "num_splits": "1 if seqlen_k < 385 else 3",
    },
    "a split for every 64 keys": {
        "applies": "batch < 2 and seqlen_k < 513",
        "num_splits": "ceil_div(seqlen_k, 64)",
    },
    "a split for every 32 keys": {
        "applies": "batch < 2 and seqlen_k < 513",
        "num_splits": "ceil_div(seqlen_k, 32)",
    },
}


class Search:
    """The offline proposer."""

    def __init__(
        self,
        folder: Path,
        evaluator: Evaluator,
        slots: Slots,
        settings: Settings,
        show: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self.folder, self.evaluator, self.slots = folder, evaluator, slots
        self.settings, self.show = settings, show
        self.lines = Lines(folder / "candidates.jsonl")
        self.found = Found()
        self.known: dict[tuple[str, ...], Evaluation] = {}
        self.sources: dict[str, tuple[int, Evaluation]] = {}
        self.islands: list[list[Individual]] = []
        self.default = tuple(evaluator.kept.default(case).label for case in evaluator.cases)

    # --- candidates -------------------------------------------------------------------------

    def add(
        self, policy: Policy | str, how: str, parents: Sequence[int], island: int
    ) -> tuple[int, Evaluation]:
        """Evaluate a policy, or a file's text, and write it down; its number and figures."""
        source = self._source(policy, how) if isinstance(policy, Policy) else policy
        body = body_of(source)
        if body in self.sources:  # the same but for what is said about it
            return self.sources[body]
        number = len(self.found.candidates)
        path = self.folder / "candidates" / f"{number:05d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        evaluation = self._evaluate(source)
        record = {
            **{"number": number, "generation": self.found.generation, "island": island},
            **{"how": how, "parents": list(parents), "source": source},
            "size": policy.size if isinstance(policy, Policy) else None,
            **asdict(evaluation),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        self.lines.add(record)
        self._note(record)
        self.sources[body] = number, evaluation
        self.show(record)
        return number, evaluation

    def _source(self, policy: Policy, how: str) -> str:
        return grammar.source_of(policy, f"Candidate of `splitkv evolve`: {how}.")

    def _evaluate(self, source: str) -> Evaluation:
        best = self.found.best
        bound = 1.0 if best is None else best["ratio"]
        try:
            options, us = self.evaluator.options(source)
        except ValueError as error:
            return Evaluation(reason=str(error))
        behaviour = tuple(option.label for option in options)
        if behaviour not in self.known:
            self.known[behaviour] = self.evaluator.evaluate(options, us, bound)
        known = self.known[behaviour]
        return Evaluation(**{**asdict(known), "behaviour": behaviour, "host_us": us})

    def _note(self, record: Record) -> None:
        self.found.candidates.append(record)
        best = self.found.best
        passed = record["reason"] is None and record["worst"] is not None
        if passed and (best is None or record["ratio"] < best["ratio"]):
            self.found.best = record
            write(self.folder / "best.py", record["source"])

    # --- the search -------------------------------------------------------------------------

    def run(
        self, generations: int, end: float | None = None, starts: Sequence[tuple[str, str]] = ()
    ) -> Found:
        """So many generations in all, none begun past `end`; starts: (name, text) of files."""
        with self.lines:
            if not self._resume():
                self.take_up()  # of a run that ended before its first checkpoint
                random.seed(self.settings.seed)
                self.islands = [
                    self._beginning(i, starts if i == 0 else ())
                    for i in range(self.settings.islands)
                ]
                self._checkpoint()
            while self.found.generation < generations:
                if end is not None and time.monotonic() > end:
                    break
                self.found.generation += 1
                for i, population in enumerate(self.islands):
                    self.islands[i] = self._generation(i, population)
                if self.found.generation % MIGRATE_EVERY == 0 and len(self.islands) > 1:
                    tools.migRing(self.islands, MIGRANTS, tools.selBest)
                self._checkpoint()
        return self.found

    def _beginning(self, island: int, starts: Sequence[tuple[str, str]]) -> list[Individual]:
        found = []
        for name, text in starts:
            self.add(text, f"given: {name}", (), island)
            try:
                found.append(
                    self._individual(grammar.policy_of(text, self.slots), name, (), island)
                )
            except ValueError:  # it counts, but cannot be crossed with others
                continue
        for name, expressions in {**STARTS, **self._written_out()}.items():
            found.append(self._individual(self._written(expressions), name, (), island))
        while len(found) < self.settings.population:
            policy = Policy((name, self.slots.random(name)) for name in self.slots.types)
            if policy.fits():
                found.append(self._individual(policy, "random", (), island))
        return found

    def _written_out(self) -> dict[str, dict[str, str]]:
        """On our kernels: what the default decides on what is counted, as a table by length."""
        if not self.slots.tiles:
            return {}
        cases = sorted(self.evaluator.workload.counted, key=lambda c: c.problem.seqlen_k)
        splits, tiles = {}, {}
        for case in cases:
            plan = self.evaluator.kept.default(case).plan
            assert plan is not None
            c = plan.config
            tile = (c.tile_n, c.num_warps, c.num_stages)
            keys = case.problem.seqlen_k
            splits[keys] = str(c.num_splits)
            tiles[keys] = str(tile if tile in self.slots.tiles else self.slots.tiles[0])
        table = {"num_splits": by_length(splits), "tile": by_length(tiles)}
        most = cases[-1].problem
        applies = f"seqlen_k < {most.seqlen_k + 1} and batch < {most.batch + 1}"
        return {WRITTEN_OUT: {"applies": applies, **table}}

    def _written(self, expressions: dict[str, str]) -> Policy:
        """A start in this search's slots."""
        tile = random.choice(self.slots.tiles) if self.slots.tiles else None
        rest = {"pack_gqa": "True", "sm_margin": "0", "tile": str(tile)}
        lines = [f"    {name} = {text}" for name, text in {**rest, **expressions}.items()]
        head = (
            "def policy(): \n" + "\n".join(lines) + "\n    return num_splits, pack_gqa, 0, tile\n"
        )
        return grammar.policy_of(head, self.slots)

    def _individual(
        self, policy: Policy, how: str, parents: Sequence[int], island: int
    ) -> Individual:
        individual = Individual(policy)
        individual.number, evaluation = self.add(policy, how, parents, island)
        individual.behaviour = evaluation.behaviour or (str(individual.number),)
        self._judge(individual, how, evaluation.reason, evaluation.ratio)
        return individual

    def _counted(self, behaviour: tuple[str, ...]) -> tuple[str, ...]:
        """The decisions of a candidate where they count."""
        return behaviour[: len(self.evaluator.workload.counted)]

    def _judge(
        self, individual: Individual, how: str, reason: str | None, ratio: float | None
    ) -> None:
        """Judges a candidate. A rejected one is no parent, nor one that does as the default where
        it counts: the smallest of those leave everything to it. Only the default written out is
        one."""
        same = self._counted(individual.behaviour) == self._counted(self.default)
        bad = reason is not None or ratio is None or (same and how != WRITTEN_OUT)
        individual.fitness.values = REJECTED if bad else (ratio, individual.policy.size)

    def _generation(self, island: int, population: list[Individual]) -> list[Individual]:
        made: list[tuple[Policy, str, list[int]]] = []
        for _ in range(self.settings.population):
            a, b = tools.selDoubleTournament(population, 2, TOURNAMENT, PARSIMONY, True)
            if random.random() < CROSSOVER:
                policy, how = grammar.crossed(a.policy, b.policy)
                parents = [a.number, b.number]
            else:
                policy, how = grammar.mutated(a.policy, self.slots)
                for _ in range(random.randrange(MUTATIONS)):
                    policy, more = grammar.mutated(policy, self.slots)
                    how += f", {more}"
                parents = [a.number]
            made.append((policy, how, parents))
        for policy, how, _ in made:
            source = self._source(policy, how)
            if body_of(source) not in self.sources:
                self.evaluator.foresee(source)
        children = [self._individual(*child, island) for child in made]
        return self._different(tools.selBest(population + children, len(population) * 2))

    def _different(self, ranked: list[Individual]) -> list[Individual]:
        """The first of every behaviour where it counts, filled up with others to the size of a
        population: policies that differ on what is held out alone are equally fast."""
        first = {self._counted(each.behaviour): each for each in reversed(ranked)}
        chosen = sorted(first.values(), key=ranked.index)
        chosen += [other for other in ranked if not any(other is x for x in chosen)]
        return chosen[: self.settings.population]

    # --- checkpoints ------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        state = random.getstate()
        islands = [
            [{**trees_of(individual.policy), "number": individual.number} for individual in island]
            for island in self.islands
        ]
        saved = {
            **{"settings": asdict(self.settings), "generation": self.found.generation},
            **{"candidates": len(self.found.candidates), "islands": islands},
            "workload": self.evaluator.workload.name,
            "random": [state[0], list(state[1]), state[2]],
        }
        write(self.folder / "checkpoint.json", json.dumps(saved))

    def _resume(self) -> bool:
        path = self.folder / "checkpoint.json"
        if not path.exists():
            return False
        saved = json.loads(path.read_text())
        for name, here in {
            **asdict(self.settings),
            "workload": self.evaluator.workload.name,
        }.items():
            known = {"fitness": "attention", **saved["settings"], "workload": saved["workload"]}
            there = known[name]
            expect(here == there, name, f"{there}, as the run in {self.folder} has", here)
        # Those of a generation that was not finished will be made again, and are known by then.
        self.take_up()
        there = len(self.found.candidates)
        expect(there >= saved["candidates"], "candidates", f"{saved['candidates']}", there)
        self.found.generation = saved["generation"]
        self.islands = [
            [self._restored(dict(trees)) for trees in island] for island in saved["islands"]
        ]
        version, numbers, gauss = saved["random"]
        random.setstate((version, tuple(numbers), gauss))
        return True

    def take_up(self) -> None:
        """The candidates of the file as they were found."""
        self.found.candidates, self.found.best = [], None
        for record in self.lines.records:
            self._take_up(record)

    def _take_up(self, record: Record) -> None:
        fields = {name: record[name] for name in Evaluation.__dataclass_fields__}
        evaluation = Evaluation(**{**fields, "behaviour": tuple(fields["behaviour"])})
        self.sources[body_of(record["source"])] = record["number"], evaluation
        if evaluation.behaviour:
            self.known.setdefault(evaluation.behaviour, evaluation)
        self._note(record)

    def _restored(self, trees: dict[str, Any]) -> Individual:
        number = trees.pop("number")
        written = "\n".join(f"    {name} = {text}" for name, text in trees.items())
        policy = grammar.policy_of(f"def policy():\n{written}\n", self.slots)
        individual = Individual(Policy((name, policy[name]) for name in self.slots.types))
        individual.number = number
        record = self.found.candidates[number]
        individual.behaviour = tuple(record["behaviour"]) or (str(number),)
        self._judge(individual, record["how"], record["reason"], record["ratio"])
        return individual


def body_of(source: str) -> str:
    """A file without what is said about it."""
    return source.split('"""', 2)[-1]


def by_length(values: dict[int, str]) -> str:
    """A balanced conditional expression over seqlen_k; equal neighbours are one."""
    keys = sorted(values)
    if len(set(values.values())) == 1:
        return values[keys[0]]
    middle = len(keys) // 2
    low, high = ({k: values[k] for k in part} for part in (keys[:middle], keys[middle:]))
    return f"({by_length(low)} if seqlen_k < {keys[middle - 1] + 1} else {by_length(high)})"


def trees_of(policy: Policy) -> dict[str, str]:
    return {name: grammar.expression(tree) for name, tree in policy.items()}


def write(path: Path, text: str) -> None:
    """All of it or nothing, whatever ends the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)
