"""Inline PTX that is run for what it does and returns no number."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def run_ptx(CODE: gl.constexpr, CONSTRAINTS: gl.constexpr, operands):
    """Runs PTX instructions on operands, which are $1, $2 and so on and have these constraints.
    Inline assembly has to return something: $0 is a zero that nobody uses."""
    GIVING: gl.constexpr = CODE + " mov.b32 $0, 0;"
    ALL: gl.constexpr = "=r," + CONSTRAINTS
    gl.inline_asm_elementwise(GIVING, ALL, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def run_ptx_alone(CODE: gl.constexpr):
    """Runs PTX instructions that have no operands."""
    run_ptx(CODE, "r", (gl.program_id(0) * 0,))
