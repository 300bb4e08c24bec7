"""The cost model of the kernels for decode, by which `waves` and `tuned` decide.

    seconds = start + programs an SM * program + sum over waves of tiles a part * tile  +  merge
    tile    = slowest(the chain of operations on one tile, a turn of the ring of tiles in flight,
              what an SM multiplies for all its programs, the bytes of all running programs through
              the memory)
    merge   = its launch + the partials; nothing with one part

`slowest` is a soft maximum (`shared.slowest`): what takes nearly as long as the slowest is not
always hidden behind it. A program holds one part of one sequence, KV head and tile of rows. A wave
is as many programs as the GPU holds at once (its slots). Counted are the keys that the mask lets
through, not the cache.

A first plan asks for hundreds of costs. So a model is made in three steps, of a problem (`Batch`),
of a tile shape (`Shape`) and of a number of splits, each once; and what cannot be the least, by a
bound that is simple to know (`floor`, `least_seconds`), is not asked for. The model of the kernels
for whole sequences is made and asked alike: `short_queries.Queries`, `short_queries.RowsModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import attrgetter
from typing import NamedTuple

from splitkv.core.device import REGISTERS_PER_SM, Device, KiB, MiB
from splitkv.core.kv import AS_IS, Paged
from splitkv.core.plan import SCHEDULED, Config, Kernel
from splitkv.core.problem import Problem
from splitkv.core.tiles import WIDE, ceil_div
from splitkv.planner.policies import short_queries
from splitkv.planner.policies.shared import ROUNDED, WHOLE_SEQUENCES, TiledKeys, slowest
from splitkv.planner.policies.variants import gathers, has_producer_warp, may_copy_scales_in_bulk

# (tile_n, num_warps, num_stages) worth weighing: nearly always one of these was the fastest or
# hardly slower. Of those that the model cannot tell apart, which is within `CLOSE`, the first.
SHAPES = ((64, 4, 2), (32, 4, 2), (128, 4, 2), (32, 4, 3))
SHAPES_256 = ((64, 4, 2), (16, 2, 2), (32, 4, 2), (128, 4, 2), (32, 4, 3))
HOPPER_SHAPES = ((64, 4, 1), (128, 4, 2), (64, 4, 3), (64, 4, 2), (32, 4, 3), (32, 4, 1))
HOPPER_WIDENED_SHAPES = ((64, 4, 1), (128, 4, 1), (128, 4, 2), (128, 4, 3), (64, 4, 3), (64, 4, 2))
HOPPER_GATHERED_SHAPES = ((64, 4, 1), (128, 4, 1), (128, 4, 2), (64, 4, 2), (64, 4, 3))
HOPPER_APART_SHAPES = ((128, 4, 3), (64, 4, 3))  # of 8 bits, where a warp asks for small pages
HOPPER_SCALES_SHAPES = (*HOPPER_APART_SHAPES, (128, 4, 2))  # and another for a scale a key

# Where lengths differ: of the longest one's keys, what others have in the mean. So it is of a
# log-normal distribution with a median of 2 Ki keys and one sequence of 128 Ki.
OTHERS = 1 / 40
HOPPER_DECODE = "hopper_decode_split"
FEW_ROWS = 8  # of which the kernel for Hopper works out no more
# Tiles of a part until what works on them and what brings them no longer wait for each other.
BEGINNING = 8
# Of heads so wide, with so many packed rows, splits were timed that lose by drifting apart.
DRIFTING_DIM, DRIFTING_ROWS = 64, 8
SHARE_STEP = 256  # sequences in the time of `Constants.share`
# Of shared memory CUDA takes 1 KiB with each block and a kernel about 5 KiB for its rows.
SMEM_RESERVED = 6 * KiB
# Registers a thread of the Triton kernel: a base, the rows' accumulator and q, and so many an
# element of a tile that the thread loads: measurements/thresholds.md#the-cost-model-of-decode.
REGISTERS, REGISTERS_PAGED = (46, 0.41), (23, 1.04)
# Of the kernel for Hopper, by head_dim, tile_m and tile_n.
HOPPER_REGISTERS = {
    **{(64, 16, 32): 80, (64, 16, 64): 128, (64, 16, 128): 128, (64, 32, 32): 150},
    **{(64, 32, 64): 166, (128, 16, 32): 120, (128, 16, 64): 128, (128, 16, 128): 168},
    **{(128, 32, 32): 208, (128, 32, 64): 240, (256, 16, 32): 200, (256, 16, 64): 240},
    **{(64, 64, 32): 88, (64, 64, 64): 120, (64, 64, 128): 168, (128, 64, 32): 126},
    **{(128, 64, 64): 168, (128, 64, 128): 240, (256, 64, 32): 208, (256, 64, 64): 240},
}
# More with a scale a key, and where int8 is gathered from small pages; e4m3 takes what bf16 does.
HOPPER_SCALES_REGISTERS = HOPPER_REGISTERS | {(128, 16, 128): 200}
HOPPER_GATHERED_REGISTERS = HOPPER_REGISTERS | {(128, 16, 64): 152, (128, 16, 128): 192}


def registers(problem: Problem, config: Config) -> float:
    """Registers of a thread of the Triton kernel."""
    elements = config.tile_n * (problem.head_dim + problem.head_dim_v)
    base, each = REGISTERS_PAGED if isinstance(problem.place, Paged) else REGISTERS
    rows = config.tile_m * (problem.head_dim_v + problem.head_dim / 2)
    return min(255.0, base + (rows + each * elements) / (32 * config.num_warps))


def hopper_registers(problem: Problem, config: Config) -> float:
    """Registers of a thread of the kernel for Hopper."""
    key = max(problem.head_dim, problem.head_dim_v), config.tile_m, config.tile_n
    table = HOPPER_REGISTERS
    if problem.codec.name == "int8" and gathers(problem, config):
        table = HOPPER_GATHERED_REGISTERS
    elif problem.codec.granularity == "token":
        table = HOPPER_SCALES_REGISTERS
    return table.get(key, 255.0)


@dataclass(frozen=True, slots=True, eq=False)  # by identity, as a key of caches
class Constants:
    """Constants of a GPU and a kernel, in seconds, bytes and operations a second.

    The defaults are the Triton kernel's. Both are fitted to what `splitkv tune` and `splitkv
    regret` timed; what that was, and how far off they are:
    measurements/thresholds.md#the-cost-model-of-decode.

    start          launch, first address to first tile, epilogue; start_paged: more where a page
                   table has to be read first; start_byte: for each byte of a tile, until the first
                   is there
    program        for each program that an SM runs, whether together or one after another;
                   program_widening: more where elements of 8 bits are widened, of the SM that
                   runs most, as q's conversion is its own work; program_few: instead, of up to
                   `FEW_ROWS` rows; program_wide: of wide tiles whose elements are as they are, by
                   head_dim up to; tile_wide: for each of a part's first `BEGINNING` of these
    latency        from asking for a tile to having it: a slot of the ring is busy that long and
                   while the tile is worked on, once more tiles are wanted than there are slots
    bandwidth_share   of the data sheet's bandwidth, and paged_share of it where paged
    uneven         of the time that an SM with one more program than others would need alone: what
                   the others cannot take off it; uneven_paged: the same where paged
    step           one tile, however small: two products and a softmax that wait for each other;
                   step_element: for each of tile_n * (head_dim + head_dim_v) elements a warp and 16
                   rows, step_paged_element: for each of them where paged; step_few: of both, times
                   so much where elements of 8 bits are widened for few rows; step_scale: for each
                   key that has a scale; scale_bytes: what memory is as busy with;
                   step_scale_apart: instead of both, where warps ask for keys and scales;
                   step_scale_bulk, bulk_bytes: instead of both, where scales are copied in bulk;
                   bulk_latency: how much longer a slot is busy in long parts, for each KV head
    step_copy      asking for what of a tile lies in one page; where it is gathered row by row
                   instead, step_row: for each key, and row_more: for each of further tiles that are
                   asked for before the first is waited for
    sm_flops       what an SM multiplies, rows that only fill a tile included
    wide_step      of tiles multiplied by wgmma, 0: as the others; wide_key: for each key, as their
                   scores take as long whatever head_dim is; wide_widening: for each element of 8
                   bits a warp; wide_copy: asking for 128 bytes of every key in one page
    merge          launching the combine; merge_part: for each part of a row, besides its partial,
                   which is written and read; merge_shared: more for each element of the result
                   where parts are shared out over the batch and rows find theirs; two thirds of it
                   are from before `SHARED_TILES` of kernels/combine.py
    cluster        merging in a cluster instead; cluster_row: for each row and part of head_dim_v
                   128 that a program sends; pair_widening: less of two parts whose elements of 8
                   bits are widened; crowded: of the time that memory takes, what clusters
                   of four and eight lose of it
    in_flight      most bytes that an SM has on their way where 8 bits are widened: with more it is
                   slower; in_flight_apart: where a producer warp issues copies of small pages;
                   in_flight_scales: and with a scale a key; programs_apart: programs that it has
                   registers for there
    walk           by a schedule of the step: finding the first split, and q after it; walk_split:
                   for each split of a program; merge_slots: merging what several programs have;
                   share: finding shares in the call, for each `SHARE_STEP` sequences; walk_whole:
                   in the place of all of it where splits are whole sequences, and whole_split for
                   each of those. All of the kernel for Hopper, the greatest that were measured, as
                   they are to be a bound
    drift          of the time that memory takes, what splits of heads of `DRIFTING_DIM` lose
                   beside it in more than one wave, as neighbouring heads are no longer read at the
                   same time; drift_widened: of 8 bits; drift_apart: and where a warp asks for them
    append         launching `append` before the kernel, which writes few new tokens
    longest_part   most bytes of keys and values in one part, where lengths are the device's
    registers      (problem, config) -> those of a thread
    shapes         (tile_n, num_warps, num_stages) that are worth weighing, by preference;
                   shapes_256: of heads of more than 128 in pages; shapes_widened: of 8 bits;
                   shapes_gathered: where keys are copied row by row; shapes_apart: where a warp
                   asks for keys of 8 bits; shapes_scales: of which each has a scale
    """

    start: float = 1.68e-6
    start_paged: float = 0.637e-6
    start_byte: float = 5.05e-11
    program: float = 0.493e-6
    program_widening: float = 0.0
    program_few: float = 0.0
    program_wide: tuple[tuple[int, float], ...] = ()
    tile_wide: tuple[tuple[int, float], ...] = ()
    latency: float = 0.593e-6
    bandwidth_share: float = 0.927
    paged_share: float = 0.914
    uneven: float = 0.072
    uneven_paged: float = 0.413
    step: float = 0.509e-6
    step_element: float = 0.0
    step_few: float = 1.0
    step_paged_element: float = 4.3e-11
    step_scale: float = 0.0
    step_scale_apart: float = 0.0
    scale_bytes: float = 8.0
    step_scale_bulk: float = 0.0
    bulk_bytes: float = 8.0
    bulk_latency: float = 0.0
    step_copy: float = 0.0
    step_row: float = 0.0
    row_more: float = 0.0
    sm_flops: float = 2.27e12
    wide_step: float = 0.0
    wide_key: float = 0.0
    wide_widening: float = 0.0
    wide_copy: float = 0.0
    merge: float = 1.08e-6
    merge_part: float = 0.508e-8
    merge_shared: float = 7.7e-11
    cluster: float = 0.574e-6
    cluster_row: float = 0.367e-8
    pair_widening: float = 0.0
    crowded: float = 0.062
    in_flight: int = MiB  # more than an SM has room for
    in_flight_apart: int = MiB
    in_flight_scales: int = MiB
    programs_apart: int = 0
    walk: float = 1.6e-6
    walk_split: float = 0.15e-6
    walk_whole: float = 1.9e-6
    whole_split: float = 0.3e-6
    merge_slots: float = 1.3e-6
    share: float = 1.1e-6
    drift: float = 0.0
    drift_widened: float = 0.0
    drift_apart: float = 0.0
    append: float = 2.0e-6
    longest_part: float = 4.25 * MiB
    registers: Callable[[Problem, Config], float] = registers
    shapes: tuple[tuple[int, int, int], ...] = SHAPES
    shapes_256: tuple[tuple[int, int, int], ...] = SHAPES_256
    shapes_widened: tuple[tuple[int, int, int], ...] = SHAPES
    shapes_gathered: tuple[tuple[int, int, int], ...] = SHAPES
    shapes_apart: tuple[tuple[int, int, int], ...] = SHAPES
    shapes_scales: tuple[tuple[int, int, int], ...] = SHAPES


H200 = Constants()
# The kernel for Hopper, fitted to its times in the same runs.
H200_HOPPER = Constants(
    start=2.16e-6,
    start_paged=0.0,
    start_byte=1.14e-11,
    program=0.685e-6,
    program_widening=0.993e-6,
    program_few=0.1e-6,
    program_wide=((64, 0.0), (128, 0.6e-6), (256, 0.6e-6)),
    tile_wide=((64, 0.05e-6), (128, 0.0), (256, 0.55e-6)),
    latency=0.39e-6,
    bandwidth_share=0.98,
    paged_share=0.93,
    uneven=0.197,
    uneven_paged=0.048,
    step=0.348e-6,
    step_element=3.83e-11,
    step_few=0.85,
    step_paged_element=0.0,
    step_scale=0.5e-9,
    step_scale_apart=2e-9,
    scale_bytes=32.0,
    step_scale_bulk=0.25e-9,
    bulk_bytes=18.0,
    bulk_latency=0.06e-6,
    step_copy=52.5e-9,
    step_row=1.5e-9,
    row_more=7e-9,
    sm_flops=math.inf,
    wide_step=0.299e-6,
    wide_key=6e-9,
    wide_widening=1.12e-10,
    wide_copy=40e-9,
    merge=1.06e-6,
    merge_part=0.571e-8,
    pair_widening=0.65e-6,
    drift=0.04,
    drift_widened=0.06,
    drift_apart=0.14,
    in_flight=128 * KiB,
    in_flight_apart=96 * KiB,
    in_flight_scales=128 * KiB,
    programs_apart=3,
    registers=hopper_registers,
    shapes=HOPPER_SHAPES,
    shapes_256=HOPPER_SHAPES,
    shapes_widened=HOPPER_WIDENED_SHAPES,
    shapes_gathered=HOPPER_GATHERED_SHAPES,
    shapes_apart=HOPPER_APART_SHAPES,
    shapes_scales=HOPPER_SCALES_SHAPES,
)


class Cost(NamedTuple):
    """The cost that the model expects of one config."""

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


class Batch(TiledKeys):
    """The sequences of a problem on a device: what does not depend on the tile shape."""

    def __init__(self, problem: Problem, device: Device, constants: Constants) -> None:
        super().__init__(problem)
        c, self.device, self.constants = constants, device, constants
        paged = self.page_size > 0
        self.widened, self.scaled = problem.codec != AS_IS, problem.codec.granularity == "token"
        self.dims = problem.head_dim + problem.head_dim_v
        self.wider = max(problem.head_dim, problem.head_dim_v)
        self.element_bytes = problem.kv_element_bytes
        self.batch, self.rows = problem.batch, problem.rows
        self.units = problem.batch * problem.num_kv_heads
        self.peak = (c.paged_share if paged else c.bandwidth_share) * device.bandwidth
        all_rows = problem.num_heads * problem.seqlen_q * problem.batch
        self.moving = all_rows * self.dims * problem.element_bytes / self.peak  # q and the result
        self.start = c.start + paged * c.start_paged
        self.uneven = c.uneven_paged if paged else c.uneven
        partial_bytes = 2 * 4 * all_rows * (problem.head_dim_v + 2)  # written and read
        self.merge_part = c.merge_part + partial_bytes / self.peak
        self.merge_shared = c.merge_shared * all_rows * problem.head_dim_v
        self._shapes: dict[tuple[int, ...], Shape] = {}

    def shape(self, config: Config) -> Shape:
        """The tile shape of a config; made once where the way of cutting keys does not matter."""
        if self.widened or config.merge == "cluster":
            return Shape(self, config)
        tile = tile_of(config)
        found = self._shapes.get(tile)
        if found is None:
            found = self._shapes[tile] = Shape(self, config)
        return found


class Shape:
    """A tile shape on a device: what does not depend on the number of splits."""

    def __init__(self, batch: Batch, config: Config) -> None:
        c, problem, tile_m, tile_n = batch.constants, batch.problem, config.tile_m, config.tile_n
        elements, num_stages = tile_n * batch.dims, config.num_stages
        paged, widened = batch.page_size > 0, batch.widened
        self.constants, self.batch, self.widened = c, batch.batch, widened
        self.num_sms, self.num_stages = batch.device.num_sms, num_stages
        self.tiles, self.peak, self.uneven = batch.tiles(tile_n), batch.peak, batch.uneven
        self.tile_bytes = elements * batch.element_bytes
        self.read_bytes: float = self.tile_bytes
        apart = bulk = gathered = False
        if widened:
            apart = widened_apart(problem, config, c)
            bulk = may_copy_scales_in_bulk(problem, config)
            gathered = gathers(problem, config)
        if batch.scaled:
            self.tile_bytes += 8 * tile_n
            more = 0.0 if apart else (c.bulk_bytes if bulk else c.scale_bytes) - 8
            self.read_bytes = self.tile_bytes + tile_n * more
        row_tiles = max(1, ceil_div(batch.rows, tile_m))
        self.head_tiles = problem.num_kv_heads * row_tiles
        self.slots = self.num_sms * held_by_sm(batch, config, apart)
        self.program = c.program / self.num_sms
        few = widened and batch.rows <= FEW_ROWS
        self.program_most = (c.program_few if few else c.program_widening) * widened
        self.tile_most = self.asking = 0.0
        if tile_m >= WIDE and not widened:
            self.program_most += _by_dim(c.program_wide, batch.wider)
            self.tile_most = _by_dim(c.tile_wide, batch.wider)
        self.start = batch.start + c.start_byte * self.tile_bytes + batch.moving
        a_warp = elements / config.num_warps
        pages = ceil_div(tile_n, batch.page_size) if paged else 1
        self.alone = 2 * tile_m * elements / c.sm_flops
        if tile_m >= WIDE and c.wide_step:
            panels = pages * batch.dims * batch.element_bytes / 128
            step = c.wide_step + c.wide_key * tile_n + c.wide_copy * paged * panels
            step += c.wide_widening * a_warp * widened
        else:
            step = c.step + c.step_element * a_warp * max(1, tile_m // 16)
            step *= c.step_few if few else 1.0
            step += c.step_paged_element * paged * a_warp
            a_scale = c.step_scale_bulk if bulk else c.step_scale
            step += (c.step_scale_apart if apart else a_scale) * batch.scaled * tile_n
            if gathered:
                step += c.step_row * tile_n
                self.asking = c.row_more * tile_n
            elif not apart:
                step += c.step_copy * 2 * pages
        self.step, self.turn = step, (step + c.latency) / num_stages
        self.late = bulk * c.bulk_latency * problem.num_kv_heads / num_stages
        # The row tiles of a KV head read the same keys: the memory gives them once, then the L2.
        self.shared_reads = problem.num_kv_heads / self.head_tiles
        self.merge_part, self.merge_shared = batch.merge_part, batch.merge_shared
        self.drift = 0.0
        timed = batch.wider == DRIFTING_DIM and batch.rows == DRIFTING_ROWS
        if problem.num_kv_heads > 1 and timed:
            of_8_bits = c.drift_apart if apart else c.drift_widened
            self.drift = of_8_bits if widened else c.drift
        self.cluster_part = c.cluster_row * (min(tile_m, batch.rows) * problem.head_dim_v / 128)
        self._seconds: dict[int, float] = {}

    def cut(self, config: Config) -> Cost:
        """The cost where a config of this shape cuts the keys."""
        if config.schedule in SCHEDULED:
            return self.by_schedule(config)
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

    def seconds(self, num_splits: int, merge: str) -> float:
        """The seconds of even splits, merged by `Config.merge`."""
        per, units = -(-self.tiles // num_splits), self.batch * self.head_tiles
        if merge == "cluster":
            split, merging = self.times(units * num_splits, per, num_splits, merge)
            return split + merging
        found = self._seconds.get(num_splits)
        if found is None:
            parts, how = -(-self.tiles // per), "combine" if num_splits > 1 else None
            split, merging = self.times(units * parts, per, parts, how)
            found = self._seconds[num_splits] = split + merging
        return found

    @property
    def least_seconds(self) -> float:
        """Seconds that no number of splits is less than: their start, all that is read, and the
        steps of a wave, of which more programs have fewer."""
        units, c = self.batch * self.head_tiles, self.constants
        reading = units * self.tiles * self.read_bytes * self.shared_reads / self.peak
        program = self.program * units
        one = program + max(reading, self.tiles * self.step)
        two = 2 * program + 2 * self.merge_part + reading
        any_number = 2 * math.sqrt(program * self.tiles * self.step)
        return self.start + min(one, c.merge + max(two, any_number))

    def in_one_part(self) -> tuple[int, int]:
        """(programs in one part, how many the GPU holds at once)."""
        return self.batch * self.head_tiles, self.slots

    def floor(self, num_splits: int) -> float:
        """Seconds that so many even splits take at least: all that is read, or a chain of steps in
        each wave, and the merge."""
        c, per, units = self.constants, -(-self.tiles // num_splits), self.batch * self.head_tiles
        parts = -(-self.tiles // per)
        ctas = units * parts
        reading = units * self.tiles * self.read_bytes * self.shared_reads / self.peak
        chain = -(-ctas // self.slots) * per * self.step
        floor = self.start + self.program * ctas + (reading if reading > chain else chain)
        return floor + c.merge + self.merge_part * parts if num_splits > 1 else floor

    def shared_out(self, full_parts: int) -> Cost:
        """With the batch cut into so many parts, rounded up to as many of every sequence."""
        per = ceil_div(self.tiles, min(self.tiles, ceil_div(full_parts, self.batch)))
        parts = ceil_div(self.tiles, per)
        return self.found(self.cost_of(self.batch * parts * self.head_tiles, per, parts, "combine"))

    def by_schedule(self, config: Config) -> Cost:
        """With shares of all tiles for programs that stay, which they find in the call."""
        programs = self.scheduled_programs(config)
        per = ceil_div(self.batch * self.head_tiles * self.tiles, programs)
        told = self.cost_of(programs, per, 1, None)
        seconds = told.split_seconds + self.finding_splits(config)
        return told._replace(split_seconds=seconds, merge_seconds=self.constants.merge_slots)

    def scheduled_programs(self, config: Config) -> int:
        """The programs of a schedule of the step."""
        return config.programs * (1 if config.schedule == "ranges" else self.head_tiles)

    def finding_splits(self, config: Config) -> float:
        """Seconds to find shares, and the splits of them."""
        c = self.constants
        splits = ceil_div(self.batch * self.head_tiles, self.scheduled_programs(config)) + 1
        return c.walk + c.walk_split * splits + c.share * ceil_div(self.batch, SHARE_STEP)

    def longest_alone(self, config: Config) -> float:
        """Seconds of a split of the longest sequence there may be, whose program has the GPU for
        itself: lengths that differ delay even splits by no more, beside as many bytes that are
        shared out evenly (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969)."""
        return self.wave(1, ceil_div(self.tiles, config.num_splits))

    def longer_by_schedule(self, config: Config) -> float:
        """Seconds that equal lengths take longer by a schedule of the step than by splits that the
        memory is as busy with: finding them, the merge, and SMs that have a program less; where no
        sequence is cut, only what is beside the other splits of a program."""
        c = self.constants
        if config.schedule == "head_ranges" and self.batch % config.programs == 0:
            return c.walk_whole + c.whole_split * (self.batch // config.programs)
        programs = self.scheduled_programs(config)
        on_one_sm = ceil_div(programs, self.num_sms)
        idle = self.uneven * (on_one_sm * self.num_sms - programs) / programs
        read = self.batch * self.tiles * self.head_tiles * self.read_bytes * self.shared_reads
        return self.finding_splits(config) + c.merge_slots + idle * read / self.peak

    def lost_by_drift(self, told: Cost) -> float:
        """Seconds that splits of their own lose beside programs that stay, in several waves."""
        read = self.batch * self.tiles * self.head_tiles * self.read_bytes * self.shared_reads
        return self.drift * read / self.peak if told.waves > 1 else 0.0

    def mixed(self, full_parts: int) -> Cost:
        """The cost with one sequence as long as it may be and the others `OTHERS` of that."""
        tiles = math.ceil(self.tiles * (1 + OTHERS * (self.batch - 1)))
        per = ceil_div(tiles, full_parts)
        parts = ceil_div(tiles, per) + self.batch // 2  # what rounding adds
        programs, each = parts * self.head_tiles, ceil_div(parts, self.batch)
        return self.found(self.cost_of(programs, per, each, "combine"))

    def found(self, cost: Cost) -> Cost:
        """And what merging takes longer where every row finds its parts from the lengths."""
        return cost._replace(merge_seconds=cost.merge_seconds + self.merge_shared)

    def cost_of(self, num_ctas: int, per: int, parts: int, merge: str | None) -> Cost:
        """The cost of programs of `per` tiles, and of merging so many parts a row, by `merge`."""
        return Cost(num_ctas, self.slots, per, *self.times(num_ctas, per, parts, merge))

    def times(self, num_ctas: int, per: int, parts: int, merge: str | None) -> tuple[float, float]:
        """The seconds of a Cost: of splits, and of their merge."""
        full, rest = divmod(num_ctas, self.slots)
        c, running = self.constants, self.program * num_ctas
        if self.asking:
            running += self.asking * (min(per, self.num_stages) - 1)
        seconds = self.start + running
        if self.program_most or self.tile_most:
            each = self.program_most + self.tile_most * min(per, BEGINNING)
            seconds += each * -(-num_ctas // self.num_sms)
        waves = full * self.wave(self.slots, per) if full else 0.0
        seconds += waves + (self.wave(rest, per) if rest else 0.0)
        merging = 0.0
        if merge == "cluster":
            merging = c.cluster + self.cluster_part * parts
            if parts == 2:
                merging -= c.pair_widening * self.widened
            else:
                units = self.batch * self.head_tiles * self.shared_reads
                merging += c.crowded * units * self.tiles * self.tile_bytes / self.peak
        elif merge:
            merging = c.merge + self.merge_part * parts
        return seconds, merging

    def wave(self, ctas: int, per: int) -> float:
        """Seconds of a wave of so many programs."""
        on_one_sm, felt = -(-ctas // self.num_sms), float(ctas)
        if on_one_sm > 1:
            felt += self.uneven * (on_one_sm * self.num_sms - ctas)
        memory = felt * self.read_bytes * self.shared_reads / self.peak
        # else all its tiles are asked for at the start
        turn = self.turn if per > self.num_stages else 0.0
        if self.late and per > 2 * self.num_stages:
            turn += self.late
        return per * slowest(self.step, turn, on_one_sm * self.alone, memory)


@lru_cache(maxsize=1024)  # near problems are the same for one length and the next
def batch_of(problem: Problem, device: Device, constants: Constants) -> Batch:
    """The Batch of a problem, made once."""
    return Batch(problem, device, constants)


tile_of: Callable[[Config], tuple[int, ...]]
tile_of = attrgetter("tile_m", "tile_n", "num_warps", "num_stages")
"""The numbers of a tile shape."""


def _by_dim(known: tuple[tuple[int, float], ...], dim: int) -> float:
    """The value up to the next dim that has one, else 0."""
    return next((value for most, value in known if dim <= most), 0.0)


def occupancy(problem: Problem, device: Device, config: Config, constants: Constants) -> int:
    """Programs of a shape that an SM holds at once, its pipeline full of tiles; a CPU core: one."""
    apart = widened_apart(problem, config, constants)
    return held_by_sm(Batch(problem, device, constants), config, apart)


def held_by_sm(batch: Batch, config: Config, apart: bool) -> int:
    """The `occupancy` of a shape; apart: `widened_apart`."""
    problem, device, constants = batch.problem, batch.device, batch.constants
    if device.kind == "cpu":
        return 1
    elements = config.tile_n * batch.dims
    ring = config.num_stages * elements * batch.element_bytes
    if apart:
        most = constants.in_flight_scales if batch.scaled else constants.in_flight_apart
        return max(1, min(constants.programs_apart, most // ring))
    smem = ring + SMEM_RESERVED
    if config.tile_m >= WIDE:  # q, and where values and, but for half int8, keys are widened to
        half = problem.codec.name == "int8" and problem.products != "widened"
        smem += (1 if half else 2) * config.tile_m * problem.head_dim
        if batch.widened:
            smem += 2 * config.tile_n * problem.head_dim_v if half else 2 * elements
    if config.merge == "cluster":  # each has a share of all parts
        smem += 4 * min(config.tile_m, batch.rows) * (problem.head_dim_v + 2 * config.num_splits)
    a_block = constants.registers(problem, config) * 32 * config.num_warps
    held = min(device.smem_per_sm // smem, int(REGISTERS_PER_SM / a_block))
    if batch.widened and config.tile_m < WIDE:
        if may_copy_scales_in_bulk(problem, config):  # scales of other heads are on their way, too
            ring += config.num_stages * config.tile_n * 8 * (problem.num_kv_heads - 1)
        held = min(held, constants.in_flight // ring)
    return max(1, held)


def cost(problem: Problem, device: Device, config: Config, constants: Constants = H200) -> Cost:
    """The model's answer for one config, every sequence at its upper bound."""
    return Shape(Batch(problem, device, constants), config).cut(config)


def constants_of(
    kernel: Kernel, constants: Constants = H200, hopper: Constants | None = None
) -> Constants:
    """The constants that a kernel goes by."""
    if kernel.name != HOPPER_DECODE:
        return constants
    return hopper or (H200_HOPPER if constants is H200 else constants)


def widened_apart(problem: Problem, config: Config, constants: Constants) -> bool:
    """Whether a warp asks for keys of 8 bits in small pages, in a kernel that has one."""
    widened = problem.codec != AS_IS
    return widened and constants.programs_apart > 0 and has_producer_warp(problem, config)


Model = Shape | short_queries.RowsModel
"""A tile shape of a kernel of either kind: both have `tiles`, and are asked alike."""


def models(problem: Problem, device: Device, kernel: Kernel) -> Callable[[Config], Model]:
    """config -> the model of its tile shape, of any kernel that the model knows."""
    if kernel.name in WHOLE_SEQUENCES:
        rule = short_queries.constants_of(kernel)
        return short_queries.queries_of(problem, device, rule).model
    return batch_of(problem, device, constants_of(kernel)).shape


def cheapest(model: Model, options: Sequence[int]) -> int:
    """The number of splits of least seconds, the fewest of several, merged by `combine`."""
    best, best_splits = math.inf, 0
    programs, slots = model.in_one_part()
    # what fills a wave is nearly the best, and leaves few of the others to weigh
    fills = max([n for n in options if n * programs <= slots], default=options[0])
    for splits in (fills, *options):
        if model.floor(splits) * ROUNDED <= best:
            seconds = model.seconds(splits, "combine")
            if seconds < best or (seconds == best and splits < best_splits):
                best, best_splits = seconds, splits
    return best_splits


def model(problem: Problem, device: Device, kernel: Kernel) -> Callable[[Config], float]:
    """config -> seconds, of any kernel that the model knows."""
    known: dict[Config, Model] = {}
    model_of = models(problem, device, kernel)

    @cache
    def seconds(config: Config) -> float:
        key = config if config.merge == "cluster" else config.shape
        if key not in known:
            known[key] = model_of(config)
        return known[key].cut(config).seconds

    return seconds


def programs(problem: Problem, device: Device, shape: Config, kernel: Kernel) -> tuple[int, int]:
    """(programs of a shape in one part, how many of them the GPU holds at once)."""
    return models(problem, device, kernel)(replace(shape, num_splits=1)).in_one_part()
