"""A part of `waves`: how many parts the keys of the kernels for whole sequences are cut into.

    seconds = start + sum over waves of tiles a part * tile  +  merge
    tile    = the slowest of: the chain of operations on one tile, the products of all programs of
              an SM through its tensor cores, their bytes through its port, the bytes of all
              running programs through the memory
    merge   = its launch + the partials, written and read; nothing with one part

A program holds a tile of rows. Where those of all sequences and KV heads fill the device there is
nothing to weigh: one part, in the kernel's first shape. Else, and for decode always, few queries
face many keys, and the choice is the kernel, shape and number of parts of least seconds.

Sequences whose lengths only the device knows may be much shorter than planned for, all but one. So
no part is longer than `longest_part` bytes: also not of the single tokens beside prompts, whose own
keys stay whole (`Problem.cut_tokens`); that is done for pages, in which such batches come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from splitkv.device import Device, MiB
from splitkv.errors import expect
from splitkv.kv import Paged
from splitkv.plans import Choice, Config, Kernel
from splitkv.policies.shared import (
    MAX_SPLITS,
    WHOLE_SEQUENCES,
    Policy,
    ceil_div,
    count,
    num_tiles,
    shapes,
)
from splitkv.problem import Problem

MOST_PARTIAL_BYTES = 256 * MiB
REGISTERS_PER_SM = 65536


def occupancy(problem: Problem, device: Device, config: Config) -> int:
    """Programs of a shape of `prefill` that an SM holds at once."""
    dims = problem.head_dim + problem.head_dim_v
    keys = config.num_stages * config.tile_n * dims
    smem = (keys + config.tile_m * problem.head_dim) * problem.element_bytes + 1024
    rows = config.tile_m * (problem.head_dim_v + 1.5 * config.tile_n)
    registers = min(255.0, 60 + (rows + 0.2 * config.tile_n * dims) / (32 * config.num_warps))
    by_registers = int(REGISTERS_PER_SM / (registers * 32 * config.num_warps))
    return max(1, min(device.smem_per_sm // smem, by_registers))


@dataclass(frozen=True, slots=True)
class Constants:
    """What `prefill` costs on a GPU, in seconds, bytes and operations a second.

    The defaults are put together from measured parts, all of one H200: the sustained rate of
    whole tiles, and for few rows the times that `waves` was fitted to.

    start        launch, first address to first tile, epilogue
    step         one tile, however small; step_load: for each of tile_n * (head_dim + head_dim_v)
                 elements a warp; step_score: for each of tile_m * tile_n scores a warp
    paged        of a tile's time, where its keys are in several pages
    sm_flops     what an SM multiplies, in 16 bits; sm_flops_fp32: without matrix units
    sm_bandwidth what it takes in; bandwidth_share: of the data sheet's, what the memory gives
    merge        launching the combine; merge_part: for each part of a row
    longest_part most bytes of keys and values in one part, where lengths are the device's
    worth        of the time in one part that cutting has to save
    occupancy    (problem, device, config) -> programs that an SM holds at once
    packed       (group, config) -> heads of a group that share a program
    element_bytes  of a key, as it weighs on a program; what `prefill` widens as much as what it
                   would read
    """

    start: float = 3.4e-6
    step: float = 0.27e-6
    step_load: float = 1.53e-10
    step_score: float = 4.7e-10
    paged: float = 0.1
    sm_flops: float = 4.6e12
    sm_flops_fp32: float = 0.25e12
    sm_bandwidth: float = 42.4e9
    bandwidth_share: float = 0.9
    merge: float = 1.5e-6
    merge_part: float = 1e-8
    longest_part: float = 4.25 * MiB
    worth: float = 0.05
    occupancy: Callable[[Problem, Device, Config], int] = occupancy
    packed: Callable[[int, Config], int] = lambda group, config: group
    element_bytes: Callable[[Problem], int] = lambda problem: problem.element_bytes


H200 = Constants()
# The kernel for Hopper: keys arrive by themselves, a program takes an SM. Fitted to 140 times of 12
# problems of 16 query tokens (bf16, 8/1 and 32/8 heads, head_dim 128, batch 1 to 64, 4096 to 131072
# keys, contiguous and in pages of 16) and 3 of 3 tokens of 16/1 heads, and to 7 of chunks of
# prompts; one H200, keys cold, torch 2.11, Triton 3.6, 2026-11-22. It is 7 % off, and no pick is
# more than 4 % behind the best of the timed. `sm_bandwidth`, which is that of decode, limits none.
H200_HOPPER = Constants(
    start=7.4e-6,
    step=0.25e-6,
    step_load=0.0,
    step_score=4e-10,
    paged=0.05,
    sm_flops=5.2e12,
    sm_bandwidth=67e9,
    bandwidth_share=0.85,
    merge=1.65e-6,
    merge_part=2.3e-8,
    occupancy=lambda problem, device, config: 1,
    packed=lambda group, config: min(group & -group, 64) if config.pack_gqa else 1,
    element_bytes=lambda problem: problem.kv_element_bytes,
)
# `prefill` beside it: by the same 12 problems, each in one plan, of which this is 11 % off. It took
# as long as the kernel for Hopper on one of them, 4 to 36 % longer on the others.
H200_BESIDE_HOPPER = replace(H200, start=7.5e-6, bandwidth_share=0.76)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the model says of a config."""

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


def cost(problem: Problem, device: Device, config: Config, constants: Constants = H200) -> Cost:
    """The model's answer for a config, every sequence at its upper bound."""
    c, dims = constants, problem.head_dim + problem.head_dim_v
    tiles = num_tiles(problem, config.tile_n)
    per = ceil_div(tiles, config.num_splits)
    parts = ceil_div(tiles, per)
    whole = units(problem, config, c)
    programs = whole * parts
    tile_bytes = config.tile_n * dims * c.element_bytes(problem)
    half = problem.element_bytes == 2
    flops = 2 * config.tile_m * config.tile_n * dims / (c.sm_flops if half else c.sm_flops_fp32)
    load, score = config.tile_n * dims / config.num_warps, config.tile_m * config.tile_n
    chain = c.step + c.step_load * load + c.step_score * score / config.num_warps
    if isinstance(problem.place, Paged) and problem.place.page_size % config.tile_n:
        chain *= 1 + c.paged
    slots = device.num_sms * c.occupancy(problem, device, config)
    # the row tiles of a KV head read the same keys: the memory gives them once
    shared = tile_bytes * problem.batch * problem.num_kv_heads / max(1, whole)
    bandwidth = c.bandwidth_share * device.bandwidth

    def wave(running: int) -> float:
        on_one_sm = ceil_div(running, device.num_sms)
        port = on_one_sm * max(flops, tile_bytes / c.sm_bandwidth)
        # 96 and 100 programs on 132 SMs were no faster than so many parts of all SMs
        reading = slots if 2 * running > slots else running
        return per * max(chain, port, reading * shared / bandwidth)

    full, rest = divmod(programs, slots)
    seconds = c.start + full * wave(slots) + (wave(rest) if rest else 0.0)
    merge = 0.0
    if parts > 1:
        rows = problem.batch * problem.seqlen_q * problem.num_heads
        partial_bytes = 2 * parts * rows * (problem.head_dim_v + 2) * 4
        merge = c.merge + c.merge_part * parts + partial_bytes / bandwidth
    return Cost(programs, slots, parts, per, seconds + merge, merge)


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
    decoding = problem.kind == "decode"
    if not kernels or problem.needs_grad or (decoding and kernels[0] is not candidates[0]):
        return None
    if _for_hopper(kernels[0]) and constants is H200:
        constants = H200_BESIDE_HOPPER
    rules = {kernel.name: hopper if _for_hopper(kernel) else constants for kernel in kernels}
    found = {kernel.name: _worth_weighing(kernel, problem, device) for kernel in kernels}
    first = kernels[0].name
    whole = cost(problem, device, found[first][0], rules[first])
    most = max(1, MOST_PARTIAL_BYTES // _bytes_a_part(problem))
    if problem.cut_tokens < problem.seqlen_q:
        parts = min(_least_parts(problem, found[first][0], rules[first]), most)
        if parts > 1 and isinstance(problem.place, Paged):
            why = f"waves: sequences of at most {count(problem.cut_tokens, 'token')} in up to "
            why += f"{count(parts, 'part')} of their keys, prompts in one"
            return Choice(first, replace(found[first][0], num_splits=parts), why)
    elif decoding or units(problem, found[first][0], rules[first]) < whole.slots:
        weighed = [
            (cost(problem, device, config, rules[name]), name, config)
            for name, shapes_of in found.items()
            for shape in shapes_of
            for config in _cut(problem, device, shape, most, rules[name])
            # in one part a call of `prefill` takes the host longer than the GPU can gain
            if name == first or config.num_splits > 1
        ]

        def rank(one: tuple[Cost, str, Config]) -> tuple[float, int, int]:
            return one[0].seconds, one[2].num_splits, one[2].tile_m

        best, name, config = min(weighed, key=rank)
        needed = best.parts > 1 and _least_parts(problem, config, rules[name]) > 1
        if needed or best.seconds < whole.seconds * (1 - rules[name].worth):
            return Choice(name, config, _why(problem, device, config, best, whole))
    if kernels[0] is not candidates[0]:
        return None
    why = f"waves: {count(whole.programs, 'program')} for {device.num_sms} SMs in one part, "
    return Choice(first, found[first][0], why + f"{whole.seconds * 1e6:.1f} us")


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
        config = choice.config if parts else replace(choice.config, num_splits=1)
        return replace(choice, config=config, why=f"as asked; {choice.why}")

    return choose_asked


def _packed(kernel: Kernel, packed: bool, problem: Problem, device: Device) -> Iterator[Config]:
    return (config for config in kernel.configs(problem, device) if config.pack_gqa == packed)


def _for_hopper(kernel: Kernel) -> bool:
    return kernel.name.startswith("hopper_")


def _worth_weighing(kernel: Kernel, problem: Problem, device: Device) -> list[Config]:
    """The kernel's shapes, each with the heads and programs that it would take first."""
    found = shapes(kernel, problem, device)
    likeness = found[0].pack_gqa, found[0].programs
    return [shape for shape in found if (shape.pack_gqa, shape.programs) == likeness]


def _bytes_a_part(problem: Problem) -> int:
    """Of partials."""
    rows = problem.batch * problem.cut_tokens * problem.num_heads
    return max(1, rows * (problem.head_dim_v + 2) * 4)


def _least_parts(problem: Problem, shape: Config, constants: Constants) -> int:
    """Of the longest sequence, where others may be short."""
    if problem.lengths == "host" or problem.batch == 1:
        return 1
    tile_bytes = shape.tile_n * (problem.head_dim + problem.head_dim_v) * problem.kv_element_bytes
    tiles = int(constants.longest_part // tile_bytes) or 1
    return min(MAX_SPLITS, ceil_div(num_tiles(problem, shape.tile_n), tiles))


def _cut(
    problem: Problem, device: Device, shape: Config, most: int, constants: Constants
) -> list[Config]:
    """A shape with numbers of parts to weigh: few, what fills up to two waves, as few as may be."""
    tiles = num_tiles(problem, shape.tile_n)
    slots = device.num_sms * constants.occupancy(problem, device, shape)
    a_wave = slots / max(1, units(problem, shape, constants))
    some = (round(a_wave * eighths / 8) for eighths in (2, 4, 6, 7, 8, 10, 12, 16))
    most = min(most, tiles, MAX_SPLITS)
    least = min(_least_parts(problem, shape, constants), most)
    parts = sorted({least, *range(1, 9), *some})
    return [replace(shape, num_splits=n) for n in parts if least <= n <= most]


def _why(problem: Problem, device: Device, config: Config, best: Cost, whole: Cost) -> str:
    queries = count(problem.seqlen_q, "query token")
    text = (
        f"waves: {queries} and {problem.visible_keys} keys; {count(best.programs, 'program')} for "
        f"{device.num_sms} SMs x {best.slots // device.num_sms}, each "
        f"{count(best.per, 'tile')} of {config.tile_n} keys, "
        f"{(best.seconds - best.merge) * 1e6:.1f} us"
    )
    if best.merge:
        text += f" + {best.merge * 1e6:.1f} us to merge; in one part {whole.seconds * 1e6:.1f} us"
    return text
