"""A part of `waves`: how many parts the keys of the kernels for whole sequences are cut into.

    seconds = start + programs an SM * program + sum over waves of tiles a part * tile  +  merge
    tile    = slowest(the chain of operations on one tile, a turn of the ring of tiles in flight,
              the products of all programs of an SM through its tensor cores, the bytes of all
              running programs through the memory)
    merge   = its launch + the partials, written and read; nothing with one part

A program holds a tile of rows. Where those of all sequences and KV heads fill the device there is
nothing to weigh: one part, in the kernel's first shape. Else, and for decode always, few queries
face many keys, and the choice is the kernel, shape and number of parts of least seconds.

Sequences whose lengths only the device knows may be much shorter than planned for, all but one. So
no part is longer than `longest_part` bytes: also not of the single tokens beside prompts, whose own
keys stay whole (`Problem.cut_tokens`); that is done for pages, in which such batches come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import NamedTuple

from splitkv.core.device import REGISTERS_PER_SM, Device, MiB
from splitkv.core.errors import expect
from splitkv.core.kv import Paged
from splitkv.core.plan import Choice, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import box_rows, ceil_div
from splitkv.planner.policies import mixed_steps, widening
from splitkv.planner.policies.shared import (
    MAX_SPLITS,
    QUANTISED,
    READY_BEFORE,
    ROUNDED,
    WHOLE_SEQUENCES,
    Policy,
    TiledKeys,
    clusters,
    count,
    num_tiles,
    shapes,
    slowest,
)

MOST_PARTIAL_BYTES = 256 * MiB
# Keys of tiles in several pages whose parts are a cluster:
# measurements/thresholds.md#whole-sequences-of-few-rows.
LONG_TILE = 128
# The model does not tell apart what is so close: then fewer rows, which read no keys twice where
# they are enough, and longer tiles.
CLOSE = 1.03


def occupancy(problem: Problem, device: Device, config: Config) -> int:
    """Programs of a shape of `prefill` that an SM holds at once."""
    dims = problem.head_dim + problem.head_dim_v
    keys = config.num_stages * config.tile_n * dims
    smem = (keys + config.tile_m * problem.head_dim) * problem.element_bytes + 1024
    rows = config.tile_m * (problem.head_dim_v + 1.5 * config.tile_n)
    registers = min(255.0, 60 + (rows + 0.2 * config.tile_n * dims) / (32 * config.num_warps))
    by_registers = int(REGISTERS_PER_SM / (registers * 32 * config.num_warps))
    return max(1, min(device.smem_per_sm // smem, by_registers))


@dataclass(frozen=True, slots=True, eq=False)  # by identity, as a key of caches
class Constants:
    """Constants of `prefill` on a GPU, in seconds, bytes and operations a second.

    Both are fitted as those of `waves` are, to decode in the same studies; how far off they are:
    measurements/thresholds.md#whole-sequences-of-few-rows.

    start        launch, first address to first tile, epilogue
    program      for each program that an SM runs, whether together or one after another;
                 program_row: of the SM that runs most, for each of tile_m * (head_dim + head_dim_v)
                 elements of q and of the result
    step         one tile, however small, for each four warps; step_load: for each of tile_n *
                 (head_dim + head_dim_v) elements a warp; step_score: for each of tile_m * tile_n
                 scores a warp
    paged        of a tile's time, where its keys are in several pages
    latency      from asking for a tile to having it, as in `waves`
    sm_flops     what an SM multiplies, in 16 bits; sm_flops_fp32: without matrix units
    bandwidth_share   of the data sheet's, what the memory gives
    merge        launching the combine; merge_part: for each part of a row, besides its partial,
                 which is written and read; cluster: merging two parts by the programs of a cluster
    longest_part most bytes of keys and values in one part, where lengths are the device's
    worth        of the time in one part that cutting has to save
    occupancy    (problem, device, config) -> programs that an SM holds at once
    packed       (group, config) -> heads of a group that share a program
    element_bytes  of a key, as it weighs on a program; what `prefill` widens as much as what it
                   would read
    attended       what the kernel is given of a problem; before: (problem, device) -> seconds of a
                   launch before it
    """

    start: float = 3.66e-6
    program: float = 0.326e-6
    program_row: float = 9.59e-11
    step: float = 0.0632e-6
    step_load: float = 8.86e-11
    step_score: float = 1.97e-10
    paged: float = 1.07
    latency: float = 2.05e-6
    sm_flops: float = 5.04e12
    sm_flops_fp32: float = 0.25e12
    bandwidth_share: float = 0.932
    merge: float = 0.863e-6
    merge_part: float = 0.838e-8
    cluster: float = 0.3e-6
    longest_part: float = 4.25 * MiB
    worth: float = 0.05
    occupancy: Callable[[Problem, Device, Config], int] = occupancy
    packed: Callable[[int, Config], int] = lambda group, config: group
    element_bytes: Callable[[Problem], int] = lambda problem: problem.element_bytes
    attended: Callable[[Problem], Problem] = lambda problem: problem
    before: Callable[[Problem, Device], float] = lambda problem, device: 0.0


H200 = Constants()
# The kernel for Hopper: keys arrive by themselves, a program takes an SM.
H200_HOPPER = Constants(
    start=4.06e-6,
    program=1.51e-6,
    program_row=3.17e-11,
    step=0.23e-6,
    step_load=0.0,
    step_score=1.59e-10,
    paged=0.321,
    latency=0.483e-6,
    sm_flops=7.79e12,
    bandwidth_share=0.955,
    merge=1.45e-6,
    merge_part=0.988e-8,
    occupancy=lambda problem, device, config: 1,
    packed=lambda group, config: min(group & -group, 64) if config.pack_gqa else 1,
    element_bytes=lambda problem: problem.kv_element_bytes,
)

# Of prompts, which were not fitted again when decode was: their programs are many.
PROMPTS = replace(
    H200,
    start=4.3e-6,
    program=0.58e-6,
    program_row=0.0,
    step=0.074e-6,
    step_load=7.73e-11,
    step_score=0.0,
    paged=1.29,
    latency=2.14e-6,
    sm_flops=3.55e12,
    bandwidth_share=0.951,
    merge=0.655e-6,
    merge_part=0.725e-8,
)
HOPPER_PROMPTS = replace(
    H200_HOPPER,
    start=4.6e-6,
    program=2.02e-6,
    program_row=0.0,
    step=0.2e-6,
    step_score=2.12e-10,
    paged=0.199,
    latency=1.03e-6,
    sm_flops=7.35e12,
    bandwidth_share=0.974,
    merge=1.54e-6,
    merge_part=0.91e-8,
)


class Cost(NamedTuple):
    """The cost that the model expects of a config."""

    programs: int
    slots: int
    parts: int
    per: int
    seconds: float
    merge: float


def units(problem: Problem, config: Config, constants: Constants = H200) -> int:
    """Programs with one part, every sequence at its upper bound."""
    packed = constants.packed(problem.group, config)
    tiles = max(1, ceil_div(problem.seqlen_q * packed, config.tile_m))
    return problem.batch * problem.num_heads // packed * tiles


class Queries(TiledKeys):
    """The query rows of a problem on a device: what does not depend on the tile shape."""

    def __init__(self, problem: Problem, device: Device, constants: Constants) -> None:
        c, self.constants, self.device = constants, constants, device
        self.begun = c.before(problem, device) + c.start
        problem = c.attended(problem)
        super().__init__(problem)
        self.dims, self.batch = problem.head_dim + problem.head_dim_v, problem.batch
        self.bandwidth = c.bandwidth_share * device.bandwidth
        rows = problem.batch * problem.seqlen_q * problem.num_heads
        self.ended = rows * self.dims * problem.element_bytes / self.bandwidth  # q and the result
        self.part_bytes = 2 * rows * (problem.head_dim_v + 2) * 4  # written and read
        self.key_bytes = self.dims * c.element_bytes(problem)
        self.flops = c.sm_flops if problem.element_bytes == 2 else c.sm_flops_fp32
        self._models: dict[tuple[int, int, int, int, bool], RowsModel] = {}

    def model(self, config: Config) -> RowsModel:
        """The model of a config's tile shape, made once."""
        tile = config.tile_m, config.tile_n, config.num_warps, config.num_stages, config.pack_gqa
        found = self._models.get(tile)
        if found is None:
            found = self._models[tile] = RowsModel(self, config)
        return found

    @cached_property
    def floor(self) -> float:
        """Seconds that no shape and number of parts are less than: all bytes through the memory."""
        problem = self.problem
        keys = problem.batch * problem.num_kv_heads * problem.visible_keys
        return self.begun + self.ended + keys * self.key_bytes / self.bandwidth


class RowsModel:
    """A tile shape on a device: what does not depend on the number of parts."""

    def __init__(self, queries: Queries, config: Config) -> None:
        c, problem, device = queries.constants, queries.problem, queries.device
        tile_m, tile_n, num_warps = config.tile_m, config.tile_n, config.num_warps
        self.constants, self.num_sms, self.bandwidth = c, device.num_sms, queries.bandwidth
        self.tiles = queries.tiles(tile_n)
        self.whole = units(problem, config, c)
        self.slots = device.num_sms * c.occupancy(problem, device, config)
        self.num_stages = config.num_stages
        self.products = 2 * tile_m * tile_n * queries.dims / queries.flops
        chain = c.step * num_warps / 4 + c.step_load * (tile_n * queries.dims / num_warps)
        chain += c.step_score * (tile_m * tile_n) / num_warps
        if queries.page_size and queries.page_size % tile_n:
            chain *= 1 + c.paged
        self.chain, self.turn = chain, (chain + c.latency) / config.num_stages
        # the row tiles of a KV head read the same keys: the memory gives them once
        units_read = problem.batch * problem.num_kv_heads
        self.shared = tile_n * queries.key_bytes * units_read / max(1, self.whole)
        self.begun, self.ended, self.part_bytes = queries.begun, queries.ended, queries.part_bytes
        self.row = c.program_row * tile_m * queries.dims

    def in_one_part(self) -> tuple[int, int]:
        """(programs in one part, how many the GPU holds at once)."""
        return self.whole, self.slots

    @property
    def least_seconds(self) -> float:
        """Seconds that no number of parts is less than: their start, all that is read and
        multiplied, and the chain of a wave, of which more programs have less."""
        of_all, c = self.whole * self.tiles, self.constants
        work = max(of_all * self.shared / self.bandwidth, of_all * self.products / self.num_sms)
        work = max(work, of_all / self.slots * self.chain)
        program, chain = c.program * self.whole / self.num_sms, self.tiles * self.chain
        one = program + max(work, chain)
        two = 2 * program + work
        any_number = 2 * math.sqrt(program * chain)
        return self.begun + self.ended + min(one, max(two, any_number))

    def cut(self, config: Config) -> Cost:
        """The cost where a config of this shape cuts the keys."""
        return self.cost(config.num_splits, config.merge)

    def seconds(self, num_splits: int, merge: str) -> float:
        """The seconds of a Cost."""
        return self.cost(num_splits, merge).seconds

    def floor(self, num_splits: int, merge: str = "combine") -> float:
        """Seconds that so many parts take at least: what is simple to know of their Cost."""
        per = -(-self.tiles // num_splits)
        parts = -(-self.tiles // per)
        programs = self.whole * parts
        reading = per * programs * self.shared / self.bandwidth
        products = per * programs * self.products / self.num_sms
        chain = -(-programs // self.slots) * per * self.chain
        floor = self.begun + self.constants.program * programs / self.num_sms + self.ended
        floor += max(reading, products, chain)
        if parts > 1 and merge != "cluster":
            floor += self.constants.merge + parts * self.part_bytes / self.bandwidth
        return floor

    def cost(self, num_splits: int, merge: str) -> Cost:
        """The cost in so many parts, every sequence at its upper bound."""
        c = self.constants
        per = ceil_div(self.tiles, num_splits)
        parts = ceil_div(self.tiles, per)
        programs = self.whole * parts
        full, rest = divmod(programs, self.slots)
        seconds = self.begun + c.program * programs / self.num_sms
        seconds += self.row * ceil_div(programs, self.num_sms)
        seconds += self.ended  # q and the result
        waves = full * self.wave(self.slots, per) if full else 0.0
        seconds += waves + (self.wave(rest, per) if rest else 0.0)
        merging = 0.0
        if parts > 1 and merge == "cluster":
            merging = c.cluster
        elif parts > 1:
            merging = c.merge + c.merge_part * parts + parts * self.part_bytes / self.bandwidth
        return Cost(programs, self.slots, parts, per, seconds + merging, merging)

    def wave(self, running: int, per: int) -> float:
        """Seconds of a wave of so many programs of `per` tiles."""
        turn = self.turn if per > self.num_stages else 0.0
        products = ceil_div(running, self.num_sms) * self.products
        return per * slowest(self.chain, turn, products, running * self.shared / self.bandwidth)


@lru_cache(maxsize=1024)  # near problems are the same for one length and the next
def queries_of(problem: Problem, device: Device, constants: Constants) -> Queries:
    """The Queries of a problem, made once."""
    return Queries(problem, device, constants)


def cost(problem: Problem, device: Device, config: Config, constants: Constants = H200) -> Cost:
    """The model's answer for a config, every sequence at its upper bound."""
    return queries_of(problem, device, constants).model(config).cut(config)


def choose(
    problem: Problem,
    device: Device,
    candidates: Sequence[Kernel],
    constants: Constants = H200,
    hopper: Constants = H200_HOPPER,
) -> Choice | None:
    """The choice where one of `WHOLE_SEQUENCES` can cut the keys and is to do so, or is the first
    that can at all; else None."""
    kernels = [kernel for kernel in candidates if kernel.name in WHOLE_SEQUENCES]
    names = [kernel.name for kernel in kernels]
    if any(name in READY_BEFORE for name in names):  # one of all three: see `widening`
        first = names[0] if names[0] in READY_BEFORE else QUANTISED
        drop = {QUANTISED, *READY_BEFORE} - {first}
        kernels = [kernel for kernel in kernels if kernel.name not in drop]
    decoding = problem.kind == "decode"
    if not decoding and (constants, hopper) == (H200, H200_HOPPER):
        constants, hopper = PROMPTS, HOPPER_PROMPTS
    if not kernels or problem.needs_grad or (decoding and kernels[0] is not candidates[0]):
        return None
    kernel, rule = kernels[0], constants_of(kernels[0], constants, hopper)
    shape = _worth_weighing(kernel, problem, device)[0]
    whole = cost(problem, device, shape, rule)
    few = decoding or units(problem, shape, rule) < whole.slots
    if problem.cut_tokens < problem.seqlen_q:
        if few:
            whole, choice = fastest(problem, device, kernel, constants, hopper)
            shape = choice.config
        by_items = mixed_steps.scheduled(problem, device, kernel, shape, whole.seconds)
        if by_items is not None:
            return by_items
        parts = min(_least_parts(problem, shape, rule), _most_parts(problem))
        if parts > 1 and isinstance(problem.place, Paged):
            why = f"waves: sequences of at most {count(problem.cut_tokens, 'token')} in up to "
            why += f"{count(parts, 'part')} of their keys, prompts in one; no schedule of items: "
            why += mixed_steps.why_not(problem, kernel, whole.seconds)[0]
            return Choice(kernel.name, replace(shape, num_splits=parts), why)
    elif few:
        best, choice = fastest(problem, device, kernel, constants, hopper)
        for other in kernels[1:]:
            told = faster(problem, device, other, best.seconds, constants, hopper)
            # in one part a call of `prefill` takes the host longer than the GPU can gain
            if told is not None and told[1].config.num_splits > 1:
                best, choice = told
        rule = constants_of(next(k for k in kernels if k.name == choice.kernel), constants, hopper)
        needed = best.parts > 1 and _least_parts(problem, choice.config, rule) > 1
        if needed or best.seconds < whole.seconds * (1 - rule.worth):
            return choice
    if kernel is not candidates[0]:
        return None
    why = f"waves: {count(whole.programs, 'program')} for {device.num_sms} SMs in one part, "
    return Choice(kernel.name, shape, why + f"{whole.seconds * 1e6:.1f} us")


def fastest(
    problem: Problem,
    device: Device,
    kernel: Kernel,
    constants: Constants = H200,
    hopper: Constants = H200_HOPPER,
) -> tuple[Cost, Choice]:
    """The shape and number of parts of least seconds of a kernel for whole sequences."""
    found = faster(problem, device, kernel, math.inf, constants, hopper)
    assert found is not None, f"{kernel.name} takes no finite time for {problem}"
    return found


def faster(
    problem: Problem,
    device: Device,
    kernel: Kernel,
    seconds: float,
    constants: Constants = H200,
    hopper: Constants = H200_HOPPER,
) -> tuple[Cost, Choice] | None:
    """Finds what `fastest` does, or None where that takes no less than so many seconds."""
    rule = constants_of(kernel, constants, hopper)
    queries = queries_of(problem, device, rule)
    if queries.floor * ROUNDED > seconds:
        return None
    prompts = problem.cut_tokens < problem.seqlen_q  # whose keys stay whole
    most = 1 if prompts else _most_parts(problem)
    found = _worth_weighing(kernel, problem, device)
    weighed: list[tuple[Cost, Config, int]] = []  # each with its number of parts
    least = seconds
    for shape in found:
        model = queries.model(shape)
        if model.least_seconds * ROUNDED > CLOSE * least:
            continue
        for parts in _parts_worth(problem, model, shape, most):
            if model.floor(parts, shape.merge) * ROUNDED <= CLOSE * least:
                spent = model.cost(parts, shape.merge)
                weighed.append((spent, shape, parts))
                least = min(least, spent.seconds)
    if most > 1:
        for config in _in_clusters(problem, device, kernel, rule):
            spent = queries.model(config).cost(config.num_splits, config.merge)
            weighed.append((spent, config, config.num_splits))
            least = min(least, spent.seconds)

    def rank(one: tuple[Cost, Config, int]) -> list[float]:
        spent, shape, parts = one
        return [shape.tile_m, -shape.tile_n, spent.seconds, parts]

    if least >= seconds:
        return None
    best, shape, parts = min((x for x in weighed if x[0].seconds <= CLOSE * least), key=rank)
    if best.seconds >= seconds:
        return None
    config = replace(shape, num_splits=parts)
    whole = queries.model(found[0]).cost(1, found[0].merge)
    return best, Choice(kernel.name, config, _why(problem, device, config, best, whole))


def constants_of(
    kernel: Kernel, constants: Constants = H200, hopper: Constants = H200_HOPPER
) -> Constants:
    """The constants that a kernel for whole sequences goes by."""
    if kernel.name in READY_BEFORE:
        return _after_widening(kernel.name, hopper)
    return hopper if kernel.name.startswith("hopper_") else constants


@cache
def _after_widening(name: str, constants: Constants) -> Constants:
    before = partial(widening.seconds, name)
    return replace(constants, attended=lambda problem: problem.widened, before=before)


def asked_for(*, parts: bool, packed: bool) -> Policy:
    """A policy for tables that compare what is decided here: a kernel for whole sequences, with the
    heads of a group packed into rows or apart, and keys in as many parts as `choose` says or in
    one."""

    def choose_asked(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        kernels = [
            replace(kernel, configs=partial(_packed, kernel, packed))
            for kernel in candidates
            if kernel.name in WHOLE_SEQUENCES and any(_packed(kernel, packed, problem, device))
        ]
        choice = choose(problem, device, kernels)
        expect(choice is not None, "packed", "a kernel that can", packed)
        assert choice is not None
        config = choice.config if parts else choice.config.shape
        return replace(choice, config=config, why=f"as asked; {choice.why}")

    return choose_asked


def _packed(kernel: Kernel, packed: bool, problem: Problem, device: Device) -> Iterator[Config]:
    return (config for config in kernel.configs(problem, device) if config.pack_gqa == packed)


def _worth_weighing(kernel: Kernel, problem: Problem, device: Device) -> list[Config]:
    """The kernel's shapes, each with the heads and programs that it would take first."""
    found = shapes(kernel, problem, device)
    likeness = found[0].pack_gqa, found[0].programs
    return [shape for shape in found if (shape.pack_gqa, shape.programs) == likeness]


def _bytes_a_part(problem: Problem) -> int:
    """Bytes of partials of a part."""
    rows = problem.batch * problem.cut_tokens * problem.num_heads
    return max(1, rows * (problem.head_dim_v + 2) * 4)


def _most_parts(problem: Problem) -> int:
    return max(1, MOST_PARTIAL_BYTES // _bytes_a_part(problem))


def _least_parts(problem: Problem, shape: Config, constants: Constants) -> int:
    """Parts of the longest sequence, where others may be short."""
    if problem.lengths == "host" or problem.batch == 1:
        return 1
    tile_bytes = shape.tile_n * (problem.head_dim + problem.head_dim_v) * problem.kv_element_bytes
    tiles = int(constants.longest_part // tile_bytes) or 1
    return min(MAX_SPLITS, ceil_div(num_tiles(problem, shape.tile_n), tiles))


def _parts_worth(problem: Problem, model: RowsModel, shape: Config, most: int) -> list[int]:
    """Numbers of parts to weigh: few, what fills up to four waves, the fewest."""
    a_wave = model.slots / max(1, model.whole)
    some = (int(a_wave * eighths / 8) for eighths in (2, 4, 6, 7, 8, 10, 12, 16, 24, 32))
    most = min(most, model.tiles, MAX_SPLITS)
    least = min(_least_parts(problem, shape, model.constants), most)
    return [n for n in sorted({least, *range(1, 9), *some}) if least <= n <= most]


def _in_clusters(
    problem: Problem, device: Device, kernel: Kernel, constants: Constants
) -> list[Config]:
    """The configs whose parts are a cluster and can all run at once, none of them too long: in the
    longest tiles alone, which where they are in several pages have `LONG_TILE` keys."""
    found = clusters(kernel, problem, device)
    longest = max((config.tile_n for config in found), default=0)
    if box_rows(problem, longest) < longest < LONG_TILE:
        return []
    tiles = num_tiles(problem, longest) if found else 0
    return [
        config
        for config in found
        if config.tile_n == longest
        and config.num_splits <= tiles
        and units(problem, config, constants) * config.num_splits <= device.num_sms
        and _least_parts(problem, config, constants) <= config.num_splits
    ]


def _why(problem: Problem, device: Device, config: Config, best: Cost, whole: Cost) -> str:
    queries = count(problem.seqlen_q, "query token")
    text = (
        f"waves: {queries} and {problem.visible_keys} keys; {count(best.programs, 'program')} for "
        f"{device.num_sms} SMs x {best.slots // device.num_sms}, each "
        f"{count(best.per, 'tile')} of {config.tile_n} keys, "
        f"{(best.seconds - best.merge) * 1e6:.1f} us"
    )
    if best.merge:
        how = "merge in a cluster" if config.merge == "cluster" else "merge"
        text += f" + {best.merge * 1e6:.1f} us to {how}; in one part {whole.seconds * 1e6:.1f} us"
    return text
