"""From products of queries and keys to scores and weights, and back to their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.dropout import kept
from splitkv.kernels.tile.score import score_log2, tanh
from splitkv.rounding import MIN_SCALE

LEAST_SCALE = tl.constexpr(MIN_SCALE)


class Queries(NamedTuple):
    """Facts of each row that scores need: its token, key position, ALiBi slope or None, and number
    of sequence and head.

    [rows, 1], or [1, rows] where scores are transposed.
    """

    t: Any
    pos: Any
    slope: Any
    sequence_head: Any


class Scoring(NamedTuple):
    """From q . k to a weight.

    scale, softcap        see `score_log2`
    seed_ptr, drop_below  see tile/dropout.py; None without dropout
    keep_scale            1 / (1 - dropout_p)
    """

    scale: Any
    softcap: Any
    seed_ptr: Any
    drop_below: Any
    keep_scale: Any


class WeightGradients(NamedTuple):
    """Weights and gradients of a tile of scores: p; what dropout keeps of it; gradients of the
    scores, and of scale * q . k."""

    p: Any
    p_kept: Any
    ds: Any
    dx: Any


@triton.jit
def above_zero(factor):
    """A factor of scores, not 0 as that of a row or head of zeros may be: a masked score of -inf
    stays that. NaN stays as well."""
    return tl.where(factor < LEAST_SCALE, LEAST_SCALE, factor)


@triton.jit
def scores(qk, scoring, queries, offs_n):
    """(s, unit) of products qk [TILE_M, TILE_N]: s * unit are the scores in base 2.

    Without modifiers the scale is left to the exponential, where it costs nothing.
    """
    s = qk
    unit = 1.0
    if scoring.softcap is None and queries.slope is None:
        unit = scoring.scale
    else:
        s = score_log2(qk, scoring.scale, scoring.softcap, queries.slope, queries.pos, offs_n)
    return s, unit


@triton.jit
def scores_of_rows(qk, q_scale, scoring, queries, offs_n):
    """(s, unit, column): s * column are the scores in base 2, unit a row's factor of them.

    q_scale   [TILE_M], another factor of each row of qk, or None
    """
    plain: tl.constexpr = scoring.softcap is None and queries.slope is None
    if q_scale is not None and not plain:
        qk *= q_scale[:, None]
    s, unit = scores(qk, scoring, queries, offs_n)
    column = unit
    if q_scale is not None and plain:
        unit = above_zero(unit * q_scale)
        column = unit[:, None]
    return s, unit, column


@triton.jit
def gradients(
    qk,
    dp,  # gradients of the output . v
    total,  # see kernels/backward, in base 2
    delta,
    offs_n,
    keys,  # number of keys
    queries,  # Queries
    scoring,  # Scoring
    bounds,  # Bounds
    REGION: tl.constexpr,  # see `visits` of tile/visit.py
):
    """Computes the WeightGradients of products qk, each of the shape of qk.

    The other arguments broadcast to that shape.
    """
    s, unit = scores(qk, scoring, queries, offs_n)
    p = tl.exp2(s * unit - total)
    if REGION == "edges":
        p = tl.where(visible(bounds, queries.pos, offs_n, keys), p, 0.0)
    p_kept = p
    if scoring.seed_ptr is not None:
        keep = kept(scoring.seed_ptr, scoring.drop_below, offs_n, queries.t, queries.sequence_head)
        p_kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * scoring.keep_scale, 0.0)
    ds = p * (dp - delta)
    dx = ds
    if scoring.softcap is not None:
        ratio = tanh(qk * scoring.scale)
        dx = ds * (1.0 - ratio * ratio)
    return WeightGradients(p, p_kept, ds, dx)
