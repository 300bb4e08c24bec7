"""Fences for the schedulers of LLVM and ptxas, which move arithmetic over waits for products.

A warpgroup works out weights while a product is under way, and waits for that product afterwards.
ptxas moves such a wait up over all arithmetic that does not depend on it, and nothing would run
under the product. It moves no wait over a barrier. So what is held here is asked, in a branch, for
something that it cannot be, and in that branch is a barrier that no warp comes to.

    hold_sums        sums of weights are there before the next wait; they are never this large
    hold_bits        any number is; none has this pattern of bits
    opaque           a copy that neither compiler sees through: nothing behind it is computed before
    rematerialized   an integer whose consequences are computed where they are used
    count_programs   the size of the grid, likewise

`added_before_wait` of row_sums.py and `hold_words` of backward/masked_weights.py do the same.
"""

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
def hold_sums(sums, BRANCH: gl.constexpr):
    """Keeps sums of weights, known before the next wait for a product.

    Weights are relative to maxima, so sums of them are finite or NaN, which is not above anything:
    no two come to more than fp32 has. Where they could, warps would wait for ever.

    BRANCH   a number of the branch that this is in: what branches have in common would else be
             moved behind both
    """
    CODE: gl.constexpr = tagged(SUMS_ARE_KNOWN, BRANCH)
    return gl.inline_asm_elementwise(
        CODE,
        "=r,=r,r,r",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.constexpr_function
def tagged(code, number):
    """Instructions told from the same ones with another number."""
    return f"// {number}\n{code}"


@gluon.jit
def hold_bits(x):
    """Keeps numbers of 32 bits, known before the next wait for a product."""
    return gl.inline_asm_elementwise(
        BITS_ARE_KNOWN,
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def opaque(x):
    """Copies 32-bit values to registers of their own. Nothing is computed from the copy before it
    is made: a product that is under way writes to registers that are still read until then."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def rematerialized(x, scarce):
    """Returns an integer such that what follows from it is computed where it is used. Without it,
    that is computed once before all items and held in registers that every step lacks.

    scarce   not None where registers are; None: the integer is returned as it is
    """
    if scarce is not None:
        x = opaque(x)
    return x


@gluon.jit
def count_programs(scarce):
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
