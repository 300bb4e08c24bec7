"""Sizes on the host that kernels for whole sequences are given: of tensors, grids and scores.

Calls ask for some of them before a kernel is bound: Triton and device code are imported when they
are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.core.tiles import ceil_div
from splitkv.kernels.host.lengths import Layout
from splitkv.kernels.tile.strides import Strides

if TYPE_CHECKING:
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
    return Strides(*row_steps(shape, strides))


def row_steps(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int]:
    """The items of `strides_of_layout`, a plain tuple, as they are asked for with every length."""
    if len(shape) == 3:
        (n, h, _), (step_n, step_h, _), step_b = shape, strides, 0
    else:
        (b, n, h, _), (step_b, step_n, step_h, _) = shape, strides
        if b == 1:
            step_b = 0
    return step_b, 0 if n == 1 and step_n == 1 else step_n, 0 if h == 1 else step_h


class ResultLayouts(NamedTuple):
    """Layouts of out, as given or as it will be made, and of lse; the items of the Strides of out,
    as kernels take them, and those of lse between sequences and between heads."""

    out: Layout
    lse: Layout
    out_strides: tuple[int, int, int]
    lse_strides: tuple[int, int]


def made_layouts(shape: Sequence[int], heads: int, dim: int) -> tuple[Layout, Layout]:
    """The layouts of out and lse as a call makes them, of so many heads and columns; shape: of q.
    Plain tuples, as they are made for every length."""
    row = heads * dim
    if len(shape) == 3:
        tokens = shape[0]
        return ((tokens, heads, dim), (row, dim, 1)), ((heads, tokens), (tokens, 1))
    batch, tokens = shape[0], shape[1]
    out = (batch, tokens, heads, dim), (tokens * row, row, dim, 1)
    return out, ((batch, heads, tokens), (heads * tokens, tokens, 1))


def result_layouts(problem: Problem, shape: Sequence[int], given: Layout | None) -> ResultLayouts:
    """The ResultLayouts of a call that has queries.

    shape   of q
    given   the layout of the caller's output, if there is one
    """
    out, lse = made_layouts(shape, problem.num_heads, problem.head_dim_v)
    if given is not None:
        out = given
    packed, steps = len(shape) == 3, lse[1]
    lse_strides = (0, steps[0]) if packed else (steps[0], steps[1])
    return ResultLayouts(out, lse, row_steps(*out), lse_strides)


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


class SequenceLayouts(NamedTuple):
    """A call but for addresses: its lengths, and the layouts of its tensors.

    out   None: it will be made
    """

    lengths: SequenceLengths
    q: Layout
    k: Layout
    v: Layout
    out: Layout | None


def layouts_of_call(problem: Problem, operands: Operands) -> SequenceLayouts:
    """The SequenceLayouts of operands."""
    x = operands
    q, k, v = ((t.shape, t.stride()) for t in (x.q, x.k, x.v))
    out = None if x.out is None else (x.out.shape, x.out.stride())
    return SequenceLayouts(lengths_of(problem, x), q, k, v, out)


CallLayout = tuple[tuple[int, int, int], tuple[Any, Any], tuple[Any, Any, Any]]
"""The layout of a call, by which what launches it is known: ((greatest lengths of queries and keys,
sequences), (shapes of q and k), (strides of q, k and v)). A plain tuple, as every call makes it."""


def operand_layouts(here: CallLayout, v_shape: Sequence[int]) -> tuple[Layout, Layout, Layout]:
    """The layouts of q, k and v; v_shape: of values."""
    (q_shape, k_shape), (of_q, of_k, of_v) = here[1], here[2]
    of_keys = k_shape, of_k
    of_values = of_keys if of_v == of_k and v_shape == k_shape else (v_shape, of_v)
    return (q_shape, of_q), of_keys, of_values


def layouts_at(here: CallLayout, v_shape: Sequence[int], out: Layout | None) -> SequenceLayouts:
    """The SequenceLayouts of tensors.

    v_shape   of values; out: the layout of the output, if that is given
    """
    (queries, keys, batch), q_shape = here[0], here[1][0]
    total = q_shape[0] if len(q_shape) == 3 else q_shape[0] * q_shape[1]
    lengths = SequenceLengths(queries, keys, total, batch)
    return SequenceLayouts(lengths, *operand_layouts(here, v_shape), out)


class SequenceSizes(NamedTuple):
    """The sizes of a launch that follow from the lengths of its call.

    grid         programs along each axis
    arguments    of the kernel, in the order in which it names them
    lengths      SequenceLengths
    max_tokens   tokens of the longest sequences whose keys are split
    results      ResultLayouts
    """

    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    lengths: SequenceLengths
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
    import triton.language as tl

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
    """The record of a kernel's arguments about scores; seed: of dropout."""
    from splitkv.kernels.tile.weight import Scoring

    dropout_p = operands.dropout_p
    return Scoring(*scale_and_softcap(operands), seed, dropout_p * 2.0**24, 1 / (1 - dropout_p))


def draw_seed(q: Tensor) -> Tensor:
    """Drawn from torch's generator on the device, so that nothing waits and graphs draw anew."""
    return torch.randint(0, 1 << 62, (), dtype=torch.int64, device=q.device)
