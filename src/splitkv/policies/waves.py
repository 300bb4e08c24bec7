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
where that would take more than a wave of programs, the device shares one out by the lengths
(`schedule="batch"`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from splitkv.device import Device, KiB, MiB
from splitkv.kv import AS_IS, Paged
from splitkv.plans import Choice, Config, Kernel
from splitkv.policies import short_queries
from splitkv.policies.shared import (
    MAX_SPLITS,
    WHOLE_SEQUENCES,
    Policy,
    ceil_div,
    clusters,
    count,
    even_splits,
    max_splits,
    num_tiles,
    row_tiles,
    shapes,
    splits_keys,
)
from splitkv.problem import Problem

# (tile_n, num_warps, num_stages) worth weighing: nearly always one of these was the fastest or
# within 2 % of it. Of those that the model cannot tell apart, which is within `CLOSE`, the first.
SHAPES = ((64, 4, 2), (32, 4, 2), (128, 4, 2), (32, 4, 3))
HOPPER_SHAPES = ((64, 4, 1), (128, 4, 2), (64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 4, 1))
HOPPER_PAGED_SHAPES = ((64, 4, 1), (64, 4, 2), (64, 4, 3), (32, 4, 3), (32, 4, 1))
HOPPER_GATHERED_SHAPES = ((64, 4, 1), (64, 4, 2), (128, 4, 2), (64, 4, 3))
CLOSE = 1.02
HOPPER_DECODE = "hopper_decode_split"
# A cluster of four or eight needs as many places in one part of the GPU: with 256 programs for 264
# places some waited for a second wave, 17.9 us beside 13.5, and so they did with 256 for 396: 28.2
# us for 64 sequences of 4096 keys in int8, beside 23.2 merged by a kernel where 8 x 8 are as many.
# Pairs did not, with 128 for 132. So of the places, up to two an SM, this share.
ROOM_FOR_CLUSTERS = 0.75

# More packed rows, where the kernel for Hopper does not take them: of 25 such problems with more
# bytes of keys and values, `prefill` was faster on 16, by up to half, and level on one.
MANY_ROWS, LARGE = 32, 16 * MiB
# Tiles of so many rows of the kernel for Hopper are wide: multiplied by wgmma. For 17 to 32 rows it
# has both, and wide ones are taken from so many bytes of keys and values on: 36.5 us beside 37.8 by
# mma at 134 MB, 41.7 beside 47.0 in pages of 16.
WIDE, LARGE_OF_WIDE = 64, 16 * MiB
# In pages smaller than a tile a wide one takes 2 copies a page for keys, as for values, in 16 bits:
# of 64 rows at 134 MB in pages of 16 `hopper_prefill` took 42.7 us, and that 44.2. Of 48 rows of
# half int8 at 67 MB `hopper_prefill_quantised` took 24.5 to 29.1, and that 28.6 to 30.7.
WIDE_PAGES = 64
# Parts of wide tiles are clusters of two at most: of four and eight, which send each other 32 KiB a
# program, 64 rows at 134 MB took 60.7 us beside 37.4, and at 8 MB 10.3 beside 9.1 by a merge.
WIDE_CLUSTER = 2
# Of quantised keys in pages that are no multiple of so many keys tiles are gathered row by row.
GATHERED_PAGES = 64

# What an SM holds: 64 Ki registers; shared memory, of which CUDA takes 1 KiB with each block and a
# kernel about 5 KiB for its rows.
REGISTERS_PER_SM, SMEM_RESERVED = 65536, 6 * KiB
# Registers a thread of the Triton kernel: a base, the rows' accumulator and q, and so many an
# element of a tile that the thread loads. ptxas reports for sm_90, 16 rows, head_dim 128: 96, 123,
# 175 at 32, 64, 128 keys (contiguous), 110, 178 at 32, 64 keys and 150 at 16 keys with 2 warps
# (paged).
REGISTERS, REGISTERS_PAGED = (46, 0.41), (23, 1.04)
# Of the kernel for Hopper, by head_dim, tile_m and tile_n.
HOPPER_REGISTERS = {
    **{(64, 16, 32): 80, (64, 16, 64): 128, (64, 16, 128): 128, (64, 32, 32): 150},
    **{(64, 32, 64): 166, (128, 16, 32): 120, (128, 16, 64): 128, (128, 16, 128): 168},
    **{(128, 32, 32): 208, (128, 32, 64): 240, (256, 16, 32): 200, (256, 16, 64): 240},
    **{(64, 64, 32): 88, (64, 64, 64): 120, (64, 64, 128): 168, (128, 64, 32): 126},
    **{(128, 64, 64): 168, (128, 64, 128): 240, (256, 64, 32): 208, (256, 64, 64): 240},
}

# More where quantised keys are gathered from small pages, the most with scales of each key.
HOPPER_GATHERED_REGISTERS = HOPPER_REGISTERS | {(128, 16, 128): 192}
HOPPER_GATHERED_SCALES_REGISTERS = HOPPER_REGISTERS | {(128, 16, 64): 144, (128, 16, 128): 200}


def many_rows(problem: Problem, kernel: Kernel) -> bool:
    """Whether the kernels of whole sequences are to be preferred to this one."""
    if problem.rows <= MANY_ROWS or problem.kv_bytes <= LARGE:
        return False
    small_pages = isinstance(problem.place, Paged) and problem.place.page_size % WIDE_PAGES > 0
    half = problem.codec.name == "int8" and problem.products != "widened"
    return kernel.name != HOPPER_DECODE or small_pages or half


def registers(problem: Problem, config: Config) -> float:
    """Of a thread of the Triton kernel."""
    elements = config.tile_n * (problem.head_dim + problem.head_dim_v)
    base, each = REGISTERS_PAGED if isinstance(problem.place, Paged) else REGISTERS
    rows = config.tile_m * (problem.head_dim_v + problem.head_dim / 2)
    return min(255.0, base + (rows + each * elements) / (32 * config.num_warps))


def hopper_registers(problem: Problem, config: Config) -> float:
    """Of a thread of the kernel for Hopper."""
    key = max(problem.head_dim, problem.head_dim_v), config.tile_m, config.tile_n
    table = HOPPER_REGISTERS
    if gathered(problem, config):
        table = HOPPER_GATHERED_REGISTERS
        if problem.codec.granularity == "token":
            table = HOPPER_GATHERED_SCALES_REGISTERS
    return table.get(key, 255.0)


def gathered(problem: Problem, config: Config) -> bool:
    """Whether the kernel for Hopper has keys copied row by row by all threads, not by TMA."""
    small = isinstance(problem.place, Paged) and problem.place.page_size % GATHERED_PAGES > 0
    return small and problem.codec != AS_IS and config.tile_m < WIDE


@dataclass(frozen=True, slots=True)
class Constants:
    """What a GPU and a kernel cost, in seconds and bytes a second.

    The defaults are the Triton kernel's, fitted to the times that `splitkv tune` took of 485
    problems: bf16, batch 1 to 256, 128 to 512 Ki keys, 1 to 32 KV heads of 1 to 16 query heads,
    head_dim 64, 128 and 256, contiguous and pages of 1, 16 and 64 keys (one H200, calls apart from
    each other, buffers rotated past the L2, torch 2.11, Triton 3.6, 2026-11-21); 16 rows a
    program, up to 4 warps. Of those problems' plans the model picks one 3 % behind the best in the
    mean, in one of ten 8 %.

    start          launch, first address to first tile, epilogue; start_paged: more where a page
                   table has to be read first; start_byte: for each byte of a tile, until the first
                   is there
    latency        from asking for a tile to having it: a slot of the pipeline is busy that long and
                   while the tile is worked on, once more tiles are wanted than there are slots
    bandwidth_share   of the data sheet's bandwidth, and paged_share of it where paged;
                   memory_latency: what bytes in flight are worth
    sm_bandwidth   what one SM takes in
    uneven         of the time that an SM with one more program than others would need alone: what
                   the others cannot take off it
    step           one tile, however small: two products and a softmax that wait for each other;
                   step_element: for each of tile_n * (head_dim + head_dim_v) elements a warp;
                   step_paged and step_paged_element: more with a page table
    step_copy      asking for what of a tile lies in one page; port_copy: taking it in; where it is
                   gathered row by row instead, step_rows: for all of them; sm_rows: what one SM
                   takes in
    wide_step      of tiles multiplied by wgmma, 0: as the others; wide_key: for each key, as their
                   scores take as long whatever head_dim is; wide_element: for each element a warp,
                   wide_widening: more for one of 8 bits; wide_copy: asking for 128 bytes of every
                   key in one page; wide_port: what an SM takes to each element of 8 bits, however
                   many programs it holds
    wave           from one wave of programs to the next; tail: of a last one that is not full
    merge          launching the combine; merge_part: for each part of a row; merge_row: for each
                   row and part of head_dim_v 128
    cluster        merging in a cluster instead; cluster_part: for each of its programs; crowded: of
                   the time that memory takes, what clusters of four and eight lose of it
    longest_part   most bytes of keys and values in one part, where lengths are the device's
    registers      (problem, config) -> those of a thread
    shapes         (tile_n, num_warps, num_stages) that are worth weighing, by preference;
                   shapes_in_pages: where 128 keys lie in several pages; shapes_gathered: where
                   they are copied row by row
    """

    start: float = 2.54e-6
    start_paged: float = 1.3e-6
    start_byte: float = 1.98e-11
    latency: float = 0.136e-6
    bandwidth_share: float = 0.908
    paged_share: float = 0.871
    memory_latency: float = 0.4e-6
    sm_bandwidth: float = 41.8e9
    uneven: float = 0.326
    step: float = 0.749e-6
    step_element: float = 0.725e-10
    step_paged: float = 0.003e-6
    step_paged_element: float = 0.362e-10
    step_copy: float = 0.0
    port_copy: float = 0.0
    step_rows: float = 0.0
    sm_rows: float = 41.8e9
    wide_step: float = 0.0
    wide_key: float = 0.0
    wide_element: float = 0.0
    wide_widening: float = 0.0
    wide_copy: float = 0.0
    wide_port: float = 0.0
    wave: float = 1.14e-6
    tail: float = 0.033e-6
    merge: float = 0.726e-6
    merge_part: float = 1.23e-8
    merge_row: float = 0.555e-9
    cluster: float = 0.55e-6
    cluster_part: float = 0.04e-6
    crowded: float = 0.05
    longest_part: float = 4.25 * MiB
    registers: Callable[[Problem, Config], float] = registers
    shapes: tuple[tuple[int, int, int], ...] = SHAPES
    shapes_in_pages: tuple[tuple[int, int, int], ...] = SHAPES
    shapes_gathered: tuple[tuple[int, int, int], ...] = SHAPES


H200 = Constants()
# The kernel for Hopper, fitted to its times in the same run.
H200_HOPPER = Constants(
    start=2.71e-6,
    start_paged=0.456e-6,
    start_byte=0.529e-11,
    latency=0.316e-6,
    bandwidth_share=0.895,
    paged_share=0.873,
    memory_latency=0.4e-6,
    sm_bandwidth=67.3e9,
    uneven=0.108,
    step=0.597e-6,
    step_element=0.488e-10,
    step_paged=0.002e-6,
    step_paged_element=0.008e-10,
    step_copy=33.8e-9,
    port_copy=26.9e-9,
    step_rows=0.29e-6,
    sm_rows=31.5e9,
    wide_step=0.24e-6,
    wide_key=7.5e-9,
    wide_element=0.28e-10,
    wide_widening=0.4e-10,
    wide_copy=44e-9,
    wide_port=3.7e-11,
    wave=0.274e-6,
    tail=0.144e-6,
    merge=1.02e-6,
    merge_part=0.594e-8,
    merge_row=0.454e-9,
    registers=hopper_registers,
    shapes=HOPPER_SHAPES,
    shapes_in_pages=HOPPER_PAGED_SHAPES,
    shapes_gathered=HOPPER_GATHERED_SHAPES,
)


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
        self.slots = device.num_sms * occupancy(problem, device, config, c)
        self.start = c.start + paged * c.start_paged + c.start_byte * self.tile_bytes
        a_warp = config.tile_n * dims / config.num_warps
        copies = 2 * pages_of_tile(problem, config.tile_n)
        step = c.step + paged * c.step_paged + c.step_copy * copies
        step += (c.step_element + paged * c.step_paged_element) * a_warp
        self.port = self.tile_bytes / c.sm_bandwidth + c.port_copy * copies
        if gathered(problem, config):
            step += c.step_rows - c.step_copy * copies
            self.port = self.tile_bytes / c.sm_rows
        if config.tile_m >= WIDE and c.wide_step:
            panels = pages_of_tile(problem, config.tile_n) * dims * problem.kv_element_bytes / 128
            step = c.wide_step + c.wide_key * config.tile_n + c.wide_copy * paged * panels
            step += c.wide_element * a_warp
            if problem.codec != AS_IS:
                step += c.wide_widening * a_warp
                self.port = max(self.port, c.wide_port * config.tile_n * dims)
        self.step, self.num_stages = step, config.num_stages
        # The row tiles of a KV head read the same keys: the memory gives them once, then the L2.
        self.shared_reads = problem.num_kv_heads / self.head_tiles
        self.peak = (c.paged_share if paged else c.bandwidth_share) * device.bandwidth
        self.in_flight = config.num_stages * self.tile_bytes / c.memory_latency
        rows = problem.num_heads * problem.seqlen_q * problem.batch
        self.merge_part = c.merge_part + c.merge_row * rows * problem.head_dim_v / 128

    def cut(self, config: Config) -> Cost:
        """As a config of this shape cuts the keys."""
        if config.schedule == "batch":
            return self.shared_out(config.programs - self.batch)  # the rest is there for rounding
        if config.schedule == "fixed":
            per = config.split_size // config.tile_n
        else:
            per = ceil_div(self.tiles, config.num_splits)
        if config.merge == "cluster":
            programs = self.batch * config.num_splits * self.head_tiles
            return self.cost_of(programs, per, config.num_splits, "cluster")
        return self.cost(per, merged=config.num_splits > 1)

    def cost(self, per: int, merged: bool) -> Cost:
        """With every sequence cut into parts of `per` tiles, the last one shorter."""
        parts, merge = ceil_div(self.tiles, per), "combine" if merged else None
        return self.cost_of(self.batch * parts * self.head_tiles, per, parts, merge)

    def shared_out(self, full_parts: int) -> Cost:
        """With the batch cut into so many parts and what rounding adds, half a part a sequence."""
        per = max(1, ceil_div(self.tiles * self.batch, full_parts))
        num_ctas = (full_parts + self.batch // 2) * self.head_tiles
        return self.cost_of(num_ctas, per, ceil_div(self.tiles, per), "combine")

    def cost_of(self, num_ctas: int, per: int, parts: int, merge: str | None) -> Cost:
        """Of programs of `per` tiles, and merging so many parts a row, in one of two ways."""
        full, rest = divmod(num_ctas, self.slots)
        c, waves = self.constants, full + (rest > 0)
        seconds = self.start + full * self.wave(self.slots, per) + max(0, waves - 1) * c.wave
        if rest:
            seconds += self.wave(rest, per) + (c.tail if full else 0.0)
        merging = 0.0
        if merge == "cluster":
            merging = c.cluster + c.cluster_part * parts
            if parts > 2:
                units = self.batch * self.head_tiles * self.shared_reads
                merging += c.crowded * units * self.tiles * self.tile_bytes / self.peak
        elif merge:
            merging = c.merge + self.merge_part * parts
        return Cost(num_ctas, self.slots, per, seconds, merging)

    def wave(self, ctas: int, per: int) -> float:
        """Seconds of a wave of so many programs."""
        on_one_sm = ceil_div(ctas, self.num_sms)
        felt = ctas + self.constants.uneven * (on_one_sm * self.num_sms - ctas)
        bandwidth = min(self.peak, felt * self.in_flight)
        memory = felt * self.tile_bytes * self.shared_reads / bandwidth
        chain, latency = self.step, self.constants.latency
        if per > self.num_stages:  # else all its tiles are asked for at the start
            chain = max(chain, (chain + latency) / self.num_stages)
        return max(latency, per * max(chain, on_one_sm * self.port, memory))


def pages_of_tile(problem: Problem, tile_n: int) -> int:
    """Pages that a tile lies in; contiguous: one."""
    place = problem.place
    return ceil_div(tile_n, place.page_size) if isinstance(place, Paged) else 1


def occupancy(problem: Problem, device: Device, config: Config, constants: Constants) -> int:
    """Programs of a shape that an SM holds at once, its pipeline full of tiles; a CPU core: one."""
    if device.kind == "cpu":
        return 1
    elements = config.tile_n * (problem.head_dim + problem.head_dim_v)
    smem = config.num_stages * elements * problem.kv_element_bytes + SMEM_RESERVED
    if config.tile_m >= WIDE:  # q, and where values and, but for half int8, keys are widened to
        half = problem.codec.name == "int8" and problem.products != "widened"
        smem += (1 if half else 2) * config.tile_m * problem.head_dim
        if problem.codec != AS_IS:
            smem += 2 * config.tile_n * problem.head_dim_v if half else 2 * elements
    if config.merge == "cluster":  # each has a share of all parts
        smem += 4 * min(config.tile_m, problem.rows) * (problem.head_dim_v + 2 * config.num_splits)
    a_block = constants.registers(problem, config) * 32 * config.num_warps
    return max(1, min(device.smem_per_sm // smem, int(REGISTERS_PER_SM / a_block)))


def cost(problem: Problem, device: Device, config: Config, constants: Constants = H200) -> Cost:
    """The model's answer for one config, every sequence at its upper bound."""
    return Shape(problem, device, config, constants).cut(config)


def with_constants(constants: Constants, hopper: Constants | None = None) -> Policy:
    """The policy with other constants, say fitted to another GPU; hopper: of the kernel for it."""

    def choose(problem: Problem, device: Device, candidates: Sequence[Kernel]) -> Choice:
        decoding = problem.kind == "decode"
        if decoding and many_rows(problem, candidates[0]):
            candidates = sorted(candidates, key=lambda k: k.name not in WHOLE_SEQUENCES)
        cut = short_queries.choose(problem, device, candidates)
        if cut is not None:
            return cut
        kernel = candidates[0]
        found = of_rows(problem, kernel, shapes(kernel, problem, device))
        if not splits_keys(problem, found):
            return Choice(kernel.name, found[0], f"waves: {kernel.name} has no splits to weigh")
        own = constants_of(kernel, constants, hopper)
        weighed, together = [], in_clusters(kernel, problem, device, own)
        for shape in _worth(problem, device, found, own):
            weighed.append(_cheapest(problem, device, found, shape, own))
            weighed += [(cost(problem, device, c, own), c) for c in together if c.shape == shape]
        least = min(cost.seconds for cost, _ in weighed)
        best, config = next(pair for pair in weighed if pair[0].seconds <= least * CLOSE)
        return Choice(kernel.name, config, _why(problem, device, config, best, own))

    return choose


def of_rows(problem: Problem, kernel: Kernel, found: Sequence[Config]) -> list[Config]:
    """Those of a kernel's shapes with the TILE_M that is best for the problem; only that for decode
    on Hopper has others than its first."""
    if kernel.name != HOPPER_DECODE:
        return list(found)
    tiles = sorted({shape.tile_m for shape in found})
    large = problem.kv_bytes > LARGE_OF_WIDE and problem.codec == AS_IS
    wanted = tiles[-1] if tiles[0] >= WIDE or large else tiles[0]
    return [shape for shape in found if shape.tile_m == wanted]


def constants_of(
    kernel: Kernel, constants: Constants = H200, hopper: Constants | None = None
) -> Constants:
    """The constants that a kernel goes by."""
    if kernel.name != HOPPER_DECODE:
        return constants
    return hopper or (H200_HOPPER if constants is H200 else constants)


def _worth(
    problem: Problem, device: Device, found: Sequence[Config], constants: Constants
) -> list[Config]:
    """The shapes worth weighing, in order of preference; all, where none of those is legal."""
    in_pages = isinstance(problem.place, Paged) and problem.place.page_size % 128 > 0
    wanted = constants.shapes_in_pages if in_pages else constants.shapes
    if gathered(problem, found[0]):
        wanted = constants.shapes_gathered
    by_shape = {(c.tile_n, c.num_warps, c.num_stages): c for c in reversed(found)}
    worth = [by_shape[shape] for shape in wanted if shape in by_shape]
    # One slot, and nothing is on its way while a tile is worked on: for parts of one tile.
    units = problem.batch * problem.num_kv_heads
    in_a_wave = [
        c
        for c in worth
        if c.num_stages > 1
        or units * num_tiles(problem, c.tile_n)
        <= device.num_sms * occupancy(problem, device, c, constants)
    ]
    return in_a_wave or worth or list(found)


def in_clusters(
    kernel: Kernel, problem: Problem, device: Device, constants: Constants
) -> list[Config]:
    """The configs whose parts are clusters that can all run at once, none of them too long."""
    found = []
    for config in clusters(kernel, problem, device):
        model, parts = Shape(problem, device, config, constants), config.num_splits
        units = problem.batch * model.head_tiles
        room: float = model.slots
        if parts > 2:
            room = min(model.slots, 2 * device.num_sms) * ROOM_FOR_CLUSTERS
        short = parts >= least_splits(problem, model, constants)
        in_time = parts == model.tiles or (parts < model.tiles and config.num_stages > 1)
        few = parts <= WIDE_CLUSTER or config.tile_m < WIDE
        if short and in_time and few and units * parts <= room:
            found.append(config)
    return found


def least_splits(problem: Problem, shape: Shape, constants: Constants) -> int:
    """So many that no part is too long where the lengths may differ."""
    if problem.lengths == "host" or problem.batch == 1:
        return 1
    return ceil_div(shape.tiles, int(constants.longest_part // shape.tile_bytes) or 1)


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
    least = min(most, least_splits(problem, shape, constants))
    # of no more programs than their longest part asks for: one more may not fit into a wave
    weighed = _splits_worth(shape.tiles, least, most, a_wave)
    worth = sorted({even_splits(shape.tiles, splits) for splits in weighed})
    best, splits = min(
        (
            (shape.cost(ceil_div(shape.tiles, splits), merged=splits > 1), splits)
            for splits in (worth if config.num_stages > 1 else worth[-1:])
        ),
        key=lambda pair: (pair[0].seconds, pair[1]),
    )
    if least == 1 or least <= a_wave:
        return best, replace(config, num_splits=splits)
    # A wave, with what rounding adds. Twice the batch leaves several parts to a long sequence.
    full_parts = max(shape.slots // shape.head_tiles - shape.batch // 2, 2 * shape.batch)
    full_parts = min(full_parts, shape.batch * shape.tiles, MAX_SPLITS)
    shared = replace(
        config,
        num_splits=min(most, full_parts),
        schedule="batch",
        programs=shape.batch + full_parts,
    )
    return shape.cut(shared), shared


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
        whole = replace(config.shape, schedule="even", programs=0)
        unsplit = cost(problem, device, whole, constants)
        how = "merge in clusters" if config.merge == "cluster" else "merge"
        text += f" + {best.merge_seconds * 1e6:.1f} us to {how}"
        text += f"; in one split {unsplit.seconds * 1e6:.1f} us"
    return text


choose = with_constants(H200)
