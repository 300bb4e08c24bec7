"""Decisions from measurements: the cost model of `waves`, corrected by a table of timed plans.

`splitkv tune` makes the table, see tuned_tables.py. A plan is expected to take

    seconds(plan) = model(plan) * exp(weighted mean of log(measured / model))

over the plans of the same kernel and tile shape that were timed for the nearest problems:

    distance   in octaves (factors of two), between the places of two problems of a class, for which
               see tuned_tables.py
    nearest    the first `NEIGHBOURS` within `MAX_OCTAVES`, in the order of the table where equal
    exact      a problem that is in the table, but for a sixteenth of its keys, is given its fastest
               plan
    weight     1 / (1/4 + distance**2 + 4 * octaves between the numbers of splits**2); the mean over
               all plans of the kernel counts as one more plan, of weight `PRIOR`, and in that mean
               a plan as the model says, of the same weight

So the table says which kernel and tile shape are good here and how wrong the model is about them,
and the model says what other batches, lengths and numbers of splits change. Weighed are the shapes
that were `GOOD` for a near problem and the kernel has for this one, with numbers of splits around
the model's best; the plan of least seconds is taken, of another kernel than that of `waves` only
where it promises `OTHER_KERNEL` times less. Where there is no table of the GPU, or nothing of the
kernel that `waves` takes near enough in it, `waves` decides, and `why` says so.

A table in the user's cache is joined to the package's (`tuned_tables.table_of`): of a problem that
both have the user's times count, and `why` names it.

Where only the device knows the lengths, the parts are no longer than `waves` allows, and where
`waves` shares the programs out over the batch it decides: the table's sequences were equally long.
A schedule of the step takes the place of either where it costs hardly anything
(`persistent.where_it_costs_little`); or, of a problem that was timed in mixes of lengths, what is
best at worst and hardly slower than the fastest where lengths are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Any

from splitkv.core.device import Device
from splitkv.core.kv import AS_IS
from splitkv.core.plan import SCHEDULED, Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import ceil_div
from splitkv.planner.policies import decode_cost, persistent, waves
from splitkv.planner.policies.shared import (
    MAX_SPLITS,
    ROUNDED,
    Policy,
    count,
    even_splits,
    num_tiles,
    shapes,
    splits_keys,
)
from splitkv.planner.policies.tuned_tables import (
    EQUAL,
    Likeness,
    Near,
    Table,
    Timed,
    class_of,
    dims,
    likeness_of,
    place_of,
    sizes_of,
    table_of,
    tuned_problem,
)

# Problems that count as near, octaves, and weights, by leaving timed problems out of the table in
# turn: measurements/thresholds.md#tuned, as what follows.
NEIGHBOURS, MAX_OCTAVES, PRIOR, SPLITS_WEIGHT = 12, 4.0, 2.0, 4.0
# Octaves of keys between problems that count as one: calls are planned for their keys rounded up by
# up to a sixteenth.
SAME = math.log2(17 / 16)
HARDLY_MORE = 1.03  # times the first kernel's fastest plan, for another's to be taken
HARDLY = 1.05  # times the fastest, for a plan that was timed as it is
# How far the model is off differs more between kernels than between plans of one: a factor.
OTHER_KERNEL = 1.05
GOOD = 1.02  # times the fastest of a near problem, for a shape to be weighed
# Numbers of splits to weigh, beside what fills a wave.
FEW_SPLITS = (*range(1, 9), *(round(1.25**i) for i in range(10, 32)))
# times the model's best splits
AROUND = (1.0, 1.12, 0.89, 1.25, 0.8, 1.5, 0.67, 2.0, 0.5, 3.0, 0.33)


def cheapest_splits(problem: Problem, device: Device, shape: Config, kernel: Kernel) -> int:
    """The number of splits that the cost model of `waves` finds best for a shape.

    Weighed are few splits, powers of 1.25, and what fills quarters of a wave of programs or gives
    every SM as many.
    """
    model = decode_cost.models(problem, device, kernel)(shape)
    return _cheapest_splits(model, device, most_splits(problem, shape))


def _cheapest_splits(model: decode_cost.Model, device: Device, most: int) -> int:
    programs, slots = model.in_one_part()
    programs = max(1, programs)
    a_wave = slots / programs
    weighed = {*FEW_SPLITS}
    weighed.update([int(a_wave * i / 4) for i in range(1, 13)])
    weighed.update([int(device.num_sms * i / programs) for i in range(1, 9)])
    longest = {ceil_div(model.tiles, min(splits, most)) for splits in weighed if splits}
    return decode_cost.cheapest(model, [ceil_div(model.tiles, per) for per in longest])


def most_splits(problem: Problem, shape: Config) -> int:
    """One a tile, where the kernel can split at all."""
    return min(MAX_SPLITS, num_tiles(problem, shape.tile_n))


def with_table(table: Table | None) -> Policy:
    """The policy that follows this table, whatever the GPU."""
    return lambda problem, device, candidates: _choose(problem, device, candidates, table)


def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
    """The policy that follows the table of the device."""
    return _choose(problem, device, candidates, table_of(device.name))


_waves = waves.for_equal_lengths()


def _choose(
    problem: Problem, device: Device, candidates: Sequence[Kernel], table: Table | None
) -> Choice:
    own, first = _of_equal_lengths(problem, device, candidates, table), candidates[0]
    constants = decode_cost.constants_of(first)
    timed = None if table is None else _of_mixes(problem, device, first, table)
    if timed is not None and timed.kernel == own.kernel:
        return timed
    return persistent.where_it_costs_little(own, problem, device, first, constants)


def _of_mixes(problem: Problem, device: Device, kernel: Kernel, table: Table) -> Choice | None:
    """The plan of a kernel whose worst is best over the mixes that were timed of the problem, of
    those that are hardly slower than the fastest where lengths are equal; None where none were."""
    if not table.mixes:
        return None
    sizes: dict[str, Any] = dims(problem)
    like = tuned_problem(**sizes)
    plain = replace(problem, sink_logits=False, return_lse=False) == like
    if not plain or persistent.why_not_several(kernel, problem, device):
        return None
    rows: dict[str, dict[Config, float]] = {}
    for measured in table.mixes:
        keys = measured.problem.seqlen_k
        near = keys > 0 and abs(math.log2(problem.seqlen_k / keys)) <= SAME
        if near and measured.problem == replace(like, seqlen_k=keys):
            plans = (plan for plan in measured.plans if plan.kernel == kernel.name)
            rows[measured.mix] = {plan.config: plan.us for plan in plans}
    if not rows.get(EQUAL) or len(rows) < 2 or not all(rows.values()):
        return None
    least = {mix: min(plans.values()) for mix, plans in rows.items()}
    most = least[EQUAL] * (1 + persistent.MOST_LONGER)
    legal, worst = shapes(kernel, problem, device), dict[Config, float]()
    for config, us in rows[EQUAL].items():
        everywhere = all(config in plans for plans in rows.values())
        known = replace(config.shape, schedule="even", programs=0) in legal
        room = persistent.all_programs(problem, config) <= 2 * device.num_sms
        if us <= most and everywhere and known and (room or config.schedule not in SCHEDULED):
            worst[config] = max(plans[config] / least[mix] for mix, plans in rows.items())
    if not worst:
        return None
    best = min(worst, key=lambda config: worst[config])
    why = (
        f"tuned: the least at worst, {worst[best]:.2f} of the fastest, over {len(rows)} mixes of "
        f"lengths timed of this problem on {table.gpu}{table.note}; {rows[EQUAL][best]:.1f} us "
        f"where they are equal, the fastest there {least[EQUAL]:.1f}"
    )
    return Choice(kernel.name, best, why)


def _of_equal_lengths(
    problem: Problem, device: Device, candidates: Sequence[Kernel], table: Table | None
) -> Choice:
    timed = None
    near = [] if table is None else _nearest(problem, table)
    where = "" if table is None else table.gpu + table.note
    alike = problem.lengths == "host" or problem.batch == 1  # then waves shares no batch out
    if table is not None and near and alike:
        timed = _timed(problem, device, candidates, table, near)
        if timed is not None:
            return _fastest(timed, where)
    own = _waves(problem, device, candidates)

    def leave_it(reason: str) -> Choice:
        return replace(own, why=f"tuned: {reason}; {own.why}")

    if table is None:
        return leave_it(f"no table for {device.name}")
    if own.config.schedule == "batch":
        return leave_it("the lengths may differ much")
    if not alike:
        timed = _timed(problem, device, candidates, table, near)
        if timed is not None:
            return _fastest(timed, where)
    told = [table.near(octaves, number, device) for octaves, number in near]
    local = _Local(problem, device, candidates, told)
    if own.kernel not in local.known:
        return leave_it(f"nothing like it in the table of {where}")
    seconds, best = local.best(own)
    p = told[0].measured.problem
    why = (
        f"tuned: {count(best.config.num_splits, 'split')} in tiles of "
        f"{best.config.tile_n} keys, {seconds * 1e6:.1f} us by the model and "
        f"{count(len(told), 'problem')} measured on {where}, the nearest {told[0].octaves:.1f} "
        f"octaves away: batch {p.batch}, heads {p.num_heads}/{p.num_kv_heads}, head_dim "
        f"{p.head_dim}, {p.seqlen_k} keys, {p.place}"
    )
    of_waves = local.seconds_of(own)
    if of_waves is not None:
        why += f"; the plan of waves {of_waves * 1e6:.1f} us"
    return Choice(best.kernel, best.config, why)


def _fastest(timed: Timed, where: str) -> Choice:
    why = f"tuned: the fastest of this problem on {where}, {timed.us:.1f} us"
    return Choice(timed.kernel, timed.config, why)


def _timed(
    problem: Problem,
    device: Device,
    candidates: Sequence[Kernel],
    table: Table,
    near: Sequence[tuple[float, int]],
) -> Timed | None:
    """The fastest plan of the problem itself, where it is in the table and legal here."""
    named = {kernel.name: kernel for kernel in candidates}
    for octaves, number in near:
        if octaves > SAME:
            break
        measured = table.measured[number]
        as_long = dims(problem) | {"seqlen_k": measured.problem.seqlen_k}
        if dims(measured.problem) == as_long and measured.problem.mask == problem.mask:
            timed = _bounded(problem, _preferred(candidates, measured.plans))
            kernel = named.get(timed.kernel)
            if kernel is not None and timed.config.shape in shapes(kernel, problem, device):
                return _paired(problem, device, candidates, timed, measured.plans)
    return None


def _preferred(candidates: Sequence[Kernel], plans: Sequence[Timed]) -> Sequence[Timed]:
    """The plans of the first kernel that was timed, where the fastest of all is hardly ahead: runs
    differ by more than that."""
    names = [kernel.name for kernel in candidates]
    timed = [name for name in names if any(plan.kernel == name for plan in plans)]
    own = [plan for plan in plans if plan.kernel == timed[0]] if timed else []
    least = min(plan.us for plan in plans)
    good = bool(own) and min(plan.us for plan in own) <= HARDLY_MORE * least
    return own if good else plans


def _paired(
    problem: Problem,
    device: Device,
    candidates: Sequence[Kernel],
    timed: Timed,
    plans: Sequence[Timed],
) -> Timed:
    """Two parts as a cluster where that was not timed: nearly always the faster of both ways."""
    pair = replace(timed.config, merge="cluster")
    if timed.config.num_splits != 2 or any(plan.config == pair for plan in plans):
        return timed
    kernel = next(kernel for kernel in candidates if kernel.name == timed.kernel)
    able = pair in waves.in_clusters(kernel, problem, device)
    return replace(timed, config=pair) if able else timed


def _bounded(problem: Problem, plans: Sequence[Timed]) -> Timed:
    """The fastest plan whose parts are no longer than they may be, where that is hardly slower than
    the fastest of all; else that one, of more parts than were timed."""
    fastest = min(plans, key=lambda plan: plan.us)
    short = [x for x in plans if x.config.num_splits >= _least_splits(problem, x.config)]
    best = min(short, key=lambda plan: plan.us, default=None)
    if best is not None and best.us <= HARDLY * fastest.us:
        return best
    least = _least_splits(problem, fastest.config)
    if fastest.config.num_splits >= least:
        return fastest
    return replace(fastest, config=replace(fastest.config.shape, num_splits=least))


@dataclass(eq=False, slots=True)
class _Known:
    """A legal tile shape of a kernel and what plans of it tell that were timed near the problem.

    told   (1/4 and octaves away squared, octaves of its number of splits) of each plan; logs: of
           measured over model; good: one was `GOOD`
    """

    kernel: str
    shape: Config
    told: list[tuple[float, float]] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    good: bool = False


class _Local:
    """The cost model around a problem, corrected by what was timed near it.

    known   kernel -> the legal shapes that were timed, by likeness
    models  kernel -> its cost model of the problem
    """

    def __init__(
        self, problem: Problem, device: Device, candidates: Sequence[Kernel], near: Sequence[Near]
    ) -> None:
        self.problem, self.device = problem, device
        self.kernels = {kernel.name: kernel for kernel in candidates}
        self.known: dict[str, dict[Likeness, _Known]] = {}
        kernels = {timed.kernel for of in near for timed in of.measured.plans}
        legal = {name: self._legal_shapes(name) for name in kernels}
        for octaves, measured, logs in near:
            plans = enumerate(measured.plans)
            told = [(n, timed) for n, timed in plans if timed.likeness in legal[timed.kernel]]
            good = GOOD * min([timed.us for _, timed in told], default=0.0)
            for number, timed in told:
                if number not in logs:
                    logs[number] = self._log(measured.problem, timed)
                of = self.known.setdefault(timed.kernel, {})
                known = of.get(timed.likeness)
                if known is None:
                    shape = legal[timed.kernel][timed.likeness]
                    known = of[timed.likeness] = _Known(timed.kernel, shape)
                known.good |= timed.us <= good
                known.told.append((0.25 + octaves**2, math.log2(timed.config.num_splits)))
                known.logs.append(logs[number])
        self.means = {name: self._mean_of(of.values()) for name, of in self.known.items()}
        self.models = {
            name: decode_cost.models(problem, device, self.kernels[name]) for name in self.known
        }

    def _legal_shapes(self, name: str) -> dict[Likeness, Config]:
        kernel = self.kernels.get(name)
        if kernel is None:
            return {}
        found = waves.of_rows(self.problem, kernel, shapes(kernel, self.problem, self.device))
        if not splits_keys(self.problem, found):
            return {}
        return {likeness_of(name, shape): shape for shape in reversed(found)}

    def _log(self, problem: Problem, timed: Timed) -> float:
        """The log of measured over model, of a plan for another problem."""
        models = decode_cost.models(problem, self.device, self.kernels[timed.kernel])
        return math.log(timed.us * 1e-6 / models(timed.config).cut(timed.config).seconds)

    @staticmethod
    def _mean_of(known: Iterable[_Known]) -> float:
        """How wrong the model is about a kernel, over all of its plans."""
        weights, logs = [PRIOR], [0.0]
        for one in known:
            weights += [1 / away for away, _ in one.told]
            logs += one.logs
        return _mean(weights, logs)

    def _corrected(self, known: _Known, num_splits: int, seconds: float) -> float:
        """The time that the model has for so many splits of a shape, corrected."""
        octaves = math.log2(num_splits)
        weights = [1 / (away + SPLITS_WEIGHT * (its - octaves) ** 2) for away, its in known.told]
        logs = self.means[known.kernel], *known.logs
        return seconds * math.exp(_mean([PRIOR, *weights], logs))

    def seconds_of(self, choice: Choice) -> float | None:
        """The time that a plan is expected to take, or None: none of its shape was timed."""
        config = choice.config
        known = self.known.get(choice.kernel, {}).get(likeness_of(choice.kernel, config))
        if known is None or known.shape.tile_m != config.tile_m:
            return None
        seconds = self.models[choice.kernel](config).seconds(config.num_splits, config.merge)
        return self._corrected(known, config.num_splits, seconds)

    def best(self, own: Choice) -> tuple[float, Choice]:
        """(seconds, plan) of the plan of least seconds: of the proposals, and that of `waves`."""
        expected = self.seconds_of(own)
        # seconds asked for, splits, and whether it is that of `waves`, which is the last of equals
        least = math.inf if expected is None else expected, own.config.num_splits, True
        best = least[0], own
        for known, config, model in self._worth():
            margin = 1.0 if known.kernel == own.kernel else OTHER_KERNEL
            factor = math.exp(min(self.means[known.kernel], *known.logs)) * margin * ROUNDED
            together = config.merge == "cluster"
            if not together and model.least_seconds * factor > least[0]:
                continue
            for splits in [config.num_splits] if together else self._splits(config, model):
                seconds = model.seconds(splits, config.merge)
                if seconds * factor > least[0]:
                    continue
                expected = self._corrected(known, splits, seconds)
                if (expected * margin, splits, False) < least:
                    least = expected * margin, splits, False
                    cut = config if together else replace(config, num_splits=splits)
                    best = expected, Choice(known.kernel, cut, "")
        return best

    def _worth(self) -> Iterator[tuple[_Known, Config, decode_cost.Model]]:
        """The good shapes of each kernel, and its clusters of shapes that were timed."""
        for name, of in self.known.items():
            kernel, model_of = self.kernels[name], self.models[name]
            for known in of.values():
                if known.good:
                    yield known, known.shape, model_of(known.shape)
            constants = decode_cost.constants_of(kernel)
            batch = decode_cost.batch_of(self.problem, self.device, constants)
            timed = [known.shape for known in of.values()]
            for config, _ in waves.modelled_clusters(kernel, batch, timed):
                yield of[likeness_of(name, config)], config, model_of(config)

    def _splits(self, shape: Config, model: decode_cost.Model) -> list[int]:
        """Numbers of splits around the model's best."""
        most, least = min(MAX_SPLITS, model.tiles), _least_splits(self.problem, shape)
        best = _cheapest_splits(model, self.device, most)
        wanted = [min(max(least, round(best * factor)), most) for factor in AROUND]
        return [*dict.fromkeys([even_splits(model.tiles, splits) for splits in wanted])]


def _nearest(problem: Problem, table: Table) -> list[tuple[float, int]]:
    """(octaves away, number) of the `NEIGHBOURS` of the problem in its class, the nearest first."""
    if problem.codec != AS_IS or problem.kind != "decode":
        return []
    sizes = sizes_of(problem)
    here, alike = place_of(sizes), table.places(class_of(sizes))
    away = [(math.dist(here, place), number) for place, number in alike]
    return sorted([pair for pair in away if pair[0] <= MAX_OCTAVES])[:NEIGHBOURS]


def _least_splits(problem: Problem, shape: Config) -> int:
    """So many that no part is too long where the lengths may differ, as in `waves`."""
    if problem.lengths == "host" or problem.batch == 1:
        return 1
    a_tile = shape.tile_n * (problem.head_dim + problem.head_dim_v) * problem.kv_element_bytes
    longest = int(decode_cost.H200.longest_part // a_tile) or 1
    return ceil_div(num_tiles(problem, shape.tile_n), longest)


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    """The mean of values."""
    return math.fsum(map(mul, weights, values)) / math.fsum(weights)
