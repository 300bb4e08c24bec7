"""Launchers of decode by a schedule of the step.

decode      the kernel, whose programs follow a schedule that they are given, or find their shares
combine     merges what several programs have of a head tile
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import triton

from splitkv.core.errors import expect
from splitkv.core.plan import Plan, shares_of
from splitkv.core.problem import Operands
from splitkv.kernels.combine import Final, Partial, final_of
from splitkv.kernels.combine_slots import TILE_P, TILE_R, TILE_V, WARPS, combine_slots
from splitkv.kernels.host import launcher
from splitkv.kernels.host.allocations import Allocations
from splitkv.kernels.host.append_arguments import NO_NEW_TOKENS, fixed_arguments, pointers
from splitkv.kernels.host.arguments import in_order, specialised, tail_in_order
from splitkv.kernels.host.decode_repeat import addresses_of
from splitkv.kernels.host.launch import Launch, launch_of, observed
from splitkv.kernels.host.launcher import (
    BOUNDS,
    CacheLaunch,
    SplitKernel,
    aligned,
    arguments_of,
    compile_options,
    dependent_launches,
    out_strides,
    split_arguments,
)
from splitkv.kernels.host.map_launch import LengthLaunch
from splitkv.kernels.host.partition import packed_rows
from splitkv.kernels.schedule import head_tiles_argument, head_tiles_of_share
from splitkv.kernels.tile.step_share import RULES

if TYPE_CHECKING:
    import torch

COMBINE_PER_CALL = "partial", "final", "starts_ptr", "lens_ptr", "sink_ptr"
"""The arguments of `combine_slots` that change from call to call, with `growth` of calls that
append."""


def per_call_of(plan: Plan) -> tuple[str, ...]:
    """The arguments of a decode kernel by a schedule that change from call to call."""
    names = (*launcher.PER_CALL, "starts_ptr")
    return (*names, "growth", "new", "turn") if plan.config.appends else names


def new_arguments(plan: Plan, operands: Operands) -> dict[str, Any]:
    """The arguments about new tokens that never change from call to call."""
    if not plan.config.appends:
        return dict(NO_NEW_TOKENS)
    return fixed_arguments(operands)


def launched_early(plan: Plan, operands: Operands) -> dict[str, Any]:
    """The option of kernels that start before the one before has ended, and wait for it."""
    return {"launch_pdl": True} if dependent_launches(plan, operands) else {}


def groups_of(plan: Plan) -> int:
    """Groups of programs, each with shares of head tiles of its own."""
    head_tiles = plan.problem.num_kv_heads * packed_rows(plan.problem, plan.config)[0]
    return head_tiles // head_tiles_of_share(plan)


def grid_of(plan: Plan) -> tuple[int, int, int]:
    """Programs along each axis of the launch of decode: neighbours have neighbouring heads."""
    return groups_of(plan), plan.config.programs, 1


def step_partial_rows(plan: Plan) -> int:
    """Rows of the partials of all programs, two slots each."""
    return 2 * groups_of(plan) * plan.config.programs * packed_rows(plan.problem, plan.config)[1]


def step_arguments(plan: Plan, operands: Operands) -> dict[str, Any]:
    """The arguments that every decode kernel by a schedule takes and that never change from call to
    call."""
    arguments = split_arguments(plan, operands)
    for name in ("seqlen_k", "parts", "size"):
        del arguments[name]
    arguments["head_tiles"] = head_tiles_argument(plan)
    arguments["programs"] = plan.config.programs
    return arguments | new_arguments(plan, operands)


class SlotMerge(NamedTuple):
    """`combine_slots` bound to one plan: its grid, the arguments that never change, its options,
    the names of those that do."""

    grid: tuple[int, int, int]
    fixed: dict[str, Any]
    options: dict[str, Any]
    per_call: tuple[str, ...]

    def launch(self, arguments: dict[str, Any]) -> Any:
        """Launches it through Triton; the compiled kernel."""
        ordered = in_order(combine_slots, arguments | self.fixed)
        return combine_slots[self.grid](*ordered, **self.options)

    def variant(self) -> Hashable:
        """A key of the kernel that Triton compiles."""
        return *specialised(combine_slots, self.fixed.items()), *sorted(self.options.items())

    def relaunch(self, compiled: Any) -> Launch:
        """A function that launches it again: see `StepRepeat`."""
        tail = tail_in_order(combine_slots, self.per_call, self.fixed)
        return launch_of(compiled, self.grid, tail)


def slot_merge_of(plan: Plan, operands: Operands) -> SlotMerge:
    """The SlotMerge of a plan."""
    problem, config = plan.problem, plan.config
    early, out = dependent_launches(plan, operands), out_strides(plan, operands)
    columns = min(TILE_V, triton.next_power_of_2(problem.head_dim_v))
    rows = packed_rows(problem, config)[1]
    of_program = min(TILE_R, triton.next_power_of_2(rows))
    new, per_call = new_arguments(plan, operands), tuple[str, ...](COMBINE_PER_CALL)
    if config.appends:
        per_call += ("growth",)
    fixed: dict[str, Any] = {} if config.appends else {"growth": None}
    fixed |= {
        "seqlen_q": problem.seqlen_q,
        "batch": problem.batch,
        "num_kv_heads": problem.num_kv_heads,
        **dict(zip(BOUNDS, problem.mask.bounds, strict=True)),
        "head_tiles": head_tiles_argument(plan),
        "programs": config.programs,
        "seqlen_new": new["seqlen_new"],
        "capacity": new["capacity"],
        "stride_ob": out.b,
        "stride_ot": out.t,
        "stride_oh": out.h,
        "SEQLEN_Q": problem.seqlen_q,
        "GROUP": problem.group,
        "HEAD_DIM_V": problem.head_dim_v,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "RULE": RULES[config.schedule],
        "SPLIT_TILES": config.split_tiles,
        "TILE_R": of_program,
        "TILE_P": TILE_P,
        "TILE_V": columns,
        "AFTER": "early" if early else "in_order",
    }
    blocks = groups_of(plan) * triton.cdiv(rows, of_program)
    grid = blocks, config.programs, triton.cdiv(problem.head_dim_v, columns)
    options = compile_options(WARPS) | launched_early(plan, operands)
    return SlotMerge(grid, fixed, options, per_call)


class StepLauncher:
    """A decode kernel by a schedule and `combine_slots` bound to one plan and one memory layout.

    As `DecodeLauncher`: the first call goes through Triton, later ones through `repeat`. All calls
    are given a schedule, as the first was, or none is.

    rebind   rebind(plan, operands): a launcher under another plan for tensors of this layout at
             other addresses that the plan does not fit; None where it does
    """

    def __init__(
        self,
        plan: Plan,
        operands: Operands,
        split: SplitKernel,
        rebind: Callable[[Plan, Operands], StepLauncher | None] = lambda plan, operands: None,
    ) -> None:
        import torch

        from splitkv.kernels.host.workspace import partials

        problem = plan.problem
        self.plan, self.split, self.partials = plan, split, partials
        self.rebind, self.other = rebind, cast("StepLauncher | None", None)
        self.given = operands.starts is not None
        self.merge = slot_merge_of(plan, operands)
        self.out_shape = (problem.batch, problem.seqlen_q, problem.num_heads, problem.head_dim_v)
        self.lse_shape = None
        if problem.return_lse:
            self.lse_shape = (problem.batch, problem.num_heads, problem.seqlen_q)
        self.dtype = getattr(torch, problem.out_dtype)
        self.partial_rows = step_partial_rows(plan)
        self.repeat: Callable[..., Any] | None = None
        self.compiled: tuple[Any, Any] | None = None
        self.at_lengths: CacheLaunch | None = None

    def __call__(self, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(out, lse or None), on the current stream; writes `operands.out` where given."""
        o, done = operands, None
        per_call = o.cache_seqlens, o.page_table, o.sink_logits, o.alibi_slopes
        tensors = o.q, o.k, o.v, o.out, *per_call, o.q_scale, o.k_scale, o.v_scale
        if self.repeat is not None:
            more = {"starts": o.starts, "out_scale": o.out_scale}
            more["sequence_sink_tokens"] = o.sequence_sink_tokens
            done = self.repeat(*tensors, o.softmax_scale, o.softcap, o.new, **more)
        return done or self.dispatch(operands)

    def dispatch(self, operands: Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches through Triton, which compiles what these arguments need, and keeps that."""
        import torch

        other = self.rebind_once(operands)
        if other is not None:
            if operands.starts is not None:
                ours, theirs = shares_of(other.plan.config), shares_of(self.plan.config)
                expect(ours == theirs, "schedule", f"one for {ours}", theirs)
            return other.dispatch(operands)
        o, lse, starts = operands, None, operands.starts
        assert (starts is not None) == self.given
        out = o.q.new_empty(self.out_shape, dtype=self.dtype) if o.out is None else o.out
        if self.lse_shape is not None:
            lse = o.q.new_empty(self.lse_shape, dtype=torch.float32)
        arguments = self.per_call(o, final_of(out, lse, o.out_scale), starts)
        compiled = self.split.launch(arguments)
        given = {n: arguments[n] for n in self.merge.per_call if n != "sink_ptr"}
        merged = self.merge.launch(given | {"sink_ptr": o.sink_logits})
        if compiled is not None and self.repeat is None and aligned(o) and not observed():
            self.keep(compiled, merged, o)
        return out, lse

    def rebind_once(self, operands: Operands) -> StepLauncher | None:
        """The launcher under another plan that these tensors need; kept for later ones."""
        if aligned(operands):
            return None
        if self.other is None:
            self.other = self.rebind(self.plan, operands)
        return self.other

    def per_call(self, operands: Operands, final: Final, starts: Any) -> dict[str, Any]:
        """The arguments of a decode kernel that change from call to call."""
        acc = self.partial_rows * self.plan.problem.head_dim_v
        partial: Partial = self.partials(operands.q, acc, self.partial_rows)
        o, appends = operands, self.plan.config.appends
        appended = pointers(o.new, o.k, o.v) if appends else {}
        return arguments_of(self.plan, o, final, partial) | {"starts_ptr": starts} | appended

    def put_in_order(self) -> None:
        """Puts the arguments of the first kernel in order, as `variant` else does."""
        self.split.variant()

    def variant(self) -> Hashable:
        """A key of the kernels that Triton compiles, as `DecodeLauncher.variant`."""
        return self.split.variant(), self.merge.variant(), (self.lse_shape is None, self.dtype)

    def keep(self, compiled: Any, merged: Any, operands: Operands) -> None:
        """Keeps what was compiled, for this launcher or another with the same `variant`, for later
        calls."""
        split = self.split.relaunch(compiled)
        if split is None:
            return
        launches = StepLaunches(split, self.merge.relaunch(merged))
        self.compiled = compiled, merged
        self.at_lengths = self.split.at_lengths(compiled)
        device = operands.q.device
        results = CallResults(device, self.dtype, self.out_shape, self.lse_shape)
        self.repeat = StepRepeat(launches, self.plan, results, self.partial_rows).call


class StepLaunches(NamedTuple):
    """The launches of a call: split as in `Repeat`, at_starts before what is new; merge(stream,
    partial, (at_out, at_lse, at_scale), at_starts, at_lens, at_sink), where the call appends with
    the addresses of growth behind."""

    split: Launch
    merge: Launch


class Addresses(NamedTuple):
    """The addresses of the tensors of a call, or None."""

    q: int
    k: int
    v: int
    out: int | None
    lens: int
    table: int | None
    sink: int | None
    slopes: int | None
    q_scale: int | None
    k_scale: int | None
    v_scale: int | None
    starts: int | None
    out_scale: int | None
    sink_tokens: int | None


class CallResults(NamedTuple):
    """The tensors that a call makes: where, of which type, of which shapes; None: no LSE."""

    device: torch.device
    dtype: torch.dtype
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None


class StepRepeat(Allocations):
    """A call of decode by a schedule, once its kernels are compiled: allocate, split, merge."""

    def __init__(
        self,
        launches: StepLaunches,
        plan: Plan,
        results: CallResults,
        rows: int,
    ) -> None:
        super().__init__(launches.merge, *results, rows * plan.problem.head_dim_v, rows)
        self.split, self.merge_slots = launches
        self.key_scales = plan.problem.codec.granularity == "token"

    def call(
        self,
        *given: Any,
        starts: Any = None,
        out_scale: Any = None,
        sequence_sink_tokens: Any = None,
        split: LengthLaunch | None = None,
        length: int = 0,
        layout: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """(out, lse or None), or None where the call has to go through Triton; given: the eleven
        tensors of a `Relaunch`, softmax_scale, softcap and what is new, if anything; starts: those
        of a schedule; split, length, layout: as in `Repeat`."""
        tensors, (scale, softcap, *new) = given[:11], given[11:]
        addressed = *tensors, starts, out_scale, sequence_sink_tokens
        every: Any = [None if x is None else x.data_ptr() for x in addressed]
        found = Addresses(*every)
        bits = 0
        for at in found:
            bits |= at or 0
        appended: Any = ()
        if new and new[0] is not None:
            appended, bits_of_new = addresses_of(new[0], found.k, found.v)
            bits |= bits_of_new
        if bits & 15 or observed():
            return None
        out, at_out = tensors[3], found.out
        if out is None:
            out = self.new_out()
            at_out = out.data_ptr()
        lse = at_lse = None
        if self.new_lse is not None:
            lse = self.new_lse()
            at_lse = lse.data_ptr()
        if softcap:
            scale /= softcap
        else:
            scale, softcap = scale * 1.4426950408889634, None
        scales = None if found.k_scale is None else (found.k_scale, found.v_scale)
        of_heads, of_keys = (None, scales) if self.key_scales else (scales, None)
        stream = self.current_stream(self.device)
        captured = stream and self.capturing()  # stream 0, the default, cannot be
        buffer, partial = self.take_buffer(stream, captured)
        final = at_out, at_lse, found.out_scale
        kv = found.k, found.v, found.table
        row = found.sink, found.slopes, found.q_scale, found.sink_tokens
        rest = of_heads, of_keys, scale, softcap, found.starts, *appended
        to_split = stream, found.q, kv, found.lens, final, partial, row, *rest
        if split is None:
            self.split(*to_split)
        else:
            split(length, layout, *to_split)
        rest = found.starts, found.lens, found.sink, *appended[:1]
        self.merge_slots(stream, partial, final, *rest)
        if not captured:
            self.buffers[stream] = buffer
        return out, lse
