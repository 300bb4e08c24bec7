"""Calls whose lengths change: of decode on a cache with a key more in every step, of attention on
one prompt after the other.

A call is known by the layouts of its tensors, so that each length of tensors without a page table
is another kind of call. What a length changes is little: plans are made for buckets of lengths,
kernels take the exact one as a run-time integer, as they do strides, and only the maps of TMA hold
both. So the second time that a call differs from an earlier one in nothing but lengths, it is bound
as a `GrowingCall`, or as `GrowingSequences`, which serves every length from then on. It is found by
a check in which lengths, and the strides that follow from them, are free.

What Triton compiles for strides by value is part of what a bucket is known by: whether they are 1,
multiples of 16, or more than 32 bits hold. So are edges of a mask that no query meets.

What a bucket takes on the host, ten times a new length, is done in the last steps of the bucket
before: its plan in one of them, the binding of a kernel in another, that of `combine` in a third,
the launches in a fourth, each behind the launches of the step itself. A bucket that is entered in
another way takes all of it at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from splitkv.core.masks import Mask
from splitkv.core.plan import Plan
from splitkv.core.problem import Operands, Problem
from splitkv.kernels.host.lengths import CacheLayout, relaunched
from splitkv.kernels.host.sequence_sizes import result_layouts, scale_and_softcap, strides_of
from splitkv.planner.registry import kernel_named, plan_at_length, rounded_up
from splitkv.runtime.call_cache import NO_TENSOR, Check, Launcher, Result, check_of, layout

if TYPE_CHECKING:
    pass

GROWS = "decode_split", "hopper_decode_split"
"""The kernels that take every length of a cache up to that of their plan."""
SEQUENCES_GROW = "hopper_prefill", "hopper_prefill_quantised", "prefill"
"""Those that take every length of whole sequences."""
SEQUENCES_STAY = "hopper_prefill_half", "hopper_prefill_widened"
"""Those that are bound to one length of them; at others of the same call another may be the best.
"""


MAX_KNOWN = 256  # layouts that launches are kept for; past it, the first are forgotten
AHEAD = 8
"""Keys before the end of a bucket from which on the next one is made ready."""
K_SCALE, V_SCALE = 6, 7  # of the arguments of a `Relaunch` behind q, k and v
Alignment = tuple[Any, ...]
"""What kernels are compiled for of strides."""
Bucket = tuple[Alignment, Any]
"""What a plan and its kernels are for: an alignment, and the longest sequences."""


class Ready(NamedTuple):
    """A launcher that only lacks its kernels, and their key in `compiled`."""

    launcher: Any
    key: Hashable


compiled: dict[Hashable, tuple[Any, Any]] = {}
"""What Triton compiled for growing calls, an attention kernel and `combine` or None: by the types
and alignments of what they were given, and by the `variant` of the launcher."""


def capacity_of(k_cache: Tensor, page_table: Tensor | None) -> int:
    """Keys that there is room for in each sequence of a cache; -1: of what is no cache."""
    try:
        keys: int = k_cache.shape[1]
        return keys if page_table is None else keys * page_table.shape[1]
    except NO_TENSOR:  # describing says what is not right
        return -1


def caches_of(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Which of the tensors of a call on contiguous caches have a length, and in which dimension:
    keys and values, and scales of each token."""
    lengths = tensors[1].shape[:3]
    scales = [n for n, x in enumerate(tensors) if n > 2 and x.shape == lengths]
    return dict.fromkeys((1, 2, *scales), 1)


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
        return pattern_with(tensors, grow)
    except NO_TENSOR:  # describing says what is not right
        return None


def pattern_with(tensors: Sequence[Tensor], lengths: Mapping[int, int]) -> Any:
    """The layouts of tensors but for lengths, which some have in a dimension; and whether they
    require a gradient, which a check sees, too."""
    return tuple(
        (_with_free_length(layout(x), lengths[n]) if n in lengths else layout(x), x.requires_grad)
        for n, x in enumerate(tensors)
    )


def _with_free_length(of: Any, dim: int) -> Any:
    shape, strides = of[:2]
    if dim == 0:  # packed
        return shape[1:], (strides[0], strides[2:]), of[2:]
    return (shape[0], shape[2:]), (strides[1], strides[3:]), of[2:]


def check_of_any_length(tensors: Sequence[Tensor]) -> Check | None:
    """A check for tensors like these, but for the length of caches and the strides that follow from
    it; None where torch has none."""
    grow = caches_of(tensors)
    check = check_of(tensors, any_length=grow)
    if check is None:
        return None
    scales = [*grow][2:]

    def caches_fit(*tensors: Any) -> bool:
        return check(*tensors) and tensors[1].shape[1] == tensors[2].shape[1] > 0

    def scales_fit(*tensors: Any) -> bool:
        if not caches_fit(*tensors):
            return False
        length: int = tensors[1].shape[1]
        for n in scales:  # kernels have one set of strides for scales of keys and of values
            same = tensors[n].stride() == tensors[scales[0]].stride()
            if tensors[n].shape[1] != length or not same:
                return False
        return length > 1

    fits = scales_fit if scales else caches_fit
    return fits if fits(*tensors) else None


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
        self.ahead: dict[Bucket, Any] = {}  # plans; launchers; launchers that are Ready
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
            plan = replace(self.planned(bucket, x), problem=problem)
        made: Any = kernel_named(plan.kernel).bind(plan, x)
        keep(self.bound, (here, bucket), made)
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
        """Takes one of four steps to a launcher for a bucket: plans it, binds it, has it say which
        kernels it needs, and keep them where they were compiled for others. Whether another can
        follow.

        Of the operands it takes the layout, so that each step may have those of another call.
        """
        alignment, more = bucket[0], True
        made: Any = self.ahead.pop(bucket, None)  # no other thread takes this step meanwhile
        if made is None:
            if alignment not in self.plans or bucket in self.buckets:
                return False
            made = self.planned(bucket, operands)
            more = made.kernel in self.kernels
        elif isinstance(made, Plan):
            more = made.kernel in self.kernels
            made = kernel_named(made.kernel).bind(made, operands) if more else made
        elif not isinstance(made, Ready):
            made = Ready(made, (self.types, alignment, made.variant()))
        else:
            more, kernels = False, compiled.get(made.key)
            if kernels is not None:
                made.launcher.keep(*kernels, operands)
                self.buckets[bucket] = made.launcher
                return False
        self.ahead[bucket] = made
        return more

    def planned(self, bucket: Bucket, operands: Operands) -> Plan:
        """The plan of the longest sequences of a bucket."""
        (alignment, longest), x = bucket, operands
        known, problem = self.plans.get(alignment), self.problem_of(longest)
        if known is not None and not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            plan = plan_at_length(known, problem, self.num_splits)
            return kernel_named(plan.kernel).refit(plan, x) if x.q.is_cuda else plan
        plan = self.plan_for(problem, x)
        if not (x.k.data_ptr() | x.v.data_ptr()) & 15:
            self.plans[alignment] = plan
        return plan


class GrowingCall(Growing):
    """A launcher of decode for contiguous caches of every length, which differ in nothing else."""

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        num_splits: int,
        plan_for: Callable[[Problem, Operands], Plan],
    ) -> None:
        super().__init__(problem, operands, num_splits, plan_for, GROWS)
        self.by_token = problem.codec.granularity == "token"
        # the layout, what repeats a call, and the launch of its splits
        self.latest: tuple[Any, Callable[..., Result | None], Any] = (None, absent, None)

    def repeat(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Result | None:
        """Launches the call as a `Relaunch`, with the same arguments; None where the whole has to
        be called instead."""
        here = self.layout_of(k, v, rest[K_SCALE])
        layout, call, split = self.latest
        if layout == here:
            return call(q, k, v, *rest, split=split)
        alignment, longest = alignment_of(here, k.element_size()), rounded_up(here.length)
        bucket = alignment, longest
        launcher = self.buckets.get(bucket)
        if launcher is None:
            launcher = self.launcher_of(bucket, of_layout(q, k, v, *rest))
        if launcher is None or launcher.split_at_length is None:
            return None
        split, call = launcher.split_at_length(here), launcher.repeat
        self.latest = here, call, split
        done: Result | None = call(q, k, v, *rest, split=split)
        if done is not None and here.length > longest - AHEAD:
            next_one = alignment, rounded_up(longest + 1)
            self.make_ready(next_one, of_layout(q, k, v, *rest))
        return done

    def __call__(self, operands: Operands) -> Result:
        """(out, lse or None), on the current stream, through Triton where nothing is compiled for
        these operands or somebody observes launches."""
        x = operands
        per_call = x.cache_seqlens, x.page_table, x.sink_logits, x.alibi_slopes
        tensors = x.q, x.k, x.v, x.out, *per_call, x.q_scale, x.k_scale, x.v_scale
        done = self.repeat(*tensors, x.softmax_scale, x.softcap)
        if done is not None:
            return done
        here = self.layout_of(x.k, x.v, x.k_scale)
        x.seqlen_k = here.length
        longest = rounded_up(here.length)
        bucket = alignment_of(here, x.k.element_size()), longest
        return self.through_triton(here, bucket, self.problem_of(longest), x)

    def layout_of(self, k: Tensor, v: Tensor, k_scale: Tensor | None) -> CacheLayout:
        scales = k_scale.stride() if self.by_token and k_scale is not None else None
        return CacheLayout(k.shape[1], k.stride(), v.stride(), scales)

    def problem_of(self, longest: int) -> Problem:
        return replace(self.problem, seqlen_k=longest)


class GrowingSequences(Growing):
    """A launcher of attention for sequences of every length, which differ in nothing else.

    problem, operands  of one of the lengths
    mask               that the caller asked for
    plan_for           plan_for(problem, operands): a plan for these operands
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        mask: Mask,
        plan_for: Callable[[Problem, Operands], Plan],
    ) -> None:
        super().__init__(problem, operands, 0, plan_for, SEQUENCES_GROW)
        self.mask = mask
        self.known: OrderedDict[Any, Any] = OrderedDict()  # layouts, and what launches them
        self.packed, self.return_lse = problem.kind == "varlen", problem.return_lse
        self.latest: tuple[Any, Any] = (None, None)  # the layout, and what launches it

    def __call__(self, operands: Operands) -> Result:
        """(out, lse or None), on the current stream, through Triton where nothing is compiled for
        these operands or somebody observes launches; of packed ones with the greatest lengths."""
        x = operands
        q, k = x.q, x.k
        if not self.packed:
            x.seqlen_q, x.seqlen_k = q.shape[1], k.shape[1]
        assert x.seqlen_q is not None and x.seqlen_k is not None, "lengths of packed sequences"
        here = x.seqlen_q, x.seqlen_k, q.shape, k.shape, q.stride(), k.stride(), x.v.stride()
        layout, again = self.latest
        bucket = None
        if again is None or layout != here:
            again = self.known.get(here)
            if again is not None:
                self.latest = here, again
            else:
                bucket = self.bucket_of(x)
                launcher = None if bucket is None else self.launcher_of(bucket, x)
                again = None if launcher is None else launcher.at_length(x)
                self.latest = here, again
                if again is not None:
                    keep(self.known, here, again)
        if again is not None:
            done = relaunched(again, x, *scale_and_softcap(x))
            if done is not None:
                if bucket is not None:
                    self.look_ahead(layout, bucket, x)
                return done if self.return_lse else (done[0], None)
        exact = x.seqlen_q, x.seqlen_k, self.edges(x.seqlen_q, x.seqlen_k)
        return self.through_triton(here, self.bucket_of(x), self.problem_of(exact), x)

    def look_ahead(self, before: Any, bucket: Bucket, operands: Operands) -> None:
        """Makes a part of the next bucket ready where keys grow by one and this one ends soon."""
        length, (alignment, (queries, keys, edges)) = operands.seqlen_k or 0, bucket
        grown = before is not None and before[:2] == (operands.seqlen_q, length - 1)
        if grown and length > keys - AHEAD:
            self.make_ready((alignment, (queries, rounded_up(keys + 1), edges)), operands)

    def bucket_of(self, operands: Operands) -> Bucket | None:
        """The bucket of a call; None where its layout is in none, or its addresses are no multiples
        of 16: another kernel may be for these, of which later calls are to know nothing."""
        x = operands
        out = 0 if x.out is None else x.out.data_ptr()
        if (x.q.data_ptr() | x.k.data_ptr() | x.v.data_ptr() | out) & 15:
            return None
        alignment = alignment_of_sequences(self.problem, x)
        if alignment is None:
            return None
        queries, keys = x.seqlen_q or 0, x.seqlen_k or 0
        return alignment, (rounded_up(queries), rounded_up(keys), self.edges(queries, keys))

    def edges(self, queries: int, keys: int) -> tuple[bool, bool]:
        """Which edges of the mask no query meets, left and right: see `Mask.within`."""
        return self.mask.window_left >= keys - 1, self.mask.window_right >= queries - 1

    def problem_of(self, longest: tuple[int, int, tuple[bool, bool]]) -> Problem:
        queries, keys, (left, right) = longest
        mask = self.mask.without(left=left, right=right)
        return replace(self.problem, seqlen_q=queries, seqlen_k=keys, mask=mask)


def lengths_of_tensors(packed: bool, paged: bool, out: bool) -> dict[int, int]:
    """Which of the tensors of a call of attention have a length, and in which dimension: q, keys
    and values where they are in no pages, and the output where it is given, the fourth."""
    grow = [0, *(() if paged else (1, 2)), *((3,) if out else ())]
    return dict.fromkeys(grow, 0 if packed else 1)


def pattern_of_sequences(tensors: Sequence[Tensor], lengths: Mapping[int, int]) -> Any:
    """The pattern of calls of attention that differ in lengths alone; None: there is none.

    lengths   of `lengths_of_tensors`
    """
    try:
        dims = 3 if lengths[0] == 0 else 4
        if any(len(tensors[n].shape) != dims for n in lengths):
            return None
        return pattern_with(tensors, lengths)
    except NO_TENSOR:  # describing says what is not right
        return None


def check_of_sequences(tensors: Sequence[Tensor], lengths: Mapping[int, int]) -> Check | None:
    """A check for tensors like these, but for lengths and the strides that follow from them; None
    where torch has none.

    lengths   of `lengths_of_tensors`; the output has to be contiguous
    """
    check = check_of(tensors, any_length=lengths)
    if check is None:
        return None
    dim, of_keys, of_out = lengths[0], 1 in lengths, 3 in lengths

    def fits(*tensors: Any) -> bool:
        if not check(*tensors):
            return False
        q = tensors[0]
        if not q.shape[dim]:
            return False
        if of_keys:
            keys = tensors[1].shape[dim]
            if not keys or tensors[2].shape[dim] != keys:
                return False
        if not of_out:
            return True
        out = tensors[3]
        return bool(out.shape[dim] == q.shape[dim] and out.is_contiguous())

    return fits if fits(*tensors) else None


def keep(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Keeps a value in the place of the first where there are many: to forget all of them at once
    takes as long as a hundred calls."""
    while len(known) >= MAX_KNOWN:
        known.popitem(last=False)
    known[key] = value


def types_of(operands: Operands) -> Hashable:
    """The types of a call that kernels are compiled for, and the device that they are loaded on."""
    x = operands
    tensors = x.q, x.k, x.v, x.cache_seqlens, x.sink_logits, x.alibi_slopes, x.q_scale, x.k_scale
    types = [None if tensor is None else tensor.dtype for tensor in tensors]
    present = [y is not None for y in (x.page_table, x.cu_seqlens_q, x.cu_seqlens_k)]
    return x.q.device, (*types, *present), bool(x.softcap)


def alignment_of(here: CacheLayout, element_size: int) -> Alignment:
    """The alignment of strides that kernels are compiled and plans made for."""
    k, v, scales = here.k, here.v, here.scales
    every = k[0] | k[1] | k[2] | v[0] | v[1] | v[2]
    if not every & 15 and every < 1 << 31:
        alignment = EVERY_ONE
    else:
        strides = *k[:3], *v[:3]  # TMA can describe multiples of 16 bytes
        alignment = (*((_alignment(x), x * element_size % 16 == 0) for x in strides),)
    if scales is None:
        return alignment
    # copied in bulk where they lie in one piece of multiples of 16 bytes
    in_bulk = scales[0] % 4 == 0, here.length * scales[1] % 4 == 0
    return alignment, in_bulk, max(scales) >> 31 > 0


def of_layout(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Operands:
    """Operands of the length of these caches to plan for and to bind, without the other tensors,
    which change no layout; rest: as of `GrowingCall.repeat`."""
    operands = Operands(q, k, v, k_scale=rest[K_SCALE], v_scale=rest[V_SCALE])
    operands.seqlen_k = k.shape[1]
    return operands


def absent(*_: Any, **__: Any) -> None:
    """Repeats no call: the first length is yet to come."""


def _alignment(stride: int) -> int:
    """A number for each kind of stride that Triton compiles for."""
    return 3 * (stride >> 31 > 0) + (stride == 1) + 2 * (stride % 16 == 0)


def alignment_of_sequences(problem: Problem, operands: Operands) -> Alignment | None:
    """Finds the alignment of strides of a call of attention and its output; None where offsets
    inside a tile of keys may need more than 32 bits."""
    x = operands
    outer = inner = 0
    for strides in (x.q.stride(), x.k.stride(), x.v.stride()):
        if len(strides) == 4:
            outer |= strides[0]
        inner |= strides[-3]
        outer |= strides[-2]
    row = problem.num_heads * problem.head_dim_v
    if not (outer | inner | row | problem.head_dim_v) & 15:
        out = row * x.q.shape[-3]  # of a sequence, or of all
        if inner < NEAR and outer < FAR and out < FAR:
            return EVERY_ONE
    return _alignment_by_stride(problem, x)


NEAR, FAR = 1 << 22, 1 << 30
"""Strides of tokens and others with which offsets inside a tile have 32 bits."""
MOST_KEYS = 128
"""Keys of a tile, at most."""
EVERY_ONE: Alignment = ("multiples of 16",)


def _alignment_by_stride(problem: Problem, operands: Operands) -> Alignment | None:
    x, found = operands, []
    for tensor in (x.q, x.k, x.v):
        size, strides = tensor.element_size(), strides_of(tensor)
        for stride in strides:
            found += [_alignment(stride), stride * size % 16 == 0]
    for tensor in (x.k, x.v):
        if MOST_KEYS * tensor.stride(-3) + tensor.stride(-2) >= 1 << 31:
            return None
    found += [_alignment(stride) for stride in result_layouts(problem, x).out_strides]
    return tuple(found)
