"""The roles of `hopper_prefill`: one warp that has tiles copied, warpgroups that multiply them.

Every warpgroup has 64 rows of a row tile. Its steps are the tiles of keys that the row tile visits,
counted over all row tiles of a program: step n has keys and values in slot n % STAGES of two rings.

While the tensor cores multiply p of one step with its values, a warpgroup works out p of the next:
see `before_wait`. Warpgroups issue their products in turns, so that the exponentials of one run
under the products of the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
)

from splitkv.kernels.tile.band import token_range
from splitkv.kernels.tile.visit import tile_and_lane, tile_at, tiles_seen

ROWS = gl.constexpr(64)  # of a warpgroup

# Renamed between Triton 3.6 and 3.9.
_memory = gl.shared_memory_descriptor
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret


class Work(NamedTuple):
    """What all row tiles have in common.

    cu_q_ptr, cu_k_ptr    [batch + 1] int32, or None: dense
    bounds, scoring       see tile/band.py and tile/weight.py
    seqlen_q, seqlen_k    tokens of each sequence where dense
    total_q               tokens of all sequences where packed
    lane_heads            heads of q that are not packed into rows
    tiles, lanes, width   see `tile_and_lane`
    """

    cu_q_ptr: Any
    cu_k_ptr: Any
    bounds: Any
    scoring: Any
    seqlen_q: Any
    seqlen_k: Any
    batch: Any
    total_q: Any
    lane_heads: Any
    tiles: Any
    lanes: Any
    width: Any


class Parts(NamedTuple):
    """Operands: TMA descriptors of [batch, tokens, heads, dim], with one sequence where packed, or
    shared memory, as boxes of TMA or as tiles [slots, rows or keys, dim].

    The `rest` are the columns of q and k from head_dim_v on, or None.
    """

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    out: Any


class Signals(NamedTuple):
    """Barriers of slots: what has arrived, what is free again."""

    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any


class Output(NamedTuple):
    """Where results go: out with TMA or, by token and head, as `stride_t` says; lse by sequence and
    head; sink_ptr [num_heads], or None."""

    out_ptr: Any
    lse_ptr: Any
    sink_ptr: Any
    stride_t: Any
    stride_lse_b: Any
    stride_lse_h: Any


class Own(NamedTuple):
    """A row tile: its sequence, first head and number in the sequence, whose tokens and keys."""

    b: Any
    head: Any
    tile: Any
    first_q: Any
    len_q: Any
    first_k: Any
    len_k: Any


@gluon.jit
def sequence_at(cu_ptr, tile, batch, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """Whose row tile: sequence b starts at tile cu[b] * PACK // TILE_M + b, as in `own_tile`."""
    # every warp looks at all sequences, so that nothing has to be added up across warps
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    b = tile * 0
    for past in range(1, batch + 1, 128):
        offs = past + gl.arange(0, 128, layout=layout)
        starts = gl.load(cu_ptr + offs, mask=offs <= batch, other=0)
        before = (starts * PACK // TILE_M + offs <= tile) & (offs <= batch)
        b += gl.sum(before.to(gl.int32), 0)
    return b


@gluon.jit
def own_rows(work, index, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """The Own of row tile `index`.

    The last row tiles of sequences are the heaviest. They come first among the last lanes that go
    together, and last, first, .. among those before, so that neighbours always weigh alike.
    """
    tile, lane = tile_and_lane(index, work.tiles, work.lanes, work.width)
    if ((work.lanes - 1) // work.width - lane // work.width) % 2 == 0:
        tile = work.tiles - 1 - tile
    head = lane % work.lane_heads * PACK
    b = lane // work.lane_heads
    first_q = b * 0
    first_k = b * 0
    len_q = work.seqlen_q
    len_k = work.seqlen_k
    if work.cu_q_ptr is not None:
        batch = work.batch
        number = sequence_at(work.cu_q_ptr, tile, batch, PACK, TILE_M)
        known = number < batch
        first_q = gl.load(work.cu_q_ptr + number)
        end_q = gl.load(work.cu_q_ptr + number + 1, mask=known, other=0)
        len_q = gl.where(known, end_q, work.total_q) - first_q
        first_k = gl.load(work.cu_k_ptr + number)
        end_k = gl.load(work.cu_k_ptr + number + 1, mask=known, other=0)
        len_k = gl.where(known, end_k - first_k, 0)
        tile -= first_q * PACK // TILE_M + number
    return Own(b, head, tile, first_q, len_q, first_k, len_k)


@gluon.jit
def own_visit(work, own, PACK: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """(Visit, steps, those of them that ask the mask, which come first); at least one step."""
    t_first, t_last = token_range(own.tile, own.len_q, PACK, TILE_M)
    shift = own.len_k - own.len_q
    visit = tiles_seen(work.bounds, shift + t_first, shift + t_last, own.len_k, TILE_N)
    steps = gl.maximum(visit.count, 1)
    return visit, steps, steps - (visit.middle_last - visit.middle_first)


@gluon.jit
def tile_of_step(visit, i, asking):
    """The tile of keys of a row tile's step i."""
    inner = tile_at(visit, i - asking + visit.middle_first, False)
    return gl.where(i < asking, tile_at(visit, i, True), inner)


@gluon.jit
def round_count(work):
    """How often the programs take a row tile each."""
    programs = gl.num_programs(0)
    return (work.tiles * work.lanes + programs - 1) // programs


@gluon.jit
def index_in_round(r):
    """The row tile of this program: rounds go forth and back, which spreads the heavy ones."""
    last = gl.num_programs(0) - 1
    pid = gl.program_id(0)
    return r * (last + 1) + gl.where(r % 2 == 0, pid, last - pid)


@gluon.jit
def rows_in_round(work, r, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """The Own of this program's row tile of round r; where it has none, that of another."""
    index = gl.minimum(index_in_round(r), work.tiles * work.lanes - 1)
    return own_rows(work, index, PACK, TILE_M)


@gluon.jit
def lacks_rows(work, r, own, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """Whether this program has nothing to do in round r."""
    return (index_in_round(r) >= work.tiles * work.lanes) | (own.tile * TILE_M >= own.len_q * PACK)


@gluon.jit
def next_rows(work, r, PACK: gl.constexpr, TILE_M: gl.constexpr):
    """(round, Own) of this program's next row tile from round r on; round `round_count`: none."""
    rounds = round_count(work)
    own = rows_in_round(work, r, PACK, TILE_M)
    if work.cu_q_ptr is None:
        r = gl.where(index_in_round(r) < work.tiles * work.lanes, r, rounds)
    else:
        while (r < rounds) & lacks_rows(work, r, own, PACK, TILE_M):
            r += 1
            own = rows_in_round(work, r, PACK, TILE_M)
    return r, own


@gluon.jit
def slot_and_lap(ring, n):
    """Where the n-th of all lies in a ring with these barriers, and the parity of its lap."""
    SLOTS: gl.constexpr = ring.shape[0]
    return n % SLOTS, n // SLOTS & 1


@gluon.jit
def ask_rows(maps, boxes, signals, own, done, PACK: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Have q of a row tile copied, once its slot is free: row tile `done` of the program."""
    Q_SLOTS: gl.constexpr = signals.q_full.shape[0]
    slot = done % Q_SLOTS
    mbarrier.wait(signals.q_free.index(slot), (done // Q_SLOTS & 1) ^ 1)
    full = signals.q_full.index(slot)
    BYTES: gl.constexpr = WARPGROUPS * maps.q.block_type.nbytes
    if maps.q_rest is None:
        mbarrier.expect(full, BYTES)
    else:
        mbarrier.expect(full, BYTES + WARPGROUPS * maps.q_rest.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        t = own.first_q + (own.tile * WARPGROUPS + w) * (ROWS // PACK)
        async_load(maps.q, [own.b, t, own.head, 0], full, boxes.q.index(slot * WARPGROUPS + w))
        if maps.q_rest is not None:
            at = [own.b, t, own.head, maps.q.block_type.shape[3]]
            async_load(maps.q_rest, at, full, boxes.q_rest.index(slot * WARPGROUPS + w))


@gluon.jit
def ask_keys(maps, boxes, signals, n, b, key, h):
    """Have the keys of step n copied, once their slot is free."""
    slot, lap = slot_and_lap(signals.k_full, n)
    full = signals.k_full.index(slot)
    mbarrier.wait(signals.k_free.index(slot), lap ^ 1)
    if maps.k_rest is None:
        mbarrier.expect(full, maps.k.block_type.nbytes)
    else:
        mbarrier.expect(full, maps.k.block_type.nbytes + maps.k_rest.block_type.nbytes)
        past: gl.constexpr = maps.k.block_type.shape[3]
        async_load(maps.k_rest, [b, key, h, past], full, boxes.k_rest.index(slot))
    async_load(maps.k, [b, key, h, 0], full, boxes.k.index(slot))


@gluon.jit
def ask_values(maps, boxes, signals, n, b, key, h):
    """Have the values of step n copied, once their slot is free."""
    slot, lap = slot_and_lap(signals.v_full, n)
    full = signals.v_full.index(slot)
    mbarrier.wait(signals.v_free.index(slot), lap ^ 1)
    mbarrier.expect(full, maps.v.block_type.nbytes)
    async_load(maps.v, [b, key, h, 0], full, boxes.v.index(slot))


@gluon.jit
def produce(
    work,  # Work
    maps,  # Parts
    boxes,  # Parts
    signals,  # Signals
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    TILE_N: gl.constexpr,
):
    """Have q, keys and values of all row tiles copied, each as soon as there is room.

    The keys of a step come before the values of the step before, as they are wanted first. So do
    the queries, unless room for them is made by what needs those values.
    """
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    EARLY: gl.constexpr = signals.q_full.shape[0] > 1 and boxes.out is not None
    rounds = round_count(work)
    r, own = next_rows(work, gl.program_id(0) * 0, PACK, TILE_M)
    n = r * 0
    done = n
    last_b, last_key, last_h = n, n, n
    while r < rounds:
        if not EARLY:
            if n > 0:
                ask_values(maps, boxes, signals, n - 1, last_b, last_key, last_h)
        ask_rows(maps, boxes, signals, own, done, PACK, WARPGROUPS)
        visit, steps, asking = own_visit(work, own, PACK, TILE_M, TILE_N)
        h = own.head // GROUP
        for i in range(0, steps):
            key = own.first_k + tile_of_step(visit, i, asking) * TILE_N
            ask_keys(maps, boxes, signals, n, own.b, key, h)
            if (n > 0) & (EARLY | (i > 0)):
                ask_values(maps, boxes, signals, n - 1, last_b, last_key, last_h)
            last_b, last_key, last_h = own.b, key, h
            n += 1
        done += 1
        r, own = next_rows(work, r + 1, PACK, TILE_M)
    if n > 0:
        ask_values(maps, boxes, signals, n - 1, last_b, last_key, last_h)
