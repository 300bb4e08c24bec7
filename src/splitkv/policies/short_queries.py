"""A part of `waves`: how many parts the keys of `prefill` are cut into.

    seconds = start + sum over waves of tiles a part * tile  +  merge
    tile    = the slowest of: the chain of operations on one tile, the products of all programs of
              an SM through its tensor cores, their bytes through its port, the bytes of all
              running programs through the memory
    merge   = its launch + the partials, written and read; nothing with one part

A program holds a tile of rows. Where those of all sequences and KV heads fill the device there is
nothing to weigh: one part, in the kernel's first shape. Else few queries face many keys, and the
choice is the shape and number of parts of least seconds.

Sequences whose lengths only the device knows may be much shorter than planned for, all but one. So
no part is longer than `longest_part` bytes: also not of the single tokens beside prompts, whose own
keys stay whole (`Problem.cut_tokens`); that is done for pages, in which such batches come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitkv.device import Device, MiB
from splitkv.kv import Paged
from splitkv.plans import Choice, Config, Kernel
from splitkv.policies.shared import MAX_SPLITS, ceil_div, count, num_tiles, row_tiles, shapes
from splitkv.problem import Problem

KERNEL = "prefill"
MOST_PARTIAL_BYTES = 256 * MiB
REGISTERS_PER_SM = 65536


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


H200 = Constants()


@dataclass(frozen=True, slots=True)
class Cost:
    """What the model says of a config."""

    programs: int
    slots: int
    parts: int
    per: int
    seconds: float
    merge: float


def units(problem: Problem, config: Config) -> int:
    """Programs with one part, every sequence at its upper bound."""
    return problem.batch * problem.num_kv_heads * row_tiles(problem, config.tile_m)


def cost(problem: Problem, device: Device, config: Config, constants: Constants = H200) -> Cost:
    """The model's answer for a config, every sequence at its upper bound."""
    c, dims = constants, problem.head_dim + problem.head_dim_v
    tiles = num_tiles(problem, config.tile_n)
    per = ceil_div(tiles, config.num_splits)
    parts = ceil_div(tiles, per)
    programs = units(problem, config) * parts
    tile_bytes = config.tile_n * dims * problem.element_bytes
    half = problem.element_bytes == 2
    flops = 2 * config.tile_m * config.tile_n * dims / (c.sm_flops if half else c.sm_flops_fp32)
    load, score = config.tile_n * dims / config.num_warps, config.tile_m * config.tile_n
    chain = c.step + c.step_load * load + c.step_score * score / config.num_warps
    if isinstance(problem.place, Paged) and problem.place.page_size % config.tile_n:
        chain *= 1 + c.paged
    slots = device.num_sms * occupancy(problem, device, config)
    # the row tiles of a KV head read the same keys: the memory gives them once
    shared = tile_bytes / row_tiles(problem, config.tile_m)
    bandwidth = c.bandwidth_share * device.bandwidth

    def wave(running: int) -> float:
        on_one_sm = ceil_div(running, device.num_sms)
        port = on_one_sm * max(flops, tile_bytes / c.sm_bandwidth)
        return per * max(chain, port, running * shared / bandwidth)

    full, rest = divmod(programs, slots)
    seconds = c.start + full * wave(slots) + (wave(rest) if rest else 0.0)
    merge = 0.0
    if parts > 1:
        rows = problem.batch * problem.seqlen_q * problem.num_heads
        partial_bytes = 2 * parts * rows * (problem.head_dim_v + 2) * 4
        merge = c.merge + c.merge_part * parts + partial_bytes / bandwidth
    return Cost(programs, slots, parts, per, seconds + merge, merge)


def occupancy(problem: Problem, device: Device, config: Config) -> int:
    """Programs of a shape that an SM holds at once."""
    dims = problem.head_dim + problem.head_dim_v
    keys = config.num_stages * config.tile_n * dims
    smem = (keys + config.tile_m * problem.head_dim) * problem.element_bytes + 1024
    rows = config.tile_m * (problem.head_dim_v + 1.5 * config.tile_n)
    registers = min(255.0, 60 + (rows + 0.2 * config.tile_n * dims) / (32 * config.num_warps))
    by_registers = int(REGISTERS_PER_SM / (registers * 32 * config.num_warps))
    return max(1, min(device.smem_per_sm // smem, by_registers))


def choose(
    problem: Problem,
    device: Device,
    candidates: Sequence[Kernel],
    constants: Constants = H200,
) -> Choice | None:
    """The choice where `prefill` can cut the keys and is to do so, or is the first that can at all;
    else None."""
    kernel = next((kernel for kernel in candidates if kernel.name == KERNEL), None)
    decoding = problem.kind == "decode"
    if kernel is None or problem.needs_grad or (decoding and kernel is not candidates[0]):
        return None
    found = shapes(kernel, problem, device)
    whole = cost(problem, device, found[0], constants)
    most = max(1, MOST_PARTIAL_BYTES // _bytes_a_part(problem))
    if problem.cut_tokens < problem.seqlen_q:
        parts = min(_least_parts(problem, found[0], constants), most)
        if parts > 1 and isinstance(problem.place, Paged):
            why = f"waves: sequences of at most {count(problem.cut_tokens, 'token')} in up to "
            why += f"{count(parts, 'part')} of their keys, prompts in one"
            return Choice(kernel.name, replace(found[0], num_splits=parts), why)
    elif units(problem, found[0]) < whole.slots:
        weighed = [
            (cost(problem, device, config, constants), config)
            for shape in found
            for config in _cut(problem, device, shape, most, constants)
        ]
        best, config = min(weighed, key=lambda pair: (pair[0].seconds, pair[1].num_splits))
        needed = _least_parts(problem, config, constants) > 1
        if best.parts > 1 and (needed or best.seconds < whole.seconds * (1 - constants.worth)):
            return Choice(kernel.name, config, _why(problem, device, config, best, whole))
    if kernel is not candidates[0]:
        return None
    why = f"waves: {count(whole.programs, 'program')} for {device.num_sms} SMs in one part, "
    return Choice(kernel.name, found[0], why + f"{whole.seconds * 1e6:.1f} us")


def _bytes_a_part(problem: Problem) -> int:
    """Of partials."""
    rows = problem.batch * problem.cut_tokens * problem.num_heads
    return max(1, rows * (problem.head_dim_v + 2) * 4)


def _least_parts(problem: Problem, shape: Config, constants: Constants) -> int:
    """Of the longest sequence, where others may be short."""
    if problem.lengths == "host" or problem.batch == 1:
        return 1
    tile_bytes = shape.tile_n * (problem.head_dim + problem.head_dim_v) * problem.element_bytes
    tiles = int(constants.longest_part // tile_bytes) or 1
    return min(MAX_SPLITS, ceil_div(num_tiles(problem, shape.tile_n), tiles))


def _cut(
    problem: Problem, device: Device, shape: Config, most: int, constants: Constants
) -> list[Config]:
    """A shape with numbers of parts to weigh: few, what fills up to two waves, as few as may be."""
    tiles = num_tiles(problem, shape.tile_n)
    a_wave = device.num_sms * occupancy(problem, device, shape) / max(1, units(problem, shape))
    some = (round(a_wave * eighths / 8) for eighths in (2, 4, 6, 7, 8, 10, 12, 16))
    most = min(most, tiles, MAX_SPLITS)
    least = min(_least_parts(problem, shape, constants), most)
    parts = sorted({least, *range(1, 9), *some})
    return [replace(shape, num_splits=n) for n in parts if least <= n <= most]


def _why(problem: Problem, device: Device, config: Config, best: Cost, whole: Cost) -> str:
    queries = count(problem.seqlen_q, "query token")
    return (
        f"waves: {queries} and {problem.visible_keys} keys; {count(best.programs, 'program')} for "
        f"{device.num_sms} SMs x {best.slots // device.num_sms}, each "
        f"{count(best.per, 'tile')} of {config.tile_n} keys, "
        f"{(best.seconds - best.merge) * 1e6:.1f} us + {best.merge * 1e6:.1f} us to merge; in one "
        f"part {whole.seconds * 1e6:.1f} us"
    )
