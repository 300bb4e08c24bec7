"""Launchers of decode: a kernel, `combine` where there are several splits, and relaunching both."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands
from splitkv.core.tiles import ceil_div, next_power_of_2
from splitkv.kernels.combine import (
    SHARED_TILES,
    UNUSED,
    Final,
    Partial,
    combine,
    final_of,
    merge_tiles,
)
from splitkv.kernels.host import workspace
from splitkv.kernels.host.append_arguments import NO_NEW_TOKENS, fixed_arguments, pointers
from splitkv.kernels.host.arguments import Tail, in_order, specialised, tail_in_order
from splitkv.kernels.host.decode_repeat import Repeat
from splitkv.kernels.host.launch import Launch, launch_of, observed
from splitkv.kernels.host.lengths import CacheLayout
from splitkv.kernels.host.map_launch import LengthLaunch
from splitkv.kernels.host.partition import grid, packed_rows
from splitkv.kernels.limits.scale_layout import scale_strides
from splitkv.kernels.tile.codec import Scales
from splitkv.kernels.tile.visit import Strides


class KV(NamedTuple):
    """Pointers to keys, values and the page table [batch, max_pages], None where contiguous."""

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any


class Row(NamedTuple):
    """Pointers to a row's sink logit [num_heads], ALiBi slope [(batch,) num_heads], the scale of
    its quantised q and the sink tokens of its sequence [batch], or None."""

    sink_ptr: Any
    slope_ptr: Any
    scale_ptr: Any
    sink_tokens_ptr: Any


PER_CALL = (
    *("q_ptr", "kv", "lens_ptr", "final", "partial", "row"),
    *("head_scales", "key_scales", "scale", "softcap"),
)
"""The arguments of a decode kernel that change from call to call, in the order of `Repeat`; a
kernel may take the items of kv one by one."""
PER_CALL_OF_APPEND = (*PER_CALL, "growth", "new", "turn")


BOUNDS = "left", "right", "sink_tokens", "chunk"
"""The arguments of a mask, in the order of `Mask.bounds`."""


class CacheLaunch(NamedTuple):
    """The launch of a compiled kernel for contiguous caches of every length.

    layout_at   layout_at(here, room): what the layout `here` changes, for the launch. The memory of
                such caches goes on to `room` keys of each sequence, which may be read and are seen
                by no query: what this gives serves all lengths up to that. 0: it goes on to the
                keys that there are, and this serves caches of just the layout
    launch      see `LengthLaunch`
    """

    layout_at: Callable[[CacheLayout, int], Any]
    launch: LengthLaunch


class SplitKernel(NamedTuple):
    """A decode kernel bound to one plan and one memory layout.

    launch     launch(arguments): launches it through Triton with the arguments that change, by
               name; the compiled kernel
    relaunch   relaunch(compiled): a function that launches it again, see `Repeat`; None: Triton has
               to, every time
    at_lengths at_lengths(compiled): the same for contiguous caches of every length; None also where
               lengths do not change
    variant    variant(): what tells the kernel apart that Triton compiles, among those bound to
               operands with strides and addresses alike
    """

    launch: Callable[[dict[str, Any]], Any]
    relaunch: Callable[[Any], Launch | None]
    at_lengths: Callable[[Any], CacheLaunch | None] = lambda compiled: None
    variant: Callable[[], Hashable] = object


class Splits(NamedTuple):
    """How many splits there are: the arguments of the rule, see tile/share.py, and the most splits
    of a sequence whose partials `combine` merges."""

    parts: int | None
    size: int | None
    programs: int | None
    most: int


def splits_of(plan: Plan) -> Splits:
    """The Splits of a plan."""
    problem, config = plan.problem, plan.config
    if config.schedule == "batch":
        most = max(config.programs - problem.batch, 1)
        return Splits(None, None, config.programs, most)
    size = config.split_size // config.tile_n if config.schedule == "fixed" else None
    most = config.num_splits if config.merge == "combine" else 1
    return Splits(config.num_splits, size, None, most)


def batch_p2(plan: Plan) -> int:
    """The batch rounded up to a power of two, where programs find their sequence; or 1."""
    batched = plan.config.schedule == "batch"
    return next_power_of_2(plan.problem.batch) if batched else 1


def partial_rows(plan: Plan) -> int:
    """Rows of the partials of all programs; 0: nothing is merged."""
    if splits_of(plan).most <= 1:
        return 0
    rows = packed_rows(plan.problem, plan.config)[1]
    return math.prod(grid(plan.problem, plan.config)) * rows


def dependent_launches(plan: Plan, operands: Operands) -> bool:
    """Whether a kernel may be launched before the one before it has ended."""
    return bool(operands.q.is_cuda and plan.device.capability >= (9, 0))


def compile_options(num_warps: int) -> dict[str, Any]:
    """Options of every kernel; multiply and add in one rounding is Triton's default, which from 3.9
    on it wants said."""
    return {"num_warps": num_warps, "enable_fp_fusion": True}


def out_strides(plan: Plan, operands: Operands) -> Strides:
    """The strides of the output, as given or as it will be made."""
    problem, out = plan.problem, operands.out
    if out is not None:
        return Strides(*out.stride()[:3])
    head = max(problem.head_dim_v, 1)  # torch has no smaller steps
    token = max(problem.num_heads, 1) * head
    return Strides(max(problem.seqlen_q, 1) * token, token, head)


def split_arguments(plan: Plan, operands: Operands) -> dict[str, Any]:
    """The arguments that every decode kernel takes and that never change from call to call."""
    problem, splits = plan.problem, splits_of(plan)
    table, slopes = operands.page_table, operands.alibi_slopes
    per_sequence = slopes is not None and slopes.dim() == 2
    stride_qsb, stride_qst, stride_qsh = scale_strides(operands.q_scale, operands.q)
    stride_sb, stride_sn, stride_sh = scale_strides(operands.k_scale, operands.k)
    return {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k if operands.seqlen_k is None else operands.seqlen_k,
        "batch": problem.batch,
        "num_kv_heads": problem.num_kv_heads,
        "parts": splits.parts,
        "size": splits.size,
        "programs": splits.programs,
        "q_strides": Strides(*operands.q.stride()[:3]),
        "out_strides": out_strides(plan, operands),
        "stride_table": table.stride(0) if table is not None else 0,
        "stride_slope": slopes.stride(0) if per_sequence else 0,
        "stride_qsb": stride_qsb,
        "stride_qst": stride_qst,
        "stride_qsh": stride_qsh,
        "stride_sb": stride_sb,
        "stride_sn": stride_sn,
        "stride_sh": stride_sh,
    }


STRIDES_OF_CACHES = "k_strides", "v_strides"
STRIDES_OF_SCALES = "stride_sb", "stride_sn", "stride_sh"


class CacheTail:
    """The last arguments of a decode kernel, which do not change while caches have one length.

    fixed   by name; those that a length changes are `seqlen_k` and strides of caches and scales
    """

    def __init__(self, kernel: Any, per_call: tuple[str, ...], fixed: dict[str, Any]) -> None:
        self.tail = Tail(kernel, per_call, fixed, STRIDES_OF_CACHES)
        self.arguments, self.variant = self.tail.arguments, self.tail.variant
        self.strided = fixed.get("k_strides") is not None
        self.seqlen_k: int | None = self.tail.place.get("seqlen_k")
        # where the length is all that changes
        scaled = bool(fixed.get("stride_sn"))
        self.around = None if self.strided or scaled else self.cut(self.arguments)

    def around_length(self, here: CacheLayout) -> tuple[Sequence[Any], Sequence[Any]]:
        """The arguments before and behind the length of caches of another layout, see `cut`."""
        k, v, scales = here[1]
        made, place = [*self.arguments], self.tail.place
        if self.strided:
            made[place["k_strides"]], made[place["v_strides"]] = Strides(*k[:3]), Strides(*v[:3])
        if scales is not None:
            for name, step in zip(STRIDES_OF_SCALES, scales, strict=True):
                if name in place:
                    made[place[name]] = step
        return self.cut(made)

    def cut(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The arguments before the length and those behind it; before the last where the kernel is
        not told the length."""
        at = len(arguments) - 1 if self.seqlen_k is None else self.seqlen_k
        return arguments[:at], arguments[at + 1 :]

    def told(self, launch: LengthLaunch) -> LengthLaunch:
        """The launch, for a kernel that is not told the length with its last argument in the place
        of that."""
        if self.seqlen_k is not None:
            return launch
        last = self.arguments[-1]
        return lambda length, *rest: launch(last, *rest)


COMBINE_PER_CALL = ("partial", "final", "lens_ptr", "sink_ptr", "growth")
"""The arguments of `combine` that change from call to call; growth of calls that append alone."""


class Merge(NamedTuple):
    """`combine` bound to one plan: its grid, the arguments that never change, its options."""

    grid: tuple[int, int, int]
    fixed: dict[str, Any]
    options: dict[str, Any]

    def launch(self, arguments: dict[str, Any]) -> Any:
        """Launches it through Triton; the compiled kernel."""
        return combine[self.grid](*in_order(combine, arguments | self.fixed), **self.options)

    def variant(self) -> Hashable:
        """A key of the kernel that Triton compiles."""
        return *specialised(combine, self.fixed.items()), *sorted(self.options.items())

    def relaunch(self, compiled: Any, per_call: tuple[str, ...]) -> Launch:
        """A function that launches it again: see `Repeat`."""
        left_out = {name: None for name in COMBINE_PER_CALL if name not in per_call}
        tail = tail_in_order(combine, per_call, left_out | self.fixed)
        return launch_of(compiled, self.grid, tail)


class MergeLayout(NamedTuple):
    """The layout of a call as far as `combine` takes it: arguments about new tokens, strides of the
    output, and whether it is launched before the kernel that makes partials has ended."""

    new: Mapping[str, Any]
    out: Strides
    early: bool


def merge_layout_of(plan: Plan, operands: Operands) -> MergeLayout:
    """The MergeLayout of operands."""
    new = fixed_arguments(operands) if plan.config.appends else NO_NEW_TOKENS
    return MergeLayout(new, out_strides(plan, operands), dependent_launches(plan, operands))


def merge_of(plan: Plan, layout: MergeLayout) -> Merge:
    """The Merge of a plan that has partials."""
    new, out, early = layout
    problem, config, splits = plan.problem, plan.config, splits_of(plan)
    tile_p, tile_v, num_warps = merge_tiles(splits.most, problem.head_dim_v)
    few = 0
    if splits.programs:
        few, (tile_p, tile_v, num_warps) = SHARED_TILES[0], SHARED_TILES[1:]
    fixed = {
        "batch": problem.batch,
        "num_kv_heads": problem.num_kv_heads,
        **dict(zip(BOUNDS, problem.mask.bounds, strict=True)),
        "parts": splits.parts,
        "programs": splits.programs,
        "seqlen_new": new["seqlen_new"],
        "capacity": new["capacity"],
        "tokens": None,
        "total_q": None,
        "stride_ob": out.b,
        "stride_ot": out.t,
        "stride_oh": out.h,
        "SEQLEN_Q": problem.seqlen_q,
        "GROUP": problem.group,
        "HEAD_DIM_V": problem.head_dim_v,
        "BATCH_P2": batch_p2(plan),
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n if splits.programs else UNUSED,
        "TILE_P": tile_p,
        "FEW": few,
        "TILE_V": tile_v,
        "LAST_STEP": "short" if splits.programs or splits.most % tile_p else "full",
        "PREDECESSOR": "running" if early else "done",
    }
    columns = ceil_div(problem.head_dim_v, tile_v)
    overlapping = {"launch_pdl": True} if early else {}
    return Merge(
        (problem.num_kv_heads * problem.rows, problem.batch, columns),
        fixed,
        compile_options(num_warps) | overlapping,
    )


class DecodeLauncher:
    """A decode kernel and `combine` bound to one plan and one memory layout.

    Everything that does not change from call to call is worked out here once. The first call goes
    through Triton's own dispatch and keeps what it compiled: `repeat` launches that directly, with
    addresses, unless one is not a multiple of 16, which is another specialisation.

    rebind   rebind(plan, operands): a launcher under another plan for tensors of this layout at
             other addresses that the plan does not fit; None where it does

    It is bound to the keys that there are, `seqlen_k`, which its plan may round up and which the
    operands of later calls need not say.
    """

    def __init__(
        self,
        plan: Plan,
        operands: Operands,
        split: SplitKernel,
        rebind: Callable[[Plan, Operands], DecodeLauncher | None] = lambda plan, operands: None,
    ) -> None:
        problem = plan.problem
        self.plan, self.split, self.partials = plan, split, workspace.partials
        self.rebind, self.other = rebind, cast("DecodeLauncher | None", None)
        self.seqlen_k = operands.seqlen_k
        self.key_scales = problem.codec.granularity == "token"
        self.out_shape = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)
        self.lse_shape = (problem.batch, problem.num_heads, problem.seqlen_q)
        self.return_lse = problem.return_lse
        self.dtype = getattr(torch, problem.out_dtype)
        self.partial_rows = partial_rows(plan)
        self.acc_numel = self.partial_rows * problem.head_dim_v
        self.merge_layout = merge_layout_of(plan, operands)
        self.repeat: Callable[..., Any] | None = None
        self.compiled: tuple[Any, Any] | None = None
        self.at_lengths: CacheLaunch | None = None

    @cached_property
    def merge(self) -> Merge | None:
        """`combine`; None: there are no partials. Bound when it is asked for, as a step of its own
        where a launcher is made ready (`runtime/growing.py`)."""
        return merge_of(self.plan, self.merge_layout) if self.partial_rows else None

    def __call__(self, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        o, done = operands, None
        per_call = o.cache_seqlens, o.page_table, o.sink_logits, o.alibi_slopes
        tensors = o.q, o.k, o.v, o.out, *per_call, o.q_scale, o.k_scale, o.v_scale
        if self.repeat is not None:
            more = {"out_scale": o.out_scale, "sequence_sink_tokens": o.sequence_sink_tokens}
            done = self.repeat(*tensors, o.softmax_scale, o.softcap, o.new, **more)
        return done or self.dispatch(operands)

    def dispatch(self, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches through Triton, which compiles what these arguments need, and keeps that."""
        other = self.rebind_once(operands)
        if other is not None:
            return other.dispatch(operands)
        o, lse, merged = operands, None, None
        out = o.q.new_empty(self.out_shape, dtype=self.dtype) if o.out is None else o.out
        if self.return_lse:
            lse = o.q.new_empty(self.lse_shape, dtype=torch.float32)
        arguments = self.per_call(o, final_of(out, lse, o.out_scale))
        compiled = self.split.launch(arguments)
        if self.merge is not None:
            given = {
                "partial": arguments["partial"],
                "final": arguments["final"],
                "lens_ptr": o.cache_seqlens,
                "sink_ptr": o.sink_logits,
                "growth": arguments.get("growth"),
            }
            merged = self.merge.launch(given)
        if compiled is not None and self.repeat is None and aligned(o) and not observed():
            self.keep(compiled, merged, o)
        return out, lse

    def rebind_once(self, operands: Operands) -> DecodeLauncher | None:
        """The launcher under another plan that these tensors need; kept for later ones."""
        if aligned(operands):
            return None
        if self.other is None:
            self.other = self.rebind(self.plan, replace(operands, seqlen_k=self.seqlen_k))
        return self.other

    def per_call(self, operands: Operands, final: Final) -> dict[str, Any]:
        """The arguments of a decode kernel that change from call to call."""
        o = operands
        appended = pointers(o.new, o.k, o.v) if self.plan.config.appends else {}
        partial = None
        if self.partial_rows:
            partial = self.partials(o.q, self.acc_numel, self.partial_rows)
        return arguments_of(self.plan, o, final, partial) | appended

    def put_in_order(self) -> None:
        """Puts the arguments of the first kernel in order, as `variant` else does."""
        self.split.variant()

    def variant(self) -> Hashable:
        """A key of the two kernels that Triton compiles, among launchers bound to operands with
        types, strides and addresses alike."""
        merge = None if self.merge is None else self.merge.variant()
        return self.split.variant(), merge, (self.return_lse, self.dtype)

    def keep(self, compiled: Any, merged: Any, operands: Operands) -> None:
        """Keeps what was compiled, for this launcher or another with the same `variant`, for later
        calls."""
        later = self.split.relaunch(compiled)
        if later is None:
            return
        merge = None
        if self.merge is not None:
            named = COMBINE_PER_CALL if self.plan.config.appends else COMBINE_PER_CALL[:-1]
            merge = self.merge.relaunch(merged, named)
        self.compiled = compiled, merged
        self.at_lengths = self.split.at_lengths(compiled)
        again = Repeat(
            later,
            merge,
            operands.q.device,
            self.dtype,
            self.out_shape,
            self.lse_shape if self.return_lse else None,
            self.acc_numel,
            self.partial_rows,
            key_scales=self.key_scales,
        )
        self.repeat = again.call


def arguments_of(
    plan: Plan, operands: Operands, final: Final, partial: Partial | None
) -> dict[str, Any]:
    """The arguments of every decode kernel that change from call to call."""
    o = operands
    q, k, v = o.q, o.k, o.v
    native = not q.is_cuda or plan.device.capability >= (8, 9)
    if plan.problem.codec.name == "fp8" and not native:
        q, k, v = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (q, k, v))
    scales = None if o.k_scale is None else Scales(o.k_scale, o.v_scale)
    of_keys = plan.problem.codec.granularity == "token"
    scale = o.softmax_scale / o.softcap if o.softcap else o.softmax_scale * 1.4426950408889634
    return {
        "q_ptr": q,
        "kv": KV(k, v, o.page_table),
        "lens_ptr": o.cache_seqlens,
        "final": final,
        "partial": partial,
        "row": Row(o.sink_logits, o.alibi_slopes, o.q_scale, o.sequence_sink_tokens),
        "head_scales": None if of_keys else scales,
        "key_scales": scales if of_keys else None,
        "scale": scale,
        "softcap": o.softcap or None,
    }


def aligned(operands: Operands) -> bool:
    """Whether all addresses of a call are multiples of 16."""
    o = operands
    tensors = [o.q, o.k, o.v, o.out, o.cache_seqlens, o.page_table, o.sink_logits, o.alibi_slopes]
    tensors += [o.q_scale, o.k_scale, o.v_scale, o.out_scale, o.cu_seqlens_q, o.cu_seqlens_k]
    tensors.append(o.sequence_sink_tokens)
    if o.new is not None:
        tensors += o.new.tensors
    return not any(x is not None and x.data_ptr() & 15 for x in tensors)
