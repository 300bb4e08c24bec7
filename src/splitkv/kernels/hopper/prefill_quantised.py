"""Attention of sequences stored in 8 bits, for Hopper: on int8 and e4m3 units, or widened.

Computes, for q, k and v that are stored values times scales,

    s[r, n]  = score(scale * q_scale[r] * k_scale[n] * (q[r] . k[n]))     n in the bands of row r
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v_scale[n] * v[n] / (l + exp(sink - m))

Products of 8 bits: "half" is q . k, and v is widened to 16 bits; "full" is p . v too, for which p
is rounded and v stays as it is stored. "widened": none, and both are widened.

A program is one of `hopper_prefill`, whose parts and pages these are, with a warpgroup more:
between the warp that has tiles copied and those that multiply, it makes keys and values ready
(prefill_prepare.py). All that multiply run the same code: they are one role, with all rows of a row
tile, and hand tiles over by barriers of the hardware (numbered.py). Rows of q are rounded before
their first product: see prefill_scaled.py. Steps are in scaled_steps.py; warpgroups take turns at
issuing products where int8 keys have scales of their own.

Of few rows the start and the end count. Programs that know their item by their place in the grid
ask for its first tile before warps have their roles (prefill_roles.py).

Shapes      as kernels/prefill.py, out in the working type; q_scale one number, [num_heads] or one a
            token and head; k_scale and v_scale one number, [(batch,) num_kv_heads] or one a token
            and head
Grid        as kernels/hopper/prefill.py; where a sequence and its packed heads have one row tile:
            parts x packed heads x sequences, of which a program may take several in turn. Two parts
            may be a cluster, which merges them, and more parts several, of which the last to come
            merges what all leave: prefill_cluster.py
Traffic     as kernels/prefill.py, one byte an element of k and v, and the scales
Numerics    sums of int8 products in int32, scores and sums of weights in fp32, base-2 exponentials.
            widened: q, keys and p in fp16, which holds stored numbers exactly, with a power of two
            taken out of each row of q. half: p is rounded to fp16. Where v_scale is one a token,
            widened v * v_scale is rounded to fp16 too, relative to its tile. full: p is rounded to
            e4m3 up to 448 or, relative to its row's maximum in the tile of keys, to int8 up to 127,
            with v_scale where that is one a token: see scaled_steps.py. The tensor cores
            keep some 14 bits of sums of e4m3 products: those of p . v are added up tile by tile in
            fp32 outside them, and those of q . k leave an lse up to 5e-3 off, so there is none
Limits      sm_90; bf16 or fp16; int8 or e4m3; no lse of e4m3 with products half or full; head_dim
            and head_dim_v equal and 64 or 128; pages of a multiple of 16 keys; no ALiBi, no
            dropout, no gradient; addresses and strides that are multiples of 16 bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv import errors
from splitkv.device import Device
from splitkv.kernels import prefill
from splitkv.kernels.direct import in_clusters
from splitkv.kernels.hopper import prefill as hopper_prefill
from splitkv.kernels.hopper.eight_bits import PART
from splitkv.kernels.hopper.numbered import FIRST, PHASES, READY, Numbers
from splitkv.kernels.hopper.prefill import BARRIER_BYTES, fitting, packed_heads
from splitkv.kernels.hopper.prefill_cluster import (
    PAIR,
    WARPS,
    bytes_of_half,
    exchange_bytes,
    open_exchange,
)
from splitkv.kernels.hopper.prefill_load import ROWS, Parts, Signals, allocate, ask_first
from splitkv.kernels.hopper.prefill_prepare import Ring, as_made_ready
from splitkv.kernels.hopper.prefill_roles import give_roles
from splitkv.kernels.hopper.prefill_rows import Cutting, Keys, Work, first_item
from splitkv.kernels.hopper.prefill_scaled import Scales
from splitkv.kernels.hopper.prefill_write import Merging, Output, begin, merge
from splitkv.kernels.hopper.ring import arrivals
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.codec import scale_strides
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring
from splitkv.kernels.workspace import TICKETS
from splitkv.kv import AS_IS
from splitkv.plans import Config, Kernel, Traffic
from splitkv.problem import Operands, Problem

# By products: tile_m, tile_n, num_stages, the best guess first. A stage is a tile of keys and one
# of values as they are stored. The shapes of 64 rows are for few, which wait for memory.
SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "widened": ((128, 64, 2), (64, 64, 6), (64, 128, 2)),
    "half": ((128, 128, 2), (128, 64, 3), (64, 128, 3), (64, 64, 6)),
    "full": ((128, 128, 2), (128, 128, 3), (128, 64, 3), (64, 128, 4)),
}
# Steps of which keys and values are asked for before roles are given: with all that there is room
# for 3 query tokens of int8 took 25.1 us where one took 24.2 (64 x 4096), 23.2 and 22.3 (128 x
# 2048): a warp's first instructions come from the same memory.
ASKED_FIRST = 1
MOST_ALONG_AN_AXIS = 65535  # programs, of an axis of a grid that is not its first
SIZES = [  # arguments whose values are no reason to compile again
    *hopper_prefill.SIZES,
    *(f"stride_{name}s_{axis}" for name in "qkv" for axis in "bth"),
]


@gluon.jit
def allocate_columns(DTYPE: gl.constexpr, SLOTS: gl.constexpr, TILE_N: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(DTYPE, [SLOTS, TILE_N], layout)


@gluon.jit
def allocate_ready(stored, DTYPE: gl.constexpr):
    """Shared memory for tiles of `stored` widened to DTYPE, or by column: with DTYPE as it is."""
    TILE_N: gl.constexpr = stored.shape[1]
    DIM: gl.constexpr = stored.shape[2]
    if stored.dtype == DTYPE:
        narrow: gl.constexpr = gl.NVMMASharedLayout(32, 8, rank=2)
        ready = gl.allocate_shared_memory(DTYPE, [READY, DIM, TILE_N], narrow)
    else:
        broad: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        ready = gl.allocate_shared_memory(DTYPE, [READY, TILE_N, DIM], broad)
    return ready


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill_quantised(
    q_desc,  # as of hopper_prefill, of 8 or 16 bits; all that is not said here is as there
    q_rest_desc,  # None, as k_rest_desc
    k_desc,
    k_rest_desc,
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    partial,
    count_ptr,
    cu_q_ptr,
    cu_k_ptr,
    lens_ptr,
    table_ptr,
    sink_ptr,
    q_scale_ptr,  # None: q has none
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    left,
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    total_q,
    lane_heads,
    stride_lse_b,
    stride_lse_h,
    stride_table,
    tiles,
    lanes,
    width,
    items,
    parts,
    size,
    most_q,
    stride_ob,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,
    TILE_N: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    TILE_P: gl.constexpr,
    TILE_R: gl.constexpr,
    PDL: gl.constexpr,
    stride_qs_b,  # of q_scale, 0 along what has one
    stride_qs_t,
    stride_qs_h,
    stride_ks_b,
    stride_ks_t,
    stride_ks_h,
    stride_vs_b,
    stride_vs_t,
    stride_vs_h,
    PER_KEY: gl.constexpr,  # k and v have a scale a token
    OF_K: gl.constexpr,  # the type that keys are multiplied in, as q
    OF_V: gl.constexpr,  # that of values, as p
    Q_SLOTS: gl.constexpr,  # row tiles of q in shared memory
    ASKED: gl.constexpr,  # a program has one item: see `placed_item`; steps asked for at once, or 0
    CLUSTER: gl.constexpr,  # parts are programs of a cluster of so many, which merges them; or 0
    KEPT: gl.constexpr,  # rows that a sequence may have, of those of a cluster
    LEFT: gl.constexpr,  # clusters of a row tile
):
    stored: gl.constexpr = k_desc.dtype
    TILE_M: gl.constexpr = WARPGROUPS * ROWS
    bounds, scoring = Bounds(left, right, sink_tokens), Scoring(scale, softcap, None, None, None)
    keys = Keys(cu_k_ptr, lens_ptr, table_ptr, stride_table, None, seqlen_k)
    cutting = Cutting(parts, size, most_q)
    place = lane_heads, tiles, lanes, width, items
    placed = None
    if ASKED:
        placed = ASKED
    sizes = seqlen_q, batch, total_q
    work = Work(cu_q_ptr, keys, bounds, scoring, cutting, *sizes, *place, None, placed)
    own = first_item(work, PACK)  # whose length arrives while barriers are set up
    q_boxes, q = allocate(q_desc, Q_SLOTS, TILE_M, DIM)
    k_boxes, k_stored = allocate(k_desc, STAGES, TILE_N, DIM)
    v_boxes, v_stored = allocate(v_desc, STAGES, TILE_N, DIM)
    out_boxes, out = allocate(out_desc, 1, TILE_M, DIM)
    wide = None
    if q_desc.dtype != OF_K:
        wide = q
        BITS: gl.constexpr = OF_K.primitive_bitwidth
        rounded: gl.constexpr = gl.NVMMASharedLayout(min(128, DIM * BITS // 8), BITS, rank=2)
        q = gl.allocate_shared_memory(OF_K, [1, TILE_M, DIM], rounded)
    q_full, q_free = arrivals(Q_SLOTS, 1), arrivals(Q_SLOTS, 1)
    v_there, v_taken = arrivals(STAGES, 1), arrivals(STAGES, 1)
    v_full = arrivals(READY, 1)
    v = allocate_ready(v_stored, OF_V)
    WIDENED: gl.constexpr = TILE_N if WARPGROUPS == 1 else PART  # keys at a time
    v_tiles = as_made_ready(v_stored, v, WIDENED)
    v_ring = Ring(v_tiles[0], v_tiles[1], v_there, v_taken, v_full)
    k_there = arrivals(STAGES, 1)
    k = k_stored
    # keys that are multiplied as they are stored are given back to the warp that has tiles copied
    THREADS: gl.constexpr = 2 * TILE_M
    K_THREADS: gl.constexpr = THREADS + (32 if stored == OF_K else 128)
    V_FREE: gl.constexpr = FIRST + PHASES * WARPGROUPS
    turns = None
    # the barriers that are left
    if PER_KEY and gl.int8 == OF_K and gl.float16 == OF_V and WARPGROUPS == 2 and STAGES == 2:
        turns = V_FREE + READY + STAGES
    numbers = Numbers(WARPGROUPS, V_FREE + READY, K_THREADS, V_FREE, THREADS + 128, turns)
    if stored == OF_K:
        k_ring = Ring(None, None, None, None, None)
        k_taken = None
        taken_numbers = numbers
    else:
        k_taken = arrivals(STAGES, 1)
        k = allocate_ready(k_stored, OF_K)
        k_tiles = as_made_ready(k_stored, k, WIDENED)
        k_ring = Ring(k_tiles[0], k_tiles[1], k_there, k_taken, None)
        taken_numbers = None
    of_k = None
    of_v = None
    of_tile = None
    inverse = None
    if PER_KEY:
        if gl.float16 == OF_V:
            of_k = allocate_columns(gl.float32, READY + 1, TILE_N)
            of_v = allocate_columns(gl.float16, READY + 1, TILE_N)
            of_tile = allocate_columns(gl.float32, 2 * (READY + 1), 1)
        else:
            pairs: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            of_k = gl.allocate_shared_memory(gl.float32, [READY + 1, TILE_N, 2], pairs)
            inverse = allocate_columns(gl.float32, READY + 1, TILE_N)
    coming = Signals(q_full, q_free, k_there, k_taken, v_there, v_taken, None, taken_numbers)
    signals = Signals(q_full, q_free, None, None, v_full, None, None, numbers)
    maps = Parts(q_desc, None, k_desc, None, v_desc, out_desc)
    boxes = Parts(q_boxes, None, k_boxes, None, v_boxes, out_boxes)
    arriving = Parts(None, None, k_stored, None, v_stored, None)
    ready = Parts(q, None, k, None, v, out)
    of_out = Strides(stride_ob, stride_ot, stride_oh)
    merging = Merging(count_ptr, of_out)
    strides = lane_heads * PACK * DIM, stride_lse_b, stride_lse_h
    output = Output(out_ptr, lse_ptr, sink_ptr, partial, merging, *strides)
    scales = Scales(
        q_scale_ptr,
        k_scale_ptr,
        v_scale_ptr,
        Strides(stride_qs_b, stride_qs_t, stride_qs_h),
        Strides(stride_ks_b, stride_ks_t, stride_ks_h),
        Strides(stride_vs_b, stride_vs_t, stride_vs_h),
        of_k,
        of_v,
        of_tile,
        inverse,
        wide,
    )
    whole = work, maps, boxes, ready, scales, signals, output
    rings = k_there, k_ring, v_ring
    if CLUSTER == 0:
        begin(output)
    if ASKED:
        ask_first(work, own, maps, boxes, arriving, coming, GROUP, PACK, ASKED, PAGE_SIZE)
    open_exchange(CLUSTER, KEPT, DIM)
    roles = whole, rings, arriving, coming
    give_roles(*roles, GROUP, PACK, PAGE_SIZE, PDL, ASKED, CLUSTER, KEPT, LEFT)
    if count_ptr is not None and CLUSTER == 0:
        merge(work, output, GROUP, PACK, DIM, TILE_P, TILE_R)


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    plain = replace(problem, codec=AS_IS, needs_grad=False, head_dim=128, head_dim_v=128)
    reasons = hopper_prefill.unsupported(plain, device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(problem.codec != AS_IS, f"kv {problem.codec}: expected int8 or fp8")
    expect(
        problem.codec.name != "fp8" or problem.products == "widened" or not problem.return_lse,
        f"return_lse of fp8, products {problem.products}: expected widened, as units keep 14 bits",
    )
    expect(not problem.needs_grad, "gradient: expected inputs that require none")
    dims = problem.head_dim, problem.head_dim_v
    expect(
        dims in ((64, 64), (128, 128)),
        f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected 64/64 or 128/128",
    )
    return reasons


def unfit(operands: Operands) -> list[str]:
    """What of a memory layout TMA cannot describe."""
    return hopper_prefill.unfit(operands)


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config."""
    dim, n, stages = problem.head_dim, config.tile_n, config.num_stages
    of_q, of_k, of_v, stored = types(problem)
    a_row = size_of(of_q) + (size_of(of_k) if of_k != of_q else 0) + problem.element_bytes
    a_key = 2 * stages * size_of(stored) + READY.value * size_of(of_v)
    if of_k != stored:
        a_key += READY.value * size_of(of_k)
    columns = 0
    if problem.codec.granularity == "token":
        columns = (READY.value + 1) * (12 * n if of_v == stored else 6 * n + 8)
    exchanged = 0
    if config.clustered:  # no tile of results
        a_row -= problem.element_bytes
        exchanged = exchange_bytes(problem.head_dim_v)
    return (config.tile_m * a_row + n * a_key) * dim + columns + exchanged + BARRIER_BYTES


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """As of `hopper_prefill`, with shapes of its own. Then those whose two parts are a cluster,
    where a sequence and the packed heads have one row tile."""
    found = list(fitting(problem, device, SHAPES[problem.products], shared_bytes))
    yield from found
    if problem.kind == "varlen" or problem.products == "full":
        return
    for config in found:
        packed = config.tile_m == ROWS.value and config.pack_gqa and config.programs
        if packed and problem.seqlen_q * packed_heads(problem, config) <= config.tile_m:
            pair = replace(config, num_splits=PAIR.value, merge="cluster")
            if shared_bytes(problem, pair) <= device.smem_per_block:
                yield pair


def traffic(problem: Problem, config: Config) -> Traffic:
    if config.clustered:  # what is exchanged stays on the SMs
        config = replace(config, num_splits=config.num_splits // PAIR.value)
    return prefill.traffic(problem, config)


def types(problem: Problem) -> tuple[Any, Any, Any, Any]:
    """Of q as it comes, of keys and of values as they are multiplied, and of both as stored."""
    stored = {"int8": gl.int8, "fp8": gl.float8e4nv}[problem.codec.name]
    working = {"bfloat16": gl.bfloat16, "float16": gl.float16}[problem.dtype]
    of_k = gl.float16 if problem.products == "widened" else stored
    of_v = stored if problem.products == "full" else gl.float16
    return working if problem.q_granularity == "none" else stored, of_k, of_v, stored


def size_of(dtype: Any) -> int:
    return dtype.primitive_bitwidth // 8


class Launcher(hopper_prefill.Launcher):
    """`hopper_prefill_quantised` and `combine` bound to one plan and one memory layout."""

    def own_grid(self, tiles: int, items: int) -> tuple[tuple[int, int, int], int | None]:
        """By part, lane of a sequence and sequence where a lane has one row tile: see `Work`."""
        problem, config = self.problem, self.plan.config
        self.cluster = PAIR.value if config.clustered else 0
        self.kept = min(config.tile_m, problem.seqlen_q * self.pack)
        programs = 0 if self.cluster else config.programs
        across = self.parts * (problem.num_heads // self.pack)
        fits = across <= (programs or across)
        self.placed = problem.kind != "varlen" and tiles == 1 and fits and config.merge != "last"
        assert self.placed or not self.cluster, "a cluster has the parts of one row tile"
        if not self.placed:
            return super().own_grid(tiles, items)
        at_once = min(problem.batch, programs // across if programs else MOST_ALONG_AN_AXIS)
        rounds = triton.cdiv(problem.batch, at_once)
        assert config.merge != "cluster" or self.parts == PAIR.value, "a cluster is a pair"
        if self.cluster:
            one = f"'combine' or 'last' beside more than {MOST_ALONG_AN_AXIS} sequences"
            errors.expect(rounds == 1, "plan.config.merge", one, config.merge)
        lanes = problem.num_heads // self.pack
        if self.pairs:
            most = TICKETS // (PAIR.value * WARPS.value)
            few = f"'combine' or 'last' beside more than {most} sequences times lanes of each"
            errors.expect(lanes * problem.batch <= most, "plan.config.merge", few, config.merge)
            left = bytes_of_half(problem.head_dim_v)
            self.slots = self.parts * lanes * problem.batch * left // (4 * problem.head_dim_v)
        grid = self.parts // (self.cluster or 1), lanes, triton.cdiv(problem.batch, rounds)
        return grid, None if rounds == 1 else rounds

    def own_tail(self, operands: Operands) -> tuple[Any, ...]:
        x = operands
        pairs = (x.q_scale, x.q), (x.k_scale, x.k), (x.v_scale, x.v)
        strides = (step for scale, tensor in pairs for step in scale_strides(scale, tensor))
        of_q, of_k, of_v, _ = types(self.problem)
        room = self.device.smem_per_block - shared_bytes(self.problem, self.plan.config)
        # rows that are rounded first leave their place early
        tile_bytes = self.plan.config.tile_m * self.problem.head_dim * size_of(of_q)
        q_slots = 2 if self.plan.config.programs and of_q == of_k and tile_bytes <= room else 1
        asked = ASKED_FIRST if self.placed else 0
        merged = 0, 0, 1
        if self.cluster:
            merged = self.cluster, self.kept, self.parts // self.cluster
        per_key = self.problem.codec.granularity == "token"
        return *strides, per_key, of_k, of_v, q_slots, asked, *merged

    def rows_at_a_time(self) -> int:
        return self.plan.config.tile_m

    def out_has_place(self) -> bool:
        return False

    def start(self, *args: Any) -> Any:
        if not self.cluster:
            return hopper_prefill_quantised[self.grid](*args, *self.tail, **self.options)
        given = *args, *self.tail
        made = hopper_prefill_quantised.warmup(*given, grid=self.grid, **self.options)
        clustered = in_clusters(made, self.cluster, exchange_bytes(self.problem.head_dim_v))
        clustered[self.grid](*given)
        return clustered


KERNEL = Kernel(
    *("hopper_prefill_quantised", unsupported, configs, traffic, Launcher, unfit),
    schedules=("even", "fixed"),
    merges=("combine", "last", "cluster", "pairs"),
)
