"""Sizes on the host that kernels for whole sequences are given: of tensors, grids and scores."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.core.device import Device
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring

LOG2_E = math.log2(math.e)


def tiles_and_lanes(
    problem: Problem, device: Device, total: int, rows: int, tile: int, lane_bytes: int
) -> tuple[int, int, int]:
    """(tiles of a lane, lanes, lanes together) for tokens of `rows` rows, `total` if packed.

    Together: as many lanes as have their `lane_bytes` of operands in half of the L2, which on the
    large GPUs is in two halves that hold the same.
    """
    if problem.kind == "varlen":
        return total * rows // tile + problem.batch + 1, problem.num_kv_heads, problem.num_kv_heads
    length, lanes = total // max(problem.batch, 1), problem.batch * problem.num_kv_heads
    together = device.l2_bytes // 2 // max(lane_bytes, 1)
    return triton.cdiv(length * rows, tile), lanes, max(1, min(together, lanes))


def bounds_of(problem: Problem) -> tuple[int | None, int | None, int | None]:
    """Bounds of a mask without chunks: left, right, sink tokens."""
    return problem.mask.bounds[:3]


def strides_of(x: Tensor) -> Strides:
    """The Strides of an operand or its like.

    Along what has one element any is right: not 1, as Triton knows that by its value, and of one
    token that of more, for which a kernel may be compiled.
    """
    steps = [0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)]
    if x.shape[-3] == 1 and x.stride(-3) != 1:
        steps[-3] = x.stride(-3)
    return Strides(*(steps if x.dim() == 4 else [0, *steps])[:3])


def lse_shape(x: Tensor) -> tuple[int, ...]:
    """The shape of the LSE of queries x."""
    return (x.shape[0], x.shape[2], x.shape[1]) if x.dim() == 4 else (x.shape[1], x.shape[0])


def lse_strides(x: Tensor) -> Strides:
    """The Strides of the contiguous LSE of queries x."""
    batch, tokens = (x.shape[2] * x.shape[1], x.shape[1]) if x.dim() == 4 else (0, x.shape[0])
    return Strides(batch, 1, tokens)


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
