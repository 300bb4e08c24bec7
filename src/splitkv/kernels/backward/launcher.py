"""The host side of the backward for any GPU: memory, and launches by named arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from splitkv import reference
from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.core.variants import Backward, BackwardTiles, RowSplits
from splitkv.kernels.backward.finish import SinkSums, SplitSums, backward_finish
from splitkv.kernels.backward.keys import backward_keys
from splitkv.kernels.backward.queries import backward_queries
from splitkv.kernels.backward.records import BackwardConfig, Gradients, GradientTensors, Stats
from splitkv.kernels.backward.rows import statistics
from splitkv.kernels.host.arguments import in_order
from splitkv.kernels.host.launch import launch_by_name
from splitkv.kernels.host.partition import padded_dims
from splitkv.kernels.host.sequence_sizes import (
    lengths_of,
    offset_type,
    scoring_of,
    stride_slope,
    strides_of,
    tiles_and_lanes,
)
from splitkv.kernels.tile.band import Bounds

# Of `backward_finish`: keys a program, and splits and parts of dsink that it reads at once.
SUM_TILE, SUM_SPLITS, SINKS_TOGETHER = 4, 8, 4096


def allocate_gradients(x: Operands, grad: Tensor) -> GradientTensors:
    """The operands of a call, the gradient of out, and memory for those to find."""
    return GradientTensors(
        q=x.q,
        k=x.k,
        v=x.v,
        grad=grad,
        dq=torch.empty_like(x.q),
        dk=torch.empty_like(x.k),
        dv=torch.empty_like(x.v),
    )


def strides_of_tensors(tensors: GradientTensors) -> GradientTensors:
    """The Strides of each."""
    return GradientTensors(
        q=strides_of(tensors.q),
        k=strides_of(tensors.k),
        v=strides_of(tensors.v),
        grad=strides_of(tensors.grad),
        dq=strides_of(tensors.dq),
        dk=strides_of(tensors.dk),
        dv=strides_of(tensors.dv),
    )


def programs_of_splits(
    problem: Problem, splits: RowSplits, tile_n: int, keys: int = SUM_TILE
) -> int:
    """Programs that add up dk and dv of split rows, so many keys each."""
    if splits.splits == 1:
        return 0
    return problem.batch * problem.num_kv_heads * splits.tiles * (tile_n // keys)


def finish_arguments(problem: Problem, splits: RowSplits, tile_n: int) -> dict[str, Any]:
    """The arguments of `backward_finish` for its splits, by name."""
    return {
        "num_kv_heads": problem.num_kv_heads,
        "split_tiles": splits.tiles,
        "row_splits": splits.splits,
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "TILE_N": tile_n,
        "ROWS": SUM_TILE,
        "TOGETHER": SUM_SPLITS,
        "SINKS_TOGETHER": SINKS_TOGETHER,
    }


def allocate_splits(problem: Problem, x: Operands, splits: RowSplits, tile_n: int) -> Tensor | None:
    """Memory for dk and dv of splits of rows, see finish.py; None: no rows are split."""
    p = problem
    if splits.splits == 1:
        return None
    shape = p.batch * p.num_kv_heads * splits.tiles, splits.splits, tile_n
    return x.q.new_empty((*shape, p.head_dim + p.head_dim_v), dtype=torch.float32)


class BackwardLauncher:
    """The kernels bound to one problem and device.

    Called with the operands of a forward, its seed, out and lse, and the gradients of both; returns
    those of q, k, v, sink_logits and alibi_slopes.
    """

    def __init__(self, problem: Problem, device: Device, variant: Backward) -> None:
        self.problem, self.device, self.variant = problem, device, variant

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
        elif grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        if grad_lse is not None:
            grad_lse = grad_lse.contiguous()
        stats = statistics(self.problem, x, out, lse, grad_out, grad_lse, of_slopes)
        tensors = allocate_gradients(x, grad_out)
        splits = self.launch_keys(x, seed, stats, tensors)
        self.launch_queries(x, seed, stats, tensors)
        dsink = self.launch_finish(x, stats, tensors, splits)
        dslopes = None
        if stats.slope is not None:
            dslopes = self.of_slopes(x, stats.slope).to(x.alibi_slopes.dtype)
        return Gradients(tensors.dq, tensors.dk, tensors.dv, dsink, dslopes)

    def again(
        self,
        operands: Operands,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
    ) -> None:
        """Nothing: Triton launches these kernels, every time."""

    def shared_arguments(
        self, x: Operands, seed: Tensor | None, stats: Stats, tensors: GradientTensors
    ) -> dict[str, Any]:
        """The arguments that both kernels take, by name."""
        p, lengths = self.problem, lengths_of(self.problem, x)
        bounds = Bounds(*p.mask.bounds)
        return {
            "ptrs": tensors,
            "strides": strides_of_tensors(tensors),
            "stats": stats,
            "stride_stat_b": stats.total.stride(0) if p.kind == "dense" else 0,
            "stride_stat_h": stats.total.stride(1),
            "cu_q_ptr": x.cu_seqlens_q,
            "cu_k_ptr": x.cu_seqlens_k,
            "slope_ptr": x.alibi_slopes,
            "scoring": scoring_of(x, seed),
            "softmax_scale": x.softmax_scale,
            "left": bounds.left,
            "right": bounds.right,
            "sink_tokens": bounds.sink_tokens,
            "chunk": bounds.chunk,
            "seqlen_q": lengths.seqlen_q,
            "seqlen_k": lengths.seqlen_k,
            "batch": p.batch,
            "num_kv_heads": p.num_kv_heads,
            "stride_slope": stride_slope(x.alibi_slopes),
        }

    def launch_keys(
        self, x: Operands, seed: Tensor | None, stats: Stats, tensors: GradientTensors
    ) -> Tensor | None:
        """Launches what makes dk and dv; the sums of splits of rows, or None."""
        p, c, splits = self.problem, self.variant.keys, self.variant.row_splits
        total = x.k.shape[:-2].numel()
        row_bytes = p.seqlen_q * p.group * (p.head_dim + p.head_dim_v) * p.element_bytes
        tiles, lanes, width = tiles_and_lanes(
            p, self.device, total, p.batch, 1, c.tile_n, row_bytes
        )
        split = allocate_splits(p, x, splits, c.tile_n)
        programs = p.batch * p.num_kv_heads * splits.tiles * splits.splits + tiles * lanes
        arguments = self.shared_arguments(x, seed, stats, tensors) | {
            "split_ptr": split,
            "total_k": total,
            "tiles": tiles,
            "lanes": lanes,
            "width": width,
            "split_tiles": splits.tiles,
            "row_splits": splits.splits,
            "CONFIG": self.config_of(
                c, c.tile_n, offset_type(c.tile_m, p.group, x.q, tensors.grad)
            ),
        }
        if programs:
            backward_keys[(programs,)](
                *in_order(backward_keys, arguments), num_warps=c.num_warps, enable_fp_fusion=True
            )
        return split

    def config_of(self, tiles: BackwardTiles, own: int, offset_type: Any) -> BackwardConfig:
        """The BackwardConfig of a kernel; own: rows or keys that a program keeps."""
        p = self.problem
        dim, dim_v = padded_dims(p, self.device, own, tiles.num_warps)
        return BackwardConfig(
            group=p.group,
            head_dim=p.head_dim,
            head_dim_v=p.head_dim_v,
            dim=dim,
            dim_v=dim_v,
            tile_m=tiles.tile_m,
            tile_n=tiles.tile_n,
            num_stages=tiles.num_stages,
            offset_type=offset_type,
        )

    def launch_queries(
        self, x: Operands, seed: Tensor | None, stats: Stats, tensors: GradientTensors
    ) -> None:
        """Launches what makes dq and the rows' parts of the gradients of sink logits and slopes."""
        p, c = self.problem, self.variant.queries
        total = x.q.shape[:-2].numel()
        key_bytes = p.kv_bytes // max(p.batch * p.num_kv_heads, 1)
        tiles, lanes, width = tiles_and_lanes(
            p, self.device, total, p.batch, p.group, c.tile_m, key_bytes
        )
        arguments = self.shared_arguments(x, seed, stats, tensors) | {
            "total_q": total,
            "tiles": tiles,
            "lanes": lanes,
            "width": width,
            "CONFIG": self.config_of(c, c.tile_m, offset_type(c.tile_n, 1, x.k, x.v)),
        }
        backward_queries[(tiles * lanes,)](
            *in_order(backward_queries, arguments), num_warps=c.num_warps, enable_fp_fusion=True
        )

    def launch_finish(
        self, x: Operands, stats: Stats, tensors: GradientTensors, splits: Tensor | None
    ) -> Tensor | None:
        """Launches what adds up what is left; the gradient of sink logits, or None."""
        p, c, sinks, dsink = self.problem, self.variant.keys, None, None
        heads = sequences = numbers = 0
        if stats.sink is not None:
            dsink = x.q.new_empty(x.sink_logits.shape, dtype=x.sink_logits.dtype)
            sinks, heads = SinkSums(stats.sink, dsink), p.num_heads
            sequences, numbers = stats.sink.shape[0], stats.sink.shape[2]
        added = None
        if splits is not None:
            added = SplitSums(splits, tensors.dk, tensors.dv)
        programs = heads + programs_of_splits(p, self.variant.row_splits, c.tile_n)
        arguments = {
            "sinks": sinks,
            "split_sums": added,
            "cu_k_ptr": x.cu_seqlens_k,
            "dk_strides": strides_of(tensors.dk),
            "dv_strides": strides_of(tensors.dv),
            "sink_programs": heads,
            "sink_sequences": sequences,
            "sink_lanes": p.num_kv_heads,
            "sink_numbers": numbers,
            "seqlen_k": lengths_of(p, x).seqlen_k,
            "SINK_GROUP": p.group,
            **finish_arguments(p, self.variant.row_splits, c.tile_n),
        }
        if programs:
            launch_by_name(backward_finish, (programs,), arguments)
        return dsink

    def of_slopes(self, x: Operands, rows: Tensor) -> Tensor:
        """The gradient of ALiBi slopes [num_heads] or [batch, num_heads] from rows as in Stats."""
        if x.alibi_slopes.dim() == 1:
            return rows.sum((0, 2)).flatten()
        rows = rows.transpose(1, 2).flatten(2)  # [sequences, tokens, num_heads]
        if self.problem.kind == "varlen":
            rows = reference.pad_sequences(
                rows[0], x.cu_seqlens_q, lengths_of(self.problem, x).seqlen_q
            )
        return rows.sum(1)
