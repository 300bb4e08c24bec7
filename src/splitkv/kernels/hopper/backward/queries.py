"""dq for Hopper where every sum has to be made in one order: no atomics, S and dP once more.

Computes dq of kernels/backward, whose letters these are: a program owns 128 rows of a head, 64 a
consumer warpgroup, and visits the tiles of keys that they see; one warp loads the tiles. Programs
behind those add up what `hopper_backward` left: see split_sums.py.

Grid        tiles of rows x lanes, a lane being a query head, dense of one sequence; the last and so
            heaviest rows first. Then heads, where there are sink logits, and tiles of all sequences
            and KV heads x groups of SUM_KEYS keys, where rows are split
Traffic     reads q, dout, k, v and 8 bytes of statistics a row, writes dq; flops 3 products of
            2 * pairs * head_dim
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.kernels.backward.finish import SplitTiles
from splitkv.kernels.hopper.backward.epilogue import store_rows
from splitkv.kernels.hopper.backward.key_tile import locate_tokens
from splitkv.kernels.hopper.backward.records import HALF
from splitkv.kernels.hopper.backward.shared_memory import SWIZZLED
from splitkv.kernels.hopper.backward.split_sums import LeftSums, add_up_left
from splitkv.kernels.hopper.primitives.named_barriers import all_cleared
from splitkv.kernels.hopper.primitives.tma_ring import (
    async_load,
    make_barriers,
    next_stage,
    reinterpret,
)
from splitkv.kernels.hopper.primitives.zero_rows import clear_behind
from splitkv.kernels.tile.band import Bounds, visible, visited_tiles
from splitkv.kernels.tile.visit import tile_and_lane

SIZES = (  # arguments whose values are no reason to compile again
    *("scale", "scale_log2", "left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch"),
    *("num_heads", "total_q", "tiles", "lanes", "width", "sink_programs", "sink_numbers"),
    *("num_kv_heads", "split_tiles", "row_splits"),
)


class QueryDescriptors(NamedTuple):
    """TMA descriptors of q, the gradient of the output, k and v [batch, tokens, heads, dim]."""

    q: Any
    grad: Any
    k: Any
    v: Any


class QueryMemory(NamedTuple):
    """Shared memory of q, grad and the ring in which k and v take turns.

    As TMA writes it: [1, TILE_M, 1, dim] and [STAGES, 1, TILE_N, 1, dim]; as products read it:
    [TILE_M, dim] and [STAGES, TILE_N, dim]. v is the ring in tiles of v, of which it has as many or
    twice as many.
    """

    q: Any
    grad: Any
    k: Any
    v: Any


class QueryBarriers(NamedTuple):
    """Barriers: the rows are there [1]; tiles of the ring are there (full), or may be overwritten
    (empty) [STAGES]."""

    rows_full: Any
    full: Any
    empty: Any


class QueryWork(NamedTuple):
    """The work of a program: a tile of rows of one head and the keys that they see.

    sequence, head, kv_head   of the descriptors
    first_q                   the sequence's first query; t: the tile's first, in its sequence
    len_q, first_k, len_k     queries, first key and keys of the sequence
    shift                     key position of query 0
    count, near, skip         the tiles of keys, see `visited_tiles`
    """

    sequence: Any
    head: Any
    kv_head: Any
    first_q: Any
    t: Any
    len_q: Any
    first_k: Any
    len_k: Any
    shift: Any
    count: Any
    near: Any
    skip: Any


class RowGradients(NamedTuple):
    """Pointers to dq of the first token, total and delta; elements between tokens of dq; scale."""

    dq_ptr: Any
    total_ptr: Any
    delta_ptr: Any
    stride: Any
    scale: Any


class RowPositions(NamedTuple):
    """Key positions of 64 rows [64, 1], and of the first."""

    all: Any
    first: Any


@gluon.jit
def load_query_role(desc, boxes, barriers, work):
    """The load role: copies the rows to shared memory, then k and v of every tile of keys to the
    next stages of the ring. One tile more follows, of which consumers make weights that nobody
    uses.
    """
    TILE_N: gl.constexpr = desc.k.block_type.shape[1]
    STAGES: gl.constexpr = barriers.full.shape[0]
    V_STEP: gl.constexpr = boxes.v.shape[0] // STAGES
    at = [work.sequence, work.first_q + work.t, work.head, 0]
    mbarrier.expect(
        barriers.rows_full.index(0), desc.q.block_type.nbytes + desc.grad.block_type.nbytes
    )
    async_load(desc.q, at, barriers.rows_full.index(0), boxes.q)
    async_load(desc.grad, at, barriers.rows_full.index(0), boxes.grad)
    stage = work.kv_head * 0
    phase = stage + 1
    for j in range(work.count + 1):
        tile = gl.where(j < work.near, j, j + work.skip)
        at = [work.sequence, work.first_k + tile * TILE_N, work.kv_head, 0]
        mbarrier.wait(barriers.empty.index(stage), phase)
        mbarrier.expect(barriers.full.index(stage), desc.k.block_type.nbytes)
        async_load(desc.k, at, barriers.full.index(stage), boxes.k.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(barriers.empty.index(stage), phase)
        mbarrier.expect(barriers.full.index(stage), desc.v.block_type.nbytes)
        async_load(desc.v, at, barriers.full.index(stage), boxes.v.index(stage * V_STEP))
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def query_weights(s, total, scale_log2, bounds, pos, start, keys):
    """Computes p [64, TILE_N] of products s with the keys from `start`; pos: RowPositions."""
    TILE_N: gl.constexpr = s.shape[1]
    p = gl.exp2(s * scale_log2 - total)
    offs_n = gl.arange(0, TILE_N, layout=gl.SliceLayout(0, s.type.layout))[None, :]
    masked = start + TILE_N > keys
    if bounds.right is not None:
        masked = masked | (start + TILE_N > pos.first + bounds.right + 1)
    if bounds.left is not None:
        masked = masked | (start < pos.first + HALF - 1 - bounds.left)
    if masked:
        p = gl.where(visible(bounds, pos.all, start + offs_n, keys), p, 0.0)
    return p


@gluon.jit
def wait_ring(tiles, barriers, stage, phase, count, W: gl.constexpr):
    """Waits for a tile of k or v [TILE_N, dim] and clears it from `count` on, together with the
    other consumer."""
    x = tiles.index(stage * (tiles.shape[0] // barriers.full.shape[0]))
    mbarrier.wait(barriers.full.index(stage), phase)
    if count < x.shape[0]:
        clear_behind(x, count, 16, W, 2)
        all_cleared(2)
    return x


@gluon.jit
def mma_query_role(
    tiles, barriers, work, bounds, out, scale_log2, KEY_DIM: gl.constexpr, W: gl.constexpr
):
    """The mma role of consumer W: computes dq [64, dim] of its rows and stores it."""
    STAGES: gl.constexpr = tiles.k.shape[0]
    TILE_N: gl.constexpr = tiles.k.shape[1]
    DIM: gl.constexpr = tiles.k.shape[2]
    dtype: gl.constexpr = tiles.k.dtype
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)

    t = work.t + W * HALF
    rows = t + gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
    total = gl.load(out.total_ptr + rows, mask=rows < work.len_q, other=float("inf"))[:, None]
    delta = gl.load(out.delta_ptr + rows, mask=rows < work.len_q, other=0.0)[:, None]
    pos = RowPositions((rows + work.shift)[:, None], t + work.shift)
    zero = gl.zeros([HALF, TILE_N], gl.float32, S)
    dq = gl.zeros([HALF, DIM], gl.float32, ACC)
    q = tiles.q.slice(W * HALF, HALF)
    grad = tiles.grad.slice(W * HALF, HALF)
    mbarrier.wait(barriers.rows_full.index(0), 0)
    stage = work.kv_head * 0
    phase = stage
    start = gl.where(work.near > 0, 0, work.skip) * TILE_N
    k = wait_ring(tiles.k, barriers, stage, phase, work.len_k - start, W)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    v_stage = stage + 1
    v_phase = phase
    v = wait_ring(tiles.v, barriers, v_stage, v_phase, work.len_k - start, W)
    dp = warpgroup_mma(grad, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = query_weights(s, total, scale_log2, bounds, pos, start, work.len_k)
    dp = warpgroup_mma_wait(0, deps=[dp])
    for j in range(work.count):
        mbarrier.arrive(barriers.empty.index(v_stage), count=1)
        ds = gl.convert_layout((p * (dp - delta)).to(dtype), A)
        dq = warpgroup_mma(ds, tiles.k.index(stage), dq, is_async=True)

        # weights of the next tile of keys
        before = stage
        stage, phase = next_stage(v_stage, v_phase, STAGES)
        v_stage, v_phase = next_stage(stage, phase, STAGES)
        start = gl.where(j + 1 < work.near, j + 1, j + 1 + work.skip) * TILE_N
        k = wait_ring(tiles.k, barriers, stage, phase, work.len_k - start, W)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if TILE_N * 4 == DIM:  # the ring has one of k and v: v is loaded under s
            dq = warpgroup_mma_wait(1, deps=[dq])
            mbarrier.arrive(barriers.empty.index(before), count=1)
            v = wait_ring(tiles.v, barriers, v_stage, v_phase, work.len_k - start, W)
            dp = warpgroup_mma(grad, v.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
        else:
            s, dq = warpgroup_mma_wait(0, deps=[s, dq])  # dp has room where ds was
            mbarrier.arrive(barriers.empty.index(before), count=1)
            v = wait_ring(tiles.v, barriers, v_stage, v_phase, work.len_k - start, W)
            dp = warpgroup_mma(grad, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        p = query_weights(s, total, scale_log2, bounds, pos, start, work.len_k)
        dp = warpgroup_mma_wait(0, deps=[dp])

    store_rows(dq * out.scale, q, out.dq_ptr, out.stride, t, work.len_q, KEY_DIM)


@gluon.jit
def allocate_query_memory(desc, STAGES: gl.constexpr):
    """Allocates (memory as TMA writes it, as products read it, QueryBarriers) of a program."""
    dtype: gl.constexpr = desc.q.dtype
    TILE_M: gl.constexpr = desc.q.block_type.shape[1]
    TILE_N: gl.constexpr = desc.k.block_type.shape[1]
    DIM: gl.constexpr = desc.q.block_type.shape[3]
    DIM_V: gl.constexpr = desc.v.block_type.shape[3]
    V_STAGES: gl.constexpr = STAGES * DIM // DIM_V
    keys: gl.constexpr = [STAGES, 1, TILE_N, 1, DIM]
    q = gl.allocate_shared_memory(dtype, [1, TILE_M, 1, DIM], desc.q.layout)
    grad = gl.allocate_shared_memory(dtype, [1, TILE_M, 1, DIM_V], desc.q.layout)
    ring = gl.allocate_shared_memory(dtype, keys, desc.k.layout)
    boxes = QueryMemory(
        q=q,
        grad=grad,
        k=ring,
        v=reinterpret(ring, dtype, [V_STAGES, 1, TILE_N, 1, DIM_V], desc.v.layout),
    )
    tiles = QueryMemory(
        q=reinterpret(q, dtype, [TILE_M, DIM], SWIZZLED),
        grad=reinterpret(grad, dtype, [TILE_M, DIM_V], SWIZZLED),
        k=reinterpret(ring, dtype, [STAGES, TILE_N, DIM], SWIZZLED),
        v=reinterpret(ring, dtype, [V_STAGES, TILE_N, DIM_V], SWIZZLED),
    )
    return (
        boxes,
        tiles,
        QueryBarriers(make_barriers(1, 1), make_barriers(STAGES, 1), make_barriers(STAGES, 2)),
    )


@gluon.jit(do_not_specialize=SIZES)
def hopper_backward_queries(
    q_desc,  # [batch, seqlen_q, num_heads, DIM], or [1, total_q, num_heads, DIM], in tiles of rows
    grad_desc,  # as q_desc
    k_desc,  # the same of keys and KV heads
    v_desc,
    dq_ptr,  # as q
    dq_strides,  # Strides
    total_ptr,  # [sequences, num_heads, tokens] fp32; packed sequences are one
    delta_ptr,
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    sinks,  # SinkSums, or None
    split_sums,  # SplitSums, or None
    dk_strides,  # Strides
    dv_strides,
    scale,
    scale_log2,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    num_heads,
    total_q,
    tiles,  # tiles of rows of a lane
    lanes,
    width,  # lanes that go together
    sink_programs,  # heads, or 0
    sink_numbers,
    num_kv_heads,
    split_tiles,
    row_splits,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    KEY_DIM: gl.constexpr,  # of q and k without padding
    HEAD_DIM_V: gl.constexpr,
    SPLIT_TILE: gl.constexpr,  # keys of a tile of `hopper_backward`
    SUM_KEYS: gl.constexpr,  # of a program that adds up
):
    desc = QueryDescriptors(q_desc, grad_desc, k_desc, v_desc)
    TILE_M: gl.constexpr = desc.q.block_type.shape[1]
    TILE_N: gl.constexpr = desc.k.block_type.shape[1]
    bounds = Bounds(left, right, sink_tokens)

    # what is left of the other gradients
    if sinks is not None or split_sums is not None:
        behind = gl.program_id(0) - tiles * lanes
        if behind >= 0:
            of = SplitTiles(
                cu_k_ptr, seqlen_k, num_kv_heads, dk_strides, dv_strides, split_tiles, row_splits
            )
            left_over = LeftSums(sinks, sink_numbers, split_sums, of)
            add_up_left(left_over, behind, sink_programs, SPLIT_TILE, SUM_KEYS, KEY_DIM, HEAD_DIM_V)
            return

    # whose rows, and which, the last and so heaviest first
    tile, lane = tile_and_lane(gl.program_id(0), tiles, lanes, width)
    own = locate_tokens(
        tiles - 1 - tile,
        lane,
        cu_q_ptr,
        cu_k_ptr,
        seqlen_q,
        seqlen_k,
        batch,
        total_q,
        num_heads,
        TILE_M,
    )
    t = own.tile * TILE_M
    if t >= own.length:
        return

    # the keys that they see
    shift = own.other_length - own.length
    last = gl.minimum(t + TILE_M, own.length) - 1
    count, near, skip = visited_tiles(bounds, shift + t, shift + last, own.other_length, TILE_N)
    sequence = own.sequence
    length = seqlen_q
    if cu_q_ptr is not None:
        sequence = own.sequence * 0
        length = total_q
    work = QueryWork(
        sequence=sequence,
        head=own.head,
        kv_head=own.head // GROUP,
        first_q=own.first,
        t=t,
        len_q=own.length,
        first_k=own.other_first,
        len_k=own.other_length,
        shift=shift,
        count=count,
        near=near,
        skip=skip,
    )

    # where dq goes
    first = sequence.to(gl.int64) * dq_strides.b + own.first.to(gl.int64) * dq_strides.t
    row = (sequence * num_heads + own.head).to(gl.int64) * length + own.first
    out = RowGradients(
        dq_ptr=dq_ptr + first + own.head.to(gl.int64) * dq_strides.h,
        total_ptr=total_ptr + row,
        delta_ptr=delta_ptr + row,
        stride=dq_strides.t,
        scale=scale,
    )
    boxes, tiles_held, barriers = allocate_query_memory(desc, STAGES)
    gl.warp_specialize(
        [
            (mma_query_role, (tiles_held, barriers, work, bounds, out, scale_log2, KEY_DIM, 0)),
            (mma_query_role, (tiles_held, barriers, work, bounds, out, scale_log2, KEY_DIM, 1)),
            (load_query_role, (desc, boxes, barriers, work)),
        ],
        [4, 1],
        [240, 24],
    )
