"""Fences for the compilers' schedulers: each makes a value known at a place of the program, where
they would otherwise compute it earlier or later."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.primitives.named_barriers import NEVER

SUMS_ARE_KNOWN = gl.constexpr(f"""{{
    .reg .pred p;
    .reg .f32 both;
    add.f32 both, $2, $3;
    setp.gt.f32 p, both, 0f7F7FFFFF;
    @p bar.sync {NEVER.value}, 128;
    mov.b32 $0, $2;
    mov.b32 $1, $3;
    }}""")
BITS_ARE_KNOWN = gl.constexpr(
    "{ .reg .pred p; setp.eq.b32 p, $1, 0x7FFFDEAD; "
    f"@p bar.sync {NEVER.value}, 128; mov.b32 $0, $1; }}"
)


@gluon.jit
def before_wait(sums, BRANCH: gl.constexpr):
    """Keeps sums of weights, known before the next wait for a product.

    ptxas moves such a wait up over all arithmetic, and the exponentials would no longer run under
    the product. Over a barrier it does not; this one is for sums that are impossible. Branches with
    numbers of their own stay apart: what they have in common would else be moved behind both.
    """
    CODE: gl.constexpr = named(SUMS_ARE_KNOWN, BRANCH)
    return gl.inline_asm_elementwise(
        CODE,
        "=r,=r,r,r",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.constexpr_function
def named(code, number):
    """Instructions told from the same ones with another number."""
    return f"// {number}\n{code}"


@gluon.jit
def known(x):
    """Keeps numbers, known before the next wait for a product: as `before_wait`, with a barrier
    for a pattern of bits that no integer here and no result of arithmetic has."""
    return gl.inline_asm_elementwise(
        BITS_ARE_KNOWN,
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def known_now(x):
    """Keeps 32-bit values in registers of their own up to here, and lets nothing be computed from
    them before: a product that is under way writes to those registers."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def again(x, scarce):
    """Returns an integer such that what follows from it is computed where it is used. Without it,
    that is computed once before all items and held in registers that every step lacks. scarce: not
    None where registers are; None: the integer is returned as it is."""
    if scarce is not None:
        x = known_now(x)
    return x


@gluon.jit
def programs(scarce):
    """Returns the number of programs, read anew where registers are `scarce` (not None)."""
    count = gl.num_programs(0)
    if scarce is not None:
        count = gl.inline_asm_elementwise(
            "mov.u32 $0, %nctaid.x;",
            "=r,r",
            [gl.program_id(0)],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    return count
