"""Keys and values in 8 bits, or queries, made a working type: each number times its scale.

Computes, for the tokens that sequences have,

    out = stored * scale      in fp32, rounded once to the type of out

Keys in pages come out in order: those of sequence b are tokens [b * room, b * room + its keys) of
out, and `first` says where each begins, as cu_seqlens_k does. What out has behind the last key of a
sequence is not written, nor keys before the window of the first query, in whole tiles of `WHOLE`.

Shapes      stored [batch or pages, tokens, heads, dim], or packed [tokens, heads, dim]; scale: see
            core/scales.py; out [batch, room, heads, dim], contiguous; first [batch + 1] int32
Grid        (row tiles of a sequence * batch, tensors); a row is a token and head
Traffic     stored numbers and scales are read, out is written, once
Numerics    fp32, which holds stored numbers exactly
Limits      NVIDIA GPU, sm_80 or newer; int8, e4m3, e5m2; bf16, fp16 or fp32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.kernels.compile_time import CompileTimeRecord
from splitkv.kernels.host import workspace
from splitkv.kernels.host.arguments import in_order, tail_in_order
from splitkv.kernels.host.launch import Launch, launch_of, observed
from splitkv.kernels.tile.codec import widen
from splitkv.kernels.tile.dequantize import bits_of
from splitkv.kernels.tile.locate import locate
from splitkv.kernels.tile.visit import load_tile, store_tile
from splitkv.rounding import is_of_tokens

TILE_ELEMENTS = 4096  # of a program
NUM_WARPS = 4
WHOLE = tl.constexpr(256)  # keys; tiles of keys of all kernels divide them
SIZES = ["tiles", "room", "seqlen_q", "left", "sink_tokens"]


class Steps(NamedTuple):
    """Elements between sequences or pages, tokens and heads."""

    slab: Any
    token: Any
    head: Any


class TensorSteps(NamedTuple):
    """The Steps of stored numbers and of their scales, and elements between scales of sequences."""

    stored: Any
    scale: Any
    of_sequences: Any


class WideningTensor(NamedTuple):
    """Addresses of stored numbers, of their scales, or None: 1, and of what they become."""

    ptr: Any
    scale_ptr: Any
    out_ptr: Any


class WideningConfig(CompileTimeRecord):
    """The compile-time values of `widen_rows`.

    heads         rows of a token
    dim, dim_y    columns of x and of y
    tile          elements of a tile
    page_size     keys a page; 1 where they are not in pages
    """

    heads: int
    dim: int
    dim_y: int
    tile: int
    page_size: int


class TokenRange(NamedTuple):
    """The tokens of a sequence that are widened: index in the batch, number, and the first ones
    before `sink` and those from `lo` on."""

    b: Any
    count: Any
    sink: Any
    lo: Any


@triton.jit
def widen_tile(
    x,  # WideningTensor
    steps,  # TensorSteps
    table_ptr,  # of the sequence, or None
    tokens,  # TokenRange
    tile,
    room,
    CONFIG: tl.constexpr,
    DIM: tl.constexpr,
):
    """Widens a tile of rows [ROWS, DIM]."""
    b = tokens.b
    HEADS: tl.constexpr = CONFIG.heads
    DIM_P2: tl.constexpr = triton.next_power_of_2(DIM)
    ROWS: tl.constexpr = CONFIG.tile // DIM_P2
    row = tile * ROWS + tl.arange(0, ROWS)
    t = row // HEADS
    head = (row % HEADS).to(tl.int64)
    ok = (t < tokens.count) & ((t < tokens.sink) | (t >= tokens.lo))
    slab, inner = locate(table_ptr, b, t, ok, CONFIG.page_size)
    of_x = steps.stored
    rows = x.ptr + (slab * of_x.slab + inner * of_x.token + head * of_x.head)
    wide = widen(load_tile(rows, ok, DIM, DIM_P2), tl.float32)
    if x.scale_ptr is not None:
        of_scale = steps.scale
        at = slab * of_scale.slab + inner * of_scale.token + head * of_scale.head
        at += b.to(tl.int64) * steps.of_sequences
        wide *= tl.load(x.scale_ptr + at, mask=ok, other=0.0)[:, None]
    first = b.to(tl.int64) * room * HEADS
    store_tile(x.out_ptr + (first + row) * DIM, wide, ok, DIM)


@triton.jit(do_not_specialize=SIZES)
def widen_rows(
    x,  # WideningTensor
    y,  # WideningTensor of as many tokens and heads, or None
    lens_ptr,  # [batch] int32 keys of each sequence, or None: `room`
    table_ptr,  # [batch, max_pages] int32, or None
    cu_q_ptr,  # [batch + 1] int32, or None: `seqlen_q` queries a sequence
    first_ptr,  # see above, or None
    tiles,  # of a sequence
    room,  # most tokens of a sequence
    seqlen_q,
    left,  # keys before its own that a query sees, or None: all
    sink_tokens,  # the first ones, which all see, or None
    stride_table,
    x_steps,  # Steps of x and of its scales; elements between the scales of sequences
    x_scale_steps,
    x_of_sequences,
    y_steps,
    y_scale_steps,
    y_of_sequences,
    CONFIG: tl.constexpr,  # WideningConfig
):
    b = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    count = room
    if lens_ptr is not None:
        count = tl.load(lens_ptr + b)
    lo = b * 0
    sink = b * 0
    if left is not None:
        queries = seqlen_q
        if cu_q_ptr is not None:
            queries = tl.load(cu_q_ptr + b + 1) - tl.load(cu_q_ptr + b)
        lo = tl.maximum(count - queries - left, 0) // WHOLE * WHOLE
        if sink_tokens is not None:
            sink = (sink_tokens + WHOLE - 1) // WHOLE * WHOLE
    if first_ptr is not None:
        if (tile == 0) & (tl.program_id(1) == 0):
            tl.store(first_ptr + b, b * room)
            tl.store(first_ptr + b + 1, (b + 1) * room)  # as the next sequence does
    table = None
    if table_ptr is not None:
        table = table_ptr + b.to(tl.int64) * stride_table
    tokens = TokenRange(b, count, sink, lo)
    if tl.program_id(1) == 0:
        steps = TensorSteps(x_steps, x_scale_steps, x_of_sequences)
        widen_tile(x, steps, table, tokens, tile, room, CONFIG, CONFIG.dim)
    elif y is not None:
        steps = TensorSteps(y_steps, y_scale_steps, y_of_sequences)
        widen_tile(y, steps, table, tokens, tile, room, CONFIG, CONFIG.dim_y)


PER_CALL = ("x", "y", "lens_ptr", "table_ptr", "cu_q_ptr", "first_ptr")
"""The arguments of `widen_rows` that change from call to call."""


class Widened(NamedTuple):
    """Tensors of the working type, and the first token [batch + 1] of packed sequences, or None."""

    tensors: list[Tensor]
    first: Tensor | None


class Widening:
    """`widen_rows` bound to tensors of one memory layout: keys and values, or one of them.

    tensors   (stored numbers, scale or None) of each
    dtype     that they become
    batch     sequences: 1 where packed
    room      most tokens of a sequence
    mask      of `seqlen_q` queries a sequence; keys that it hides from all may stay as they are
    table     of pages, which hold the tokens
    packed    whether sequences of pages follow each other in what is made: [batch * room, heads,
              dim], not [batch, room, heads, dim]
    as_bits   for GPUs that do not know e4m3

    A call gives the widened tensors, and `first` where sequences in pages are packed, in memory of
    its own, which torch gives out.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[Tensor, Tensor | None]],
        dtype: torch.dtype,
        batch: int,
        room: int,
        *,
        mask: Mask | None = None,
        seqlen_q: int = 0,
        table: Tensor | None = None,
        packed: bool = False,
        as_bits: bool = False,
    ) -> None:
        x = tensors[0][0]
        heads, dims = x.shape[-2], [t.shape[-1] for t, _ in tensors]
        lead = (batch * room,) if packed or x.dim() == 3 else (batch, room)
        self.shapes = [(torch.Size((*lead, heads, dim)), dtype) for dim in dims]
        if packed:
            self.shapes.append((torch.Size((batch + 1,)), torch.int32))
        rows = (TILE_ELEMENTS // triton.next_power_of_2(dim) for dim in dims)
        tiles = triton.cdiv(room * heads, min(rows))
        left, sink_tokens = (None, None) if mask is None else (mask.bounds[0], mask.bounds[2])
        steps = [steps_of(*one) for one in tensors]
        self.fixed = {
            "tiles": tiles,
            "room": room,
            "seqlen_q": seqlen_q,
            "left": left,
            "sink_tokens": sink_tokens,
            "stride_table": table.stride(0) if table is not None else 0,
            "x_steps": steps[0].stored,
            "x_scale_steps": steps[0].scale,
            "x_of_sequences": steps[0].of_sequences,
            "y_steps": steps[-1].stored,
            "y_scale_steps": steps[-1].scale,
            "y_of_sequences": steps[-1].of_sequences,
            "CONFIG": WideningConfig(
                heads=heads,
                dim=dims[0],
                dim_y=dims[-1],
                tile=TILE_ELEMENTS,
                page_size=x.shape[1] if table is not None else 1,
            ),
        }
        self.grid = (tiles * batch, len(tensors), 1)
        self.device, self.index = x.device, x.device.index
        self.packed, self.as_bits = packed, as_bits
        self.again: tuple[Launch, list[Any]] | None = None

    def __call__(
        self,
        tensors: Sequence[tuple[Tensor, Tensor | None]],
        lens: Tensor | None = None,
        table: Tensor | None = None,
        cu_q: Tensor | None = None,
    ) -> Widened:
        """lens [batch] of the tokens of each sequence, cu_q [batch + 1] of packed queries."""
        if self.again is not None and not observed():
            launch, new = self.again
            made = [allocate() for allocate in new]
            given, bits = addresses(tensors, made, lens, table, cu_q)
            if not bits & 15:
                launch(torch._C._cuda_getCurrentRawStream(self.index), *given)
                return Widened(made[:-1], made[-1]) if self.packed else Widened(made, None)
        x = tensors[0][0]
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in self.shapes]
        first = made[-1] if self.packed else None
        outs = made[: len(tensors)]
        if self.grid[0] == 0:
            return Widened(outs, first)
        stored: list[Any] = [
            WideningTensor(bits_of(x) if self.as_bits else x, scale, out)
            for (x, scale), out in zip(tensors, outs, strict=True)
        ]
        stored += [None] * (2 - len(stored))
        options: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
        per_call = dict(zip(PER_CALL, (*stored, lens, table, cu_q, first), strict=True))
        arguments = in_order(widen_rows, per_call | self.fixed)
        compiled = widen_rows[self.grid](*arguments, **options)
        if compiled is not None and self.device.type == "cuda":
            if not addresses(tensors, made, lens, table, cu_q)[1] & 15:
                new = [workspace.allocation(*what, self.device) for what in self.shapes]
                tail = tail_in_order(widen_rows, PER_CALL, self.fixed)
                self.again = launch_of(compiled, self.grid, tail), new
        return Widened(outs, first)


def addresses(
    tensors: Sequence[tuple[Tensor, Tensor | None]],
    made: Sequence[Tensor],
    lens: Tensor | None,
    table: Tensor | None,
    cu_q: Tensor | None,
) -> tuple[tuple[Any, ...], int]:
    """The first arguments of `widen_rows` as addresses, and all their bits."""
    at_y = at_lens = at_table = at_cu_q = at_first = None
    (x, scale), out = tensors[0], made[0]
    at_scale = None if scale is None else scale.data_ptr()
    at_x = x.data_ptr(), at_scale, out.data_ptr()
    bits = at_x[0] | (at_scale or 0) | at_x[2]
    if len(tensors) > 1:
        (y, scale), out = tensors[1], made[1]
        at_scale = None if scale is None else scale.data_ptr()
        at_y = y.data_ptr(), at_scale, out.data_ptr()
        bits |= at_y[0] | (at_scale or 0) | at_y[2]
    if lens is not None:
        at_lens = lens.data_ptr()
        bits |= at_lens
    if table is not None:
        at_table = table.data_ptr()
        bits |= at_table
    if len(made) > len(tensors):
        at_first = made[-1].data_ptr()
        bits |= at_first
    if cu_q is not None:
        at_cu_q = cu_q.data_ptr()
        bits |= at_cu_q
    return (at_x, at_y, at_lens, at_table, at_cu_q, at_first), bits


def steps_of(x: Tensor, scale: Tensor | None) -> TensorSteps:
    """The TensorSteps of stored numbers and their scales."""
    of_x = Steps(*(x.stride()[:-1] if x.dim() == 4 else (0, *x.stride()[:-1])))
    if scale is None or scale.numel() == 1:
        return TensorSteps(of_x, Steps(0, 0, 0), 0)
    *outer, head = scale.stride()
    if is_of_tokens(scale, x):
        slab, token = outer if len(outer) == 2 else (0, *outer)
        return TensorSteps(of_x, Steps(slab, token, head), 0)
    return TensorSteps(of_x, Steps(0, 0, head), outer[0] if outer else 0)
