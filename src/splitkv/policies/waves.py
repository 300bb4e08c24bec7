"""Our cost model, the default: waves of programs, tile by tile, and the merge of their partials.

    seconds = start + sum over waves of tiles a part * tile  +  merge
    tile    = the slowest of: the chain of operations on one tile, its bytes through the SM's
              port, the bytes of all running programs through the memory
    merge   = its launch + the partials; nothing with one part

A program holds one part of one sequence, KV head and tile of rows. A wave is as many programs as
the GPU holds at once (its slots). More parts shorten the waves until the merge costs more than
they save, and too few SMs cannot ask for what the memory can give. Counted are the keys that the
mask lets through, not the cache. The choice is the shape and number of splits of least seconds.

Sequences whose lengths only the device knows may be much shorter than planned for, all but one. So
no part may be longer than `longest_part` bytes, which one SM of an H200 reads in about 130 us;
where that would take more than two waves of programs, the device shares one wave out by the
lengths (`schedule="batch"`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from splitkv.device import Device, KiB, MiB
from splitkv.kv import Paged
from splitkv.plans import Choice, Config, Kernel
from splitkv.policies.shared import (
    MAX_SPLITS,
    Policy,
    ceil_div,
    count,
    max_splits,
    num_tiles,
    row_tiles,
    shapes,
    splits_keys,
)
from splitkv.problem import Problem


@dataclass(frozen=True, slots=True)
class Constants:
    """What a GPU and its Triton kernels cost, in seconds and bytes a second.

    The defaults were fitted to 1,411 times of 47 problems: bf16, batch 1 to 256, 128 to 131072
    keys, 8 to 64 query heads on 1 to 32 KV heads, head_dim 64, 128 and 256, contiguous and page
    16, each in three shapes and up to 8 numbers of splits (one H200, CUDA graph, buffers rotated
    past the L2, torch 2.11, Triton 3.6, 2026-11-21). Of the 94 choices 68 are among those times:
    in the mean 1.2 % slower than the best of their problem, at worst 7.4 %. The others lie between
    measured numbers of splits, or share programs out.

    start          launch, first address to first tile, epilogue; start_paged: more where a page
                   table has to be read first; start_byte: for each byte of a tile, until the first
                   is there
    latency        from asking for a tile to having it, shared by the tiles in flight
    bandwidth_share   of the data sheet's bandwidth; memory_latency: what bytes in flight are worth
    sm_bandwidth   what one SM takes in
    step           one tile, however small: two products and a softmax that wait for each other;
                   step_element: for each of tile_n * (head_dim + head_dim_v) elements a warp;
                   step_paged and step_paged_element: more with a page table
    merge          launching the combine; merge_part: for each part of a row; merge_row: for each
                   row and part of head_dim_v 128
    tail           of a last wave that is not full
    longest_part   most bytes of keys and values in one part, where lengths are the device's
    """

    start: float = 3.36e-6
    start_paged: float = 0.137e-6
    start_byte: float = 1.97e-11
    latency: float = 0.417e-6
    bandwidth_share: float = 0.92
    memory_latency: float = 1.95e-6
    sm_bandwidth: float = 42.4e9
    step: float = 0.271e-6
    step_element: float = 1.53e-10
    step_paged: float = 0.025e-6
    step_paged_element: float = 1.82e-10
    merge: float = 0.344e-6
    merge_part: float = 5.84e-9
    merge_row: float = 1.17e-9
    tail: float = 2.08e-6
    longest_part: float = 4.25 * MiB


H200 = Constants()
# The kernel for Hopper on the same GPU, fitted to 143 times of 23 such problems, calls apart from
# each other: of those times the model picks one 3 % behind the best in the mean, 12 % at worst. The
# shapes below were narrowed to what was fastest after that.
H200_HOPPER = Constants(
    start=2.3e-6,
    start_paged=0.142e-6,
    start_byte=1.44e-11,
    latency=0.413e-6,
    memory_latency=1.08e-6,
    sm_bandwidth=33e9,
    step=0.517e-6,
    step_element=0.945e-10,
    step_paged=0.024e-6,
    step_paged_element=0.925e-10,
    merge=0.386e-6,
    merge_part=4.72e-9,
    merge_row=1.31e-9,
    tail=1.29e-6,
)

# (tile_n, num_warps, num_stages) worth weighing: on the H200, over 31 problems, the best of these
# three was 0.6 % (contiguous, of 11 shapes) and 0.2 % (paged, of 14) behind the best in the mean,
# 4.2 % at worst.
CONTIGUOUS_SHAPES = ((64, 4, 2), (32, 4, 3), (128, 4, 2))
PAGED_SHAPES = ((32, 4, 2), (64, 4, 2), (16, 2, 2))
# Hopper: with a part or more for each SM without splitting, three programs an SM; else one.
HOPPER_SHAPES = ((128, 4, 2), (64, 4, 1))
HOPPER_FULL_SHAPES = ((64, 4, 2), (64, 4, 1))
HOPPER_PAGED_SHAPES = ((64, 4, 2), (64, 4, 1), (32, 4, 1))
# Contiguous and past so many bytes, 32-key tiles are 15 % slower in some allocations of the cache.
LARGE, LARGE_SHAPES = 256 * MiB, ((64, 4, 2), (128, 4, 2))

# What an SM holds: 64 Ki registers; shared memory, of which CUDA takes 1 KiB with each block and a
# kernel about 5 KiB for its rows. Registers a thread: a base, the rows' accumulator and q, and so
# many an element of a tile that the thread loads. ptxas reports for sm_90, 16 rows, head_dim 128:
# 96, 123, 175 at 32, 64, 128 keys (contiguous), 110, 178 at 32, 64 keys and 150 at 16 keys with 2
# warps (paged).
REGISTERS_PER_SM, SMEM_RESERVED = 65536, 6 * KiB
REGISTERS, REGISTERS_PAGED = (46, 0.41), (23, 1.04)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the model says of one config."""

    num_ctas: int
    slots: int
    tiles_per_split: int
    split_seconds: float
    merge_seconds: float

    @property
    def seconds(self) -> float:
        return self.split_seconds + self.merge_seconds

    @property
    def waves(self) -> int:
        return ceil_div(self.num_ctas, self.slots)


class Shape:
    """A tile shape on a device: what does not depend on the number of splits."""

    def __init__(
        self, problem: Problem, device: Device, config: Config, constants: Constants
    ) -> None:
        c, paged = constants, isinstance(problem.place, Paged)
        dims = problem.head_dim + problem.head_dim_v
        self.constants = c
        self.batch = problem.batch
        self.num_sms = device.num_sms
        self.tiles = num_tiles(problem, config.tile_n)
        self.tile_bytes = config.tile_n * dims * problem.kv_element_bytes
        self.head_tiles = problem.num_kv_heads * row_tiles(problem, config.tile_m)
        self.slots = device.num_sms * occupancy(problem, device, config)
        self.start = c.start + paged * c.start_paged + c.start_byte * self.tile_bytes
        a_warp = config.tile_n * dims / config.num_warps
        step = c.step + paged * c.step_paged
        step += (c.step_element + paged * c.step_paged_element) * a_warp
        self.chain = max(step, c.latency / config.num_stages)
        self.port = self.tile_bytes / c.sm_bandwidth
        # The row tiles of a KV head read the same keys: the memory gives them once, then the L2.
        self.shared_reads = problem.num_kv_heads / self.head_tiles
        self.peak = c.bandwidth_share * device.bandwidth
        self.in_flight = config.num_stages * self.tile_bytes / c.memory_latency
        rows = problem.num_heads * problem.seqlen_q * problem.batch
        self.merge_part = c.merge_part + c.merge_row * rows * problem.head_dim_v / 128

    def cost(self, per: int, merged: bool) -> Cost:
        """With every sequence cut into parts of `per` tiles, the last one shorter."""
        parts = ceil_div(self.tiles, per)
        num_ctas = self.batch * parts * self.head_tiles
        full, rest = divmod(num_ctas, self.slots)
        seconds = self.start + full * self.wave(self.slots, per)
        if rest:
            seconds += self.wave(rest, per) + (self.constants.tail if full else 0.0)
        merge = self.constants.merge + self.merge_part * parts if merged else 0.0
        return Cost(num_ctas, self.slots, per, seconds, merge)

    def wave(self, ctas: int, per: int) -> float:
        """Seconds of a wave of so many programs."""
        on_one_sm = ceil_div(ctas, self.num_sms)
        bandwidth = min(self.peak, ctas * self.in_flight)
        memory = ctas * self.tile_bytes * self.shared_reads / bandwidth
        return max(self.constants.latency, per * max(self.chain, on_one_sm * self.port, memory))


def occupancy(problem: Problem, device: Device, config: Config) -> int:
    """Programs of a shape that an SM holds at once, its pipeline full of tiles; a CPU core: one."""
    if device.kind == "cpu":
        return 1
    elements = config.tile_n * (problem.head_dim + problem.head_dim_v)
    smem = config.num_stages * elements * problem.kv_element_bytes + SMEM_RESERVED
    base, each = REGISTERS_PAGED if isinstance(problem.place, Paged) else REGISTERS
    rows = config.tile_m * (problem.head_dim_v + problem.head_dim / 2)
    registers = min(255.0, base + (rows + each * elements) / (32 * config.num_warps))
    by_registers = int(REGISTERS_PER_SM / (registers * 32 * config.num_warps))
    return max(1, min(device.smem_per_sm // smem, by_registers))


def cost(problem: Problem, device: Device, config: Config, constants: Constants = H200) -> Cost:
    """The model's answer for one config, every sequence at its upper bound."""
    shape = Shape(problem, device, config, constants)
    if config.schedule == "batch":
        full_parts = config.programs - problem.batch  # the rest is there for rounding
        return shape.cost(max(1, shape.tiles * problem.batch // full_parts), merged=True)
    if config.schedule == "fixed":
        per = config.split_size // config.tile_n
    else:
        per = ceil_div(shape.tiles, config.num_splits)
    return shape.cost(per, merged=config.num_splits > 1)


def with_constants(constants: Constants, hopper: Constants | None = None) -> Policy:
    """The policy with other constants, say fitted to another GPU; hopper: of the kernel for it."""

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        for kernel in candidates:
            found = shapes(kernel, problem, device)
            if not splits_keys(problem, found):
                return Choice(kernel.name, found[0], f"waves: {kernel.name} has no splits to weigh")
            own = constants_of(kernel, constants, hopper)
            best, config = min(
                (
                    _cheapest(problem, device, found, config, own)
                    for config in _worth(problem, device, kernel, found)
                ),
                key=lambda pair: (pair[0].seconds, pair[1].num_splits),
            )
            if config.schedule in kernel.schedules:
                break
        else:
            raise AssertionError(f"no kernel of {candidates} has a schedule for {problem}")
        return Choice(kernel.name, config, _why(problem, device, config, best, own))

    return choose


def constants_of(
    kernel: Kernel, constants: Constants = H200, hopper: Constants | None = None
) -> Constants:
    """The constants that a kernel goes by."""
    if kernel.name != "hopper_decode_split":
        return constants
    return hopper or (H200_HOPPER if constants is H200 else constants)


def _worth(
    problem: Problem, device: Device, kernel: Kernel, found: Sequence[Config]
) -> list[Config]:
    """The shapes worth weighing; all, where none of those is legal."""
    paged = isinstance(problem.place, Paged)
    if kernel.name == "hopper_decode_split":
        wanted = _worth_on_hopper(problem, device, found)
    elif paged:
        wanted = PAGED_SHAPES
    else:
        wanted = LARGE_SHAPES if problem.kv_bytes > LARGE else CONTIGUOUS_SHAPES
    worth = [c for c in found if (c.tile_n, c.num_warps, c.num_stages) in wanted]
    # One slot, and nothing is on its way while a tile is worked on: for parts of one tile.
    units = problem.batch * problem.num_kv_heads
    in_a_wave = [
        c
        for c in worth
        if c.num_stages > 1
        or units * num_tiles(problem, c.tile_n) <= device.num_sms * occupancy(problem, device, c)
    ]
    return in_a_wave or worth or list(found)


def _worth_on_hopper(
    problem: Problem, device: Device, found: Sequence[Config]
) -> Sequence[tuple[int, int, int]]:
    if isinstance(problem.place, Paged):
        return HOPPER_PAGED_SHAPES
    full = problem.batch * problem.num_kv_heads >= device.num_sms
    widest = max(c.tile_n for c in found)
    return HOPPER_FULL_SHAPES if full or widest < 128 else HOPPER_SHAPES


def _splits_worth(tiles: int, least: int, most: int, a_wave: float) -> Iterator[int]:
    """Numbers of splits to weigh: few, those of few tiles each, and what fills up to four waves."""
    eighths = (round(a_wave * k / 8) for k in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32))
    short = (ceil_div(tiles, per) for per in (1, 2, 3, 4, 6, 8))
    for splits in sorted({least, *range(1, 17), 32, 64, 128, most, *short, *eighths}):
        if least <= splits <= most:
            yield splits


def _cheapest(
    problem: Problem,
    device: Device,
    found: Sequence[Config],
    config: Config,
    constants: Constants,
) -> tuple[Cost, Config]:
    """A tile shape with its best number of splits, or of programs."""
    shape = Shape(problem, device, config, constants)
    most = max_splits(problem, found, config)
    a_wave = shape.slots / (shape.batch * shape.head_tiles)
    least = 1
    if problem.lengths == "device" and problem.batch > 1:
        least = min(
            most, ceil_div(shape.tiles, int(constants.longest_part // shape.tile_bytes) or 1)
        )
    best, splits = min(
        (
            (shape.cost(ceil_div(shape.tiles, splits), merged=splits > 1), splits)
            for splits in _splits_worth(shape.tiles, least, most, a_wave)
            if config.num_stages > 1 or splits == most
        ),
        key=lambda pair: (pair[0].seconds, pair[1]),
    )
    if least == 1 or least <= 2 * a_wave:
        return best, replace(config, num_splits=splits)
    # Twice the batch leaves several parts to a long sequence beside many short ones.
    full_parts = max(shape.slots // shape.head_tiles, 2 * shape.batch)
    full_parts = min(full_parts, shape.batch * shape.tiles, MAX_SPLITS - 1)
    shared = replace(
        config,
        num_splits=min(most, full_parts + 1),
        schedule="batch",
        programs=shape.batch + full_parts,
    )
    return cost(problem, device, shared, constants), shared


def _why(problem: Problem, device: Device, config: Config, best: Cost, constants: Constants) -> str:
    keys = f"{problem.seqlen_k}"
    if problem.visible_keys < problem.seqlen_k:
        keys = f"{problem.visible_keys} visible of {keys}"
    text = (
        f"waves: {keys} keys; {count(best.num_ctas, 'program')} for {device.num_sms} SMs x "
        f"{best.slots // device.num_sms}, {count(best.waves, 'wave')} of "
        f"{count(best.tiles_per_split, 'tile')} of {config.tile_n} keys, "
        f"{best.split_seconds * 1e6:.1f} us"
    )
    if best.merge_seconds:
        whole = replace(config, num_splits=1, schedule="even", programs=0)
        unsplit = cost(problem, device, whole, constants)
        text += f" + {best.merge_seconds * 1e6:.1f} us to merge"
        text += f"; in one split {unsplit.seconds * 1e6:.1f} us"
    return text


choose = with_constants(H200)
