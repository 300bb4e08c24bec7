"""Split-KV decode attention for Hopper: keys and values by TMA, a ring of tiles in flight.

Computes what kernels/decode_split.py computes, leaves the same partials and shares `combine`. It
differs in how keys arrive. One thread asks for whole tiles; nothing is computed an address, so the
first request leaves a few hundred cycles after the start, and the warps only multiply. Pages
smaller than a tile arrive as boxes of one page, written where the tile has its rows. In long parts
a warp of its own asks for these, see decode_load.py.

Part p of n takes the tiles p, p + n, p + 2n, ...: all SMs then read neighbouring tiles at the same
time, which the memory serves faster than n distant ranges, and no program has to divide. By the
fixed rule a part is a range of keys, whatever else there is.

New tokens (see tile/new.py) are written while earlier tiles are on their way; a fence lets TMA see
them. Only the programs that have tiles with new tokens wait for that.

Two, four or eight parts may be a cluster, which merges them itself: see cluster.py.

Tiles of 16 and 32 packed rows are multiplied by mma, see decode_narrow.py, and where eight are all
that there are, see halves.py; wide ones of 64 by wgmma, see decode_wide.py. int8 and e4m3 arrive as
pairs of elements for the former: see pairs.py.

Shapes      as kernels/decode_split.py
Grid        as kernels/decode_split.py
Traffic     as kernels/decode_split.py
Numerics    scores and sums in fp32, base-2 exponentials; p is rounded to the value type before p @
            v; beside int8 and e4m3, which are widened to fp16 exactly, q and p are fp16, too, with
            powers of two taken out of them; int8, products half or full: q is rounded to int8 with
            a scale a row, and sums of q . k are exact
Limits      sm_90; bf16 or fp16; head_dim and head_dim_v 64, 128 or 256; at most 16 query tokens and
            64 packed rows, 32 where head_dim is 256 in 8 bits; pages of a multiple of 16 keys;
            strides of K and V multiples of 16 bytes; otherwise those of kernels/decode_split.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from splitkv.device import Device
from splitkv.kernels import decode_launch, decode_split
from splitkv.kernels.combine import write_absent
from splitkv.kernels.direct import JUST_ADDRESSES, Launch, TensorMaps, bind_to_maps, in_clusters
from splitkv.kernels.hopper.cluster import CLUSTERS, arrive_running, exchange_bytes, merge_cluster
from splitkv.kernels.hopper.decode_bulk import bytes_in_bulk, fill_in_bulk, in_one_piece
from splitkv.kernels.hopper.decode_load import (
    asking,
    attend_beside,
    attend_rows,
    foresee_part,
)
from splitkv.kernels.hopper.decode_new import Turning, fill_and_write
from splitkv.kernels.hopper.decode_query import places_of_rows, rows_to_multiply
from splitkv.kernels.hopper.decode_rows import place_in_batch, tiles_within, write_rows
from splitkv.kernels.hopper.decode_scales import (
    KeyScales,
    fill_beside_scales,
    fill_scales,
    place_of_scales,
    store_first_scales,
)
from splitkv.kernels.hopper.decode_tiles import (
    allocate_tiles,
    boxes_of,
    layout_of,
    most_registers,
    shared_bytes,
    steps_of,
    unfit,
    without_tma,
)
from splitkv.kernels.hopper.decode_wide import (
    layout_of_scores,
    most_rows,
    rounds_rows,
    rows_of_tile,
    type_of_keys,
)
from splitkv.kernels.hopper.pairs import from_e4m3, from_int8, pairs_of
from splitkv.kernels.hopper.ring import Pool, arrivals, fill, first_pages
from splitkv.kernels.parts import num_parts as parts_of_problem
from splitkv.kernels.parts import traffic_of_parts
from splitkv.kernels.tile.band import Bounds, token_range
from splitkv.kernels.tile.codec import scale_strides
from splitkv.kernels.tile.new import NewSteps, grown, seen_tiles, start_of
from splitkv.kv import Paged
from splitkv.plans import (
    WIDE,
    Config,
    Kernel,
    Plan,
    Traffic,
    asked_apart,
    asked_early,
    box_rows,
    gathers,
    ring_holds_all,
    scales_at_once,
    visited,
)
from splitkv.problem import Operands, Problem

HEAD_DIMS = 64, 128, 256


@gluon.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "num_kv_heads",
        "left",
        "right",
        "sink_tokens",
        "batch",
        "parts",
        "size",
        "programs",
        "stride_table",
        "stride_slope",
        "stride_qsb",
        "stride_qst",
        "stride_qsh",
        "stride_sb",
        "stride_sn",
        "stride_sh",
        "seqlen_new",
        "capacity",
        "slabs",
        "rotary_rows",
        "q_step",
    ]
)
def hopper_decode_split(
    q_ptr,  # [batch, seqlen_q, num_heads, HEAD_DIM]
    k_desc,  # [batch or pages, keys, num_kv_heads, HEAD_DIM or pairs of it], as v_desc
    v_desc,
    table_ptr,  # [batch, max_pages], or None
    lens_ptr,  # [batch] int32 keys of each sequence, or None: seqlen_k each
    final,  # Final
    partial,  # Partial, or None: one part a sequence
    row,  # Row
    head_scales,  # Scales that the keys of a head share, or None
    key_scales,  # Scales [batch or pages, keys, num_kv_heads], or None
    scale,  # see tile/score.py
    softcap,  # float or None
    growth,  # Growth: the lengths are those before the new tokens; None: nothing is appended
    new,  # New, or None
    turn,  # Turn, or None
    seqlen_q,
    seqlen_k,
    batch,
    num_kv_heads,
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    parts,  # the share's numbers, or None
    size,
    programs,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_table,
    stride_slope,
    stride_qsb,  # of the scales of q: a sequence, a token, a head
    stride_qst,
    stride_qsh,
    stride_sb,  # of those of K and V: a sequence or a page, a key, a head
    stride_sn,
    stride_sh,
    seqlen_new,  # from here on None where nothing is appended
    capacity,
    slabs,
    rotary_rows,
    q_step,
    stride_nkb,  # of the new k and v
    stride_nkt,
    stride_nkh,
    stride_nvb,
    stride_nvt,
    stride_nvh,
    stride_nsb,  # of the scales that they are stored by
    stride_nsh,
    stride_cos,
    stride_sin,
    stride_kb,  # of the caches
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    GROUP: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BATCH_P2: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    SLOTS: gl.constexpr,
    EARLY_KV: gl.constexpr,  # keys of earlier tokens are there before the kernel before has ended
    CLUSTER: gl.constexpr,  # parts are programs of a cluster of so many, which merges them; or 0
    ROWS: gl.constexpr,  # of TILE_M, where they do
    ROTARY_DIM: gl.constexpr,
    PAIR: gl.constexpr,
    TILE_T: gl.constexpr,  # new tokens that are written at once
    WIDEN: gl.constexpr,  # from_int8 or from_e4m3, of keys in pairs; None: keys are as they are
    DIM: gl.constexpr,  # columns of k as TMA sees them, DIM_V of v
    DIM_V: gl.constexpr,
    GATHER: gl.constexpr,  # keys are copied row by row by all threads, not by TMA
    OF_K: gl.constexpr,  # the type in which wide tiles multiply keys; None: tiles are not wide
    APART: gl.constexpr,  # a warp that does not multiply asks for tiles, 1: before q is read
    ROUNDED: gl.constexpr,  # q is rounded to int8 and multiplied with int8 keys as they are
    LOADED: gl.constexpr,  # threads load scales of keys
    HALF: gl.constexpr,  # of TILE_M, which is 16, no more than eight rows are somebody's
    MORE: gl.constexpr,  # a part may have more tiles than the ring has slots
    BULK: gl.constexpr,  # KV heads, whose scales of keys are copied in bulk; 0: of each by itself
):
    part, head_tile, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    slot_id = (b * gl.num_programs(1) + head_tile) * gl.num_programs(0) + part
    if programs is not None:
        part, head_tile = head_tile, part
        slot_id = head_tile * programs + part
    IN_ONE: gl.constexpr = 1 if WIDEN is None or OF_K is not None else 2  # elements of a column
    k_strides, v_strides = (stride_kb, stride_kn, stride_kh), (stride_vb, stride_vn, stride_vh)
    k_rows = None
    v_rows = None
    if GATHER:
        k_rows, v_rows = steps_of(k_strides, IN_ONE), steps_of(v_strides, IN_ONE)
    pool = Pool(k_desc, v_desc, table_ptr, stride_table, k_rows, v_rows)
    # page numbers of the tiles that are asked for first are loaded beside the length
    EARLY: gl.constexpr = APART == 1
    EARLIER: gl.constexpr = EARLY_KV or seqlen_new is not None
    AT_ONCE: gl.constexpr = GATHER and left is None and programs is None and not EARLIER
    if left is None and programs is None and not AT_ONCE:  # where the part starts needs no length
        foresee_part(pool, lens_ptr, seqlen_k, b, part, parts, size, PAGE_SIZE, TILE_N, EARLY)
    keys = seqlen_k
    if programs is None and not EARLY:
        if seqlen_new is not None:
            length = grown(lens_ptr, growth, b, True, seqlen_new, capacity)
            keys = length.keys
        elif lens_ptr is not None:
            keys = gl.load(lens_ptr + b)
    k_boxes, k_ring = allocate_tiles(k_desc, SLOTS, TILE_N, DIM, GATHER, OF_K)
    v_boxes, v_ring = allocate_tiles(v_desc, SLOTS, TILE_N, DIM_V, GATHER, OF_K)
    row_tiles = 1 if HALF else (seqlen_q * GROUP + TILE_M - 1) // TILE_M
    h, tile_m = head_tile // row_tiles, head_tile % row_tiles
    bounds = Bounds(left, right, sink_tokens)
    t_first, t_last = token_range(tile_m, seqlen_q, GROUP, TILE_M)
    pages = None
    if AT_ONCE:
        of_part = lens_ptr, seqlen_k, seqlen_q, b, part, parts, size, bounds, t_first, t_last
        tiles, _ = tiles_within(of_part, seqlen_k, TILE_N)  # at most
        pages = first_pages(pool, k_boxes, b, tiles, seqlen_k, PAGE_SIZE, TILE_N, SLOTS)
    arrive_running(CLUSTER)
    if partial is not None:  # combine waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    EXCHANGED: gl.constexpr = exchange_bytes(ROWS, IN_ONE * DIM_V, CLUSTER) if CLUSTER else 0
    of_tiles = place_of_scales(key_scales, SLOTS, TILE_N, BULK, EXCHANGED)
    COPIED: gl.constexpr = key_scales is not None and BULK == 0
    arrived = arrivals(SLOTS, asking(GATHER, COPIED, LOADED, APART, gl.num_warps()))
    ring = pool, k_boxes, v_boxes, arrived
    of_keys = KeyScales(key_scales, of_tiles, stride_sb, stride_sn, part if LOADED else None)
    if programs is not None:
        rule = programs, bounds, lens_ptr, growth, seqlen_new, capacity, batch, seqlen_q
        b, part, parts = place_in_batch(*rule, t_first, t_last, part, BATCH_P2, TILE_N)
        if b >= batch:
            return
        if seqlen_new is None:
            keys = gl.load(lens_ptr + b)
        else:
            length = grown(lens_ptr, growth, b, True, seqlen_new, capacity)
            keys = length.keys
    of_part = lens_ptr, seqlen_k, seqlen_q, b, part, parts, size, bounds, t_first, t_last
    if not EARLY:
        first_pos = keys - seqlen_q
        tiles, num_parts = tiles_within(of_part, keys, TILE_N)
    if seqlen_new is not None:
        k_steps = (stride_nkb, stride_nkt, stride_nkh), k_strides
        v_steps = (stride_nvb, stride_nvt, stride_nvh), v_strides
        steps = NewSteps(*k_steps, *v_steps, (stride_nsb, stride_nsh), stride_cos, stride_sin)
        shown = seen_tiles(bounds, keys, seqlen_q, (part == 0) & (tile_m == 0), TILE_N)
        fill_and_write(
            *(ring, (new, turn, growth, length)),
            *(b, h, tiles, shown, steps, capacity, slabs, rotary_rows),
            *(IN_ONE * DIM, IN_ONE * DIM_V, PAGE_SIZE, TILE_N, SLOTS, ROTARY_DIM, PAIR, TILE_T),
        )
    elif EARLY_KV:
        fill(*ring, b, h, tiles, keys, first_pos, False, PAGE_SIZE, TILE_N, SLOTS)
        tl.extra.cuda.gdc_wait()  # for what the kernel before writes: q, the new tokens' keys
        fill(*ring, b, h, tiles, keys, first_pos, True, PAGE_SIZE, TILE_N, SLOTS)
    elif not APART:
        if BULK:
            fill_in_bulk(of_keys, pool, b, tiles, keys, PAGE_SIZE, TILE_N, SLOTS, BULK)
        first = b, h, tiles, keys
        loaded = fill_beside_scales(ring, of_keys, pages, *first, PAGE_SIZE, TILE_N, SLOTS)
    if COPIED and not APART and not LOADED:
        fill_scales(of_keys, arrived, pool, b, h, tiles, keys, PAGE_SIZE, TILE_N, SLOTS)
    S: gl.constexpr = layout_of_scores(OF_K, TILE_N, gl.num_warps())
    M: gl.constexpr = gl.SliceLayout(1, S)
    by = None
    if ROTARY_DIM:
        start = start_of(turn, length.before, b, True)
        by = Turning(turn, start, q_step, rotary_rows, stride_cos, stride_sin)
    q_rows = q_ptr + b.to(gl.int64) * stride_qb, h, tile_m, seqlen_q, stride_qt, stride_qh
    strides = stride_slope, stride_sb, stride_sh, stride_qsb, stride_qst, stride_qsh
    of_rows = of_part, h, tile_m, (row, head_scales), strides, (scale, softcap), of_keys
    rings = ring, k_ring, v_ring
    if EARLY:
        acc, m, l, num_parts = attend_beside(
            *(q_rows, of_rows, rings, S, GROUP, PAGE_SIZE, DIM_V, TILE_M, WIDEN, HALF),
            *(DIM, ROUNDED, CLUSTER, MORE),
        )
    row_ok, t, head = places_of_rows(h, tile_m, seqlen_q, M, GROUP, TILE_M)
    slot_rows = slot_id.to(gl.int64) * gl.minimum(TILE_M, seqlen_q * GROUP)
    slot_rows += gl.arange(0, TILE_M, layout=M)
    if (part >= num_parts) & (not CLUSTER):  # in a cluster all take part in the merge
        if partial is not None:
            write_absent(partial.m_ptr, partial.l_ptr, slot_rows, row_ok, 0.0)
        return
    if not EARLY:
        q, unit = rows_to_multiply(
            *q_rows, by, S, GROUP, DIM, TILE_M, OF_K, ROTARY_DIM, PAIR, WIDEN, ROUNDED, HALF
        )
        if LOADED:
            store_first_scales(of_keys, arrived, loaded, TILE_N, SLOTS)
        acc, m, l = attend_rows(
            *(q, unit, of_rows, rings, tiles, keys, None, APART > 0, CLUSTER),
            *(S, GROUP, PAGE_SIZE, DIM_V, TILE_M, WIDEN, HALF, OF_K, MORE, BULK),
        )
    result = acc, m, l, row_ok
    sizes = seqlen_q, num_kv_heads, stride_ob, stride_ot, stride_oh
    if CLUSTER:
        place = part, b, h, tile_m * TILE_M
        merge_cluster(final, row, *result, *place, *sizes, GROUP, ROWS, CLUSTER)
    else:
        write_rows(final, partial, row, *result, b, t, head, *sizes, slot_rows, num_parts, GROUP)


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    reasons = decode_split.unsupported(problem, device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    expect(
        problem.dtype in ("bfloat16", "float16"),
        f"dtype {problem.dtype}: expected bfloat16 or float16",
    )
    for name in ("head_dim", "head_dim_v"):
        value = getattr(problem, name)
        expect(value in HEAD_DIMS, f"{name} {value}: expected 64, 128 or 256")
    rows, most = problem.rows, most_rows(problem)
    expect(rows <= most, f"query heads a KV head x query tokens {rows}: expected at most {most}")
    if isinstance(problem.place, Paged):
        page_size = problem.place.page_size
        expect(page_size % 16 == 0, f"page_size {page_size}: expected a multiple of 16")
    expect(not problem.mask.chunk, f"attention_chunk {problem.mask.chunk}: expected 0")
    return reasons


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every ring that fits, with one split; `num_splits` may then be anything up to 1024. Then
    those whose parts are a cluster."""
    widest, found = max(problem.head_dim, problem.head_dim_v), []
    for tile_m in rows_of_tile(problem):
        tiles = (64, 32, 128) if tile_m != 32 and widest <= 128 else (64, 32)
        for tile_n, num_stages in product(tiles, (3, 2, 1, 4, 6)):
            config = Config(1, tile_m, tile_n, 4, num_stages)
            if shared_bytes(problem, config) <= device.smem_per_block:
                found.append(config)
                yield config
    for config in found:
        for parts in CLUSTERS:
            clustered = replace(config, num_splits=parts, merge="cluster")
            if shared_bytes(problem, clustered) <= device.smem_per_block:
                yield clustered


def traffic(problem: Problem, config: Config) -> Traffic:
    """As of kernels/decode_split.py; by the even rule here, parts are as even as can be."""
    parts = parts_of_problem(problem, config)
    if config.schedule == "even":
        parts = max(1, min(visited(problem, config.tile_n), config.num_splits))
    if config.merge == "cluster":  # what is exchanged stays on the SMs
        parts = 1
    return traffic_of_parts(problem, parts)


class Launcher(decode_launch.Launcher):
    """`hopper_decode_split` and `combine` bound to one plan and one memory layout."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        super().__init__(plan, operands)
        self.plan = plan
        self.any_address: decode_split.Launcher | None = None
        problem, config, mask = plan.problem, plan.config, plan.problem.mask
        q, table, slopes = operands.q, operands.page_table, operands.alibi_slopes
        self.box = box_rows(problem, config.tile_n)
        self.of_k = type_of_keys(problem) if config.tile_m == WIDE else None
        self.asked_apart = asked_apart(problem, config)
        between = max(operands.k.stride(0), operands.v.stride(0))  # pages; `gather` has 32 bits
        self.gathered = gathers(problem, config) and between < 1 << 32
        self.cluster = config.num_splits if config.merge == "cluster" else 0
        self.rows = min(config.tile_m, problem.rows)  # of a cluster the first axis has one program
        self.launched = (1, *self.grid[1:]) if self.cluster else self.grid
        self.bulk = in_one_piece(problem, config, operands.k_scale)
        caches: tuple[int | None, ...] = (None,) * 6
        if self.appending or self.gathered:
            caches = *operands.k.stride()[:3], *operands.v.stride()[:3]
        self.tail = (
            *self.appended.absent,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.batch,
            problem.num_kv_heads,
            mask.left,
            mask.right,
            mask.sink_tokens if mask.num_bands == 2 else None,
            *self.share,
            *q.stride()[:3],
            *self.out_strides,
            table.stride(0) if table is not None else 0,
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            *scale_strides(operands.q_scale, operands.q),
            *scale_strides(operands.k_scale, operands.k),
            *self.appended.sizes,
            *caches,
            problem.group,
            problem.place.page_size if isinstance(problem.place, Paged) else 1,
            self.batch_p2,
            config.tile_m,
            config.tile_n,
            config.num_stages,
            problem.early_kv,
            self.cluster,
            self.rows if self.cluster else 0,
            *self.appended.rotation,
            self.appended.tile_t,
            {"as_is": None, "int8": from_int8, "fp8": from_e4m3}[problem.codec.name],
            self.seen(operands.k).shape[3],
            self.seen(operands.v).shape[3],
            self.gathered,
            self.of_k,
            (1 if asked_early(problem, config) else 2) if self.asked_apart else 0,
            self.of_k is None and rounds_rows(problem),
            scales_at_once(problem, config),
            config.tile_m == 16 and problem.rows <= 8,
            not ring_holds_all(problem, config),
            self.bulk,
        )
        if self.asked_apart:
            self.options["maxnreg"] = most_registers(problem, config, plan.device)
        if problem.early_kv:
            self.options["launch_pdl"] = True
        caches_seen = map(self.seen, (operands.k, operands.v))
        self.places = tuple(layout_of(x, self.asked_apart) for x in caches_seen)

    def dispatch(
        self, tensors: tuple[Any, ...], scale: float, softcap: float | None, new: Any = None
    ) -> Any:
        q, k, v, out, lens, table, sink, slopes, q_scale, k_scale, v_scale = tensors
        if not (k.data_ptr() | v.data_ptr()) & 15:
            return super().dispatch(tensors, scale, softcap, new)
        if self.any_address is None:  # `unfit` said nothing of the addresses that this was bound to
            scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            operands = Operands(
                q,
                k,
                v,
                out=out,
                cache_seqlens=lens,
                page_table=table,
                alibi_slopes=slopes,
                new=new,
                **scales,
            )
            why = f"this call runs on {decode_split.KERNEL.name}: {unfit(operands)[0]}"
            warnings.warn(why, stacklevel=2)
            self.any_address = decode_split.Launcher(without_tma(self.plan), operands)
        return self.any_address.dispatch(tensors, scale, softcap, new)

    def first_split(self, q: Any, kv: Any, *rest: Any) -> Any:
        descriptors = (self.descriptor(kv.k_ptr), self.descriptor(kv.v_ptr))
        bulk, config, key_scales = self.bulk, self.plan.config, rest[5]
        if bulk and any(x.data_ptr() & 15 for x in key_scales):
            bulk = 0
        args = q, *descriptors, kv.table_ptr, *rest, *self.tail[:-1], bulk
        behind = 0
        if self.cluster:
            behind += exchange_bytes(self.rows, self.plan.problem.head_dim_v, self.cluster)
        if bulk:
            behind += bytes_in_bulk(config.num_stages, config.tile_n, bulk)
        if not behind:
            return hopper_decode_split[self.grid](*args, **self.options)
        compiled = hopper_decode_split.warmup(*args, grid=self.grid, **self.options)
        widened = in_clusters(compiled, self.cluster or 1, behind)
        widened[self.launched](*args)
        return widened

    def seen(self, x: Any) -> Any:
        """K or V as TMA sees them."""
        return pairs_of(x) if self.of_k is None else x

    def descriptor(self, x: Any) -> Any:
        """K or V for the kernel; a pointer where keys are gathered."""
        x = self.seen(x)
        if self.gathered:
            return x
        halves = self.of_k is not None and self.box < self.plan.config.tile_n
        return boxes_of(x, self.box, halves, self.asked_apart)

    def later_splits(self, compiled: Any) -> Launch | None:
        if self.gathered:
            return bind_to_maps(compiled, self.launched, self.tail, JUST_ADDRESSES, JUST_ADDRESSES)
        maps = [TensorMaps(compiled, index, *place) for index, place in enumerate(self.places)]
        return bind_to_maps(compiled, self.launched, self.tail, *maps)


KERNEL = Kernel(
    *("hopper_decode_split", unsupported, configs, traffic, Launcher, unfit),
    schedules=("even", "batch", "fixed"),
    merges=("combine", "cluster"),
    apart=decode_split.apart,
)
