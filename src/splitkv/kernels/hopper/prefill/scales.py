"""Scales of rows, keys and values in 8 bits, and the rounding of rows of q.

Rows of q are rounded to the type of the keys as they are multiplied, before their first product: to
8 bits with a scale of the row, or beside widened keys to fp16 with a power of two taken out, which
keeps what bf16 can hold. A q that is of that type stays as it is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from splitkv.kernels.hopper.prefill.load import wait_q_full
from splitkv.kernels.hopper.prefill.records import RowScales
from splitkv.kernels.hopper.primitives.row_sums import along_rows
from splitkv.kernels.hopper.primitives.tma_ring import reinterpret
from splitkv.rounding import MIN_SCALE

LEAST_SCALE = gl.constexpr(MIN_SCALE)
# What integers are added to by the tensor cores: as bits of fp32 the sum is a number, 1.5 * 2 ** 23
# more than the integer, and so needs no conversion.
MIDDLE, MIDDLE_BITS = gl.constexpr(1.5 * 2**23), gl.constexpr(0x4B400000)


@gluon.constexpr_function
def words_layout(words, warps):
    """The layout of [rows, words] words of 32 bits, two numbers each: a thread has four neighbours,
    and the rows whose scores it has."""
    far = [[0, 16 << i] for i in range(words.bit_length() - 5)]
    registers = [[0, 1], [0, 2], *far, [8, 0]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    of_warps = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [16 * warps, words])


@gluon.jit
def larger_halves(a, b):
    """The larger of each half of two words, as integers."""
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def largest_of_rows(x, dtype: gl.constexpr):
    """[rows]: the largest absolute value of each row of words x, in fp32; of NaN infinity."""
    # without their signs numbers are in the order of their bits, NaN above infinity
    most = gl.reduce(x & 0x7FFF7FFF, 1, larger_halves)
    most = gl.maximum(most & 0xFFFF, most >> 16)
    if dtype == gl.bfloat16:
        size = gl.minimum(most << 16, 0x7F800000).to(gl.float32, bitcast=True)
    else:
        size = gl.minimum(most, 0x7C00).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return size


@gluon.constexpr_function
def rounding(dtype, of_rows):
    """Instructions that make four numbers of a type, two words, a word of four bytes: times $3,
    and 0 of int8 where $4 is 0 and not -1."""
    unpack = "prmt.b32 {0}, {2}, 0, 0x1044; and.b32 {1}, {2}, 0xFFFF0000;"
    if dtype.name == "fp16":
        unpack = "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {2};"
        unpack += "cvt.f32.f16 {0}, low; cvt.f32.f16 {1}, high; }}"
    code = "{ .reg .b32 a, b, c, d;\n"
    if of_rows.name == "int8":
        code += ".reg .b32 x, y; and.b32 x, $1, $4; and.b32 y, $2, $4;\n"
        code += unpack.format("a", "b", "x") + unpack.format("c", "d", "y")
        code += "".join(f"fma.rn.f32 {n}, {n}, $3, 0f4B400000;" for n in "abcd")
        code += "prmt.b32 a, a, b, 0x0040; prmt.b32 c, c, d, 0x0040; prmt.b32 $0, a, c, 0x5410;"
    else:
        code += unpack.format("a", "b", "$1") + unpack.format("c", "d", "$2")
        code += "".join(f"mul.rn.f32 {n}, {n}, $3;" for n in "abcd")
        code += ".reg .b16 e, f; cvt.rn.satfinite.e4m3x2.f32 e, b, a;"
        code += "cvt.rn.satfinite.e4m3x2.f32 f, d, c; mov.b32 $0, {e, f};"
    return code + "}"


@gluon.jit
def round_rows(unrounded, rows, dtype: gl.constexpr, M: gl.constexpr):
    """Writes the rows `unrounded` [ROWS, DIM], of this type, in the type of `rows`, and gives the
    scale of each."""
    ROWS: gl.constexpr = unrounded.shape[0]
    DIM: gl.constexpr = unrounded.shape[1]
    if rows.dtype == gl.float16:
        # rows lie as those of the scores
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, DIM, 32])
        x = unrounded.load(layout).to(gl.float32)
        size = gl.max(gl.where(x == x, gl.abs(x), float("inf")), 1)
        # the power of two below the largest, and its inverse
        bits = size.to(gl.int32, bitcast=True) & 0x7F800000
        bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
        scale = bits.to(gl.float32, bitcast=True)
        y = x * (0x7F000000 - bits).to(gl.float32, bitcast=True)[:, None]
        rows.store(y.to(rows.dtype))
    else:
        MOST: gl.constexpr = 127.0 if rows.dtype == gl.int8 else 448.0
        CODE: gl.constexpr = rounding(dtype, rows.dtype)
        pairs: gl.constexpr = gl.NVMMASharedLayout(unrounded.layout.swizzle_byte_width, 32, rank=2)
        fours: gl.constexpr = gl.NVMMASharedLayout(rows.layout.swizzle_byte_width, 32, rank=2)
        x = reinterpret(unrounded, gl.int32, [ROWS, DIM // 2], pairs)
        x = x.load(words_layout(DIM // 2, gl.num_warps()))
        size = largest_of_rows(x, dtype)
        scale = gl.maximum(size / MOST, LEAST_SCALE)
        finite = gl.where(size < float("inf"), -1, 0)
        one, other = x.reshape([ROWS, DIM // 4, 2]).split()
        inverse = along_rows(1.0 / scale, one).broadcast_to(one.shape)
        finite = along_rows(finite, one).broadcast_to(one.shape)
        y = gl.inline_asm_elementwise(
            CODE,
            "=r,r,r,r,r",
            [one, other, inverse, finite],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        reinterpret(rows, gl.int32, [ROWS, DIM // 4], fours).store(y)
    fence_async_shared()
    return gl.convert_layout(scale, M, assert_trivial=True)


@gluon.constexpr_function
def rows_layout(columns, dtype, warps):
    """The layout of numbers of rows beside the scores of tiles of keys of this type."""
    inner = 256 // dtype.primitive_bitwidth
    scores = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, inner])
    return gl.SliceLayout(1, scores)


@gluon.jit
def scales_of_item(item, first, scales, CONFIG: gl.constexpr, ROWS: gl.constexpr, M: gl.constexpr):
    """The RowScales of an item, of the ROWS rows from `first` on that a role has."""
    of_rows = gl.full([ROWS], 1.0, gl.float32, M)
    if scales.q_ptr is not None:
        rows = first + gl.arange(0, ROWS, layout=M)
        ok = rows < item.len_q * CONFIG.packed_heads
        t = item.first_q + rows // CONFIG.packed_heads
        head = item.head + rows % CONFIG.packed_heads
        at = item.b.to(gl.int64) * scales.q.b + t.to(gl.int64) * scales.q.t + head * scales.q.h
        of_rows = gl.load(scales.q_ptr + at, mask=ok, other=1.0)
    return RowScales(of_rows, shared_scale(item, scales, scales.k_ptr, scales.k, CONFIG))


@gluon.jit
def shared_scale(item, scales, ptr, strides, CONFIG: gl.constexpr):
    """The scale of K or V that all keys of an item share; 1 where they have their own, and of no
    keys, which an item after the last sequence has, too: there is no scale to be read."""
    scale = 1.0
    if scales.of_k is None:
        at = item.sequence.to(gl.int64) * strides.b + item.head // CONFIG.group * strides.h
        scale = gl.load(ptr + at, mask=item.len_k > 0, other=1.0)
    return scale


@gluon.jit
def factor_of_rows(program, row_scales, items, ROLE: gl.constexpr, M: gl.constexpr):
    """By what products are multiplied to be scores, as far as rows tell, once these are there.

    row_scales  RowScales
    items       items before
    ROLE        which of the roles that multiply: whose rows they are
    """
    scales = program.scales
    tiles = program.tiles
    scoring = program.batch.scoring
    wait_q_full(program.barriers, items)
    factor = row_scales.of_rows * row_scales.k_scale
    if scales.unrounded_q is not None:
        unrounded = scales.unrounded_q.index(ROLE)
        factor *= round_rows(unrounded, tiles.q.index(ROLE), tiles.out.dtype, M)
        mbarrier.arrive(program.barriers.q_empty.index(0), count=1)
    if scoring.softcap is None:
        factor *= scoring.scale
    # not 0: a masked score of -inf stays that
    return gl.where(factor < LEAST_SCALE, LEAST_SCALE, factor)


@gluon.jit
def key_at(place):
    """The key of a tile whose scales are at `place`.

    Of 32 keys those are neighbours that one thread has scores of: so it reads 16 bytes at a time.
    """
    return (place & -32) | (place & 1) | (place & 6) << 2 | (place & 24) >> 2


@gluon.jit
def by_key(x):
    """x [TILE_N] in the order of `key_at`, as keys are."""
    fours = x.reshape([x.shape[0] // 32, 4, 4, 2]).permute((0, 2, 1, 3))
    return fours.reshape([x.shape[0]])


@gluon.constexpr_function
def layout_by_key(columns, warps):
    """The layout of [columns] numbers in the order of `key_at`: what a thread has of them is what
    it has scores of."""
    bits = [[1 << i] for i in range(columns.bit_length() - 1)]
    lanes, nothing = bits[3:5], [[0]]
    of_warps = (warps.bit_length() - 1) * nothing
    return gl.DistributedLinearLayout(
        bits[:3] + bits[5:], lanes + 3 * nothing, of_warps, [], [columns]
    )


@gluon.jit
def scales_of_columns(of_k, S: gl.constexpr):
    """Scales of keys [TILE_N], see `OperandScales`, beside the columns of scores [1, TILE_N]."""
    x = by_key(of_k.load(layout_by_key(of_k.shape[0], gl.num_warps())))
    return gl.convert_layout(x, gl.SliceLayout(0, S), assert_trivial=True)[None, :]


@gluon.constexpr_function
def scale_pairs_layout(columns, warps):
    """The layout of [columns, 2] in which a thread has both numbers of each column of scores that
    it has."""
    registers = [[0, 1], [1, 0]] + [[1 << i, 0] for i in range(3, columns.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]]
    of_warps = (warps.bit_length() - 1) * [[0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [columns, 2])


@gluon.jit
def pairs_of_columns(of_k, S: gl.constexpr):
    """(scale of the key, logarithm of that of its value) of each column [1, TILE_N]."""
    one, other = of_k.load(scale_pairs_layout(of_k.shape[0], gl.num_warps())).split()
    along: gl.constexpr = gl.SliceLayout(0, S)
    one = gl.convert_layout(one, along, assert_trivial=True)
    return one[None, :], gl.convert_layout(other, along, assert_trivial=True)[None, :]


@gluon.jit
def beside_rows(of_tile, like):
    """A number of a tile [1] as [ROWS] with the layout of `like`."""
    return of_tile.load(like.type.layout).broadcast_to(like.shape)
