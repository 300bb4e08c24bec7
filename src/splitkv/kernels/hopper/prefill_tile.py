"""The warpgroups of `hopper_prefill`, which multiply the tiles that `produce` has had copied.

Every warpgroup has 64 rows of a row tile. Its steps are the tiles of keys of an item, counted over
all items of a program: step n has keys and values in slot n % STAGES of two rings.

While the tensor cores multiply p of one step with its values, a warpgroup works out p of the next:
see `before_wait`. Warpgroups issue their products in turns, so that the exponentials of one run
under the products of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.combine import FINISHED, write_absent
from splitkv.kernels.hopper.prefill_load import ROWS
from splitkv.kernels.hopper.prefill_rows import (
    index_in_round,
    own_item,
    own_visit,
    round_count,
    tile_of_step,
)
from splitkv.kernels.tile.band import visible
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.weight import Queries, scores

# Renamed between Triton 3.6 and 3.9.
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Output(NamedTuple):
    """Where results go: out with TMA or, by token and head, as `stride_t` says; lse by sequence and
    head; sink_ptr [num_heads], or None; the Partial of kernels/combine.py, or None."""

    out_ptr: Any
    lse_ptr: Any
    sink_ptr: Any
    partial: Any
    stride_t: Any
    stride_lse_b: Any
    stride_lse_h: Any


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


@gluon.jit
def clear_behind(v, count):
    """Zero the rows of a tile from `count` on: another sequence's values may be NaN or infinite."""
    KEYS: gl.constexpr = v.shape[0]
    COLUMNS: gl.constexpr = v.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // COLUMNS, COLUMNS // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    for first in gl.static_range(0, KEYS, 16):
        if count < first + 16:
            some = v.slice(first, 16)
            some.store(gl.where((rows + first < count)[:, None], some.load(layout), 0.0))


@gluon.jit
def multiply_keys(tiles, slot, S: gl.constexpr, W: gl.constexpr):
    """Start q @ k.T of the rows of warpgroup W."""
    TILE_N: gl.constexpr = tiles.k.shape[1]
    SUM: gl.constexpr = gl.int32 if tiles.k.dtype == gl.int8 else gl.float32
    start = gl.zeros([ROWS, TILE_N], SUM, S)
    k = tiles.k.index(slot).permute((1, 0))
    qk = warpgroup_mma(tiles.q.index(W), k, start, use_acc=False, is_async=True)
    if tiles.q_rest is not None:
        k_rest = tiles.k_rest.index(slot).permute((1, 0))
        qk = warpgroup_mma(tiles.q_rest.index(W), k_rest, qk, is_async=True)
    return qk


@gluon.jit
def weights(qk, m, work, own, tile, asks, pos, inside):
    """(p in fp32, m, what has to shrink by how much) after the products of one more tile."""
    TILE_N: gl.constexpr = qk.shape[1]
    s, unit = scores(qk, work.scoring, Queries(None, None, None, None), None)
    if asks:
        offs_n = tile * TILE_N + inside
        s = gl.where(visible(work.bounds, pos, offs_n, own.len_k), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * unit)
    top = finite_or_zero(m_new)
    return gl.exp2(s * unit - top[:, None]), m_new, gl.exp2(m - top)


@gluon.jit
def step(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS, 4], see `sums_of_threads`
    m,  # [ROWS] in base 2
    p,  # [ROWS, TILE_N] of step n - 1
    n,
    tile,  # of keys
    asks,  # whether a row may see a part of the tile
    work,  # Work
    own,  # Own
    tiles,  # Parts
    signals,  # Signals
    pos,  # [ROWS, 1]
    inside,  # [1, TILE_N]
    W: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """(acc, l, m, p) after step n, whose p is still to be multiplied."""
    S: gl.constexpr = m.type.layout.parent
    slot = n % STAGES
    last_slot = (n - 1) % STAGES
    if signals.turn is not None:
        mbarrier.wait(signals.turn.index(W), (n & 1) ^ (W == 0))
    mbarrier.wait(signals.k_full.index(slot), n // STAGES & 1)
    qk = multiply_keys(tiles, slot, S, W)
    mbarrier.wait(signals.v_full.index(last_slot), (n - 1) // STAGES & 1)
    acc = warpgroup_mma(p, tiles.v.index(last_slot), acc, is_async=True)
    if signals.turn is not None:
        mbarrier.arrive(signals.turn.index((W + 1) % WARPGROUPS), count=1)
    qk = warpgroup_mma_wait(1, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    if work.keys.behind is not None:
        if asks:
            clear_last(tiles, signals, own, tile, n, STAGES)
    x, m, shrink = weights(qk, m, work, own, tile, asks, pos, inside)
    sums = before_wait(sums_of_threads(x))
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(signals.v_free.index(last_slot), count=1)
    acc = acc * along_rows(shrink, acc)
    l = l * along_rows(shrink, l) + sums
    return acc, l, m, gl.convert_layout(x.to(p.dtype), p.type.layout)


@gluon.jit
def consume(
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    signals,  # Signals
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The rows of warpgroup W in all items."""
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    TILE_N: gl.constexpr = tiles.k.shape[1]
    n = gl.program_id(0) * 0
    done = n
    for r in range(round_count(work)):
        index = index_in_round(r)
        if index < work.items:
            own = own_item(work, index, PACK, TILE_M)
            if own.tile * TILE_M < own.len_q * PACK:
                visit, steps, asking, parts = own_visit(work, own, PACK, TILE_M, TILE_N)
                if work.cutting.parts is None or own.part < parts:
                    mbarrier.wait(signals.q_full.index(0), done & 1)
                    ring = tiles, signals, W, PACK, WARPGROUPS, STAGES
                    acc, l, m = attend(work, own, visit, steps, asking, n, *ring)
                    n += steps
                    where = own, work, output, W, GROUP, PACK, TILE_M
                    if output.partial is None:
                        write(acc, l, m, maps, boxes, tiles, *where)
                    elif parts == 1:
                        write(acc, l, m, maps, boxes, tiles, *where)
                        mark(m, FINISHED, *where)
                    else:
                        write_part(acc, l, m, *where)
                    if tiles.out is None:
                        tma.store_wait(0)
                        mbarrier.arrive(signals.q_free.index(0), count=1)
                    done += 1
                else:
                    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
                    nothing = gl.zeros([ROWS], gl.float32, layout)
                    mark(nothing, 0.0, own, work, output, W, GROUP, PACK, TILE_M)
    tma.store_wait(0)


@gluon.jit
def attend(
    work,  # Work
    own,  # Own
    visit,  # Visit
    steps,
    asking,
    n,  # steps before
    tiles,  # Parts
    signals,  # Signals
    W: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """(acc [ROWS, DIM_V], l [ROWS], m [ROWS] in base 2) of an item."""
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM_V: gl.constexpr = tiles.v.shape[2]
    dtype: gl.constexpr = tiles.v.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    M: gl.constexpr = gl.SliceLayout(1, S)
    rows = (own.tile * WARPGROUPS + W) * ROWS + gl.arange(0, ROWS, layout=M)
    inside = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, S))[None, :]
    pos = (own.len_k - own.len_q + rows // PACK)[:, None]
    if signals.turn is not None:
        mbarrier.wait(signals.turn.index(W), (n & 1) ^ (W == 0))
    slot = n % STAGES
    mbarrier.wait(signals.k_full.index(slot), n // STAGES & 1)
    qk = multiply_keys(tiles, slot, S, W)
    if signals.turn is not None:
        mbarrier.arrive(signals.turn.index((W + 1) % WARPGROUPS), count=1)
    qk = warpgroup_mma_wait(0, deps=[qk])
    mbarrier.arrive(signals.k_free.index(slot), count=1)
    m = gl.full([ROWS], float("-inf"), gl.float32, M)
    tile = tile_of_step(visit, 0, asking)
    x, m, _ = weights(qk, m, work, own, tile, True, pos, inside)
    l = sums_of_threads(x)
    p = gl.convert_layout(x.to(dtype), A)
    acc = gl.zeros([ROWS, DIM_V], gl.float32, O)
    if work.keys.behind is not None:
        clear_last(tiles, signals, own, tile, n, STAGES)
    rest = work, own, tiles, signals, pos, inside, W, WARPGROUPS, STAGES
    for i in range(1, steps):
        tile = tile_of_step(visit, i, asking)
        acc, l, m, p = step(acc, l, m, p, n + i, tile, i < asking, *rest)
    if tiles.out is not None:
        mbarrier.arrive(signals.q_free.index(0), count=1)
    last = n + steps - 1
    slot = last % STAGES
    mbarrier.wait(signals.v_full.index(slot), last // STAGES & 1)
    acc = warpgroup_mma(p, tiles.v.index(slot), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(signals.v_free.index(slot), count=1)
    return acc, gl.convert_layout(gl.sum(l, 1), M), m


@gluon.jit
def clear_last(tiles, signals, own, tile, n, STAGES: gl.constexpr):
    """Clear the values of step n behind the last key of a sequence.

    All warpgroups do, as each has to before it multiplies; they write the same.
    """
    count = own.len_k - tile * tiles.v.shape[1]
    if count < tiles.v.shape[1]:
        slot = n % STAGES
        mbarrier.wait(signals.v_full.index(slot), n // STAGES & 1)
        clear_behind(tiles.v.index(slot), count)
        fence_async_shared()


@gluon.jit
def write(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    maps,  # Parts
    boxes,  # Parts
    tiles,  # Parts
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Finish the softmax and store out and lse; see `finish`, which is for rows that saw values."""
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
        tile = tiles.q.index(W)
        box = boxes.q.index(W)
    else:
        tile = tiles.out.index(W)
        box = boxes.out.index(W)
    tma.store_wait(0)
    tile.store(out.to(tile.dtype))
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


@gluon.jit
def slots_of(
    like,  # [ROWS]
    own,  # Own
    work,  # Work
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """(rows of the partials [ROWS], which of them exist): as in kernels/prefill.py."""
    rows = own.tile * TILE_M + W * ROWS + gl.arange(0, ROWS, layout=like.type.layout)
    ok = (rows < own.len_q * PACK) & (own.len_q <= work.cutting.most_q)
    ok &= own.sequence < work.batch
    token = own.sequence.to(gl.int64) * work.cutting.most_q + rows // PACK
    head = own.head + rows % PACK
    kv_heads = work.lane_heads * PACK // GROUP
    slot = (token * kv_heads + head // GROUP) * work.cutting.parts + own.part
    return slot * GROUP + head % GROUP, ok


@gluon.jit
def mark(
    like,  # [ROWS]
    l,
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Mark the slots of an item as `write_absent` does."""
    at, ok = slots_of(like, own, work, W, GROUP, PACK, TILE_M)
    write_absent(output.partial.m_ptr, output.partial.l_ptr, at, ok, l)


@gluon.jit
def write_part(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    own,  # Own
    work,  # Work
    output,  # Output
    W: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    TILE_M: gl.constexpr,
):
    """Store the partial of one of several parts."""
    DIM_V: gl.constexpr = acc.shape[1]
    partial = output.partial
    at, ok = slots_of(m, own, work, W, GROUP, PACK, TILE_M)
    gl.store(partial.m_ptr + at, m, mask=ok)
    gl.store(partial.l_ptr + at, l, mask=ok)
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, acc.type.layout))
    acc_ptrs = partial.acc_ptr + along_rows(at * DIM_V, acc) + offs_v[None, :]
    gl.store(acc_ptrs, acc, mask=along_rows(ok, acc))
