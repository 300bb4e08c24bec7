"""How high the row tiles of decode on Hopper are, and in which type their scores are multiplied."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from splitkv.core.kv import AS_IS
from splitkv.core.plan import WIDE
from splitkv.core.problem import Problem

MAX_NARROW_ROWS = 32  # packed rows that are multiplied by mma


def most_rows(problem: Problem) -> int:
    """Packed rows that a tile may have. head_dim 256 in 8 bits is for mma alone, as a thread has
    too few registers."""
    in_halves = max(problem.head_dim, problem.head_dim_v) > 128
    narrow = in_halves and problem.codec != AS_IS
    return MAX_NARROW_ROWS if narrow else WIDE


def rows_of_tile(problem: Problem) -> tuple[int, ...]:
    """The values of TILE_M for a problem, least first. By mma every warp holds all rows of q, of
    which 32 of 256 would need more registers than exist; by wgmma a warp has 16."""
    rows, in_halves = problem.rows, max(problem.head_dim, problem.head_dim_v) > 128
    narrow = 16 if rows <= 16 or in_halves else 32
    if rows <= 16 or most_rows(problem) < WIDE:
        return (narrow,)
    return (narrow, WIDE) if rows <= MAX_NARROW_ROWS else (WIDE,)


def type_of_keys(problem: Problem) -> Any:
    """The type in which keys are multiplied: int8 where q may be rounded to it, else of 16 bits."""
    if problem.codec == AS_IS:
        return {"bfloat16": gl.bfloat16, "float16": gl.float16}[problem.dtype]
    return gl.int8 if rounds_rows(problem) else gl.float16


def rounds_rows(problem: Problem) -> bool:
    """Whether q is rounded to int8, so that keys are multiplied as they are."""
    return problem.codec.name == "int8" and problem.products != "widened"
