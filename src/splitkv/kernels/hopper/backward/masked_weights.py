"""Softmax weights p [keys, rows] of `hopper_backward`, and how they are kept for a product."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.backward.records import HALF
from splitkv.kernels.hopper.prefill.mask import choose, from_column
from splitkv.kernels.hopper.primitives.conversion import words_of_pairs
from splitkv.kernels.hopper.primitives.named_barriers import NEVER
from splitkv.kernels.hopper.primitives.row_sums import sums_of_threads


@gluon.jit
def keep_visible(p, bounds, FIRST: gl.constexpr, first_pos, num_keys):
    """Sets p [keys, rows] to 0 where a row does not see a key; keys count from FIRST and rows from
    `first_pos` on.

    A thread has the same columns of two keys, each seen in bits between two numbers: see
    prefill/mask.py.
    """
    like = sums_of_threads(p)
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, like.type.layout))[None, :]
    n = gl.arange(0, HALF, layout=gl.SliceLayout(1, like.type.layout))[:, None] + FIRST
    ahead = n - first_pos
    seen = gl.where(n < num_keys, -1, 0) + 0 * quarter
    if bounds.right is not None:
        seen &= from_column(ahead - bounds.right, quarter)
    if bounds.left is not None:
        near = ~from_column(ahead + bounds.left + 1, quarter)
        if bounds.sink_tokens is not None:
            near |= gl.where(n < bounds.sink_tokens, -1, 0)
        seen &= near
    return choose(p, seen, 0)


@gluon.jit
def masked_weights(s, total, i, work, scores, FIRST: gl.constexpr):
    """Computes p [keys, rows] of products s with row tile i, the keys being those of the program
    from FIRST on; total [1, rows]."""
    p = gl.exp2(s * scores.scale_log2 - total)
    if (i < work.rows.middle) | (i >= work.rows.middle_end):
        first_pos = i * s.shape[1] + work.shift
        p = keep_visible(p, scores.bounds, FIRST, first_pos, work.num_keys)
    return p


@gluon.constexpr_function
def hold_code(count):
    """Instructions of `hold_words` for so many words of a thread, and their constraints."""
    code = "{ .reg .pred negative; .reg .b32 all; or.b32 all, $0, $1;"
    code += "".join(f"or.b32 all, all, ${n};" for n in range(2, count))
    code += f"setp.lt.s32 negative, all, 0; @negative bar.sync {NEVER.value}, 128; }}"
    return code, ",".join(["=r"] * count + [str(n) for n in range(count)])


@gluon.jit
def hold_words(p, dtype: gl.constexpr):
    """Rounds p [keys, rows] to 16 bits, two a word, before the next wait for a product.

    ptxas does not move that wait over a barrier. The barrier is for weights with a sign, which
    exponentials do not have: see `hold_sums`.
    """
    words = words_of_pairs(p, dtype)
    COUNT: gl.constexpr = words.shape[0] * words.shape[1] // 128  # of a thread
    CODE: gl.constexpr = hold_code(COUNT)
    return gl.inline_asm_elementwise(
        CODE[0], CODE[1], [words], dtype=gl.int32, is_pure=False, pack=COUNT
    )
