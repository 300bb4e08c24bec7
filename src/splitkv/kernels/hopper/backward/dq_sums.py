"""dq of `hopper_backward`: parts of each tile, one a consumer, which TMA adds to sums in memory.

The sums are fp32 in the order of a warpgroup's registers, the halves of a tile of rows one after
the other, with programs of 64 keys its columns 64 at a time. Where their bits matter tiles of keys
take turns at a tile of rows, in their order: a program waits for the one before, which has a lower
number and so was started before.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@builtin
def _async_add(tensor_desc, coord, src, _semantic=None):
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


# Triton 3.6 has the operation without a name in Gluon. `tma.store_wait` waits until src is read.
async_add = getattr(tma, "async_atomic_add", None) or _async_add


@gluon.jit
def start_dq_half(exchange, k, j, DQ: gl.constexpr, W: gl.constexpr):
    """Starts the product that is consumer W's half of tile j of dq; k [128, dim]."""
    TILE_M: gl.constexpr = exchange.ds.shape[2]
    COLUMNS: gl.constexpr = k.shape[1] * TILE_M // 128
    ds = exchange.ds.index(j & 1).permute((1, 0))  # [TILE_M, 128]
    if TILE_M == 64:
        k = k.slice(W * COLUMNS, COLUMNS, dim=1)
    else:
        ds = ds.slice(W * 64, 64)
    dq = gl.zeros([64, COLUMNS], gl.float32, DQ)
    return warpgroup_mma(ds, k, dq, use_acc=False, is_async=True)


@gluon.jit
def to_register_order(x):
    """Reshapes x [64, columns] to [.., 256] in the order of registers: a thread of the warpgroup
    has 4 elements next to each other, 2 columns of 2 rows."""
    COLUMNS: gl.constexpr = x.shape[1]
    # [warp, row half, row, step, column pair, column] -> [step, warp, row, pair, half, column]
    parts = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return parts.reshape([COLUMNS // 4, 256])


@gluon.jit
def from_register_order(x, layout: gl.constexpr):
    """Reverts `to_register_order`: reshapes x [.., 256] to [64, columns]."""
    COLUMNS: gl.constexpr = x.shape[0] * 4
    parts = x.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(parts.reshape([64, COLUMNS]), layout, assert_trivial=True)


@gluon.jit
def store_dq(exchange, dq, j, W: gl.constexpr):
    """Stores consumer W's half of tile j of dq in shared memory, in the order of registers, for the
    warp that adds it to the sums. Of pieces j counts those that the consumer has stored before."""
    mbarrier.wait(exchange.sums_empty.index(W), (j & 1) ^ 1)
    exchange.sums.index(W).store(to_register_order(dq))
    fence_async_shared()
    mbarrier.arrive(exchange.sums_full.index(W), count=1)


@gluon.jit
def finish_dq_half(exchange, k, j, DQ: gl.constexpr, W: gl.constexpr):
    """Makes and stores consumer W's half of tile j of dq, which is the last one."""
    mbarrier.wait(exchange.ds_full.index(j & 1), (j >> 1) & 1)
    dq = start_dq_half(exchange, k, j, DQ, W)
    store_dq(exchange, warpgroup_mma_wait(0, deps=[dq]), j, W)


@gluon.jit
def wait_for_dq_turn(ptr, number):
    """Waits until `number` tiles of keys have had their turn, see `end_turn`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .b32 number;
        AGAIN: ld.acquire.gpu.global.b32 number, [$1];
        setp.lt.s32 early, number, $2;
        @early bra AGAIN;
        fence.proxy.async.global;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [ptr, number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def end_turn(ptr, number):
    """Sets the number of tiles of keys that have had their turn, once what TMA was told to add is
    in memory: `tma.store_wait` waits for less."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        fence.proxy.async.global;
        bar.warp.sync -1;
        elect.sync lane|one, -1;
        @one st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [ptr, number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add_dq_halves(sums_desc, turn_ptr, exchange, work):
    """The role that adds both halves of every tile of dq to the sums in memory.

    turn_ptr   where the sums' first tile has the number of tiles of keys that have been added to
               it, in their order, all rows seeing all of them; None: in any order
    """
    ROWS: gl.constexpr = exchange.sums.shape[1]
    i = work.kv_head * 0
    tile = work.sum_tile
    for j in range(work.steps):
        if turn_ptr is not None:
            wait_for_dq_turn(turn_ptr + tile + i, work.key_tile)
        for w in gl.static_range(2):
            mbarrier.wait(exchange.sums_full.index(w), j & 1)
            async_add(sums_desc, [((tile + i) * 2 + w) * ROWS, 0], exchange.sums.index(w))
        tma.store_wait(0)
        for w in gl.static_range(2):
            mbarrier.arrive(exchange.sums_empty.index(w), count=1)
        if turn_ptr is not None:
            end_turn(turn_ptr + tile + i, work.key_tile + 1)
        i += 1
        if i == work.rows.count:
            i = 0
            tile += work.sum_head


@gluon.constexpr_function
def num_pieces(head_dim, consumer):
    """Computes how many pieces of 64 columns of dq a consumer makes: the first one those of 128
    columns."""
    return min(head_dim // 64 - 2 * consumer, 2)


@gluon.jit
def start_dq_piece(exchange, k, j, N: gl.constexpr, W: gl.constexpr):
    """Starts the product that is piece N of consumer W's columns of tile j of dq; k [64, dim]."""
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ds = exchange.ds.index(j & 1).permute((1, 0))  # [64 rows, 64 keys]
    dq = gl.zeros([64, 64], gl.float32, DQ)
    return warpgroup_mma(ds, k.slice(W * 128 + N * 64, 64, dim=1), dq, use_acc=False, is_async=True)


@gluon.jit
def wait_ds(exchange, j):
    """Waits for ds of tile j; of the one before the first, which nobody made, not at all."""
    mbarrier.wait(exchange.ds_full.index(j & 1), (j >> 1) & 1)


@gluon.jit
def finish_dq_pieces(exchange, k, j, PIECES: gl.constexpr, W: gl.constexpr):
    """Makes and stores all pieces of consumer W of tile j of dq, which is the last one."""
    wait_ds(exchange, j)
    for n in gl.static_range(PIECES):
        piece = start_dq_piece(exchange, k, j, n, W)
        piece = warpgroup_mma_wait(0, deps=[piece])
        store_dq(exchange, piece, j * PIECES + n, W)


@gluon.jit
def add_dq_pieces(sums_desc, exchange, work, CONFIG: gl.constexpr, W: gl.constexpr):
    """The role that adds the pieces of consumer W of every tile of dq to the sums in memory."""
    ROWS: gl.constexpr = exchange.sums.shape[1]
    PIECES: gl.constexpr = num_pieces(CONFIG.head_dim, W)
    i = work.kv_head * 0
    tile = work.sum_tile
    for j in range(work.steps * PIECES):
        piece = j % PIECES
        mbarrier.wait(exchange.sums_full.index(W), j & 1)
        at = ((tile + i) * (CONFIG.head_dim // 64) + W * 2 + piece) * ROWS
        async_add(sums_desc, [at, 0], exchange.sums.index(W))
        tma.store_wait(0)
        mbarrier.arrive(exchange.sums_empty.index(W), count=1)
        if piece == PIECES - 1:
            i += 1
            if i == work.rows.count:
                i = 0
                tile += work.sum_head
