"""Sizes on the host that kernels for whole sequences are given: of tensors, grids and scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import ceil_div
from splitkv.kernels.host.relaunch import Layout
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring

LOG2_E = math.log2(math.e)


def tiles_and_lanes(
    problem: Problem, device: Device, total: int, batch: int, rows: int, tile: int, lane_bytes: int
) -> tuple[int, int, int]:
    """(tiles of a lane, lanes, lanes together) for tokens of `rows` rows, `total` of so many
    sequences.

    Together: as many lanes as have their `lane_bytes` of operands in half of the L2, which on the
    large GPUs is in two halves that hold the same.
    """
    if problem.kind == "varlen":
        return total * rows // tile + batch + 1, problem.num_kv_heads, problem.num_kv_heads
    length, lanes = total // max(batch, 1), batch * problem.num_kv_heads
    together = device.l2_bytes // 2 // max(lane_bytes, 1)
    return ceil_div(length * rows, tile), lanes, max(1, min(together, lanes))


def bounds_of(problem: Problem) -> tuple[int | None, int | None, int | None]:
    """Bounds of a mask without chunks: left, right, sink tokens."""
    return problem.mask.bounds[:3]


def strides_of(x: Tensor) -> Strides:
    """The Strides of an operand or its like.

    Along what has one element any is right: not 1, as Triton knows that by its value, and of one
    token that of more, for which a kernel may be compiled.
    """
    return strides_of_layout(x.shape, x.stride())


def strides_of_layout(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """The Strides of a tensor with such a shape and strides, as of an operand."""
    n, h, step_n, step_h = shape[-3], shape[-2], strides[-3], strides[-2]
    return Strides(
        0 if len(shape) == 3 or shape[0] == 1 else strides[0],
        0 if n == 1 and step_n == 1 else step_n,
        0 if h == 1 else step_h,
    )


class ResultLayouts(NamedTuple):
    """Layouts of out, as given or as it will be made, and of lse; their Strides, as kernels take
    them."""

    out: Layout
    lse: Layout
    out_strides: Strides
    lse_strides: Strides


def result_layouts(problem: Problem, operands: Operands) -> ResultLayouts:
    """The ResultLayouts of a call that has queries."""
    shape, given, dim = operands.q.shape, operands.out, problem.head_dim_v
    tokens, heads = shape[-3], shape[-2]
    step, by_head = heads * dim, dim if heads > 1 else 0
    out: Layout
    lse: Layout
    if len(shape) == 3:
        out, lse = ((tokens, heads, dim), (step, dim, 1)), ((heads, tokens), (tokens, 1))
        strides, lse_strides = Strides(0, step, by_head), Strides(0, 1, tokens)
    else:
        batch, slab, rows = shape[0], tokens * step, heads * tokens
        out = (batch, tokens, heads, dim), (slab, step, dim, 1)
        lse = (batch, heads, tokens), (rows, tokens, 1)
        strides = Strides(slab if batch > 1 else 0, step, by_head)
        lse_strides = Strides(rows, 1, tokens)
    if given is not None:
        out = given.shape, given.stride()
        strides = strides_of_layout(*out)
    return ResultLayouts(out, lse, strides, lse_strides)


class SequenceLengths(NamedTuple):
    """The greatest lengths of sequences, the tokens of q, and how many sequences there are, those
    of a call."""

    seqlen_q: int
    seqlen_k: int
    total_q: int
    batch: int


def lengths_of(problem: Problem, operands: Operands) -> SequenceLengths:
    """The SequenceLengths of operands; those of the problem where they do not say."""
    x, shape = operands, operands.q.shape
    starts = x.cu_seqlens_q
    return SequenceLengths(
        problem.seqlen_q if x.seqlen_q is None else x.seqlen_q,
        problem.seqlen_k if x.seqlen_k is None else x.seqlen_k,
        shape[0] if len(shape) == 3 else shape[0] * shape[1],
        problem.batch if starts is None else starts.shape[0] - 1,
    )


def bytes_of_keys(problem: Problem) -> Callable[[SequenceLengths], int]:
    """Gives what computes `Problem.kv_bytes` at other lengths, where these are on the host."""
    of_one, num_keys = problem.bytes_of_keys(1), problem.mask.num_keys
    return lambda lengths: of_one * num_keys(lengths.seqlen_q, lengths.seqlen_k)


class SequenceSizes(NamedTuple):
    """The sizes of a launch that follow from the lengths of its call.

    grid         programs along each axis
    arguments    of the kernel, by name
    total_q      tokens of q in all
    batch        sequences
    max_tokens   tokens of the longest sequences whose keys are split
    results      ResultLayouts
    """

    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    total_q: int
    batch: int
    max_tokens: int
    results: ResultLayouts


def lse_shape(x: Tensor) -> tuple[int, ...]:
    """The shape of the LSE of queries x."""
    shape = x.shape
    return (shape[0], shape[2], shape[1]) if len(shape) == 4 else (shape[1], shape[0])


def lse_strides(x: Tensor) -> Strides:
    """The Strides of the contiguous LSE of queries x."""
    if x.dim() == 3:
        return Strides(0, 1, x.shape[0])
    tokens, heads = x.shape[1:3]
    return Strides(heads * tokens, 1, tokens)


def offset_type(tile: int, group: int, *tensors: Tensor) -> Any:
    """The type of offsets inside a row tile: 32 bits save registers and nearly always suffice."""
    far = (tile // group * x.stride(-3) + group * x.stride(-2) for x in tensors)
    return tl.int32 if all(n < 1 << 31 for n in far) else tl.int64


def stride_slope(slopes: Tensor | None) -> int:
    """Elements between sequences."""
    return slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0


def scale_and_softcap(operands: Operands) -> tuple[float, float | None]:
    """The scale and soft cap of scores as in tile/score.py."""
    if operands.softcap:
        return operands.softmax_scale / operands.softcap, operands.softcap
    return operands.softmax_scale * LOG2_E, None


def scoring_of(operands: Operands, seed: Tensor | None) -> Scoring:
    dropout_p = operands.dropout_p
    return Scoring(*scale_and_softcap(operands), seed, dropout_p * 2.0**24, 1 / (1 - dropout_p))


def draw_seed(q: Tensor) -> Tensor:
    """Drawn from torch's generator on the device, so that nothing waits and graphs draw anew."""
    return torch.randint(0, 1 << 62, (), dtype=torch.int64, device=q.device)
