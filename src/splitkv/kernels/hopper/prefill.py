"""Attention of whole sequences for Hopper: tiles by TMA, products by warpgroups that take turns.

Computes what kernels/prefill.py computes, without ALiBi and dropout, and shares its backward and,
for the parts of few queries' keys, its partials and their merge:

    s[r, n]  = score(scale * q[r] . k[n])          n in the bands of row r, the visible keys
    m[r]     = max_n s[r, n]      l[r] = sum_n exp(s[r, n] - m[r])      lse[r] = m[r] + log l[r]
    out[r]   = sum_n exp(s[r, n] - m[r]) v[n] / (l + exp(sink - m))

A program has one warp that has tiles copied (prefill_load.py) and one to three warpgroups that
multiply, each 64 rows of a row tile (prefill_tile.py); prefill_rows.py says whose. The tiles of
keys in which a row may see a part come first and ask the mask, the others ask nothing. A program
goes on to its next row tile by itself, so that the first tiles of that arrive while the results of
the one before leave.

Shapes      as kernels/prefill.py. Rows are query tokens of one head, or with `pack_gqa` of as many
            heads of a group as a power of two divides it by: row = token * heads + head
Grid        one axis: `programs` programs that go through the row tiles forth and back, or one each.
            A lane is a sequence and the packed heads; so many lanes that their keys and values fit
            into the L2 go together. After all row tiles the further parts of their keys
Traffic     as kernels/prefill.py
Numerics    scores and sums in fp32, base-2 exponentials; p is rounded to the value type before p @
            v and may be up to 2 ** 15.5, which fp16 has, as m follows a maximum only where it grew
            by more. Of head_dim 128 no maximum is looked for until a weight is too large, and what
            that gives is the same: see `grown`. Behind the last key of a sequence values are
            cleared before they are multiplied with zeros, as what is there may be NaN or infinite
Limits      sm_90; bf16 or fp16; head_dim and head_dim_v equal and 64, 128 or 256, or 192 and 128;
            pages of a multiple of 16 keys; no ALiBi, no dropout; addresses and strides that are
            multiples of 16 bytes; otherwise those of kernels/prefill.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from splitkv.device import Device
from splitkv.kernels import prefill
from splitkv.kernels.combine import Final, combine
from splitkv.kernels.direct import Sequences, TensorMaps, bind_to_descriptors, launch_of, observed
from splitkv.kernels.hopper.prefill_load import (
    ROWS_OF_WARP,
    Parts,
    Signals,
    allocate,
)
from splitkv.kernels.hopper.prefill_roles import give_roles_to_warpgroups
from splitkv.kernels.hopper.prefill_rows import Cutting, Keys, Work
from splitkv.kernels.hopper.prefill_scaled import Scales
from splitkv.kernels.hopper.prefill_shapes import ordered
from splitkv.kernels.hopper.prefill_tile import keeps_products
from splitkv.kernels.hopper.prefill_write import Merging, Output, begin, merge
from splitkv.kernels.hopper.ring import arrivals
from splitkv.kernels.sequence_sizes import bounds_of, lse_strides, scoring_of
from splitkv.kernels.tile.band import Bounds
from splitkv.kernels.tile.visit import Strides
from splitkv.kernels.tile.weight import Scoring
from splitkv.kv import AS_IS, Paged
from splitkv.plans import Config, Kernel, Plan, Traffic, box_rows
from splitkv.problem import Operands, Problem

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
ROWS = gl.constexpr(64)  # of a warpgroup
PANEL_BYTES = 128  # of the columns in TMA's widest swizzle
# Of results half as wide where registers are scarce: a thread then stores at two addresses and at
# multiples behind them, not at four, and they are in registers all along.
OUT_PANEL_BYTES = 64
BARRIER_BYTES = 1024  # of shared memory: all barriers, and what alignment costs

SIZES = [  # arguments whose values are no reason to compile again
    *("left", "right", "sink_tokens", "seqlen_q", "seqlen_k", "batch", "total_q", "lane_heads"),
    *("stride_lse_b", "stride_lse_h", "stride_table", "tiles", "lanes", "width", "items"),
    *("parts", "size", "most_q", "stride_ob", "stride_ot", "stride_oh"),
]


@gluon.jit(do_not_specialize=SIZES)
def hopper_prefill(
    q_desc,  # [batch, seqlen_q, num_heads, HEAD_DIM], boxes of 64 rows; packed: [1, total_q, ..]
    q_rest_desc,  # its columns from head_dim_v on, or None
    k_desc,  # boxes of keys of one head, as v_desc: a tile, or of one page 64 columns
    k_rest_desc,
    v_desc,
    out_desc,
    out_ptr,
    lse_ptr,
    partial,  # Partial, or None: one part
    count_ptr,  # see tile/merge.py; None: `combine` merges
    cu_q_ptr,  # [batch + 1] int32, or None: dense
    cu_k_ptr,
    lens_ptr,  # [batch] int32 keys of each sequence, or None
    table_ptr,  # [batch, max_pages] int32, or None
    sink_ptr,  # [num_heads], or None
    q_scale_ptr,  # None, as the two below: keys and values are as they are
    k_scale_ptr,
    v_scale_ptr,
    scale,  # see tile/score.py
    softcap,  # float or None
    left,  # the mask's bounds, or None
    right,
    sink_tokens,
    seqlen_q,
    seqlen_k,
    batch,
    total_q,
    lane_heads,  # heads of q that are not packed into rows
    stride_lse_b,
    stride_lse_h,
    stride_table,
    tiles,  # row tiles of a lane
    lanes,
    width,  # lanes that go together
    items,  # row tiles, and the further parts of their keys
    parts,  # most parts of a row tile's keys, or None: one
    size,  # tiles of keys a part; None: those of a row tile over `parts`
    most_q,  # tokens of the longest sequences whose keys are cut into parts
    stride_ob,
    stride_ot,
    stride_oh,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,  # heads of q that are packed into rows
    PAGE_SIZE: gl.constexpr,
    DIM: gl.constexpr,  # head_dim_v
    TILE_N: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    TILE_P: gl.constexpr,  # parts that are merged a step, of TILE_R rows
    TILE_R: gl.constexpr,
    PDL: gl.constexpr,
    REST: gl.constexpr,  # what q and k have more than v
    Q_SLOTS: gl.constexpr,  # row tiles of q in shared memory
    OUT_SLOTS: gl.constexpr,  # tiles of shared memory for out; 0: it takes the place of q
    TURNS: gl.constexpr,
):
    if PDL:  # combine waits for this grid before it reads partials
        tl.extra.cuda.gdc_launch_dependents()
    q_boxes, q = allocate(q_desc, Q_SLOTS * WARPGROUPS, ROWS, DIM)
    k_boxes, k = allocate(k_desc, STAGES, TILE_N, DIM)
    v_boxes, v = allocate(v_desc, STAGES, TILE_N, DIM)
    q_rest_boxes = None
    q_rest = None
    k_rest_boxes = None
    k_rest = None
    if q_rest_desc is not None:
        q_rest_boxes, q_rest = allocate(q_rest_desc, Q_SLOTS * WARPGROUPS, ROWS, REST)
        k_rest_boxes, k_rest = allocate(k_rest_desc, STAGES, TILE_N, REST)
    out_boxes = None
    out = None
    if OUT_SLOTS > 0:
        out_boxes, out = allocate(out_desc, OUT_SLOTS, ROWS, DIM)
    turn = None
    if TURNS:
        turn = WARPGROUPS
    k_full, k_free = arrivals(STAGES, 1), arrivals(STAGES, WARPGROUPS)
    v_full, v_free = arrivals(STAGES, 1), arrivals(STAGES, WARPGROUPS)
    q_full, q_free = arrivals(Q_SLOTS, 1), arrivals(Q_SLOTS, WARPGROUPS)
    signals = Signals(q_full, q_free, k_full, k_free, v_full, v_free, turn, None)
    maps = Parts(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc)
    boxes = Parts(q_boxes, q_rest_boxes, k_boxes, k_rest_boxes, v_boxes, out_boxes)
    shared = Parts(q, q_rest, k, k_rest, v, out)
    bounds, scoring = Bounds(left, right, sink_tokens), Scoring(scale, softcap, None, None, None)
    behind = cu_k_ptr
    if lens_ptr is not None:
        behind = lens_ptr
    if table_ptr is not None:
        behind = table_ptr
    keys = Keys(cu_k_ptr, lens_ptr, table_ptr, stride_table, behind, seqlen_k)
    cutting = Cutting(parts, size, most_q)
    place = seqlen_q, batch, total_q, lane_heads, tiles, lanes, width, items
    scarce = None
    OTHERS: gl.constexpr = REST > 0 or softcap is not None
    BOX: gl.constexpr = k_desc.block_type.shape[1]
    if keeps_products(WARPGROUPS, DIM, TILE_N, BOX, partial is not None, OTHERS):
        scarce = WARPGROUPS
    work = Work(cu_q_ptr, keys, bounds, scoring, cutting, *place, scarce)
    merging = Merging(count_ptr, Strides(stride_ob, stride_ot, stride_oh))
    strides = lane_heads * PACK * DIM, stride_lse_b, stride_lse_h
    output = Output(out_ptr, lse_ptr, sink_ptr, partial, merging, *strides)
    none = Strides(None, None, None)
    scales = Scales(None, None, None, none, none, none, None, None, None, None, None)
    whole = work, maps, boxes, shared, scales, signals, output
    begin(output)
    give_roles_to_warpgroups(whole, GROUP, PACK, WARPGROUPS, STAGES, PAGE_SIZE)
    if count_ptr is not None:
        merge(work, output, GROUP, PACK, DIM, TILE_P, TILE_R)


def unsupported(problem: Problem, device: Device) -> list[str]:
    if device.kind != "cuda" or device.capability != (9, 0):
        return [f"device {device.arch}: expected sm_90"]
    reasons = prefill.unsupported(replace(problem, head_dim=64, head_dim_v=64), device)

    def expect(ok: bool, reason: str) -> None:
        if not ok:
            reasons.append(reason)

    if isinstance(problem.place, Paged):
        page_size = problem.place.page_size
        expect(page_size % 16 == 0, f"page_size {page_size}: expected a multiple of 16")
    expect(
        problem.dtype in ("bfloat16", "float16"),
        f"dtype {problem.dtype}: expected bfloat16 or float16",
    )
    expect(problem.codec == AS_IS, f"kv {problem.codec}: expected as_is")
    dims = problem.head_dim, problem.head_dim_v
    known = ", ".join(f"{a}/{b}" for a, b in HEAD_DIMS)
    expect(dims in HEAD_DIMS, f"head_dim/head_dim_v {dims[0]}/{dims[1]}: expected one of {known}")
    expect(not problem.score.alibi, "alibi: expected none")
    expect(not problem.dropout, "dropout: expected none")
    expect(not problem.mask.chunk, f"attention_chunk {problem.mask.chunk}: expected 0")
    return reasons


def unfit(operands: Operands) -> list[str]:
    """What of a memory layout TMA cannot describe."""
    reasons = []
    for name in ("q", "k", "v", "out"):
        x = getattr(operands, name)
        if x is None:
            continue
        if 0 in x.shape:
            reasons.append(f"{name}: expected at least one token, got {list(x.shape)}")
        elif not fits_tma(x):
            reasons.append(
                f"{name}: expected strides and an address that are multiples of 16 bytes"
            )
    return reasons


def fits_tma(x: Any) -> bool:
    """Whether TMA can describe a tensor; along a single element torch may say any stride, and 0
    along what is expanded.
    """
    steps = [step for n, step in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    aligned = all(step * x.element_size() % 16 == 0 for step in steps)
    return aligned and x.stride()[-1] == 1 and x.data_ptr() % 16 == 0


def packed_heads(problem: Problem, config: Config) -> int:
    """Query heads that share a row tile: a power of two that divides the group."""
    group = problem.group
    return min(group & -group, ROWS.value) if config.pack_gqa else 1


def shared_bytes(problem: Problem, config: Config) -> int:
    """Shared memory of a config, the output in the place of q."""
    rows = config.tile_m * problem.head_dim
    keys = config.num_stages * config.tile_n * (problem.head_dim + problem.head_dim_v)
    return (rows + keys) * problem.element_bytes + BARRIER_BYTES


def row_tiles(problem: Problem, config: Config, device: Device) -> tuple[int, int]:
    """How many row tiles of q, and of the output beside it, are in shared memory.

    With a place of its own the output of one row tile leaves while the next is worked on, whose q
    arrives, given a second place, while that is.
    """
    room = device.smem_per_block - shared_bytes(problem, config)
    bytes_of = problem.element_bytes * config.tile_m
    of_out = int(bytes_of * problem.head_dim_v <= room)
    room -= bytes_of * (problem.head_dim_v + problem.head_dim)
    return (2 if config.programs and room >= 0 else 1), of_out


def configs(problem: Problem, device: Device) -> Iterator[Config]:
    """Every tile shape that fits, with and without packed heads, by as many programs as there are
    SMs or by one a row tile.

    Packed sequences start with one a row tile: how heavy each is, only the device knows.
    """
    return fitting(problem, device, ordered(problem, device), shared_bytes)


def fitting(
    problem: Problem,
    device: Device,
    shapes: Sequence[tuple[int, int, int]],
    shared_bytes: Callable[[Problem, Config], int],
) -> Iterator[Config]:
    """The configs of such shapes: see `SHAPES`."""
    programs = (0, device.num_sms) if problem.kind == "varlen" else (device.num_sms, 0)
    packs = (True, False) if problem.group & 1 == 0 else (False,)
    for count, pack_gqa in product(programs, packs):
        for tile_m, tile_n, num_stages in shapes:
            config = Config(
                tile_m=tile_m,
                tile_n=tile_n,
                num_warps=tile_m // 16,
                num_stages=num_stages,
                programs=count,
                pack_gqa=pack_gqa,
            )
            if shared_bytes(problem, config) <= device.smem_per_block:
                yield config


def traffic(problem: Problem, config: Config) -> Traffic:
    return prefill.traffic(problem, config)


def tiling(
    problem: Problem, device: Device, config: Config, tokens: int, kv_bytes: int
) -> tuple[int, int, int]:
    """(row tiles of a lane, lanes, lanes together) for so many tokens of q in all.

    Together: as many lanes as have their keys and values, of all `kv_bytes`, in half of the L2,
    which is in two halves that hold the same.
    """
    pack = packed_heads(problem, config)
    heads = problem.num_heads // pack
    if problem.kind == "varlen":
        return tokens * pack // config.tile_m + problem.batch + 1, heads, heads
    kv_lanes = problem.batch * problem.num_kv_heads
    together = device.l2_bytes // 2 * kv_lanes // max(kv_bytes, 1)
    lanes = problem.batch * heads
    width = max(1, min(together * (problem.group // pack), lanes))
    return triton.cdiv(problem.seqlen_q * pack, config.tile_m), lanes, width


def descriptor(
    x: Any,
    tokens: int,
    heads: int,
    dim: int,
    length: int | None = None,
    panel_bytes: int = PANEL_BYTES,
) -> TensorDescriptor:
    """x [(batch,) tokens, heads, dim] as TMA is to see it, in boxes [1, tokens, heads, dim].

    length        tokens that a sequence has of those that there is room for
    panel_bytes   of the columns in one swizzle
    """
    shape, strides, size = list(x.shape), list(x.stride()), x.element_size()
    if len(shape) == 3:
        shape, strides = [1, *shape], [shape[-1], *strides]
    elif length is not None:
        shape[1] = max(1, length)
    # along a single element there are no steps, and torch may say anything
    strides = [step if n > 1 else shape[-1] for n, step in zip(shape, strides, strict=True)]
    swizzle = min(panel_bytes, dim * size)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * size, rank=4)
    return TensorDescriptor(x, shape, [*strides[:3], 1], [1, tokens, heads, dim], layout)


class Launcher(prefill.Launcher):
    """A kernel for whole sequences on Hopper and `combine` bound to one plan and one memory layout;
    see `prefill.Launcher`.

    The first call goes through Triton, and what it compiled is kept: `again` launches that with
    addresses, unless one is not a multiple of 16, which is another specialisation.
    """

    def __init__(self, plan: Plan, operands: Operands) -> None:
        super().__init__(plan, operands)
        self.plan = plan
        self.any_address: prefill.Launcher | None = None
        self.again: Sequences | None = None
        problem, config, q = plan.problem, plan.config, operands.q
        self.pack = packed_heads(problem, config)
        tokens = q.shape[:-2].numel()
        tiles, lanes, width = tiling(problem, plan.device, config, tokens, self.kv_bytes())
        items, parts, size = tiles * lanes, None, None
        if config.num_splits > 1:
            parts = config.num_splits
            size = config.split_size // config.tile_n if config.schedule == "fixed" else None
            cut = triton.cdiv(problem.cut_tokens * self.pack, config.tile_m)
            items += (parts - 1) * cut * problem.batch * problem.num_heads // self.pack
        self.grid, numbered = self.own_grid(tiles, items)
        self.expect_arrivals(self.grid[0])
        lse, table, place = lse_strides(q), operands.page_table, problem.place
        warps = self.rows_at_a_time() // ROWS_OF_WARP.value
        self.tail = (
            *(*bounds_of(problem), problem.seqlen_q, problem.seqlen_k, problem.batch),
            *(tokens, problem.num_heads // self.pack, lse.b, lse.h),
            *(table.stride(0) if table is not None else 0, tiles, lanes, width, numbered),
            *(parts, size, problem.cut_tokens, *self.out_strides, problem.group, self.pack),
            *(place.page_size if isinstance(place, Paged) else 1, problem.head_dim_v),
            *(config.tile_n, config.tile_m // ROWS.value, config.num_stages),
            *(*self.merged_a_step(warps), bool(self.slots and q.is_cuda and not self.last)),
            *self.own_tail(operands),
        )
        # of the first role; the others are the kernel's own
        self.options = {"num_warps": warps, "enable_fp_fusion": True}

    def kv_bytes(self) -> int:
        """Of keys and values as they are multiplied."""
        return self.problem.kv_bytes

    def own_grid(self, tiles: int, items: int) -> tuple[tuple[int, int, int], int | None]:
        """(grid, `Work.items`) of so many items, of lanes of so many row tiles."""
        return (min(items, self.plan.config.programs or items), 1, 1), items

    def own_tail(self, operands: Operands) -> tuple[Any, ...]:
        """The last arguments of this kernel."""
        problem, config = self.problem, self.plan.config
        warpgroups = config.tile_m // ROWS.value
        of_q, of_out = row_tiles(problem, config, self.device)
        # with two or more warpgroups they issue products in turns: see prefill_tile.py
        rest = problem.head_dim - problem.head_dim_v
        return rest, of_q, of_out * warpgroups, warpgroups > 1

    def start(self, *args: Any) -> Any:
        return hopper_prefill[self.grid](*args, *self.tail, **self.options)

    def rows_at_a_time(self) -> int:
        """Rows of q that are copied, and multiplied by one role of warps."""
        return ROWS.value

    def values_in_pages(self) -> bool:
        """Whether values are in pages where keys are."""
        return True

    def out_has_place(self) -> bool:
        """Whether every warpgroup has shared memory of its own for the output."""
        return row_tiles(self.problem, self.plan.config, self.device)[1] > 0

    def descriptors(self, x: Operands, out: Any) -> list[TensorDescriptor | None]:
        """Of q, its rest, k, its rest, v and out."""
        problem, tile_n = self.problem, self.plan.config.tile_n
        rows, main = (self.rows_at_a_time() // self.pack, self.pack), problem.head_dim_v
        rest, box, size = problem.head_dim - main, box_rows(problem, tile_n), x.k.element_size()
        paged, config = isinstance(problem.place, Paged), self.plan.config
        others = rest > 0 or bool(x.softcap)
        cut = self.slots > 0
        scarce = keeps_products(config.tile_m // ROWS.value, main, tile_n, box, cut, others)
        out_panel = OUT_PANEL_BYTES if self.out_has_place() and scarce else PANEL_BYTES
        length = None if paged else problem.seqlen_k
        widest = PANEL_BYTES // size if paged else max(main, rest)
        keys = box, 1, min(main, widest), length
        values = keys if self.values_in_pages() else (tile_n, 1, main)
        return [
            descriptor(x.q, *rows, main),
            descriptor(x.q, *rows, rest) if rest else None,
            descriptor(x.k, *keys),
            descriptor(x.k, box, 1, min(rest, widest), length) if rest else None,
            descriptor(x.v, *values),
            descriptor(out, *rows, main, panel_bytes=out_panel),
        ]

    def forward(self, operands: Operands, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        x = operands
        scale, softcap = scoring_of(x, None)[:2]
        others = x.cu_seqlens_q, x.cu_seqlens_k, x.cache_seqlens, x.page_table, x.sink_logits
        scales = x.q_scale, x.k_scale, x.v_scale
        if self.again is not None:
            done = self.again.call(x.q, x.k, x.v, x.out, *others, *scales, scale, softcap)
            if done is not None:
                return done
        given = (t for t in (x.q, x.k, x.v, x.out) if t is not None)
        if any(tensor.data_ptr() & 15 for tensor in given):
            return self.without_tma(operands).forward(operands, seed)
        out = x.q.new_empty(self.out_shape, dtype=self.dtype) if x.out is None else x.out
        lse = x.q.new_empty(self.lse_shape, dtype=torch.float32)
        (partial, count), merge = self.partials(x.q), None
        descriptors = self.descriptors(x, out)
        split = self.start(*descriptors, out, lse, partial, count, *others, *scales, scale, softcap)
        if partial is not None and not self.last:
            merge = combine[self.merge_grid](
                *(partial, Final(out, lse), x.cu_seqlens_q, x.sink_logits, *self.merge_tail),
                **self.merge_options,
            )
        some = (tensor for tensor in (*others, *scales) if tensor is not None)
        if split is not None and not any(tensor.data_ptr() & 15 for tensor in some):
            self.again = self.repeated(split, merge, descriptors, out)
        return out, lse

    def repeated(
        self, split: Any, merge: Any, descriptors: list[TensorDescriptor | None], out: Tensor
    ) -> Sequences | None:
        """What launches the compiled kernels again; None: Triton has to, every time."""
        if observed():
            return None
        given = [made for made in descriptors if made is not None]
        maps = iter([TensorMaps(split, n, x.shape, x.strides) for n, x in enumerate(given)])
        each = [None if made is None else next(maps) for made in descriptors]
        launch = bind_to_descriptors(split, self.grid, self.tail, each)
        if launch is None:
            return None
        return Sequences(
            launch,
            launch_of(merge, self.merge_grid, self.merge_tail) if merge else None,
            *(out.device, out.dtype, self.out_shape, self.lse_shape),
            *(self.slots * self.problem.head_dim_v, self.slots),
        )

    def without_tma(self, operands: Operands) -> prefill.Launcher:
        """The kernel for any GPU, for addresses of which `unfit` did not know."""
        if self.any_address is None:
            why = unfit(operands)[0]
            self.any_address = prefill.for_any_address(self.plan, operands, why)
        return self.any_address


KERNEL = Kernel(
    *("hopper_prefill", unsupported, configs, traffic, Launcher, unfit),
    schedules=("even", "fixed"),
    merges=("combine", "last"),
)
