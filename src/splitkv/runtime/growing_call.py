"""Calls of decode on contiguous caches whose length changes: a key longer in every step, say.

A call is known by the layouts of its tensors, so that each length of a contiguous cache is another
kind of call. What a length changes is little: plans are made for buckets of lengths, kernels take
the exact one as a run-time integer, as they do strides, and only the maps of TMA hold both. So the
second time that a call differs from an earlier one in nothing but the length of its caches, it is
bound as a `GrowingCall`, which serves every length from then on. It is found by a check in which
length and outer strides of the caches are free.

What Triton compiles for strides by value is part of what a bucket is known by: whether they are 1,
multiples of 16, or more than 32 bits hold.

What a bucket takes on the host, ten times a new length, is done in the last steps of the bucket
before: its plan in one of them, the binding in another, the launches in a third, each behind the
launches of the step itself. A bucket that is entered in another way takes all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.planner.registry import kernel_named, plan_at_length, rounded_up
from splitkv.runtime.call_cache import NO_TENSOR, Check, Launcher, Result, check_of, layout

if TYPE_CHECKING:
    from splitkv.kernels.host.launcher import DecodeLauncher
    from splitkv.kernels.host.relaunch import Repeat

GROWS = "decode_split", "hopper_decode_split"
"""The kernels that take every length of a cache up to that of their plan."""


class CacheLayout(NamedTuple):
    """The length of contiguous caches and their strides, and those of scales of each token."""

    length: int
    k: tuple[int, ...]
    v: tuple[int, ...]
    scales: tuple[int, ...] | None


AHEAD = 8
"""Keys before the end of a bucket from which on the next one is made ready."""
K_SCALE, V_SCALE = 6, 7  # of the arguments of a `Relaunch` behind q, k and v
Alignment = tuple[Any, ...]
"""What kernels are compiled for of strides."""
Bucket = tuple[Alignment, int]
"""What a plan and its kernels are for: an alignment, and the longest caches."""


compiled: dict[Hashable, tuple[Any, Any]] = {}
"""What Triton compiled for growing calls, a decode kernel and `combine` or None: by the types and
alignments of what they were given, and by `DecodeLauncher.variant`."""


def in_bucket(problem: Problem) -> Problem:
    """The problem of the longest caches that are served by the same plan."""
    return replace(problem, seqlen_k=rounded_up(problem.seqlen_k))


def capacity_of(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Keys that there is room for in each sequence of a cache; -1: of what is no cache."""
    try:
        keys: int = k_cache.shape[1]
        return keys if page_table is None else keys * page_table.shape[1]
    except NO_TENSOR:  # describing says what is not right
        return -1


def caches_of(tensors: Sequence[Tensor]) -> list[int]:
    """Which of the tensors of a call on contiguous caches have a length: keys and values, and
    scales of each token."""
    lengths = tensors[1].shape[:3]
    return [1, 2, *(n for n, x in enumerate(tensors) if n > 2 and x.shape == lengths)]


def pattern_of(tensors: Sequence[Tensor]) -> Any:
    """The pattern of calls that differ in the length of their caches alone; None: they are not
    contiguous caches of one length.

    tensors   q, k_cache, v_cache and the optional ones, none of them a page table
    """
    try:
        if len(tensors[1].shape) != 4 or tensors[1].shape[:3] != tensors[2].shape[:3]:
            return None
        grow = caches_of(tensors)
        if len(grow) > 2 and tensors[1].shape[1] == 1:  # a single scale may be the tensor's
            return None
        return tuple(
            (_with_free_length(layout(x)), x.requires_grad) if n in grow else layout(x)
            for n, x in enumerate(tensors)
        )
    except NO_TENSOR:  # describing says what is not right
        return None


def _with_free_length(of: Any) -> Any:
    shape, strides = of[:2]
    return (shape[0], shape[2:]), (strides[1], strides[3:]), of[2:]


def check_of_any_length(tensors: Sequence[Tensor]) -> Check | None:
    """A check for tensors like these, but for the length of caches and the strides that follow from
    it; None where torch has none."""
    grow = caches_of(tensors)
    check = check_of(tensors, any_length=grow)
    if check is None:
        return None
    k, *others = grow
    scales, least = others[1:], 2 if others[1:] else 1

    def fits(*tensors: Any) -> bool:
        if not check(*tensors):
            return False
        length: int = tensors[k].shape[1]
        for n in others:
            if tensors[n].shape[1] != length:
                return False
        for n in scales:  # kernels have one set of strides for scales of keys and of values
            if tensors[n].stride() != tensors[scales[0]].stride():
                return False
        return length >= least

    return fits if fits(*tensors) else None


class GrowingCall:
    """A launcher of decode for contiguous caches of every length, which differ in nothing else.

    problem, operands  of one of the lengths
    num_splits         that the caller forces, or 0
    plan_for           plan_for(problem, operands): a plan for these operands
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        num_splits: int,
        plan_for: Callable[[Problem, Operands], Plan],
    ) -> None:
        self.problem, self.num_splits, self.plan_for = problem, num_splits, plan_for
        self.types = types_of(operands)
        self.by_token = problem.codec.granularity == "token"
        self.plans: dict[Alignment, Plan] = {}  # of the first length of each
        self.buckets: dict[Bucket, DecodeLauncher] = {}
        self.ahead: dict[Bucket, Plan | DecodeLauncher] = {}  # planned; bound
        self.latest: tuple[CacheLayout | None, Repeat | None] = (None, None)
        self.bound: tuple[CacheLayout | None, Launcher | None] = (None, None)  # to one length

    def repeat(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Result | None:
        """Launches the call as a `Relaunch`, with the same arguments; None where the whole has to
        be called instead."""
        here = self.layout_of(k, v, rest[K_SCALE])
        layout, again = self.latest
        if again is not None and layout == here:
            return again.call(q, k, v, *rest)
        operands = Operands(q, k, v, k_scale=rest[K_SCALE], v_scale=rest[V_SCALE])
        alignment, longest = alignment_of(here, operands), rounded_up(here.length)
        again = self.at_length(here, (alignment, longest), operands)
        if again is None:
            return None
        done = again.call(q, k, v, *rest)
        if done is not None and here.length > longest - AHEAD:
            self.make_ready((alignment, rounded_up(longest + 1)), operands)
        return done

    def __call__(self, operands: Operands) -> Result:
        """(out, lse or None), on the current stream, through Triton where nothing is compiled for
        these operands or somebody observes launches."""
        x = operands
        per_call = x.cache_seqlens, x.page_table, x.sink_logits, x.alibi_slopes
        tensors = x.q, x.k, x.v, x.out, *per_call, x.q_scale, x.k_scale, x.v_scale
        return self.repeat(*tensors, x.softmax_scale, x.softcap) or self.through_triton(x)

    def layout_of(self, k: Tensor, v: Tensor, k_scale: Tensor | None) -> CacheLayout:
        scales = k_scale.stride() if self.by_token and k_scale is not None else None
        return CacheLayout(k.shape[1], k.stride(), v.stride(), scales)

    def through_triton(self, operands: Operands) -> Result:
        """Binds a launcher to this one length, which compiles what it needs, and keeps that."""
        x = operands
        here = self.layout_of(x.k, x.v, x.k_scale)
        layout, launcher = self.bound
        if launcher is not None and layout == here:
            return launcher(x)
        x.seqlen_k = here.length
        alignment = alignment_of(here, x)
        plan = self.planned(rounded_up(here.length), alignment, x)
        made: Any = kernel_named(plan.kernel).bind(plan, x)
        self.bound = here, made
        result: Result = made(x)
        if plan.kernel in GROWS and made.compiled is not None:
            bucket = alignment, plan.problem.seqlen_k
            compiled[self.types, alignment, made.variant()] = made.compiled
            self.buckets[bucket] = made
            self.ahead.pop(bucket, None)
        return result

    def at_length(self, here: CacheLayout, bucket: Bucket, operands: Operands) -> Repeat | None:
        """A launch of compiled kernels for caches of this length; None where there are none."""
        operands.seqlen_k = here.length
        while bucket not in self.buckets and self.make_ready(bucket, operands):
            pass
        launcher = self.buckets.get(bucket)
        if launcher is None:
            return None
        again = launcher.at_length(operands)
        self.latest = here, again
        return again

    def make_ready(self, bucket: Bucket, operands: Operands) -> bool:
        """Takes one of three steps to a launcher for a bucket: plans it, binds it, has it keep
        kernels that were compiled for others and are its own, too. Whether another can follow.

        Of the operands it takes the layout, so that each step may have those of another call.
        """
        alignment, longest = bucket
        made: Any = self.ahead.pop(bucket, None)  # no other thread takes this step meanwhile
        if made is None:
            if alignment not in self.plans or bucket in self.buckets:
                return False
            made = self.planned(longest, alignment, operands)
            more = made.kernel in GROWS
        elif isinstance(made, Plan):
            more = made.kernel in GROWS
            made = kernel_named(made.kernel).bind(made, operands) if more else made
        else:
            more = False
            kernels = compiled.get((self.types, alignment, made.variant()))
            if kernels is not None:
                made.keep(*kernels, operands.q.device)
                self.buckets[bucket] = made
                return False
        self.ahead[bucket] = made
        return more

    def planned(self, longest: int, alignment: Alignment, operands: Operands) -> Plan:
        """The plan of the longest caches of a bucket."""
        x = operands
        known = self.plans.get(alignment)
        if known is not None and not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            plan = plan_at_length(known, longest, self.num_splits)
            return kernel_named(plan.kernel).refit(plan, x) if x.q.is_cuda else plan
        plan = self.plan_for(replace(self.problem, seqlen_k=longest), x)
        if not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            self.plans[alignment] = plan
        return plan


def types_of(operands: Operands) -> Hashable:
    """The types of a call that kernels are compiled for, and the device that they are loaded on."""
    x = operands
    tensors = x.q, x.k, x.v, x.cache_seqlens, x.sink_logits, x.alibi_slopes, x.q_scale, x.k_scale
    types = [None if tensor is None else tensor.dtype for tensor in tensors]
    return x.q.device, *types, bool(x.softcap)


def alignment_of(here: CacheLayout, operands: Operands) -> Alignment:
    """The alignment of strides that kernels are compiled and plans made for."""
    size = operands.k.element_size()
    found = []
    for x in (*here.k[:3], *here.v[:3]):
        found.append(3 * (x >> 31 > 0) + (x == 1) + 2 * (x % 16 == 0))
        found.append(x * size % 16 == 0)  # TMA can describe it
    if here.scales is not None:
        # copied in bulk where they lie in one piece of multiples of 16 bytes
        found += [here.scales[0] % 4 == 0, here.length * here.scales[1] % 4 == 0]
        found.append(max(here.scales) >> 31 > 0)
    return tuple(found)
