"""The schedule of a decode step: which tiles of which sequence every program has.

Computes, from the lengths on the device, the Start of every program (tile/walk.py) by one of the
rules of tile/step_share.py.

One launch serves all layers of a step, as lengths and masks are the same. Nothing is read by the
host, and the buffer has one size whatever the lengths are: a graph may hold it.

Shapes      lens [batch] int32, 0 included; starts [programs, 8] int32
Grid        (programs,); each goes through the whole batch, `SEQUENCES` at a time
Traffic     the lengths, once or twice a program; 32 bytes a program of decode are written
Numerics    integers: the same lengths give the same schedule
Limits      head tiles * (tiles and splits of the batch) below 2^31; proportional: programs above
            the batch; as many sink tokens for every sequence
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from splitkv.core.plan import Plan
from splitkv.kernels.host.arguments import in_order, tail_in_order
from splitkv.kernels.host.launch import Launch, launch_of, observed
from splitkv.kernels.host.launcher import compile_options
from splitkv.kernels.host.partition import packed_rows
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.step_share import RULES, SEQUENCES
from splitkv.kernels.tile.walk import START_FIELDS, DecodeStep, store_start

BOUNDS = "left", "right", "sink_tokens", "chunk"  # of a mask, as `Mask.bounds`
WARPS = 1
INTEGERS = ("seqlen_q", "batch", *BOUNDS, "head_tiles", "programs")


@triton.jit(do_not_specialize=INTEGERS)
def schedule_step(
    starts_ptr,  # [programs, 8] int32
    lens_ptr,  # [batch] int32
    seqlen_q,
    batch,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    chunk,
    head_tiles,  # that a share goes through, or None: one
    programs,
    RULE: tl.constexpr,  # ShareRule
    SPLIT_TILES: tl.constexpr,  # of a DecodeStep
    TILE_N: tl.constexpr,  # of decode
    DEPENDENTS: tl.constexpr,  # early: decode is launched before this grid has ended; or in_order
):
    if DEPENDENTS == "early":  # it waits for this grid before it reads anything
        tl.extra.cuda.gdc_launch_dependents()
    bounds = Bounds(left, right, sink_tokens, chunk)
    step = DecodeStep(lens_ptr, bounds, seqlen_q, batch, head_tiles, programs, SPLIT_TILES)
    program = tl.program_id(0)
    start = RULE.find(step, program, tl.arange(0, SEQUENCES), TILE_N)
    store_start(starts_ptr, program, start)


def schedule_arguments(plan: Plan, early: bool) -> dict[str, Any]:
    """The arguments of the kernel that never change from step to step; early: decode may be
    launched before it has ended."""
    problem, config = plan.problem, plan.config
    return {
        "seqlen_q": problem.seqlen_q,
        "batch": problem.batch,
        **dict(zip(BOUNDS, problem.mask.bounds, strict=True)),
        "head_tiles": head_tiles_argument(plan),
        "programs": config.programs,
        "RULE": RULES[config.schedule],
        "SPLIT_TILES": config.split_tiles,
        "TILE_N": config.tile_n,
        "DEPENDENTS": "early" if early else "in_order",
    }


def head_tiles_of_share(plan: Plan) -> int:
    """Head tiles that the share of a program goes through."""
    if plan.config.schedule != "ranges":
        return 1
    return plan.problem.num_kv_heads * packed_rows(plan.problem, plan.config)[0]


def head_tiles_argument(plan: Plan) -> int | None:
    """Head tiles of a share for kernels, to which one is None: nothing is divided by it then. Not
    where they write new tokens or heads are wide: a thread would spill."""
    problem, config = plan.problem, plan.config
    narrow = max(problem.head_dim, problem.head_dim_v) <= 128
    known = config.schedule != "ranges" and not config.appends and narrow
    return None if known else head_tiles_of_share(plan)


def buffer_shape(plan: Plan) -> tuple[int, int]:
    """The shape of the memory of a schedule, of int32."""
    return plan.config.programs, START_FIELDS.value


class ScheduleKernel:
    """The kernel that makes the schedules of a plan, bound to it."""

    def __init__(self, plan: Plan, early: bool = False) -> None:
        self.fixed = schedule_arguments(plan, early)
        self.grid = plan.config.programs, 1, 1

    def launch(self, starts: Any, lens: Any) -> Any:
        """Launches it through Triton; the compiled kernel.

        starts   [programs, 8] int32 that is written; lens: [batch] int32
        """
        given = {"starts_ptr": starts, "lens_ptr": lens} | self.fixed
        ordered = in_order(schedule_step, given)
        return schedule_step[self.grid](*ordered, **compile_options(WARPS))

    def relaunch(self, compiled: Any) -> Launch:
        """A function that launches it again: launch(stream, at_starts, at_lens)."""
        tail = tail_in_order(schedule_step, ("starts_ptr", "lens_ptr"), self.fixed)
        return launch_of(compiled, self.grid, tail)


class ScheduleLauncher:
    """The kernel of a plan, launched through Triton once and with as little Python as possible from
    then on."""

    def __init__(self, plan: Plan) -> None:
        early = plan.device.capability >= (9, 0)
        self.plan, self.kernel = plan, ScheduleKernel(plan, early)
        self.launch: Launch | None = None
        self.shape = buffer_shape(plan)

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
