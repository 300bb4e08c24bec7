"""Sums of rows of what warpgroups multiply, in the layouts of wgmma."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.prefill_load import ROWS


@gluon.jit
def sums_of_threads(x):
    """[rows, 4]: of each row of x [rows, TILE_N], the sum of what each of four threads has."""
    EIGHTS: gl.constexpr = x.shape[1] // 8
    pairs = x.reshape([ROWS, EIGHTS, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def before_wait(sums):
    """The same sums of weights, known before the next wait for a product.

    ptxas moves such a wait up over all arithmetic, and the exponentials would no longer run under
    the product. Over a barrier it does not; this one is for sums that are impossible.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 both; add.f32 both, $2, $3; setp.gt.f32 p, both, 0f7F7FFFFF;"
        " @p bar.sync 15, 128; mov.b32 $0, $2; mov.b32 $1, $3; }",
        "=r,=r,r,r",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def along_rows(x, like):
    """x [rows] beside `like` [rows, columns]."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]
