"""The host side that kernels for whole sequences share: results, splits of keys, their merge."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from splitkv.core import errors
from splitkv.core.device import Device
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.combine import UNUSED, Final, Partial, combine, merge_tiles
from splitkv.kernels.host import workspace
from splitkv.kernels.host.arguments import in_order, tail_in_order
from splitkv.kernels.host.relaunch import Launch, launch_of
from splitkv.kernels.host.sequence_sizes import lse_shape
from splitkv.kernels.tile.merge import MOST_ARRIVALS, parts_a_step, rows_a_step
from splitkv.kernels.tile.visit import Strides


class SequenceLauncher(ABC):
    """A kernel for whole sequences bound to one plan and one memory layout: forward, without a
    graph for gradients."""

    plan: Plan
    problem: Problem
    device: Device

    @cached_property
    def backward_launchers(self) -> dict[Any, Any]:
        """The launcher that makes the gradients of its calls: see kernels/gradients.py."""
        return {}

    @abstractmethod
    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """(out, lse), whatever the problem says of a gradient or the LSE; seed: of dropout."""


@dataclass(frozen=True)
class ResultShapes:
    """Shapes of out and lse, and the type of out."""

    out: tuple[int, ...]
    lse: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, operands: Operands) -> Final:
        """Memory for results: `operands.out` where given."""
        q, out = operands.q, operands.out
        out = q.new_empty(self.out, dtype=self.dtype) if out is None else out
        return Final(out, q.new_empty(self.lse, dtype=torch.float32), operands.out_scale)


def result_shapes(problem: Problem, q: Tensor) -> ResultShapes:
    """The ResultShapes of queries q [.., heads, head_dim]."""
    out = (*q.shape[:-1], problem.head_dim_v)
    return ResultShapes(out, lse_shape(q), getattr(torch, problem.out_dtype))


@dataclass(frozen=True)
class SequenceSplits:
    """How the keys of a row tile are split, and where splits are merged.

    num_splits    most splits; None: one
    split_tiles   tiles of keys a split, by the fixed rule; else None
    max_tokens    tokens of the longest sequences whose keys are split
    rows          rows of all partials; 0: there are none
    head_dim_v    columns of a row
    merge         combine: by a second launch; last: by the programs that come last; none: there
                  are no partials
    """

    num_splits: int | None
    split_tiles: int | None
    max_tokens: int
    rows: int
    head_dim_v: int
    merge: str

    @property
    def in_kernel(self) -> bool:
        """Whether the launch that makes partials merges them."""
        return self.merge == "last"

    def merge_step(self, num_warps: int) -> tuple[int, int]:
        """Splits, and rows, that so many warps merge together; 0 where they do not."""
        if self.merge != "last":
            return 0, 0
        step = parts_a_step(self.num_splits or 1, self.head_dim_v)
        return step, rows_a_step(step, self.head_dim_v, num_warps)

    def partials(self, like: Tensor) -> tuple[Partial | None, Tensor | None]:
        """The partials of a call, and the counters of a launch that merges them."""
        if not self.rows:
            return None, None
        partial = workspace.partials(like, self.rows * self.head_dim_v, self.rows)
        return partial, workspace.counter_for(like) if self.in_kernel else None

    def expect_arrivals(self, programs: int) -> None:
        """ValueError where more programs would merge than can be counted."""
        few = programs <= MOST_ARRIVALS.value or not self.in_kernel
        errors.expect(few, "plan.config.merge", f"'combine' of {programs} programs", "last")


def sequence_splits(plan: Plan) -> SequenceSplits:
    """The SequenceSplits of a plan."""
    problem, config = plan.problem, plan.config
    num_splits = config.num_splits if config.num_splits > 1 else None
    fixed = num_splits is not None and config.schedule == "fixed"
    merge = config.merge if num_splits is not None and config.merge != "cluster" else "none"
    rows = problem.batch * problem.cut_tokens * problem.num_heads * config.num_splits
    return SequenceSplits(
        num_splits=num_splits,
        split_tiles=config.split_size // config.tile_n if fixed else None,
        max_tokens=problem.cut_tokens,
        rows=0 if merge == "none" else rows,
        head_dim_v=problem.head_dim_v,
        merge=merge,
    )


class CombineLaunch(NamedTuple):
    """`combine` bound to the partials of whole sequences: its grid, the arguments that never
    change, by name, and its options."""

    grid: tuple[int, int, int]
    fixed: Mapping[str, Any]
    options: Mapping[str, Any]

    def launch(self, partial: Partial, final: Final, operands: Operands) -> Any:
        """Launches it through Triton; the compiled kernel."""
        arguments = {
            "partial": partial,
            "final": final,
            "lens_ptr": operands.cu_seqlens_q,
            "sink_ptr": operands.sink_logits,
            **self.fixed,
        }
        return combine[self.grid](*in_order(combine, arguments), **self.options)

    def relaunch(self, compiled: Any) -> Launch:
        """A function that launches it again: see `Sequences`."""
        per_call = ("partial", "final", "lens_ptr", "sink_ptr")
        return launch_of(compiled, self.grid, tail_in_order(combine, per_call, self.fixed))


def combine_launch(
    plan: Plan, splits: SequenceSplits, total_q: int, out_strides: Strides, early: bool
) -> CombineLaunch | None:
    """The CombineLaunch of a plan; None: nothing is left to it.

    early   it may be launched before the kernel that makes partials has ended
    """
    problem = plan.problem
    if splits.merge != "combine" or not splits.rows:
        return None
    num_splits = splits.num_splits or 1
    tile_p, tile_v, num_warps = merge_tiles(num_splits, problem.head_dim_v)
    tokens = problem.batch * splits.max_tokens
    columns = triton.cdiv(problem.head_dim_v, tile_v)
    absent = (
        "growth",
        "left",
        "right",
        "sink_tokens",
        "chunk",
        "programs",
        "seqlen_new",
        "capacity",
    )
    fixed = {
        **dict.fromkeys(absent),
        "batch": tokens,
        "num_kv_heads": problem.num_kv_heads,
        "parts": num_splits,
        "tokens": splits.max_tokens,
        "total_q": total_q,
        "stride_ob": out_strides.b,
        "stride_ot": out_strides.t,
        "stride_oh": out_strides.h,
        "SEQLEN_Q": 1,
        "GROUP": problem.group,
        "HEAD_DIM_V": problem.head_dim_v,
        "BATCH_P2": 1,
        "TILE_M": problem.group,
        "TILE_N": UNUSED,
        "TILE_P": tile_p,
        "FEW": 0,
        "TILE_V": tile_v,
        "LAST_STEP": "short" if num_splits % tile_p else "full",
        "PREDECESSOR": "running" if early else "done",
    }
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    if early:
        options["launch_pdl"] = True
    return CombineLaunch((tokens * problem.num_heads, 1, columns), fixed, options)
