"""The epilogue: storing what a warpgroup has worked out, a result or the partial of a split, and
merging splits in the launch that made them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from splitkv.kernels.combine import FINISHED, Final, write_absent
from splitkv.kernels.hopper.primitives.row_sums import along_rows
from splitkv.kernels.hopper.primitives.scheduling_fences import rematerialized
from splitkv.kernels.hopper.primitives.tma_ring import thread_barrier
from splitkv.kernels.schedule_items import load_item
from splitkv.kernels.tile.merge import (
    Meeting,
    Merged,
    arrive_in_turn,
    counter_in_use,
    merge_rows,
    say_running,
)
from splitkv.kernels.tile.softmax import finite_or_zero
from splitkv.kernels.tile.visit import Strides

# Renamed between Triton 3.6 and 3.9.
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def rows_of_role(like, batch, item, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """The packed rows [ROWS] that a role multiplies, in the layout of `like`."""
    ROWS: gl.constexpr = like.shape[0]
    rows = rematerialized(item.tile, batch.scarce) * CONFIG.tile_m + ROLE * ROWS
    return rows + gl.arange(0, ROWS, layout=like.type.layout)


@gluon.jit
def finish_rows(
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    item,  # Item
    program,  # PrefillProgram
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Stores the LSE of rows, and returns the factor of their sums [ROWS]."""
    batch, results = program.batch, program.results
    rows = rows_of_role(m, batch, item, CONFIG, ROLE)
    ok = rows < item.len_q * CONFIG.packed_heads
    t = item.first_q + rows // CONFIG.packed_heads
    head = item.head + rows % CONFIG.packed_heads
    lse = (m + gl.log2(l)) * 0.6931471805599453
    at = item.b.to(gl.int64) * rematerialized(results.stride_lse_b, batch.scarce)
    at += head.to(gl.int64) * rematerialized(results.stride_lse_h, batch.scarce) + t
    gl.store(results.lse_ptr + at, lse, mask=ok)
    factor = 1.0 / l
    if results.sink_ptr is not None:
        sink = gl.load(results.sink_ptr + head, mask=ok, other=0.0).to(gl.float32)
        sink *= 1.4426950408889634
        top = finite_or_zero(gl.maximum(m, sink))
        shrink = gl.exp2(m - top)
        factor = shrink / (l * shrink + gl.exp2(sink - top))
    return factor


@gluon.constexpr_function
def clearing(elements):
    """PTX that selects 0 where the other operand is 0, with its constraints; a warp in which it is
    0 nowhere branches over it."""
    numbers, by = range(elements), elements * 2
    # in any layout the bits of a register's number say of which of two rows it is
    code = f"{{ .reg .pred some; setp.eq.f32 some, ${by}, 0f00000000;\n"
    for bit in range(elements.bit_length() - 1):
        code += f"setp.eq.or.f32 some, ${by + (1 << bit)}, 0f00000000, some;\n"
    code += "vote.sync.any.pred some, some, 0xffffffff; @!some bra.uni AS_IT_IS;\n"
    for i in numbers:
        code += f"setp.eq.f32 some, ${by + i}, 0f00000000; selp.b32 ${i}, 0, ${i}, some;\n"
    code += "AS_IT_IS: }"
    return code, ",".join(["=r"] * elements + [str(i) for i in numbers] + ["r"] * elements)


@gluon.jit
def cleared(out, l):
    """Returns out [ROWS, DIM_V] with 0 in rows that saw no key: what their products hold is 0 times
    anything, NaN included."""
    ELEMENTS: gl.constexpr = out.shape[1] // 2
    INSTRUCTIONS: gl.constexpr = clearing(ELEMENTS)
    return gl.inline_asm_elementwise(
        INSTRUCTIONS[0],
        INSTRUCTIONS[1],
        [out, along_rows(l, out).broadcast_to(out.shape)],
        dtype=gl.float32,
        is_pure=True,
        pack=ELEMENTS,
    )


@gluon.jit
def store_results(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    factor,  # [ROWS]
    item,  # Item
    program,  # PrefillProgram
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Stores the results of an item, acc * factor and 0 in rows that saw no key, through shared
    memory by TMA."""
    batch, maps = program.batch, program.maps
    tiles, boxes = program.tiles, program.boxes
    ROWS: gl.constexpr = acc.shape[0]
    out = cleared(acc * along_rows(factor, acc), l)
    if tiles.out is None:
        tile = tiles.q.index(ROLE)
        box = boxes.q.index(ROLE)
    else:
        tile = tiles.out.index(ROLE)
        box = boxes.out.index(ROLE)
    tma.store_wait(0)
    tile.store(out.to(tile.dtype))
    TOKENS: gl.constexpr = ROWS // CONFIG.packed_heads
    first_row = rematerialized(item.tile, batch.scarce) * CONFIG.tile_m + ROLE * ROWS
    t_first = first_row // CONFIG.packed_heads
    if batch.cu_q_ptr is None:
        fence_async_shared()
        async_store(maps.out, [item.b, t_first, item.head, 0], box)
    elif t_first + TOKENS <= item.len_q:
        fence_async_shared()
        async_store(maps.out, [item.b, item.first_q + t_first, item.head, 0], box)
    else:
        store_some_rows(tile, item, t_first, program.results, CONFIG)


@gluon.jit
def store_some_rows(tile, item, t_first, results, CONFIG: gl.constexpr):
    """Stores those rows and columns of a tile [ROWS, DIM_V] that the results have."""
    ROWS: gl.constexpr = tile.shape[0]
    DIM: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0]
    )
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    offs = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    t = t_first + rows // CONFIG.packed_heads
    at = (item.first_q + t).to(gl.int64) * results.stride_t
    at += (item.head + rows % CONFIG.packed_heads) * CONFIG.columns
    ptrs = results.out_ptr + at[:, None] + offs[None, :]
    ok = (t < item.len_q)[:, None]
    if CONFIG.columns < DIM:
        ok = ok & (offs < CONFIG.columns)[None, :]
    gl.store(ptrs, tile.load(layout), mask=ok)


@gluon.jit
def rows_of_slot(like, item, batch, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """(rows of the partials [ROWS], which of them exist), as in kernels/combine_items.py."""
    rows = rows_of_role(like, batch, item, CONFIG, ROLE)
    slots = rematerialized(batch.splitting.num_splits, batch.scarce)
    slot_rows = rematerialized(batch.splitting.max_tokens, batch.scarce) * CONFIG.packed_heads
    slot = load_item(batch.splitting.items_ptr, item.split).slot
    slot += item.head // CONFIG.packed_heads * slots
    return slot.to(gl.int64) * slot_rows + rows, rows < item.len_q * CONFIG.packed_heads


@gluon.jit
def rows_of_partials(like, item, batch, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """(rows of the partials [ROWS], which of them exist), as in kernels/prefill.py."""
    GROUP: gl.constexpr = CONFIG.group
    rows = rows_of_role(like, batch, item, CONFIG, ROLE)
    max_tokens = rematerialized(batch.splitting.max_tokens, batch.scarce)
    ok = (rows < item.len_q * CONFIG.packed_heads) & (item.len_q <= max_tokens)
    ok &= item.sequence < batch.batch
    token = item.sequence.to(gl.int64) * max_tokens + rows // CONFIG.packed_heads
    head = item.head + rows % CONFIG.packed_heads
    kv_heads = rematerialized(batch.lane_heads, batch.scarce) * CONFIG.packed_heads // GROUP
    num_splits = rematerialized(batch.splitting.num_splits, batch.scarce)
    slot = (token * kv_heads + head // GROUP) * num_splits + item.split
    return slot * GROUP + head % GROUP, ok


@gluon.jit
def mark_split(like, l, item, program, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """Marks the partials of an item as `write_absent` does, rows [ROWS] as `like`."""
    at, ok = rows_of_partials(like, item, program.batch, CONFIG, ROLE)
    partial = program.results.partial
    write_absent(partial.m_ptr, partial.l_ptr, at, ok, l)


@gluon.jit
def store_split(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    item,  # Item
    program,  # PrefillProgram
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Stores the partial of one of several splits."""
    DIM_V: gl.constexpr = acc.shape[1]
    partial = program.results.partial
    if program.batch.splitting.items_ptr is None:
        at, ok = rows_of_partials(m, item, program.batch, CONFIG, ROLE)
    else:
        at, ok = rows_of_slot(m, item, program.batch, CONFIG, ROLE)
    gl.store(partial.m_ptr + at, m, mask=ok)
    gl.store(partial.l_ptr + at, l, mask=ok)
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, acc.type.layout))
    acc_ptrs = partial.acc_ptr + along_rows(at * CONFIG.columns, acc) + offs_v[None, :]
    stored = along_rows(ok, acc)
    if CONFIG.columns < DIM_V:
        stored = stored & (offs_v < CONFIG.columns)[None, :]
    gl.store(acc_ptrs, acc, mask=stored)


@gluon.jit
def store_split_or_results(
    acc,  # [ROWS, DIM_V]
    l,  # [ROWS]
    m,  # [ROWS] in base 2
    is_whole,  # whether the row tile has no other split
    item,  # Item
    program,  # PrefillProgram
    CONFIG: gl.constexpr,
    ROLE: gl.constexpr,
):
    """Stores the partial of a split, or the results where there is no other split."""
    if is_whole:
        factor = finish_rows(l, m, item, program, CONFIG, ROLE)
        store_results(acc, l, factor, item, program, CONFIG, ROLE)
        if program.batch.splitting.items_ptr is None:  # else a schedule says what is merged
            mark_split(m, FINISHED, item, program, CONFIG, ROLE)
    else:
        store_split(acc, l, m, item, program, CONFIG, ROLE)


@gluon.jit
def store_absent_split(ROWS: gl.constexpr, item, program, CONFIG: gl.constexpr, ROLE: gl.constexpr):
    """Marks the partials of a split that a row tile does not have, so that merging skips it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    nothing = gl.zeros([ROWS], gl.float32, layout)
    mark_split(nothing, 0.0, item, program, CONFIG, ROLE)


@gluon.constexpr_function
def layout_of_merge(rows, columns, warps):
    """The layout of partials [rows, splits, columns]: a warp has all splits of what it merges, so
    that none are added up through shared memory."""
    of_rows = min(rows, warps)
    of_columns = warps // of_rows
    across = min(32, columns // of_columns // 4)
    return gl.BlockedLayout(
        [1, 1, 4], [1, 32 // across, across], [of_rows, 1, of_columns], [2, 1, 0]
    )


@gluon.jit
def announce_program(results):
    """Counts this program as running, where the programs that finish last merge: see
    tile/merge.py."""
    if results.merging.count_ptr is not None:
        meeting = Meeting(results.merging.count_ptr, gl.num_programs(0))
        say_running(meeting, counter_in_use(meeting))


@gluon.jit
def merge_splits(batch, results, CONFIG: gl.constexpr):
    """Arrives, and merges a share of the rows whose splits are all there: once all roles of this
    program are done, so that none keeps registers for it."""
    DIM_V: gl.constexpr = CONFIG.head_dim_v
    L: gl.constexpr = layout_of_merge(CONFIG.merge_rows, DIM_V, gl.num_warps())
    RP: gl.constexpr = gl.SliceLayout(2, L)
    offs_r = gl.arange(0, CONFIG.merge_rows, layout=gl.SliceLayout(1, RP))
    offs_p = gl.arange(0, CONFIG.merge_splits, layout=gl.SliceLayout(0, RP))
    offs_v = gl.arange(0, DIM_V, layout=gl.SliceLayout(0, gl.SliceLayout(0, L)))
    num_heads = batch.lane_heads * CONFIG.packed_heads
    of = Merged(
        cu_q_ptr=batch.cu_q_ptr,
        batch=batch.batch,
        most_q=batch.splitting.max_tokens,
        parts=batch.splitting.num_splits,
        num_heads=num_heads,
        out_strides=results.merging.out_strides,
        lse_strides=Strides(results.stride_lse_b, 1, results.stride_lse_h),
    )
    final = Final(results.out_ptr, results.lse_ptr, None)
    meeting = Meeting(results.merging.count_ptr, gl.num_programs(0))
    which = counter_in_use(meeting)
    thread_barrier()
    place, merging = arrive_in_turn(meeting, which)
    if merging > 0:
        rows = batch.batch * batch.splitting.max_tokens * num_heads
        for n in range(place * CONFIG.merge_rows, rows, merging * CONFIG.merge_rows):
            at = n + offs_r
            sink_ptr = results.sink_ptr
            merge_rows(
                results.partial,
                final,
                sink_ptr,
                of,
                at,
                offs_p,
                offs_v,
                CONFIG.group,
                CONFIG.columns,
            )
