"""Calls of ever new lengths: buckets of lengths, and the launchers that serve them.

A call is known by the layouts of its tensors, so that each length of tensors without a page table
is another kind of call. What a length changes is little: plans are made for buckets of lengths,
kernels take the exact one as a run-time integer, as they do strides, and only the maps of TMA hold
both. So the second time that a call differs from an earlier one in nothing but lengths, it is bound
as a `GrowingCaches` or a `GrowingSequences`, which serves every length from then on.

What Triton compiles for strides by value is part of what a bucket is known by: whether they are 1,
multiples of 16, or more than 32 bits hold. So are edges of a mask that no query meets.

What a bucket takes on the host, ten times a new length, is done in the last steps of the bucket
before, a part in each of them, behind the launches of the step itself: its problem, the plan, the
binding of a kernel, the arguments in the order of that, `combine` and what both are compiled for,
the launches. A bucket that is entered in another way takes all of it at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.planner.registry import kernel_named, plan_at_length
from splitkv.runtime.call_cache import Launcher, Result, layout

MAX_KNOWN = 256  # layouts that launchers are kept for; past it, the first are forgotten
AHEAD = 8
"""Keys before the end of a bucket from which on the next one is made ready."""
Alignment = tuple[Any, ...]
"""What kernels are compiled for of strides."""
EVERY_ONE: Alignment = ("multiples of 16",)
"""The alignment of strides that are all multiples of 16 and not far apart."""
Bucket = tuple[Alignment, Any]
"""What a plan and its kernels are for: an alignment, and the longest sequences."""


class InOrder(NamedTuple):
    """A launcher of which the arguments of the first kernel are in order."""

    launcher: Any


class Ready(NamedTuple):
    """A launcher that only lacks its kernels, and their key in `compiled`."""

    launcher: Any
    key: Hashable


compiled: dict[Hashable, tuple[Any, Any]] = {}
"""What Triton compiled for growing calls, an attention kernel and `combine` or None: by the types
and alignments of what they were given, and by the `variant` of the launcher."""


def pattern_with(
    tensors: Sequence[Tensor], lengths: Mapping[int, int], rows: Collection[int] = ()
) -> Any:
    """The layouts of tensors but for lengths, which some have in a dimension, and for the first
    dimension of `rows`; and whether they require a gradient, which a check sees, too."""

    def of(n: int, x: Tensor) -> Any:
        whole = layout(x)
        if n in lengths:
            return _with_free_length(whole, lengths[n])
        return (whole[0][1:], *whole[1:]) if n in rows else whole

    return tuple((of(n, x), x.requires_grad) for n, x in enumerate(tensors))


def _with_free_length(of: Any, dim: int) -> Any:
    shape, strides = of[:2]
    if dim == 0:  # packed
        return shape[1:], (strides[0], strides[2:]), of[2:]
    return (shape[0], shape[2:]), (strides[1], strides[3:]), of[2:]


class Growing(ABC):
    """A launcher for calls of every length, which differ in nothing else.

    problem, operands  of one of the lengths
    num_splits         that the caller forces, or 0
    plan_for           plan_for(problem, operands): a plan for these operands
    kernels            names of those that take every length
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        num_splits: int,
        plan_for: Callable[[Problem, Operands], Plan],
        kernels: tuple[str, ...],
    ) -> None:
        self.problem, self.num_splits, self.plan_for = problem, num_splits, plan_for
        self.kernels, self.types = kernels, types_of(operands)
        self.plans: dict[Alignment, Plan] = {}  # of the first length of each
        self.buckets: dict[Bucket, Any] = {}  # launchers
        self.ahead: dict[Bucket, Any] = {}  # what `make_ready` has got to
        self.bound: OrderedDict[Any, Launcher] = OrderedDict()  # to one layout in its bucket

    @abstractmethod
    def problem_of(self, longest: Any) -> Problem:
        """The problem of the longest sequences of a bucket."""

    def through_triton(
        self, here: Any, bucket: Bucket | None, problem: Problem, operands: Operands
    ) -> Result:
        """Binds a launcher to this one layout, which compiles what it needs, and keeps that.

        bucket    None: nothing is kept
        problem   that the launcher is bound to
        """
        x = operands
        launcher = self.bound.get((here, bucket))
        if launcher is not None:
            return launcher(x)
        if bucket is None:
            plan = self.plan_for(problem, x)
        else:
            plan = replace(self.planned(bucket[0], self.problem_of(bucket[1]), x), problem=problem)
        made: Any = kernel_named(plan.kernel).bind(plan, x)
        keep(self.bound, (here, bucket), made, MAX_KNOWN)
        result: Result = made(x)
        if bucket is not None and plan.kernel in self.kernels and made.compiled is not None:
            compiled[self.types, bucket[0], made.variant()] = made.compiled
            self.buckets[bucket] = made
            self.ahead.pop(bucket, None)
        return result

    def launcher_of(self, bucket: Bucket, operands: Operands) -> Any:
        """A launcher for a bucket that has compiled kernels; None where there are none."""
        while bucket not in self.buckets and self.make_ready(bucket, operands):
            pass
        return self.buckets.get(bucket)

    def make_ready(self, bucket: Bucket, operands: Operands) -> bool:
        """Takes one of six steps to a launcher for a bucket: describes its problem, plans it, binds
        that, puts its arguments in order, has it say which kernels it needs, and keep them where
        they were compiled for others. Whether another can follow.

        Of the operands it takes the layout, so that each step may have those of another call.
        """
        alignment, more = bucket[0], True
        made: Any = self.ahead.pop(bucket, None)  # no other thread takes this step meanwhile
        if made is None:
            if alignment not in self.plans or bucket in self.buckets:
                return False
            made = self.problem_of(bucket[1])
        elif isinstance(made, Problem):
            made = self.planned(alignment, made, operands)
            more = made.kernel in self.kernels
        elif isinstance(made, Plan):
            more = made.kernel in self.kernels
            made = kernel_named(made.kernel).bind(made, operands) if more else made
        elif isinstance(made, InOrder):
            made = Ready(made.launcher, (self.types, alignment, made.launcher.variant()))
        elif not isinstance(made, Ready):
            made.put_in_order()
            made = InOrder(made)
        else:
            more, kernels = False, compiled.get(made.key)
            if kernels is not None:
                made.launcher.keep(*kernels, operands)
                self.buckets[bucket] = made.launcher
                return False
        self.ahead[bucket] = made
        return more

    def planned(self, alignment: Alignment, problem: Problem, operands: Operands) -> Plan:
        """The plan of the longest sequences of a bucket, whose problem it is given."""
        known, x = self.plans.get(alignment), operands
        if known is not None and not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            plan = plan_at_length(known, problem, self.num_splits)
            return kernel_named(plan.kernel).refit(plan, x) if x.q.is_cuda else plan
        plan = self.plan_for(problem, x)
        if not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            self.plans[alignment] = plan
        return plan


def keep(known: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Keeps a value in the place of the first where there are many: to forget all of them at once
    takes as long as a hundred calls."""
    while len(known) >= most:
        known.popitem(last=False)
    known[key] = value


def types_of(operands: Operands) -> Hashable:
    """The types of a call that kernels are compiled for, and the device that they are loaded on."""
    x = operands
    tensors = x.q, x.k, x.v, x.cache_seqlens, x.sink_logits, x.alibi_slopes, x.q_scale, x.k_scale
    types = [None if tensor is None else tensor.dtype for tensor in tensors]
    present = [y is not None for y in (x.page_table, x.cu_seqlens_q, x.cu_seqlens_k)]
    return x.q.device, (*types, *present), bool(x.softcap)


def alignment_of_stride(stride: int) -> int:
    """A number for each kind of stride that Triton compiles for."""
    return 3 * (stride >> 31 > 0) + (stride == 1) + 2 * (stride % 16 == 0)
