"""The schedule of a decode step: which tiles of which sequence every program has.

Computes, from the lengths on the device, for every program p a Start (tile/walk.py). With T[b] the
tiles that sequence b visits, one at least, and H the head tiles that a share goes through:

    schedule_ranges        the tiles of all sequences and head tiles, one behind the other, are
                           W = H * sum_b T[b]; program p of P has those from p * (W / P) on, in
                           whole tiles: each as many as any other, or one more
    schedule_proportional  sequence b has splits in proportion to T[b], rounded up; split s of n has
                           the tiles s, s + n, s + 2n, ...; those of about the greatest size come
                           first, then those of about half of it, and so on: one a program

One launch serves all layers of a step, as lengths and masks are the same. Nothing is read by the
host, and the buffer has one size whatever the lengths are: a graph may hold it.

Shapes      lens [batch] int32, 0 included; starts [programs, 8] int32
Grid        (programs / TILE_P,); each program goes through the whole batch, TILE_B sequences a step
Traffic     the lengths, twice a program; 32 bytes a program of decode are written
Numerics    integers: the same lengths give the same schedule
Limits      head tiles * tiles of the batch below 2^31; proportional: programs above the batch; as
            many sink tokens for every sequence
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import triton
import triton.language as tl

from splitkv.core.plan import Plan
from splitkv.kernels.host.arguments import in_order, tail_in_order
from splitkv.kernels.host.partition import packed_rows
from splitkv.kernels.host.relaunch import Launch, launch_of, observed
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.walk import START_FIELDS, Start, counted_tiles

CLASSES = tl.constexpr(4)  # of sizes of splits, each of half as many tiles as the one before
MAX_STEP, CELLS = 1024, 8192  # sequences a step; sequences times programs of a step
BOUNDS = "left", "right", "sink_tokens", "chunk"  # of a mask, as `Mask.bounds`
INTEGERS = ("seqlen_q", "batch", *BOUNDS, "head_tiles", "programs")


@triton.jit
def tiles_of_step(lens_ptr, bounds, seqlen_q, batch, offs_b, TILE_N: tl.constexpr):
    """Tiles of sequences `offs_b`, 0 beyond the batch."""
    here = offs_b < batch
    keys = tl.load(lens_ptr + offs_b, mask=here, other=0)
    return tl.where(here, counted_tiles(bounds, keys, seqlen_q, TILE_N), 0)


@triton.jit
def tiles_of_batch(lens_ptr, bounds, seqlen_q, batch, TILE_N: tl.constexpr, TILE_B: tl.constexpr):
    """Tiles of all sequences."""
    total = tl.zeros([TILE_B], tl.int32)
    for first in range(0, batch, TILE_B):
        offs_b = first + tl.arange(0, TILE_B)
        total += tiles_of_step(lens_ptr, bounds, seqlen_q, batch, offs_b, TILE_N)
    return tl.sum(total, 0)


@triton.jit
def store_starts(starts_ptr, p, ok, start):
    """Stores the Start of programs p [TILE_P], where ok."""
    at = starts_ptr + p * START_FIELDS
    tl.store(at, start.sequence, mask=ok)
    tl.store(at + 1, start.head_tile, mask=ok)
    tl.store(at + 2, start.tile, mask=ok)
    tl.store(at + 3, start.by, mask=ok)
    tl.store(at + 4, start.count, mask=ok)
    tl.store(at + 5, start.tiles, mask=ok)
    tl.store(at + 6, start.keys, mask=ok)
    tl.store(at + 7, start.merged, mask=ok)


@triton.jit
def first_of_range(p, each, more):
    """The first tile of program p where programs have `each` tiles, the first `more` one more."""
    return p * each + tl.minimum(p, more)


@triton.jit
def program_of_tile(tile, each, more):
    """The program that has a tile."""
    behind = tile - more * (each + 1)
    return tl.where(behind < 0, tile // (each + 1), more + behind // tl.maximum(each, 1))


@triton.jit(do_not_specialize=INTEGERS)
def schedule_ranges(
    starts_ptr,  # [programs, 8] int32
    lens_ptr,  # [batch] int32
    seqlen_q,
    batch,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    head_tiles,
    programs,
    TILE_N: tl.constexpr,  # of decode
    TILE_B: tl.constexpr,
    TILE_P: tl.constexpr,
    DEPENDENTS: tl.constexpr,  # early: decode is launched before this grid has ended; or in_order
):
    if DEPENDENTS == "early":  # it waits for this grid before it reads anything
        tl.extra.cuda.gdc_launch_dependents()
    bounds = Bounds(left, right, sink_tokens, chunk)
    p = tl.program_id(0) * TILE_P + tl.arange(0, TILE_P)
    of_batch = tiles_of_batch(lens_ptr, bounds, seqlen_q, batch, TILE_N, TILE_B)
    total = of_batch * head_tiles
    each = total // programs
    more = total % programs
    first = first_of_range(p, each, more)
    count = first_of_range(p + 1, each, more) - first

    # the sequence that a range starts in, and where that begins
    sequence = p * 0
    begin = p * 0
    before = total * 0
    for step in range(0, batch, TILE_B):
        offs_b = step + tl.arange(0, TILE_B)
        tiles_b = tiles_of_step(lens_ptr, bounds, seqlen_q, batch, offs_b, TILE_N) * head_tiles
        end = before + tl.cumsum(tiles_b, 0)
        passed = (end[None, :] <= first[:, None]) & (offs_b < batch)[None, :]  # [TILE_P, TILE_B]
        sequence += tl.sum(passed.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(passed, end[None, :], 0), 1))
        before += tl.sum(tiles_b, 0)
    here = count > 0
    sequence = tl.where(here, sequence, batch)
    keys = tl.load(lens_ptr + sequence, mask=here, other=0)
    tiles = counted_tiles(bounds, keys, seqlen_q, TILE_N)
    head_tile = (first - begin) // tiles
    tile = (first - begin) % tiles

    # splits that are merged: a range that starts inside a head tile which the range before begins
    begin += head_tile * tiles
    is_second = here & (tile > 0) & (first_of_range(p - 1, each, more) <= begin)
    merged = program_of_tile(begin + tiles - 1, each, more) - p + 2
    merged = tl.where(is_second, merged, 0)
    start = Start(sequence, head_tile, tile, p * 0 + 1, count, tiles, keys, merged)
    store_starts(starts_ptr, p, p < programs, start)


@triton.jit
def proportional_splits(tiles, total, spare):
    """Splits of sequences of so many tiles [.], where `spare` splits are shared out over `total`
    tiles: at least one and at most one a tile."""
    # splits a tile, in fixed point and rounded down: exact while tiles * total < 1 << 40
    a_tile = (spare.to(tl.int64) << 40) // tl.maximum(total, 1).to(tl.int64)
    splits = (tiles.to(tl.int64) * a_tile + ((1 << 40) - 1)) >> 40
    return tl.maximum(tl.minimum(splits, tiles.to(tl.int64)), 1).to(tl.int32)


@triton.jit
def size_class(size, greatest):
    """How often the greatest size of a split is halved, rounded down, before it is below a size."""
    halved = (size * 2 <= greatest).to(tl.int32) + (size * 4 <= greatest) + (size * 8 <= greatest)
    return tl.minimum(halved, CLASSES - 1)


@triton.jit(do_not_specialize=INTEGERS)
def schedule_proportional(
    starts_ptr,  # as schedule_ranges
    lens_ptr,
    seqlen_q,
    batch,
    left,
    right,
    sink_tokens,
    chunk,
    head_tiles,
    programs,
    TILE_N: tl.constexpr,
    TILE_B: tl.constexpr,
    TILE_P: tl.constexpr,
    DEPENDENTS: tl.constexpr,
):
    if DEPENDENTS == "early":
        tl.extra.cuda.gdc_launch_dependents()
    bounds = Bounds(left, right, sink_tokens, chunk)
    p = tl.program_id(0) * TILE_P + tl.arange(0, TILE_P)
    total = tiles_of_batch(lens_ptr, bounds, seqlen_q, batch, TILE_N, TILE_B)
    spare = programs - batch
    greatest = (total + spare - 1) // spare

    # the sequence of a program's split, and the program of that sequence's first one
    sequence = p * 0
    first = p * 0
    before = total * 0
    for which in tl.static_range(CLASSES):
        for step in range(0, batch, TILE_B):
            offs_b = step + tl.arange(0, TILE_B)
            tiles_b = tiles_of_step(lens_ptr, bounds, seqlen_q, batch, offs_b, TILE_N)
            splits_b = proportional_splits(tiles_b, total, spare)
            size_b = (tiles_b + splits_b - 1) // splits_b
            here = (size_class(size_b, greatest) == which) & (offs_b < batch)
            splits_b = tl.where(here, splits_b, 0)
            end = before + tl.cumsum(splits_b, 0)
            own = (end[None, :] > p[:, None]) & ((end - splits_b)[None, :] <= p[:, None])
            sequence += tl.sum(tl.where(own, offs_b[None, :], 0), 1)
            first += tl.sum(tl.where(own, (end - splits_b)[None, :], 0), 1)
            before += tl.sum(splits_b, 0)
    here = p < before
    sequence = tl.where(here, sequence, batch)
    keys = tl.load(lens_ptr + sequence, mask=here, other=0)
    tiles = counted_tiles(bounds, keys, seqlen_q, TILE_N)
    splits = proportional_splits(tiles, total, spare)
    tile = tl.where(here, p - first, 0)
    count = tl.where(here, (tiles - tile + splits - 1) // splits, 0)
    merged = tl.where(here & (tile == 1), splits, 0)
    start = Start(sequence, p * 0, tile, splits, count, tiles, keys, merged)
    store_starts(starts_ptr, p, p < programs, start)


RULES: dict[str, Any] = {
    "ranges": schedule_ranges,
    "head_ranges": schedule_ranges,
    "proportional": schedule_proportional,
}
"""The kernel of each value of `Config.schedule` that has a schedule of the step."""


def schedule_arguments(plan: Plan, early: bool) -> dict[str, Any]:
    """The arguments of the kernel that never change from step to step; early: decode may be
    launched before it has ended."""
    problem, config = plan.problem, plan.config
    step = min(triton.next_power_of_2(problem.batch), MAX_STEP)
    return {
        "seqlen_q": problem.seqlen_q,
        "batch": problem.batch,
        **dict(zip(BOUNDS, problem.mask.bounds, strict=True)),
        "head_tiles": head_tiles_of_share(plan),
        "programs": config.programs,
        "TILE_N": config.tile_n,
        "TILE_B": step,
        "TILE_P": min(CELLS // step, 32),
        "DEPENDENTS": "early" if early else "in_order",
    }


def head_tiles_of_share(plan: Plan) -> int:
    """Head tiles that the share of a program goes through."""
    if plan.config.schedule != "ranges":
        return 1
    return plan.problem.num_kv_heads * packed_rows(plan.problem, plan.config)[0]


def buffer_shape(plan: Plan) -> tuple[int, int]:
    """The shape of the memory of a schedule, of int32."""
    return plan.config.programs, START_FIELDS.value


class ScheduleKernel:
    """The kernel that makes the schedules of a plan, bound to it."""

    def __init__(self, plan: Plan, early: bool = False) -> None:
        self.kernel = RULES[plan.config.schedule]
        self.fixed = schedule_arguments(plan, early)
        self.grid = (triton.cdiv(plan.config.programs, self.fixed["TILE_P"]), 1, 1)

    def launch(self, starts: Any, lens: Any) -> Any:
        """Launches it through Triton; the compiled kernel.

        starts   [programs, 8] int32 that is written; lens: [batch] int32
        """
        given = {"starts_ptr": starts, "lens_ptr": lens} | self.fixed
        return self.kernel[self.grid](
            *in_order(self.kernel, given), num_warps=4, enable_fp_fusion=True
        )

    def variant(self) -> Hashable:
        """A key of the kernel that Triton compiles."""
        free = self.kernel.do_not_specialize
        told = (None if name in free and x is not None else x for name, x in self.fixed.items())
        return self.kernel, *told

    def relaunch(self, compiled: Any) -> Launch:
        """A function that launches it again: launch(stream, at_starts, at_lens)."""
        tail = tail_in_order(self.kernel, ("starts_ptr", "lens_ptr"), self.fixed)
        return launch_of(compiled, self.grid, tail)


class ScheduleLauncher:
    """The kernel of a plan, launched through Triton once and with as little Python as possible from
    then on."""

    def __init__(self, plan: Plan) -> None:
        early = plan.device.capability >= (9, 0)
        self.plan, self.kernel = plan, ScheduleKernel(plan, early)
        self.launch: Launch | None = None

    def __call__(self, starts: Any, lens: Any) -> None:
        """Writes starts [programs, 8] int32 from lens [batch] int32, on the current stream."""
        aligned = not (starts.data_ptr() | lens.data_ptr()) & 15
        if self.launch is None or not aligned or observed():
            compiled = self.kernel.launch(starts, lens)
            if compiled is not None and aligned and self.launch is None:
                self.launch = self.kernel.relaunch(compiled)
            return
        import torch

        stream = torch._C._cuda_getCurrentRawStream(starts.device.index)
        self.launch(stream, starts.data_ptr(), lens.data_ptr())
