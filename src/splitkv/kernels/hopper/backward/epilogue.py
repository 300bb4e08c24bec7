"""The epilogue of `hopper_backward`: gradients go from registers to memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.backward.records import HALF


@gluon.jit
def store_rows(x, stage, ptr, stride, first, count, COLUMNS: gl.constexpr):
    """Stores COLUMNS of x [64, dim] to the rows from `first` on that are below `count`; rounded, by
    way of shared memory, or fp32.

    ptr is that of row 0; stage [64, dim] in the type of the rows.
    """
    DIM: gl.constexpr = x.shape[1]
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    if ptr.dtype.element_ty != gl.float32:
        stage.store(x.to(stage.dtype))
        x = stage.load(COPY)
    layout: gl.constexpr = x.type.layout
    rows = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    offs_d = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    ptrs = ptr + rows.to(gl.int64)[:, None] * stride + offs_d[None, :]
    ok = (rows < count)[:, None]
    if COLUMNS < DIM:
        ok &= (offs_d < COLUMNS)[None, :]
    gl.store(ptrs, x, mask=ok)


@gluon.jit
def store_both_gradients(dk, dv, stage, work, out, CONFIG: gl.constexpr, FIRST: gl.constexpr):
    """Stores dk and dv [64, dim] of the keys of the program from FIRST on; stage [64, dim]."""
    DIM: gl.constexpr = CONFIG.head_dim
    DIM_V: gl.constexpr = CONFIG.head_dim_v
    count = work.num_keys
    if out.split_ptr is not None:
        if out.in_split:
            width = DIM + DIM_V
            store_rows(dv, stage, out.split_ptr + DIM, width, FIRST, count, DIM_V)
            store_rows(dk, stage, out.split_ptr, width, FIRST, count, DIM)
        count = gl.where(out.in_split, 0, count)
    store_rows(dv, stage, out.dv_ptr, out.dv_stride, FIRST, count, DIM_V)
    store_rows(dk, stage, out.dk_ptr, out.dk_stride, FIRST, count, DIM)


@gluon.jit
def store_dk(dk, stage, work, out, CONFIG: gl.constexpr):
    """Stores dk [64, dim] of all keys of the program; stage [64, dim]."""
    count = work.num_keys
    if out.split_ptr is not None:
        if out.in_split:
            width = CONFIG.head_dim + CONFIG.head_dim_v
            store_rows(dk, stage, out.split_ptr, width, 0, count, CONFIG.head_dim)
        count = gl.where(out.in_split, 0, count)
    store_rows(dk, stage, out.dk_ptr, out.dk_stride, 0, count, CONFIG.head_dim)


@gluon.jit
def store_dv(dv, stage, work, out, CONFIG: gl.constexpr):
    """Stores dv [64, dim] of all keys of the program; stage [64, dim]."""
    count = work.num_keys
    if out.split_ptr is not None:
        if out.in_split:
            width = CONFIG.head_dim + CONFIG.head_dim_v
            split_ptr = out.split_ptr + CONFIG.head_dim
            store_rows(dv, stage, split_ptr, width, 0, count, CONFIG.head_dim_v)
        count = gl.where(out.in_split, 0, count)
    store_rows(dv, stage, out.dv_ptr, out.dv_stride, 0, count, CONFIG.head_dim_v)
