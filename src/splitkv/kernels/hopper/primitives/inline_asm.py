"""Instructions that are there for what they do and give no number."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def act(CODE: gl.constexpr, KINDS: gl.constexpr, operands):
    """Instructions on operands, $1, $2 and so on, of these constraints. What is written in assembly
    has to give something: a zero that nobody asks for."""
    GIVING: gl.constexpr = CODE + " mov.b32 $0, 0;"
    ALL: gl.constexpr = "=r," + KINDS
    gl.inline_asm_elementwise(GIVING, ALL, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def act_alone(CODE: gl.constexpr):
    """Instructions without operands."""
    act(CODE, "r", (gl.program_id(0) * 0,))
