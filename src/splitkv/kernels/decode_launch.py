"""What a call of decode needs beside its kernel: parts of the keys, `combine`, launching again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import triton

from splitkv.kernels.appending import NOTHING_APPENDED, Appending
from splitkv.kernels.combine import SHARED_TILES, Final, combine, merge_tiles
from splitkv.kernels.direct import Launch, Repeat, launch_of
from splitkv.kernels.parts import grid, packed_rows
from splitkv.kernels.tile.codec import Scales
from splitkv.plans import Plan
from splitkv.problem import Operands

if TYPE_CHECKING:
    import torch


class KV(NamedTuple):
    """Pointers to keys, values and the page table [batch, max_pages], None where contiguous."""

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any


class Row(NamedTuple):
    """Pointers to a row's sink logit [num_heads], ALiBi slope [(batch,) num_heads] and the scale of
    its quantised q, or None."""

    sink_ptr: Any
    slope_ptr: Any
    scale_ptr: Any


class Launcher:
    """A decode kernel and `combine` bound to one plan and one memory layout.

    Everything that does not change from call to call is worked out here once. The first call goes
    through Triton's own dispatch and keeps what it compiled: `repeat` launches that directly, with
    addresses, unless one is not a multiple of 16, which is another specialisation.

    appended   what there is of new tokens that the kernel writes itself
    share      parts, size, programs: see tile/share.py
    tail       of the kernel's arguments: what its own class says
    """

    tail: tuple[Any, ...]

    def __init__(self, plan: Plan, operands: Operands) -> None:
        import torch

        from splitkv.kernels.workspace import partials

        problem, config, q = plan.problem, plan.config, operands.q
        self.key_scales = problem.codec.granularity == "token"
        native = not q.is_cuda or plan.device.capability >= (8, 9)
        self.in_bits = problem.codec.name == "fp8" and not native
        self.out_shape = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)
        self.lse_shape = (problem.batch, problem.num_heads, problem.seqlen_q)
        self.return_lse, self.partials = problem.return_lse, partials
        self.dtype = getattr(torch, problem.dtype)
        out = operands.out if operands.out is not None else q.new_empty(self.out_shape)
        self.out_strides = out.stride()[:3]
        self.appending = config.appends
        self.appended = Appending.of(operands) if config.appends else NOTHING_APPENDED

        programs = size = None
        parts: int | None = config.num_splits
        max_parts = config.num_splits if config.merge == "combine" else 1
        if config.schedule == "batch":
            parts, programs = None, config.programs
            max_parts = config.programs - problem.batch
        elif config.schedule == "fixed":
            size = config.split_size // config.tile_n
        self.share = parts, size, programs
        self.grid = grid(problem, config)
        rows = packed_rows(problem, config)[1]
        self.partial_rows = math.prod(self.grid) * rows if max_parts > 1 else 0
        self.acc_numel = self.partial_rows * problem.head_dim_v
        self.batch_p2 = triton.next_power_of_2(problem.batch) if programs else 1
        self.pdl = bool(q.is_cuda and plan.device.capability >= (9, 0))
        # multiply and add in one rounding: Triton's default, which from 3.9 on it wants said
        fused = {"enable_fp_fusion": True}
        self.options = {"num_warps": config.num_warps, **fused}
        self.repeat: Callable[..., Any] | None = None

        few, (tile_p, tile_v, merge_warps) = 0, merge_tiles(max_parts, problem.head_dim_v)
        if programs:
            few, tile_p, tile_v, merge_warps = SHARED_TILES
        self.merge_grid = (
            problem.num_kv_heads * problem.rows,
            problem.batch,
            triton.cdiv(problem.head_dim_v, tile_v),
        )
        self.merge_tail = (
            *self.appended.absent[:1],
            *(problem.batch, problem.num_kv_heads, *problem.mask.bounds, parts, programs),
            *(*self.appended.sizes[:2], None, None),
            *self.out_strides,
            *(problem.seqlen_q, problem.group, problem.head_dim_v, self.batch_p2),
            *(config.tile_m, config.tile_n, tile_p, few, tile_v),
            not programs and max_parts % tile_p == 0,
            self.pdl,
        )
        overlapping = {"launch_pdl": True} if self.pdl else {}
        self.merge_options = {"num_warps": merge_warps, **fused, **overlapping}

    def __call__(self, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        o, done = operands, None
        per_call = o.cache_seqlens, o.page_table, o.sink_logits, o.alibi_slopes
        tensors = o.q, o.k, o.v, o.out, *per_call, o.q_scale, o.k_scale, o.v_scale
        if self.repeat is not None:
            done = self.repeat(*tensors, o.softmax_scale, o.softcap, o.new)
        return done or self.dispatch(tensors, o.softmax_scale, o.softcap or None, o.new)

    def dispatch(
        self, tensors: tuple[Any, ...], scale: float, softcap: float | None, new: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch through Triton, which compiles what these arguments need, and keep that."""
        import torch

        q, k, v, out, lens, table, sink, slopes, q_scale, k_scale, v_scale = tensors
        out, lse = q.new_empty(self.out_shape, dtype=self.dtype) if out is None else out, None
        if self.return_lse:
            lse = q.new_empty(self.lse_shape, dtype=torch.float32)
        appended = self.appended.pointers(new, k, v) if self.appending else ()
        if self.in_bits:
            q, k, v = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (q, k, v))
        kv, final, row = KV(k, v, table), Final(out, lse), Row(sink, slopes, q_scale)
        scales = None if k_scale is None else Scales(k_scale, v_scale)
        head_scales, key_scales = (None, scales) if self.key_scales else (scales, None)
        partial = merge = None
        if self.partial_rows:
            partial = self.partials(q, self.acc_numel, self.partial_rows)
        scale = scale / softcap if softcap else scale * 1.4426950408889634
        rest = lens, final, partial, row, head_scales, key_scales, scale, softcap, *appended
        split = self.first_split(q, kv, *rest)
        if partial is not None:
            rest = partial, final, lens, sink, *appended[:1], *self.merge_tail
            merge = combine[self.merge_grid](*rest, **self.merge_options)
        every = (*tensors, *new.tensors) if self.appending else tensors
        aligned = not any(x is not None and x.data_ptr() & 15 for x in every)
        later = None
        if split is not None and aligned and self.repeat is None:
            later = self.later_splits(split)
        if later is not None:
            self.repeat = Repeat(
                later,
                launch_of(merge, self.merge_grid, self.merge_tail) if merge else None,
                out.device,
                out.dtype,
                self.out_shape,
                self.lse_shape if self.return_lse else None,
                self.acc_numel,
                self.partial_rows,
                key_scales=self.key_scales,
            ).call
        return out, lse

    def first_split(self, *args: Any) -> Any:
        """Launch the kernel through Triton; the compiled kernel."""
        raise NotImplementedError

    def later_splits(self, compiled: Any) -> Launch | None:
        """A function that launches it again: see `Repeat`. None: Triton has to, every time."""
        return launch_of(compiled, self.grid, self.tail)
