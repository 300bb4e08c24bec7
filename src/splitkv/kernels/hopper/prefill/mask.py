"""The mask of a tile in the layouts of wgmma: a bit for each score that a thread has.

In the layouts of wgmma a thread has, of two rows, two neighbours of every eight columns: of a row
the columns 2 q, 2 q + 1, 8 + 2 q, .., where q is one of four threads. A row sees bands of keys, so
what a thread sees of it is the bits between two numbers: some arithmetic a row, and for each score
a bit and a choice, whatever the mask is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.prefill.items import right_bound
from splitkv.kernels.hopper.primitives.row_sums import along_rows, sums_of_threads
from splitkv.kernels.hopper.primitives.scheduling_fences import rematerialized
from splitkv.kernels.tile.band import Bounds, band_end, band_start

MINUS_INFINITY = gl.constexpr(0xFF800000)  # the bits of it in fp32


@gluon.constexpr_function
def choosing(elements, value):
    """PTX that keeps those of a thread's numbers whose bit is set and puts `value`, 32 bits, in the
    place of the others, with its constraints. Warps that see all keys branch over it."""
    numbers, seen, full = range(elements), elements * 2, (1 << elements // 2) - 1
    code = f"""{{
    .reg .pred some;
    .reg .b32 bits;
    and.b32 bits, ${seen}, ${seen + 2};
    and.b32 bits, bits, {full};
    setp.ne.b32 some, bits, {full};
    vote.sync.any.pred some, some, 0xffffffff;
    @!some bra.uni AS_IT_IS;
    """
    for i in numbers:
        code += f"and.b32 bits, ${seen + i % 4 // 2 * 2}, {1 << (i // 4 * 2 + i % 2)};"
        code += f"setp.eq.b32 some, bits, 0; selp.b32 ${i}, {value & 0xFFFFFFFF}, ${i}, some;\n"
    code += "AS_IT_IS: }"
    return code, ",".join(["=r"] * elements + [str(i) for i in numbers] + ["r"] * elements)


@gluon.jit
def choose(x, seen, VALUE: gl.constexpr):
    """Selects x [ROWS, columns] where the bits of `seen` [ROWS, 4] are set, and the number with the
    bits VALUE elsewhere."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    INSTRUCTIONS: gl.constexpr = choosing(COLUMNS // 2, VALUE)
    each = gl.expand_dims(gl.expand_dims(seen, 1), 3).broadcast_to([ROWS, COLUMNS // 8, 4, 2])
    each = gl.convert_layout(each.reshape(x.shape), x.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [x, each],
        dtype=x.dtype,
        is_pure=True,
        pack=COLUMNS // 2,
    )


@gluon.jit
def from_column(x, quarter):
    """Bits of the columns from x [ROWS, 1] on, in the order of `seen_keys`."""
    y = x - 2 * quarter
    before = gl.maximum(2 * (y >> 3) + gl.minimum(y & 7, 2), 0)
    # more than 31 columns: none of the bits is left
    return gl.inline_asm_elementwise(
        "shl.b32 $0, -1, $1;", "=r,r", [before], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def seen_keys(qk, batch, item, tile, pos):
    """The keys of a tile that rows at positions `pos` [ROWS] see, as bits [ROWS, 4]: of the columns
    that each of four threads has, the lowest bit the first; bits above the columns mean nothing."""
    like = sums_of_threads(qk)
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, like.type.layout))[None, :]
    at = along_rows(pos, like)
    first = rematerialized(tile, batch.scarce) * qk.shape[1]
    bounds = Bounds(batch.bounds.left, right_bound(batch), batch.bounds.sink_tokens)
    seen = ~from_column(band_end(bounds, at, item.len_k) - first, quarter)
    if bounds.left is not None:
        near = from_column(gl.maximum(band_start(bounds, at), 0) - first, quarter)
        if bounds.sink_tokens is not None:
            near |= ~from_column(bounds.sink_tokens - first + at * 0, quarter)
        seen &= near
    return seen
