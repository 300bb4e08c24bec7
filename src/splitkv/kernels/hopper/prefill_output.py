"""The results of a row tile of `hopper_prefill`: the end of the softmax, out and lse."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from splitkv.kernels.hopper.prefill_tile import ROWS, async_store
from splitkv.kernels.tile.softmax import finite_or_zero


@gluon.jit
def along_rows(x, like):
    """x [rows] to multiply `like` [rows, columns] with."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout))[:, None]


@gluon.jit
def write(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS, 4]
    m,  # [ROWS] in base 2
    own,  # Own
    q_slot,
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    output,  # Output
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
):
    """Finish the softmax and store out and lse; see `finish`, which is for rows that saw values."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    rows = own.tile * TILE_M + W * ROWS + gl.arange(0, ROWS, layout=m.type.layout)
    ok = rows < own.len_q * PACK
    t = own.first_q + rows // PACK
    head = own.head + rows % PACK
    lse = (m + gl.log2(l)) * 0.6931471805599453
    at = own.b.to(gl.int64) * output.stride_lse_b + head.to(gl.int64) * output.stride_lse_h + t
    gl.store(output.lse_ptr + at, lse, mask=ok)
    factor = 1.0 / l
    if output.sink_ptr is not None:
        sink = gl.load(output.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
        sink *= 1.4426950408889634
        top = finite_or_zero(gl.maximum(m, sink))
        shrink = gl.exp2(m - top)
        factor = shrink / (l * shrink + gl.exp2(sink - top))
    # a row that saw no key: its products are 0 times anything
    out = gl.where(along_rows(l, acc) == 0.0, 0.0, acc * along_rows(factor, acc))
    if tiles.out is None:
        tile = tiles.q.index(q_slot)
        box = boxes.q.index(q_slot)
    else:
        tile = tiles.out.index(W)
        box = boxes.out.index(W)
    tma.store_wait(0)
    tile.store(out.to(tiles.v.dtype))
    TOKENS: gl.constexpr = ROWS // PACK
    t_first = (own.tile * TILE_M + W * ROWS) // PACK
    if work.cu_q_ptr is None:
        fence_async_shared()
        async_store(maps.out, [own.b, t_first, own.head, 0], box)
    elif t_first + TOKENS <= own.len_q:
        fence_async_shared()
        async_store(maps.out, [own.b, own.first_q + t_first, own.head, 0], box)
    else:
        write_some(tile, own, t_first, output, PACK)


@gluon.jit
def write_some(tile, own, t_first, output, PACK: gl.constexpr):
    """Store the rows of a tile that are of the sequence."""
    DIM: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    offs = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    t = t_first + rows // PACK
    at = (own.first_q + t).to(gl.int64) * output.stride_t + (own.head + rows % PACK) * DIM
    ptrs = output.out_ptr + at[:, None] + offs[None, :]
    gl.store(ptrs, tile.load(layout), mask=(t < own.len_q)[:, None])
