"""Scales of each key in `hopper_decode_split` copied as they lie, those of all KV heads, by TMA.

The scales of a tile are one piece of memory where its keys are, and one thread asks for it. Copies
by every thread (`cp.async`) are not only more instructions: TMA may write to a slot once a fence
has ordered what all threads did with shared memory, and that fence waits for their own copies too,
which are of tiles that nobody needs yet.

Scales lie behind all that Triton gave out, with a barrier for each slot: see cluster.py.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.kernels.hopper.cluster import exchange_at, wait_at
from splitkv.kernels.hopper.effect import act
from splitkv.kernels.hopper.ring import tile_at
from splitkv.plans import Config, scales_in_bulk
from splitkv.problem import Problem


def in_one_piece(problem: Problem, config: Config, scales: Any) -> int:
    """The KV heads whose scales [batch or pages, keys, num_kv_heads] are copied together, 0: those
    of each key and head by themselves. Copies are of 16 bytes and more."""
    heads = problem.num_kv_heads
    if not scales_in_bulk(problem, config) or scales.stride(1) != heads:
        return 0
    return 0 if (scales.stride(0) | scales.shape[1] * heads) % 4 else heads


@gluon.constexpr_function
def bytes_in_bulk(slots, tile_n, heads):
    """Of scales of K and of V, then a barrier, for each slot."""
    return -(-slots * (8 * tile_n * heads + 8) // 16) * 16


@gluon.constexpr_function
def barriers_of(slots):
    """Instructions that set up so many barriers, by one thread."""
    code = "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
    code += "".join(f"@p mbarrier.init.shared::cta.b64 [$1+{8 * n}], 1;" for n in range(slots))
    return code + "}"


@gluon.constexpr_function
def copies_to(between):
    """Instructions by which one thread has scales of K, and of V to so many bytes further, copied:
    barrier, bytes of both, where to, from where, from where, bytes of each."""
    copy = "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    return f"""{{
        .reg .pred p, first;
        .reg .u32 t;
        mov.u32 t, %tid.x;
        setp.lt.u32 first, t, 32;
        elect.sync _|p, 0xffffffff;
        and.pred p, p, first;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
        {copy} [$3], [$4], $6, [$1];
        {copy} [$3+{between}], [$5], $6, [$1];
        }}"""


@gluon.constexpr_function
def reading(behind, heads):
    """Instructions that read from so many bytes behind, and constraints: a pair of keys, whose
    scales are neighbours where there is one head, or one."""
    if heads == 1:
        return f"ld.shared.v2.f32 {{$0, $1}}, [$2+{behind}];", "=f,=f,r,r", 2
    return f"ld.shared.f32 $0, [$1+{behind}];", "=f,r", 1


@gluon.jit
def room_in_bulk(
    EXCHANGED: gl.constexpr, SLOTS: gl.constexpr, TILE_N: gl.constexpr, HEADS: gl.constexpr
):
    """`KeyScales.place`, in front of the bytes that a cluster exchanges, with barriers."""
    at = exchange_at(EXCHANGED + bytes_in_bulk(SLOTS, TILE_N, HEADS))
    CODE: gl.constexpr = barriers_of(SLOTS)
    act(CODE, "r", (barrier_at(at, 0, TILE_N, SLOTS, HEADS),))
    return at


@gluon.jit
def barrier_at(at, slot, TILE_N: gl.constexpr, SLOTS: gl.constexpr, HEADS: gl.constexpr):
    return at + SLOTS * (8 * TILE_N * HEADS) + slot * 8


@gluon.jit
def ask_in_bulk(
    of_keys,  # KeyScales
    pool,  # Pool
    b,
    slot,
    tile,
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Have the scales of a tile's keys copied to its slot, up to the next 16 bytes behind the last
    key."""
    outer = b
    inner = tile * TILE_N
    each = (gl.minimum(keys - inner, TILE_N) * (4 * HEADS) + 15) & -16
    if pool.table_ptr is not None:
        outer = gl.load(pool.table_ptr + b.to(gl.int64) * pool.stride_table + inner // PAGE_SIZE)
        inner %= PAGE_SIZE
    near = outer.to(gl.int64) * of_keys.stride_b + inner * HEADS
    barrier = barrier_at(of_keys.place, slot, TILE_N, SLOTS, HEADS)
    to = of_keys.place + slot * (8 * TILE_N * HEADS)
    k_scales, v_scales = of_keys.scales.k_ptr + near, of_keys.scales.v_ptr + near
    CODE: gl.constexpr = copies_to(4 * TILE_N * HEADS)
    act(CODE, "r,r,r,l,l,r", (barrier, 2 * each, to, k_scales, v_scales, each))


@gluon.jit
def fill_in_bulk(
    of_keys,
    pool,
    b,
    tiles,  # Tiles
    keys,
    PAGE_SIZE: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
    HEADS: gl.constexpr,
):
    """Have the scales of the first tiles copied, as many as there are slots."""
    for n in gl.static_range(SLOTS):
        i = tiles.first + n * tiles.by
        if i < tiles.last:
            tile = tile_at(tiles, i)
            ask_in_bulk(of_keys, pool, b, n, tile, keys, PAGE_SIZE, TILE_N, SLOTS, HEADS)


@gluon.jit
def read_in_bulk(
    of_keys,
    slot,
    phase,
    h,
    KEYS: gl.constexpr,  # the layout of scales of keys
    SLOTS: gl.constexpr,
    TILE_N: gl.constexpr,
    HEADS: gl.constexpr,
):
    """(of keys, of values) in a slot, once they are there, for a KV head; behind the last key there
    may be anything."""
    wait_at(barrier_at(of_keys.place, slot, TILE_N, SLOTS, HEADS), phase)
    at = of_keys.place + slot * (8 * TILE_N * HEADS) + h * 4
    at += gl.arange(0, TILE_N, layout=KEYS) * (4 * HEADS)
    return read(at, 0, HEADS), read(at, 4 * TILE_N * HEADS, HEADS)


@gluon.jit
def read(at, BEHIND: gl.constexpr, HEADS: gl.constexpr):
    READING: gl.constexpr = reading(BEHIND, HEADS)
    return gl.inline_asm_elementwise(
        READING[0], READING[1], [at], dtype=gl.float32, is_pure=False, pack=READING[2]
    )
