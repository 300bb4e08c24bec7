"""The host side of the backward on Hopper: limits, memory, and launches by named arguments."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import ceil_div
from splitkv.core.variants import HopperBackward
from splitkv.kernels.backward.launcher import allocate_gradients, allocate_splits, launch_sum
from splitkv.kernels.backward.records import Gradients, GradientTensors, Stats
from splitkv.kernels.backward.rows import CLEARED, P_ERROR, statistics
from splitkv.kernels.hopper.backward.kernel import hopper_backward
from splitkv.kernels.hopper.backward.mma_half_keys import specialize_half_keys
from splitkv.kernels.hopper.backward.mma_one_gradient import specialize_one_gradient
from splitkv.kernels.hopper.backward.queries import hopper_backward_queries
from splitkv.kernels.hopper.backward.records import HopperBackwardConfig
from splitkv.kernels.hopper.backward.relaunch import BackwardRelaunch, Workspace, relaunch_of
from splitkv.kernels.hopper.backward.round import hopper_backward_round
from splitkv.kernels.hopper.backward.shared_memory import SUM_COLUMNS
from splitkv.kernels.hopper.backward.sinks import threads_with_ds
from splitkv.kernels.hopper.primitives.tma_limits import fits_tma
from splitkv.kernels.host.relaunch import Launched, launch_by_name
from splitkv.kernels.host.sequence_sizes import LOG2_E, bounds_of, strides_of

BOXES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
SUMS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
# The error of p, relatively, by which the sums of ds are weighed: in the exponent of fp32 totals,
# or of p that consumers hand each other in fp16.
ERRORS_OF_P = {"half_keys": P_ERROR, "one_gradient": 2.0**-12}
LEAST_FULL = 0.9  # tiles that lanes have together, for each SM
SPECIALIZE = {"half_keys": specialize_half_keys, "one_gradient": specialize_one_gradient}


class LaneTiling(NamedTuple):
    """Tiles of a lane, lanes, and how many lanes go together."""

    tiles: int
    lanes: int
    width: int


def lane_tiling(problem: Problem, device: Device, total: int, heads: int, tile: int) -> LaneTiling:
    """The LaneTiling of `total` tokens in tiles of `tile`; a lane is a head, dense of one sequence.

    Together go the least number of lanes, of those that divide all, that has a tile for nearly
    every SM. Where the tiles of a lane are not equally heavy, fewer would leave SMs idle at the
    end.
    """
    if problem.kind == "varlen":
        return LaneTiling(total // tile + problem.batch + 1, heads, heads)
    tiles, lanes = ceil_div(total // problem.batch, tile), problem.batch * heads
    widths = (n for n in range(1, lanes + 1) if lanes % n == 0)
    enough = LEAST_FULL * device.num_sms
    return LaneTiling(tiles, lanes, next((n for n in widths if n * tiles >= enough), lanes))


class DqSums(NamedTuple):
    """fp32 memory of a call in which dq is summed up; None: dq is made by another kernel.

    memory   what has to be set to 0
    sums     in it, [heads, tiles of rows, tile_m * head_dim]
    turns    in it, the number of tiles of keys that have been added, of each tile of rows; or None
    """

    memory: Tensor | None
    sums: Tensor | None
    turns: Tensor | None


def tokens_descriptor(x: Any, tokens: int) -> TensorDescriptor:
    """Describes x [(batch,) tokens, heads, dim] to TMA, so many tokens of a head at a time."""
    shape, strides = list(x.shape), list(x.stride())
    if len(shape) == 3:
        shape, strides = [1, *shape], [shape[-1], *strides]
    # along a single element there are no steps, and torch may say anything
    strides = [step if n > 1 else shape[-1] for n, step in zip(shape, strides, strict=True)]
    box = [1, tokens, 1, 1 << (shape[3] - 1).bit_length()]
    return TensorDescriptor(x, shape, [*strides[:3], 1], box, BOXES)


def sums_descriptor(sums: Any, pieces: int) -> TensorDescriptor:
    """Describes sums [.., size] of dq to TMA, one of so many pieces of a tile at a time."""
    columns = SUM_COLUMNS.value
    rows, box = sums.shape.numel() // columns, sums.shape[-1] // (pieces * columns)
    return TensorDescriptor(sums, [rows, columns], [columns, 1], [box, columns], SUMS)


def tensors_of_call(x: Operands, out: Tensor, lse: Tensor, grad_lse: Tensor | None) -> list[Tensor]:
    """The tensors of a call for which kernels are compiled again if their address is no multiple of
    16."""
    every = out, lse, grad_lse, x.sink_logits, x.cu_seqlens_q, x.cu_seqlens_k
    return [t for t in every if t is not None]


def tokens_of_batch(x: Any) -> int:
    """Tokens of all sequences of x [(batch,) tokens, heads, dim]."""
    return int(x.shape[:-2].numel())


class HopperBackwardLauncher:
    """The kernels bound to one problem and device; called as `BackwardLauncher` is.

    The operands have to be such that `unfit` of tma_limits.py says nothing of them; the gradient of
    the output is copied where TMA cannot describe it.
    """

    def __init__(self, problem: Problem, device: Device, variant: HopperBackward) -> None:
        self.problem, self.device, self.variant = problem, device, variant
        self.again: dict[Hashable, BackwardRelaunch | None] = {}

    def __call__(
        self,
        operands: Operands,
        seed: Tensor | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        of_slopes: bool,
    ) -> Gradients:
        x = operands
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        kind = grad_out.stride(), None if grad_lse is None else grad_lse.stride(), x.softmax_scale
        again = self.again.get(kind)
        if again is not None:
            done = again.call(x, out, lse, grad_out, grad_lse)
            if done is not None:
                return done
        return self.dispatch(x, out, lse, grad_out, grad_lse, kind)

    def dispatch(
        self,
        x: Operands,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        kind: Hashable,
    ) -> Gradients:
        """Launches through Triton, which compiles what these arguments need, and keeps that for
        calls of this kind: strides of the gradients, and the scale."""
        as_it_comes = fits_tma(grad_out)
        if not as_it_comes:  # a copy, also of what is contiguous at another address
            grad_out = grad_out.clone(memory_format=torch.contiguous_format)
        each_head = replace(self.problem, num_kv_heads=self.problem.num_heads)  # has its own rows
        dq_sums = self.allocate_sums(x)
        stats, rows = statistics(
            each_head,
            x,
            out,
            lse,
            grad_out,
            grad_lse,
            of_slopes=False,
            sink_columns=self.sink_columns(x),
            clear=dq_sums.memory,
            p_error=ERRORS_OF_P[self.variant.consumers],
        )
        tensors = allocate_gradients(x, grad_out)
        split, *keys = self.launch_keys(x, stats, tensors, dq_sums)
        if self.variant.queries is not None:
            last = self.launch_queries(x, stats, tensors)
        else:
            last = self.launch_round(x, dq_sums, tensors.dq)
        aligned = not any(t.data_ptr() & 15 for t in tensors_of_call(x, out, lse, grad_lse))
        if as_it_comes and aligned:
            workspace = Workspace(*dq_sums, stats, split)
            self.again[kind] = relaunch_of((rows, *keys, last), x, tensors, workspace)
        dsink = None
        if x.sink_logits is not None:
            dsink = stats.sink_sums.sum(1).to(x.sink_logits.dtype)
        return Gradients(tensors.dq, tensors.dk, tensors.dv, dsink, None)

    def sums_shape(self, x: Operands) -> tuple[int, int]:
        """(lanes of query heads, tiles of rows of each)."""
        p, total = self.problem, tokens_of_batch(x.q)
        rows = lane_tiling(p, self.device, total, p.num_heads, self.variant.tile_m)
        return rows.lanes, rows.tiles

    def allocate_sums(self, x: Operands) -> DqSums:
        """Allocates what dq is summed up in, in a multiple of CLEARED numbers."""
        if self.variant.dq == "recomputed":
            return DqSums(None, None, None)
        shape = self.sums_shape(x)
        size, tiles = self.variant.tile_m * self.problem.head_dim, shape[0] * shape[1]
        counted = tiles if self.variant.dq == "added_in_turns" else 0
        numel = ceil_div(tiles * size + counted, CLEARED) * CLEARED
        memory = x.q.new_empty(numel, dtype=torch.float32)
        sums = memory[: tiles * size].view(*shape, size)
        turns = memory[tiles * size :][:counted].view(torch.int32) if counted else None
        return DqSums(memory, sums, turns)

    def programs(self, x: Operands) -> int:
        """Programs of `hopper_backward`, the same number for every KV head."""
        p, splits = self.problem, self.variant.row_splits
        keys = lane_tiling(
            p, self.device, tokens_of_batch(x.k), p.num_kv_heads, self.variant.tile_n
        )
        return p.batch * p.num_kv_heads * splits.tiles * splits.splits + keys.tiles * keys.lanes

    def sink_columns(self, x: Operands) -> int:
        """Sums for dsink that `hopper_backward` leaves for each query head."""
        threads = threads_with_ds(self.problem.head_dim)
        return self.programs(x) // self.problem.num_kv_heads * threads

    def shared_arguments(
        self,
        x: Operands,
        stats: Stats,
        tensors: GradientTensors,
        tile: tuple[int, int],
        tiling: LaneTiling,
    ) -> dict[str, Any]:
        """The arguments that both kernels take which compute p and ds; tile: rows and keys."""
        p, (tile_m, tile_n) = self.problem, tile
        left, right, sink_tokens = bounds_of(p)
        return {
            "q_desc": tokens_descriptor(x.q, tile_m),
            "grad_desc": tokens_descriptor(tensors.grad, tile_m),
            "k_desc": tokens_descriptor(x.k, tile_n),
            "v_desc": tokens_descriptor(x.v, tile_n),
            "total_ptr": stats.total,
            "delta_ptr": stats.delta,
            "cu_q_ptr": x.cu_seqlens_q,
            "cu_k_ptr": x.cu_seqlens_k,
            "scale": x.softmax_scale,
            "scale_log2": x.softmax_scale * LOG2_E,
            "left": left,
            "right": right,
            "sink_tokens": sink_tokens,
            "seqlen_q": p.seqlen_q,
            "seqlen_k": p.seqlen_k,
            "batch": p.batch,
            "total_q": tokens_of_batch(x.q),
            **tiling._asdict(),
        }

    def launch_keys(
        self, x: Operands, stats: Stats, tensors: GradientTensors, dq_sums: DqSums
    ) -> tuple[Any, ...]:
        """Launches what makes dk and dv and, where there are sums for it, dq in fp32; memory for
        splits of rows, or None, and the launches."""
        p, c, splits = self.problem, self.variant, self.variant.row_splits
        total_k = tokens_of_batch(x.k)
        keys = lane_tiling(p, self.device, total_k, p.num_kv_heads, c.tile_n)
        columns = 0 if stats.sink_sums is None else stats.sink_sums.shape[1]
        split = allocate_splits(p, x, splits, c.tile_n)
        sums = dq_sums.sums
        arguments = self.shared_arguments(x, stats, tensors, (c.tile_m, c.tile_n), keys) | {
            "weight_ptr": stats.weight,
            "sink_sums_ptr": stats.sink_sums,
            "dk_ptr": tensors.dk,
            "dv_ptr": tensors.dv,
            "dk_strides": strides_of(tensors.dk),
            "dv_strides": strides_of(tensors.dv),
            "split_ptr": split,
            "sums_desc": None if sums is None else sums_descriptor(sums, c.dq_pieces),
            "turn_ptr": dq_sums.turns,
            "num_kv_heads": p.num_kv_heads,
            "total_k": total_k,
            "sum_tiles": self.sums_shape(x)[1],
            "sink_columns": columns,
            "sink_first": columns - self.sink_columns(x),
            "split_tiles": splits.tiles,
            "row_splits": splits.splits,
            "CONFIG": HopperBackwardConfig(
                group=p.group,
                num_stages=c.num_stages,
                grad_stages=c.grad_stages,
                head_dim=p.head_dim,
                head_dim_v=p.head_dim_v,
                sequences="dense" if x.cu_seqlens_q is None else "packed",
                specialize=SPECIALIZE[c.consumers],
            ),
        }
        grid = (self.programs(x),)
        made = launch_by_name(
            hopper_backward,
            grid,
            arguments,
            num_warps=4,  # of the first consumer
            launch_pdl=True,
        )
        if split is None:
            return None, made
        return split, made, launch_sum(p, x, tensors, split, c.tile_n, launch_pdl=True)

    def launch_round(self, x: Operands, dq_sums: DqSums, dq: Tensor) -> Launched:
        """Launches what rounds the fp32 sums to dq."""
        p, sums = self.problem, dq_sums.sums
        assert sums is not None
        lanes, tiles = sums.shape[:2]
        arguments = {
            "sums_ptr": sums,
            "dq_ptr": dq,
            "dq_strides": strides_of(dq),
            "cu_q_ptr": x.cu_seqlens_q,
            "scale": x.softmax_scale,
            "seqlen_q": p.seqlen_q,
            "batch": p.batch,
            "num_heads": p.num_heads,
            "total_q": tokens_of_batch(x.q),
            "tiles": tiles,
            "TILE_M": self.variant.tile_m,
            "DIM": p.head_dim,
        }
        grid = (tiles * lanes,)
        return launch_by_name(hopper_backward_round, grid, arguments, num_warps=8, launch_pdl=True)

    def launch_queries(self, x: Operands, stats: Stats, tensors: GradientTensors) -> Launched:
        """Launches what makes dq in one order."""
        p, c, total = self.problem, self.variant.queries, tokens_of_batch(x.q)
        assert c is not None
        rows = lane_tiling(p, self.device, total, p.num_heads, c.tile_m)
        arguments = self.shared_arguments(x, stats, tensors, (c.tile_m, c.tile_n), rows) | {
            "dq_ptr": tensors.dq,
            "dq_strides": strides_of(tensors.dq),
            "num_heads": p.num_heads,
            "GROUP": p.group,
            "STAGES": c.num_stages,
            "KEY_DIM": p.head_dim,
        }
        grid = (rows.tiles * rows.lanes,)
        # the warps are those of the first consumer
        return launch_by_name(hopper_backward_queries, grid, arguments, num_warps=4)
