"""8-bit values converted to what tensor cores multiply, and 8-bit weights in the order that fits
them.

An 8-bit wgmma takes both operands by the index that is summed over, here the keys, and values are
stored by head and column. Either they are widened to 16 bits, which may have any order, or
transposed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PART = gl.constexpr(32)  # keys that are made ready at a time, for want of registers
TO_E4M3 = gl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }""")
TO_BF16 = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
TO_FP16 = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
# 1.5 * 2 ** 23 more: the nearest integer is in the low bits
TO_INT8 = gl.constexpr("""{
    .reg .f32 a, b;
    .reg .b32 low, high;
    add.rn.f32 a, $1, 0f4B400000;
    add.rn.f32 b, $2, 0f4B400000;
    prmt.b32 low, a, b, 0x0040;
    add.rn.f32 a, $3, 0f4B400000;
    add.rn.f32 b, $4, 0f4B400000;
    prmt.b32 high, a, b, 0x0040;
    prmt.b32 $0, low, high, 0x5410;
    }""")

# 1024 + (x + 128) less 1152
INT8_TO_FP16 = gl.constexpr("""{
    .reg .b32 above, pair, less;
    mov.b32 less, 0x64806480;
    xor.b32 above, $2, 0x80808080;
    prmt.b32 pair, above, 0x64646464, 0x4140;
    sub.rn.f16x2 $0, pair, less;
    prmt.b32 pair, above, 0x64646464, 0x4342;
    sub.rn.f16x2 $1, pair, less;
    }""")
E4M3_TO_FP16 = gl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }""")


# the first byte of fp16
E5M2_TO_FP16 = gl.constexpr("""{
    .reg .b32 u;
    mov.b32 u, $2;
    prmt.b32 $0, u, 0, 0x1404;
    prmt.b32 $1, u, 0, 0x3424;
    }""")


@gluon.constexpr_function
def pairs_layout(pairs):
    """The layout [PART, pairs] of 16 bits that ldmatrix gives when it transposes."""
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    registers, warps = [[1, 0], [8, 0], [16, 0], [0, 8]], [[0, 16], [0, 32]]
    if pairs == 32:
        registers, warps = [[1, 0], [8, 0], [0, 8]], [[0, 16], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [32, pairs])


@gluon.constexpr_function
def widening(stored):
    """The instructions from four of this type to fp16."""
    codes = {"fp8e4nv": E4M3_TO_FP16, "fp8e5": E5M2_TO_FP16, "int8": INT8_TO_FP16}
    return codes[stored.name].value


@gluon.constexpr_function
def rows_of_eights(dim):
    """The layout of stored rows to be widened: eight neighbours a thread."""
    return gl.BlockedLayout([1, 8], [256 // dim, dim // 8], [4, 1], [1, 0])


@gluon.jit
def widened(stored, ready):
    """Dequantizes a stored tile to fp16, which holds its numbers exactly."""
    layout: gl.constexpr = rows_of_eights(stored.shape[1])
    code: gl.constexpr = widening(stored.dtype)
    x = stored.load(layout)
    return gl.inline_asm_elementwise(
        code, "=&r,=&r,r", [x], dtype=ready.dtype, is_pure=True, pack=4
    )


@gluon.jit
def widen_rows_of_tile(stored, ready, scales, count):
    """Dequantizes a tile [keys, dim], times `scales` [keys] unless None. Keys from `count` on
    become 0, as e4m3 bytes behind the last key may be NaN."""
    KEYS: gl.constexpr = stored.shape[0]
    wide = widened(stored, ready)
    rows: gl.constexpr = gl.SliceLayout(1, wide.type.layout)
    if scales is not None:
        by = scales.load(rows)[:, None]
        CODE: gl.constexpr = "mul.rn.f16x2 $0, $1, $2;"
        wide = gl.inline_asm_elementwise(
            CODE, "=r,r,r", [wide, by], dtype=ready.dtype, is_pure=True, pack=2
        )
    if count < KEYS:
        wide = gl.where((gl.arange(0, KEYS, layout=rows) < count)[:, None], wide, 0.0)
    ready.store(wide)


@gluon.jit
def transpose(stored, ready, count):
    """Bytes [dim, PART] of [PART, dim], both two to an element: an 8-bit wgmma takes values by key.

    ldmatrix transposes pairs of bytes, so a thread gets two keys of two columns and sorts the bytes
    itself. Keys come out in the order in which a thread has its p: see `words_of`. Even columns
    of 16 come before odd ones, as then no two rows of a stmatrix share banks: see
    `ordered_columns`. Keys from `count` on become 0: as another sequence's they may be NaN.
    """
    PAIRS: gl.constexpr = stored.shape[1]  # of columns
    layout: gl.constexpr = pairs_layout(PAIRS)
    x = stored.load(layout)
    if count < PART:
        rows = gl.arange(0, PART, layout=gl.SliceLayout(1, layout))
        x = gl.where((rows < count)[:, None], x, 0)
    near, far = x.reshape([PART // 16, 2, 8, PAIRS]).permute((0, 2, 3, 1)).split()
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=&r,=r,r,r",
        [near, far],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )
    both = gl.join(even, odd).reshape([PART // 2, PAIRS // 8, 8, 2])
    ready.store(both.permute((1, 3, 2, 0)).reshape([2 * PAIRS, PART // 2]))


@gluon.jit
def words_of(x, dtype: gl.constexpr):
    """x [rows, keys] in 8 bits, four keys a word, in the order in which `transpose` leaves values.

    That is the order in which a thread has them: four neighbours of the wgmma operand are four of
    its own products.
    """
    ROWS: gl.constexpr = x.shape[0]
    KEYS: gl.constexpr = x.shape[1]
    fours = x.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    firsts, seconds = fours.reshape([ROWS, KEYS // 4, 2, 2]).split()
    a, c = firsts.split()
    b, d = seconds.split()
    code: gl.constexpr = TO_INT8 if dtype == gl.int8 else TO_E4M3
    return gl.inline_asm_elementwise(
        code, "=r,r,r,r,r", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def words_of_pairs(x, dtype: gl.constexpr):
    """Packs x [rows, keys] of 16 bits, two neighbours a 32-bit word."""
    ROWS: gl.constexpr = x.shape[0]
    KEYS: gl.constexpr = x.shape[1]
    a, b = x.reshape([ROWS, KEYS // 2, 2]).split()
    CODE: gl.constexpr = TO_BF16 if dtype == gl.bfloat16 else TO_FP16
    return gl.inline_asm_elementwise(CODE, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def halves_of_words(words, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpacks words to [rows, 2 * words] of 16 bits; see `bytes_of_words`."""
    ROWS: gl.constexpr = words.shape[0]
    halves = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))
    x = halves.reshape([ROWS, 2 * words.shape[1]])
    return gl.convert_layout(x.to(dtype, bitcast=True), layout, assert_trivial=True)


@gluon.jit
def bytes_of_words(words, dtype: gl.constexpr, layout: gl.constexpr):
    """Unpacks words to [rows, 4 * words] of 8 bits. Loops carry words, since carried as bytes each
    would take a register."""
    ROWS: gl.constexpr = words.shape[0]
    a = words.to(gl.int8)
    b = (words >> 8).to(gl.int8)
    c = (words >> 16).to(gl.int8)
    d = (words >> 24).to(gl.int8)
    x = gl.join(gl.join(a, c), gl.join(b, d)).reshape([ROWS, 4 * words.shape[1]])
    return gl.convert_layout(x.to(dtype, bitcast=True), layout, assert_trivial=True)


@gluon.jit
def ordered_columns(acc):
    """acc [rows, dim] in the order of columns that values had before `transpose`."""
    ROWS: gl.constexpr = acc.shape[0]
    DIM: gl.constexpr = acc.shape[1]
    sixteens = acc.reshape([ROWS, DIM // 16, 2, 8])
    return sixteens.permute((0, 1, 3, 2)).reshape([ROWS, DIM])
